//! The table of mounts, `/proc/self/mountinfo` (proc(5)).

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// One line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MountEntry {
    /// `major:minor` of the file system.
    pub(super) device: String,
    pub(super) mount_point: PathBuf,
    /// Type, such as `fuse.milpa`.
    pub(super) kind: String,
}

/// All mounts of our namespace, the newest last.
pub(super) fn read() -> io::Result<Vec<MountEntry>> {
    let text = fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse_line).collect())
}

/// `36 35 98:0 /root /mount/point rw,noatime optional:1 - ext3 /dev/root rw`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = String::from_utf8_lossy(fields.nth(2)?).into_owned();
    let mount_point = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    Some(MountEntry { device, mount_point, kind: String::from_utf8_lossy(kind).into_owned() })
}

/// Space, tab, newline and backslash are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let digits = tail.first_chunk::<3>().filter(|_| *first == b'\\');
        let octal = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|octal| u8::from_str_radix(octal, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_taken_apart() {
        let line =
            br"36 35 0:98 / /mnt/a\040b\134c rw,noatime master:1 x:2 - fuse.milpa milpa:v rw";
        let expected = MountEntry {
            device: "0:98".to_owned(),
            mount_point: PathBuf::from(r"/mnt/a b\c"),
            kind: "fuse.milpa".to_owned(),
        };
        assert_eq!(parse_line(line), Some(expected));
    }

    #[test]
    fn half_lines_are_skipped() {
        for line in [&b""[..], b"36 35", b"36 35 0:98 / /mnt rw", b"36 35 0:98 / /mnt rw -"] {
            assert_eq!(parse_line(line), None);
        }
        assert_eq!(unescape(br"a\04"), br"a\04");
    }

    #[test]
    fn the_real_table_has_a_root() {
        assert!(read().unwrap().iter().any(|entry| entry.mount_point.as_path() == "/"));
    }
}
