//! Making a file, or opening the one that somebody made since the kernel looked.
//!
//! For a file that it believes not to be there the kernel asks for the directory's permission only. One of the
//! caller's own is opened if its owner's bits allow that; whatever else is there the kernel is to look at again
//! and check (ESTALE, which it follows once).

use milpa_client::{Client, Creation, FsError, OpenFile, OpenFlags};
use milpa_types::{Attributes, FileKind, InodeId, MetaError, Name};

/// How often a name is tried that others make and remove meanwhile.
const TRIES_MAX: u32 = 16;

pub(super) async fn create_or_open(
    client: &Client,
    parent: InodeId,
    name: &Name,
    creation: Creation,
    flags: OpenFlags,
) -> Result<OpenFile, FsError> {
    let new = OpenFlags { exclusive: true, ..flags };
    for _ in 0..TRIES_MAX {
        match client.create(parent, name, creation, new).await {
            Err(FsError::Meta(MetaError::Exists)) if !flags.exclusive => {}
            made => return made,
        }
        let found = match client.lookup(parent, name).await {
            Err(error) if error.is_not_found() => continue,
            found => found?,
        };
        if !may_open(&found, creation.uid, flags) {
            break;
        }
        match client.open(found.inode, flags).await {
            Err(FsError::Stale(_)) => {}
            opened => return opened,
        }
    }
    Err(FsError::Stale("it has been made by somebody else"))
}

/// Whether `uid` may open it for sure. Groups and capabilities the kernel knows.
fn may_open(found: &Attributes, uid: u32, flags: OpenFlags) -> bool {
    found.kind == FileKind::File && found.uid == uid && owner_may_open(found.mode, flags)
}

fn owner_may_open(mode: u16, flags: OpenFlags) -> bool {
    let reads = if flags.read { 0o400 } else { 0 };
    let writes = if flags.write || flags.truncate { 0o200 } else { 0 };
    mode & (reads | writes) == reads | writes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_opens_what_his_bits_allow() {
        for (mode, flags, may) in [
            (0o600, libc::O_RDWR, true),
            (0o066, libc::O_RDWR, false),
            (0o200, libc::O_RDWR, false),
            (0o200, libc::O_WRONLY, true),
            (0o400, libc::O_RDONLY, true),
            (0o400, libc::O_RDONLY | libc::O_TRUNC, false),
        ] {
            let allowed = owner_may_open(mode, OpenFlags::from_bits(flags));
            assert_eq!(allowed, may, "{mode:o} {flags:o}");
        }
    }
}
