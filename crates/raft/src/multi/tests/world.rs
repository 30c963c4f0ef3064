//! Nodes with their disks, clocks and network, in one loop: what the tests of [`MultiRaft`] run in.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};

use super::super::*;
use crate::message::Message;
use crate::types::{Committed, InstallSnapshot, Payload, ReadReady, Role};
use crate::wal::{MemoryStorage, Wal, WalOptions, mix};

/// What a state machine has durably, in this toy: everything it applied.
#[derive(Clone, Default)]
pub(super) struct Machine {
    /// Position and hash of each applied entry.
    pub(super) applied: BTreeMap<u64, (u64, Bytes)>,
    pub(super) index: u64,
    pub(super) members: Members,
    /// How many configurations there have been.
    pub(super) epoch: u64,
}

pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) disk: MemoryStorage,
    pub(super) multi: Option<MultiRaft>,
    pub(super) wal: Option<Wal>,
    /// Batches submitted, and when the flush under way returns.
    pub(super) queue: Vec<LogBatch>,
    pub(super) flush_done_ms: Option<u64>,
    pub(super) machines: BTreeMap<PartitionId, Machine>,
    /// Snapshots being fetched: what was asked for, and when it is here.
    pub(super) fetching: Vec<(u64, InstallSnapshot, Option<Machine>)>,
    pub(super) restart_ms: u64,
    /// Groups of which the owner has noted that everything about them was forgotten here.
    pub(super) notes: BTreeSet<PartitionId>,
    pub(super) paused_until_ms: u64,
}

pub(super) struct World {
    pub(super) seed: u64,
    pub(super) draws: u64,
    pub(super) now_ms: u64,
    pub(super) nodes: Vec<Node>,
    /// Due time, a tie breaker, sender, receiver, bytes.
    pub(super) network: BTreeMap<(u64, u64), (NodeId, NodeId, Bytes)>,
    pub(super) loss_percent: u64,
    pub(super) cut: BTreeSet<(NodeId, NodeId)>,
    pub(super) flush_ms_max: u64,
    /// What each flush, and each frame to and from a node, takes more.
    pub(super) slow_disks: BTreeMap<NodeId, u64>,
    pub(super) slow_links: BTreeMap<NodeId, u64>,
    pub(super) fetch_ms_max: u64,
    pub(super) leaders: BTreeMap<(PartitionId, u64), NodeId>,
    /// The first application of each index: all others must equal it.
    pub(super) truth: BTreeMap<(PartitionId, u64), (u64, Bytes)>,
    pub(super) acknowledged: BTreeMap<(PartitionId, LogPosition), Bytes>,
    pub(super) trace: Vec<String>,
    pub(super) reads: Vec<(NodeId, ReadReady)>,
    /// Apply, set snapshots and compact when a log grows beyond this.
    pub(super) keep_entries: u64,
    /// Bytes of applied entries that a group keeps in memory.
    pub(super) tail_bytes: usize,
    /// Bytes that a group takes in and cannot apply yet.
    pub(super) uncommitted_bytes: usize,
    pub(super) frames: u64,
    /// Nodes that may have committed, and applied, what the others have not: empty entries and changes.
    pub(super) strays: BTreeSet<usize>,
}

pub(super) fn world(seed: u64, count: u32) -> World {
    let nodes = (0..count).map(|i| Node {
        id: NodeId(i),
        disk: MemoryStorage::default(),
        multi: None,
        wal: None,
        queue: Vec::new(),
        flush_done_ms: None,
        machines: BTreeMap::new(),
        fetching: Vec::new(),
        restart_ms: 0,
        notes: BTreeSet::new(),
        paused_until_ms: 0,
    });
    let mut world = World {
        seed,
        draws: 0,
        now_ms: 1000,
        nodes: nodes.collect(),
        network: BTreeMap::new(),
        loss_percent: 0,
        cut: BTreeSet::new(),
        flush_ms_max: 5,
        slow_disks: BTreeMap::new(),
        slow_links: BTreeMap::new(),
        fetch_ms_max: 5,
        leaders: BTreeMap::new(),
        truth: BTreeMap::new(),
        acknowledged: BTreeMap::new(),
        trace: Vec::new(),
        reads: Vec::new(),
        keep_entries: u64::MAX,
        tail_bytes: RaftConfig::default().tail_bytes_max,
        uncommitted_bytes: RaftConfig::default().uncommitted_bytes_max,
        frames: 0,
        strays: BTreeSet::new(),
    };
    (0..count).for_each(|i| world.start(i as usize));
    world
}

impl World {
    pub(super) fn draw(&mut self, below: u64) -> u64 {
        self.draws += 1;
        mix(self.seed ^ mix(self.draws)) % below
    }

    pub(super) fn start(&mut self, i: usize) {
        let options = WalOptions {
            segment_bytes: 128 << 10,
            first_segment_bytes: 64 << 10,
            ..WalOptions::new([1; 16], self.seed)
        };
        let node = &mut self.nodes[i];
        let (wal, recovered) = Wal::open(node.disk.clone(), options).unwrap();
        assert!(recovered.damaged.is_empty());
        let seed = mix(self.seed ^ i as u64);
        // Both ways are to survive the storms.
        let announces_commits = self.seed % 3 != 1;
        let tail_bytes_max = self.tail_bytes;
        let mut config = RaftConfig { announces_commits, tail_bytes_max, ..RaftConfig::default() };
        config.uncommitted_bytes_max = self.uncommitted_bytes;
        config.message_bytes_max = config.message_bytes_max.min(self.uncommitted_bytes);
        config.entry_bytes_max = config.entry_bytes_max.min(self.uncommitted_bytes);
        let mut multi = MultiRaft::new(node.id, config, seed).unwrap();
        let starts = node.machines.iter().map(|(&group, machine)| {
            let position = machine.applied.get(&machine.index);
            let term = position.map_or(1, |(term, _)| *term);
            let snapshot = SnapshotDescriptor {
                position: LogPosition { term, index: machine.index },
                members: machine.members.clone(),
            };
            let snapshot = Some(snapshot);
            (group, GroupStart { applied: machine.index, snapshot, ..GroupStart::default() })
        });
        let starts = starts.filter(|(_, start)| start.applied > 1).collect();
        let refused = multi.recover(recovered, &starts, self.now_ms);
        assert!(refused.is_empty(), "{refused:?}");
        for (group, machine) in &node.machines {
            multi.set_roster(*group, Epoch(machine.epoch), &machine.members.voters);
        }
        for group in node.notes.clone() {
            let nonce = self.draw(u64::MAX);
            assert!(multi.rejoin_group(group, nonce));
        }
        let node = &mut self.nodes[i];
        (node.multi, node.wal) = (Some(multi), Some(wal));
    }

    pub(super) fn crash(&mut self, i: usize, down_ms: u64) {
        let seed = self.draw(u64::MAX);
        let node = &mut self.nodes[i];
        (node.multi, node.wal) = (None, None);
        node.queue.clear();
        node.fetching.clear();
        node.flush_done_ms = None;
        node.restart_ms = self.now_ms + down_ms;
        node.disk.crash_seeded(seed);
        self.trace.push(format!("{} crash {i}", self.now_ms));
    }

    /// Its disk is replaced by an empty one, and the owner notes it there.
    pub(super) fn empty(&mut self, i: usize, down_ms: u64) {
        self.crash(i, down_ms);
        let node = &mut self.nodes[i];
        node.disk = MemoryStorage::default();
        node.notes = std::mem::take(&mut node.machines).into_keys().collect();
    }

    pub(super) fn multi(&mut self, i: usize) -> &mut MultiRaft {
        self.nodes[i].multi.as_mut().unwrap()
    }

    pub(super) fn found(&mut self, group: u64, voters: &[u32]) {
        let voters: Vec<NodeId> = voters.iter().map(|&i| NodeId(i)).collect();
        for &node in voters.iter().rev() {
            let campaigns = node == voters[0];
            let group = PartitionId(group);
            assert!(self.multi(node.0 as usize).create_group(group, &voters, &[], campaigns));
            let machine = self.nodes[node.0 as usize].machines.entry(group).or_default();
            (machine.members, machine.epoch) = (Members::new(&voters, &[]), 1);
            self.multi(node.0 as usize).set_roster(group, Epoch(1), &voters);
        }
    }

    pub(super) fn leader(&self, group: u64) -> Option<usize> {
        let group = PartitionId(group);
        (0..self.nodes.len())
            .filter_map(|i| {
                let status = self.nodes[i].multi.as_ref()?.status(group)?;
                (status.role == Role::Leader).then_some((status.term, i))
            })
            .max()
            .map(|(_, i)| i)
    }

    pub(super) fn run(&mut self, ms: u64) {
        let end = self.now_ms + ms;
        while self.now_ms < end {
            self.step();
        }
    }

    /// Runs until `done` holds. Fails after ten simulated seconds.
    #[track_caller]
    pub(super) fn until(&mut self, what: &str, mut done: impl FnMut(&mut World) -> bool) {
        for _ in 0..10_000 {
            if done(self) {
                return;
            }
            self.step();
        }
        for node in &self.nodes {
            let status = node.multi.as_ref().and_then(|m| m.status(PartitionId(1)));
            eprintln!("{}: {status:?}", node.id);
        }
        panic!("not reached: {what}");
    }

    /// One millisecond.
    pub(super) fn step(&mut self) {
        self.now_ms += 1;
        for i in 0..self.nodes.len() {
            if self.nodes[i].multi.is_none() {
                if self.now_ms >= self.nodes[i].restart_ms {
                    self.start(i);
                }
                continue;
            }
            if self.now_ms < self.nodes[i].paused_until_ms {
                continue;
            }
            self.receive(i);
            self.flush(i);
            self.fetched(i);
            let now_ms = self.now_ms;
            self.multi(i).tick(now_ms);
            while self.nodes[i].multi.as_ref().is_some_and(MultiRaft::has_work) {
                self.turn(i);
            }
            self.begin_flush(i);
            let node = &mut self.nodes[i];
            let multi = node.multi.as_ref();
            node.notes.retain(|group| multi.is_some_and(|multi| multi.is_rejoining(*group)));
        }
    }

    pub(super) fn receive(&mut self, i: usize) {
        let (now_ms, id) = (self.now_ms, self.nodes[i].id);
        let due: Vec<_> = self
            .network
            .range(..(now_ms + 1, 0))
            .filter(|(_, (_, to, _))| *to == id)
            .map(|(key, _)| *key)
            .collect();
        for key in due {
            let (from, _, bytes) = self.network.remove(&key).unwrap();
            self.multi(i).step_frame(from, bytes, now_ms).unwrap();
        }
    }

    /// One message of group 1 arrives now.
    pub(super) fn deliver(&mut self, from: usize, to: usize, message: Message) {
        let frame = Frame { messages: vec![(PartitionId(1), message)] };
        let (from, now_ms) = (self.nodes[from].id, self.now_ms);
        self.multi(to).step_frame(from, frame.encode(), now_ms).unwrap();
    }

    pub(super) fn flush(&mut self, i: usize) {
        let now_ms = self.now_ms;
        let node = &mut self.nodes[i];
        if node.flush_done_ms.is_none_or(|done| now_ms < done) {
            return;
        }
        node.flush_done_ms = None;
        let batches = std::mem::take(&mut node.queue);
        // The bytes reach the disk when the flush returns: until then a crash loses them.
        node.wal.as_mut().unwrap().append(&batches).unwrap();
        let last = batches.last().unwrap().number;
        self.multi(i).persisted(last, now_ms);
    }

    pub(super) fn begin_flush(&mut self, i: usize) {
        if self.nodes[i].queue.is_empty() || self.nodes[i].flush_done_ms.is_some() {
            return;
        }
        let more = self.slow_disks.get(&self.nodes[i].id).copied().unwrap_or(0);
        let took = 1 + self.draw(self.flush_ms_max) + more;
        self.nodes[i].flush_done_ms = Some(self.now_ms + took);
    }

    pub(super) fn turn(&mut self, i: usize) {
        let now_ms = self.now_ms;
        let turn = self.multi(i).turn(now_ms);
        let from = self.nodes[i].id;
        self.nodes[i].queue.extend(turn.batch);
        for (to, frame) in turn.messages {
            self.frames += 1;
            let is_lost = self.draw(100) < self.loss_percent || self.cut.contains(&(from, to));
            if !is_lost {
                let more = |node| self.slow_links.get(node).copied().unwrap_or(0);
                let more = more(&from) + more(&to);
                let due = now_ms + 1 + self.draw(5) * self.draw(5) + more;
                let key = (due, self.draws);
                self.network.insert(key, (from, to, frame.encode()));
            }
        }
        for (group, entries) in turn.committed {
            self.apply(i, group, entries);
        }
        for role in turn.roles {
            if role.role == Role::Leader {
                let other = self.leaders.insert((role.group, role.term), from);
                assert!(other.is_none_or(|other| other == from), "two leaders: {role:?}");
            }
            self.trace.push(format!("{now_ms} {i} {role:?}"));
        }
        self.reads.extend(turn.reads.into_iter().map(|read| (from, read)));
        for wanted in turn.snapshots_wanted {
            self.snapshot(i, wanted.group);
        }
        for install in turn.installs {
            self.install(i, &install);
        }
        for group in turn.contradicted {
            assert!(self.strays.contains(&i), "{group} at {i}");
            self.trace.push(format!("{now_ms} {i} {group} contradicted"));
            self.nodes[i].machines.insert(group, Machine::default());
            assert!(self.multi(i).remove_group(group));
            assert!(self.multi(i).create_group(group, &[], &[], false));
        }
    }

    pub(super) fn apply(&mut self, i: usize, group: PartitionId, entries: Vec<Committed>) {
        for entry in entries {
            let data = match entry.payload {
                Payload::Empty => Bytes::new(),
                Payload::Data(data) => data,
                Payload::Members { members, context } => {
                    let node = &mut self.nodes[i];
                    let machine = node.machines.get_mut(&group).unwrap();
                    machine.epoch += 1;
                    let (epoch, multi) = (Epoch(machine.epoch), node.multi.as_mut().unwrap());
                    multi.set_roster(group, epoch, &members.voters);
                    machine.members = members;
                    context
                }
            };
            let (term, index) = (entry.position.term, entry.position.index);
            let strays = self.strays.contains(&i) && data.is_empty();
            if !strays {
                let first = self.truth.entry((group, index)).or_insert((term, data.clone()));
                assert_eq!(*first, (term, data.clone()), "{group} {index} differs on {i}");
            }
            self.trace.push(format!("{} {i} {group} {term}.{index}", self.now_ms));
            let machine = self.nodes[i].machines.entry(group).or_default();
            assert!(machine.index.max(1) + 1 == index, "{} then {index}", machine.index);
            machine.index = index;
            machine.applied.insert(index, (term, data.clone()));
            let id = self.nodes[i].id;
            if !strays && self.leaders.get(&(group, term)) == Some(&id) {
                self.acknowledged.insert((group, entry.position), data);
            }
        }
        let index = self.nodes[i].machines[&group].index;
        self.multi(i).applied(group, index);
        let status = self.multi(i).status(group).unwrap();
        if index.saturating_sub(status.first_index) > self.keep_entries {
            self.snapshot(i, group);
            let keep = self.keep_entries / 2;
            self.multi(i).compact(group, index - keep);
        }
    }

    pub(super) fn snapshot(&mut self, i: usize, group: PartitionId) {
        let index = self.nodes[i].machines[&group].index;
        if let Some(snapshot) = self.multi(i).describe(group, index) {
            self.multi(i).set_snapshot(group, snapshot);
        }
    }

    /// Begins to fetch what the source has now, of which the snapshot is a part.
    pub(super) fn install(&mut self, i: usize, install: &InstallSnapshot) {
        let group = install.group;
        let is_busy = self.nodes[i].fetching.iter().any(|(_, other, _)| other.group == group);
        assert!(!is_busy, "{group} at {i}: one at a time");
        let source = install.from.0 as usize;
        let index = install.snapshot.position.index;
        // The transfer fails if the source is away or (one time in four) for no reason.
        let is_lost = self.nodes[source].multi.is_none() || self.draw(4) == 0;
        let machine = (!is_lost).then(|| {
            let mut machine = self.nodes[source].machines[&group].clone();
            machine.applied.retain(|at, _| *at <= index);
            (machine.index, machine.members) = (index, install.snapshot.members.clone());
            machine
        });
        let due_ms = self.now_ms + self.draw(self.fetch_ms_max);
        self.nodes[i].fetching.push((due_ms, install.clone(), machine));
    }

    pub(super) fn fetched(&mut self, i: usize) {
        let now_ms = self.now_ms;
        let node = &mut self.nodes[i];
        let done: Vec<_> = node.fetching.extract_if(.., |(due_ms, ..)| *due_ms <= now_ms).collect();
        for (_, install, machine) in done {
            let Some(machine) = machine else {
                self.multi(i).snapshot_failed(install.group);
                continue;
            };
            let before = self.nodes[i].machines.insert(install.group, machine);
            let before = before.map_or(0, |machine| machine.index);
            let index = install.snapshot.position.index;
            assert!(before < index, "{} at {i}: from {before} back to {index}", install.group);
            self.multi(i).snapshot_installed(install.group, index);
        }
    }

    pub(super) fn propose(&mut self, group: u64, text: String) -> Option<LogPosition> {
        let leader = self.leader(group)?;
        self.multi(leader).propose(PartitionId(group), Bytes::from(text)).ok()
    }

    /// Every acknowledged entry is in every machine that has come so far.
    pub(super) fn check(&self) {
        for ((group, position), data) in &self.acknowledged {
            for (i, node) in self.nodes.iter().enumerate() {
                if self.strays.contains(&i) && data.is_empty() {
                    continue;
                }
                let Some(machine) = node.machines.get(group) else { continue };
                if machine.index >= position.index {
                    assert_eq!(machine.applied[&position.index], (position.term, data.clone()));
                }
            }
        }
    }
}
