//! A copy-on-write B+ tree of byte strings: how all of a partition's state is kept.
//!
//! Why not `std::collections::BTreeMap`: rising keys leave its nodes half empty, and a name costs
//! an allocation of its own; measured, a file took over 300 bytes where this takes half of the 200
//! that DESIGN.md section 4 allows. Why bytes and not types: one tree serves every table, and the
//! snapshot file and the state hash cover whatever is in a table without a line of code for it
//! (see [`table`](super::table)).
//!
//! `clone` takes constant time and shares all nodes: that is how a snapshot is taken without
//! stopping the partition. A node that is shared is copied when it is next changed, so a snapshot
//! costs the nodes changed while it lives.
//!
//! # Invariants
//!
//! * Every child's key in a branch is at most the lowest key below it; the first child's key is
//!   the branch's own lower bound.
//! * `hash` is the wrapping sum of [`record_hash`] over all records: independent of the shape of
//!   the tree and of the order of the changes.

mod leaf;

use std::sync::Arc;

use leaf::Leaf;

/// A leaf is cut in two above this many bytes: some 80 records, whose moving takes 100 ns.
const LEAF_BYTES_MAX: usize = 4096;
/// A branch is cut in two above this many children.
const CHILDREN_MAX: usize = 64;

/// See the module's text.
#[derive(Clone, Default)]
pub(crate) struct Tree {
    root: Arc<Node>,
    count: u64,
    hash: u64,
}

#[derive(Clone)]
enum Node {
    Leaf(Leaf),
    Branch(Vec<Child>),
}

impl Default for Node {
    fn default() -> Node {
        Node::Leaf(Leaf::default())
    }
}

#[derive(Clone)]
struct Child {
    key: Box<[u8]>,
    node: Arc<Node>,
}

/// Which child leads to `key`.
fn route(children: &[Child], key: &[u8]) -> usize {
    children.partition_point(|child| *child.key <= *key).saturating_sub(1)
}

impl Tree {
    /// Records held.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Hash of the records held.
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// The value of `key`.
    pub(crate) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        let mut node = &*self.root;
        loop {
            match node {
                Node::Leaf(leaf) => return leaf.search(key).ok().map(|index| leaf.record(index).1),
                Node::Branch(children) => node = &*children.get(route(children, key))?.node,
            }
        }
    }

    /// Sets the value of `key`.
    pub(crate) fn insert(&mut self, key: &[u8], value: &[u8]) {
        let mut replaced = None;
        if let Some(right) = insert(&mut self.root, key, value, &mut replaced) {
            let left = Child { key: Box::default(), node: std::mem::take(&mut self.root) };
            self.root = Arc::new(Node::Branch(vec![left, right]));
        }
        match replaced {
            Some(old) => self.hash = self.hash.wrapping_sub(old),
            None => self.count += 1,
        }
        self.hash = self.hash.wrapping_add(record_hash(key, value));
    }

    /// Removes `key`. Returns whether it was there.
    pub(crate) fn remove(&mut self, key: &[u8]) -> bool {
        let Some(value) = self.get(key) else {
            return false;
        };
        let hash = record_hash(key, value);
        remove(&mut self.root, key);
        self.hash = self.hash.wrapping_sub(hash);
        self.count -= 1;
        while let Node::Branch(children) = &*self.root {
            let [only] = children.as_slice() else { break };
            self.root = Arc::clone(&only.node);
        }
        true
    }

    /// All records whose key is `from` or above, in order.
    pub(crate) fn range<'a>(&'a self, from: &[u8]) -> Range<'a> {
        let mut path = Vec::new();
        let mut node = &*self.root;
        loop {
            match node {
                Node::Leaf(leaf) => {
                    let index = leaf.search(from).unwrap_or_else(|index| index);
                    return Range { path, leaf: Some(leaf), index };
                }
                Node::Branch(children) => {
                    let at = route(children, from);
                    path.push(children.get(at + 1..).unwrap_or_default().iter());
                    // A branch is never empty.
                    match children.get(at) {
                        Some(child) => node = &*child.node,
                        None => return Range { path, leaf: None, index: 0 },
                    }
                }
            }
        }
    }
}

/// Records in key order. See [`Tree::range`].
pub(crate) struct Range<'a> {
    path: Vec<std::slice::Iter<'a, Child>>,
    leaf: Option<&'a Leaf>,
    index: usize,
}

impl<'a> Iterator for Range<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(leaf) = self.leaf.filter(|leaf| self.index < leaf.count()) {
                self.index += 1;
                return Some(leaf.record(self.index - 1));
            }
            self.leaf = Some(self.next_leaf()?);
            self.index = 0;
        }
    }
}

impl<'a> Range<'a> {
    fn next_leaf(&mut self) -> Option<&'a Leaf> {
        loop {
            let Some(child) = self.path.last_mut()?.next() else {
                self.path.pop();
                continue;
            };
            let mut node = &*child.node;
            loop {
                match node {
                    Node::Leaf(leaf) => return Some(leaf),
                    Node::Branch(children) => {
                        let mut rest = children.iter();
                        node = &*rest.next()?.node;
                        self.path.push(rest);
                    }
                }
            }
        }
    }
}

/// Inserts below `node`; `replaced` gets the hash of a record that had the key. Returns what was
/// cut off to the right when the node became too large.
fn insert(
    node: &mut Arc<Node>,
    key: &[u8],
    value: &[u8],
    replaced: &mut Option<u64>,
) -> Option<Child> {
    match Arc::make_mut(node) {
        Node::Leaf(leaf) => {
            let index = match leaf.search(key) {
                Ok(index) => {
                    *replaced = Some(record_hash(key, leaf.record(index).1));
                    leaf.replace(index, value);
                    index
                }
                Err(index) => {
                    leaf.insert(index, key, value);
                    index
                }
            };
            (leaf.size() > LEAF_BYTES_MAX && leaf.count() > 1).then(|| {
                let right = leaf.split_off(leaf.middle(index));
                Child { key: right.record(0).0.into(), node: Arc::new(Node::Leaf(right)) }
            })
        }
        Node::Branch(children) => {
            let at = route(children, key);
            let child = insert(&mut children.get_mut(at)?.node, key, value, replaced)?;
            children.insert(at + 1, child);
            if children.len() <= CHILDREN_MAX {
                return None;
            }
            // As in a leaf: rising keys leave full branches behind.
            let cut = if at + 2 == children.len() { at + 1 } else { children.len() / 2 };
            let right = children.split_off(cut);
            children.shrink_to_fit();
            let key = right.first()?.key.clone();
            Some(Child { key, node: Arc::new(Node::Branch(right)) })
        }
    }
}

fn remove(node: &mut Arc<Node>, key: &[u8]) {
    match Arc::make_mut(node) {
        Node::Leaf(leaf) => {
            if let Ok(index) = leaf.search(key) {
                leaf.remove(index);
            }
        }
        Node::Branch(children) => {
            let at = route(children, key);
            if let Some(child) = children.get_mut(at) {
                remove(&mut child.node, key);
                tidy(children, at);
            }
        }
    }
}

/// Drops the `at`-th child if it is empty, joins it with a neighbour if both are small.
fn tidy(children: &mut Vec<Child>, at: usize) {
    let fill = |index: usize| children.get(index).map_or(100, |child| child.node.fill());
    if fill(at) == 0 && children.len() > 1 {
        let gone = children.remove(at);
        if at == 0 {
            // The lower bound of the branch stays what it was.
            children[0].key = gone.key;
        }
        return;
    }
    if fill(at) > 25 {
        return;
    }
    let left = if at > 0 && fill(at - 1) <= fill(at + 1) { at - 1 } else { at };
    if left + 1 < children.len() && fill(left) + fill(left + 1) <= 75 {
        let right = children.remove(left + 1);
        Arc::make_mut(&mut children[left].node).append(&right.node);
    }
}

impl Node {
    /// How full it is, in percent; 0 only when nothing is in it.
    fn fill(&self) -> usize {
        match self {
            Node::Leaf(leaf) => (leaf.size() * 100).div_ceil(LEAF_BYTES_MAX),
            Node::Branch(children) => (children.len() * 100).div_ceil(CHILDREN_MAX),
        }
    }

    /// Takes in the right neighbour, which is of the same height.
    fn append(&mut self, right: &Node) {
        match (self, right) {
            (Node::Leaf(leaf), Node::Leaf(right)) => leaf.append(right),
            (Node::Branch(children), Node::Branch(right)) => children.extend_from_slice(right),
            _ => debug_assert!(false, "all leaves have the same depth"),
        }
    }
}

/// Hash of one record. Not secret: it finds replicas that differ by mistake, not by malice.
fn record_hash(key: &[u8], value: &[u8]) -> u64 {
    hash_bytes(hash_bytes(key.len() as u64, key), value)
}

/// Multiply-and-fold over 8 bytes at a time, in the manner of wyhash.
pub(crate) fn hash_bytes(seed: u64, bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    let fold = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        (product as u64) ^ ((product >> 64) as u64)
    };
    let mut hash = fold(seed ^ 0x2545_F491_4F6C_DD1D, FACTOR) ^ bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = fold(hash ^ u64::from_le_bytes(word), FACTOR).wrapping_add(FACTOR);
    }
    fold(hash, 0xD6E8_FEB8_6659_FD93)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn check(tree: &Tree, model: &BTreeMap<Vec<u8>, Vec<u8>>) {
        assert_eq!(tree.count(), model.len() as u64);
        let records = tree.range(&[]).map(|(k, v)| (k.to_vec(), v.to_vec()));
        assert!(records.eq(model.clone()), "the same records in the same order");
        let sum = model.iter().fold(0u64, |sum, (k, v)| sum.wrapping_add(record_hash(k, v)));
        assert_eq!(tree.hash(), sum);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Against std's map, with values large enough to make the tree several levels deep. A
        /// clone taken on the way must not change with the original.
        #[test]
        fn behaves_as_a_sorted_map(
            changes in prop::collection::vec((0u16..900, 0usize..400, any::<bool>()), 0..3000),
        ) {
            let (mut tree, mut model) = (Tree::default(), BTreeMap::new());
            let mut frozen = (tree.clone(), model.clone());
            for (step, (key, length, insert)) in changes.iter().enumerate() {
                let key = [&key.to_be_bytes()[..], &vec![b'n'; usize::from(key % 50)]].concat();
                if *insert {
                    let value = vec![step as u8; *length];
                    tree.insert(&key, &value);
                    model.insert(key.clone(), value);
                } else {
                    prop_assert_eq!(tree.remove(&key), model.remove(&key).is_some());
                }
                prop_assert_eq!(tree.get(&key), model.get(&key).map(Vec::as_slice));
                if step == changes.len() / 2 {
                    frozen = (tree.clone(), model.clone());
                }
            }
            check(&tree, &model);
            check(&frozen.0, &frozen.1);
            for probe in 0..900u16 {
                let from = probe.to_be_bytes();
                let first = tree.range(&from).next().map(|(k, _)| k.to_vec());
                prop_assert_eq!(first, model.range(from.to_vec()..).next().map(|(k, _)| k.clone()));
            }
            for key in model.keys() {
                prop_assert!(tree.remove(key));
            }
            check(&tree, &BTreeMap::new());
            prop_assert_eq!(tree.hash(), 0);
        }
    }

    #[test]
    fn rising_keys_leave_full_leaves() {
        let mut tree = Tree::default();
        for key in 0..100_000u64 {
            tree.insert(&key.to_be_bytes(), &[7; 30]);
        }
        let Node::Branch(children) = &*tree.root else { panic!("100,000 records need branches") };
        assert!(children.len() <= 100_000 / (64 * 100) + 1, "{} children", children.len());
    }
}
