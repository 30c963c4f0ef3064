//! Where a new directory goes (DESIGN.md section 4): spread at the top, near its parent below.

use std::collections::BTreeMap;
use std::sync::Mutex;

use milpa_types::{InodeId, MetaPartition, MetaSlot};

use crate::core::lock;

/// A new directory leaves its parent's partition if that holds this many more inodes than average…
const MARGIN_INODES: u64 = 4096;
/// …and this much more in percent.
const MARGIN_PERCENT: u64 = 25;

/// Chooses partitions for new inodes.
#[derive(Default)]
pub(crate) struct Placement {
    /// Placed by us since the loads in the view were measured, so that a burst spreads too.
    recent: Mutex<Recent>,
}

#[derive(Default)]
struct Recent {
    total_inodes: u64,
    placed: BTreeMap<MetaSlot, u64>,
}

impl Placement {
    /// The slot for a new directory below `parent`; `None` for the parent's own partition.
    /// `is_top`: the parent is the root or directly below it.
    pub(crate) fn directory(
        &self,
        partitions: &[MetaPartition],
        parent: InodeId,
        is_top: bool,
        draw: u64,
    ) -> Option<MetaSlot> {
        let home = parent.slot();
        let total: u64 = partitions.iter().map(|p| p.inodes).sum();
        let mut recent = lock(&self.recent);
        if recent.total_inodes != total {
            recent.total_inodes = total;
            recent.placed.clear();
        }
        let load = |p: &MetaPartition| {
            p.inodes.saturating_add(recent.placed.get(&p.slot).copied().unwrap_or(0))
        };
        let open: Vec<&MetaPartition> = partitions.iter().filter(|p| p.takes_inodes).collect();
        let home_load = open.iter().find(|p| p.slot == home).map(|p| load(p));
        let average = open.iter().map(|p| load(p)).sum::<u64>() / open.len().max(1) as u64;
        let crowded = average + (average * MARGIN_PERCENT / 100).max(MARGIN_INODES);
        if !is_top && home_load.is_some_and(|load| load <= crowded) {
            return None;
        }
        // The draw only breaks ties, so that clients that start together do not all choose alike.
        let count = open.len().max(1);
        let turned = |i: usize| (i + (draw % count as u64) as usize) % count;
        let (_, chosen) = open.iter().enumerate().min_by_key(|(i, p)| (load(p), turned(*i)))?;
        let slot = chosen.slot;
        *recent.placed.entry(slot).or_default() += 1;
        (slot != home).then_some(slot)
    }

    /// Another slot for a new inode, after the partition of `full` refused it.
    pub(crate) fn elsewhere(partitions: &[MetaPartition], full: &[MetaSlot]) -> Option<MetaSlot> {
        let open = partitions.iter().filter(|p| p.takes_inodes && !full.contains(&p.slot));
        open.min_by_key(|p| p.inodes).map(|p| p.slot)
    }
}

#[cfg(test)]
mod tests {
    use milpa_types::{PartitionId, VolumeId};

    use super::*;

    fn partition(slot: u32, inodes: u64, takes_inodes: bool) -> MetaPartition {
        MetaPartition {
            id: PartitionId(u64::from(slot) + 1),
            volume: VolumeId(1),
            slot: MetaSlot(slot),
            members: vec![],
            leader: None,
            takes_inodes,
            inodes,
            dentries: 0,
            inode_highest: 0,
        }
    }

    #[test]
    fn top_directories_spread_evenly_even_before_loads_are_known() {
        let partitions = [partition(0, 1, true), partition(1, 0, true), partition(2, 0, true)];
        let placement = Placement::default();
        let mut counts = [0; 3];
        for draw in 0..30 {
            let slot = placement.directory(&partitions, InodeId::ROOT, true, draw);
            counts[slot.map_or(0, |s| s.0 as usize)] += 1;
        }
        assert!(counts.iter().all(|c| (9..=11).contains(c)), "{counts:?}");
    }

    #[test]
    fn deep_directories_stay_at_home_until_it_is_crowded() {
        let placement = Placement::default();
        let even = [partition(0, 5000, true), partition(1, 3000, true)];
        assert_eq!(placement.directory(&even, InodeId(9), false, 0), None);
        let crowded = [partition(0, 50_000, true), partition(1, 3000, true)];
        assert_eq!(placement.directory(&crowded, InodeId(9), false, 0), Some(MetaSlot(1)));
    }

    #[test]
    fn a_partition_that_takes_no_inodes_is_never_chosen() {
        let placement = Placement::default();
        let split = [partition(0, 10, false), partition(1, 99_999, true)];
        for draw in 0..10 {
            assert_eq!(placement.directory(&split, InodeId(9), false, draw), Some(MetaSlot(1)));
        }
        assert_eq!(Placement::elsewhere(&split, &[MetaSlot(1)]), None);
    }
}
