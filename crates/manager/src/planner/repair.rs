//! Data partitions whose members are away or back: one configuration after the other.
//!
//! A configuration is only planned when the one before it was adopted, or instead of one that was not and would do
//! harm: so the group is never more than one step behind. A member that is
//! silent, whose disk is fenced, or that lost its replica leaves; one that is slow, if the others are enough
//! (docs/decisions/0014). A replica that is there and not a
//! member, back or being made (`replace`), is a learner first, and becomes a member when it holds
//! what the members hold (docs/decisions/0006). Never below two members (DESIGN.md section 5), and
//! never without a majority of the old members, which the group needs to commit the change; but for the
//! survivor of two, when the other one is lost for good (docs/decisions/0007).

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{Epoch, NodeId, NodeState, PartitionId};
use milpa_wire::data::{Configuration, DataPartitionReport};

use super::health::{is_aligned, is_replaced, is_to_stay};
use super::replace::{has_enough_members, surplus, target};
use super::{Plan, REPLICAS_PER_COMMAND, View};
use crate::core::{CommandV1, DataRecord, MEMBERS_MIN};

/// Plans configurations.
pub fn plan(view: View<'_>, plan: &mut Plan) {
    // First: of a configuration nothing is noted any more once the next one is decided.
    let seen = view.state.data_partitions().filter(|record| is_seen_whole(view, record));
    let seen: Vec<_> = seen.map(|record| (record.id, record.configuration.epoch)).collect();
    for partitions in seen.chunks(REPLICAS_PER_COMMAND) {
        plan.commands.push(CommandV1::MembersWhole { partitions: partitions.to_vec() });
    }
    let mut primaries = count_primaries(view);
    for record in view.state.data_partitions() {
        let Some((configuration, replaces)) = next(view, record, &primaries) else { continue };
        if configuration.primary != record.configuration.primary {
            *primaries.entry(configuration.primary).or_default() += 1;
        }
        let (partition, epoch) = (record.id, configuration.epoch);
        let is_whole = replaces.is_none() && is_whole_from_the_start(view, record, &configuration);
        plan.commands.push(match replaces {
            Some(adopted) => CommandV1::ReplaceConfiguration { partition, configuration, adopted },
            None => CommandV1::SetConfiguration { partition, configuration },
        });
        if is_whole {
            plan.commands.push(CommandV1::MembersWhole { partitions: vec![(partition, epoch)] });
        }
    }
}

/// Whether who joins has everything for good. One that goes on alone acknowledges nothing: what the learner was seen to
/// have is still all that there is when it becomes a member.
fn is_whole_from_the_start(view: View<'_>, record: &DataRecord, next: &Configuration) -> bool {
    let [alone] = &record.configuration.members[..] else { return false };
    next.members.contains(alone) && view.state.is_whole(record.id, *alone)
}

/// Whether all members hold the same, and that is not known of all of them.
fn is_seen_whole(view: View<'_>, record: &DataRecord) -> bool {
    let mut members = record.configuration.members.iter();
    let is_known = members.all(|node| view.state.is_whole(record.id, *node));
    !is_known && (is_aligned(view, record) || were_aligned_before(view, record))
}

/// Whether the group has still to take the configuration decided, and its members hold the same in the one before: they
/// have taken part since then in all that is acknowledged.
fn were_aligned_before(view: View<'_>, record: &DataRecord) -> bool {
    let Configuration { epoch, members, .. } = &record.configuration;
    let precedes = |adopted: &&Configuration| {
        adopted.epoch.0 + 1 == epoch.0 && members.iter().all(|node| adopted.members.contains(node))
    };
    view.loads.adopted(record).filter(precedes).is_some_and(|adopted| {
        let before = DataRecord { configuration: adopted.clone(), ..record.clone() };
        is_aligned(view, &before)
    })
}

fn count_primaries(view: View<'_>) -> BTreeMap<NodeId, u64> {
    let mut primaries = BTreeMap::new();
    for record in view.state.data_partitions() {
        *primaries.entry(record.configuration.primary).or_default() += 1;
    }
    primaries
}

/// The configuration that should be decided next, if another should; with the epoch that the group has, if it is
/// instead of one that was decided.
fn next(
    view: View<'_>,
    record: &DataRecord,
    primaries: &BTreeMap<NodeId, u64>,
) -> Option<(Configuration, Option<Epoch>)> {
    let adopted = view.loads.adopted(record)?;
    if let Some(configuration) = others_configuration(view, record) {
        return Some((configuration, None));
    }
    if let [alone] = record.configuration.members[..]
        && !view.state.is_whole(record.id, alone)
    {
        return Some((other_complement(view, record, adopted, alone)?, None));
    }
    if let Some(configuration) = survivors_configuration(view, record, adopted) {
        return Some((configuration, None));
    }
    if adopted.epoch == record.configuration.epoch {
        return Some((wanted_configuration(view, record, primaries)?, None));
    }
    let replacement = replacement(view, record, adopted, primaries)?;
    Some((replacement, Some(adopted.epoch)))
}

/// Instead of a configuration that was decided and that the group has not taken: one that it cannot take any more,
/// as it took another one, or one that would keep a member that was lost since then and let go one that is there.
fn replacement(
    view: View<'_>,
    record: &DataRecord,
    adopted: &Configuration,
    primaries: &BTreeMap<NodeId, u64>,
) -> Option<Configuration> {
    let decided = &record.configuration;
    let is_of_late = view.state.decided_upon(record) <= adopted.epoch;
    if !is_of_late || adopted.epoch > decided.epoch || decided.members.len() < MEMBERS_MIN {
        return None;
    }
    let is_void = !decided.follows(adopted);
    let keeps_lost = || lost_members(view, record).iter().any(|it| decided.members.contains(it));
    if !is_void && !keeps_lost() {
        return None;
    }
    let epoch = Epoch(decided.epoch.0 + 1);
    let undecided = DataRecord { configuration: adopted.clone(), ..record.clone() };
    let wanted = wanted_configuration(view, &undecided, primaries);
    let wanted = wanted.map(|wanted| Configuration { epoch, ..wanted });
    let wanted = wanted.filter(|wanted| wanted.follows(adopted));
    // With nothing better to do the group stays as it is.
    let stays = || is_void.then(|| Configuration { epoch, ..adopted.clone() });
    wanted.or_else(stays)
}

/// What should follow the configuration that the group has, if another should.
fn wanted_configuration(
    view: View<'_>,
    record: &DataRecord,
    primaries: &BTreeMap<NodeId, u64>,
) -> Option<Configuration> {
    let present = &record.configuration;
    let members: BTreeSet<NodeId> = present.members.iter().copied().collect();
    let staying: BTreeSet<NodeId> =
        members.iter().copied().filter(|node| shall_stay(view, record, *node)).collect();
    let surplus = surplus(view, record);
    let learner = learner(view, record);
    let joins = |node: NodeId| learner == Some(node) && is_whole(view, record, node);
    let wanted: Vec<NodeId> = (record.replicas.iter().map(|replica| replica.node))
        .filter(|node| Some(*node) != surplus)
        .filter(|node| staying.contains(node) || joins(*node))
        .collect();
    let learners: Vec<NodeId> = learner.filter(|node| !wanted.contains(node)).into_iter().collect();
    let is_same = wanted.len() == members.len()
        && wanted.iter().all(|node| members.contains(node))
        && learners == present.learners;
    let has_majority = staying.len() * 2 > members.len();
    if wanted.len() < MEMBERS_MIN.min(members.len()) || !has_majority || is_same {
        return None;
    }
    // Who is away may come back with all it has; who stays in its place has to have said that it does.
    let drops_one = members.iter().any(|node| !wanted.contains(node));
    let all_hold = wanted.iter().all(|node| !members.contains(node) || holds(view, record, *node));
    if drops_one && !all_hold {
        return None;
    }
    // A replica that has just come back lacks bytes: the primary is one that stayed.
    let may_order = |node: &&NodeId| staying.contains(node) && Some(**node) != surplus;
    let primary = if may_order(&&present.primary) {
        present.primary
    } else {
        let load = |node: &&NodeId| (primaries.get(node).copied().unwrap_or(0), **node);
        *wanted.iter().filter(may_order).min_by_key(load)?
    };
    Some(Configuration { epoch: Epoch(present.epoch.0 + 1), members: wanted, primary, learners })
}

/// One that goes on alone and has still to be given what it lacks is given it by its learner, and by nobody else: but for
/// another one who has it, if the learner is not there any more.
fn other_complement(
    view: View<'_>,
    record: &DataRecord,
    adopted: &Configuration,
    alone: NodeId,
) -> Option<Configuration> {
    let present = &record.configuration;
    let is_there = |node: &NodeId| may_stay(view, record, *node);
    if adopted.epoch != present.epoch || present.learners.iter().all(is_there) {
        return None;
    }
    let learners = vec![complement(view, record, alone)?];
    Some(Configuration { epoch: Epoch(present.epoch.0 + 1), learners, ..present.clone() })
}

/// That of one of two members when the other one is lost for good (docs/decisions/0007): it takes no
/// writes before another one has joined. Given to nobody who may lack an acknowledged byte, unless there is who
/// has it; and to one of the two only, as the other one is in no configuration from then on. What was decided
/// after the one that the two have adopted, they cannot commit.
fn survivors_configuration(
    view: View<'_>,
    record: &DataRecord,
    adopted: &Configuration,
) -> Option<Configuration> {
    let present = &record.configuration;
    let survives = |node: &NodeId| may_stay(view, record, *node) && present.members.contains(node);
    let (alive, lost): (Vec<NodeId>, Vec<NodeId>) =
        adopted.members.iter().partition(|n| survives(n));
    let ([survivor], [lost]) = (&alive[..], &lost[..]) else { return None };
    let load = view.loads.report(*survivor)?;
    // The lost one may have adopted a later configuration of the two, which nobody knows any more.
    let report = load.data.get(&record.id)?;
    let own = &report.configuration;
    let is_of_two =
        own.members.len() == 2 && adopted.members.iter().all(|n| own.members.contains(n));
    let may =
        is_of_two && present.members.len() > 1 && is_lost(view, record, *lost, load.reporting_ms());
    let learners = match view.state.is_whole(record.id, *survivor) {
        true => Vec::new(),
        // Nobody has what was overwritten of bytes that it has lost since.
        false if report.lacks_overwritten => return None,
        false => vec![complement(view, record, *survivor)?],
    };
    may.then(|| Configuration {
        epoch: Epoch(present.epoch.0 + 1),
        members: alive.clone(),
        primary: *survivor,
        learners,
    })
}

/// That of the other one of two, which is back after all, when the survivor was lost before another one had joined it: the
/// survivor has acknowledged nothing. Not of one that may serve readers still.
fn others_configuration(view: View<'_>, record: &DataRecord) -> Option<Configuration> {
    let present = &record.configuration;
    let [alone] = present.members[..] else { return None };
    let other = view.state.other_of_two(record.id)?;
    let report = view.loads.report(other)?.data.get(&record.id)?;
    let were_two = |node: &NodeId| [alone, other].contains(node);
    let own = &report.configuration.members;
    let may = own.len() == MEMBERS_MIN
        && own.iter().all(were_two)
        && may_stay(view, record, other)
        && is_lost(view, record, alone, 0);
    may.then(|| Configuration {
        epoch: Epoch(present.epoch.0 + 1),
        members: vec![other],
        primary: other,
        learners: Vec::new(),
    })
}

/// Who is there, is to learn, and has what a survivor may lack: with all overwrites of it, as it has been a member beside
/// the survivor by its own word.
fn complement(view: View<'_>, record: &DataRecord, survivor: NodeId) -> Option<NodeId> {
    let is_to_learn = |node: &NodeId| !record.configuration.members.contains(node);
    let was_beside = |node: &NodeId| {
        let report = view.loads.report(*node).and_then(|load| load.data.get(&record.id));
        report.is_some_and(|report| report.configuration.members.contains(&survivor))
    };
    let is_there =
        |node: &NodeId| is_to_learn(node) && may_stay(view, record, *node) && was_beside(node);
    view.state.complements(record.id, survivor).find(is_there)
}

/// Who of the members, as they are and as they shall be, will not come back with what it has.
pub(super) fn lost_members(view: View<'_>, record: &DataRecord) -> Vec<NodeId> {
    let is_heard = |node: &NodeId| view.state.node(*node).is_some_and(|it| it.state.is_heard());
    let leader = view.loads.data_leader(record).filter(is_heard);
    let leader = leader.and_then(|node| view.loads.report(node));
    let reporting_ms = leader.map_or(0, |load| load.reporting_ms());
    let present = view.loads.adopted(record).into_iter().chain([&record.configuration]);
    let members: BTreeSet<NodeId> = present.flat_map(|it| it.members.iter().copied()).collect();
    members.into_iter().filter(|node| is_lost(view, record, *node, reporting_ms)).collect()
}

/// Whether a member will not come back with what it has. One of a dead node may: it is waited for as long
/// as it took to call it dead, counted from the survivor's own start, which may have come after the same
/// power failure.
fn is_lost(view: View<'_>, record: &DataRecord, node: NodeId, survivor_reports_ms: u64) -> bool {
    let Some(known) = view.state.node(node) else { return true };
    let disk = view.loads.disks(known).iter().find(|disk| Some(disk.id) == record.disk_of(node));
    let is_dead =
        known.state == NodeState::Dead && survivor_reports_ms >= view.policy.dead_after_ms;
    known.is_removed
        || is_replaced(view, known)
        || is_dead
        || disk.is_none_or(|disk| disk.fenced.is_some())
        || has_lost_replica(view, node, record.id, was_created(view, record, node))
}

/// Whether a replica once was there: the managers have noted that, or a member says that its own is damaged. (What is left
/// of an older one goes when the new one is made, and says nothing of that.)
pub(super) fn was_created(view: View<'_>, record: &DataRecord, node: NodeId) -> bool {
    let is_member = record.configuration.members.contains(&node);
    let is_damaged = || view.loads.has_damaged_data(node, record.id);
    record.created.contains(&node) || is_member && is_damaged()
}

/// The replica that is to become a member, if one is there to be filled. One that comes back lacks
/// less than one that is being made.
fn learner(view: View<'_>, record: &DataRecord) -> Option<NodeId> {
    let task = view.state.task(record.id);
    let made = task.map(|task| task.place.node);
    let candidates = record.replicas.iter().map(|replica| replica.node);
    let back = candidates.filter(|node| Some(*node) != made && may_learn(view, record, *node));
    let back = back.max_by_key(|node| record.configuration.learners.contains(node));
    if back.is_some() && !has_enough_members(view, record) {
        return back;
    }
    let made = task.filter(|task| !task.is_given_up).and(made);
    made.filter(|node| may_learn(view, record, *node))
}

/// Whether a learner has all bytes and all overwrites of the members: the primary compares the
/// extents, the Raft leader the logs.
fn is_whole(view: View<'_>, record: &DataRecord, learner: NodeId) -> bool {
    let has_log = |(node, report): (NodeId, &DataPartitionReport)| {
        view.loads.data_leader(record) == Some(node)
            && report.configuration == record.configuration
            && report.current.contains(&learner)
    };
    record.configuration.learners.contains(&learner)
        && is_aligned(view, record)
        && view.loads.data_reports(record).any(has_log)
}

/// A member stays unless there is proof that it cannot serve.
fn may_stay(view: View<'_>, record: &DataRecord, node: NodeId) -> bool {
    let was_there = was_created(view, record, node);
    can_serve(view, record, node) && !has_lost_replica(view, node, record.id, was_there)
}

/// …nor is so slow that the partition does better without it.
fn shall_stay(view: View<'_>, record: &DataRecord, node: NodeId) -> bool {
    may_stay(view, record, node) && !is_spared(view, record, node)
}

/// Whether a replica is left out as its node is too slow: one at a time, and only where the other members are enough
/// without it: for the group, for appends, and a majority of the copies that are wanted; of those who are known to have
/// everything. Not while another place has to go: until that is replaced and dropped, every copy is needed.
pub(super) fn is_spared(view: View<'_>, record: &DataRecord, node: NodeId) -> bool {
    let members = &record.configuration.members;
    let is_avoided = |node: &NodeId| view.loads.avoided_ms(*node, view.now_ms).is_some();
    let goes_first = || members.iter().copied().find(is_avoided);
    let counts = |it: NodeId| may_stay(view, record, it) && view.state.is_whole(record.id, it);
    let others = || members.iter().filter(|it| **it != node && counts(**it)).count();
    let all_stay = || record.replicas.iter().all(|it| is_to_stay(view, record, it.node));
    is_avoided(&node)
        && (!members.contains(&node) || goes_first() == Some(node))
        && others() >= MEMBERS_MIN.max(target(view, record) / 2 + 1)
        && others() * 2 > members.len()
        && all_stay()
}

/// A replica becomes a learner when there is proof that it is there, and remains one while it can
/// serve: just after a start it may not be reported yet.
fn may_learn(view: View<'_>, record: &DataRecord, node: NodeId) -> bool {
    let Configuration { members, learners, .. } = &record.configuration;
    !members.contains(&node)
        && (holds(view, record, node) || learners.contains(&node))
        && !has_lost_replica(view, node, record.id, record.created.contains(&node))
        && can_serve(view, record, node)
        && !is_spared(view, record, node)
}

/// Whether a node reports the replica. Of a leader's first moments nothing follows: it has not heard all.
pub(super) fn holds(view: View<'_>, record: &DataRecord, node: NodeId) -> bool {
    view.loads.report(node).is_some_and(|load| load.data.contains_key(&record.id))
}

pub(super) fn can_serve(view: View<'_>, record: &DataRecord, node: NodeId) -> bool {
    let Some(known) = view.state.node(node) else { return false };
    let disk = record.disk_of(node);
    let is_fenced =
        view.loads.disks(known).iter().any(|d| Some(d.id) == disk && d.fenced.is_some());
    known.state.is_heard() && !is_fenced
}

/// Whether a replica that once was there is missing from the reports of a node that has been
/// reporting for a while; just after a start it may not have opened everything.
#[must_use]
pub fn has_lost_replica(
    view: View<'_>,
    node: NodeId,
    partition: PartitionId,
    is_created: bool,
) -> bool {
    let Some(load) = view.loads.report(node) else { return false };
    let held = load.data.contains_key(&partition) || load.meta.contains_key(&partition);
    is_created && !held && load.reporting_ms() >= view.policy.silence_period_ms
}
