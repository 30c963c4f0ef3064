//! The lives of a node: how an old copy of its directory is told from the directory.
//!
//! A backup of a directory, or an image of its disk, that is put back has forgotten what the node promised
//! since: the votes it gave and the bytes it acknowledged. Nothing in it says so. So the managers keep what they
//! heard last ([`Life`]), the node tells them of another one at each start and every so often while
//! it runs, and what does not follow on it is refused (docs/decisions/0011).

use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use milpa_types::{Life, NodeId};
use milpa_wire::manager::ManagerRequest;
use tokio::task::JoinHandle;

use crate::jobs;
use crate::managers::{Managers, ManagersError};
use crate::node_directory::NodeDirectory;

/// One attempt to tell the managers.
const RENEWAL_WAIT: Duration = Duration::from_secs(10);

/// A node that runs, and the life it is in.
pub struct Living {
    directory: Arc<Mutex<NodeDirectory>>,
    incarnation: u128,
    node: NodeId,
    life: Rc<Cell<Life>>,
}

impl Living {
    /// `life` is what a registration says; it is kept up to date.
    #[must_use]
    pub fn new(directory: NodeDirectory, node: NodeId, life: Rc<Cell<Life>>) -> Living {
        let incarnation = directory.incarnation();
        Living { directory: Arc::new(Mutex::new(directory)), incarnation, node, life }
    }

    /// Tells the managers of another life, so often. Ends when they refuse it: a newer directory of this
    /// node is in use somewhere, or the node was removed.
    pub async fn renew_for_ever(self, managers: &Managers, every: Duration) -> ManagersError {
        loop {
            tokio::time::sleep(every).await;
            let life = match self.written(NodeDirectory::begin_life).await {
                Ok(Ok(life)) => life,
                Ok(Err(error)) => {
                    tracing::warn!(%error, "another life of the node cannot begin");
                    continue;
                }
                Err(_) => continue,
            };
            self.life.set(life);
            let (node, incarnation) = (self.node, self.incarnation);
            let request = ManagerRequest::RenewLife { node, incarnation, life };
            match managers.call(&request, RENEWAL_WAIT).await {
                Ok(_) => drop(self.written(NodeDirectory::life_has_begun).await),
                Err(error @ (ManagersError::Answered(_) | ManagersError::Refused { .. })) => {
                    return error;
                }
                Err(error) => tracing::debug!(%error, "no manager hears of another life"),
            }
        }
    }

    /// Does what writes to the directory: the disk may take its time.
    fn written<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut NodeDirectory) -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let directory = Arc::clone(&self.directory);
        jobs::run("life", move || {
            job(&mut directory.lock().unwrap_or_else(PoisonError::into_inner))
        })
    }
}
