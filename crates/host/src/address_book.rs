//! Where the other nodes listen, remembered over restarts: meta nodes and data nodes find each
//! other again while no manager is up.
//!
//! A hint, not a truth: the handshake tells whether the right node answers. So the file is neither
//! synced nor checked beyond its syntax: lines of `<node id> <address>`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use milpa_types::NodeId;
use tracing::debug;

use crate::disk::{self, File, Open};

/// Lines of the file that are read: more than any cluster has nodes.
const LINES_MAX: usize = 100_000;

/// The map and its file.
#[derive(Debug)]
pub struct AddressBook {
    path: PathBuf,
    addresses: BTreeMap<NodeId, SocketAddr>,
}

impl AddressBook {
    /// Reads what is remembered; nothing, if that cannot be read.
    #[must_use]
    pub fn open(path: PathBuf) -> AddressBook {
        let bytes = disk::read(&path).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let parse = |line: &str| {
            let (id, address) = line.split_once(' ')?;
            Some((NodeId(id.parse().ok()?), address.parse().ok()?))
        };
        let addresses = text.lines().take(LINES_MAX).filter_map(parse).collect();
        AddressBook { path, addresses }
    }

    /// Where a node listens, if known.
    #[must_use]
    pub fn get(&self, node: NodeId) -> Option<SocketAddr> {
        self.addresses.get(&node).copied()
    }

    /// Takes addresses over. If any was news, gives the work that writes the file, which blocks.
    pub fn learn(
        &mut self,
        nodes: impl Iterator<Item = (NodeId, SocketAddr)>,
    ) -> Option<impl FnOnce() + Send + 'static> {
        let mut changed = false;
        for (node, address) in nodes {
            changed |= self.addresses.insert(node, address) != Some(address);
        }
        changed.then(|| {
            let lines = self.addresses.iter().map(|(node, address)| format!("{node} {address}\n"));
            let (text, path) = (lines.collect::<String>(), self.path.clone());
            move || {
                let fresh = path.with_extension("new");
                let written = File::open(&fresh, Open::Empty)
                    .and_then(|file| file.write_at(text.as_bytes(), 0))
                    .and_then(|()| disk::rename(&fresh, &path));
                if let Err(error) = written {
                    debug!(%error, "cannot remember where the nodes are");
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_remembered_and_nonsense_is_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nodes");
        let address = SocketAddr::from(([10, 0, 0, 1], 7002));
        let mut book = AddressBook::open(path.clone());
        let save = book.learn([(NodeId(3), address)].into_iter()).expect("this is news");
        save();
        assert!(book.learn([(NodeId(3), address)].into_iter()).is_none(), "this is not");

        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("x y\n4\n{text}5 nowhere")).unwrap();
        let again = AddressBook::open(path);
        assert_eq!(again.get(NodeId(3)), Some(address));
        assert_eq!(again.get(NodeId(5)), None);
    }
}
