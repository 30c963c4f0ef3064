//! Tasks: replicas that are being made, and why.
//!
//! A task is the intent that a partition gets a replica at a place. It is in the replicated state,
//! so a new leader goes on with it; the reports of the nodes say how far it is. A partition has at
//! most one, so its members change one at a time.
//!
//! ```text
//! event                                                     then
//! BeginTask   the place is among the partition's places     the node makes a replica and fills it
//! (the replica became a member)                             EndTask { done }
//! (deadline, place lost, not needed any more)               EndTask { not done }: given up
//! (given up, and out of the configuration)                  EndTask { not done }: the place goes
//! ```

use milpa_types::{DiskId, ManagerError, NodeId, PartitionId, Role};
use serde::{Deserialize, Serialize};

use super::command::Applied;
use super::node::unknown_node;
use super::partition::{Replica, stale};
use super::state::State;

/// Places of one partition at most, members or not: each is a bound on what nodes can be asked to
/// hold of it while nothing can be dropped.
const PLACES_MAX: usize = 16;

/// Why a replica is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TaskReason {
    /// A node was not heard for the dead period.
    NodeDead(NodeId),
    /// An operator removed a node that was not heard.
    NodeRemoved(NodeId),
    /// An operator drains a node.
    NodeDraining(NodeId),
    /// A disk failed a write or a flush.
    DiskFenced(NodeId, DiskId),
    /// A node does not have the disk any more.
    DiskGone(NodeId, DiskId),
    /// An operator drains a disk.
    DiskDraining(NodeId, DiskId),
    /// A node that is well has lost the replica, or found it damaged.
    ReplicaLost(NodeId),
    /// There are fewer places than the volume wants.
    TooFew,
}

impl std::fmt::Display for TaskReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TaskReason::NodeDead(node) => write!(f, "node {node} is dead"),
            TaskReason::NodeRemoved(node) => write!(f, "node {node} was removed"),
            TaskReason::NodeDraining(node) => write!(f, "node {node} is drained"),
            TaskReason::DiskFenced(node, disk) => write!(f, "disk {disk} of node {node} failed"),
            TaskReason::DiskGone(node, disk) => write!(f, "disk {disk} of node {node} is gone"),
            TaskReason::DiskDraining(node, disk) => {
                write!(f, "disk {disk} of node {node} is drained")
            }
            TaskReason::ReplicaLost(node) => write!(f, "node {node} lost its replica"),
            TaskReason::TooFew => f.write_str("it has too few replicas"),
        }
    }
}

/// One replica being made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Unique in the cluster, never reused.
    pub id: u64,
    /// Which partition gets it.
    pub partition: PartitionId,
    /// Where.
    pub place: Replica,
    /// Whether the place is new, and goes with the task if that is given up.
    pub is_new_place: bool,
    /// Nobody goes on with it: the place leaves the configuration, and then goes.
    pub is_given_up: bool,
    /// Why.
    pub reason: TaskReason,
    /// When it was begun, by the leader's wall clock in milliseconds since 1970. For operators.
    pub begun_unix_ms: u64,
    /// When it is given up, to be planned anew. Nothing but the time of giving up depends on it.
    pub deadline_unix_ms: u64,
}

/// What a command says of a new task; its id is given when it is applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewTask {
    /// See [`Task::partition`].
    pub partition: PartitionId,
    /// See [`Task::place`].
    pub place: Replica,
    /// See [`Task::reason`].
    pub reason: TaskReason,
    /// See [`Task::begun_unix_ms`].
    pub begun_unix_ms: u64,
    /// See [`Task::deadline_unix_ms`].
    pub deadline_unix_ms: u64,
}

impl State {
    /// The task of a partition.
    #[must_use]
    pub fn task(&self, partition: PartitionId) -> Option<&Task> {
        self.tasks.get(&partition)
    }

    /// All tasks in order of their partitions.
    pub fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.tasks.values()
    }

    pub(super) fn begin_task(&mut self, new: &NewTask) -> Applied {
        let NewTask { partition, place, reason, begun_unix_ms, deadline_unix_ms } = *new;
        if self.tasks.contains_key(&partition) {
            return stale("the partition has a task already");
        }
        let is_new_place = match self.take_place(partition, place) {
            Ok(is_new_place) => is_new_place,
            Err(reason) => return stale(reason),
        };
        let id = self.task_next;
        self.task_next += 1;
        self.forget_holder(partition, place.node);
        let task = Task {
            id,
            partition,
            place,
            is_new_place,
            is_given_up: false,
            reason,
            begun_unix_ms,
            deadline_unix_ms,
        };
        self.tasks.insert(partition, task);
        Applied::Done
    }

    /// Notes the place of a new replica; says whether it is a new one.
    fn take_place(&mut self, partition: PartitionId, place: Replica) -> Result<bool, &'static str> {
        let Some(node) = self.nodes.get(&place.node) else { return Err("no such node") };
        if let Some(record) = self.data.get_mut(&partition) {
            let has_disk = node.disks.iter().any(|disk| disk.id == place.disk);
            if node.role != Role::Data || !has_disk {
                return Err("no such disk on a data node");
            }
            if record.configuration.members.contains(&place.node) {
                return Err("the node is a member already");
            }
            match record.disk_of(place.node) {
                Some(disk) if disk == place.disk => Ok(false),
                Some(_) => Err("the node has another place of this partition"),
                None if record.replicas.len() >= PLACES_MAX => Err("too many places"),
                None => {
                    record.replicas.push(place);
                    Ok(true)
                }
            }
        } else if let Some(record) = self.meta.get_mut(&partition) {
            if node.role != Role::Meta {
                return Err("not a meta node");
            }
            if record.joining.is_some() || record.members.contains(&place.node) {
                return Err("the node is a member already, or another one joins");
            }
            record.joining = Some(place.node);
            Ok(true)
        } else {
            Err("partition is gone")
        }
    }

    pub(super) fn end_task(&mut self, partition: PartitionId, id: u64, done: bool) -> Applied {
        if self.tasks.get(&partition).is_none_or(|task| task.id != id) {
            return stale("another task, or none");
        }
        let Some(mut task) = self.tasks.remove(&partition) else { return Applied::Done };
        let configuration = self.data.get(&partition).map(|record| &record.configuration);
        let has = |list: &[NodeId]| list.contains(&task.place.node);
        if configuration.is_some_and(|configuration| has(&configuration.members)) {
            // Done, whatever was thought when this was planned; if it is one too many, it goes as
            // any other.
            return Applied::Done;
        }
        if configuration.is_some_and(|configuration| has(&configuration.learners)) {
            task.is_given_up = true;
            self.tasks.insert(partition, task);
            return Applied::Done;
        }
        if done || !task.is_new_place {
            return Applied::Done;
        }
        if let Some(record) = self.meta.get_mut(&partition)
            && record.joining == Some(task.place.node)
        {
            record.joining = None;
            // It never voted, so a later one at this place may be made under the same id.
            record.created.remove(&task.place.node);
        }
        if self.data.contains_key(&partition) {
            return self.drop_replica(partition, task.place.node);
        }
        self.forget_removed();
        Applied::Done
    }

    /// Forgets one place of a data partition. The bytes there are deleted later, see the planner.
    pub(super) fn drop_replica(&mut self, partition: PartitionId, node: NodeId) -> Applied {
        if self.tasks.get(&partition).is_some_and(|task| task.place.node == node) {
            return stale("a replica is being made there");
        }
        let Some(record) = self.data.get_mut(&partition) else { return stale("partition is gone") };
        if record.is_configured(node) {
            return stale("the place is part of the configuration");
        }
        record.replicas.retain(|replica| replica.node != node);
        record.created.remove(&node);
        self.forget_holder(partition, node);
        self.forget_removed();
        Applied::Done
    }

    /// Another set of members for a meta partition: the intent. Its own group commits it.
    pub(super) fn set_members(&mut self, partition: PartitionId, members: &[NodeId]) -> Applied {
        let Some(record) = self.meta.get_mut(&partition) else { return stale("partition is gone") };
        let known = |node: &NodeId| record.members.contains(node) || record.joining == Some(*node);
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        if members.is_empty() || sorted.len() != members.len() || !members.iter().all(known) {
            return stale("not members of this partition");
        }
        record.members = members.to_vec();
        if record.joining.is_some_and(|joining| members.contains(&joining)) {
            record.joining = None;
        }
        let (members, joining) = (record.members.clone(), record.joining);
        record.created.retain(|node| members.contains(node) || joining == Some(*node));
        self.forget_removed();
        Applied::Done
    }

    /// Tasks of partitions that are no more go with them.
    pub(super) fn end_tasks_of(&mut self, partition: PartitionId) {
        self.tasks.remove(&partition);
    }

    /// How many replicas are, or shall be, on a node, or on one of its disks.
    #[must_use]
    pub fn replicas_on(&self, node: NodeId, disk: Option<DiskId>) -> usize {
        let here = |replica: &&Replica| {
            replica.node == node && disk.is_none_or(|disk| replica.disk == disk)
        };
        let data = self.data.values().flat_map(|record| &record.replicas).filter(here).count();
        let meta = self
            .meta
            .values()
            .filter(|record| record.members.contains(&node) || record.joining == Some(node));
        data + if disk.is_none() { meta.count() } else { 0 }
    }

    /// Forgets nodes that were removed and that nothing refers to any more.
    pub(super) fn forget_removed(&mut self) {
        let removed = self.nodes.values().filter(|node| node.is_removed).map(|node| node.id);
        let empty: Vec<NodeId> =
            removed.filter(|node| self.replicas_on(*node, None) == 0).collect();
        for node in empty {
            self.nodes.remove(&node);
            self.lives.remove(&node);
            self.nodes_version += 1;
            for volume in self.volumes.values_mut() {
                volume.options_untold.remove(&node);
            }
            self.forget_removals_on(node);
        }
    }

    /// Why an operator may not remove a node, if that is so.
    pub(crate) fn removal_problem(&self, node: NodeId) -> Option<ManagerError> {
        let refuse = |reason: String| Some(ManagerError::Refused { reason });
        let Some(record) = self.nodes.get(&node) else {
            return Some(unknown_node(node));
        };
        let held = self.replicas_on(node, None);
        if record.state.is_heard() && held > 0 {
            return refuse(format!(
                "node {node} is in service and holds {held} replicas: empty it with \
                 `milpa node drain {node}` first, or stop it"
            ));
        }
        let is_lost = |other: &NodeId| {
            *other == node || self.nodes.get(other).is_none_or(|other| !other.state.is_heard())
        };
        for record in self.data.values() {
            let members = &record.configuration.members;
            let left = members.iter().filter(|member| !is_lost(member)).count();
            if members.contains(&node) && left < super::partition::MEMBERS_MIN {
                return refuse(format!(
                    "data partition {} has {left} copies in service without node {node}, and \
                     never goes below {}: bring back one of its nodes first",
                    record.id,
                    super::partition::MEMBERS_MIN
                ));
            }
        }
        for record in self.meta.values().filter(|record| record.members.contains(&node)) {
            let left = record.members.iter().filter(|member| !is_lost(member)).count();
            if left * 2 <= record.members.len() {
                return refuse(format!(
                    "meta partition {} has no majority without node {node}: bring back one of \
                     its nodes first",
                    record.id
                ));
            }
        }
        None
    }
}
