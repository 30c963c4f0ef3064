//! Typed views of the trees, and the list of all tables of a partition.

use std::marker::PhantomData;

use milpa_types::{FileKind, InodeId, Name, SessionId};
use milpa_wire::meta::{MetaReply, OperationId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::command::FreeOrder;
use super::engine::Operation;
use super::inode::Inode;
use super::participant::Intent;
use super::tree::{Range, Tree};

/// A key whose bytes sort as the key does.
pub(crate) trait Key: Sized {
    fn write(&self, out: &mut Vec<u8>);
    /// The inverse; `None` for bytes that no key has.
    fn read(bytes: &[u8]) -> Option<Self>;

    fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32);
        self.write(&mut out);
        out
    }
}

macro_rules! integer_key {
    ($type:ty, $inner:ty) => {
        impl Key for $type {
            fn write(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.0.to_be_bytes());
            }
            fn read(bytes: &[u8]) -> Option<Self> {
                Some(Self(<$inner>::from_be_bytes(bytes.try_into().ok()?)))
            }
        }
    };
}

/// A number that orders things: of a free order, of an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Number(pub u64);

/// Which of an operation's intents: it may have two in one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IntentKind(pub u8);

integer_key!(InodeId, u64);
integer_key!(SessionId, u128);
integer_key!(Number, u64);
integer_key!(IntentKind, u8);

impl Key for OperationId {
    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.partition.0.to_be_bytes());
        out.extend_from_slice(&self.index.to_be_bytes());
    }

    fn read(bytes: &[u8]) -> Option<OperationId> {
        let (partition, index) = bytes.split_at_checked(8)?;
        let partition = milpa_types::PartitionId(Number::read(partition)?.0);
        Some(OperationId { partition, index: Number::read(index)?.0 })
    }
}

macro_rules! pair_key {
    ($first:ty, $first_bytes:literal, $second:ty) => {
        impl Key for ($first, $second) {
            fn write(&self, out: &mut Vec<u8>) {
                self.0.write(out);
                self.1.write(out);
            }
            fn read(bytes: &[u8]) -> Option<Self> {
                let (first, second) = bytes.split_at_checked($first_bytes)?;
                Some((<$first>::read(first)?, <$second>::read(second)?))
            }
        }
    };
}

impl Key for Name {
    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.as_bytes());
    }

    fn read(bytes: &[u8]) -> Option<Name> {
        Name::new(bytes).ok()
    }
}

pair_key!(InodeId, 8, Name);
pair_key!(InodeId, 8, Number);
pair_key!(InodeId, 8, SessionId);
pair_key!(SessionId, 16, Number);
pair_key!(OperationId, 16, IntentKind);

/// One ordered table: a tree with typed keys and values.
pub(crate) struct Table<K, V> {
    pub(crate) tree: Tree,
    types: PhantomData<(K, V)>,
}

impl<K, V> Clone for Table<K, V> {
    fn clone(&self) -> Self {
        Table { tree: self.tree.clone(), types: PhantomData }
    }
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Table { tree: Tree::default(), types: PhantomData }
    }
}

impl<K: Key, V: Serialize + DeserializeOwned> Table<K, V> {
    pub(crate) fn count(&self) -> u64 {
        self.tree.count()
    }

    pub(crate) fn get(&self, key: &K) -> Option<V> {
        decode(self.tree.get(&key.bytes())?)
    }

    pub(crate) fn contains(&self, key: &K) -> bool {
        self.tree.get(&key.bytes()).is_some()
    }

    pub(crate) fn insert(&mut self, key: &K, value: &V) {
        self.tree.insert(&key.bytes(), &milpa_wire::encode(value));
    }

    pub(crate) fn remove(&mut self, key: &K) -> bool {
        self.tree.remove(&key.bytes())
    }

    /// Records from `from` on, in order.
    pub(crate) fn range(&self, from: &impl Key) -> Records<'_, K, V> {
        Records { range: self.tree.range(&from.bytes()), types: PhantomData }
    }

    /// All records, in order.
    pub(crate) fn iter(&self) -> Records<'_, K, V> {
        Records { range: self.tree.range(&[]), types: PhantomData }
    }

    /// Whether every record of the tree is one of this table: asked of what came from a disk.
    pub(crate) fn is_sound(&self) -> bool {
        // Not `decode`, which takes it for ours.
        let is_value = |value| milpa_wire::decode::<V>(value).is_ok();
        self.tree.range(&[]).all(|(k, v)| K::read(k).is_some() && is_value(v))
    }
}

/// The table's own records always decode: they were encoded here, or checked by
/// [`Table::is_sound`]. `None` stands in for the impossible.
fn decode<V: DeserializeOwned>(bytes: &[u8]) -> Option<V> {
    let value = milpa_wire::decode(bytes).ok();
    debug_assert!(value.is_some(), "a table holds what it encoded");
    value
}

/// See [`Table::range`].
pub(crate) struct Records<'a, K, V> {
    range: Range<'a>,
    types: PhantomData<(K, V)>,
}

impl<K: Key, V: DeserializeOwned> Iterator for Records<'_, K, V> {
    type Item = (K, V);

    fn next(&mut self) -> Option<(K, V)> {
        let (key, value) = self.range.next()?;
        Some((K::read(key)?, decode(value)?))
    }
}

/// What a name names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dentry {
    pub inode: InodeId,
    pub kind: FileKind,
}

/// The value of a segment's record; its inode and end are the key. Kept apart from the inode so
/// that a change of a file of a hundred thousand segments touches only those it overlaps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SegmentRecord {
    pub length: u64,
    pub columns: milpa_types::Columns,
    pub flushed: bool,
}

/// A session that lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Session {
    /// Whether it was opened here. If not, an unlink in another partition made it a holder of an
    /// inode here; it may hold, but not write.
    pub is_opened: bool,
    /// Replies to sequences below this one are forgotten.
    pub unanswered: u64,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// Its reply.
    Final(MetaReply),
    /// It became this operation, which has no reply yet.
    Running(OperationId),
}

/// Everything a partition holds, its counters excepted. A clone shares what neither side changes.
#[derive(Clone, Default)]
pub(crate) struct Tables {
    /// CFS's inodeTree.
    pub inodes: Table<InodeId, Inode>,
    /// CFS's dentryTree.
    pub dentries: Table<(InodeId, Name), Dentry>,
    /// Content maps, by inode and *end* within the file: the first segment that reaches past an
    /// offset is then the first record above it. Never overlapping within an inode.
    pub segments: Table<(InodeId, Number), SegmentRecord>,
    /// Sessions that live.
    pub sessions: Table<SessionId, Session>,
    /// Sessions that ended, with the log index of their end. They are never opened again.
    pub ended_sessions: Table<SessionId, u64>,
    /// The request-id table.
    pub answers: Table<(SessionId, Number), Answer>,
    /// Inodes of which a session has removed a name while it had them open.
    pub held: Table<(InodeId, SessionId), ()>,
    /// Operations that this partition coordinates.
    pub operations: Table<OperationId, Operation>,
    /// Names that take part in an operation, of this partition or another.
    pub locked_names: Table<(InodeId, Name), OperationId>,
    /// Directories that are about to be removed: they take no entries.
    pub locked_directories: Table<InodeId, OperationId>,
    /// What other partitions' operations prepared here.
    pub intents: Table<(OperationId, IntentKind), Intent>,
    /// Other partitions' operations that ended here, with the log index of their end: a step
    /// that arrives late must not begin them anew.
    pub ended_operations: Table<OperationId, u64>,
    /// The free list.
    pub freed: Table<Number, milpa_types::FreedRange>,
}

/// How many tables there are.
pub(crate) const TABLES: usize = 13;

impl Tables {
    /// The trees, in the order of the snapshot format.
    pub(crate) fn trees(&self) -> [&Tree; TABLES] {
        [
            &self.inodes.tree,
            &self.dentries.tree,
            &self.segments.tree,
            &self.sessions.tree,
            &self.ended_sessions.tree,
            &self.answers.tree,
            &self.held.tree,
            &self.operations.tree,
            &self.locked_names.tree,
            &self.locked_directories.tree,
            &self.intents.tree,
            &self.ended_operations.tree,
            &self.freed.tree,
        ]
    }

    /// Puts trees that were read from a snapshot in place, in the order of
    /// [`trees`](Tables::trees). `None` if a record is not of its table.
    pub(crate) fn from_trees(trees: [Tree; TABLES]) -> Option<Tables> {
        fn table<K: Key, V: Serialize + DeserializeOwned>(tree: Tree) -> Option<Table<K, V>> {
            let table = Table { tree, types: PhantomData };
            table.is_sound().then_some(table)
        }
        let [
            inodes,
            dentries,
            segments,
            sessions,
            ended_sessions,
            answers,
            held,
            operations,
            locked_names,
            locked_directories,
            intents,
            ended_operations,
            freed,
        ] = trees;
        Some(Tables {
            inodes: table(inodes)?,
            dentries: table(dentries)?,
            segments: table(segments)?,
            sessions: table(sessions)?,
            ended_sessions: table(ended_sessions)?,
            answers: table(answers)?,
            held: table(held)?,
            operations: table(operations)?,
            locked_names: table(locked_names)?,
            locked_directories: table(locked_directories)?,
            intents: table(intents)?,
            ended_operations: table(ended_operations)?,
            freed: table(freed)?,
        })
    }

    /// Puts `range` on the free list.
    pub(crate) fn free(&mut self, next_order: &mut u64, range: milpa_types::FreedRange) {
        self.freed.insert(&Number(*next_order), &range);
        *next_order += 1;
    }

    /// Free orders above `after`.
    pub(crate) fn free_orders_above(&self, after: u64) -> impl Iterator<Item = FreeOrder> {
        let orders = self.freed.range(&Number(after.saturating_add(1)));
        orders.map(|(order, range)| FreeOrder { order: order.0, range })
    }
}

/// What is not in a table. In the snapshot's header and in the state hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counters {
    /// The next inode id to give.
    pub next_inode: InodeId,
    /// One past the last id that may be given; lowered by a split.
    pub end_inode: InodeId,
    /// The next free order's number. Starts at 1, so that "above 0" is all of them.
    pub next_order: u64,
    /// Sum of the inodes' `allocated`.
    pub allocated_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_is_none_of_the_table_is_found() {
        let mut table = Table::<Number, u32>::default();
        table.insert(&Number(1), &7);
        assert!(table.is_sound());
        table.tree.insert(&Number(2).bytes(), &[0xff; 6]);
        assert!(!table.is_sound());
    }
}
