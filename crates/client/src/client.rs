//! The operations, by inode and handle.

use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use milpa_host::rpc::{Credential, Identity, Pool};
use milpa_types::{
    AttributeChanges, Attributes, ClusterId, FileKind, InodeId, Name, NameError, Role,
    SYMLINK_BYTES_MAX, Volume,
};
use tokio::time::Instant;

use crate::call::Call;
use crate::config::{ClientConfig, ConnectError};
use crate::error::FsError;
use crate::file::write::Place;
use crate::handle::{
    Creation, DirectoryPage, FileLocation, HandleId, OpenFile, OpenFlags, Statfs, Timeouts,
};
use crate::inner::Inner;
use crate::names::NewEntry;
use crate::transport::{HostTransport, Transport};

/// A volume, ready for use. Cheap to clone; all methods may be called from many tasks at once.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("volume", &self.inner.core.config.volume).finish()
    }
}

impl Client {
    /// Finds the volume and makes ready. Nothing is locked or written by this.
    ///
    /// # Errors
    ///
    /// [`ConnectError`]: one line that says what to do.
    pub async fn connect(config: ClientConfig) -> Result<Client, ConnectError> {
        let credential =
            Credential::Volume { name: config.volume.clone(), key: config.key.clone() };
        let identity = Arc::new(Identity::new(config.cluster, Role::Client, credential));
        let pool = Pool::around(identity, config.managers.clone());
        let transport = HostTransport::new(pool, config.managers.clone());
        Client::connect_over(Arc::new(transport), config).await
    }

    /// [`connect`](Client::connect) over a network of the caller's: tests and simulation.
    ///
    /// # Errors
    ///
    /// As [`connect`](Client::connect).
    pub async fn connect_over(
        transport: Arc<dyn Transport>,
        config: ClientConfig,
    ) -> Result<Client, ConnectError> {
        Ok(Client { inner: Inner::connect(transport, config).await? })
    }

    /// The volume, with its options as last heard.
    #[must_use]
    pub fn volume(&self) -> Volume {
        self.inner.core.views.current().volume.volume.clone()
    }

    /// The cluster that answered.
    #[must_use]
    pub fn cluster(&self) -> ClusterId {
        self.inner.core.views.current().volume.cluster
    }

    /// Counts and times one operation.
    async fn counted<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T, FsError>>,
    ) -> Result<T, FsError> {
        self.inner.check_open()?;
        let started = Instant::now();
        let result = Call::run(call).await;
        self.inner.core.stats.called(operation, result.is_ok(), started.elapsed());
        if let Err(error) = &result {
            tracing::debug!(operation, %error, errno = error.errno(), "operation failed");
        }
        result
    }

    /// Sends and publishes everything that is buffered, and ends the session. Later operations
    /// fail.
    ///
    /// # Errors
    ///
    /// The first failure; everything is tried all the same.
    pub async fn shutdown(&self) -> Result<(), FsError> {
        Call::run(self.inner.shutdown()).await
    }

    /// How long the kernel may keep names and attributes. That there is no such name it is not to keep at
    /// all: who was told that a file was made expects to find it.
    #[must_use]
    pub fn timeouts(&self) -> Timeouts {
        let config = &self.inner.core.config;
        let timeout = config.cache_timeout.saturating_sub(config.cache_timeout_here());
        Timeouts { entry: timeout, attributes: timeout }
    }

    /// How long this client uses an answer without asking again.
    #[must_use]
    pub fn remembers_for(&self) -> std::time::Duration {
        self.inner.core.config.cache_timeout_here()
    }

    /// The kernel's pages of this inode are not the file's bytes: the next open has them dropped.
    pub fn forget_pages(&self, inode: InodeId) {
        self.inner.pages.forget(inode);
    }

    /// Has `tell` called with each inode whose pages in the kernel have become wrong, and from which byte on: bytes in
    /// them were given up, or others made the file longer. It must not block. Only the first one counts.
    ///
    /// What is asked for after that, and tells the file's size, is for the kernel to know only when it has forgotten
    /// these pages: they have zeros behind the end that was.
    pub fn on_stale_pages(&self, tell: impl Fn(InodeId, u64) + Send + Sync + 'static) {
        self.inner.pages.on_stale(Box::new(tell));
    }

    /// What a name names.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `ENOTDIR`.
    pub async fn lookup(&self, parent: InodeId, name: &Name) -> Result<Attributes, FsError> {
        self.counted("lookup", self.inner.lookup(parent, name)).await
    }

    /// Attributes of an inode, what is buffered here included.
    ///
    /// # Errors
    ///
    /// `ESTALE` when it was deleted.
    pub async fn getattr(&self, inode: InodeId) -> Result<Attributes, FsError> {
        self.counted("getattr", self.inner.getattr(inode)).await
    }

    /// Changes attributes; truncates and extends.
    ///
    /// # Errors
    ///
    /// `ESTALE`, `EFBIG`, `EINVAL`.
    pub async fn setattr(
        &self,
        inode: InodeId,
        changes: AttributeChanges,
    ) -> Result<Attributes, FsError> {
        self.counted("setattr", self.inner.setattr(inode, changes)).await
    }

    /// ftruncate(2): of an open file. Like a write, it is refused when our session expired after the open.
    ///
    /// # Errors
    ///
    /// `EBADF`, `ESTALE`, `EFBIG`.
    pub async fn setattr_through(
        &self,
        handle: HandleId,
        changes: AttributeChanges,
    ) -> Result<Attributes, FsError> {
        self.counted("setattr", self.inner.setattr_through(handle, changes)).await
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    ///
    /// `EINVAL` when it is none.
    pub async fn readlink(&self, inode: InodeId) -> Result<Bytes, FsError> {
        self.counted("readlink", self.inner.readlink(inode)).await
    }

    /// Makes a directory.
    ///
    /// # Errors
    ///
    /// `EEXIST`, `ENOENT`, `ENOTDIR`, `ENOSPC`.
    pub async fn mkdir(
        &self,
        parent: InodeId,
        name: &Name,
        creation: Creation,
    ) -> Result<Attributes, FsError> {
        let new = NewEntry::of(FileKind::Directory, creation);
        self.counted("mkdir", self.inner.make(parent, name, new)).await
    }

    /// Makes a file, pipe, socket or device without opening it.
    ///
    /// # Errors
    ///
    /// As [`mkdir`](Client::mkdir).
    pub async fn mknod(
        &self,
        parent: InodeId,
        name: &Name,
        kind: FileKind,
        device: u32,
        creation: Creation,
    ) -> Result<Attributes, FsError> {
        if matches!(kind, FileKind::Directory | FileKind::Symlink) {
            return Err(FsError::Invalid("directories and links are not made by mknod"));
        }
        let new = NewEntry { device, ..NewEntry::of(kind, creation) };
        self.counted("mknod", self.inner.make(parent, name, new)).await
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    ///
    /// As [`mkdir`](Client::mkdir), and `ENAMETOOLONG` for a target above 4095 bytes.
    pub async fn symlink(
        &self,
        parent: InodeId,
        name: &Name,
        target: &[u8],
        creation: Creation,
    ) -> Result<Attributes, FsError> {
        if target.is_empty() {
            return Err(FsError::Meta(milpa_types::MetaError::NotFound));
        }
        if target.len() > SYMLINK_BYTES_MAX {
            return Err(NameError::TooLong(target.len()).into());
        }
        let mut new = NewEntry::of(FileKind::Symlink, creation);
        new.target = target.to_vec();
        self.counted("symlink", self.inner.make(parent, name, new)).await
    }

    /// Creates a file, or without `flags.exclusive` takes the one that is there, and opens it.
    ///
    /// # Errors
    ///
    /// As [`mkdir`](Client::mkdir), and `EISDIR`.
    pub async fn create(
        &self,
        parent: InodeId,
        name: &Name,
        creation: Creation,
        flags: OpenFlags,
    ) -> Result<OpenFile, FsError> {
        self.counted("create", self.inner.create(parent, name, creation, flags)).await
    }

    /// Gives an inode another name.
    ///
    /// # Errors
    ///
    /// `EEXIST`, `EPERM` for a directory, `EMLINK`.
    pub async fn link(
        &self,
        inode: InodeId,
        parent: InodeId,
        name: &Name,
    ) -> Result<Attributes, FsError> {
        self.counted("link", self.inner.link(inode, parent, name)).await
    }

    /// Removes a name of something that is not a directory. An inode that is open here lives until
    /// its last handle is released.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `EISDIR`.
    pub async fn unlink(&self, parent: InodeId, name: &Name) -> Result<(), FsError> {
        self.counted("unlink", self.inner.unlink(parent, name)).await
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `ENOTDIR`, `ENOTEMPTY`.
    pub async fn rmdir(&self, parent: InodeId, name: &Name) -> Result<(), FsError> {
        self.counted("rmdir", self.inner.rmdir(parent, name)).await
    }

    /// Moves a name; what the target names is replaced, unless `no_replace`.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `EEXIST`, `ENOTEMPTY`, `EISDIR`, `ENOTDIR`, `EINVAL` for a directory below itself.
    pub async fn rename(
        &self,
        source_parent: InodeId,
        source_name: &Name,
        target_parent: InodeId,
        target_name: &Name,
        no_replace: bool,
    ) -> Result<(), FsError> {
        let (source, target) = ((source_parent, source_name), (target_parent, target_name));
        self.counted("rename", self.inner.rename(source, target, no_replace)).await
    }

    /// Opens a file. Every open asks the servers whether the content changed (close-to-open).
    ///
    /// # Errors
    ///
    /// `ESTALE`, `EISDIR`.
    pub async fn open(&self, inode: InodeId, flags: OpenFlags) -> Result<OpenFile, FsError> {
        self.counted("open", self.inner.open(inode, flags)).await
    }

    /// Reads up to `length` bytes; fewer only at the end of the file. Nothing is copied that came
    /// whole from the network or the buffer.
    ///
    /// # Errors
    ///
    /// `EBADF`, `ESTALE`, `EIO`.
    pub async fn read(
        &self,
        handle: HandleId,
        offset: u64,
        length: u32,
    ) -> Result<Vec<Bytes>, FsError> {
        self.counted("read", self.inner.read(handle, offset, length)).await
    }

    /// Writes into the buffer, or for a handle with `sync` to the disks. `clear_set_id`: the writer is
    /// not privileged (`FUSE_WRITE_KILL_SUIDGID`).
    ///
    /// # Errors
    ///
    /// `EBADF`, `ESTALE`, `EFBIG`; `EIO` or `ENOSPC` when the buffer stays full until the deadline.
    pub async fn write(
        &self,
        handle: HandleId,
        offset: u64,
        data: Bytes,
        clear_set_id: bool,
    ) -> Result<(), FsError> {
        let written = self.inner.write(handle, Place::At(offset), data, clear_set_id);
        self.counted("write", written).await.map(drop)
    }

    /// [`write`](Client::write) to the file's end, wherever that is then. Gives where what was written
    /// ends.
    ///
    /// # Errors
    ///
    /// As [`write`](Client::write).
    pub async fn append(
        &self,
        handle: HandleId,
        data: Bytes,
        clear_set_id: bool,
    ) -> Result<u64, FsError> {
        let written = self.inner.write(handle, Place::End, data, clear_set_id);
        self.counted("write", written).await
    }

    /// [`write`](Client::write) of a page of a mapping, which the kernel sends by itself through any handle that
    /// may write: it does not fail for what failed before.
    ///
    /// # Errors
    ///
    /// As [`write`](Client::write).
    pub async fn write_page(
        &self,
        handle: HandleId,
        offset: u64,
        data: Bytes,
        clear_set_id: bool,
    ) -> Result<(), FsError> {
        let written = self.inner.write(handle, Place::Page(offset), data, clear_set_id);
        self.counted("write", written).await.map(drop)
    }

    /// [`write`](Client::write) from a borrowed slice, copied once.
    ///
    /// # Errors
    ///
    /// As [`write`](Client::write).
    pub async fn write_slice(
        &self,
        handle: HandleId,
        offset: u64,
        data: &[u8],
        clear_set_id: bool,
    ) -> Result<(), FsError> {
        let data = Bytes::copy_from_slice(data);
        self.write(handle, offset, data, clear_set_id).await
    }

    /// close(2): sends and publishes what is buffered, without flushing disks, and reports what
    /// failed in the background. Cheap when there is nothing to do.
    ///
    /// # Errors
    ///
    /// What failed since this handle was last told.
    pub async fn flush(&self, handle: HandleId) -> Result<(), FsError> {
        self.counted("flush", self.inner.flush(handle)).await
    }

    /// fsync(2), or fdatasync(2): returns when all bytes of the file are on the disks of all members
    /// (overwritten ones: of a majority) and its metadata in the synced logs of a majority.
    ///
    /// # Errors
    ///
    /// Whatever kept that from happening, now or in the background since this handle was last told.
    pub async fn fsync(&self, handle: HandleId, datasync: bool) -> Result<(), FsError> {
        let operation = if datasync { "fdatasync" } else { "fsync" };
        self.counted(operation, self.inner.fsync(handle)).await
    }

    /// fsync of a directory. Its changes were durable when they were acknowledged.
    ///
    /// # Errors
    ///
    /// None today.
    pub async fn fsyncdir(&self, _inode: InodeId) -> Result<(), FsError> {
        Ok(())
    }

    /// The last reference to a handle is gone. What is still buffered is sent and published in the
    /// background.
    ///
    /// # Errors
    ///
    /// `EBADF`.
    pub async fn release(&self, handle: HandleId) -> Result<(), FsError> {
        self.inner.release(handle)
    }

    /// A page of a directory: names above `after`, at most `limit`. With attributes, also those of
    /// inodes in other partitions.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `ENOTDIR`.
    pub async fn readdir(
        &self,
        parent: InodeId,
        after: Option<Name>,
        limit: u32,
        with_attributes: bool,
    ) -> Result<DirectoryPage, FsError> {
        let page = self.inner.readdir(parent, after, limit, with_attributes);
        self.counted("readdir", page).await
    }

    /// The attributes of an inode that a directory page named, if the name and they are still known to be so: what the
    /// page itself says was so when it was read. For how long that is: [`Client::remembers_for`].
    #[must_use]
    pub fn remembered(&self, parent: InodeId, name: &Name, inode: InodeId) -> Option<Attributes> {
        self.inner.remembered(parent, name, inode)
    }

    /// Space and inodes of the volume.
    ///
    /// # Errors
    ///
    /// When a partition does not answer.
    pub async fn statfs(&self) -> Result<Statfs, FsError> {
        self.counted("statfs", self.inner.statfs()).await
    }

    /// Where a file lies.
    ///
    /// # Errors
    ///
    /// `ESTALE`.
    pub async fn locate(&self, inode: InodeId) -> Result<FileLocation, FsError> {
        self.counted("locate", self.inner.locate(inode)).await
    }
}
