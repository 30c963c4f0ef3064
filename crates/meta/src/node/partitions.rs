//! Requests about whole partitions: create, delete, options, reports.

use std::rc::Rc;
use std::time::Duration;

use milpa_host::clock::Instant;
use milpa_host::jobs;
use milpa_raft::MultiRaft;
use milpa_types::{MetaError, PartitionId, VolumeId, VolumeOptions};
use milpa_wire::meta::{
    CreateMetaPartition, MetaAnswer, MetaNodeReport, MetaPartitionReport, MetaReply,
};
use tracing::{error, info};

use super::inbox::{Event, done};
use super::replica::Replica;
use super::responder::Responder;
use super::shell::Shell;
use crate::core::Command;

/// Replicas on one node, so that a mad manager cannot fill the disk with empty ones.
const PARTITIONS_MAX: usize = 10_000;
/// The directory of a deleted partition goes when the log has long forgotten the group.
const REMOVE_AFTER: Duration = Duration::from_secs(5);

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
        if !definition.members.contains(&self.ctx.node)
            || definition.options.validate().is_err()
            || self.deleting.contains(&partition)
        {
            return responder.fail(MetaError::Invalid);
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

    /// Begins the Raft group of a new partition; the first member stands for election at once.
    pub(crate) fn begin_group(&mut self, multi: &mut MultiRaft, definition: CreateMetaPartition) {
        let partition = definition.partition;
        let campaign = definition.members.first() == Some(&self.ctx.node);
        info!(%partition, volume = %definition.volume, slot = %definition.slot, "new partition");
        multi.create_group(partition, &definition.members, &[], campaign);
        self.replicas.insert(partition, Replica::founded(definition));
    }

    /// Drops the replica of a deleted volume's partition. Repeating the request is harmless.
    pub(crate) fn delete_partition(&mut self, partition: PartitionId, responder: Responder) {
        if !self.replicas.contains_key(&partition) {
            return responder.send(&done());
        }
        if !self.deleting.insert(partition) {
            return responder.fail(MetaError::Busy);
        }
        let (store, inbox) = (self.ctx.store.clone(), Rc::clone(&self.ctx.inbox));
        tokio::task::spawn_local(async move {
            let result = jobs::run("partitions", move || store.mark_deleted(partition)).await;
            let result = result.unwrap_or_else(|error| Err(std::io::Error::other(error)));
            inbox.push(Event::DeletionNoted { partition, result, responder });
        });
    }

    /// The deletion is noted on disk: nothing can bring the replica back any more.
    pub(crate) fn deletion_noted(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        result: std::io::Result<()>,
        responder: Responder,
    ) {
        self.deleting.remove(&partition);
        if let Err(error) = result {
            error!(%partition, %error, "cannot note a partition's deletion");
            return responder.fail(MetaError::DiskFailed);
        }
        info!(%partition, "partition deleted");
        multi.remove_group(partition);
        if let Some(mut replica) = self.replicas.remove(&partition) {
            replica.step_down();
        }
        let store = self.ctx.store.clone();
        tokio::task::spawn_local(async move {
            tokio::time::sleep(REMOVE_AFTER).await;
            // What cannot be removed now is at the next start: the mark is durable.
            let _ = jobs::run("partitions", move || store.remove(partition)).await;
        });
        responder.send(&done());
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

    /// What is held here. A damaged replica is reported without leader and with nothing applied.
    pub(crate) fn report(&self, multi: &MultiRaft) -> MetaNodeReport {
        let partitions = self.replicas.values().map(|replica| {
            let status = multi.status(replica.id());
            MetaPartitionReport {
                partition: replica.id(),
                leader: status.as_ref().and_then(|status| status.leader),
                term: status.map_or(replica.term, |status| status.term),
                applied: replica.applied.index,
                statistics: replica.state.statistics(),
            }
        });
        MetaNodeReport { partitions: partitions.collect() }
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
