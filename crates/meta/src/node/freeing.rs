//! Which replica has done which free orders, as the leader of a meta partition remembers it.
//!
//! Orders have rising numbers, so one number says what a node has done: all up to it. What is left of
//! them, because the node or one replica on it did not do as told, is in *gaps*: for each replica at
//! most one range of numbers. So memory is bounded by the replicas, not by the orders that wait, and a
//! replica that does as it is told gets each order once.
//!
//! A node has at most two batches under way: one of orders that are new to it, and one of its gaps.
//! New orders never wait behind a backlog, be it another node's, another replica's, or their own.
//!
//! # Deliberately absent
//!
//! What must not be lost. A new leader knows nothing of this and sends everything again, as backlog.
//! A replica that lost its files and was made anew on the same node is told by its peers, when they
//! are aligned (`data/src/node/freed.rs`).

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{NodeId, PartitionId, VolumeView};

use crate::core::FreeOrder;

/// Orders of one batch: requests of some 20 KiB.
const ORDERS_MAX: usize = 1_024;
/// Orders that are looked at for one batch: they may all concern other nodes.
const SCAN_MAX: usize = 8_192;
/// Batches that are under way to one node at once, whichever partitions they are of: deletion must not crowd
/// out the work. One that does not answer takes up its own share only.
const BATCHES_MAX: usize = 8;
/// Before what was not done is tried again.
const PAUSE_MS: u64 = 2_000;
/// Data partitions move seldom; a replica that the view lacks would be missed, so it is young.
pub(crate) const VIEW_AGE_MS: u64 = 1_000;

/// Progress of deletion.
#[derive(Debug, Default)]
pub(crate) struct Freeing {
    /// When the replicas were learned, in which version of the view, and whether they are being asked for.
    view_ms: Option<u64>,
    version: u64,
    is_asking: bool,
    replicas: BTreeMap<PartitionId, Vec<NodeId>>,
    nodes: BTreeMap<NodeId, Progress>,
    /// The last batch's number.
    number: u64,
}

/// What one node has done.
#[derive(Debug, Default)]
struct Progress {
    /// All orders up to here, but for the gaps.
    through: u64,
    /// The end of the batch of new orders that is under way, else as `through`.
    sent: u64,
    /// One for each replica at most.
    gaps: BTreeMap<PartitionId, Gap>,
    /// The batch that is under way on each lane.
    under_way: BTreeMap<Lane, u64>,
    /// The node did not answer: not before this time.
    not_before_ms: u64,
}

/// Orders above `after` up to `upto`, which a replica may not have done.
#[derive(Debug)]
struct Gap {
    after: u64,
    upto: u64,
    /// Orders above this one come next. Above `after` once some were done in part only: they are passed
    /// over, lest one block that nobody can read keeps all that follow.
    next: u64,
    not_before_ms: u64,
}

/// Why orders are in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// They are new to the node.
    Fresh,
    /// They are in its gaps.
    Backlog,
}

/// Orders for one node.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Which.
    pub node: NodeId,
    /// By partition: each is confirmed by itself.
    pub orders: BTreeMap<PartitionId, Vec<FreeOrder>>,
    lane: Lane,
    /// Names it.
    pub number: u64,
    /// All of the node's orders above `after` up to `end` are in it or in gaps; of a batch of gaps, all that
    /// are in these.
    after: u64,
    end: u64,
    /// The next order of each gap it is of, and the last one, as they were.
    gaps: BTreeMap<PartitionId, (u64, u64)>,
}

/// What a replica said to its part of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// All of it is freed, durably.
    Done,
    /// Some of it is not, now; the replica is well otherwise.
    Partly,
    /// Nothing can be said of it.
    Refused,
}

impl Freeing {
    /// Forgets what only a leader knows. Batches that are under way count for nothing.
    pub(crate) fn forget(&mut self) {
        *self = Freeing { number: self.number, ..Freeing::default() };
    }

    /// Whether it is known where the replicas are.
    pub(crate) fn is_current(&self, now: u64) -> bool {
        self.view_ms.is_some_and(|at| now.saturating_sub(at) <= VIEW_AGE_MS)
    }

    /// Whether somebody must ask for that now.
    pub(crate) fn start_asking(&mut self, now: u64) -> bool {
        let starts = !self.is_current(now) && !self.is_asking;
        self.is_asking |= starts;
        starts
    }

    /// Learns where the replicas are, if anybody could tell. Orders up to `highest` have been given.
    pub(crate) fn learn(&mut self, view: Option<&VolumeView>, highest: u64, now: u64) {
        self.is_asking = false;
        let Some(view) = view.filter(|view| view.version >= self.version) else { return };
        (self.view_ms, self.version) = (Some(now), view.version);
        let mut known = std::mem::take(&mut self.replicas);
        for partition in &view.data {
            let mut replicas = partition.replicas.clone();
            replicas.extend(partition.members.iter().filter(|m| !partition.replicas.contains(m)));
            let known = known.remove(&partition.id).unwrap_or_default();
            let mut unsure: Vec<NodeId> =
                replicas.iter().copied().filter(|node| !known.contains(node)).collect();
            if unsure.is_empty() && known.iter().any(|node| !replicas.contains(node)) {
                // What waited for that one only is confirmed when another one says it again.
                unsure.extend(replicas.first());
            }
            for node in unsure {
                let new = Progress { through: highest, sent: highest, ..Progress::default() };
                let progress = self.nodes.entry(node).or_insert(new);
                progress.open_gap(partition.id, 0, progress.sent);
            }
            self.replicas.insert(partition.id, replicas);
        }
        let Freeing { replicas, nodes, .. } = self;
        let holds = |node: &NodeId, id: &PartitionId| {
            replicas.get(id).is_some_and(|replicas| replicas.contains(node))
        };
        nodes.iter_mut().for_each(|(node, p)| p.gaps.retain(|partition, _| holds(node, partition)));
        let held: BTreeSet<NodeId> = replicas.values().flatten().copied().collect();
        nodes.retain(|node, _| held.contains(node));
    }

    /// The nodes that have batches under way, once for each.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = NodeId> {
        self.nodes.iter().flat_map(|(node, progress)| progress.under_way.keys().map(|_| *node))
    }

    /// What can be sent now; `above` gives the orders above a number, and `under_way` counts the batches of all
    /// partitions.
    pub(crate) fn batches<I: Iterator<Item = FreeOrder>>(
        &mut self,
        now: u64,
        above: impl Fn(u64) -> I,
        under_way: &mut BTreeMap<NodeId, usize>,
    ) -> Vec<Batch> {
        let mut batches = Vec::new();
        for (node, progress) in &mut self.nodes {
            for lane in [Lane::Fresh, Lane::Backlog] {
                let is_idle =
                    progress.not_before_ms <= now && !progress.under_way.contains_key(&lane);
                let count = under_way.entry(*node).or_default();
                if !is_idle || *count >= BATCHES_MAX {
                    continue;
                }
                let replicas = &self.replicas;
                let holds = |partition: &PartitionId| {
                    replicas.get(partition).is_some_and(|replicas| replicas.contains(node))
                };
                let batch = match lane {
                    Lane::Fresh => progress.fresh(*node, now, &above, holds),
                    Lane::Backlog => progress.backlog(*node, now, &above),
                };
                if let Some(mut batch) = batch {
                    self.number += 1;
                    batch.number = self.number;
                    progress.under_way.insert(lane, batch.number);
                    *count += 1;
                    batches.push(batch);
                }
            }
        }
        batches
    }

    /// Takes note of what the node said to a batch; nothing at all, if `answers` is empty. Gives the orders that
    /// every replica has done. Orders up to `highest` have been given.
    pub(crate) fn answered(
        &mut self,
        batch: &Batch,
        answers: &BTreeMap<PartitionId, Answer>,
        highest: u64,
        now: u64,
    ) -> Vec<u64> {
        let Some(progress) = self.nodes.get_mut(&batch.node) else { return Vec::new() };
        if progress.under_way.get(&batch.lane) != Some(&batch.number) {
            return Vec::new();
        }
        progress.under_way.remove(&batch.lane);
        match (batch.lane, answers.is_empty()) {
            (Lane::Fresh, false) => progress.fresh_answered(batch, answers, now),
            (Lane::Backlog, false) => progress.backlog_answered(batch, answers, now),
            (lane, true) => {
                progress.not_before_ms = now + PAUSE_MS;
                if lane == Lane::Fresh {
                    let held = self.replicas.iter().filter(|(_, at)| at.contains(&batch.node));
                    held.for_each(|(id, _)| progress.open_gap(*id, batch.after, highest));
                    (progress.through, progress.sent) = (highest, highest);
                }
            }
        }
        let orders = batch.orders.values().flatten();
        orders.filter(|order| self.is_done(order)).map(|order| order.order).collect()
    }

    /// What was confirmed of a batch could not be proposed: it is told again, as nobody else would.
    pub(crate) fn repeat(&mut self, batch: &Batch) {
        let Some(progress) = self.nodes.get_mut(&batch.node) else { return };
        for (partition, orders) in &batch.orders {
            let (first, last) = (orders.first(), orders.last());
            if let (Some(first), Some(last)) = (first, last) {
                progress.open_gap(*partition, first.order.saturating_sub(1), last.order);
            }
        }
    }

    /// Whether every replica has. Of an unknown partition nobody has.
    fn is_done(&self, order: &FreeOrder) -> bool {
        let partition = &order.range.partition;
        let is_done_on = |node| {
            self.nodes.get(node).is_some_and(|progress| {
                let gap = progress.gaps.get(partition);
                order.order <= progress.through && !gap.is_some_and(|gap| gap.has(order.order))
            })
        };
        let replicas = self.replicas.get(partition);
        replicas.is_some_and(|nodes| !nodes.is_empty() && nodes.iter().all(is_done_on))
    }
}

impl Progress {
    fn open_gap(&mut self, partition: PartitionId, after: u64, upto: u64) {
        if after >= upto {
            return;
        }
        let new = Gap { after, upto, next: after, not_before_ms: 0 };
        let gap = self.gaps.entry(partition).or_insert(new);
        gap.upto = gap.upto.max(upto);
        if after < gap.after {
            (gap.after, gap.next) = (after, after);
        }
    }

    fn fresh<I: Iterator<Item = FreeOrder>>(
        &mut self,
        node: NodeId,
        now: u64,
        above: impl Fn(u64) -> I,
        holds: impl Fn(&PartitionId) -> bool,
    ) -> Option<Batch> {
        let after = self.through;
        let (mut orders, mut count) = (BTreeMap::<_, Vec<FreeOrder>>::new(), 0);
        for order in above(after).take(SCAN_MAX) {
            if count >= ORDERS_MAX {
                break;
            }
            self.sent = order.order;
            let partition = order.range.partition;
            if !holds(&partition) {
                continue;
            }
            if self.gaps.get(&partition).is_some_and(|gap| gap.not_before_ms > now) {
                self.open_gap(partition, after, order.order);
                continue;
            }
            orders.entry(partition).or_default().push(order);
            count += 1;
        }
        if orders.is_empty() {
            self.through = self.sent;
            return None;
        }
        let (lane, end, gaps) = (Lane::Fresh, self.sent, BTreeMap::new());
        Some(Batch { node, orders, lane, number: 0, after, end, gaps })
    }

    fn fresh_answered(&mut self, batch: &Batch, answers: &BTreeMap<PartitionId, Answer>, now: u64) {
        (self.through, self.sent) = (batch.end, batch.end);
        for partition in batch.orders.keys() {
            if answers.get(partition) == Some(&Answer::Done) {
                continue;
            }
            self.open_gap(*partition, batch.after, batch.end);
            if let Some(gap) = self.gaps.get_mut(partition) {
                gap.not_before_ms = now + PAUSE_MS;
            }
        }
    }

    fn backlog<I: Iterator<Item = FreeOrder>>(
        &mut self,
        node: NodeId,
        now: u64,
        above: impl Fn(u64) -> I,
    ) -> Option<Batch> {
        let due = || self.gaps.iter().filter(|(_, gap)| gap.not_before_ms <= now);
        let gaps: BTreeMap<_, _> = due().map(|(id, gap)| (*id, (gap.next, gap.upto))).collect();
        let after = gaps.values().map(|(next, _)| *next).min()?;
        let upto = gaps.values().map(|(_, upto)| *upto).max()?;
        let (mut orders, mut count) = (BTreeMap::<_, Vec<FreeOrder>>::new(), 0);
        let (mut scanned, mut end) = (0, after);
        let mut waiting = above(after).take_while(|order| order.order <= upto);
        while scanned < SCAN_MAX && count < ORDERS_MAX {
            let Some(order) = waiting.next() else {
                end = upto;
                break;
            };
            (scanned, end) = (scanned + 1, order.order);
            let partition = order.range.partition;
            let is_left = |(next, upto): &(u64, u64)| (next + 1..=*upto).contains(&order.order);
            if gaps.get(&partition).is_some_and(is_left) {
                orders.entry(partition).or_default().push(order);
                count += 1;
            }
        }
        let batch = Batch { node, orders, lane: Lane::Backlog, number: 0, after, end, gaps };
        if batch.orders.is_empty() {
            self.backlog_answered(&batch, &BTreeMap::new(), now);
            return None;
        }
        Some(batch)
    }

    fn backlog_answered(
        &mut self,
        batch: &Batch,
        answers: &BTreeMap<PartitionId, Answer>,
        now: u64,
    ) {
        for (partition, (next, upto)) in &batch.gaps {
            // One that begins earlier by now begins anew.
            let Some(gap) = self.gaps.get_mut(partition).filter(|gap| gap.next == *next) else {
                continue;
            };
            let answer = match batch.orders.contains_key(partition) {
                true => answers.get(partition).copied().unwrap_or(Answer::Refused),
                false => Answer::Done,
            };
            if gap.answered(answer, batch.end.min(*upto), now) {
                self.gaps.remove(partition);
            }
        }
    }
}

impl Gap {
    fn has(&self, order: u64) -> bool {
        self.after < order && order <= self.upto
    }

    /// What became of orders up to `end`. True if nothing is left of the gap.
    fn answered(&mut self, answer: Answer, end: u64, now: u64) -> bool {
        if answer != Answer::Done {
            self.not_before_ms = now + PAUSE_MS;
        }
        let is_whole = self.next == self.after;
        match answer {
            Answer::Done if is_whole => self.after = self.after.max(end),
            Answer::Done | Answer::Partly => {}
            Answer::Refused => return false,
        }
        self.next = self.next.max(end);
        let is_over = self.next >= self.upto;
        if is_over && self.after < self.upto {
            // What was passed over has its turn again.
            self.next = self.after;
            self.not_before_ms = now + PAUSE_MS;
        }
        is_over && self.after >= self.upto
    }
}

#[cfg(test)]
mod tests;
