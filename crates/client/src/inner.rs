//! The parts of one client, how it starts and ends, and what it does unasked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use milpa_host::managers::ManagersError;
use milpa_types::{
    Attributes, Durability, FileKind, InodeId, ManagerError, Name, PACKET_BYTES, VolumeView,
};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};

use tokio::sync::Semaphore;

use crate::cache::{Bounded, Timed};
use crate::config::{ClientConfig, ConnectError};
use crate::core::{Chance, Core, Health};
use crate::data::DataClient;
use crate::error::FsError;
use crate::file::Files;
use crate::file::budget::Budget;
use crate::file::open::KeptLayout;
use crate::file::pages::Pages;
use crate::flights::join_all;
use crate::marks::Marks;
use crate::meta::{MetaClient, TRY_WAIT_MAX};
use crate::placement::Placement;
use crate::stats::Stats;
use crate::transport::{Boxed, Transport};
use crate::view::Views;

/// The whole view is fetched this often, for the loads in it.
const VIEW_PERIOD: Duration = Duration::from_secs(10);
/// What was flushed is told to the inodes this often.
const MARKS_PERIOD: Duration = Duration::from_secs(1);
/// A closed file's open extent is kept this long for the next open.
const IDLE_AGE: Duration = Duration::from_secs(10);
/// Files that are settled at once in the background.
const SETTLING_MAX: usize = 32;

/// One client.
pub(crate) struct Inner {
    pub core: Arc<Core>,
    pub meta: MetaClient,
    pub data: DataClient,
    pub budget: Budget,
    pub files: Files,
    /// Attributes by inode.
    pub attributes: Timed<InodeId, Attributes>,
    /// What names name; `None` for a name that was looked for and not there.
    pub names: Timed<(InodeId, Name), Option<(InodeId, FileKind)>>,
    /// The pages that the kernel may have.
    pub pages: Pages,
    /// Content maps of closed files.
    pub layouts: Mutex<Bounded<InodeId, KeptLayout>>,
    /// Bytes on all disks of which their inodes do not know.
    pub marks: Marks,
    /// Directories directly below the root.
    pub tops: Mutex<Bounded<InodeId, ()>>,
    pub placement: Placement,
    /// Bounds how many files are settled in the background at once.
    pub settling: Semaphore,
    /// No new calls.
    is_shut: AtomicBool,
    /// Nothing more to do in the background.
    is_over: AtomicBool,
}

impl Inner {
    /// Asks the managers for the volume and starts what runs in the background.
    pub(crate) async fn connect(
        transport: Arc<dyn Transport>,
        config: ClientConfig,
    ) -> Result<Arc<Inner>, ConnectError> {
        config.validate().map_err(ConnectError::Config)?;
        let view = find_volume(&*transport, &config).await?;
        transport.identified(view.cluster, view.volume.id);
        let entries = config.cache_entries;
        let timeout = config.cache_timeout_here();
        let stats = Stats::shared();
        let core = Arc::new(Core {
            views: Views::new(view),
            health: Health::default(),
            chance: Chance::new(),
            stats,
            runtime: tokio::runtime::Handle::current(),
            transport,
            config,
        });
        let inner = Arc::new(Inner {
            meta: MetaClient::new(Arc::clone(&core)),
            data: DataClient::new(Arc::clone(&core)),
            budget: Budget::new(core.config.buffer_bytes, stats),
            files: Files::new(stats),
            attributes: Timed::new(entries, timeout),
            names: Timed::new(entries, timeout),
            pages: Pages::new(entries),
            layouts: Mutex::new(Bounded::new(entries)),
            marks: Marks::default(),
            tops: Mutex::new(Bounded::new(entries)),
            placement: Placement::default(),
            settling: Semaphore::new(SETTLING_MAX),
            is_shut: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            core,
        });
        let lease = inner.core.config.session_lease;
        let age = inner.core.config.dirty_age_max;
        inner.every(lease / 3, |inner| Box::pin(async move { inner.meta.keep_alive().await }));
        inner.every(age / 5, |inner| Box::pin(async move { inner.sweep() }));
        inner.every(MARKS_PERIOD, |inner| Box::pin(async move { inner.send_marks().await }));
        inner.every(VIEW_PERIOD, |inner| {
            Box::pin(async move {
                inner.core.views.refresh_loads(&*inner.core.transport).await;
            })
        });
        Ok(inner)
    }

    /// Runs `task` again and again, as long as somebody uses the client.
    fn every(
        self: &Arc<Self>,
        period: Duration,
        task: impl Fn(Arc<Inner>) -> Boxed<'static, ()> + Send + 'static,
    ) {
        let weak: Weak<Inner> = Arc::downgrade(self);
        drop(self.core.runtime.spawn(async move {
            loop {
                tokio::time::sleep(period).await;
                let Some(inner) = weak.upgrade() else { return };
                if inner.is_over.load(Ordering::Relaxed) {
                    return;
                }
                task(inner).await;
            }
        }));
    }

    /// Sends and publishes what has waited long enough, and forgets files that nobody has open.
    fn sweep(self: &Arc<Self>) {
        let age = self.core.config.dirty_age_max;
        let waiting = self.files.dirty_for(age);
        if !waiting.is_empty() {
            tracing::debug!(
                files = waiting.len(),
                buffered_bytes = self.budget.used(),
                "writing what has waited"
            );
        }
        for file in &waiting {
            self.settle_in_background(file);
        }
        self.let_go_again();
        self.forget_idle(IDLE_AGE);
    }

    /// Fails once the client was shut down.
    pub(crate) fn check_open(&self) -> Result<(), FsError> {
        if self.is_shut.load(Ordering::Relaxed) { Err(FsError::ShutDown) } else { Ok(()) }
    }

    /// Sends and publishes everything and ends the session.
    pub(crate) async fn shutdown(self: &Arc<Self>) -> Result<(), FsError> {
        self.is_shut.store(true, Ordering::Relaxed);
        let mut result = Ok(());
        let mut files = self.files.all();
        // Others may wait for the numbers of requests that these hold.
        files.sort_by_key(|file| !file.is_in_doubt());
        for files in files.chunks(SETTLING_MAX) {
            let settle = |file: &Arc<crate::file::FileState>| -> Boxed<'_, Result<(), FsError>> {
                let file = Arc::clone(file);
                Box::pin(async move {
                    let mut io = self.turn(&file).await?;
                    let settled = self.settle(&file, &mut io).await;
                    self.drop_extent(&mut io);
                    settled
                })
            };
            let settled = join_all(files.iter().map(settle).collect()).await;
            result = settled.into_iter().fold(result, Result::and);
        }
        // The lease had to live until here.
        self.is_over.store(true, Ordering::Relaxed);
        // A hint to servers, not worth a long wait for dead ones.
        let _ = tokio::time::timeout(TRY_WAIT_MAX, self.send_marks()).await;
        self.meta.close_sessions().await;
        result
    }

    /// Whether the volume's owner wants fsync to reach the disks: always, unless it was asked for
    /// otherwise by `durability = memory`.
    pub(crate) fn flushes_disks(&self) -> bool {
        self.core.views.current().volume.volume.options.durability == Durability::Synced
    }

    /// Files up to this many bytes live in their inode.
    pub(crate) fn inline_bytes_max(&self) -> u64 {
        u64::from(self.core.views.current().volume.volume.options.inline_bytes_max)
    }

    /// Files up to this many bytes share extents.
    pub(crate) fn small_file_bytes_max(&self) -> u64 {
        let options =
            u64::from(self.core.views.current().volume.volume.options.small_file_bytes_max);
        options.min(PACKET_BYTES as u64)
    }
}

async fn find_volume(
    transport: &dyn Transport,
    config: &ClientConfig,
) -> Result<VolumeView, ConnectError> {
    let name = config.volume.clone();
    let request = ManagerRequest::GetVolume { name: name.clone(), known_version: 0 };
    let view = match transport.manager(&request, config.connect_deadline).await {
        Ok(ManagerAnswer::Volume(view)) => *view,
        Ok(_) => {
            let reason = "the answer does not fit the question".to_owned();
            return Err(ConnectError::Failed { volume: name, reason });
        }
        Err(ManagersError::Answered(ManagerError::NoVolume { name })) => {
            return Err(ConnectError::NoVolume { name });
        }
        Err(ManagersError::Refused { address, reason }) => {
            return Err(ConnectError::Refused { address, volume: name, reason });
        }
        Err(error @ ManagersError::Unreachable { .. }) => {
            return Err(ConnectError::Unreachable { reason: error.to_string() });
        }
        Err(error) => {
            return Err(ConnectError::Failed { volume: name, reason: error.to_string() });
        }
    };
    match config.cluster {
        Some(expected) if expected != view.cluster => {
            Err(ConnectError::OtherCluster { found: view.cluster, expected })
        }
        _ => Ok(view),
    }
}
