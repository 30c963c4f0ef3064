//! The difference between what is agreed on and what nodes report, as steps for them to take.
//!
//! A step is planned in every pass until the reports show it done, so no answer matters: not a
//! lost one, nor one that a former leader got.

use milpa_types::{Deletion, InodeId, LogEnd, NodeId, PartitionId, Role, VolumeId, VolumeOptions};
use milpa_wire::data::{Configuration, CreateDataPartition};
use milpa_wire::meta::{CreateMetaPartition, StateMark};

use super::health::{Place, data_place, is_aligned};
use super::members;
use super::repair::lost_members;
use super::replace::target;
use super::{Plan, REPLICAS_PER_COMMAND, View};
use crate::core::{CommandV1, DataRecord, MetaRecord, PartitionKind, SplitState};
use crate::loads::NodeLoad;
use milpa_types::Durability;

/// Something for a node to do. Doing it twice is the same as once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Hold a replica of a meta partition.
    CreateMeta {
        /// Who.
        node: NodeId,
        /// What.
        create: CreateMetaPartition,
    },
    /// Hold a replica of a data partition.
    CreateData {
        /// Who.
        node: NodeId,
        /// What.
        create: CreateDataPartition,
    },
    /// Commit a configuration in the data partition's group. The first of `ask` that leads does.
    Configure {
        /// Which partition.
        partition: PartitionId,
        /// The configuration.
        configuration: Configuration,
        /// Who of the members, as they are and as they shall be, is lost for good.
        lost: Vec<NodeId>,
        /// Whom to ask, the likely leader first.
        ask: Vec<NodeId>,
    },
    /// Cut off a meta partition's inode range. The first of `ask` that leads does.
    Split {
        /// Which partition.
        partition: PartitionId,
        /// The last inode id it may ever give.
        end: InodeId,
        /// Whom to ask, the likely leader first.
        ask: Vec<NodeId>,
    },
    /// Take over a volume's options.
    SetOptions {
        /// Who.
        node: NodeId,
        /// What it serves.
        role: Role,
        /// Which volume.
        volume: VolumeId,
        /// Their version.
        version: u64,
        /// The options.
        options: VolumeOptions,
    },
    /// Commit members in a meta partition's group. The first of `ask` that leads does.
    SetMembers {
        /// Which partition.
        partition: PartitionId,
        /// Who shall vote.
        voters: Vec<NodeId>,
        /// Who shall learn.
        learners: Vec<NodeId>,
        /// Whom to ask, the likely leader first.
        ask: Vec<NodeId>,
    },
    /// Hand the leadership of a meta partition over.
    TransferLeader {
        /// Which partition.
        partition: PartitionId,
        /// Who leads it.
        from: NodeId,
        /// Who shall.
        to: NodeId,
    },
    /// Serve a replica no more whose state is not that of most others.
    Refuse {
        /// Who.
        node: NodeId,
        /// Which partition.
        partition: PartitionId,
        /// What it said of its state.
        mark: StateMark,
    },
    /// Drop a replica of a partition that is no more, or that has enough others.
    Delete {
        /// Who.
        node: NodeId,
        /// Which kind.
        kind: PartitionKind,
        /// Which partition.
        partition: PartitionId,
        /// Which replica.
        deletion: Deletion,
    },
}

/// Tells steps apart: two with the same key are not performed at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StepKey {
    /// See [`Step::CreateMeta`] and [`Step::CreateData`].
    Create(PartitionId, NodeId),
    /// See [`Step::Configure`].
    Configure(PartitionId),
    /// See [`Step::Split`].
    Split(PartitionId),
    /// See [`Step::SetOptions`].
    SetOptions(VolumeId, NodeId),
    /// See [`Step::Delete`].
    Delete(PartitionId, NodeId),
    /// See [`Step::SetMembers`].
    SetMembers(PartitionId),
    /// See [`Step::TransferLeader`].
    TransferLeader(PartitionId),
    /// See [`Step::Refuse`].
    Refuse(PartitionId, NodeId),
}

impl Step {
    /// The step's key.
    #[must_use]
    pub fn key(&self) -> StepKey {
        match self {
            Step::CreateMeta { node, create } => StepKey::Create(create.partition, *node),
            Step::CreateData { node, create } => StepKey::Create(create.partition, *node),
            Step::Configure { partition, .. } => StepKey::Configure(*partition),
            Step::Split { partition, .. } => StepKey::Split(*partition),
            Step::SetOptions { node, volume, .. } => StepKey::SetOptions(*volume, *node),
            Step::Delete { node, partition, .. } => StepKey::Delete(*partition, *node),
            Step::SetMembers { partition, .. } => StepKey::SetMembers(*partition),
            Step::TransferLeader { partition, .. } => StepKey::TransferLeader(*partition),
            Step::Refuse { node, partition, .. } => StepKey::Refuse(*partition, *node),
        }
    }

    /// The node that is asked first.
    #[must_use]
    pub fn target(&self) -> Option<NodeId> {
        match self {
            Step::CreateMeta { node, .. }
            | Step::CreateData { node, .. }
            | Step::SetOptions { node, .. }
            | Step::Refuse { node, .. }
            | Step::Delete { node, .. } => Some(*node),
            Step::TransferLeader { from, .. } => Some(*from),
            Step::Configure { ask, .. }
            | Step::Split { ask, .. }
            | Step::SetMembers { ask, .. } => ask.first().copied(),
        }
    }

    /// The word for logs and metrics.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Step::CreateMeta { .. } => "create_meta",
            Step::CreateData { .. } => "create_data",
            Step::Configure { .. } => "configure",
            Step::Split { .. } => "split",
            Step::SetOptions { .. } => "set_options",
            Step::Delete { .. } => "delete",
            Step::SetMembers { .. } => "set_members",
            Step::TransferLeader { .. } => "transfer_leader",
            Step::Refuse { .. } => "refuse",
        }
    }
}

/// Plans all steps, those that restore writing first.
pub fn plan(view: View<'_>, plan: &mut Plan) {
    for record in view.state.data_partitions() {
        plan.steps.extend(configure(view, record));
    }
    for record in view.state.meta_partitions() {
        create_meta(view, record, plan);
        plan.steps.extend(members::step(view, record));
        plan.steps.extend(split(view, record));
    }
    for record in view.state.data_partitions() {
        create_data(view, record, plan);
    }
    set_options(view, plan);
    remove(view, plan);
    remove_strays(view, plan);
    remove_dropped(view, plan);
}

fn is_active(view: View<'_>, node: NodeId) -> bool {
    view.state.node(node).is_some_and(|node| node.state.is_heard())
}

/// A node that is heard and has reported what it holds.
fn reporting<'a>(view: View<'a>, node: NodeId) -> Option<&'a NodeLoad> {
    view.loads.report(node).filter(|_| is_active(view, node))
}

/// `first` if it is there, then the others, all of them heard.
pub(super) fn ask_order(view: View<'_>, first: Option<NodeId>, members: &[NodeId]) -> Vec<NodeId> {
    let others = members.iter().copied().filter(|node| Some(*node) != first);
    first.into_iter().chain(others).filter(|node| is_active(view, *node)).collect()
}

fn configure(view: View<'_>, record: &DataRecord) -> Option<Step> {
    let adopted = view.loads.adopted(record)?;
    if adopted.epoch >= record.configuration.epoch {
        return None;
    }
    // One that is to go on instead of a survivor may be in no configuration that others have adopted.
    let decided = &record.configuration.members;
    let more = decided.iter().filter(|node| !adopted.members.contains(node));
    let members: Vec<NodeId> = adopted.members.iter().chain(more).copied().collect();
    let ask = ask_order(view, view.loads.data_leader(record), &members);
    let (partition, configuration) = (record.id, record.configuration.clone());
    let lost = lost_members(view, record);
    Some(Step::Configure { partition, configuration, lost, ask })
}

/// A replica is created only where none ever was: a second one under the same id would vote again
/// where the lost one had voted (RELIABILITY.md 4.6).
fn create_meta(view: View<'_>, record: &MetaRecord, plan: &mut Plan) {
    let Some(volume) = view.state.volume(record.volume) else { return };
    for node in record.members.iter().chain(&record.joining).copied() {
        let Some(load) = reporting(view, node) else { continue };
        if holds(load, PartitionKind::Meta, record.id) || record.created.contains(&node) {
            continue;
        }
        let create = CreateMetaPartition {
            partition: record.id,
            volume: record.volume,
            options: volume.options.clone(),
            slot: record.slot,
            members: record.members.iter().chain(&record.joining).copied().collect(),
            joins: record.joining == Some(node),
        };
        plan.steps.push(Step::CreateMeta { node, create });
    }
}

/// As for meta partitions, except that a lost replica may be made again once the configuration is
/// without it, as a task: it is filled like any other before it has a say.
fn create_data(view: View<'_>, record: &DataRecord, plan: &mut Plan) {
    let Some(volume) = view.state.volume(record.volume) else { return };
    for replica in &record.replicas {
        let Some(load) = reporting(view, replica.node) else { continue };
        let is_fenced = load.disks.iter().any(|d| d.id == replica.disk && d.fenced.is_some());
        if is_fenced || load.data.contains_key(&record.id) {
            continue;
        }
        let Some(configuration) = configuration_to_create(view, record) else { continue };
        let is_made =
            view.state.task(record.id).is_some_and(|task| task.place.node == replica.node);
        let is_first = data_place(view, record, replica.node) == Place::Coming;
        let is_member = configuration.members.contains(&replica.node);
        // One that is decided may have been adopted by members whose reports are late, or do not come: then a blank
        // replica counts.
        let is_decided = record.configuration.members.contains(&replica.node)
            || view.state.has_replaced(record) && configuration.epoch < record.configuration.epoch;
        if !is_first && (!is_made || is_member || is_decided) {
            continue;
        }
        if !is_member && !all_let_go(view, record, configuration, replica.node) {
            continue;
        }
        let create = CreateDataPartition {
            partition: record.id,
            volume: record.volume,
            disk: replica.disk,
            configuration: configuration.clone(),
            relaxed: volume.options.durability == Durability::Memory,
        };
        plan.steps.push(Step::CreateData { node: replica.node, create });
    }
}

/// Whether all members have adopted a configuration without `node`. Whoever has not may still count the
/// voter that was lost there, and would be elected by the one made in its place, which remembers nothing:
/// what the lost one had acknowledged would be lost with it (simulation, seed 30235).
fn all_let_go(
    view: View<'_>,
    record: &DataRecord,
    configuration: &Configuration,
    node: NodeId,
) -> bool {
    let has_let_go = |member: &NodeId| {
        let report = view.loads.report(*member).and_then(|load| load.data.get(&record.id));
        report.is_some_and(|report| !report.configuration.members.contains(&node))
    };
    configuration.members.iter().all(has_let_go)
}

/// What a new replica is told: the newest configuration that the group has adopted, or the founding
/// one, which needs no adoption. Never a later intent, though nobody may have reported yet: the new
/// replica would report it like one that was adopted, and the chain of epochs would have a gap.
fn configuration_to_create<'a>(
    view: View<'a>,
    record: &'a DataRecord,
) -> Option<&'a Configuration> {
    let founding = || Some(&record.configuration).filter(|founding| founding.epoch.0 <= 1);
    view.loads.adopted(record).or_else(founding)
}

fn split(view: View<'_>, record: &MetaRecord) -> Option<Step> {
    match record.split {
        SplitState::Cutting { end } => {
            let ask = ask_order(view, view.loads.meta_leader(record), &record.members);
            Some(Step::Split { partition: record.id, end, ask })
        }
        SplitState::Open | SplitState::Cut { .. } => None,
    }
}

fn set_options(view: View<'_>, plan: &mut Plan) {
    for volume in view.state.volumes() {
        for node in volume.options_untold.iter().copied().filter(|node| is_active(view, *node)) {
            let Some(role) = view.state.node(node).map(|node| node.role) else { continue };
            let (version, options) = (volume.options_version, volume.options.clone());
            plan.steps.push(Step::SetOptions { node, role, volume: volume.id, version, options });
        }
    }
}

fn holds(load: &NodeLoad, kind: PartitionKind, partition: PartitionId) -> bool {
    match kind {
        PartitionKind::Meta => {
            load.meta.contains_key(&partition) || load.meta_damaged.contains(&partition)
        }
        PartitionKind::Data => {
            load.data.contains_key(&partition) || load.data_damaged.contains(&partition)
        }
    }
}

fn remove(view: View<'_>, plan: &mut Plan) {
    let mut gone = Vec::new();
    for (partition, removal) in view.state.removals() {
        let kind = removal.kind;
        for node in removal.nodes.iter().copied() {
            match reporting(view, node) {
                Some(load) if holds(load, kind, partition) => {
                    let deletion = Deletion::Any;
                    plan.steps.push(Step::Delete { node, kind, partition, deletion });
                }
                Some(_) => gone.push((partition, node)),
                None => {}
            }
        }
    }
    for replicas in gone.chunks(REPLICAS_PER_COMMAND) {
        plan.commands.push(CommandV1::ReplicasRemoved { replicas: replicas.to_vec() });
    }
}

/// Replicas of partitions that were given once and are neither known nor being removed: a late
/// creation that crossed a deletion. An id that was never given is left alone, as it would mean
/// that this manager's state is older than the nodes'.
fn remove_strays(view: View<'_>, plan: &mut Plan) {
    let state = view.state;
    let removed: std::collections::BTreeSet<PartitionId> =
        state.removals().map(|(partition, _)| partition).collect();
    let is_stray = |partition: &PartitionId| {
        state.was_given(*partition)
            && state.meta_partition(*partition).is_none()
            && state.data_partition(*partition).is_none()
            && !removed.contains(partition)
    };
    for node in state.nodes() {
        let Some(load) = reporting(view, node.id) else { continue };
        let node = node.id;
        for partition in load.meta_held().filter(is_stray) {
            let (kind, deletion) = (PartitionKind::Meta, Deletion::Any);
            plan.steps.push(Step::Delete { node, kind, partition, deletion });
        }
        for partition in load.data_held().filter(is_stray) {
            let (kind, deletion) = (PartitionKind::Data, Deletion::Any);
            plan.steps.push(Step::Delete { node, kind, partition, deletion });
        }
    }
}

/// Replicas at places that were dropped, or that their partition never knew: only while it has all
/// its copies without them, in a configuration that has been adopted. Damaged ones of meta partitions
/// are in the way of others, and go as soon as nobody counts them any more.
fn remove_dropped(view: View<'_>, plan: &mut Plan) {
    let mut whole: std::collections::BTreeMap<PartitionId, bool> = Default::default();
    for node in view.state.nodes() {
        let Some(load) = reporting(view, node.id) else { continue };
        let node = node.id;
        let held = load.data.iter().map(|(partition, report)| (*partition, report.log_end, false));
        let takes_no_part = |partition: &PartitionId| {
            // Another one may serve, on another of the node's disks.
            (*partition, None, load.data.contains_key(partition))
        };
        let damaged = load.data_damaged.iter().map(takes_no_part);
        for (partition, log_end, is_second) in held.chain(damaged) {
            let Some(record) = view.state.data_partition(partition) else { continue };
            if !is_second && (record.disk_of(node).is_some() || record.is_configured(node)) {
                continue;
            }
            if *whole.entry(partition).or_insert_with(|| is_whole(view, record)) {
                plan.steps.push(leftover(node, PartitionKind::Data, partition, log_end));
            }
        }
        for partition in load.meta_held() {
            let Some(record) = view.state.meta_partition(partition) else { continue };
            let is_needless = match load.meta_damaged.contains(&partition) {
                true => members::is_settled(view, record),
                false => members::is_whole(view, record),
            };
            if !record.members.contains(&node) && record.joining != Some(node) && is_needless {
                let log_end = load.meta.get(&partition).and_then(|report| report.log_end);
                plan.steps.push(leftover(node, PartitionKind::Meta, partition, log_end));
            }
        }
    }
}

/// Deletes a replica as its node has reported it.
fn leftover(
    node: NodeId,
    kind: PartitionKind,
    partition: PartitionId,
    log_end: Option<LogEnd>,
) -> Step {
    Step::Delete { node, kind, partition, deletion: Deletion::Leftover { log_end } }
}

fn is_whole(view: View<'_>, record: &DataRecord) -> bool {
    let members = &record.configuration.members;
    let serves = |node: &&NodeId| data_place(view, record, **node) == Place::Good;
    members.iter().filter(serves).count() >= target(view, record) && is_aligned(view, record)
}
