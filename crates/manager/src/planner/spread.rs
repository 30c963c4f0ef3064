//! Replicas that are to be made are spread over the disks that make them.
//!
//! Places that are chosen one after the other, each the best when its turn comes, can leave two
//! replicas to one disk while another has none: the first took what only the last one could have had. All
//! is whole again when the disk with the most is done, so this is worth undoing.
//!
//! ```text
//! a makes 1 and 3, b makes 2, c nothing     3 can only be at a; 1 at a or b; 2 at b or c
//! chain a -> b -> c: 2 goes to c, 1 to b    each makes one
//! ```
//!
//! As long as there is such a chain from a disk to one that makes at least two less, it is taken. When
//! there is none, no choice among these places leaves less to the busiest disk: Harvey, Ladner, Lovász
//! and Tamir, "Semi-matchings for bipartite graphs and load balancing" (2003).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::budget::Budget;
use crate::core::Replica;

/// Where a replica is to be made, and where else it could be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// The place chosen.
    pub place: Replica,
    /// Places that would do as well.
    pub others: Vec<Replica>,
}

/// Exchanges places until no disk makes more than it must. `making` says how many replicas each disk
/// makes, and `budget` what each node does, these among them.
pub(super) fn spread(
    choices: &mut [Choice],
    making: &mut BTreeMap<Replica, u64>,
    budget: &mut Budget,
) {
    while let Some(chain) = find_chain(choices, making, budget) {
        for (at, to) in chain {
            let Some(choice) = choices.get_mut(at) else { continue };
            let from = std::mem::replace(&mut choice.place, to);
            choice.others.retain(|other| *other != to);
            choice.others.push(from);
            making.entry(from).and_modify(|count| *count = count.saturating_sub(1));
            *making.entry(to).or_default() += 1;
            budget.give_back(from.node);
            budget.take(to.node);
        }
    }
}

/// Which choices are to move, and where to. The first leaves the busiest disk from which a chain leads
/// to one that makes at least two less, and each goes where the one after it leaves.
fn find_chain(
    choices: &[Choice],
    making: &BTreeMap<Replica, u64>,
    budget: &Budget,
) -> Option<Vec<(usize, Replica)>> {
    let count = |disk: &Replica| making.get(disk).copied().unwrap_or(0);
    let mut by_disk: BTreeMap<Replica, Vec<usize>> = BTreeMap::new();
    for (at, choice) in choices.iter().enumerate() {
        by_disk.entry(choice.place).or_default().push(at);
    }
    let mut starts: Vec<Replica> = by_disk.keys().copied().collect();
    starts.sort_by_key(|disk| (Reverse(count(disk)), *disk));
    // What one start reached in vain needs no second look: the later ones make no more than it does.
    let mut seen: BTreeSet<Replica> = BTreeSet::new();
    starts.into_iter().find_map(|start| {
        let ends = |disk: &Replica| {
            let has_room = disk.node == start.node || budget.has_room_at(disk.node);
            has_room && count(disk) + 2 <= count(&start)
        };
        search(start, ends, choices, &by_disk, &mut seen)
    })
}

/// The shortest chain from a disk to one where it `ends`, among those not `seen` yet.
fn search(
    start: Replica,
    ends: impl Fn(&Replica) -> bool,
    choices: &[Choice],
    by_disk: &BTreeMap<Replica, Vec<usize>>,
    seen: &mut BTreeSet<Replica>,
) -> Option<Vec<(usize, Replica)>> {
    let mut came_by: BTreeMap<Replica, usize> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    seen.insert(start);
    let others = |at: usize| choices.get(at).into_iter().flat_map(|choice| &choice.others);
    while let Some(disk) = queue.pop_front() {
        let here = by_disk.get(&disk).into_iter().flatten();
        for (at, other) in here.flat_map(|at| others(*at).map(|other| (*at, *other))) {
            if !seen.insert(other) {
                continue;
            }
            came_by.insert(other, at);
            if ends(&other) {
                return Some(chain_to(other, &came_by, choices));
            }
            queue.push_back(other);
        }
    }
    None
}

fn chain_to(
    end: Replica,
    came_by: &BTreeMap<Replica, usize>,
    choices: &[Choice],
) -> Vec<(usize, Replica)> {
    let mut chain = Vec::new();
    let mut to = end;
    while let Some((at, choice)) = came_by.get(&to).and_then(|at| Some((*at, choices.get(*at)?))) {
        chain.push((at, to));
        to = choice.place;
    }
    chain.reverse();
    chain
}

#[cfg(test)]
mod tests {
    use milpa_types::{DiskId, NodeId};
    use proptest::prelude::*;

    use super::*;

    fn disk(node: u32) -> Replica {
        Replica { node: NodeId(node), disk: DiskId(1) }
    }

    fn choice(places: &[u32]) -> Choice {
        let others = places[1..].iter().map(|node| disk(*node)).collect();
        Choice { place: disk(places[0]), others }
    }

    fn counted(choices: &[Choice], under_way: &[u64]) -> BTreeMap<Replica, u64> {
        let known = (0..).zip(under_way).map(|(node, count)| (disk(node), *count));
        let mut making: BTreeMap<Replica, u64> = known.collect();
        choices.iter().for_each(|choice| *making.entry(choice.place).or_default() += 1);
        making
    }

    fn spread_all(choices: &mut [Choice], under_way: &[u64], node_max: usize) -> Vec<u64> {
        let mut making = counted(choices, under_way);
        let by_node = making.iter().map(|(disk, count)| (disk.node, *count as usize)).collect();
        let mut budget = Budget { cluster: 0, by_node, node_max };
        spread(choices, &mut making, &mut budget);
        assert_eq!(making, counted(choices, under_way), "the count is kept");
        assert!(making.iter().all(|(disk, n)| budget.by_node[&disk.node] == *n as usize));
        making.into_values().collect()
    }

    #[test]
    fn a_chain_of_exchanges_leaves_one_to_each() {
        let mut choices = [choice(&[0, 1]), choice(&[1, 2]), choice(&[0])];
        assert_eq!(spread_all(&mut choices, &[0, 0, 0], 4), [1, 1, 1]);
        assert_eq!(choices.map(|choice| choice.place), [disk(1), disk(2), disk(0)]);
    }

    #[test]
    fn what_is_under_way_counts_and_no_node_goes_beyond_its_limit() {
        let mut choices = [choice(&[0, 1]), choice(&[0, 1]), choice(&[0, 1])];
        assert_eq!(spread_all(&mut choices, &[0, 3], 4), [3, 3]);
        assert_eq!(spread_all(&mut choices, &[2, 0], 1), [4, 1], "one, and no more");
    }

    fn least(choices: &[Choice], under_way: &mut Vec<u64>) -> u64 {
        let Some((first, rest)) = choices.split_first() else {
            return under_way.iter().map(|count| count * count).sum();
        };
        let places = std::iter::once(&first.place).chain(&first.others);
        let tried = places.map(|place| {
            under_way[place.node.0 as usize] += 1;
            let sum = least(rest, under_way);
            under_way[place.node.0 as usize] -= 1;
            sum
        });
        tried.min().unwrap_or_default()
    }

    proptest! {
        /// Goal: no choice is better. Method: all are tried, of up to five replicas on four disks.
        #[test]
        fn no_other_choice_is_more_even(
            places in prop::collection::vec(prop::sample::subsequence(vec![0, 1, 2, 3], 1..4), 0..6),
            mut under_way in prop::collection::vec(0_u64..4, 4),
        ) {
            let mut choices: Vec<Choice> = places.iter().map(|of| choice(of)).collect();
            let before = choices.clone();
            let after = spread_all(&mut choices, &under_way, 100);
            prop_assert_eq!(after.iter().map(|n| n * n).sum::<u64>(), least(&before, &mut under_way));
            for (old, new) in before.iter().zip(&choices) {
                let all = |c: &Choice| c.others.iter().chain([&c.place]).copied().collect::<BTreeSet<_>>();
                prop_assert_eq!(all(old), all(new));
            }
        }
    }
}
