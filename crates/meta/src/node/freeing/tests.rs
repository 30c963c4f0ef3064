//! A partition's orders, and data nodes that do them, or not.

use super::*;
use milpa_types::{
    ClusterId, DataPartition, Epoch, ExtentId, FreedRange, Volume, VolumeId, VolumeOptions,
};

const P: PartitionId = PartitionId(10);
const Q: PartitionId = PartitionId(11);
const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);
const C: NodeId = NodeId(3);

fn view(partitions: &[(PartitionId, &[NodeId])]) -> VolumeView {
    let partition = |&(id, replicas): &(PartitionId, &[NodeId])| DataPartition {
        id,
        volume: VolumeId(1),
        epoch: Epoch(1),
        // The last one is not in service now.
        members: replicas[..replicas.len().max(2) - 1].to_vec(),
        primary: replicas[0],
        replicas: replicas.to_vec(),
        takes_extents: true,
        used_bytes: 0,
        extents: 0,
    };
    VolumeView {
        cluster: ClusterId(1),
        version: 1,
        volume: Volume { id: VolumeId(1), name: "v".to_owned(), options: VolumeOptions::default() },
        meta: Vec::new(),
        data: partitions.iter().map(partition).collect(),
        nodes: Vec::new(),
    }
}

/// A partition's free orders, and data nodes that do as `answer` says.
struct World {
    freeing: Freeing,
    waiting: BTreeMap<u64, FreeOrder>,
    highest: u64,
    now: u64,
    /// By node and order, how often it was asked to.
    sent: BTreeMap<(NodeId, u64), usize>,
    requests: usize,
}

type Answers<'a> = &'a dyn Fn(NodeId, PartitionId, &[FreeOrder]) -> Option<Answer>;

fn all_done(_: NodeId, _: PartitionId, _: &[FreeOrder]) -> Option<Answer> {
    Some(Answer::Done)
}

impl World {
    fn new(view: &VolumeView) -> World {
        let mut freeing = Freeing::default();
        freeing.learn(Some(view), 0, 0);
        let (waiting, sent) = (BTreeMap::new(), BTreeMap::new());
        World { freeing, waiting, highest: 0, now: 0, sent, requests: 0 }
    }

    fn delete(&mut self, partition: PartitionId, count: u64) {
        for _ in 0..count {
            self.highest += 1;
            let (order, extent) = (self.highest, ExtentId(1));
            let range = FreedRange { partition, extent, offset: 0, length: 1 };
            self.waiting.insert(order, FreeOrder { order, range });
        }
    }

    fn learn(&mut self, view: &VolumeView) {
        self.freeing.learn(Some(view), self.highest, self.now);
    }

    /// A tick of 100 ms. All batches are answered within it.
    fn tick(&mut self, answer: Answers) {
        self.now += 100;
        for batch in self.start() {
            self.end(&batch, answer);
        }
    }

    fn start(&mut self) -> Vec<Batch> {
        let waiting = &self.waiting;
        let above = |after| waiting.range(after + 1..).map(|(_, order)| *order);
        self.freeing.batches(self.now, above, &mut BTreeMap::new())
    }

    fn end(&mut self, batch: &Batch, answer: Answers) {
        let mut answers = BTreeMap::new();
        for (partition, orders) in &batch.orders {
            self.requests += 1;
            for order in orders {
                *self.sent.entry((batch.node, order.order)).or_default() += 1;
            }
            if let Some(answer) = answer(batch.node, *partition, orders) {
                answers.insert(*partition, answer);
            }
        }
        for order in self.freeing.answered(batch, &answers, self.highest, self.now) {
            self.waiting.remove(&order);
        }
    }

    fn ticks(&mut self, count: usize, answer: Answers) {
        (0..count).for_each(|_| self.tick(answer));
    }

    /// How often each order was sent to a node.
    fn times(&self, node: NodeId) -> BTreeSet<usize> {
        let all = 1..=self.highest;
        all.map(|order| self.sent.get(&(node, order)).copied().unwrap_or(0)).collect()
    }

    fn gaps(&self) -> usize {
        self.freeing.nodes.values().map(|progress| progress.gaps.len()).sum()
    }
}

#[test]
fn an_order_is_confirmed_when_every_replica_has_done_it() {
    let mut world = World::new(&view(&[(P, &[A, B, C]), (Q, &[A, B])]));
    world.delete(P, 1);
    world.delete(Q, 1);
    world.delete(PartitionId(99), 1);
    world.ticks(50, &|node, _, _| (node != C).then_some(Answer::Done));
    assert_eq!(world.waiting.keys().copied().collect::<Vec<_>>(), [1, 3]);
    world.ticks(50, &all_done);
    assert_eq!(world.waiting.keys().copied().collect::<Vec<_>>(), [3], "of nobody's partition");
    assert_eq!((world.times(A), world.gaps()), (BTreeSet::from([0, 1]), 0));
}

/// The order that is deleted last is sent to the living next, each once, and what is remembered
/// does not grow with what waits.
#[test]
fn a_backlog_of_one_node_delays_nothing_at_the_others() {
    let mut world = World::new(&view(&[(P, &[A, B, C]), (Q, &[C, A, B])]));
    let away = |node, _: PartitionId, _: &[FreeOrder]| (node != C).then_some(Answer::Done);
    for _ in 0..20 {
        world.delete(P, 500);
        world.delete(Q, 500);
        world.tick(&away);
        for node in [A, B] {
            assert_eq!(world.times(node), BTreeSet::from([1]));
        }
    }
    assert_eq!((world.waiting.len(), world.gaps()), (20_000, 2));
    // Nor do new ones wait behind C's own backlog.
    world.ticks(20, &away);
    world.now += PAUSE_MS;
    world.tick(&all_done);
    world.delete(P, 1);
    world.tick(&all_done);
    assert_eq!(world.sent.get(&(C, world.highest)), Some(&1));
    assert!(world.waiting.len() > 10_000 && !world.waiting.contains_key(&world.highest));
    world.ticks(40, &all_done);
    assert_eq!((world.waiting.len(), world.gaps()), (0, 0));
    assert_eq!(world.times(A), BTreeSet::from([1]));
}

#[test]
fn a_replica_that_refuses_delays_no_other_partition() {
    let mut world = World::new(&view(&[(P, &[A, B]), (Q, &[A, B])]));
    let refuses = |node, partition, _: &[FreeOrder]| {
        Some(if (node, partition) == (B, P) { Answer::Refused } else { Answer::Done })
    };
    for _ in 0..100 {
        world.delete(P, 30);
        world.delete(Q, 30);
        world.tick(&refuses);
    }
    assert_eq!((world.waiting.len(), world.gaps()), (3_000, 1));
    assert!(world.waiting.values().all(|order| order.range.partition == P));
    assert_eq!(world.times(A), BTreeSet::from([1]));
    let before = world.requests;
    world.ticks(100, &refuses);
    assert!(world.requests - before <= 6, "asked {} times in 10 s", world.requests - before);
    world.ticks(40, &all_done);
    assert_eq!((world.waiting.len(), world.gaps()), (0, 0));
}

/// One block that nobody can read must not keep what follows from being freed, only from being forgotten.
#[test]
fn what_a_replica_cannot_do_is_passed_over_and_tried_again() {
    let mut world = World::new(&view(&[(P, &[A])]));
    let bad = |_, _: PartitionId, orders: &[FreeOrder]| {
        let is_bad = orders.iter().any(|order| order.order == 5);
        Some(if is_bad { Answer::Partly } else { Answer::Done })
    };
    world.delete(P, 5_000);
    world.ticks(100, &bad);
    assert!(!world.times(A).contains(&0));
    assert!(world.waiting.contains_key(&5));
    world.delete(P, 5_000);
    world.ticks(100, &bad);
    assert!(!world.times(A).contains(&0));
    world.ticks(200, &all_done);
    assert_eq!((world.waiting.len(), world.gaps()), (0, 0));
}

#[test]
fn a_new_leader_sends_the_backlog_and_what_is_new_beside_it() {
    let both = view(&[(P, &[A, B])]);
    let mut world = World::new(&both);
    world.delete(P, 30_000);
    world.freeing.forget();
    world.learn(&both);
    world.tick(&all_done);
    world.delete(P, 1);
    world.tick(&all_done);
    assert!(world.waiting.len() > 20_000 && !world.waiting.contains_key(&world.highest));
    world.ticks(40, &all_done);
    assert_eq!((world.waiting.len(), world.gaps()), (0, 0));
    assert_eq!(world.times(A), BTreeSet::from([1]));
}

/// What an earlier leadership of the same node sent counts for nothing.
#[test]
fn a_batch_of_another_term_is_not_taken_for_one_of_this() {
    let both = view(&[(P, &[A, B])]);
    let mut world = World::new(&both);
    world.delete(P, 10);
    world.now += 100;
    let old = world.start();
    world.freeing.forget();
    world.learn(&both);
    let new = world.start();
    old.iter().for_each(|batch| world.end(batch, &all_done));
    assert_eq!(world.waiting.len(), 10);
    new.iter().for_each(|batch| world.end(batch, &all_done));
    assert_eq!(world.waiting.len(), 0);
}

#[test]
fn a_replica_that_moves_gets_all_that_waits() {
    let mut world = World::new(&view(&[(P, &[A, B, C]), (Q, &[A, B])]));
    let away = |node, _: PartitionId, _: &[FreeOrder]| (node != C).then_some(Answer::Done);
    world.delete(P, 3_000);
    world.ticks(10, &away);
    // A batch is under way when a node of another partition takes C's place.
    world.delete(P, 10);
    world.now += 100;
    let batches = world.start();
    world.learn(&view(&[(P, &[A, B, NodeId(4)]), (Q, &[A, B])]));
    batches.iter().for_each(|batch| world.end(batch, &all_done));
    assert_eq!(world.waiting.len(), 3_010);
    world.ticks(20, &away);
    assert_eq!((world.waiting.len(), world.gaps()), (0, 0));
    assert_eq!(world.times(NodeId(4)), BTreeSet::from([1]));
}

#[test]
fn what_waited_for_a_replica_that_is_gone_is_confirmed() {
    let mut world = World::new(&view(&[(P, &[A, B, C])]));
    world.delete(P, 3_000);
    world.ticks(10, &|node, _, _| (node != C).then_some(Answer::Done));
    assert_eq!(world.waiting.len(), 3_000);
    world.learn(&view(&[(P, &[A, B])]));
    world.ticks(10, &all_done);
    assert_eq!((world.waiting.len(), world.gaps()), (0, 0));
    assert_eq!(world.times(B), BTreeSet::from([1]), "one of them is asked again");
}

/// A batch of gaps speaks of each only as far as it went when the batch was made.
#[test]
fn a_gap_that_grows_meanwhile_loses_nothing() {
    let mut world = World::new(&view(&[(P, &[A, B]), (Q, &[B])]));
    let refused = |node, _: PartitionId, _: &[FreeOrder]| {
        Some(if node == A { Answer::Refused } else { Answer::Done })
    };
    world.delete(P, 10);
    world.tick(&refused);
    world.now += PAUSE_MS;
    world.delete(P, 10);
    let (fresh, backlog): (Vec<_>, Vec<_>) =
        world.start().into_iter().partition(|batch| batch.lane == Lane::Fresh);
    backlog.iter().for_each(|batch| world.end(batch, &refused));
    world.now += PAUSE_MS;
    world.learn(&view(&[(P, &[A, B]), (Q, &[B, A])]));
    let backlog = world.start();
    assert_eq!((fresh.len(), backlog.len()), (2, 1));
    fresh.iter().for_each(|batch| world.end(batch, &refused));
    backlog.iter().for_each(|batch| world.end(batch, &all_done));
    assert_eq!(world.waiting.keys().copied().collect::<Vec<_>>(), (11..=20).collect::<Vec<_>>());
    world.ticks(60, &all_done);
    assert_eq!((world.waiting.len(), world.gaps()), (0, 0));
}

#[test]
fn a_node_has_its_share_of_batches_only() {
    let mut world = World::new(&view(&[(P, &[A, B])]));
    world.delete(P, 10);
    let mut under_way = BTreeMap::from([(A, BATCHES_MAX), (B, BATCHES_MAX - 1)]);
    let waiting = &world.waiting;
    let above = |after| waiting.range(after + 1..).map(|(_, order)| *order);
    let batches = world.freeing.batches(1, above, &mut under_way);
    assert_eq!(batches.iter().map(|batch| batch.node).collect::<Vec<_>>(), [B]);
    assert_eq!(under_way[&B], BATCHES_MAX);
    assert_eq!(world.freeing.under_way().collect::<Vec<_>>(), [B]);
}

#[test]
fn a_confirmation_that_was_not_taken_is_made_again() {
    let mut world = World::new(&view(&[(P, &[A])]));
    world.delete(P, 10);
    for batch in world.start() {
        let answers = BTreeMap::from([(P, Answer::Done)]);
        assert_eq!(world.freeing.answered(&batch, &answers, 10, 0).len(), 10);
        world.freeing.repeat(&batch);
    }
    world.ticks(5, &all_done);
    assert_eq!((world.waiting.len(), world.gaps()), (0, 0));
}
