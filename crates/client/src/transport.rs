//! How requests leave the client: the port, and its real implementation on [`Pool`].
//!
//! A trait, so that tests and the deterministic simulation put the whole client on a network of
//! their own. One box for each call is the price; a call costs a hundred times that.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::managers::{Managers, ManagersError};
use milpa_host::rpc::{CallError, Pool};
use milpa_types::{ClusterId, Role, VolumeId};
use milpa_wire::data::{DataReply, DataRequest};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};
use milpa_wire::meta::{MetaReply, MetaRequest};

/// A future on the heap.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What a call to one data node gives: its reply and the bytes that came with it.
pub type DataCall = Result<(DataReply, Bytes), CallError>;

/// Carries requests to servers. Each call makes one try; retries are the client's business.
///
/// Requests to one address are sent in the order in which their futures were first polled.
pub trait Transport: Send + Sync + 'static {
    /// Asks a meta node.
    fn meta<'a>(
        &'a self,
        to: SocketAddr,
        request: &'a MetaRequest,
        wait: Duration,
    ) -> Boxed<'a, Result<MetaReply, CallError>>;

    /// Asks a data node; `payload` travels with the request.
    fn data<'a>(
        &'a self,
        to: SocketAddr,
        request: &'a DataRequest,
        payload: Bytes,
        wait: Duration,
    ) -> Boxed<'a, DataCall>;

    /// Asks the managers' leader, wherever it is.
    fn manager<'a>(
        &'a self,
        request: &'a ManagerRequest,
        wait: Duration,
    ) -> Boxed<'a, Result<ManagerAnswer, ManagersError>>;

    /// Whether requests to this address go through a manager, as there is no direct way.
    fn is_around(&self, _to: SocketAddr) -> bool {
        false
    }

    /// The cluster and the volume are known now: later handshakes name them.
    fn identified(&self, cluster: ClusterId, volume: VolumeId);
}

/// The real network.
#[derive(Clone, Debug)]
pub struct HostTransport {
    pool: Pool,
    managers: Managers,
}

impl HostTransport {
    /// Over this pool, with the managers at these addresses.
    #[must_use]
    pub fn new(pool: Pool, managers: Vec<SocketAddr>) -> HostTransport {
        let managers = Managers::new(pool.clone(), managers);
        HostTransport { pool, managers }
    }
}

impl Transport for HostTransport {
    fn meta<'a>(
        &'a self,
        to: SocketAddr,
        request: &'a MetaRequest,
        wait: Duration,
    ) -> Boxed<'a, Result<MetaReply, CallError>> {
        Box::pin(async move {
            let called = self.pool.call(to, Role::Meta, request, Bytes::new(), wait).await;
            called.map(|(reply, _)| reply)
        })
    }

    fn data<'a>(
        &'a self,
        to: SocketAddr,
        request: &'a DataRequest,
        payload: Bytes,
        wait: Duration,
    ) -> Boxed<'a, DataCall> {
        Box::pin(self.pool.call(to, Role::Data, request, payload, wait))
    }

    fn manager<'a>(
        &'a self,
        request: &'a ManagerRequest,
        wait: Duration,
    ) -> Boxed<'a, Result<ManagerAnswer, ManagersError>> {
        Box::pin(self.managers.call(request, wait))
    }

    fn is_around(&self, to: SocketAddr) -> bool {
        self.pool.is_around(to)
    }

    fn identified(&self, cluster: ClusterId, volume: VolumeId) {
        self.pool.identity().set_cluster(cluster);
        self.pool.identity().set_volume(volume);
    }
}
