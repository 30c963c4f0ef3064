//! Requests about whole partitions: create, delete, options, reports.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use milpa_host::clock::{Instant, now_ms};
use milpa_host::jobs;
use milpa_raft::{GroupStatus, MemberChange, Members, MultiRaft, ProposeError};
use milpa_types::{Deletion, MetaError, NodeId, PartitionId, VolumeId, VolumeOptions};
use milpa_wire::meta::{
    CreateMetaPartition, MetaAnswer, MetaNodeReport, MetaPartitionReport, MetaReply,
};
use tracing::{error, info, warn};

use super::inbox::{Asker, Event, done};
use super::replica::Replica;
use super::responder::Responder;
use super::shell::{Shell, refusal};
use super::snapshots::IDLE_MS;
use crate::core::Command;

/// Replicas on one node, so that a mad manager cannot fill the disk with empty ones.
const PARTITIONS_MAX: usize = 10_000;
/// Members and learners of one group at most: 7 replicas, and one that replaces each.
const MEMBERS_MAX: usize = 14;
/// How often, and how far apart, it is tried to remove the directory of a deleted partition.
const REMOVE_PAUSE: Duration = Duration::from_secs(5);
const REMOVE_TRIES: u32 = 100;
/// How often, and how far apart, it is tried to note that a replica has joined its group.
const NOTE_TRIES: u32 = 10;
const NOTE_PAUSE: Duration = Duration::from_secs(1);

/// How far the removal of a deleted partition's directory has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    /// It is there whole, marked or not: all but the mark can go once that is durable. That has failed so many times.
    Full { failed: u32 },
    /// A job is at that.
    Emptying { failed: u32 },
    /// What is left waits for the log.
    Waiting,
}

impl Removal {
    /// Nothing was tried yet.
    pub(crate) const FULL: Removal = Removal::Full { failed: 0 };
}

impl Shell {
    /// Holds a replica of a new partition. Repeating the request is harmless.
    pub(crate) fn create_partition(
        &mut self,
        definition: CreateMetaPartition,
        responder: Responder,
    ) {
        let partition = definition.partition;
        if self.founding.contains_key(&partition) {
            return responder.fail(MetaError::Busy);
        }
        if let Some(replica) = self.replicas.get(&partition) {
            let same = replica.definition.volume == definition.volume
                && replica.definition.slot == definition.slot;
            return responder.send(&if same { done() } else { Err(MetaError::Exists) });
        }
        if self.damaged.contains_key(&partition) {
            return responder.fail(MetaError::DiskFailed);
        }
        if !definition.members.contains(&self.ctx.node) || definition.options.validate().is_err() {
            return responder.fail(MetaError::Invalid);
        }
        if self.deleting.contains(&partition) || self.joined.contains(&partition) {
            // What was here before goes first, or it would take the new one along.
            return responder.fail(MetaError::Busy);
        }
        if self.replicas.len() + self.creating.len() >= PARTITIONS_MAX {
            return responder.fail(MetaError::NoSpace);
        }
        if !self.creating.insert(partition) {
            return responder.fail(MetaError::Busy);
        }
        let ctx = Rc::clone(&self.ctx);
        tokio::task::spawn_local(async move {
            let (written, store) = (definition.clone(), ctx.store.clone());
            ctx.find_addresses(&definition.members).await;
            let result = jobs::run("partitions", move || store.define(&written)).await;
            let result = result.unwrap_or_else(|error| Err(std::io::Error::other(error)));
            ctx.inbox.push(Event::Defined { definition, result, responder });
        });
    }

    /// The definition is on disk: the group can begin.
    pub(crate) fn defined(
        &mut self,
        multi: &mut MultiRaft,
        definition: CreateMetaPartition,
        result: std::io::Result<()>,
        responder: Responder,
    ) {
        let partition = definition.partition;
        self.creating.remove(&partition);
        if let Err(error) = result {
            error!(%partition, %error, "cannot write a partition's definition");
            return responder.fail(MetaError::DiskFailed);
        }
        self.begin_group(multi, definition);
        self.founding.insert(partition, responder);
    }

    /// Tells the manager of new partitions once they are durable here: from then on a restart
    /// brings them back. Called after each round of turns.
    pub(crate) fn answer_founded(&mut self, multi: &MultiRaft) {
        let now = Instant::now();
        let over = |partition: &PartitionId, responder: &mut Responder| {
            multi.is_durable(*partition) || responder.deadline() <= now
        };
        for (partition, responder) in self.founding.extract_if(.., over) {
            if multi.is_durable(partition) {
                responder.send(&done());
            } else {
                responder.fail(MetaError::OutcomeUnknown);
            }
        }
    }

    /// Begins the Raft group of a new partition, where the first member stands for election at
    /// once; or waits for the leader of one that exists.
    pub(crate) fn begin_group(&mut self, multi: &mut MultiRaft, definition: CreateMetaPartition) {
        let partition = definition.partition;
        let joins = definition.joins;
        info!(%partition, volume = %definition.volume, slot = %definition.slot, joins,
            "new partition");
        let mut replica = if joins {
            self.join_group(multi, partition);
            Replica::joining(definition)
        } else {
            let campaign = definition.members.first() == Some(&self.ctx.node);
            multi.create_group(partition, &definition.members, &[], campaign);
            Replica::founded(definition)
        };
        let now = now_ms();
        replica.log.due_ms = now + IDLE_MS;
        replica.log.scrub_due_ms = self.ctx.next_scrub_ms(now);
        self.replicas.insert(partition, replica);
    }

    /// Takes part in a group that exists, without a vote until it has caught up. Another replica may have been
    /// here before it, and voted: who was taken out of the group since, and has not heard of it, would count on
    /// this node (docs/decisions/0010).
    pub(crate) fn join_group(&mut self, multi: &mut MultiRaft, partition: PartitionId) {
        self.next_nonce = self.next_nonce.wrapping_add(1);
        if multi.rejoin_group(partition, self.next_nonce) {
            self.joining.insert(partition);
        }
    }

    /// Notes who has caught up with its group. If that fails for long, it is found out again at the next start.
    pub(crate) fn note_joined(&mut self, multi: &MultiRaft) {
        let has_joined = |partition: &PartitionId| !multi.is_rejoining(*partition);
        for partition in self.joining.extract_if(.., has_joined) {
            if !self.replicas.contains_key(&partition) {
                continue;
            }
            self.joined.insert(partition);
            let (store, inbox) = (self.ctx.store.clone(), Rc::clone(&self.ctx.inbox));
            tokio::task::spawn_local(async move {
                for _ in 0..NOTE_TRIES {
                    let store = store.clone();
                    let noting = jobs::run("partitions", move || store.mark_joined(partition));
                    match noting.await.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
                        Ok(()) => break,
                        Err(error) => {
                            warn!(%partition, %error, "cannot note that a replica has joined");
                            tokio::time::sleep(NOTE_PAUSE).await;
                        }
                    }
                }
                inbox.push(Event::JoinNoted { partition });
            });
        }
    }

    /// Drops the replica of a deleted volume's partition, or one that is not needed any more, damaged
    /// or not. Repeating the request is harmless.
    pub(crate) fn delete_partition(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        deletion: Deletion,
        responder: Responder,
    ) {
        let is_damaged = self.damaged.contains_key(&partition);
        if !is_damaged && !self.replicas.contains_key(&partition) {
            return responder.send(&done());
        }
        // The note of one replica must not be taken from the next.
        if self.joined.contains(&partition) {
            return responder.fail(MetaError::Busy);
        }
        let log_end = multi.status(partition).filter(|_| !is_damaged).map(|it| it.log_end());
        if !deletion.is_of(log_end) {
            warn!(%partition, ?deletion, ?log_end, "the replica to delete was another one");
            return responder.fail(MetaError::Busy);
        }
        // From now on it takes no part, so that nobody comes to need it while this is noted. A crash before that leaves it as it was.
        self.deleting.insert(partition);
        multi.refuse_group(partition);
        self.damaged.remove(&partition);
        if let Some(mut replica) = self.replicas.remove(&partition) {
            replica.step_down();
        }
        let (store, inbox) = (self.ctx.store.clone(), Rc::clone(&self.ctx.inbox));
        tokio::task::spawn_local(async move {
            let result = jobs::run("partitions", move || store.mark_deleted(partition)).await;
            let result = result.unwrap_or_else(|error| Err(std::io::Error::other(error)));
            inbox.push(Event::DeletionNoted { partition, result, responder });
        });
    }

    /// The deletion is noted on disk: nothing can bring the replica back any more. If it could not be noted for
    /// certain, the next start may find the mark or not: without it the replica is one whose log is lost, and deleted again.
    pub(crate) fn deletion_noted(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        result: std::io::Result<()>,
        responder: Responder,
    ) {
        match &result {
            Ok(()) => info!(%partition, "partition deleted"),
            Err(error) => error!(%partition, %error, "cannot note a partition's deletion"),
        }
        multi.remove_group(partition);
        self.remove_later(partition, Removal::FULL);
        responder.send(&result.map(|()| MetaAnswer::Done).map_err(|_| MetaError::DiskFailed));
    }

    /// Removes a deleted partition's directory as soon as nothing needs it. Until then none is made in its place.
    pub(crate) fn remove_later(&mut self, partition: PartitionId, removal: Removal) {
        self.deleting.insert(partition);
        self.removable.insert(partition, removal);
    }

    /// Removes the directories of deleted partitions, not before the log has forgotten their groups: a log that
    /// knows a group without directory tells of a lost definition. The mark says enough, so all else goes before: on a
    /// full disk the log waits for that room. Not while a job works in one, which could write
    /// what it has from one replica into the directory of the next. Called after each round of turns.
    pub(crate) fn remove_directories(&mut self, multi: &MultiRaft) {
        let busy = &self.snapshot_jobs;
        let is_free = |id: &PartitionId| !busy.contains_key(id);
        let is_ready = |id: &PartitionId, removal: &mut Removal| {
            !matches!(removal, Removal::Emptying { .. }) && multi.is_forgotten(*id) && is_free(id)
        };
        for (partition, _) in self.removable.extract_if(.., is_ready) {
            let (store, inbox) = (self.ctx.store.clone(), Rc::clone(&self.ctx.inbox));
            tokio::task::spawn_local(async move {
                for _ in 0..REMOVE_TRIES {
                    let store = store.clone();
                    let removed = jobs::run("partitions", move || store.remove(partition)).await;
                    match removed.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
                        Ok(()) => return inbox.push(Event::DirectoryRemoved { partition }),
                        Err(error) => {
                            warn!(%partition, %error, "cannot remove a deleted partition")
                        }
                    }
                    tokio::time::sleep(REMOVE_PAUSE).await;
                }
                // Nothing is made in its place before the next start, which sees the mark.
            });
        }
        for (partition, removal) in self.removable.iter_mut().filter(|(id, _)| is_free(id)) {
            let Removal::Full { failed } = *removal else { continue };
            *removal = Removal::Emptying { failed };
            let partition = *partition;
            let (store, inbox) = (self.ctx.store.clone(), Rc::clone(&self.ctx.inbox));
            tokio::task::spawn_local(async move {
                let empty =
                    move || store.mark_deleted(partition).and_then(|()| store.empty(partition));
                let emptied = jobs::run("partitions", empty).await;
                let emptied = emptied.unwrap_or_else(|error| Err(std::io::Error::other(error)));
                if let Err(error) = &emptied {
                    warn!(%partition, %error, "cannot remove what a deleted partition has");
                    tokio::time::sleep(REMOVE_PAUSE).await;
                }
                let is_empty = emptied.is_ok();
                inbox.push(Event::DirectoryEmptied { partition, is_empty });
            });
        }
    }

    /// If it is not, that is tried again, but not for ever: then all of it waits for the log.
    pub(crate) fn directory_emptied(&mut self, partition: PartitionId, is_empty: bool) {
        let Some(removal) = self.removable.get_mut(&partition) else { return };
        let failed = match *removal {
            Removal::Full { failed } | Removal::Emptying { failed } => failed + 1,
            Removal::Waiting => return,
        };
        let is_over = is_empty || failed >= REMOVE_TRIES;
        *removal = if is_over { Removal::Waiting } else { Removal::Full { failed } };
    }

    /// The volume's options changed: proposed in each of its partitions led here, and answered
    /// when all have applied it. A partition without known leader may miss it, so the manager is
    /// asked to come again.
    pub(crate) fn set_volume_options(
        &mut self,
        multi: &mut MultiRaft,
        volume: VolumeId,
        options: &VolumeOptions,
        responder: Responder,
    ) {
        if options.validate().is_err() {
            return responder.fail(MetaError::Invalid);
        }
        let concerned = |replica: &&Replica| replica.volume() == volume;
        if self.replicas.values().filter(concerned).any(|replica| replica.leader.is_none()) {
            return responder.fail(MetaError::Busy);
        }
        let led = self.replicas.values().filter(concerned).filter(|replica| replica.leads());
        let led: Vec<PartitionId> = led.map(Replica::id).collect();
        let wait = responder.deadline().saturating_duration_since(Instant::now());
        let mut answers = Vec::new();
        for partition in led {
            let (part, answer) = Responder::task("set_options", wait);
            let command = Command::SetOptions { options: options.clone() };
            self.propose(multi, partition, &command, part);
            answers.push(answer);
        }
        tokio::task::spawn_local(async move {
            let mut reply: MetaReply = done();
            for answer in answers {
                match answer.await {
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => reply = Err(error),
                    Err(_) => reply = Err(MetaError::OutcomeUnknown),
                }
            }
            responder.send(&reply);
        });
    }

    /// The manager's word on who takes part. The change is one step of the group, or joint
    /// consensus; the reports show when it is done.
    pub(crate) fn configure(
        &mut self,
        multi: &mut MultiRaft,
        asker: Asker,
        partition: PartitionId,
        change: &MemberChange,
        responder: Responder,
    ) {
        if let Err(error) = self.leading(asker, partition) {
            return responder.fail(error);
        }
        let everybody: Vec<NodeId> =
            change.voters.iter().chain(&change.learners).copied().collect();
        if everybody.len() > MEMBERS_MAX {
            return responder.fail(MetaError::Invalid);
        }
        info!(%partition, voters = ?change.voters, learners = ?change.learners, "members change");
        match multi.propose_change(partition, change, &[], bytes::Bytes::new()) {
            // The present configuration is the one wanted.
            Ok(_) | Err(ProposeError::BadChange { .. }) => responder.send(&done()),
            Err(error) => responder.fail(refusal(&error)),
        }
        let ctx = Rc::clone(&self.ctx);
        tokio::task::spawn_local(async move { ctx.find_addresses(&everybody).await });
    }

    /// The manager's word on who leads.
    pub(crate) fn transfer_leader(
        &mut self,
        multi: &mut MultiRaft,
        asker: Asker,
        partition: PartitionId,
        to: NodeId,
        responder: Responder,
    ) {
        if let Err(error) = self.leading(asker, partition) {
            return responder.fail(error);
        }
        if multi.transfer_leader(partition, to) {
            responder.send(&done());
        } else {
            responder.fail(MetaError::Invalid);
        }
    }

    /// What is held here. Of a damaged replica no more is said than that it is.
    pub(crate) fn report(&self, multi: &MultiRaft) -> MetaNodeReport {
        let partitions = self.replicas.values().map(|replica| {
            let id = replica.id();
            let status = multi.status(id);
            let members = status.as_ref().map(|status| &status.members);
            // While a change is under way, those of both sides: nobody takes it for done.
            let voting = |members: &Members| {
                let both = members.voters.iter().chain(&members.outgoing).copied();
                both.collect::<BTreeSet<NodeId>>().into_iter().collect()
            };
            let leads = replica.leads();
            // One that may not vote yet, or could forget that it may, does not count.
            let counts = leads || !self.joining.contains(&id) && !self.joined.contains(&id);
            MetaPartitionReport {
                partition: id,
                leader: status.as_ref().and_then(|status| status.leader),
                term: status.as_ref().map_or(replica.term, |status| status.term),
                applied: replica.applied.index,
                log_end: status.as_ref().map(GroupStatus::log_end),
                statistics: replica.state.statistics(),
                voters: members.filter(|_| counts).map(voting).unwrap_or_default(),
                learners: members.map(|members| members.learners.clone()).unwrap_or_default(),
                current: status.as_ref().map(GroupStatus::current).unwrap_or_default(),
                is_full: self.is_full,
                marks: replica.state_marks(),
                is_damaged: false,
                declines_lead: multi.declines_lead(id, now_ms()),
            }
        });
        let damaged = self.damaged.keys().map(|partition| MetaPartitionReport {
            partition: *partition,
            is_damaged: true,
            ..MetaPartitionReport::default()
        });
        MetaNodeReport { partitions: partitions.chain(damaged).collect() }
    }

    /// For operators who compare replicas: any replica answers, with its index.
    pub(crate) fn state_hash(&self, partition: PartitionId, responder: Responder) {
        let hash = |replica: &Replica| MetaAnswer::StateHash {
            index: replica.applied.index,
            hash: replica.state.hash(),
        };
        let replica = self.replicas.get(&partition).ok_or(MetaError::WrongPartition);
        responder.send(&replica.map(hash));
    }
}
