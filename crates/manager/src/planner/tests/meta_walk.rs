//! Goal: whatever happens to meta nodes, one thing after the other and many at once, nothing that may be the only copy is
//! deleted, no group is told to go on without a majority that remembers, and when the trouble ends all is as it should be.

use std::collections::BTreeSet;

use milpa_types::{NodeId, PartitionId};
use milpa_wire::meta::MetaPartitionReport;
use proptest::prelude::*;

use super::meta_replicas::damage;
use super::{Chance, World, is_quiet, others};
use crate::core::{CommandV1, PartitionKind};
use crate::loads::Loads;
use crate::planner::{Plan, Step};

/// To whom something happens: one of them all, or one that has a part in what is under way.
#[derive(Clone, Copy, Debug)]
enum Whom {
    Any(u32),
    Leader,
    /// It is to be a learner, or is one.
    Joining,
    /// It is decided, and no voter yet.
    Coming,
    /// It votes, and is decided no more.
    Leaving,
}

fn anybody() -> impl Strategy<Value = Whom> {
    use Whom::*;
    prop_oneof![
        4 => (0_u32..5).prop_map(Any),
        4 => proptest::sample::select(vec![Leader, Joining, Coming, Leaving])
    ]
}

#[derive(Clone, Copy, Debug)]
enum Happening {
    Dies,
    Returns,
    Drains,
    Stays,
    Fills,
    /// It reports a damaged replica.
    Damaged,
    /// The same, but what is there has not been looked at yet.
    Hidden,
    /// Nothing is left of a replica.
    Lost,
    Leads,
    /// The group takes over no members.
    Stuck,
    /// Another manager leads.
    Manager,
}

fn any_happening() -> impl Strategy<Value = Happening> {
    use Happening::*;
    proptest::sample::select(vec![
        Dies, Returns, Returns, Drains, Stays, Fills, Damaged, Damaged, Hidden, Lost, Leads, Leads,
        Stuck, Manager,
    ])
}

/// The groups as they are, beside what the world says of them.
struct Walk {
    world: World,
    hidden: Vec<(NodeId, PartitionId)>,
    stuck: BTreeSet<PartitionId>,
    /// Of ten steps so many are not taken.
    lost: u64,
    chance: Chance,
}

impl Walk {
    fn new(nodes: u32, deadline_ms: u64, lost: u64) -> Walk {
        let mut world = World::new(nodes, 3);
        world.policy.dead_after_ms = 6_000;
        world.policy.balances = true;
        world.policy.repair_deadline_ms = deadline_ms;
        world.log.volume("home", 2, 3);
        world.settle();
        Walk { world, hidden: Vec::new(), stuck: BTreeSet::new(), lost, chance: Chance(1) }
    }

    fn partitions(&self) -> Vec<PartitionId> {
        self.world.log.state.meta_partitions().map(|record| record.id).collect()
    }

    fn report(&self, node: NodeId, partition: PartitionId) -> Option<&MetaPartitionReport> {
        self.world.meta.get(&node)?.get(&partition).filter(|report| !report.is_damaged)
    }

    fn is_up(&self, node: NodeId) -> bool {
        !self.world.down.contains(&node)
    }

    /// What the newest of the replicas says.
    fn newest(&self, partition: PartitionId) -> MetaPartitionReport {
        let nodes = self.world.meta.keys().filter(|node| self.remembers(**node, partition));
        let own = |node: &NodeId| self.report(*node, partition).map(|own| (*node, own));
        let leads = |(node, own): &(NodeId, &MetaPartitionReport)| own.leader == Some(*node);
        let newest = nodes.filter_map(own).max_by_key(|it| (it.1.term, leads(it)));
        newest.map(|(_, own)| own.clone()).unwrap()
    }

    /// Voters that remember, and are up.
    fn well(&self, partition: PartitionId, voters: &[NodeId]) -> usize {
        let is_well = |node: &&NodeId| self.is_up(**node) && self.remembers(**node, partition);
        voters.iter().filter(is_well).count()
    }

    fn remembers(&self, node: NodeId, partition: PartitionId) -> bool {
        self.report(node, partition).is_some_and(|report| !report.voters.is_empty())
    }

    /// Whether the group, and the one that it may be about to become, could do without what a node remembers.
    fn is_spare(&self, node: NodeId, partition: PartitionId) -> bool {
        let decided = &self.world.log.state.meta_partition(partition).unwrap().members;
        [&self.newest(partition).voters, decided].into_iter().all(|voters| {
            let rest = voters.iter().filter(|it| **it != node && self.remembers(**it, partition));
            !voters.contains(&node) || rest.count() * 2 > voters.len()
        })
    }

    fn find(&self, whom: Whom, partition: PartitionId) -> Option<NodeId> {
        let record = self.world.log.state.meta_partition(partition).unwrap();
        let newest = self.newest(partition);
        let among = |some: &[NodeId], others: &[NodeId]| {
            some.iter().copied().find(|it| !others.contains(it))
        };
        match whom {
            Whom::Any(index) => Some(NodeId(101 + index % self.world.meta.len() as u32)),
            Whom::Leader => newest.leader,
            Whom::Joining => record.joining,
            Whom::Coming => among(&record.members, &newest.voters),
            Whom::Leaving => among(&newest.voters, &record.members),
        }
    }

    fn happen(&mut self, node: NodeId, partition: PartitionId, happening: Happening) {
        let drain = |drains| CommandV1::DrainNode { node, drains, begun_unix_ms: 1 };
        let is_there = self.report(node, partition).is_some();
        match happening {
            Happening::Dies => drop(self.world.down.insert(node)),
            Happening::Returns => drop(self.world.down.remove(&node)),
            Happening::Drains => drop(self.world.log.apply(drain(true))),
            Happening::Stays => drop(self.world.log.apply(drain(false))),
            Happening::Fills if self.world.full.remove(&node) => {}
            Happening::Fills => drop(self.world.full.insert(node)),
            Happening::Damaged if is_there && self.is_spare(node, partition) => {
                damage(&mut self.world, node, partition);
            }
            Happening::Hidden if is_there && self.is_spare(node, partition) => {
                self.world.meta.get_mut(&node).unwrap().remove(&partition);
                self.hidden.push((node, partition));
            }
            Happening::Lost if is_there && self.is_spare(node, partition) => {
                self.world.meta.get_mut(&node).unwrap().remove(&partition);
            }
            Happening::Leads => self.lead(node, partition),
            Happening::Stuck if self.stuck.remove(&partition) => {}
            Happening::Stuck => drop(self.stuck.insert(partition)),
            Happening::Manager => self.world.loads = Loads::new(self.world.now_ms),
            Happening::Damaged | Happening::Hidden | Happening::Lost => {}
        }
    }

    /// Lets a node lead, if it could be elected.
    fn lead(&mut self, node: NodeId, partition: PartitionId) {
        let newest = self.newest(partition);
        let is_majority = self.well(partition, &newest.voters) * 2 > newest.voters.len();
        if !is_majority
            || !self.is_up(node)
            || !self.remembers(node, partition)
            || !newest.voters.contains(&node)
        {
            return;
        }
        let own = self.world.meta.get_mut(&node).unwrap().get_mut(&partition).unwrap();
        let (is_full, declines_lead) = (own.is_full, own.declines_lead);
        *own = MetaPartitionReport {
            leader: Some(node),
            term: newest.term + 1,
            is_full,
            declines_lead,
            ..newest
        };
    }

    /// Leaders are elected where they are missing, and everybody that is up and well follows.
    fn follow(&mut self) {
        for partition in self.partitions() {
            let newest = self.newest(partition);
            let has_majority = self.well(partition, &newest.voters) * 2 > newest.voters.len();
            match has_majority && !self.stuck.contains(&partition) {
                true => self.world.stuck.remove(&partition),
                false => self.world.stuck.insert(partition),
            };
            let leads = |node: &NodeId| self.is_up(*node) && self.remembers(*node, partition);
            let present = newest.leader.filter(|it| newest.voters.contains(it)).filter(leads);
            let leader = present.or_else(|| newest.voters.iter().copied().find(leads));
            self.follow_leader(partition, &newest, leader.filter(|_| has_majority));
        }
    }

    fn follow_leader(
        &mut self,
        partition: PartitionId,
        newest: &MetaPartitionReport,
        leader: Option<NodeId>,
    ) {
        let all = newest.voters.iter().chain(&newest.learners).copied();
        let is_there = |node: &NodeId| self.is_up(*node) && self.report(*node, partition).is_some();
        let all: Vec<NodeId> = all.filter(is_there).collect();
        for node in &all {
            let own = self.world.meta.get_mut(node).unwrap().get_mut(&partition).unwrap();
            own.leader = leader;
            if leader.is_some() {
                own.term = newest.term + u64::from(newest.leader != leader);
                own.voters.clone_from(&newest.voters);
                own.learners.clone_from(&newest.learners);
                let leads = leader == Some(*node);
                own.current = if leads { others(&all, leader) } else { Vec::new() };
            }
        }
    }

    fn pass(&mut self) -> Plan {
        self.follow();
        let (lost, chance) = (self.lost, &mut self.chance);
        let plan = self.world.pass_where(|_| chance.below(10) >= lost);
        for step in &plan.steps {
            match step {
                Step::SetMembers { partition, voters, .. }
                    if !self.world.stuck.contains(partition) =>
                {
                    assert!(self.well(*partition, voters) * 2 > voters.len(), "{step:?}");
                }
                Step::Delete { node, kind: PartitionKind::Meta, partition, .. } => {
                    let voters = self.newest(*partition).voters;
                    assert!(!voters.contains(node), "{step:?} {voters:?}");
                }
                _ => {}
            }
        }
        plan
    }

    fn heal(&mut self) {
        self.world.down.clear();
        self.world.full.clear();
        self.stuck.clear();
        self.lost = 0;
        self.show();
        for node in self.world.meta.keys().copied().collect::<Vec<_>>() {
            self.world.log.apply(CommandV1::DrainNode { node, drains: false, begun_unix_ms: 2 });
        }
        (0..300).for_each(|_| drop(self.pass()));
    }

    /// What was not looked at yet is seen.
    fn show(&mut self) {
        for (node, partition) in std::mem::take(&mut self.hidden) {
            if self.report(node, partition).is_none() {
                damage(&mut self.world, node, partition);
            }
        }
    }

    fn check(&mut self) {
        let plan = self.pass();
        assert!(is_quiet(&plan), "{plan:?}");
        let tasks: Vec<_> = self.world.log.state.tasks().collect();
        assert!(tasks.is_empty(), "{tasks:?}");
        for record in self.world.log.state.meta_partitions() {
            let sorted = |nodes: &[NodeId]| nodes.iter().copied().collect::<BTreeSet<_>>();
            assert_eq!(
                (record.members.len(), record.joining),
                (3, None),
                "{record:?} {:?}",
                plan.problems
            );
            let newest = self.newest(record.id);
            assert_eq!(sorted(&newest.voters), sorted(&record.members));
            assert_eq!(newest.learners, []);
            let held = self.world.meta.iter().filter(|(_, held)| held.contains_key(&record.id));
            assert_eq!(
                held.map(|(node, _)| *node).collect::<BTreeSet<_>>(),
                sorted(&record.members)
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn whatever_happens_to_meta_nodes_heals(
        nodes in 3_u32..6,
        deadline_ms in prop_oneof![Just(20_000_u64), Just(86_400_000)],
        happenings in proptest::collection::vec(
            (anybody(), 0_u64..2, any_happening(), prop_oneof![0_u64..4, 0_u64..40]), 1..40
        ),
        lost in 0_u64..10
    ) {
        let mut walk = Walk::new(nodes, deadline_ms, lost);
        for (whom, partition, happening, passes) in happenings {
            let partition = PartitionId(1 + partition);
            if let Some(node) = walk.find(whom, partition) {
                walk.happen(node, partition, happening);
            }
            for pass in 0..passes {
                walk.pass();
                if pass == 5 {
                    walk.show();
                }
            }
        }
        walk.heal();
        walk.check();
    }
}
