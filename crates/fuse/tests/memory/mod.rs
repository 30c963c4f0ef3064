//! A small file system in memory, with files that misbehave on purpose.

mod content;
mod names;

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use milpa_fuse::{Attr, Config, Entry, Forget, KernelInfo, Lock, Notifier, ROOT_ID};

/// Long enough that no test sees it pass: what is stale must be invalidated.
pub const TIMEOUT: Duration = Duration::from_secs(3600);

pub struct Node {
    pub attr: Attr,
    pub data: Vec<u8>,
    pub children: BTreeMap<OsString, u64>,
    pub target: OsString,
    pub xattrs: BTreeMap<OsString, Vec<u8>>,
}

/// What happened, for tests to wait for and look at.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A read of the file "blocked" waits for its interrupt.
    ReadBlocks,
    /// It was interrupted and answered.
    ReadInterrupted,
    Destroyed,
}

#[derive(Default)]
pub struct State {
    pub nodes: HashMap<u64, Node>,
    pub lookups: HashMap<u64, u64>,
    pub next: u64,
    pub snapshots: HashMap<u64, Vec<(OsString, u64)>>,
    pub locks: Vec<Lock>,
    pub notifier: Option<Notifier>,
    pub kernel: KernelInfo,
}

pub struct MemoryFs {
    pub state: Mutex<State>,
    pub config: Config,
    pub largest_read: AtomicU32,
    pub largest_write: AtomicU32,
    pub unaligned_writes: AtomicUsize,
    pub readdirplus_calls: AtomicUsize,
    pub refuse_init: AtomicBool,
    /// So many reads to come fail.
    pub failing_reads: AtomicU32,
    sender: Mutex<Sender<Event>>,
    receiver: Mutex<Receiver<Event>>,
}

impl MemoryFs {
    pub fn new(config: Config) -> MemoryFs {
        let (sender, receiver) = channel();
        let memory = MemoryFs {
            state: Mutex::default(),
            config,
            largest_read: AtomicU32::new(0),
            largest_write: AtomicU32::new(0),
            unaligned_writes: AtomicUsize::new(0),
            readdirplus_calls: AtomicUsize::new(0),
            refuse_init: AtomicBool::new(false),
            failing_reads: AtomicU32::new(0),
            sender: Mutex::new(sender),
            receiver: Mutex::new(receiver),
        };
        let mut state = memory.state();
        state.next = ROOT_ID;
        state.new_node(libc::S_IFDIR | 0o755, 0, 0);
        drop(state);
        memory
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        // A test makes a method panic; the state is whole all the same.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn tell(&self, event: Event) {
        // Nobody may listen any more.
        let _ = self.sender.lock().unwrap().send(event);
    }

    pub fn events(&self) -> Sender<Event> {
        self.sender.lock().unwrap().clone()
    }

    /// Waits for the next event.
    pub fn next_event(&self) -> Event {
        let receiver = self.receiver.lock().unwrap();
        receiver.recv_timeout(Duration::from_secs(30)).expect("no event within 30 s")
    }

    pub fn notifier(&self) -> Notifier {
        self.state().notifier.clone().expect("ready was called")
    }
}

impl State {
    pub fn new_node(&mut self, mode: u32, uid: u32, gid: u32) -> u64 {
        let id = self.next;
        self.next += 1;
        let now = SystemTime::now().into();
        let nlink = if mode & libc::S_IFMT == libc::S_IFDIR { 2 } else { 1 };
        let attr = Attr {
            ino: id,
            mode,
            nlink,
            uid,
            gid,
            blksize: 4096,
            atime: now,
            mtime: now,
            ctime: now,
            ..Attr::default()
        };
        let node = Node {
            attr,
            data: Vec::new(),
            children: BTreeMap::new(),
            target: OsString::new(),
            xattrs: BTreeMap::new(),
        };
        self.nodes.insert(id, node);
        id
    }

    /// Makes a file from the server's side, without the kernel.
    pub fn plant(&mut self, parent: u64, name: &str, data: &[u8]) -> u64 {
        let id = self.new_node(libc::S_IFREG | 0o644, 0, 0);
        self.nodes.get_mut(&id).unwrap().set_data(data.to_vec());
        self.nodes.get_mut(&parent).unwrap().children.insert(name.into(), id);
        id
    }

    pub fn child(&self, parent: u64, name: &OsStr) -> Result<u64, i32> {
        let parent = self.nodes.get(&parent).ok_or(libc::ESTALE)?;
        parent.children.get(name).copied().ok_or(libc::ENOENT)
    }

    pub fn node(&mut self, id: u64) -> Result<&mut Node, i32> {
        self.nodes.get_mut(&id).ok_or(libc::ESTALE)
    }

    pub fn entry(&self, id: u64) -> Entry {
        let attr = self.nodes[&id].attr;
        Entry { nodeid: id, generation: 0, entry_timeout: TIMEOUT, attr_timeout: TIMEOUT, attr }
    }

    /// An entry answer was delivered.
    pub fn count_lookup(&mut self, id: u64) {
        *self.lookups.entry(id).or_default() += 1;
    }

    pub fn forget(&mut self, forget: Forget) {
        if let Some(count) = self.lookups.get_mut(&forget.nodeid) {
            *count = count.checked_sub(forget.count).expect("forgets exceed lookups");
            if *count == 0 {
                self.lookups.remove(&forget.nodeid);
            }
        }
    }
}

impl Node {
    pub fn set_data(&mut self, data: Vec<u8>) {
        self.data = data;
        self.resized();
    }

    pub fn resized(&mut self) {
        self.attr.size = self.data.len() as u64;
        self.attr.blocks = self.attr.size.div_ceil(512);
        self.attr.mtime = SystemTime::now().into();
    }
}
