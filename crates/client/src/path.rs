//! Paths on top of inodes: for commands, tests and load generators. FUSE needs none of this.
//!
//! Paths are bytes, absolute within the volume; `.` and `..` are resolved textually before anything
//! is looked up, as no command starts in a directory of the volume.

use bytes::Bytes;
use milpa_types::{Attributes, FileKind, InodeId, MetaError, Name};

use crate::client::Client;
use crate::error::FsError;
use crate::handle::{Creation, OpenFlags};

/// Symbolic links followed on one path, as Linux does.
const LINKS_MAX: u32 = 40;
/// One read of a whole-file read.
const READ_BYTES: u32 = 1 << 20;
/// Entries asked for at once.
const PAGE_ENTRIES: u32 = 1024;

/// The components of a path, `.` and `..` resolved.
fn components(path: &[u8]) -> Result<Vec<Name>, FsError> {
    let mut names = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(names.pop()),
            name => names.push(Name::new(name)?),
        }
    }
    Ok(names)
}

impl Client {
    /// The inode that a path names. A symbolic link at its end is followed if `follow`.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `ENOTDIR`, `ELOOP`.
    pub async fn resolve(&self, path: &[u8], follow: bool) -> Result<Attributes, FsError> {
        let mut waiting = components(path)?;
        waiting.reverse();
        let mut walked: Vec<(Name, InodeId)> = Vec::new();
        let mut at = self.getattr(InodeId::ROOT).await?;
        let mut links = 0;
        while let Some(name) = waiting.pop() {
            if at.kind != FileKind::Directory {
                return Err(MetaError::NotDirectory.into());
            }
            let next = self.lookup(at.inode, &name).await?;
            if next.kind != FileKind::Symlink || (waiting.is_empty() && !follow) {
                walked.push((name, next.inode));
                at = next;
                continue;
            }
            links += 1;
            if links > LINKS_MAX {
                return Err(FsError::LinkLoop);
            }
            // Begin again with the link's target in its place.
            let target = self.readlink(next.inode).await?;
            let mut whole = Vec::new();
            if !target.starts_with(b"/") {
                walked.iter().for_each(|(name, _)| join(&mut whole, name.as_bytes()));
            }
            join(&mut whole, &target);
            waiting.iter().rev().for_each(|name| join(&mut whole, name.as_bytes()));
            waiting = components(&whole)?;
            waiting.reverse();
            walked.clear();
            at = self.getattr(InodeId::ROOT).await?;
        }
        Ok(at)
    }

    /// The directory that a path's last component is in, and that component.
    ///
    /// # Errors
    ///
    /// As [`resolve`](Client::resolve); `EINVAL` for the root.
    pub async fn resolve_parent(&self, path: &[u8]) -> Result<(InodeId, Name), FsError> {
        let mut names = components(path)?;
        let last = names.pop().ok_or(FsError::Invalid("the root has no parent"))?;
        let mut parent = Vec::new();
        names.iter().for_each(|name| join(&mut parent, name.as_bytes()));
        Ok((self.resolve(&parent, true).await?.inode, last))
    }

    /// Makes a directory and those above it; existing ones are fine.
    ///
    /// # Errors
    ///
    /// `ENOTDIR`, `ENOSPC`.
    pub async fn make_directories(
        &self,
        path: &[u8],
        creation: Creation,
    ) -> Result<InodeId, FsError> {
        let mut at = InodeId::ROOT;
        for name in components(path)? {
            at = match self.lookup(at, &name).await {
                Ok(found) => found.inode,
                Err(error) if error.is_not_found() => match self.mkdir(at, &name, creation).await {
                    Ok(made) => made.inode,
                    Err(FsError::Meta(MetaError::Exists)) => self.lookup(at, &name).await?.inode,
                    Err(error) => return Err(error),
                },
                Err(error) => return Err(error),
            };
        }
        Ok(at)
    }

    /// Reads a whole file.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `EISDIR`, `EIO`.
    pub async fn read_path(&self, path: &[u8]) -> Result<Vec<u8>, FsError> {
        let inode = self.resolve(path, true).await?.inode;
        let opened = self.open(inode, OpenFlags::read_only()).await?;
        let mut whole = Vec::new();
        let result = loop {
            match self.read(opened.handle, whole.len() as u64, READ_BYTES).await {
                Ok(pieces) if pieces.iter().all(Bytes::is_empty) => break Ok(whole),
                Ok(pieces) => pieces.iter().for_each(|piece| whole.extend_from_slice(piece)),
                Err(error) => break Err(error),
            }
        };
        self.release(opened.handle).await?;
        result
    }

    /// Writes a whole file, creating or replacing it. With `sync` it is on the disks afterwards.
    ///
    /// # Errors
    ///
    /// `ENOENT` for its directory, `EISDIR`, `ENOSPC`, `EIO`.
    pub async fn write_path(
        &self,
        path: &[u8],
        content: Bytes,
        creation: Creation,
        sync: bool,
    ) -> Result<Attributes, FsError> {
        let (parent, name) = self.resolve_parent(path).await?;
        let flags = OpenFlags { truncate: true, ..OpenFlags::read_write() };
        let opened = self.create(parent, &name, creation, flags).await?;
        let mut result = self.write(opened.handle, 0, content, false).await;
        if result.is_ok() {
            result = match sync {
                true => self.fsync(opened.handle, false).await,
                false => self.flush(opened.handle).await,
            };
        }
        self.release(opened.handle).await?;
        result?;
        self.getattr(opened.attributes.inode).await
    }

    /// All names of a directory, with attributes.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `ENOTDIR`.
    pub async fn list(
        &self,
        directory: InodeId,
    ) -> Result<Vec<crate::handle::DirectoryEntry>, FsError> {
        let mut all: Vec<crate::handle::DirectoryEntry> = Vec::new();
        loop {
            let after = all.last().map(|entry| entry.name.clone());
            let page = self.readdir(directory, after, PAGE_ENTRIES, true).await?;
            let stuck = page.entries.is_empty();
            all.extend(page.entries);
            if page.end || stuck {
                return Ok(all);
            }
        }
    }

    /// Removes what a path names, and if it is a directory everything below it.
    ///
    /// # Errors
    ///
    /// The first failure; what was removed before stays removed.
    pub async fn remove_tree(&self, path: &[u8]) -> Result<(), FsError> {
        let (parent, name) = self.resolve_parent(path).await?;
        let top = self.lookup(parent, &name).await?;
        if top.kind != FileKind::Directory {
            return self.unlink(parent, &name).await;
        }
        // Depth first with a list of our own: a deep tree must not use up the stack.
        let mut waiting = vec![(parent, name, top.inode)];
        while let Some((parent, name, inode)) = waiting.last().cloned() {
            let page = self.readdir(inode, None, PAGE_ENTRIES, false).await?;
            let mut below = Vec::new();
            for entry in page.entries {
                if entry.kind == FileKind::Directory {
                    below.push((inode, entry.name, entry.inode));
                } else {
                    self.unlink(inode, &entry.name).await?;
                }
            }
            if below.is_empty() && page.end {
                self.rmdir(parent, &name).await?;
                waiting.pop();
            }
            waiting.extend(below);
        }
        Ok(())
    }
}

fn join(path: &mut Vec<u8>, name: &[u8]) {
    path.push(b'/');
    path.extend_from_slice(name);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_table() {
        for (path, expected) in [
            ("/", vec![]),
            ("", vec![]),
            ("/a//b/./c/", vec!["a", "b", "c"]),
            ("a/../b", vec!["b"]),
            ("../../x", vec!["x"]),
        ] {
            let names: Vec<String> =
                components(path.as_bytes()).unwrap().iter().map(ToString::to_string).collect();
            assert_eq!(names, expected, "{path}");
        }
    }
}
