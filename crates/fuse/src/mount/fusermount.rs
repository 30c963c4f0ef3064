//! Mounting without root: the setuid program fusermount3 mounts and hands us the device.
//!
//! It finds a socket by the number in `_FUSE_COMMFD` and sends the open `/dev/fuse` over it
//! (SCM_RIGHTS). We give it the socket as its standard input: no descriptor has to be made
//! inheritable, which other threads' children would inherit too.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::{MountError, MountOptions, UnmountError};

/// Found through PATH.
pub(super) const PROGRAM: &str = "fusermount3";

/// Mounts on `path` and returns the device.
pub(super) fn mount(
    program: &str,
    path: &Path,
    options: &MountOptions,
) -> Result<OwnedFd, MountError> {
    let (ours, theirs) = UnixStream::pair().map_err(MountError::Handshake)?;
    let child = Command::new(program)
        .arg("-o")
        .arg(options.fusermount_words())
        .arg("--")
        .arg(path)
        .env("_FUSE_COMMFD", "0")
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| MountError::NoFusermount { program: program.to_owned(), source })?;
    // The command is dropped here and with it our copy of their end, so that receiving ends when
    // the child does.
    let received = receive_descriptor(&ours);
    let output = child.wait_with_output().map_err(MountError::Handshake)?;
    match received {
        Ok(Some(device)) if output.status.success() => Ok(device),
        Ok(_) => Err(MountError::Fusermount { message: message_of(&output) }),
        Err(error) => Err(MountError::Handshake(error)),
    }
}

/// Unmounts `path`.
pub(super) fn unmount(program: &str, path: &Path, is_lazy: bool) -> Result<(), UnmountError> {
    let failed = |source| UnmountError::Failed { path: path.to_owned(), source };
    let flag = if is_lazy { "-uz" } else { "-u" };
    let output = Command::new(program)
        .arg(flag)
        .arg("--")
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let message = message_of(&output);
    // The only place where a text decides: the program has no exit code for it.
    if message.contains("busy") {
        return Err(UnmountError::Busy { path: path.to_owned() });
    }
    Err(failed(io::Error::other(message)))
}

fn message_of(output: &Output) -> String {
    match String::from_utf8_lossy(&output.stderr).trim() {
        "" => format!("no message, {}", output.status),
        text => text.to_owned(),
    }
}

/// Receives one descriptor; `None` when the other end is closed without sending one.
fn receive_descriptor(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0_u8; 1];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: byte.len() };
    // Room for one descriptor, in u64s because the control header wants that alignment.
    let mut control = [0_u64; 8];
    // SAFETY: a msghdr of zeroes is valid: no name, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    loop {
        // SAFETY: `message` points to `part`, `byte` and `control`, which live and are writable.
        let received =
            unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        match received {
            0 => return Ok(None),
            1.. => return Ok(descriptor_in(&message)),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

fn descriptor_in(message: &libc::msghdr) -> Option<OwnedFd> {
    // SAFETY: recvmsg filled `message`; CMSG_FIRSTHDR checks that a whole header is there.
    let header = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    // SAFETY: CMSG_LEN only computes.
    let expected = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as u32) } as usize;
    let is_rights = header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS;
    if !is_rights || (header.cmsg_len as usize) < expected {
        return None;
    }
    // SAFETY: the length says that a descriptor follows the header; it is ours from now on, since
    // the kernel made it for this message.
    Some(unsafe { OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    fn send_descriptor(socket: &UnixStream, descriptor: RawFd) {
        let mut byte = [0_u8; 1];
        let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let mut control = [0_u64; 3];
        // SAFETY: as in `receive_descriptor`; the control buffer has room for one descriptor.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(4) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(descriptor);
            libc::sendmsg(socket.as_raw_fd(), &raw const message, 0)
        };
        assert_eq!(sent, 1);
    }

    #[test]
    fn a_sent_descriptor_arrives_open() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = File::open("/proc/self/stat").unwrap();
        send_descriptor(&theirs, file.as_raw_fd());
        let mut received = File::from(receive_descriptor(&ours).unwrap().unwrap());
        let mut text = String::new();
        received.read_to_string(&mut text).unwrap();
        assert!(!text.is_empty());
    }

    #[test]
    fn a_message_without_descriptor_or_a_closed_socket_give_none() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        io::Write::write_all(&mut &theirs, b"x").unwrap();
        assert!(receive_descriptor(&ours).unwrap().is_none());
        drop(theirs);
        assert!(receive_descriptor(&ours).unwrap().is_none());
    }

    #[test]
    fn what_the_program_says_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("fusermount3");
        fs::write(&program, "#!/bin/sh\necho \"refused: $4\" >&2\nexit 1\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let program = program.to_str().unwrap();
        let error = mount(program, Path::new("/some/where"), &MountOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), "fusermount3 failed: refused: /some/where");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = mount("/no/fusermount3", Path::new("/"), &MountOptions::default()).unwrap_err();
        assert!(matches!(error, MountError::NoFusermount { .. }), "{error}");
    }
}
