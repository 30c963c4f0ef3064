//! Random operations, some of them repeated, against a tiny file system of maps.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use FileKind::{Directory, File};
use MetaError as E;

/// The reference: a node is a directory with names, or a file with a count of its names.
#[derive(Clone, Debug)]
enum Node {
    Directory(BTreeMap<String, usize>),
    File(u32),
}

/// Nodes by number; 0 is the root. What is deleted is `None`, and its number not used again.
#[derive(Clone, Debug)]
struct Model(Vec<Option<Node>>);

impl Model {
    fn names(&mut self, directory: usize) -> Result<&mut BTreeMap<String, usize>, MetaError> {
        match &mut self.0[directory] {
            Some(Node::Directory(names)) => Ok(names),
            Some(Node::File(_)) => Err(E::NotDirectory),
            None => Err(E::Stale),
        }
    }

    fn is_directory(&self, node: usize) -> bool {
        matches!(self.0[node], Some(Node::Directory(_)))
    }

    fn create(&mut self, parent: usize, name: &str, kind: FileKind) -> Result<usize, MetaError> {
        let node = self.0.len();
        if self.names(parent)?.contains_key(name) {
            return Err(E::Exists);
        }
        self.names(parent)?.insert(name.into(), node);
        let new = if kind == Directory { Node::Directory(BTreeMap::new()) } else { Node::File(1) };
        self.0.push(Some(new));
        Ok(node)
    }

    fn link(&mut self, node: usize, parent: usize, name: &str) -> Result<usize, MetaError> {
        if self.names(parent)?.contains_key(name) {
            return Err(E::Exists);
        }
        match &mut self.0[node] {
            None => return Err(E::Stale),
            Some(Node::Directory(_)) => return Err(E::NotPermitted),
            Some(Node::File(links)) => *links += 1,
        }
        self.names(parent)?.insert(name.into(), node);
        Ok(node)
    }

    fn drop_link(&mut self, node: usize) {
        let Some(Node::File(links)) = &mut self.0[node] else { panic!("not a file") };
        *links -= 1;
        if *links == 0 {
            self.0[node] = None;
        }
    }

    fn unlink(&mut self, parent: usize, name: &str) -> Result<(), MetaError> {
        let node = *self.names(parent)?.get(name).ok_or(E::NotFound)?;
        if self.is_directory(node) {
            return Err(E::IsDirectory);
        }
        self.names(parent)?.remove(name);
        self.drop_link(node);
        Ok(())
    }

    fn remove_directory(&mut self, parent: usize, name: &str) -> Result<(), MetaError> {
        let node = *self.names(parent)?.get(name).ok_or(E::NotFound)?;
        if !self.is_directory(node) {
            return Err(E::NotDirectory);
        }
        if !self.names(node)?.is_empty() {
            return Err(E::NotEmpty);
        }
        self.names(parent)?.remove(name);
        self.0[node] = None;
        Ok(())
    }

    fn is_below(&self, node: usize, ancestor: usize) -> bool {
        let Some(Node::Directory(names)) = &self.0[ancestor] else { return false };
        node == ancestor || names.values().any(|child| self.is_below(node, *child))
    }

    fn rename(&mut self, source: (usize, &str), target: (usize, &str)) -> Result<(), MetaError> {
        self.names(target.0)?;
        let moved = *self.names(source.0)?.get(source.1).ok_or(E::NotFound)?;
        if self.is_below(target.0, moved) {
            return Err(E::Loop);
        }
        let replaced = self.names(target.0)?.get(target.1).copied();
        if replaced == Some(moved) {
            return Ok(());
        }
        if let Some(replaced) = replaced {
            match (self.is_directory(moved), self.is_directory(replaced)) {
                (true, false) => return Err(E::NotDirectory),
                (false, true) => return Err(E::IsDirectory),
                (true, true) if !self.names(replaced)?.is_empty() => return Err(E::NotEmpty),
                (true, true) => self.0[replaced] = None,
                (false, false) => self.drop_link(replaced),
            }
        }
        self.names(source.0)?.remove(source.1);
        self.names(target.0)?.insert(target.1.into(), moved);
        Ok(())
    }
}

/// One random operation: what, on which nodes (modulo their number) and names.
type Roll = (u8, usize, u8, usize, u8, bool);

fn text(roll: u8) -> String {
    format!("n{}", roll % 6)
}

/// Both file systems, with the number of each inode.
struct Pair {
    solo: Solo,
    model: Model,
    ids: Vec<InodeId>,
}

impl Pair {
    fn new() -> Pair {
        let root = Node::Directory(BTreeMap::new());
        Pair { solo: Solo::new(), model: Model(vec![Some(root)]), ids: vec![ROOT] }
    }

    fn run(&mut self, (what, a, name_a, b, name_b, repeated): Roll) {
        let (a, b) = (a % self.ids.len(), b % self.ids.len());
        let (name_a, name_b) = (text(name_a), text(name_b));
        let (parent, other) = (self.ids[a], self.ids[b]);
        let (write, expected) = match what {
            0..=3 => {
                let kind = if what < 2 { File } else { Directory };
                (create(parent, &name_a, kind), self.model.create(a, &name_a, kind).map(Some))
            }
            4 => {
                let write = MetaWrite::Link { inode: other, parent, name: name(&name_a) };
                (write, self.model.link(b, a, &name_a).map(Some))
            }
            5 => (unlink(parent, &name_a), self.model.unlink(a, &name_a).map(|()| None)),
            6 => {
                let expected = self.model.remove_directory(a, &name_a).map(|()| None);
                (remove_directory(parent, &name_a), expected)
            }
            _ => {
                let expected = self.model.rename((a, &name_a), (b, &name_b)).map(|()| None);
                (rename((parent, &name_a), (other, &name_b)), expected)
            }
        };
        let reply = self.solo.write(write.clone());
        if repeated {
            self.solo.sequence -= 1;
            assert_eq!(self.solo.write(write.clone()), reply, "a repeat of {write:?}");
        }
        match (reply, expected) {
            (Ok(MetaAnswer::Entry(entry)), Ok(Some(node))) if node == self.ids.len() => {
                self.ids.push(entry.inode);
            }
            (Ok(MetaAnswer::Entry(entry)), Ok(Some(node))) => {
                assert_eq!(entry.inode, self.ids[node]);
            }
            (Ok(MetaAnswer::Done | MetaAnswer::Removed { .. }), Ok(None)) => {}
            (reply, expected) => assert_eq!(reply.err(), expected.err(), "{write:?}"),
        }
    }

    fn check(&self) {
        let mut nodes = 0;
        for (id, node) in self.ids.iter().zip(&self.model.0) {
            let Some(node) = node else {
                assert_eq!(self.solo.stat(*id), Err(E::Stale));
                continue;
            };
            nodes += 1;
            let attributes = self.solo.stat(*id).unwrap();
            match node {
                Node::File(links) => assert_eq!(attributes.link_count, *links),
                Node::Directory(names) => {
                    let read = MetaRead::ReadDirectory {
                        parent: *id,
                        after: None,
                        limit: 100,
                        with_attributes: false,
                    };
                    let Ok(MetaAnswer::Page { entries, end: true }) =
                        self.solo.partition.read(None, &read)
                    else {
                        panic!("not a page")
                    };
                    let found = entries.iter().map(|e| (e.name.to_string(), e.inode));
                    let expected = names.iter().map(|(name, node)| (name.clone(), self.ids[*node]));
                    assert!(found.eq(expected));
                    let below = names.values().filter(|node| self.model.is_directory(**node));
                    assert_eq!(attributes.link_count, 2 + below.count() as u32);
                    assert_eq!(attributes.size, names.len() as u64);
                }
            }
        }
        assert_eq!(self.solo.partition.statistics().inodes, nodes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn the_namespace_behaves_as_the_model(
        rolls in prop::collection::vec(
            (0u8..10, 0usize..12, any::<u8>(), 0usize..12, any::<u8>(), any::<bool>()), 0..150),
    ) {
        let mut pair = Pair::new();
        for roll in rolls {
            pair.run(roll);
        }
        pair.check();
    }
}
