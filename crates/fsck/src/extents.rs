//! Which bytes of data nodes files refer to, and whether they are there: a window of extents at a time.

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{BLOCK_BYTES, ExtentId, InodeId, NodeId, PartitionId, Segment};
use milpa_wire::data::ExtentState;

/// References of one window: 24 MiB.
pub(crate) const REFERENCES_MAX: usize = 1 << 19;

/// An extent of the volume.
pub(crate) type Place = (PartitionId, ExtentId);

/// The first and the last that there can be.
pub(crate) const PLACE_FIRST: Place = (PartitionId(0), ExtentId(0));
pub(crate) const PLACE_LAST: Place = (PartitionId(u64::MAX), ExtentId(u64::MAX));

/// Bytes of an extent that a file refers to. Sorted by where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Reference {
    pub place: Place,
    /// Within the extent.
    pub offset: u64,
    pub length: u64,
    pub inode: InodeId,
    /// Within the file.
    pub file_offset: u64,
    pub is_flushed: bool,
}

impl Reference {
    /// `None` for a striped segment, of which there are none yet.
    pub(crate) fn of(inode: InodeId, segment: &Segment) -> Option<Reference> {
        let column = segment.column()?;
        Some(Reference {
            place: (column.partition, column.extent),
            offset: column.offset,
            length: segment.length,
            inode,
            file_offset: segment.offset,
            is_flushed: segment.flushed,
        })
    }

    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// What it refers to of a block of its extent.
    fn in_block(&self, block: u64) -> Reference {
        let start = block.saturating_mul(BLOCK_BYTES);
        let offset = start.clamp(self.offset, self.end());
        let end = start.saturating_add(BLOCK_BYTES).clamp(offset, self.end());
        let file_offset = self.file_offset.saturating_add(offset - self.offset);
        Reference { offset, length: end - offset, file_offset, ..*self }
    }

    /// Whether `other` is of the same file and refers to all these bytes as well.
    pub(crate) fn is_within(&self, other: &Reference) -> bool {
        (self.place, self.inode) == (other.place, other.inode)
            && other.offset <= self.offset
            && self.end() <= other.end()
    }
}

/// All references to the extents from `first` to `last`. When they become too many, the higher
/// extents leave, and `last` is lower: they come with the next window.
pub(crate) struct Window {
    pub first: Place,
    pub last: Place,
    references: Vec<Reference>,
    limit: usize,
}

impl Window {
    pub(crate) fn new(first: Place, limit: usize) -> Window {
        Window { first, last: PLACE_LAST, references: Vec::new(), limit: limit.max(2) }
    }

    pub(crate) fn push(&mut self, reference: Reference) {
        if (self.first..=self.last).contains(&reference.place) {
            self.references.push(reference);
            if self.references.len() > self.limit {
                self.shrink();
            }
        }
    }

    /// Leaves the lower half of the extents. References to one extent stay together, however many.
    fn shrink(&mut self) {
        self.references.sort_unstable();
        let place = |index: usize| self.references.get(index).map(|reference| reference.place);
        let (lowest, middle) = (place(0), place(self.references.len() / 2));
        let above =
            |place: Option<Place>| self.references.partition_point(|r| Some(r.place) <= place);
        let keep = match middle {
            middle if middle == lowest => above(lowest),
            middle => self.references.partition_point(|r| Some(r.place) < middle),
        };
        match self.references.get(keep) {
            Some(cut) => self.last = before(cut.place),
            // One extent: its references are bounded by its size.
            None => self.limit = self.limit.saturating_mul(2),
        }
        self.references.truncate(keep);
    }

    /// The references in order, and where the next window begins, if it does.
    pub(crate) fn close(mut self) -> (Vec<Reference>, Option<Place>) {
        self.references.sort_unstable();
        (self.references, after(self.last))
    }
}

fn before((partition, extent): Place) -> Place {
    match extent.0.checked_sub(1) {
        Some(extent) => (partition, ExtentId(extent)),
        None => (PartitionId(partition.0.saturating_sub(1)), ExtentId(u64::MAX)),
    }
}

fn after((partition, extent): Place) -> Option<Place> {
    match extent.0.checked_add(1) {
        Some(extent) => Some((partition, ExtentId(extent))),
        None => Some((PartitionId(partition.0.checked_add(1)?), ExtentId(0))),
    }
}

/// What one member holds of some extents of a data partition.
#[derive(Clone, Debug, Default)]
pub(crate) struct Replica {
    pub node: NodeId,
    pub extents: BTreeMap<ExtentId, ExtentState>,
    /// Freed bytes of extents that files refer to: offset and end.
    pub freed: BTreeMap<ExtentId, Vec<(u64, u64)>>,
    /// Blocks of these extents that are damaged here, and that this member found whole nowhere else.
    pub lost: BTreeSet<(ExtentId, u64)>,
}

impl Replica {
    fn has(&self, reference: &Reference) -> bool {
        let extent = reference.place.1;
        let is_long = self.extents.get(&extent).is_some_and(|s| s.length >= reference.end());
        let freed = self.freed.get(&extent).into_iter().flatten();
        let mut touching =
            freed.filter(|(offset, end)| *offset < reference.end() && reference.offset < *end);
        is_long && touching.next().is_none()
    }

    /// The damaged blocks in which some of these bytes are.
    fn lost_in(&self, reference: &Reference) -> impl Iterator<Item = (ExtentId, u64)> {
        let extent = reference.place.1;
        let blocks = reference.offset / BLOCK_BYTES..reference.end().div_ceil(BLOCK_BYTES);
        self.lost.range((extent, blocks.start)..(extent, blocks.end)).copied()
    }

    /// How many bytes of an extent are held and not freed. What is freed comes in ranges that do not
    /// overlap, and may reach beyond the extent.
    pub(crate) fn live_bytes(&self, extent: ExtentId) -> u64 {
        let length = self.extents.get(&extent).map_or(0, |state| state.length);
        let freed = self.freed.get(&extent).into_iter().flatten();
        let freed = freed.map(|(offset, end)| length.min(*end).saturating_sub(*offset));
        freed.fold(length, u64::saturating_sub)
    }
}

/// What is wrong with bytes that a file refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum What {
    /// No member has them whole, though they were synced.
    Lost,
    /// No member has them whole, and they were never synced.
    LostUnsynced,
    /// This member does not have them.
    Lacks(NodeId),
    /// This file refers to them as well.
    Shared(InodeId),
    /// Their extent was made for this file.
    Owned(InodeId),
    /// The volume has no such data partition.
    NoPartition,
}

/// A file with such bytes.
pub(crate) type Problem = (Reference, What);

/// Compares references to one data partition, in order, with what its members hold.
pub(crate) fn compare(references: &[Reference], replicas: &[Replica]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for reference in references {
        let (have, lack): (Vec<_>, Vec<_>) = replicas.iter().partition(|it| it.has(reference));
        let lost = if reference.is_flushed { What::Lost } else { What::LostUnsynced };
        if let Some((first, others)) = have.split_first() {
            problems.extend(lack.iter().map(|lacks| (*reference, What::Lacks(lacks.node))));
            // What is damaged here and whole there is mended without anybody's help.
            let blocks = first.lost_in(reference);
            let blocks = blocks.filter(|place| others.iter().all(|it| it.lost.contains(place)));
            problems.extend(blocks.map(|(_, block)| (reference.in_block(block), lost)));
        } else {
            problems.push((*reference, lost));
        }
        let extent = reference.place.1;
        let owners = replicas.iter().filter_map(|it| it.extents.get(&extent)).map(|it| it.inode);
        let mut others = owners.filter(|owner| *owner != InodeId(0) && *owner != reference.inode);
        problems.extend(others.next().map(|owner| (*reference, What::Owned(owner))));
    }
    problems
}

/// Bytes to which two references refer, among references in order.
pub(crate) fn shared(references: &[Reference]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut furthest: Option<Reference> = None;
    for reference in references {
        match furthest.filter(|last| last.place == reference.place) {
            Some(last) if reference.offset < last.end() => {
                problems.push((*reference, What::Shared(last.inode)));
                problems.push((last, What::Shared(reference.inode)));
                if reference.end() > last.end() {
                    furthest = Some(*reference);
                }
            }
            _ => furthest = Some(*reference),
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use milpa_types::{Epoch, SessionId};
    use proptest::prelude::*;

    fn reference(place: (u64, u64), offset: u64, length: u64, inode: u64) -> Reference {
        Reference {
            place: (PartitionId(place.0), ExtentId(place.1)),
            offset,
            length,
            inode: InodeId(inode),
            file_offset: 0,
            is_flushed: true,
        }
    }

    proptest! {
        /// However small the windows, each reference is in one of them, and those of an extent are
        /// in the same.
        #[test]
        fn windows_hold_every_reference_once(
            places in proptest::collection::vec((1_u64..4, 0_u64..12), 0..200),
            limit in 2_usize..60,
        ) {
            let all: Vec<Reference> = (0..).zip(&places)
                .map(|(offset, place)| reference(*place, offset, 1, 1)).collect();
            let (mut seen, mut first, mut windows) = (Vec::new(), Some(PLACE_FIRST), 0);
            while let Some(begin) = first {
                let mut window = Window::new(begin, limit);
                all.iter().for_each(|reference| window.push(*reference));
                let (references, next) = window.close();
                seen.extend(references);
                prop_assert!(next.is_none_or(|next| next > begin));
                (first, windows) = (next, windows + 1);
            }
            let mut sorted = all.clone();
            sorted.sort_unstable();
            prop_assert_eq!(seen, sorted);
            prop_assert!(all.len() <= limit || windows > 1 || places.iter().all(|p| *p == places[0]));
        }

        /// Sharing is found as by comparing each with each.
        #[test]
        fn whoever_shares_bytes_is_found(
            ranges in proptest::collection::vec((0_u64..3, 0_u64..40, 1_u64..6), 0..20),
        ) {
            let mut all: Vec<Reference> = (1..).zip(&ranges)
                .map(|(inode, (extent, offset, length))| reference((1, *extent), *offset, *length, inode))
                .collect();
            all.sort_unstable();
            let overlaps = |a: &Reference, b: &Reference| {
                a.inode != b.inode && a.place == b.place && a.offset < b.end() && b.offset < a.end()
            };
            let expected = all.iter().any(|a| all.iter().any(|b| overlaps(a, b)));
            let found = shared(&all);
            prop_assert_eq!(!found.is_empty(), expected);
            for (reference, what) in found {
                let What::Shared(other) = what else { panic!("{what:?}") };
                let other = all.iter().find(|it| it.inode == other).unwrap();
                prop_assert!(overlaps(&reference, other));
            }
        }
    }

    fn replica(node: u32, length: u64, freed: &[(u64, u64)]) -> Replica {
        let extent = ExtentId(3);
        let state = ExtentState {
            extent,
            epoch: Epoch(1),
            inode: InodeId(5),
            session: SessionId(1),
            length,
            committed: length,
            sealed: true,
            overwritten: false,
        };
        let extents = [(extent, state)].into();
        let freed = [(extent, freed.to_vec())].into();
        Replica { node: NodeId(node), extents, freed, ..Replica::default() }
    }

    #[track_caller]
    fn check(replicas: &[Replica], reference: Reference, expected: &[What]) {
        let found: Vec<What> = compare(&[reference], replicas).iter().map(|it| it.1).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn replicas_table() {
        let whole = reference((1, 3), 0, 100, 5);
        let gone = Replica { node: NodeId(3), ..Replica::default() };
        check(&[replica(1, 100, &[]), replica(2, 200, &[])], whole, &[]);
        check(&[replica(1, 100, &[]), replica(2, 99, &[])], whole, &[What::Lacks(NodeId(2))]);
        check(&[replica(1, 100, &[]), gone.clone()], whole, &[What::Lacks(NodeId(3))]);
        check(&[replica(1, 99, &[]), gone.clone()], whole, &[What::Lost]);
        let unsynced = Reference { is_flushed: false, ..whole };
        check(&[gone], unsynced, &[What::LostUnsynced]);
        check(&[replica(1, 200, &[(100, 200)])], whole, &[]);
        let freed = [replica(1, 200, &[(99, 200)]), replica(2, 200, &[])];
        check(&freed, whole, &[What::Lacks(NodeId(1))]);
        let foreign = reference((1, 3), 0, 100, 6);
        check(&[replica(1, 100, &[])], foreign, &[What::Owned(InodeId(5))]);
    }

    #[test]
    fn what_is_damaged_on_every_replica_is_lost_block_by_block() {
        let rotten = |node, blocks: &[u64]| {
            let lost = blocks.iter().map(|block| (ExtentId(3), *block)).collect();
            Replica { lost, ..replica(node, 20_000, &[]) }
        };
        let file = Reference { file_offset: 70_000, ..reference((1, 3), 5_000, 10_000, 5) };
        let lost = |replicas: &[Replica], file: Reference| {
            let found = compare(&[file], replicas);
            let part = |(part, what): Problem| {
                assert!(part.is_within(&file) && part.is_flushed == (what == What::Lost));
                (part.offset, part.length, part.file_offset)
            };
            found.into_iter().map(part).collect::<Vec<_>>()
        };
        let third = rotten(3, &[]);
        assert_eq!(lost(&[rotten(1, &[2]), rotten(2, &[2]), third], file), [], "one has it");
        assert_eq!(lost(&[rotten(1, &[0, 4]), rotten(2, &[0, 4])], file), [], "of another file");
        let (one, other) = (rotten(1, &[0, 1, 2, 3]), rotten(2, &[1, 3, 4]));
        let (head, tail) = ((5_000, 3_192, 70_000), (12_288, 2_712, 77_288));
        assert_eq!(lost(&[one.clone(), other.clone()], file), [head, tail]);
        let unsynced = Reference { is_flushed: false, ..file };
        assert_eq!(lost(&[one.clone(), other], unsynced), [head, tail]);
        let shorter = replica(2, 100, &[]);
        let found = compare(&[file], &[shorter, rotten(1, &[2])]);
        assert!(found.contains(&(file, What::Lacks(NodeId(2)))) && found.len() == 2, "{found:?}");
    }
}
