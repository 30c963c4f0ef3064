//! Files in use: one state for each inode that is open here, shared by all its handles.
//!
//! Two locks. `shared` guards what is known of the file; it is never held over an await. `io`
//! orders what goes to the servers: one push, publish or truncation of a file at a time. Reads take
//! `shared` only, for a moment.

pub(crate) mod budget;
pub(crate) mod content;
mod failures;
mod lost;
pub(crate) mod open;
pub(crate) mod pages;
mod push;
mod read;
mod staleness;
pub(crate) mod sync;
mod truncate;
mod turn;
pub(crate) mod under_way;
pub(crate) mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use milpa_types::{InodeId, SessionId};
use milpa_wire::meta::Publish;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::core::lock;
use crate::data::append::OpenExtent;
use crate::error::FsError;
use crate::handle::{HandleId, OpenFlags};
use crate::session::Ticket;
use crate::stats::Stats;
use content::Content;
use failures::{Before, Failures, Listener};

/// A file in use.
pub(crate) struct FileState {
    pub inode: InodeId,
    /// Orders pushes, publishes and truncations: [`Inner::turn`](crate::inner::Inner::turn).
    io: Arc<tokio::sync::Mutex<Io>>,
    shared: Mutex<Shared>,
    /// A truncation has ended.
    truncated: tokio::sync::Notify,
}

/// What a push goes on with.
#[derive(Default)]
pub(crate) struct Io {
    /// The extent that is appended to, and the session that opened it.
    extent: Option<(OpenExtent, SessionId)>,
    /// The file has a small piece by this state: what comes next gets an extent of its own.
    has_piece: bool,
}

/// What is known of a file.
pub(crate) struct Shared {
    pub content: Content,
    /// The one publish that may have been applied.
    in_doubt: Option<InDoubt>,
    /// When the oldest byte that is not published was written.
    dirty_since: Option<Instant>,
    /// One past the last written byte, and how long the writing has been sequential.
    sequential: (u64, u64),
    /// A push is under way in the background.
    is_pushing: bool,
    /// A settle in the background is under way, or waits for its turn.
    is_settling: bool,
    /// A truncation is on its way: nothing is written meanwhile, as nobody can tell what of that it cuts.
    is_truncating: bool,
    /// Counts what servers have taken.
    progress: u64,
    failures: Failures,
    /// Open handles.
    handles: u32,
    /// It was unlinked here while open: the servers keep it until we let go.
    held: bool,
    /// The session in which its handles were opened; writes of an older one are refused.
    generation: u64,
    /// When it was last closed.
    idle_since: Option<Instant>,
}

/// A publish that may have been applied, and whose answer never came. Until it is known, nothing else of the
/// file is changed on the servers: had it been applied, others may have replaced what it published since, and
/// these bytes are being freed. As a new request it would bring them back, in the place of others'.
struct InDoubt {
    publish: Publish,
    /// Under which it goes again, and is applied once.
    ticket: Ticket,
}

impl FileState {
    fn new(content: Content, generation: u64) -> FileState {
        let shared = Shared {
            content,
            in_doubt: None,
            dirty_since: None,
            sequential: (0, 0),
            is_pushing: false,
            is_settling: false,
            is_truncating: false,
            progress: 0,
            failures: Failures::default(),
            handles: 0,
            held: false,
            generation,
            idle_since: None,
        };
        let inode = shared.content.attributes.inode;
        FileState {
            inode,
            io: Arc::default(),
            shared: Mutex::new(shared),
            truncated: tokio::sync::Notify::new(),
        }
    }

    pub(crate) fn shared(&self) -> MutexGuard<'_, Shared> {
        lock(&self.shared)
    }

    /// Whether a publish may have been applied.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.shared().in_doubt.is_some()
    }

    /// Whether somebody has a handle.
    pub(crate) fn is_open(&self) -> bool {
        self.shared().handles > 0
    }
}

impl Shared {
    /// Gives up everything that is not published. Gives how many bytes left the buffer.
    fn discard(&mut self) -> u64 {
        self.in_doubt = None;
        self.content.discard()
    }

    /// Notes that the buffer may have become clean.
    fn settle_age(&mut self) {
        if !self.content.is_dirty() {
            self.dirty_since = None;
        }
    }

    /// All that was written before `then` is part of the file.
    fn published_until(&mut self, then: Instant) {
        self.dirty_since = self.dirty_since.map(|since| since.max(then));
    }

    /// Whether bytes have waited for longer than `age` to become part of the file.
    fn is_overdue(&self, age: std::time::Duration) -> bool {
        self.dirty_since.is_some_and(|since| since.elapsed() >= age)
    }
}

/// An open file description.
pub(crate) struct Handle {
    pub file: Arc<FileState>,
    pub flags: OpenFlags,
    /// The session's generation at the open.
    generation: u64,
    listener: Mutex<Listener>,
    /// What the kernel was told to do with the file's pages…
    drop: Option<pages::Drop>,
    /// …and whether it is known to have done it.
    is_dropped: AtomicBool,
}

impl Handle {
    /// What a call that tells failures is to tell.
    fn told<T>(&self, tell: impl FnOnce(&mut Listener, &mut Failures) -> T) -> T {
        let mut shared = self.file.shared();
        tell(&mut lock(&self.listener), &mut shared.failures)
    }

    /// How a sync ends that began then: with its own failure, or with one that was to be told. Neither is
    /// reported again.
    fn synced(&self, began: Before, result: Result<(), FsError>) -> Result<(), FsError> {
        let failure = self.told(|told, failures| told.fsync(failures, began));
        result.and(failure.map_or(Ok(()), Err))
    }
}

/// All files in use and their handles.
pub(crate) struct Files {
    states: Mutex<BTreeMap<InodeId, Arc<FileState>>>,
    /// What is under way. Locked after `states`.
    opening: Mutex<BTreeMap<InodeId, under_way::Opening>>,
    /// Told when a removal is over for which opens wait, or the word that a file may go, for which removals do.
    answered: Notify,
    /// Deleted files that nobody uses here any more, and that the servers keep: they have not heard of it.
    unreleased: Mutex<BTreeSet<InodeId>>,
    handles: Mutex<BTreeMap<HandleId, Arc<Handle>>>,
    /// Files with bytes that are not published.
    dirty: Mutex<BTreeMap<InodeId, Arc<FileState>>>,
    next_handle: AtomicU64,
    stats: &'static Stats,
}

impl Files {
    pub(crate) fn new(stats: &'static Stats) -> Files {
        Files {
            states: Mutex::default(),
            opening: Mutex::default(),
            answered: Notify::new(),
            unreleased: Mutex::default(),
            handles: Mutex::default(),
            dirty: Mutex::default(),
            next_handle: AtomicU64::new(1),
            stats,
        }
    }

    /// The state of a file, if it has one.
    pub(crate) fn get(&self, inode: InodeId) -> Option<Arc<FileState>> {
        lock(&self.states).get(&inode).cloned()
    }

    /// Whether no file has a state or is being opened.
    pub(crate) fn is_empty(&self) -> bool {
        let states = lock(&self.states);
        states.is_empty() && lock(&self.opening).is_empty()
    }

    /// All files with a state.
    pub(crate) fn all(&self) -> Vec<Arc<FileState>> {
        lock(&self.states).values().cloned().collect()
    }

    pub(crate) fn handle(&self, handle: HandleId) -> Result<Arc<Handle>, FsError> {
        lock(&self.handles).get(&handle).cloned().ok_or(FsError::BadHandle)
    }

    /// Counts a handle in, under the table's lock, so that the state cannot go meanwhile. `make`
    /// gives the content of a file that has no state.
    fn attach(
        &self,
        inode: InodeId,
        generation: u64,
        make: impl FnOnce() -> Option<Content>,
    ) -> Option<Arc<FileState>> {
        let mut states = lock(&self.states);
        let file = match states.get(&inode) {
            Some(file) => Arc::clone(file),
            None => {
                let file = Arc::new(FileState::new(make()?, generation));
                states.insert(inode, Arc::clone(&file));
                self.stats.open_files.inc();
                file
            }
        };
        let held = lock(&self.opening).get(&inode).is_some_and(|opening| opening.held);
        let mut shared = file.shared();
        shared.handles += 1;
        shared.held |= held;
        shared.idle_since = None;
        if !shared.content.is_dirty() {
            shared.generation = generation;
        }
        drop(shared);
        Some(file)
    }

    fn next_handle(&self) -> HandleId {
        HandleId(self.next_handle.fetch_add(1, Ordering::Relaxed))
    }

    fn add_handle(
        &self,
        id: HandleId,
        file: Arc<FileState>,
        flags: OpenFlags,
        generation: u64,
        drop: Option<pages::Drop>,
    ) {
        let listener = Mutex::new(file.shared().failures.listener());
        let is_dropped = AtomicBool::new(false);
        let handle = Handle { file, flags, generation, listener, drop, is_dropped };
        lock(&self.handles).insert(id, Arc::new(handle));
    }

    fn remove_handle(&self, handle: HandleId) -> Result<Arc<Handle>, FsError> {
        lock(&self.handles).remove(&handle).ok_or(FsError::BadHandle)
    }

    /// Counts a handle out. True if it was the last.
    fn detach(&self, file: &FileState) -> bool {
        let _states = lock(&self.states);
        let mut shared = file.shared();
        shared.handles = shared.handles.saturating_sub(1);
        if shared.handles == 0 {
            shared.idle_since = Some(Instant::now());
        }
        shared.handles == 0
    }

    /// Removes a file's state if nobody uses it and nothing in it would be lost.
    fn forget(&self, file: &Arc<FileState>) -> bool {
        let mut states = lock(&self.states);
        let shared = file.shared();
        let is_busy = shared.is_pushing || shared.is_settling;
        let in_use = shared.handles > 0 || shared.content.is_dirty() || is_busy;
        drop(shared);
        let same = states.get(&file.inode).is_some_and(|found| Arc::ptr_eq(found, file));
        if in_use || !same {
            return false;
        }
        states.remove(&file.inode);
        self.stats.open_files.dec();
        true
    }

    fn mark_dirty(&self, file: &Arc<FileState>) {
        lock(&self.dirty).insert(file.inode, Arc::clone(file));
    }

    /// Files with bytes written before `age` ago, the oldest first. Clean ones are forgotten.
    pub(crate) fn dirty_for(&self, age: std::time::Duration) -> Vec<Arc<FileState>> {
        let mut dirty = lock(&self.dirty);
        let mut found = Vec::new();
        dirty.retain(|_, file| {
            let shared = file.shared();
            let since = shared.dirty_since;
            let still = since.is_some() || shared.content.is_dirty();
            drop(shared);
            if let Some(since) = since.filter(|since| since.elapsed() >= age) {
                found.push((since, Arc::clone(file)));
            }
            still
        });
        found.sort_by_key(|(since, _)| *since);
        found.into_iter().map(|(_, file)| file).collect()
    }
}
