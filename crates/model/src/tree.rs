//! A whole name space at rest, as a walk found it: do its parts agree?

use std::collections::BTreeMap;

use milpa_types::{Attributes, FileKind, InodeId};

/// What a walk from the root found.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    /// How many names each inode has, and its attributes as of the walk.
    inodes: BTreeMap<InodeId, (u32, Attributes)>,
    /// Subdirectories and entries of each directory.
    directories: BTreeMap<InodeId, (u32, u64)>,
}

impl Tree {
    /// Adds the root.
    #[must_use]
    pub fn new(root: Attributes) -> Tree {
        let mut tree = Tree::default();
        tree.inodes.insert(root.inode, (1, root));
        tree.directories.insert(root.inode, (0, 0));
        tree
    }

    /// Adds a name. False if a directory is found twice: there is a loop, or it has two names.
    pub fn add(&mut self, parent: InodeId, attributes: Attributes) -> bool {
        let is_directory = attributes.kind == FileKind::Directory;
        let (subdirectories, entries) = self.directories.entry(parent).or_default();
        *subdirectories += u32::from(is_directory);
        *entries += 1;
        let (names, known) = self.inodes.entry(attributes.inode).or_insert((0, attributes));
        *names += 1;
        *known = attributes;
        !is_directory || self.directories.insert(attributes.inode, (0, 0)).is_none()
    }

    /// How many inodes the walk found.
    #[must_use]
    pub fn inodes(&self) -> usize {
        self.inodes.len()
    }

    /// Everything that does not fit together, one line each.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (inode, (names, attributes)) in &self.inodes {
            let (links, size) = (attributes.link_count, attributes.size);
            let wanted = self.directories.get(inode);
            let wanted_links = wanted.map_or(*names, |(subdirectories, _)| 2 + subdirectories);
            if links != wanted_links {
                problems
                    .push(format!("inode {inode}: link count {links}, but {wanted_links} found"));
            }
            if let Some((_, entries)) = wanted
                && size != *entries
            {
                problems
                    .push(format!("directory {inode}: size {size}, but {entries} entries found"));
            }
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use milpa_types::Timestamp;

    fn attributes(inode: u64, kind: FileKind, link_count: u32, size: u64) -> Attributes {
        let now = Timestamp(0);
        Attributes {
            inode: InodeId(inode),
            kind,
            mode: 0,
            link_count,
            uid: 0,
            gid: 0,
            device: 0,
            size,
            allocated: 0,
            accessed: now,
            modified: now,
            changed: now,
            content_version: 0,
            truncation: 0,
        }
    }

    #[test]
    fn counts_must_match_names() {
        let mut tree = Tree::new(attributes(1, FileKind::Directory, 3, 3));
        assert!(tree.add(InodeId(1), attributes(2, FileKind::Directory, 2, 0)));
        let file = attributes(3, FileKind::File, 2, 99);
        assert!(tree.add(InodeId(1), file) && tree.add(InodeId(1), file));
        assert_eq!(tree.problems(), Vec::<String>::new());
        assert!(tree.add(InodeId(2), file));
        assert_eq!(tree.problems().len(), 2, "a third name, and an entry too many");
        assert!(!tree.add(InodeId(2), attributes(2, FileKind::Directory, 2, 0)), "a loop");
    }
}
