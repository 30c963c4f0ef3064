//! What a file operation can fail with, and the errno that a program sees.

use std::time::Duration;

use milpa_types::{DataError, MetaError, NameError};

/// Failure of a file operation. Its text is for the log; programs get [`errno`](FsError::errno).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FsError {
    /// A meta node answered so.
    #[error("metadata: {0}")]
    Meta(#[from] MetaError),
    /// The data nodes answered so.
    #[error("data: {0}")]
    Data(#[from] DataError),
    /// Nothing came of it until the deadline. For a change, it may or may not have happened.
    #[error("{operation} was given up after {} ms; last: {last}", waited.as_millis())]
    TimedOut {
        /// What was tried.
        operation: &'static str,
        /// For how long.
        waited: Duration,
        /// What went wrong last, and with whom.
        last: String,
    },
    /// The inode is gone, or our session expired since the handle was opened.
    #[error("stale file handle: {0}")]
    Stale(&'static str),
    /// Bytes that were written and acknowledged could not be saved, and are no part of the file.
    #[error("written bytes are lost: {0}")]
    Lost(Box<FsError>),
    /// No such handle, or it was not opened for this.
    #[error("bad file handle")]
    BadHandle,
    /// Arguments that make no sense.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// Beyond the largest file.
    #[error("file too large")]
    TooLarge,
    /// A name that is none.
    #[error("{0}")]
    Name(#[from] NameError),
    /// Too many symbolic links on a path.
    #[error("too many symbolic links")]
    LinkLoop,
    /// This build cannot do it: a layout of a newer one, or an operation that comes later.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// A server answered with something that does not fit the question, or bytes that no replica
    /// holds undamaged.
    #[error("broken answer: {0}")]
    Broken(&'static str),
    /// The client was shut down.
    #[error("the client was shut down")]
    ShutDown,
}

impl FsError {
    /// The errno of Linux that a program sees.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            FsError::Meta(error) => error.errno(),
            FsError::Data(error) => error.errno(),
            FsError::TimedOut { .. }
            | FsError::Lost(_)
            | FsError::Broken(_)
            | FsError::ShutDown => libc::EIO,
            FsError::Stale(_) => libc::ESTALE,
            FsError::BadHandle => libc::EBADF,
            FsError::Invalid(_) => libc::EINVAL,
            FsError::TooLarge => libc::EFBIG,
            FsError::Name(NameError::TooLong(_)) => libc::ENAMETOOLONG,
            FsError::Name(NameError::Invalid) => libc::EINVAL,
            FsError::LinkLoop => libc::ELOOP,
            FsError::Unsupported(_) => libc::EOPNOTSUPP,
        }
    }

    /// Whether the operation found no such name or inode.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, FsError::Meta(MetaError::NotFound))
    }

    /// An inode that an operation by id does not find was deleted by somebody: a stale handle.
    pub(crate) fn by_inode(self) -> FsError {
        match self {
            FsError::Meta(MetaError::NotFound | MetaError::Stale) => {
                FsError::Stale("the inode was deleted")
            }
            other => other,
        }
    }

    /// Whether sending the same bytes again later may succeed. What may not is dropped from the
    /// buffer, or it would be stuck there for ever.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, FsError::TimedOut { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_table() {
        for (error, errno) in [
            (FsError::Meta(MetaError::NotFound), libc::ENOENT),
            (FsError::Meta(MetaError::NotFound).by_inode(), libc::ESTALE),
            (FsError::Data(DataError::NoSpace), libc::ENOSPC),
            (FsError::Name(NameError::TooLong(256)), libc::ENAMETOOLONG),
            (FsError::BadHandle, libc::EBADF),
        ] {
            assert_eq!(error.errno(), errno, "{error}");
        }
    }
}
