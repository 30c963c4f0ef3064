//! Who has every byte of a data partition that was acknowledged, by what the managers have decided and seen: on whom a
//! partition may rest when its other members are lost (docs/decisions/0007).

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{Epoch, NodeId, PartitionId};
use milpa_wire::data::Configuration;
use serde::{Deserialize, Serialize};

use super::command::Applied;
use super::partition::MEMBERS_MIN;
use super::state::State;

/// So many configurations are decided for a group that takes none of them before it is forgotten what was before them.
const POSSIBLE_MAX: usize = 8;

/// A configuration that a group may have, and who has what if it does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Possible {
    configuration: Configuration,
    holders: Holders,
}

/// Who has what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Holders {
    /// Members with every acknowledged byte.
    whole: BTreeSet<NodeId>,
    /// Who had every byte that had been acknowledged when others joined it as one of two; and those others, who are
    /// members still, and are not known to have all.
    completes: BTreeMap<NodeId, BTreeSet<NodeId>>,
}

impl Possible {
    /// Who has what if the next configuration of the group has these members.
    fn holders_next(&self, members: &BTreeSet<NodeId>) -> Holders {
        let before: BTreeSet<NodeId> = self.configuration.members.iter().copied().collect();
        let Holders { mut whole, mut completes } = self.holders.clone();
        if before.len() == 1 && members.len() == 1 {
            // Who goes on instead of one that went on alone, and acknowledged nothing, has all that there is.
            whole.extend(members.difference(&before));
        }
        if before.len() == MEMBERS_MIN && before.is_subset(members) {
            let joined = || members.difference(&before).copied();
            for node in before.intersection(&whole) {
                completes.entry(*node).or_default().extend(joined());
            }
        }
        // Who remains a member takes part in all that is acknowledged.
        whole.retain(|node| members.contains(node));
        completes.retain(|_, others| {
            others.retain(|other| members.contains(other) && !whole.contains(other));
            !others.is_empty()
        });
        Holders { whole, completes }
    }
}

impl Holders {
    /// What is so in both cases.
    fn common(self, other: &Holders) -> Holders {
        let whole = self.whole.intersection(&other.whole).copied().collect();
        let both = self.completes.into_iter().filter_map(|(node, completed)| {
            let others = other.completes.get(&node)?;
            let completed: BTreeSet<NodeId> = completed.intersection(others).copied().collect();
            (!completed.is_empty()).then_some((node, completed))
        });
        Holders { whole, completes: both.collect() }
    }
}

fn forget_in(completes: &mut BTreeMap<NodeId, BTreeSet<NodeId>>, node: NodeId) {
    completes.remove(&node);
    completes.retain(|_, others| {
        others.remove(&node);
        !others.is_empty()
    });
}

impl State {
    /// Notes who has what in a configuration that is about to be decided. It follows the one decided before it; or, if it is
    /// decided instead of others, any that the group may have since `adopted`, which it was seen to have: what is so
    /// whichever it follows is known.
    pub(super) fn note_holders(
        &mut self,
        partition: PartitionId,
        before: Configuration,
        next: &Configuration,
        adopted: Option<Epoch>,
    ) {
        let holders = Holders {
            whole: self.whole.remove(&partition).unwrap_or_default(),
            completes: self.completes.remove(&partition).unwrap_or_default(),
        };
        let mut possible = self.possible.remove(&partition).unwrap_or_default();
        possible.retain(|it| adopted.is_some_and(|adopted| it.configuration.epoch >= adopted));
        let starts_at_adopted = possible.first().map(|it| it.configuration.epoch) == adopted;
        if !starts_at_adopted || possible.len() >= POSSIBLE_MAX {
            // Not known what the group may have. Who had everything in the last one decided had it in those before, too, as
            // far as it was a member, and who is one in the next was one in all that this can follow.
            possible.clear();
        }
        possible.push(Possible { configuration: before, holders });
        let members = next.members.iter().copied().collect();
        // The word for a survivor need not follow the last one decided: the planner has seen that it follows the one adopted.
        let is_only = possible.len() == 1;
        let preceding = possible.iter().filter(|it| is_only || next.follows(&it.configuration));
        let holders = preceding.map(|it| it.holders_next(&members));
        let Holders { whole, completes } =
            holders.reduce(|one, other| one.common(&other)).unwrap_or_default();
        self.possible.insert(partition, possible);
        if !whole.is_empty() {
            self.whole.insert(partition, whole);
        }
        if !completes.is_empty() {
            self.completes.insert(partition, completes);
        }
    }

    /// Notes who would go on instead of one that is about to go on alone.
    pub(super) fn note_other_of_two(
        &mut self,
        partition: PartitionId,
        before: &Configuration,
        next: &Configuration,
    ) {
        match (&before.members[..], &next.members[..]) {
            ([one], [other]) if one == other => {}
            ([_, _], [alone]) => {
                let other = before.members.iter().find(|node| *node != alone);
                let other = other.filter(|node| self.is_whole(partition, **node)).copied();
                self.other_of_two.extend(other.map(|other| (partition, other)));
            }
            _ => drop(self.other_of_two.remove(&partition)),
        }
    }

    pub(super) fn members_whole(&mut self, partitions: &[(PartitionId, Epoch)]) -> Applied {
        for (partition, epoch) in partitions {
            let Some(record) = self.data.get(partition) else { continue };
            if record.configuration.epoch == *epoch {
                let members = record.configuration.members.iter().copied().collect();
                self.whole.insert(*partition, members);
                self.completes.remove(partition);
                // What was known before says less now than the members of the last one do.
                self.possible.remove(partition);
            }
        }
        Applied::Done
    }

    /// A partition's replica at a node is another one from now on, or none.
    pub(super) fn forget_holder(&mut self, partition: PartitionId, node: NodeId) {
        if self.other_of_two(partition) == Some(node) {
            self.other_of_two.remove(&partition);
        }
        if let Some(completes) = self.completes.get_mut(&partition) {
            forget_in(completes, node);
        }
        self.completes.retain(|_, completes| !completes.is_empty());
        for possible in self.possible.get_mut(&partition).into_iter().flatten() {
            possible.holders.whole.remove(&node);
            forget_in(&mut possible.holders.completes, node);
        }
    }

    /// The partition is no more.
    pub(super) fn forget_holders(&mut self, partition: PartitionId) {
        self.whole.remove(&partition);
        self.completes.remove(&partition);
        self.other_of_two.remove(&partition);
        self.possible.remove(&partition);
    }

    /// As formats before 9 say it.
    #[cfg(test)]
    pub(crate) fn without_possible(mut self) -> State {
        self.possible.clear();
        self
    }

    /// Whether a member of a data partition is known to have every acknowledged byte, if the group takes the newest
    /// configuration decided: all members were once seen to hold the same, and it has been one since then.
    #[must_use]
    pub fn is_whole(&self, partition: PartitionId, member: NodeId) -> bool {
        self.whole.get(&partition).is_some_and(|whole| whole.contains(&member))
    }

    /// Who, together with this member of a data partition, has every acknowledged byte: it had all that there was when this
    /// one joined, who has been a member since. And every overwrite: this one joined two, who both had all that was
    /// committed before.
    pub fn complements(
        &self,
        partition: PartitionId,
        member: NodeId,
    ) -> impl Iterator<Item = NodeId> {
        let completes = self.completes.get(&partition).into_iter().flatten();
        completes.filter(move |(_, others)| others.contains(&member)).map(|(node, _)| *node)
    }

    /// Who goes on instead of one that goes on alone, should that be lost before another one has joined it.
    #[must_use]
    pub fn other_of_two(&self, partition: PartitionId) -> Option<NodeId> {
        self.other_of_two.get(&partition).copied()
    }
}
