//! Nodeids: the kernel names inodes, the disk names paths.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use milpa_fuse::ROOT_ID;

/// Which nodeid stands for which path. An unlinked one stands for none. Nodeids are not reused.
#[derive(Debug)]
pub(crate) struct Nodes {
    by_path: BTreeMap<PathBuf, u64>,
    by_id: BTreeMap<u64, PathBuf>,
    next: u64,
}

impl Nodes {
    pub fn new() -> Nodes {
        let root = PathBuf::from("/");
        let (by_path, by_id) = ([(root.clone(), ROOT_ID)].into(), [(ROOT_ID, root)].into());
        Nodes { by_path, by_id, next: ROOT_ID + 1 }
    }

    pub fn path(&self, id: u64) -> Option<&Path> {
        self.by_id.get(&id).map(PathBuf::as_path)
    }

    /// The nodeid of a path, given on first sight.
    pub fn id(&mut self, path: PathBuf) -> u64 {
        if let Some(id) = self.by_path.get(&path) {
            return *id;
        }
        let id = self.next;
        self.next += 1;
        self.by_id.insert(id, path.clone());
        self.by_path.insert(path, id);
        id
    }

    /// The path names nothing any more.
    pub fn removed(&mut self, path: &Path) {
        if let Some(id) = self.by_path.remove(path) {
            self.by_id.remove(&id);
        }
    }

    /// `source`, and all below it, is found at `target` from now on.
    pub fn renamed(&mut self, source: &Path, target: &Path) {
        self.removed(target);
        let moved: Vec<(PathBuf, u64)> = self
            .by_path
            .iter()
            .filter(|(path, _)| path.starts_with(source))
            .map(|(path, id)| (path.clone(), *id))
            .collect();
        for (path, id) in moved {
            self.by_path.remove(&path);
            let Ok(rest) = path.strip_prefix(source) else { continue };
            let now = if rest.as_os_str().is_empty() { target.into() } else { target.join(rest) };
            self.by_id.insert(id, now.clone());
            self.by_path.insert(now, id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renamed_directory_takes_along_what_is_in_it() {
        let mut nodes = Nodes::new();
        let (old, file) = (nodes.id("/a".into()), nodes.id("/a/f".into()));
        let other = nodes.id("/b".into());
        nodes.renamed(Path::new("/a"), Path::new("/b"));
        assert_eq!(nodes.path(old), Some(Path::new("/b")));
        assert_eq!(nodes.path(file), Some(Path::new("/b/f")));
        assert_eq!(nodes.path(other), None, "replaced");
        assert_eq!(nodes.id("/b/f".into()), file);
        assert_ne!(nodes.id("/a".into()), old);
    }
}
