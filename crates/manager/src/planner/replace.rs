//! Replicas that are gone, or have to go, are made again elsewhere (CFS 2.2.5, InterFS 3.3).
//!
//! One rule for everything: a partition first gets as many good places as its volume wants, and
//! then loses those that are too many. So a dead node, a drained one and a fenced disk are the same
//! work, a node that comes back in the middle of it costs nothing but a place to drop, and at no
//! moment are there fewer copies than before.
//!
//! ```text
//! too few good places      BeginTask: one more place; fewest copies first, within limits
//! the place has all bytes  it becomes a member (`repair`), EndTask
//! too many places          out of the configuration, DropReplica, and its node deletes the bytes
//! ```

use std::collections::BTreeSet;

use milpa_types::{Disk, DiskId, NodeId, Role};

use super::budget::Budget;
use super::health::{Place, data_place, disk_reason, is_aligned};
use super::place::{Shortage, Topology, has_room, offers};
use super::repair::is_spared;
use super::spread::{Choice, spread};
use super::{Plan, View};
use crate::core::{CommandV1, DataRecord, NewTask, Replica, Task, TaskReason};

/// Plans tasks of data partitions, their ends, and the places that are dropped.
pub fn plan(view: View<'_>, plan: &mut Plan) {
    let mut lacking: Vec<(usize, &DataRecord)> = Vec::new();
    for record in view.state.data_partitions() {
        match view.state.task(record.id) {
            Some(task) => plan.commands.extend(follow(view, record, task)),
            None if good_places(view, record) < target(view, record) => {
                lacking.push((copies(view, record), record));
            }
            None => plan.commands.extend(drop_one(view, record)),
        }
    }
    if lacking.is_empty() {
        return;
    }
    lacking.sort_by_key(|(copies, record)| (*copies, record.id));
    let mut budget = Budget::of(view);
    let mut topology = Topology::of(view, Role::Data);
    let mut problems: BTreeSet<String> = BTreeSet::new();
    let (mut begun, mut choices) = (Vec::new(), Vec::new());
    for (copies, record) in lacking {
        if !budget.has_room() {
            break;
        }
        match begin(view, record, &budget, &mut topology) {
            Ok(Some((reason, choice))) => {
                budget.take(choice.place.node);
                begun.push((record, reason));
                choices.push(choice);
            }
            Ok(None) => {}
            Err(shortage) => {
                problems.insert(format!("partitions with {copies} copies stay so: {shortage}"));
            }
        }
    }
    spread(&mut choices, &mut topology.making(), &mut budget);
    let tasks = begun.into_iter().zip(choices);
    let task = |((record, reason), choice): ((&DataRecord, _), Choice)| {
        CommandV1::BeginTask(new_task(view, record, choice.place, reason))
    };
    plan.commands.extend(tasks.map(task));
    plan.problems.extend(problems);
}

/// How many places a partition should have.
#[must_use]
pub fn target(view: View<'_>, record: &DataRecord) -> usize {
    view.state.volume(record.volume).map_or(0, |volume| usize::from(volume.options.replicas))
}

fn places<'a>(
    view: View<'a>,
    record: &'a DataRecord,
) -> impl Iterator<Item = (Replica, Place)> + 'a {
    record.replicas.iter().map(move |place| (*place, data_place(view, record, place.node)))
}

/// Whether the members are enough, all of them to stay.
pub(super) fn has_enough_members(view: View<'_>, record: &DataRecord) -> bool {
    let is_member = |node: NodeId| record.configuration.members.contains(&node);
    let good = places(view, record)
        .filter(|(place, state)| *state == Place::Good && is_member(place.node));
    good.count() >= target(view, record)
}

fn good_places(view: View<'_>, record: &DataRecord) -> usize {
    places(view, record).filter(|(_, place)| place.counts()).count()
}

/// Members that are in service now: what stands between the partition and its loss.
fn copies(view: View<'_>, record: &DataRecord) -> usize {
    let members = &record.configuration.members;
    let heard = |node: &&NodeId| view.state.node(**node).is_some_and(|node| node.state.is_heard());
    members.iter().filter(heard).count()
}

/// A new place, or the old one for a replica that its node has lost.
fn begin(
    view: View<'_>,
    record: &DataRecord,
    budget: &Budget,
    topology: &mut Topology,
) -> Result<Option<(TaskReason, Choice)>, Shortage> {
    let members = &record.configuration.members;
    // Without a majority the group can take nobody in: the members must come back first.
    if copies(view, record) * 2 <= members.len() || view.loads.data_leader(record).is_none() {
        return Ok(None);
    }
    let states: Vec<(Replica, Place)> = places(view, record).collect();
    let missing = states.iter().find(|(_, place)| *place == Place::Missing);
    if let Some((place, _)) = missing {
        // While it is a member it must not come back blank: its copy would count.
        if record.is_configured(place.node) || !budget.allows(place.node) {
            return Ok(None);
        }
        topology.count_making(*place);
        let choice = Choice { place: *place, others: Vec::new() };
        return Ok(Some((TaskReason::ReplicaLost(place.node), choice)));
    }
    let reason = states.iter().find_map(|(_, place)| match place {
        Place::Bad(reason) => Some(*reason),
        _ => None,
    });
    let held: Vec<NodeId> = record.replicas.iter().map(|place| place.node).collect();
    let kept: Vec<NodeId> =
        states.iter().filter(|(_, p)| p.counts()).map(|(r, _)| r.node).collect();
    let choices = view.policy.choices as usize;
    let seed = view.seed ^ record.id.0;
    // One that is held off would not be let in.
    let is_avoided = |node| view.loads.avoided_ms(node, view.now_ms).is_some();
    let allowed = |node: NodeId| {
        budget.allows(node) && !is_avoided(node) && !is_left_on_bad_disk(view, record, node)
    };
    let offers = offers(topology, (&held, &kept), choices, seed, allowed)?;
    let Some((best, more)) = offers.split_first() else { return Ok(None) };
    // An old copy goes on where it is.
    let at = |place: Replica| {
        let disk = left_at(view, record, place.node).unwrap_or(place.disk);
        Replica { disk, ..place }
    };
    let place = at(best.place);
    topology.count(&[place], None);
    topology.count_making(place);
    let others = more.iter().filter(|offer| offer.is_nearly_as_good_as(best));
    let others = others.map(|offer| at(offer.place)).collect();
    Ok(Some((reason.unwrap_or(TaskReason::TooFew), Choice { place, others })))
}

/// The disk on which a node has an old copy of the partition.
fn left_at(view: View<'_>, record: &DataRecord, node: NodeId) -> Option<DiskId> {
    view.loads.report(node)?.data.get(&record.id).map(|report| report.disk)
}

/// Whether that is where nothing is to stay, or nothing more has room.
fn is_left_on_bad_disk(view: View<'_>, record: &DataRecord, node: NodeId) -> bool {
    let (Some(left), Some(known)) = (left_at(view, record, node), view.state.node(node)) else {
        return false;
    };
    let has_no_room = |disk: &Disk| disk.id == left && !has_room(view.policy, disk);
    disk_reason(view, known, left).is_some() || view.loads.disks(known).iter().any(has_no_room)
}

fn new_task(view: View<'_>, record: &DataRecord, place: Replica, reason: TaskReason) -> NewTask {
    let begun_unix_ms = view.unix_ms;
    let deadline_unix_ms = begun_unix_ms.saturating_add(view.policy.repair_deadline_ms);
    NewTask { partition: record.id, place, reason, begun_unix_ms, deadline_unix_ms }
}

/// Whether a task is at its end.
fn follow(view: View<'_>, record: &DataRecord, task: &Task) -> Option<CommandV1> {
    let owner = task.place.node;
    let end = |done| CommandV1::EndTask { partition: record.id, id: task.id, done };
    if task.is_given_up {
        return (!record.is_configured(owner)).then(|| end(false));
    }
    let is_member = record.configuration.members.contains(&owner);
    let adopted = view.loads.adopted(record)?;
    let is_done = is_member && adopted.epoch == record.configuration.epoch;
    let is_lost = matches!(data_place(view, record, owner), Place::Bad(_));
    let is_late = view.unix_ms >= task.deadline_unix_ms;
    let is_slow = !is_member && is_spared(view, record, owner);
    // Those for whom it was begun are back, and serve.
    let others = places(view, record).filter(|(place, state)| {
        place.node != owner
            && *state == Place::Good
            && record.configuration.members.contains(&place.node)
    });
    let is_needless = !is_member && others.count() >= target(view, record);
    let ends = is_done || is_lost || is_late || is_slow || is_needless;
    ends.then(|| end(is_done))
}

/// The place that the partition can do without, if it has too many: those that hold nothing that
/// counts first. Never one without which there would be too few good members, all of them whole.
#[must_use]
pub fn surplus(view: View<'_>, record: &DataRecord) -> Option<NodeId> {
    let target = target(view, record);
    if record.replicas.len() <= target || view.state.task(record.id).is_some() {
        return None;
    }
    if !is_aligned(view, record) {
        return None;
    }
    let is_member = |node: NodeId| record.configuration.members.contains(&node);
    let good: Vec<NodeId> = places(view, record)
        .filter(|(place, state)| *state == Place::Good && is_member(place.node))
        .map(|(place, _)| place.node)
        .collect();
    let order = |(place, state): &(Replica, Place)| {
        let worth = match state {
            Place::Bad(_) => 0,
            Place::Missing => 1,
            Place::Away => 2,
            Place::Coming => 3,
            Place::Good => 4,
        };
        // The primary last: it goes on without a change of hands.
        let is_primary = record.configuration.primary == place.node;
        (is_member(place.node), worth, is_primary, std::cmp::Reverse(use_of(view, place.node)))
    };
    let mut candidates: Vec<(Replica, Place)> = places(view, record).collect();
    candidates.sort_by_key(order);
    let (place, _) = candidates.first()?;
    let left = good.iter().filter(|node| **node != place.node).count();
    (left >= target).then_some(place.node)
}

fn use_of(view: View<'_>, node: NodeId) -> u64 {
    let Some(known) = view.state.node(node) else { return 0 };
    view.loads.disks(known).iter().map(|disk| disk.used_bytes).sum()
}

fn drop_one(view: View<'_>, record: &DataRecord) -> Option<CommandV1> {
    let node = surplus(view, record)?;
    let adopted = view.loads.adopted(record)?;
    let is_out = !record.is_configured(node) && adopted.epoch == record.configuration.epoch;
    is_out.then_some(CommandV1::DropReplica { partition: record.id, node })
}
