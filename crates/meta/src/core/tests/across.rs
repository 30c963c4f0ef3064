//! Operations across partitions, under crashes, losses, repeats and reordering.

use std::collections::BTreeMap;

use milpa_types::MetaSlot;
use milpa_wire::meta::{OperationId, Step, StepOutcome};

use super::*;
use crate::core::{Finished, PendingStep, restore};

const SLOTS: u32 = 3;
const CLIENTS: u64 = 3;

/// A fixed sequence of numbers from a seed (splitmix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % sides as u64) as usize
    }
}

#[derive(Clone)]
enum Message {
    Request { slot: MetaSlot, id: RequestId, write: MetaWrite },
    Step { coordinator: MetaSlot, step: PendingStep },
    Answer { coordinator: MetaSlot, step: PendingStep, outcome: Result<StepOutcome, MetaError> },
}

/// A client with one request under way.
struct Client {
    session: SessionId,
    sequences: BTreeMap<MetaSlot, u64>,
    asking: Option<(MetaSlot, RequestId, MetaWrite)>,
}

/// Three partitions of one volume and what is between them.
struct World {
    dice: Dice,
    partitions: Vec<Partition>,
    network: Vec<Message>,
    clients: Vec<Client>,
    directories: Vec<InodeId>,
    files: Vec<InodeId>,
    /// Final replies by session, slot and sequence.
    replies: BTreeMap<(u128, u32, u64), (MetaWrite, MetaReply)>,
    /// Renames never replace: then every dentry can be counted.
    is_countable: bool,
}

impl World {
    fn new(seed: u64) -> World {
        let mut partitions: Vec<_> = (0..SLOTS).map(partition).collect();
        let clients = (1..=CLIENTS).map(|session| Client {
            session: SessionId(session.into()),
            sequences: BTreeMap::new(),
            asking: None,
        });
        for partition in &mut partitions {
            for session in 1..=CLIENTS {
                let id =
                    RequestId { session: SessionId(session.into()), sequence: 0, unanswered: 0 };
                let write = MetaWrite::OpenSession;
                partition.apply(session, &Command::Client { id, now: Timestamp(0), write });
            }
        }
        World {
            dice: Dice(seed),
            partitions,
            network: Vec::new(),
            clients: clients.collect(),
            directories: vec![ROOT],
            files: Vec::new(),
            replies: BTreeMap::new(),
            is_countable: seed.is_multiple_of(2),
        }
    }

    fn at(&mut self, slot: MetaSlot) -> &mut Partition {
        &mut self.partitions[slot.0 as usize]
    }

    fn apply(&mut self, slot: MetaSlot, command: &Command) -> Outcome {
        // Through the log's encoding, as in life.
        let command = Command::decode(&command.encode()).unwrap();
        let partition = self.at(slot);
        let applied = partition.apply(partition.applied() + 1, &command);
        if let Some(finished) = applied.finished {
            self.note_finished(slot, finished);
        }
        applied.outcome
    }

    fn note_finished(&mut self, slot: MetaSlot, finished: Finished) {
        self.note_reply(slot, finished.id, &finished.reply);
    }

    /// A reply reaches its client, who may have it already: then it must be the same.
    fn note_reply(&mut self, slot: MetaSlot, id: RequestId, reply: &MetaReply) {
        if super::super::engine::is_retried(reply) {
            return;
        }
        let key = (id.session.0, slot.0, id.sequence);
        let client = &mut self.clients[(id.session.0 - 1) as usize];
        let Some((_, _, write)) = client.asking.take_if(|(s, asked, _)| *s == slot && *asked == id)
        else {
            if let Some((_, first)) = self.replies.get(&key)
                && *reply != Err(MetaError::Stale)
            {
                assert_eq!(first, reply, "a request has one reply");
            }
            return;
        };
        if let Ok(MetaAnswer::Entry(entry)) = reply {
            let known = match entry.kind {
                FileKind::Directory => &mut self.directories,
                _ => &mut self.files,
            };
            known.push(entry.inode);
        }
        self.replies.insert(key, (write, reply.clone()));
    }

    fn pick_name(&mut self) -> Name {
        name(["a", "b", "c", "d"][self.dice.roll(4)])
    }

    fn pick_directory(&mut self) -> InodeId {
        let recent = self.directories.len().min(6);
        let index = self.dice.roll(recent);
        if self.dice.roll(3) == 0 {
            ROOT
        } else {
            self.directories[self.directories.len() - 1 - index]
        }
    }

    fn random_write(&mut self) -> MetaWrite {
        let (parent, name) = (self.pick_directory(), self.pick_name());
        match self.dice.roll(12) {
            0..=4 => {
                let kind =
                    [FileKind::File, FileKind::Directory, FileKind::Symlink][self.dice.roll(3)];
                let placement = Some(MetaSlot(self.dice.roll(SLOTS as usize) as u32));
                let inode = new_inode(kind);
                MetaWrite::Create {
                    parent,
                    name,
                    inode,
                    placement,
                    open_existing: false,
                    content: None,
                }
            }
            5 if !self.files.is_empty() => {
                let inode = self.files[self.dice.roll(self.files.len())];
                MetaWrite::Link { inode, parent, name }
            }
            6..=7 => MetaWrite::Unlink { parent, name, held: false },
            8 => MetaWrite::RemoveDirectory { parent, name },
            _ => MetaWrite::Rename {
                source_parent: parent,
                source_name: name,
                target_parent: self.pick_directory(),
                target_name: self.pick_name(),
                no_replace: self.is_countable,
                held: false,
            },
        }
    }

    /// A client asks for something new, or again.
    fn ask(&mut self) {
        let which = self.dice.roll(self.clients.len());
        if self.clients[which].asking.is_none() {
            let write = self.random_write();
            let slot = match &write {
                MetaWrite::Rename { target_parent, .. } => target_parent.slot(),
                MetaWrite::Create { parent, .. }
                | MetaWrite::Link { parent, .. }
                | MetaWrite::Unlink { parent, .. }
                | MetaWrite::RemoveDirectory { parent, .. } => parent.slot(),
                _ => unreachable!(),
            };
            let client = &mut self.clients[which];
            let sequence = client.sequences.entry(slot).or_default();
            *sequence += 1;
            let id =
                RequestId { session: client.session, sequence: *sequence, unanswered: *sequence };
            client.asking = Some((slot, id, write));
        }
        if let Some((slot, id, write)) = self.clients[which].asking.clone() {
            self.network.push(Message::Request { slot, id, write });
        }
    }

    fn deliver(&mut self, message: Message) {
        match message {
            Message::Request { slot, id, write } => {
                let command = Command::Client { id, now: Timestamp(7), write };
                match self.apply(slot, &command) {
                    Outcome::Reply(reply) => self.note_reply(slot, id, &reply),
                    Outcome::Deferred(operation) => self.send_step(slot, operation),
                }
            }
            Message::Step { coordinator, step } => {
                let command = Command::Participate {
                    operation: step.operation,
                    now: step.now,
                    step: step.step.clone(),
                };
                let outcome = match self.apply(step.slot, &command) {
                    Outcome::Reply(Ok(MetaAnswer::Step(outcome))) => Ok(outcome),
                    Outcome::Reply(Err(error)) => Err(error),
                    other => panic!("{other:?}"),
                };
                self.network.push(Message::Answer { coordinator, step, outcome });
            }
            Message::Answer { coordinator, step, outcome } => {
                let operation = step.operation;
                let command = Command::Advance { operation, number: step.number, outcome };
                self.apply(coordinator, &command);
                self.send_step(coordinator, operation);
            }
        }
    }

    fn send_step(&mut self, coordinator: MetaSlot, operation: OperationId) {
        if let Some(step) = self.at(coordinator).operation_step(operation) {
            self.network.push(Message::Step { coordinator, step });
        }
    }

    /// A new leader: all it knows is the state.
    fn resume(&mut self, slot: MetaSlot) {
        for step in self.at(slot).next_steps(100) {
            self.network.push(Message::Step { coordinator: slot, step });
        }
    }

    /// Everything in memory is lost; the state comes back from disk.
    fn crash(&mut self, slot: MetaSlot) {
        let old = self.at(slot);
        let hash = old.hash();
        let mut snapshot = old.begin_snapshot(1);
        let file: Vec<u8> = std::iter::from_fn(|| snapshot.next_piece(1 << 20)).flatten().collect();
        let (restored, _) = restore(file.as_slice()).unwrap();
        assert_eq!(restored.hash(), hash);
        *self.at(slot) = restored;
        self.resume(slot);
    }

    /// Old intents are inquired about. The answer may be arbitrarily old when it is used.
    fn inquire(&mut self, slot: MetaSlot) {
        for operation in self.at(slot).intents(1000) {
            let coordinator = MetaSlot((operation.partition.0 - 100) as u32);
            if !self.at(coordinator).knows_operation(operation) {
                let step = Step::Abort;
                self.apply(slot, &Command::Participate { operation, now: Timestamp(8), step });
            }
        }
    }

    fn step(&mut self) {
        let slot = MetaSlot(self.dice.roll(SLOTS as usize) as u32);
        match self.dice.roll(100) {
            0..=29 => self.ask(),
            30..=89 if !self.network.is_empty() => {
                let index = self.dice.roll(self.network.len());
                let message = self.network.swap_remove(index);
                match self.dice.roll(10) {
                    0 => {}
                    1..=2 => {
                        // Delivered now, and again some time.
                        self.network.push(message.clone());
                        self.deliver(message);
                    }
                    _ => self.deliver(message),
                }
            }
            90..=92 => self.crash(slot),
            93..=95 => self.resume(slot),
            96..=97 => self.inquire(slot),
            98 => {
                if let Some(step) = self.at(slot).next_steps(1).pop() {
                    let operation = step.operation;
                    self.apply(slot, &Command::AbortOperation { operation });
                }
            }
            _ => {}
        }
    }

    /// Everything that is under way ends; late messages arrive first.
    fn settle(&mut self) {
        for client in &mut self.clients {
            client.asking = None;
        }
        for _ in 0..50 {
            for slot in (0..SLOTS).map(MetaSlot) {
                self.resume(slot);
                self.inquire(slot);
            }
            let mut late = std::mem::take(&mut self.network);
            while !late.is_empty() {
                let index = self.dice.roll(late.len());
                let message = late.swap_remove(index);
                if !matches!(message, Message::Request { .. }) {
                    self.deliver(message);
                }
                late.append(&mut self.network);
            }
            let unfinished =
                |p: &Partition| !p.next_steps(1).is_empty() || !p.intents(1).is_empty();
            if !self.partitions.iter().any(unfinished) {
                return;
            }
        }
        panic!("operations do not end");
    }

    /// What `milpa fsck` relies on, at any moment: each partition is sound, and an inode that no
    /// operation is about has exactly its names.
    fn check_meanwhile(&self, seed: u64) {
        for partition in &self.partitions {
            assert_eq!(super::check::faults(partition), [], "seed {seed}");
        }
        let inodes = self.partitions.iter().flat_map(|p| p.tables.inodes.iter());
        let mut known: Vec<_> = inodes.map(|(id, _)| id).collect();
        known.extend(
            self.partitions.iter().flat_map(|p| p.tables.dentries.iter()).map(|(_, d)| d.inode),
        );
        known.sort_unstable();
        known.dedup();
        for some in known.chunks(1024) {
            let looks: Vec<_> =
                self.partitions.iter().map(|p| super::check::look(p, some)).collect();
            for (index, id) in some.iter().enumerate() {
                let looks = looks.iter().map(|looks| &looks[index]);
                let inode = looks.clone().find_map(|look| look.inode);
                let names: u64 = looks.clone().map(|look| look.names).sum();
                let is_locked = looks.clone().any(|look| look.is_locked);
                if is_locked || inode.is_some_and(|inode| inode.is_in_operation) {
                    continue;
                }
                let wanted = inode.map_or(0, |inode| u64::from(inode.names(*id)));
                assert_eq!(names, wanted, "seed {seed}: {id:?} {inode:?}");
            }
        }
    }

    /// The volume as fsck would see it.
    fn check(&self, seed: u64) {
        self.check_meanwhile(seed);
        let mut names: BTreeMap<InodeId, (u32, FileKind)> = BTreeMap::new();
        let mut children: BTreeMap<InodeId, (u64, u32)> = BTreeMap::new();
        for partition in &self.partitions {
            assert_eq!(partition.tables.locked_names.count(), 0, "seed {seed}");
            assert_eq!(partition.tables.locked_directories.count(), 0, "seed {seed}");
            for ((parent, _), dentry) in partition.tables.dentries.iter() {
                let named = names.entry(dentry.inode).or_insert((0, dentry.kind));
                named.0 += 1;
                assert_eq!(named.1, dentry.kind);
                let of_parent = children.entry(parent).or_default();
                of_parent.0 += 1;
                of_parent.1 += u32::from(dentry.kind == FileKind::Directory);
            }
        }
        for partition in &self.partitions {
            for (id, inode) in partition.tables.inodes.iter() {
                let (links, kind) = names.remove(&id).unwrap_or((0, inode.kind));
                assert_eq!(kind, inode.kind);
                let (entries, subdirectories) = children.remove(&id).unwrap_or_default();
                if inode.is_directory() {
                    let expected = u32::from(id != ROOT);
                    assert_eq!(
                        links, expected,
                        "seed {seed}: {id:?} is an orphan or has two names"
                    );
                    assert_eq!(inode.link_count, 2 + subdirectories, "seed {seed}: {id:?}");
                    assert_eq!(inode.size, entries, "seed {seed}: {id:?}");
                } else {
                    assert!(links > 0, "seed {seed}: {id:?} is an orphan");
                    assert_eq!(inode.link_count, links, "seed {seed}: {id:?}");
                }
            }
        }
        assert!(names.is_empty(), "seed {seed}: dangling dentries {names:?}");
        assert!(children.is_empty(), "seed {seed}: entries of no directory {children:?}");
    }

    /// Each acknowledged request changed the number of dentries once.
    fn check_count(&self, seed: u64) {
        let done = self.replies.values().filter(|(_, reply)| reply.is_ok());
        let expected: i64 = done
            .map(|(write, _)| match write {
                MetaWrite::Create { .. } | MetaWrite::Link { .. } => 1,
                MetaWrite::Unlink { .. } | MetaWrite::RemoveDirectory { .. } => -1,
                _ => 0,
            })
            .sum();
        let dentries: u64 = self.partitions.iter().map(|p| p.tables.dentries.count()).sum();
        assert_eq!(dentries as i64, expected, "seed {seed}");
    }

    /// Asks until all requests have their replies, so that they can be counted.
    fn drain(&mut self) {
        for _ in 0..20_000 {
            if self.clients.iter().all(|client| client.asking.is_none()) {
                return;
            }
            for which in 0..self.clients.len() {
                // At random: in lockstep, two renames across would lock each other out for ever.
                if let Some((slot, id, write)) = self.clients[which].asking.clone()
                    && self.dice.roll(2) == 0
                {
                    self.network.push(Message::Request { slot, id, write });
                }
            }
            for message in std::mem::take(&mut self.network) {
                self.deliver(message);
            }
            for slot in (0..SLOTS).map(MetaSlot) {
                self.inquire(slot);
            }
        }
        panic!("a request has no reply");
    }
}

/// Goal: whatever is lost, repeated, delayed or crashed, in the end every dentry has its inode,
/// every inode its names, every directory its count; and each request was applied once.
#[test]
fn no_orphan_no_dangling_dentry_exact_counts() {
    let (mut done, mut across, mut refused) = (0, 0, 0);
    for seed in 0..300 {
        let mut world = World::new(seed);
        for step in 0..1500 {
            world.step();
            if step % 50 == 0 {
                world.check_meanwhile(seed);
            }
        }
        world.drain();
        world.settle();
        world.check(seed);
        if world.is_countable {
            world.check_count(seed);
        }
        done += world.replies.values().filter(|(_, reply)| reply.is_ok()).count();
        refused += world.replies.values().filter(|(_, reply)| reply.is_err()).count();
        let ended = world.partitions.iter().map(|p| p.tables.ended_operations.count());
        across += ended.sum::<u64>();
    }
    println!("{done} done, {refused} refused, {across} participants");
    assert!(done > 5_000 && across > 5_000, "progress: {done} done, {across} participants");
}

/// One operation, step by step: what clients and the other partition see at each.
#[test]
fn a_directory_elsewhere_step_by_step() {
    let mut world = World::new(0);
    let (home, away) = (MetaSlot(0), MetaSlot(1));
    let id = |sequence| RequestId { session: ME, sequence, unanswered: 1 };
    let write = MetaWrite::Create {
        parent: ROOT,
        name: name("d"),
        inode: new_inode(FileKind::Directory),
        placement: Some(away),
        open_existing: false,
        content: None,
    };
    let create = Command::Client { id: id(1), now: Timestamp(7), write: write.clone() };
    let Outcome::Deferred(operation) = world.apply(home, &create) else { panic!() };
    assert_eq!(world.apply(home, &create), Outcome::Deferred(operation), "a repeat waits too");
    let other = Command::Client { id: id(2), now: Timestamp(7), write };
    assert_eq!(world.apply(home, &other), Outcome::Reply(Err(MetaError::Locked)));

    let prepare = world.at(home).operation_step(operation).unwrap();
    assert_eq!((prepare.slot, prepare.committed), (away, false));
    world.deliver(Message::Step { coordinator: home, step: prepare });
    assert_eq!(world.partitions[1].intents(10), [operation]);
    let answer = world.network.pop().unwrap();
    world.deliver(answer.clone());
    let Outcome::Reply(Ok(MetaAnswer::Entry(entry))) = world.apply(home, &create) else { panic!() };
    assert_eq!(entry.inode.slot(), away);
    let finish = world.at(home).operation_step(operation).unwrap();
    assert_eq!((&finish.step, finish.committed), (&Step::Finish, true));
    world.apply(home, &Command::AbortOperation { operation });
    assert!(world.at(home).knows_operation(operation), "past the commit there is no way back");
    world.deliver(answer);
    assert_eq!(world.at(home).operation_step(operation).as_ref(), Some(&finish), "counted once");
    world.settle();
    assert!(!world.at(home).knows_operation(operation));
    assert_eq!(world.partitions[1].intents(10), []);
}

#[test]
fn a_late_prepare_after_the_abort_is_refused() {
    let mut away = partition(1);
    let operation = OperationId { partition: PartitionId(100), index: 5 };
    let step = |step| Command::Participate { operation, now: Timestamp(1), step };
    let prepare =
        step(Step::PrepareInode { inode: new_inode(FileKind::File), parent: InodeId::ROOT });
    away.apply(1, &step(Step::Abort));
    assert_eq!(away.apply(2, &prepare).outcome, Outcome::Reply(Err(MetaError::Stale)));
    assert_eq!(away.statistics().inodes, 0);
}

impl World {
    /// One request of the first client, to its end.
    fn run(&mut self, write: MetaWrite) -> MetaReply {
        let slot = match &write {
            MetaWrite::Rename { target_parent: parent, .. }
            | MetaWrite::Create { parent, .. }
            | MetaWrite::Unlink { parent, .. } => parent.slot(),
            _ => unreachable!(),
        };
        let sequence = self.clients[0].sequences.entry(slot).or_default();
        *sequence += 1;
        let id = RequestId { session: ME, sequence: *sequence, unanswered: *sequence };
        self.clients[0].asking = Some((slot, id, write));
        self.drain();
        self.settle();
        self.replies[&(ME.0, slot.0, id.sequence)].1.clone()
    }

    fn make(&mut self, parent: InodeId, text: &str, kind: FileKind, slot: u32) -> InodeId {
        match self.run(placed(parent, text, kind, slot)) {
            Ok(MetaAnswer::Entry(entry)) => entry.inode,
            other => panic!("{other:?}"),
        }
    }
}

fn placed(parent: InodeId, text: &str, kind: FileKind, slot: u32) -> MetaWrite {
    MetaWrite::Create {
        parent,
        name: name(text),
        inode: new_inode(kind),
        placement: Some(MetaSlot(slot)),
        open_existing: false,
        content: None,
    }
}

#[test]
fn a_held_file_elsewhere_waits_for_its_holder() {
    let mut world = World::new(0);
    world.make(ROOT, "f", FileKind::File, 1);
    world.run(MetaWrite::Unlink { parent: ROOT, name: name("f"), held: true }).unwrap();
    assert_eq!(world.partitions[1].statistics().held, 1);
    world.apply(MetaSlot(1), &Command::ExpireSession { session: ME });
    assert_eq!(world.partitions[1].statistics().inodes, 0);
}

/// A directory that is being filled from elsewhere is empty still, and must not go.
#[test]
fn a_directory_that_gets_an_entry_is_not_removed() {
    let mut world = World::new(0);
    let d = world.make(ROOT, "d", FileKind::Directory, 0);
    world.make(ROOT, "e", FileKind::Directory, 0);
    let id = |sequence| RequestId { session: ME, sequence, unanswered: sequence };
    let fill = placed(d, "x", FileKind::File, 1);
    let fill = Command::Client { id: id(10), now: Timestamp(1), write: fill };
    assert!(matches!(world.apply(MetaSlot(0), &fill), Outcome::Deferred(_)));
    let removals = [remove_directory(ROOT, "d"), rename((ROOT, "e"), (ROOT, "d"))];
    for (sequence, write) in (11..).zip(removals) {
        let id = RequestId { unanswered: 10, ..id(sequence) };
        let command = Command::Client { id, now: Timestamp(1), write };
        assert_eq!(world.apply(MetaSlot(0), &command), Outcome::Reply(Err(MetaError::Locked)));
    }
}

/// A partition that remembered where a directory lay before another partition moved it would
/// refuse a rename as a loop that is none.
#[test]
fn moves_by_other_partitions_leave_no_false_loops() {
    for place in [0, 1] {
        let mut world = World::new(0);
        let a = world.make(ROOT, "a", FileKind::Directory, place);
        let x = world.make(a, "x", FileKind::Directory, 1);
        world.run(rename((a, "x"), (ROOT, "x"))).unwrap();
        assert_eq!(world.run(rename((ROOT, "a"), (x, "a"))), Ok(MetaAnswer::Done));
        world.check(0);
    }
}

/// The participant is gone for good, or never was: giving up twice forgets the operation.
#[test]
fn an_operation_with_nobody_can_be_given_up() {
    let mut world = World::new(0);
    let id = RequestId { session: ME, sequence: 1, unanswered: 1 };
    let write = placed(ROOT, "f", FileKind::File, 77);
    let command = Command::Client { id, now: Timestamp(1), write };
    let Outcome::Deferred(operation) = world.apply(MetaSlot(0), &command) else { panic!() };
    let abort = Command::AbortOperation { operation };
    world.apply(MetaSlot(0), &abort);
    assert_eq!(world.at(MetaSlot(0)).answered(&id), None, "the client may try again");
    assert!(world.at(MetaSlot(0)).knows_operation(operation));
    world.apply(MetaSlot(0), &abort);
    assert!(!world.at(MetaSlot(0)).knows_operation(operation));
    world.check(0);
}
