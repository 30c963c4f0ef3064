//! What callers are told: the agreed state with the leader's loads merged in.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use milpa_types::{
    ClusterId, DataPartition, Durability, MetaPartition, Node, NodeId, Role, VolumeId, VolumeView,
};
use milpa_wire::manager::{ClusterStatus, Task as TaskView, TaskKind, VolumeSummary};

use crate::core::{
    DataRecord, Drain, MetaRecord, NodeRecord, SplitState, Task, VolumeRecord, VolumeState,
};
use crate::planner::View;
use crate::planner::growth::{has_disk_room, is_filled_to, stands_still};
use crate::planner::members;
use crate::planner::removal;
use crate::planner::replace::target;

/// Most warnings of one kind in a status; the rest is counted.
const WARNINGS_PER_KIND: usize = 8;

/// A node with its disks and memory as they are now.
#[must_use]
pub fn node(view: View<'_>, record: &NodeRecord) -> Node {
    let mut node = record.describe();
    if let Some(load) = view.loads.report(record.id) {
        node.disks.clone_from(&load.disks);
        node.memory_bytes = load.memory_bytes;
    }
    node
}

/// All nodes.
#[must_use]
pub fn nodes(view: View<'_>) -> Vec<Node> {
    view.state.nodes().map(|record| node(view, record)).collect()
}

/// A meta partition with its leader and counts.
#[must_use]
pub fn meta_partition(view: View<'_>, record: &MetaRecord) -> MetaPartition {
    let statistics = view.loads.meta_newest(record).map(|report| report.statistics);
    let statistics = statistics.unwrap_or_default();
    MetaPartition {
        id: record.id,
        volume: record.volume,
        slot: record.slot,
        members: record.members.clone(),
        leader: view.loads.meta_leader(record),
        takes_inodes: match record.split {
            SplitState::Open => true,
            SplitState::Cutting { .. } | SplitState::Cut { .. } => false,
        },
        inodes: statistics.inodes,
        dentries: statistics.dentries,
        inode_highest: statistics.inode_highest.0,
    }
}

/// A data partition with its configuration as adopted, and its filling.
#[must_use]
pub fn data_partition(view: View<'_>, record: &DataRecord) -> DataPartition {
    let configuration = view.loads.configuration(record);
    let (used_bytes, extents) = view.loads.data_filling(record);
    DataPartition {
        id: record.id,
        volume: record.volume,
        epoch: configuration.epoch,
        members: configuration.members.clone(),
        primary: configuration.primary,
        replicas: record.replicas.iter().map(|replica| replica.node).collect(),
        takes_extents: can_take_extents(view, record)
            && !is_filled_to(view, record, view.policy.full_percent),
        used_bytes,
        extents,
    }
}

/// What taking new extents needs besides room in the partition itself.
fn can_take_extents(view: View<'_>, record: &DataRecord) -> bool {
    !stands_still(view, record) && has_disk_room(view, record)
}

/// What is being repaired and moved: replicas being made, then nodes and disks being emptied.
#[must_use]
pub fn tasks(view: View<'_>) -> Vec<TaskView> {
    let mut tasks: Vec<TaskView> =
        view.state.tasks().map(|task| replica_task(view, task)).collect();
    tasks.extend(drains(view));
    tasks
}

fn drains(view: View<'_>) -> Vec<TaskView> {
    let mut drains = Vec::new();
    for node in view.state.nodes() {
        if let Some(drain) = node.drain {
            let counted_on = removal::counted_on(view, node.id).count();
            let left = (view.state.replicas_on(node.id, None) + counted_on) as u64;
            let reason = format!("node {} is drained", node.id);
            drains.push(drain_task(view, node.id, drain, left, reason));
        }
        for (disk, drain) in &node.disks_draining {
            let left = view.state.replicas_on(node.id, Some(*disk)) as u64;
            let reason = format!("disk {disk} of node {} is drained", node.id);
            drains.push(drain_task(view, node.id, *drain, left, reason));
        }
    }
    drains
}

fn replica_task(view: View<'_>, task: &Task) -> TaskView {
    let owner = task.place.node;
    let (kind, done, total) = match view.state.data_partition(task.partition) {
        Some(record) => {
            let reports = || view.loads.data_reports(record);
            let bytes = |wanted: NodeId| {
                let found = reports().find(|(node, _)| *node == wanted);
                found.map_or(0, |(_, report)| report.allocated_bytes)
            };
            let total = bytes(record.configuration.primary);
            (TaskKind::DataReplica, bytes(owner).min(total), total)
        }
        None => {
            let record = view.state.meta_partition(task.partition);
            let applied = |report: &milpa_wire::meta::MetaPartitionReport| report.applied;
            let total = record.and_then(|record| view.loads.meta_newest(record)).map_or(0, applied);
            let load = view.loads.report(owner);
            let own = load.and_then(|load| load.meta.get(&task.partition)).map_or(0, applied);
            (TaskKind::MetaReplica, own.min(total), total)
        }
    };
    TaskView {
        id: task.id,
        kind,
        partition: Some(task.partition),
        owner,
        reason: task.reason.to_string(),
        begun_unix_ms: task.begun_unix_ms,
        deadline_unix_ms: task.deadline_unix_ms,
        done,
        total,
        left_ms: time_left(view, task.begun_unix_ms, done, total),
    }
}

fn drain_task(view: View<'_>, owner: NodeId, drain: Drain, left: u64, reason: String) -> TaskView {
    let total = drain.replicas.max(left);
    let done = total - left;
    TaskView {
        id: 0,
        kind: TaskKind::Drain,
        partition: None,
        owner,
        reason,
        begun_unix_ms: drain.begun_unix_ms,
        deadline_unix_ms: drain.begun_unix_ms.saturating_add(view.policy.drain_deadline_ms),
        done,
        total,
        left_ms: time_left(view, drain.begun_unix_ms, done, total),
    }
}

/// At the speed so far; `None` before there is one.
fn time_left(view: View<'_>, begun_unix_ms: u64, done: u64, total: u64) -> Option<u64> {
    let past_ms = u128::from(view.unix_ms.saturating_sub(begun_unix_ms));
    let left = u128::from(total.saturating_sub(done));
    if done == 0 {
        return None;
    }
    u64::try_from(past_ms * left / u128::from(done)).ok()
}

/// All that a client needs to reach a volume. Its version is 0: see [`Versions`].
#[must_use]
pub fn volume(view: View<'_>, record: &VolumeRecord) -> VolumeView {
    let meta: Vec<MetaPartition> =
        view.state.meta_of(record.id).map(|partition| meta_partition(view, partition)).collect();
    let records = || view.state.data_of(record.id);
    let mut data: Vec<DataPartition> = records().map(|r| data_partition(view, r)).collect();
    // The target size of a partition is a wish: while no new ones can be had, the full ones with
    // room on their disks go on, rather than the volume being full.
    if !data.iter().any(|partition| partition.takes_extents) {
        for (partition, record) in data.iter_mut().zip(records()) {
            partition.takes_extents = can_take_extents(view, record);
        }
    }
    let holders: BTreeSet<NodeId> = (meta.iter().flat_map(|p| p.members.iter()))
        .chain(data.iter().flat_map(|p| p.replicas.iter()))
        .copied()
        .collect();
    let nodes = holders.iter().filter_map(|id| view.state.node(*id)).map(|n| node(view, n));
    VolumeView {
        cluster: view.state.cluster(),
        version: 0,
        volume: record.describe(),
        nodes: nodes.collect(),
        meta,
        data,
    }
}

/// A volume with its use.
#[must_use]
pub fn summary(view: View<'_>, record: &VolumeRecord) -> VolumeSummary {
    let mut summary = VolumeSummary {
        volume: record.describe(),
        inodes: 0,
        used_bytes: 0,
        meta_partitions: 0,
        data_partitions: 0,
    };
    for partition in view.state.meta_of(record.id) {
        summary.meta_partitions += 1;
        if let Some(report) = view.loads.meta_newest(partition) {
            summary.inodes = summary.inodes.saturating_add(report.statistics.inodes);
            summary.used_bytes =
                summary.used_bytes.saturating_add(report.statistics.allocated_bytes);
        }
    }
    summary.data_partitions = u32::try_from(record.data.len()).unwrap_or(u32::MAX);
    summary
}

/// The cluster in one look. `problems` are those of the last planning pass.
#[must_use]
pub fn status(
    view: View<'_>,
    managers: Vec<(NodeId, SocketAddr)>,
    leader: NodeId,
    problems: &[String],
) -> ClusterStatus {
    let cluster: ClusterId = view.state.cluster();
    ClusterStatus {
        cluster,
        managers,
        leader,
        nodes: nodes(view),
        volumes: view.state.volumes().map(|record| summary(view, record)).collect(),
        warnings: warnings(view, problems),
    }
}

/// Data partitions with fewer members than they should have.
#[must_use]
pub fn partitions_below_target(view: View<'_>) -> usize {
    let below = |record: &&DataRecord| {
        view.loads.configuration(record).members.len() < target(view, record)
    };
    view.state.data_partitions().filter(below).count()
}

/// What an operator should know, the worst first.
#[must_use]
pub fn warnings(view: View<'_>, problems: &[String]) -> Vec<String> {
    let mut warnings = Vec::new();
    add_limited(&mut warnings, lost_blocks(view));
    add_limited(&mut warnings, silent_nodes(view));
    add_limited(&mut warnings, fenced_disks(view));
    add_limited(&mut warnings, slow_nodes(view));
    add_limited(&mut warnings, thin_partitions(view));
    add_limited(&mut warnings, late_drains(view));
    add_limited(&mut warnings, problems.to_vec());
    add_limited(&mut warnings, volumes_in_memory(view));
    add_limited(&mut warnings, nearly_full(view));
    add_limited(&mut warnings, unfinished_volumes(view));
    add_limited(&mut warnings, shared_devices(view));
    warnings
}

/// Drains that are begun and not given up: an operator asked for them, and only an operator knows what else to do.
fn late_drains(view: View<'_>) -> Vec<String> {
    let is_late = |task: &TaskView| task.done < task.total && view.unix_ms > task.deadline_unix_ms;
    let said = |task: TaskView| {
        let left = task.total - task.done;
        let reason = task.reason;
        format!(
            "{reason}, longer than it should take: {left} replicas are left (`milpa task list`)"
        )
    };
    drains(view).into_iter().filter(is_late).map(said).collect()
}

fn add_limited(warnings: &mut Vec<String>, mut found: Vec<String>) {
    let more = found.len().saturating_sub(WARNINGS_PER_KIND);
    found.truncate(WARNINGS_PER_KIND);
    warnings.append(&mut found);
    if more > 0 {
        warnings.push(format!("and {more} more of this kind"));
    }
}

/// Bytes that rotted on one disk after the other. Each replica says of its own that the others do not have them whole.
fn lost_blocks(view: View<'_>) -> Vec<String> {
    let mut found = Vec::new();
    for record in view.state.data_partitions() {
        let lost = view.loads.data_reports(record).map(|(_, report)| report.lost_blocks).max();
        let volume = view.state.volume(record.volume);
        if let (Some(lost @ 1..), Some(VolumeRecord { name, .. })) = (lost, volume) {
            let id = record.id;
            found.push(format!(
                "data partition {id} has {lost} blocks of 4 KiB that are whole on no replica: reading them \
                 fails with EIO (`milpa fsck {name}` says of which files they are)"
            ));
        }
    }
    found
}

fn silent_nodes(view: View<'_>) -> Vec<String> {
    let away = view.state.nodes().filter(|node| !node.state.is_heard());
    let text = |node: &NodeRecord| {
        let (role, id, at, state) = (node.role, node.id, node.address, node.state.as_str());
        format!("{role} node {id} at {at} is {state}")
    };
    away.map(text).collect()
}

fn fenced_disks(view: View<'_>) -> Vec<String> {
    let mut found = Vec::new();
    for node in view.state.nodes() {
        for disk in view.loads.disks(node) {
            if let Some(reason) = &disk.fenced {
                let (id, path) = (node.id, &disk.path);
                found.push(format!(
                    "disk {} ({path}) of node {id} is out of service: {reason}",
                    disk.id
                ));
            }
        }
    }
    found
}

/// Slow for at least two others, who cannot both have a bad link; or so until it was held off.
fn slow_nodes(view: View<'_>) -> Vec<String> {
    let heard = view.state.nodes().filter(|node| node.state.is_heard());
    let text = |node: &NodeRecord| {
        let (role, id, at) = (node.role, node.id, node.address);
        let slow = view.loads.slow(id, view.now_ms, view.policy.silence_period_ms);
        let held = view.loads.avoided_ms(id, view.now_ms).map(|ms| ms.div_ceil(1000));
        let without = "partitions go on without it where they can";
        match (slow, held) {
            (None, None) => None,
            (None, Some(left)) => Some(format!(
                "{role} node {id} at {at} was slow: {without}, for {left} s more at the least"
            )),
            (Some((by, took_ms)), held) => {
                let by: Vec<String> = by.iter().map(ToString::to_string).collect();
                let by = by.join(", ");
                let held = held.map(|_| format!("; {without}")).unwrap_or_default();
                Some(format!(
                    "{role} node {id} at {at} is slow: writes there take nodes {by} up to \
                     {took_ms} ms, several times as long as elsewhere{held}"
                ))
            }
        }
    };
    heard.filter_map(text).collect()
}

fn thin_partitions(view: View<'_>) -> Vec<String> {
    let mut found = Vec::new();
    for record in view.state.data_partitions() {
        let (has, wants) = (view.loads.configuration(record).members.len(), target(view, record));
        if has < wants {
            let id = record.id;
            found.push(format!("data partition {id} has {has} of {wants} copies"));
        }
    }
    for record in view.state.meta_partitions() {
        let wants = record.members.len().max(usize::from(view.policy.meta_replicas));
        let has = members::in_service(view, record);
        if has < wants {
            let id = record.id;
            found.push(format!("meta partition {id} has {has} of {wants} replicas in service"));
        }
    }
    found
}

/// Nothing weakens durability silently.
fn volumes_in_memory(view: View<'_>) -> Vec<String> {
    let volumes = view.state.volumes();
    let in_memory = volumes.filter(|record| record.options.durability == Durability::Memory);
    in_memory
        .map(|record| {
            format!(
                "volume {:?} has durability = memory: a power cut may lose what fsync has \
                 acknowledged in the last seconds",
                record.name
            )
        })
        .collect()
}

fn nearly_full(view: View<'_>) -> Vec<String> {
    let share = u128::from(view.policy.nearly_full_percent);
    let mut found = Vec::new();
    for record in view.state.volumes() {
        let capacity = record.options.capacity_bytes;
        let used = summary(view, record).used_bytes;
        if capacity > 0 && u128::from(used) * 100 >= u128::from(capacity) * share {
            let name = &record.name;
            found.push(format!("volume {name:?} uses {used} of {capacity} bytes"));
        }
    }
    for node in view.state.nodes().filter(|node| node.role == Role::Data) {
        for disk in view.loads.disks(node) {
            let used = disk.capacity_bytes.saturating_sub(disk.free_bytes);
            if u128::from(used) * 100 >= u128::from(disk.capacity_bytes.max(1)) * 95 {
                let (id, free) = (node.id, disk.free_bytes);
                found.push(format!("disk {} of node {id} has {free} bytes left", disk.id));
            }
        }
    }
    found
}

fn unfinished_volumes(view: View<'_>) -> Vec<String> {
    let creating = view.state.volumes().filter(|volume| volume.state == VolumeState::Creating);
    creating.map(|volume| format!("volume {:?} is still being created", volume.name)).collect()
}

/// Groups of nodes whose replicas of one partition lie on one physical disk. Device numbers only
/// compare within one machine, which is told by its address.
fn shared_devices(view: View<'_>) -> Vec<String> {
    let mut groups: BTreeMap<BTreeSet<NodeId>, u64> = BTreeMap::new();
    for record in view.state.data_partitions() {
        let mut devices: BTreeMap<_, BTreeSet<NodeId>> = BTreeMap::new();
        for replica in &record.replicas {
            let Some(node) = view.state.node(replica.node) else { continue };
            let disk = view.loads.disks(node).iter().find(|disk| disk.id == replica.disk);
            let Some(disk) = disk else { continue };
            devices.entry((node.address.ip(), disk.device)).or_default().insert(replica.node);
        }
        for group in devices.into_values().filter(|group| group.len() > 1) {
            *groups.entry(group).or_default() += 1;
        }
    }
    let text = |(group, count): (BTreeSet<NodeId>, u64)| {
        let names: Vec<String> = group.iter().map(ToString::to_string).collect();
        let names = names.join(", ");
        format!(
            "nodes {names} share one physical disk and hold copies of the same {count} data \
             partitions: losing it loses all of these copies"
        )
    };
    groups.into_iter().map(text).collect()
}

/// Versions of volumes' views. A version is the leader's term and a count within it, so it rises
/// across changes of leader, though loads are in the leader's memory only.
#[derive(Clone, Debug, Default)]
pub struct Versions {
    term: u64,
    seen: BTreeMap<VolumeId, (u32, VolumeView)>,
}

impl Versions {
    /// No view yet, in this term.
    #[must_use]
    pub fn new(term: u64) -> Versions {
        Versions { term, seen: BTreeMap::new() }
    }

    /// Sets the view's version: a new one if anything but loads has changed since the last call.
    pub fn stamp(&mut self, view: &mut VolumeView) {
        let routes = routes_of(view);
        let (count, last) = self.seen.entry(view.volume.id).or_insert_with(|| (1, routes.clone()));
        if *last != routes {
            *count = count.saturating_add(1);
            *last = routes;
        }
        view.version = (self.term << 32) | u64::from(*count);
    }

    /// Forgets volumes that are gone.
    pub fn retain(&mut self, exists: impl Fn(VolumeId) -> bool) {
        self.seen.retain(|volume, _| exists(*volume));
    }
}

/// A view without what changes all the time: loads, and the filling of disks.
fn routes_of(view: &VolumeView) -> VolumeView {
    let mut routes = view.clone();
    routes.version = 0;
    for partition in &mut routes.meta {
        (partition.inodes, partition.dentries, partition.inode_highest) = (0, 0, 0);
    }
    for partition in &mut routes.data {
        (partition.used_bytes, partition.extents) = (0, 0);
    }
    for node in &mut routes.nodes {
        node.memory_bytes = 0;
        node.disks.clear();
    }
    routes
}

#[cfg(test)]
mod tests;
