//! Total, bounded reading of what the kernel wrote: no panic, no allocation, no trust.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::abi::{EXT_GROUPS, ExtHeader, InHeader, Plain, SuppGroups};
use crate::request::Request;

/// Longest name or symlink target that the kernel sends (`PATH_MAX` without its NUL).
///
/// Longer ones are answered EINVAL here. A file system has a smaller limit for names (255 for
/// POSIX programs) and answers ENAMETOOLONG above it; the kernel does not check that for it.
pub(crate) const TEXT_BYTES_MAX: usize = 4095;

/// The request does not have the form that its opcode prescribes. It is answered EINVAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

/// Reads a request's body from front to back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(body: &'a [u8]) -> Reader<'a> {
        Reader { rest: body }
    }

    /// The next struct.
    pub(crate) fn take<T: Plain>(&mut self) -> Result<T, Malformed> {
        let value = T::read_prefix(self.rest).ok_or(Malformed("arguments are cut off"))?;
        self.rest = self.rest.get(size_of::<T>()..).unwrap_or_default();
        Ok(value)
    }

    /// The next NUL-terminated text, without its NUL.
    pub(crate) fn text(&mut self) -> Result<&'a OsStr, Malformed> {
        let within = self.rest.get(..=TEXT_BYTES_MAX).unwrap_or(self.rest);
        let end = within.iter().position(|byte| *byte == 0);
        let end = end.ok_or(Malformed("text is too long or lacks its NUL"))?;
        let (text, rest) = self.rest.split_at_checked(end).unwrap_or_default();
        self.rest = rest.get(1..).unwrap_or_default();
        Ok(OsStr::from_bytes(text))
    }

    /// The next name of a directory entry: text that is not empty and has no slash.
    pub(crate) fn name(&mut self) -> Result<&'a OsStr, Malformed> {
        let name = self.text()?;
        if name.is_empty() || name.as_bytes().contains(&b'/') {
            return Err(Malformed("name is empty or has a slash"));
        }
        Ok(name)
    }

    /// Everything that is left, which must be `length` bytes.
    pub(crate) fn data(&mut self, length: u32) -> Result<&'a [u8], Malformed> {
        let data = std::mem::take(&mut self.rest);
        match usize::try_from(length) {
            Ok(length) if length == data.len() => Ok(data),
            _ => Err(Malformed("data has another length than announced")),
        }
    }

    /// How many bytes are left.
    pub(crate) fn remaining(&self) -> usize {
        self.rest.len()
    }
}

/// One message split into its parts.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    pub(crate) request: Request,
    pub(crate) opcode: u32,
    pub(crate) body: Reader<'a>,
}

/// Why a message cannot be served.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MessageError {
    /// There is not even a header, so nobody to answer.
    NoHeader,
    /// The header is there; the request is answered EINVAL.
    Malformed { unique: u64, reason: Malformed },
}

/// Splits what one read from the device returned.
pub(crate) fn split_message(bytes: &[u8]) -> Result<Message<'_>, MessageError> {
    let mut reader = Reader::new(bytes);
    let header: InHeader = reader.take().map_err(|_| MessageError::NoHeader)?;
    let refuse = |reason| MessageError::Malformed { unique: header.unique, reason };
    if usize::try_from(header.len) != Ok(bytes.len()) {
        return Err(refuse(Malformed("message has another length than its header says")));
    }
    let extension_length = usize::from(header.total_extlen) * 8;
    let body_length = reader.remaining().checked_sub(extension_length);
    let body_length = body_length.ok_or(refuse(Malformed("extensions exceed the message")))?;
    let (body, extensions) = reader.rest.split_at_checked(body_length).unwrap_or_default();
    let request = Request {
        unique: header.unique,
        nodeid: header.nodeid,
        uid: header.uid,
        gid: header.gid,
        pid: header.pid,
        supplementary_gid: supplementary_gid(extensions).map_err(refuse)?,
    };
    Ok(Message { request, opcode: header.opcode, body: Reader::new(body) })
}

/// Finds the one group that the kernel sends with creations, among the extensions.
fn supplementary_gid(extensions: &[u8]) -> Result<Option<u32>, Malformed> {
    let mut rest = extensions;
    while !rest.is_empty() {
        let mut reader = Reader::new(rest);
        let header: ExtHeader = reader.take()?;
        let size = usize::try_from(header.size).unwrap_or(usize::MAX);
        if size < size_of::<ExtHeader>() || size > rest.len() {
            return Err(Malformed("extension has an impossible size"));
        }
        if header.kind == EXT_GROUPS {
            let groups: SuppGroups = reader.take()?;
            return first_gid(groups, reader);
        }
        rest = rest.get(size.next_multiple_of(8)..).unwrap_or_default();
    }
    Ok(None)
}

fn first_gid(groups: SuppGroups, reader: Reader<'_>) -> Result<Option<u32>, Malformed> {
    if groups.nr_groups == 0 {
        return Ok(None);
    }
    let bytes = reader.rest.first_chunk::<4>().ok_or(Malformed("group list is cut off"))?;
    Ok(Some(u32::from_ne_bytes(*bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::GetattrIn;

    fn message(header: InHeader, body: &[u8]) -> Vec<u8> {
        let length = size_of::<InHeader>() + body.len();
        let header = InHeader { len: u32::try_from(length).unwrap(), ..header };
        [header.as_bytes(), body].concat()
    }

    #[track_caller]
    fn check_name(body: &[u8], expected: Result<&str, &str>) {
        let actual = Reader::new(body).name();
        match expected {
            Ok(name) => assert_eq!(actual, Ok(OsStr::new(name)), "{body:?}"),
            Err(part) => assert!(actual.is_err_and(|e| e.0.contains(part)), "{body:?}"),
        }
    }

    #[test]
    fn name_table() {
        check_name(b"a\0", Ok("a"));
        check_name(b"ab\0cd\0", Ok("ab"));
        check_name(b"..\0", Ok(".."));
        check_name(b"\0", Err("empty"));
        check_name(b"", Err("NUL"));
        check_name(b"abc", Err("NUL"));
        check_name(b"a/b\0", Err("slash"));
        check_name(&[vec![b'x'; TEXT_BYTES_MAX + 1], vec![0]].concat(), Err("too long"));
        let longest = "x".repeat(TEXT_BYTES_MAX);
        check_name(&[longest.as_bytes(), &[0]].concat(), Ok(&longest));
    }

    #[test]
    fn two_names_follow_each_other() {
        let mut reader = Reader::new(b"from\0to\0");
        assert_eq!(reader.name(), Ok(OsStr::new("from")));
        assert_eq!(reader.name(), Ok(OsStr::new("to")));
        assert_eq!(reader.remaining(), 0);
    }

    #[test]
    fn data_must_have_the_announced_length() {
        assert_eq!(Reader::new(b"abc").data(3), Ok(&b"abc"[..]));
        assert!(Reader::new(b"abc").data(2).is_err());
        assert!(Reader::new(b"abc").data(u32::MAX).is_err());
    }

    #[test]
    fn a_message_of_every_shorter_length_is_refused() {
        let header = InHeader { opcode: 3, unique: 8, nodeid: 1, ..InHeader::default() };
        let whole = message(header, GetattrIn::default().as_bytes());
        for length in 0..whole.len() {
            let error = split_message(&whole[..length]).err();
            match length {
                0..40 => assert_eq!(error, Some(MessageError::NoHeader), "{length}"),
                _ => assert!(
                    matches!(error, Some(MessageError::Malformed { unique: 8, .. })),
                    "{length}"
                ),
            }
        }
        assert!(split_message(&whole).is_ok());
    }

    #[test]
    fn extensions_are_cut_off_and_the_group_is_found() {
        let security = ExtHeader { size: 9, kind: 1 };
        let groups = ExtHeader { size: 16, kind: EXT_GROUPS };
        let mut extensions = [security.as_bytes(), &[0; 8], groups.as_bytes()].concat();
        extensions.extend_from_slice(&1_u32.to_ne_bytes());
        extensions.extend_from_slice(&4_242_u32.to_ne_bytes());
        let header = InHeader { total_extlen: 4, ..InHeader::default() };
        let whole = message(header, &[b"name\0".as_slice(), &extensions].concat());
        let mut split = split_message(&whole).unwrap();
        assert_eq!(split.request.supplementary_gid, Some(4_242));
        assert_eq!(split.body.name(), Ok(OsStr::new("name")));
        assert_eq!(split.body.remaining(), 0);
    }

    #[test]
    fn hostile_extensions_are_refused() {
        for (size, extlen) in [(0, 1), (7, 1), (9, 1), (u32::MAX, 1), (8, 2)] {
            let header = InHeader { total_extlen: extlen, ..InHeader::default() };
            let extension = ExtHeader { size, kind: 1 };
            assert!(split_message(&message(header, extension.as_bytes())).is_err(), "{size}");
        }
    }
}
