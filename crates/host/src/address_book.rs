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
        AddressBook { path, addresses: parse(&bytes) }
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
            let (text, path) = (text_of(&self.addresses), self.path.clone());
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

/// What the lines say; other lines are passed over.
fn parse(bytes: &[u8]) -> BTreeMap<NodeId, SocketAddr> {
    let parse_line = |line: &str| {
        let (id, address) = line.split_once(' ')?;
        Some((NodeId(id.parse().ok()?), address.parse().ok()?))
    };
    String::from_utf8_lossy(bytes).lines().take(LINES_MAX).filter_map(parse_line).collect()
}

fn text_of(addresses: &BTreeMap<NodeId, SocketAddr>) -> String {
    addresses.iter().map(|(node, address)| format!("{node} {address}\n")).collect()
}

/// The file, for golden files and fuzzing.
#[cfg(any(test, feature = "decoders"))]
pub(crate) mod decoding {
    use super::*;

    /// An address of each family.
    pub(crate) fn sample(port: u16) -> Vec<u8> {
        let addresses = [
            (NodeId(101), SocketAddr::from(([10, 0, 0, 1], port))),
            (NodeId(102), SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, 2], port))),
        ];
        text_of(&addresses.into()).into_bytes()
    }

    pub(crate) fn again(bytes: &[u8]) -> Vec<u8> {
        text_of(&parse(bytes)).into_bytes()
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
