//! A mounted file system: its threads, and its end.

use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::abi::{InitCompatIn, InitIn, KERNEL_VERSION, Opcode, Plain};
use crate::decode::{Message, split_message};
use crate::dispatch::{Dialect, dispatch};
use crate::filesystem::Filesystem;
use crate::flags::init as bits;
use crate::init::{Config, KernelInfo, Negotiated, answer_newer_major, is_too_old, negotiate};
use crate::interrupt::{Interrupts, lock};
use crate::mount::{self, MountError, MountOptions, MountPoint, Unmount, UnmountError};
use crate::notify::Notifier;
use crate::reply::{Reply, ReplySink};
use crate::transport::{Buffer, Channel, Received};

/// How long the threads may take to notice that the file system is unmounted. They are told at
/// once, so that this passes only when something else keeps it alive.
const END_WAIT: Duration = Duration::from_secs(10);

/// How long an aborting umount2 may take to show before the connection itself is aborted.
const ABORT_WAIT: Duration = Duration::from_secs(1);

/// Mounts `filesystem` on `mount_point` and starts to serve it.
///
/// Returns when the kernel and the file system have agreed on the terms; from then on the mount
/// can be used.
///
/// # Errors
///
/// See [`MountError`]. Nothing stays mounted.
pub fn mount<F: Filesystem>(
    filesystem: Arc<F>,
    mount_point: impl AsRef<Path>,
    options: &MountOptions,
) -> Result<Session, MountError> {
    let (mount_point, device) = mount::mount(mount_point.as_ref(), options)?;
    let channel = Channel::new(device, Arc::new(Interrupts::default()));
    let negotiated = shake_hands(&*filesystem, &channel, options.buffer_bytes)?;
    if let Some(bytes) = options.read_ahead_bytes {
        mount_point.set_read_ahead(bytes);
    }
    let notifier = Notifier::new(Arc::clone(&channel));
    filesystem.ready(&negotiated, notifier.clone());
    let session = Session { mount_point, threads: Arc::default(), notifier, negotiated };
    session.start_threads(filesystem, &channel, options).map_err(MountError::Threads)?;
    Ok(session)
}

/// A mounted file system. Dropping it unmounts: cleanly if nothing is open, else by aborting.
///
/// Do not drop it in a FUSE thread: it waits for those to end. It waits at most some 20 s: a copy
/// of the mount in another mount namespace, where /sys/fs/fuse/connections is not there to abort
/// it, is served on by the threads until that namespace ends (logged as an error).
pub struct Session {
    mount_point: MountPoint,
    threads: Arc<Threads>,
    notifier: Notifier,
    negotiated: Negotiated,
}

/// Counts the threads that serve, so that their end can be waited for.
#[derive(Default)]
struct Threads {
    running: Mutex<usize>,
    ended: Condvar,
    /// Threads that have not finished serving; the one that takes it to 0 calls `destroy`.
    serving: AtomicUsize,
}

impl Session {
    /// The terms of the mount.
    #[must_use]
    pub fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }

    /// Sends notifications to the kernel.
    #[must_use]
    pub fn notifier(&self) -> Notifier {
        self.notifier.clone()
    }

    /// Where it is mounted, canonical.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.mount_point.path()
    }

    /// Waits until the file system is unmounted, by whomever.
    pub fn wait(&self) {
        let mut running = lock(&self.threads.running);
        while *running > 0 {
            running = self.threads.ended.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Unmounts, and waits until all threads have ended (but with [`Unmount::Detach`], which
    /// leaves them to those who have files open; [`wait`](Session::wait) for that).
    ///
    /// # Errors
    ///
    /// After [`UnmountError::Busy`] everything is as before and may be tried again.
    pub fn unmount(&self, how: Unmount) -> Result<(), UnmountError> {
        self.mount_point.unmount(how)?;
        match how {
            Unmount::Detach => return Ok(()),
            Unmount::Abort if !self.has_ended_within(ABORT_WAIT) => self.abort_connection(),
            Unmount::Abort | Unmount::Clean => {}
        }
        if self.has_ended_within(END_WAIT) {
            return Ok(());
        }
        Err(UnmountError::StillReferenced { path: self.path().to_owned() })
    }

    fn has_ended_within(&self, limit: Duration) -> bool {
        let running = lock(&self.threads.running);
        let waited = self.threads.ended.wait_timeout_while(running, limit, |count| *count > 0);
        let (running, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *running == 0
    }

    /// Ends a connection that umount2 could not: a copy in another mount namespace, or no root.
    fn abort_connection(&self) {
        if let Some(connection) = self.mount_point.connection() {
            let path = format!("/sys/fs/fuse/connections/{connection}/abort");
            // Not mounted everywhere; the caller reports what that leaves behind.
            let _ = fs::write(path, "1");
        }
    }

    fn start_threads<F: Filesystem>(
        &self,
        filesystem: Arc<F>,
        channel: &Arc<Channel>,
        options: &MountOptions,
    ) -> io::Result<()> {
        let dialect = Dialect { setxattr_extended: self.negotiated.has(bits::SETXATTR_EXT) };
        // Held until all are started, or one that ends early would be the last and call destroy.
        let _starting = Serving::begin(&self.threads, &filesystem);
        for index in 0..options.threads {
            let channel = channel_of_thread(channel, index);
            let out_of_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
            let buffer = Buffer::new(self.negotiated.max_write).ok_or_else(out_of_memory)?;
            let serving = Serving::begin(&self.threads, &filesystem);
            std::thread::Builder::new()
                .name(format!("milpa-fuse-{index}"))
                .spawn(move || serving.serve(dialect, channel, buffer))?;
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let result = match self.unmount(Unmount::Clean) {
            Err(UnmountError::Busy { .. } | UnmountError::StillReferenced { .. }) => {
                self.unmount(Unmount::Abort)
            }
            result => result,
        };
        if let Err(error) = result {
            tracing::error!(path = %self.path().display(), %error, "unmount at the end failed");
        }
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Session")
            .field("path", &self.path())
            .field("negotiated", &self.negotiated)
            .finish_non_exhaustive()
    }
}

/// A descriptor of the thread's own, or the shared one where the kernel has no clone.
fn channel_of_thread(first: &Arc<Channel>, index: usize) -> Arc<Channel> {
    if index == 0 {
        return Arc::clone(first);
    }
    first.try_clone().unwrap_or_else(|error| {
        tracing::debug!(%error, "FUSE descriptor cannot be cloned, threads share one");
        Arc::clone(first)
    })
}

/// One thread's share in the session; its end is the thread's end.
struct Serving<F: Filesystem> {
    threads: Arc<Threads>,
    /// `None` only while dropping.
    filesystem: Option<Arc<F>>,
}

impl<F: Filesystem> Serving<F> {
    fn begin(threads: &Arc<Threads>, filesystem: &Arc<F>) -> Serving<F> {
        *lock(&threads.running) += 1;
        threads.serving.fetch_add(1, Ordering::AcqRel);
        Serving { threads: Arc::clone(threads), filesystem: Some(Arc::clone(filesystem)) }
    }

    /// Reads and dispatches until the file system is unmounted.
    fn serve(self, dialect: Dialect, channel: Arc<Channel>, mut buffer: Buffer) {
        let Some(filesystem) = self.filesystem.as_deref() else { return };
        let sink: Arc<dyn ReplySink> = channel.clone();
        loop {
            let space = buffer.space();
            let length = match channel.receive(space) {
                Ok(Received::Message(length)) => length,
                Ok(Received::Ended) => return,
                Err(error) => {
                    tracing::error!(%error, "FUSE device failed, one thread less serves");
                    return;
                }
            };
            let message = space.get(..length).unwrap_or_default();
            let serve = || dispatch(filesystem, dialect, &sink, message);
            // Unwinding drops the reply handle, which answers EIO.
            if catch_unwind(AssertUnwindSafe(serve)).is_err() {
                tracing::error!("file system panicked in a request");
            }
        }
    }
}

impl<F: Filesystem> Drop for Serving<F> {
    fn drop(&mut self) {
        let filesystem = self.filesystem.take();
        if self.threads.serving.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(filesystem) = &filesystem
            && catch_unwind(AssertUnwindSafe(|| filesystem.destroy())).is_err()
        {
            tracing::error!("file system panicked in destroy");
        }
        // Before the count: who waits for the end finds the file system free.
        drop(filesystem);
        *lock(&self.threads.running) -= 1;
        self.threads.ended.notify_all();
    }
}

/// Answers INIT. No other request comes before it.
fn shake_hands<F: Filesystem>(
    filesystem: &F,
    channel: &Arc<Channel>,
    buffer_bytes: u32,
) -> Result<Negotiated, MountError> {
    let mut buffer = Buffer::new(0)
        .ok_or_else(|| MountError::Handshake(io::Error::from(io::ErrorKind::OutOfMemory)))?;
    loop {
        let space = buffer.space();
        let length = match channel.receive(space).map_err(MountError::Handshake)? {
            Received::Message(length) => length,
            Received::Ended => {
                let ended = io::Error::from_raw_os_error(libc::ENODEV);
                return Err(MountError::Handshake(ended));
            }
        };
        let message = split_message(space.get(..length).unwrap_or_default());
        let message = message.map_err(|error| invalid(&format!("{error:?}")))?;
        if let Some(negotiated) = answer_init(filesystem, channel, message, buffer_bytes)? {
            return Ok(negotiated);
        }
    }
}

fn invalid(what: &str) -> MountError {
    MountError::Handshake(io::Error::new(io::ErrorKind::InvalidData, what.to_owned()))
}

/// `None` when the kernel will ask again in our version.
fn answer_init<F: Filesystem>(
    filesystem: &F,
    channel: &Arc<Channel>,
    mut message: Message<'_>,
    buffer_bytes: u32,
) -> Result<Option<Negotiated>, MountError> {
    let sink: Arc<dyn ReplySink> = channel.clone();
    let reply = Reply::new(message.request.unique, sink);
    let raw = match message.body.take::<InitIn>() {
        Ok(raw) if message.opcode == Opcode::Init.code() => raw,
        // Before 7.36 the kernel sends the first 16 bytes only.
        _ if message.opcode == Opcode::Init.code() => short_init(&mut message)?,
        _ => return Err(invalid("first request is not INIT")),
    };
    let kernel = KernelInfo::from_wire(&raw);
    if is_too_old(&kernel) {
        reply.error(libc::EPROTO);
        return Err(MountError::KernelTooOld { major: kernel.major, minor: kernel.minor });
    }
    if kernel.major > KERNEL_VERSION {
        reply.success(answer_newer_major().as_bytes());
        return Ok(None);
    }
    let mut config = Config::default();
    if let Err(errno) = filesystem.init(&kernel, &mut config) {
        reply.error(errno);
        return Err(MountError::InitRefused(io::Error::from_raw_os_error(errno)));
    }
    let (answer, negotiated) = negotiate(&kernel, &config, buffer_bytes);
    if !reply.success(answer.as_bytes()).is_delivered() {
        return Err(invalid("kernel refused the answer to INIT"));
    }
    Ok(Some(negotiated))
}

fn short_init(message: &mut Message<'_>) -> Result<InitIn, MountError> {
    let raw: InitCompatIn = message.body.take().map_err(|error| invalid(error.0))?;
    let InitCompatIn { major, minor, max_readahead, flags } = raw;
    Ok(InitIn { major, minor, max_readahead, flags, ..InitIn::default() })
}
