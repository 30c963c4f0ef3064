//! The name of a dentry.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest name in bytes: `NAME_MAX` of limits.h.
pub const NAME_BYTES_MAX: usize = 255;
/// Longest symlink target in bytes: `PATH_MAX` of limits.h without its NUL.
pub const SYMLINK_BYTES_MAX: usize = 4095;

/// One component of a path: 1 to 255 bytes, neither `/` nor NUL in it, neither `.` nor `..`.
/// Any other bytes go; names need not be UTF-8.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct Name(Box<[u8]>);

/// Why some bytes are not a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// ENAMETOOLONG.
    #[error("name has {0} bytes, at most {NAME_BYTES_MAX} are allowed")]
    TooLong(usize),
    /// EINVAL.
    #[error("name is empty, `.`, `..`, or has a slash or a NUL in it")]
    Invalid,
}

impl Name {
    /// Checks `bytes` and copies them.
    ///
    /// # Errors
    ///
    /// [`NameError`] when they are no name.
    pub fn new(bytes: &[u8]) -> Result<Name, NameError> {
        if bytes.len() > NAME_BYTES_MAX {
            return Err(NameError::TooLong(bytes.len()));
        }
        let reserved = matches!(bytes, b"" | b"." | b"..");
        if reserved || bytes.iter().any(|&b| b == b'/' || b == 0) {
            return Err(NameError::Invalid);
        }
        Ok(Name(bytes.into()))
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl TryFrom<Vec<u8>> for Name {
    type Error = NameError;

    fn try_from(bytes: Vec<u8>) -> Result<Name, NameError> {
        Name::new(&bytes)
    }
}

impl From<Name> for Vec<u8> {
    fn from(name: Name) -> Vec<u8> {
        name.0.into_vec()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        String::from_utf8_lossy(&self.0).fmt(f)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&String::from_utf8_lossy(&self.0), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_table() {
        for good in [&b"a"[..], b"...", b"\xff\xfe", &[b'x'; 255]] {
            assert!(Name::new(good).is_ok(), "{good:?}");
        }
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0"] {
            assert_eq!(Name::new(bad), Err(NameError::Invalid), "{bad:?}");
        }
        assert_eq!(Name::new(&[b'x'; 256]), Err(NameError::TooLong(256)));
    }
}
