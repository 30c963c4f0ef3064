//! The operations, by inode and handle.

use std::sync::Arc;

use bytes::Bytes;
use milpa_types::{AttributeChanges, Attributes, FileKind, InodeId, Name};

use crate::config::{ClientConfig, ConnectError};
use crate::error::FsError;
use crate::handle::{
    Creation, DirectoryPage, FileLocation, HandleId, OpenFile, OpenFlags, Statfs, Timeouts,
};
use crate::transport::Transport;

/// A volume, ready for use. Cheap to clone; all methods may be called from many tasks at once.
#[derive(Clone)]
pub struct Client {}

const SOON: FsError = FsError::Unsupported("comes soon");

#[allow(clippy::unused_async, unused_variables)] // bodies follow within the hour
impl Client {
    /// Finds the volume and makes ready. Nothing is locked or written by this.
    ///
    /// # Errors
    ///
    /// [`ConnectError`]: one line that says what to do.
    pub async fn connect(config: ClientConfig) -> Result<Client, ConnectError> {
        Err(ConnectError::Config(vec![]))
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
        Err(ConnectError::Config(vec![]))
    }

    /// Sends and publishes everything that is buffered, and ends the session. Later operations
    /// fail.
    ///
    /// # Errors
    ///
    /// The first failure; everything is tried all the same.
    pub async fn shutdown(&self) -> Result<(), FsError> {
        Err(SOON)
    }

    /// How long the kernel may keep names and attributes.
    #[must_use]
    pub fn timeouts(&self) -> Timeouts {
        let second = std::time::Duration::from_secs(1);
        Timeouts { entry: second, negative: second, attributes: second }
    }

    /// What a name names.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `ENOTDIR`.
    pub async fn lookup(&self, parent: InodeId, name: &Name) -> Result<Attributes, FsError> {
        Err(SOON)
    }

    /// Attributes of an inode, what is buffered here included.
    ///
    /// # Errors
    ///
    /// `ESTALE` when it was deleted.
    pub async fn getattr(&self, inode: InodeId) -> Result<Attributes, FsError> {
        Err(SOON)
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
        Err(SOON)
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    ///
    /// `EINVAL` when it is none.
    pub async fn readlink(&self, inode: InodeId) -> Result<Bytes, FsError> {
        Err(SOON)
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
        Err(SOON)
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
        Err(SOON)
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
        Err(SOON)
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
        Err(SOON)
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
        Err(SOON)
    }

    /// Removes a name of something that is not a directory. An inode that is open here lives until
    /// its last handle is released.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `EISDIR`.
    pub async fn unlink(&self, parent: InodeId, name: &Name) -> Result<(), FsError> {
        Err(SOON)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `ENOTDIR`, `ENOTEMPTY`.
    pub async fn rmdir(&self, parent: InodeId, name: &Name) -> Result<(), FsError> {
        Err(SOON)
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
        Err(SOON)
    }

    /// Opens a file. Every open asks the servers whether the content changed (close-to-open).
    ///
    /// # Errors
    ///
    /// `ESTALE`, `EISDIR`.
    pub async fn open(&self, inode: InodeId, flags: OpenFlags) -> Result<OpenFile, FsError> {
        Err(SOON)
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
        Err(SOON)
    }

    /// Writes into the buffer, or for a handle with `sync` to the disks. With `append` the offset
    /// is the file's end. `clear_set_id`: the writer is not privileged (`FUSE_WRITE_KILL_SUIDGID`).
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
        Err(SOON)
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
        Err(SOON)
    }

    /// close(2): sends and publishes what is buffered, without flushing disks, and reports what
    /// failed in the background. Cheap when there is nothing to do.
    ///
    /// # Errors
    ///
    /// What failed since this handle was last told.
    pub async fn flush(&self, handle: HandleId) -> Result<(), FsError> {
        Err(SOON)
    }

    /// fsync(2), or fdatasync(2): returns when all bytes of the file are on the disks of all members
    /// (overwritten ones: of a majority) and its metadata in the synced logs of a majority.
    ///
    /// # Errors
    ///
    /// Whatever kept that from happening, now or in the background since this handle was last told.
    pub async fn fsync(&self, handle: HandleId, datasync: bool) -> Result<(), FsError> {
        Err(SOON)
    }

    /// [`fsync`](Client::fsync) by inode, for a file that may not be open here.
    ///
    /// # Errors
    ///
    /// As [`fsync`](Client::fsync).
    pub async fn fsync_inode(&self, inode: InodeId) -> Result<(), FsError> {
        Err(SOON)
    }

    /// fsync of a directory. Its changes were durable when they were acknowledged.
    ///
    /// # Errors
    ///
    /// None today.
    pub async fn fsyncdir(&self, inode: InodeId) -> Result<(), FsError> {
        Ok(())
    }

    /// The last reference to a handle is gone. What is still buffered is sent and published in the
    /// background.
    ///
    /// # Errors
    ///
    /// `EBADF`.
    pub async fn release(&self, handle: HandleId) -> Result<(), FsError> {
        Err(SOON)
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
        Err(SOON)
    }

    /// Space and inodes of the volume.
    ///
    /// # Errors
    ///
    /// When a partition does not answer.
    pub async fn statfs(&self) -> Result<Statfs, FsError> {
        Err(SOON)
    }

    /// Where a file lies.
    ///
    /// # Errors
    ///
    /// `ESTALE`.
    pub async fn locate(&self, inode: InodeId) -> Result<FileLocation, FsError> {
        Err(SOON)
    }
}
