//! Goal: whatever happens to data nodes, one thing after the other and many at once, what was acknowledged is never
//! given up, no blank replica counts, and when the trouble ends every member has every write.
//!
//! Beside the world stands what the replicas really are: each write is a number, acknowledged when all members have
//! it, and a replica has those that it took part in or was given since.

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{Epoch, NodeId, PartitionId};
use milpa_wire::data::{Configuration, DataPartitionReport};
use proptest::prelude::*;

use super::{Chance, World, is_quiet, others};
use crate::core::{CommandV1, MEMBERS_MIN};
use crate::loads::Loads;
use crate::planner::{Plan, Step};

/// To whom something happens: one of them all, or one that has a part in what is under way.
#[derive(Clone, Copy, Debug)]
enum Whom {
    Any(u32),
    Primary,
    Learner,
    /// It is being made.
    Made,
    /// A place that is no member.
    Out,
}

fn anybody() -> impl Strategy<Value = Whom> {
    use Whom::*;
    prop_oneof![
        4 => (0_u32..6).prop_map(Any),
        4 => proptest::sample::select(vec![Primary, Learner, Made, Out])
    ]
}

#[derive(Clone, Copy, Debug)]
enum Happening {
    Dies,
    Returns,
    Drains,
    Stays,
    Slow,
    /// Its disk is out of service, or in it again.
    Fenced,
    /// It reports what is left of a replica.
    Damaged,
    /// Nothing is left of a replica.
    Lost,
    /// The group takes over no configuration.
    Stuck,
    /// Another manager leads.
    Manager,
}

fn any_happening() -> impl Strategy<Value = Happening> {
    use Happening::*;
    proptest::sample::select(vec![
        Dies, Dies, Returns, Returns, Drains, Stays, Slow, Fenced, Damaged, Damaged, Lost, Stuck,
        Manager,
    ])
}

/// A partition as it is.
struct Group {
    /// What its log says.
    configuration: Configuration,
    /// Acknowledged: 1 to this.
    written: u64,
    /// In which configuration all were found to hold the same.
    aligned: Option<Epoch>,
    has: BTreeMap<NodeId, BTreeSet<u64>>,
}

impl Group {
    fn new(configuration: Configuration) -> Group {
        let has = configuration.members.iter().map(|node| (*node, BTreeSet::new())).collect();
        Group { configuration, written: 0, aligned: None, has }
    }
}

struct Walk {
    world: World,
    groups: BTreeMap<PartitionId, Group>,
    stuck: BTreeSet<PartitionId>,
    /// Of ten steps so many are not taken.
    lost: u64,
    chance: Chance,
}

impl Walk {
    fn new(nodes: u32, deadline_ms: u64, lost: u64) -> Walk {
        let mut world = World::new(3, nodes);
        world.policy.dead_after_ms = 6_000;
        world.policy.balances = true;
        world.policy.repair_deadline_ms = deadline_ms;
        world.log.volume("home", 1, 2);
        world.settle();
        let records: Vec<_> =
            world.log.state.data_partitions().map(|it| it.configuration.clone()).collect();
        let ids = world.log.state.data_partitions().map(|record| record.id);
        let groups = ids.zip(records.into_iter().map(Group::new)).collect();
        Walk { world, groups, stuck: BTreeSet::new(), lost, chance: Chance(1) }
    }

    fn nodes(&self) -> Vec<NodeId> {
        self.world.data.keys().copied().filter(|node| node.0 > 103).collect()
    }

    fn own(&self, node: NodeId, partition: PartitionId) -> Option<&DataPartitionReport> {
        self.world.data.get(&node)?.get(&partition)
    }

    /// Whether a replica is there and takes part.
    fn serves(&self, node: NodeId, partition: PartitionId) -> bool {
        let is_up = !self.world.down.contains(&node) && !self.world.fenced.contains(&node);
        is_up && self.own(node, partition).is_some()
    }

    /// Whether all that was acknowledged is left without the replica at this node, in replicas that the promise counts.
    fn is_spare(&self, node: NodeId, partition: PartitionId) -> bool {
        let group = &self.groups[&partition];
        let record = self.world.data_record(partition.0);
        let rest = |members: &[NodeId]| -> Vec<NodeId> {
            let is_left = |it: &NodeId| {
                *it != node && self.own(*it, partition).is_some() && !self.world.fenced.contains(it)
            };
            members.iter().copied().filter(is_left).collect()
        };
        let is_enough = |members: &[NodeId]| match rest(members)[..] {
            _ if !members.contains(&node)
                && rest(members).len() == members.len()
                && members.len() >= MEMBERS_MIN =>
            {
                true
            }
            [] => false,
            // It has taken part as one of the two.
            [alone] => {
                let own = self.own(alone, partition).map(|own| own.configuration.members.len());
                members.len() == MEMBERS_MIN
                    && group.configuration == record.configuration
                    && own == Some(MEMBERS_MIN)
                    && self.world.log.state.is_whole(partition, alone)
            }
            _ => rest(members).len() * 2 > members.len(),
        };
        let left: BTreeSet<u64> = rest(&group.configuration.members)
            .iter()
            .flat_map(|it| group.has[it].iter().copied())
            .collect();
        left.len() as u64 == group.written
            && is_enough(&group.configuration.members)
            && is_enough(&record.configuration.members)
    }

    fn find(&self, whom: Whom, partition: PartitionId) -> Option<NodeId> {
        let record = self.world.data_record(partition.0);
        let configuration = &self.groups[&partition].configuration;
        match whom {
            Whom::Any(index) => {
                let nodes = self.nodes();
                Some(nodes[index as usize % nodes.len()])
            }
            Whom::Primary => Some(configuration.primary),
            Whom::Learner => configuration.learners.first().copied(),
            Whom::Made => self.world.log.state.task(partition).map(|task| task.place.node),
            Whom::Out => {
                let places = record.replicas.iter().map(|place| place.node);
                places.into_iter().find(|node| !configuration.members.contains(node))
            }
        }
    }

    fn happen(&mut self, node: NodeId, partition: PartitionId, happening: Happening) {
        let drain = |drains| CommandV1::DrainNode { node, drains, begun_unix_ms: 1 };
        let may_be_lost = self.own(node, partition).is_some() && self.is_spare(node, partition);
        match happening {
            Happening::Dies => drop(self.world.down.insert(node)),
            Happening::Returns => drop(self.world.down.remove(&node)),
            Happening::Drains => drop(self.world.log.apply(drain(true))),
            Happening::Stays => drop(self.world.log.apply(drain(false))),
            Happening::Slow if self.world.slow.remove(&node) => {}
            Happening::Slow => drop(self.world.slow.insert(node)),
            Happening::Fenced if self.world.fenced.remove(&node) => {}
            Happening::Fenced => {
                if self.groups.keys().all(|it| self.is_spare(node, *it)) {
                    self.world.fenced.insert(node);
                }
            }
            Happening::Damaged if may_be_lost => {
                self.world.data.get_mut(&node).unwrap().remove(&partition);
                self.world.damaged_at(node).insert(partition);
            }
            Happening::Lost if may_be_lost => {
                self.world.data.get_mut(&node).unwrap().remove(&partition);
            }
            Happening::Damaged | Happening::Lost => {}
            Happening::Stuck if self.stuck.remove(&partition) => {}
            Happening::Stuck => drop(self.stuck.insert(partition)),
            Happening::Manager => self.world.loads = Loads::new(self.world.now_ms),
        }
    }

    fn has_majority(&self, partition: PartitionId) -> bool {
        let members = &self.groups[&partition].configuration.members;
        members.iter().filter(|node| self.serves(**node, partition)).count() * 2 > members.len()
    }

    /// Who is in the group adopts what its log says, writes go on, and the primary gives all what they lack.
    fn live(&mut self, partition: PartitionId) {
        let configuration = self.groups[&partition].configuration.clone();
        let has_majority = self.has_majority(partition);
        let holders: Vec<NodeId> = configuration.holders().collect();
        let serving: Vec<NodeId> =
            holders.iter().copied().filter(|node| self.serves(*node, partition)).collect();
        let leader = configuration
            .members
            .iter()
            .copied()
            .find(|node| serving.contains(node) && has_majority);
        let writes = self.chance.below(4) == 0;
        let fills = self.chance.below(3) == 0;
        let group = self.groups.get_mut(&partition).unwrap();
        let all_serve = configuration.members.iter().all(|node| serving.contains(node));
        if writes && all_serve && configuration.members.len() >= MEMBERS_MIN && leader.is_some() {
            group.written += 1;
            for node in &configuration.members {
                group.has.entry(*node).or_default().insert(group.written);
            }
        }
        if fills && leader.is_some() && serving.contains(&configuration.primary) {
            let all: BTreeSet<u64> = serving
                .iter()
                .flat_map(|node| group.has.get(node).into_iter().flatten().copied())
                .collect();
            let lacks = |node: &&NodeId| group.has.get(node).map(BTreeSet::len) != Some(all.len());
            match serving.iter().find(lacks).copied() {
                Some(node) => drop(group.has.insert(node, all)),
                None if serving.len() == holders.len() => group.aligned = Some(configuration.epoch),
                None => {}
            }
        }
        let same = |node: &NodeId| group.has.get(node) == group.has.get(&configuration.primary);
        let is_aligned = group.aligned == Some(configuration.epoch) && serving.iter().all(same);
        let is_asked = !configuration.learners.is_empty();
        let is_heard = |node: &NodeId| !self.world.down.contains(node) && serving.contains(node);
        for (node, held) in &mut self.world.data {
            let Some(report) = held.get_mut(&partition) else { continue };
            if !is_heard(node) {
                report.leader = None;
                continue;
            }
            if leader.is_some() {
                report.configuration = configuration.clone();
                report.term = configuration.epoch.0;
            }
            report.leader = leader;
            report.unaligned = u64::from(*node == configuration.primary && !is_aligned);
            let is_leader = leader == Some(*node);
            report.current =
                if is_leader && is_asked { others(&serving, leader) } else { Vec::new() };
        }
    }

    fn configure(&mut self, partition: PartitionId, wanted: &Configuration) {
        let group = &self.groups[&partition];
        let present = &group.configuration;
        let alone = match wanted.members[..] {
            [alone] if present.members != wanted.members => Some(alone),
            _ => None,
        };
        let is_survivor = |alone: NodeId| {
            let own = self.own(alone, partition).map(|own| own.configuration.members.len());
            self.serves(alone, partition)
                && own == Some(MEMBERS_MIN)
                && wanted.epoch > present.epoch
        };
        // Who stays has it first.
        let stay = || present.members.iter().filter(|it| wanted.members.contains(it));
        let have = stay().filter(|node| self.serves(**node, partition)).count();
        let may = alone.is_some_and(is_survivor)
            || have * 2 > stay().count()
                && !self.stuck.contains(&partition)
                && self.has_majority(partition)
                && wanted.follows(present);
        if !may {
            return;
        }
        if alone.is_some() {
            let all: BTreeSet<u64> =
                wanted.holders().flat_map(|it| group.has[&it].iter().copied()).collect();
            assert_eq!(
                all.len() as u64,
                group.written,
                "goes on without what was acknowledged: {wanted:?}"
            );
        }
        // A majority of those before has it in their logs.
        let before: Vec<NodeId> =
            present.holders().filter(|node| self.serves(*node, partition)).collect();
        for node in before.into_iter().filter(|_| alone.is_none()).chain(alone) {
            let own = self.world.data.get_mut(&node).unwrap().get_mut(&partition).unwrap();
            own.configuration = wanted.clone();
        }
        self.groups.get_mut(&partition).unwrap().configuration = wanted.clone();
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Configure { partition, configuration, .. } => {
                self.configure(*partition, configuration);
            }
            Step::CreateData { node, create } if !self.world.down.contains(node) => {
                let (partition, node) = (create.partition, *node);
                if self.own(node, partition).is_some() {
                    return;
                }
                // One of which there were too few grows anew.
                let first = || Group::new(create.configuration.clone());
                let group = self.groups.entry(partition).or_insert_with(first);
                let is_blank = group.written > 0 && group.configuration.members.contains(&node);
                assert!(!is_blank, "a blank member: {step:?}");
                self.world.take(step);
                self.groups.get_mut(&partition).unwrap().has.insert(node, BTreeSet::new());
            }
            Step::Delete { node, partition, .. } if self.groups.contains_key(partition) => {
                if !self.world.damaged_at(*node).contains(partition) {
                    let (group, record) =
                        (&self.groups[partition], self.world.data_record(partition.0));
                    let members = &group.configuration.members;
                    assert!(!members.contains(node) && !record.is_configured(*node), "{step:?}");
                    assert!(record.configuration.members.len() >= 3, "it lacks copies: {step:?}");
                    let others = members.iter().flat_map(|it| group.has[it].iter().copied());
                    let left: BTreeSet<u64> = others.collect();
                    assert_eq!(left.len() as u64, group.written, "the last copy: {step:?}");
                }
                self.world.take(step);
            }
            other => self.world.take(other),
        }
    }

    fn pass(&mut self) -> Plan {
        let partitions: Vec<PartitionId> = self.groups.keys().copied().collect();
        partitions.into_iter().for_each(|partition| self.live(partition));
        let plan = self.world.pass_where(|_| false);
        for step in &plan.steps {
            if self.chance.below(10) >= self.lost {
                self.take(step);
            }
        }
        plan
    }

    fn heal(&mut self) {
        self.world.down.clear();
        self.world.fenced.clear();
        self.world.slow.clear();
        self.stuck.clear();
        self.lost = 0;
        for node in self.nodes() {
            self.world.log.apply(CommandV1::DrainNode { node, drains: false, begun_unix_ms: 2 });
        }
        (0..400).for_each(|_| drop(self.pass()));
    }

    fn check(&mut self) {
        let plan = self.pass();
        let tasks: Vec<_> = self.world.log.state.tasks().collect();
        assert!(tasks.is_empty(), "{tasks:?} {plan:?}");
        for record in self.world.log.state.data_partitions() {
            let (configuration, group) = (&record.configuration, &self.groups[&record.id]);
            assert_eq!(*configuration, group.configuration, "{:?}", plan.problems);
            let members: BTreeSet<NodeId> = configuration.members.iter().copied().collect();
            assert_eq!(
                (members.len(), record.replicas.len()),
                (3, 3),
                "{record:?} {:?}",
                plan.problems
            );
            for node in &members {
                assert_eq!(group.has[node].len() as u64, group.written, "{node} of {record:?}");
            }
            let held = self.world.data.iter().filter(|(_, held)| held.contains_key(&record.id));
            assert_eq!(held.map(|(node, _)| *node).collect::<BTreeSet<_>>(), members);
        }
        assert!(
            self.world.data_damaged.values().all(BTreeSet::is_empty),
            "{:?}",
            self.world.data_damaged
        );
        assert!(is_quiet(&plan), "{plan:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn whatever_happens_to_data_nodes_heals(
        nodes in 3_u32..7,
        deadline_ms in prop_oneof![Just(20_000_u64), Just(86_400_000)],
        happenings in proptest::collection::vec(
            (anybody(), any::<bool>(), any_happening(), prop_oneof![0_u64..4, 0_u64..40]), 1..40
        ),
        lost in 0_u64..10
    ) {
        let mut walk = Walk::new(nodes, deadline_ms, lost);
        let partitions: Vec<PartitionId> = walk.groups.keys().copied().collect();
        for (whom, which, happening, passes) in happenings {
            let partition = partitions[usize::from(which)];
            if let Some(node) = walk.find(whom, partition) {
                walk.happen(node, partition, happening);
            }
            for _ in 0..passes {
                walk.pass();
            }
        }
        walk.heal();
        walk.check();
    }
}
