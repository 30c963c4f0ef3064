//! Meta partitions whose replicas are lost or have to go.
//!
//! As for data partitions, one more replica comes first. It joins as learner, by snapshot and log,
//! while the partition serves; when it is current, one change of the group makes it a member and
//! takes out the one that it replaces, if there are enough. A member without replacement stays: a group is never made
//! smaller than the cluster can help.
//!
//! One of which only the node is left takes part in nothing: without it the group needs as many of the others
//! as with it. So if there is no other place, it is taken out first, what is left of it is deleted when all
//! members know that, and then its node is as good a place as any.
//!
//! ```text
//! record              the group's leader reports      next
//! member is bad       voters = members                BeginTask: joining = the new one
//! member is lost      voters = members, no other node SetMembers: the others
//! joining             it is no learner yet            step: learners = [joining]
//! joining             it is a learner and current     SetMembers: joining for the bad one
//! joining = none      voters differ from members      step: voters = members, if these can go on
//! joining = none      voters = members                EndTask { done }
//! ```

use std::collections::BTreeSet;

use milpa_types::{NodeId, Role};
use milpa_wire::meta::MetaPartitionReport;

use super::budget::Budget;
use super::health::{Place, meta_place};
use super::place::{Topology, offers};
use super::reconcile::ask_order;
use super::room::has_room;
use super::{Plan, Step, View};
use crate::core::{CommandV1, MetaRecord, NewTask, Task, TaskReason};

/// Plans tasks of meta partitions, and members that change.
pub fn plan(view: View<'_>, plan: &mut Plan) {
    let mut problems = BTreeSet::new();
    let mut prepared: Option<(Budget, Topology)> = None;
    let mut lacking = Vec::new();
    for record in view.state.meta_partitions() {
        match view.state.task(record.id) {
            Some(task) => plan.commands.extend(follow(view, record, task)),
            None => lacking.extend(lacks(view, record).map(|reason| (record, reason))),
        }
    }
    // Fewest copies first.
    lacking.sort_by_key(|(record, _)| in_service(view, record));
    for (record, reason) in lacking {
        let (budget, topology) =
            prepared.get_or_insert_with(|| (Budget::of(view), Topology::of(view, Role::Meta)));
        let good = |node: &&NodeId| meta_place(view, record, **node).counts();
        let kept: Vec<NodeId> = record.members.iter().filter(good).copied().collect();
        let (choices, seed) = (view.policy.choices as usize, view.seed ^ record.id.0);
        // A damaged replica is in the way until it is deleted.
        let nodes = view.state.nodes().map(|node| node.id);
        let taken = nodes.filter(|node| view.loads.has_damaged_meta(*node, record.id));
        let held: Vec<NodeId> = record.members.iter().copied().chain(taken).collect();
        match offers(topology, (&held, &kept), choices, seed, |node| budget.allows(node)) {
            Ok(offers) => {
                let Some(place) = offers.first().map(|best| best.place) else { continue };
                budget.take(place.node);
                topology.count(&[place], None);
                let (partition, begun_unix_ms) = (record.id, view.unix_ms);
                let deadline_unix_ms = begun_unix_ms.saturating_add(view.policy.repair_deadline_ms);
                let task = NewTask { partition, place, reason, begun_unix_ms, deadline_unix_ms };
                plan.commands.push(CommandV1::BeginTask(task));
            }
            Err(shortage) => match without_lost(view, record) {
                Some(members) => {
                    plan.commands.push(CommandV1::SetMembers { partition: record.id, members });
                }
                None => {
                    problems.insert(format!("meta partition {}: {reason}; {shortage}", record.id));
                }
            },
        }
    }
    plan.problems.extend(problems);
}

/// How many replicas serve, or are about to.
#[must_use]
pub fn in_service(view: View<'_>, record: &MetaRecord) -> usize {
    let is_coming = |node| meta_place(view, record, node) == Place::Coming;
    let serving = |node: &&NodeId| serves(view, record, **node) || is_coming(**node);
    record.members.iter().filter(serving).count()
}

/// Whether a replica does what it is for, whether or not it is to stay.
fn serves(view: View<'_>, record: &MetaRecord, node: NodeId) -> bool {
    match meta_place(view, record, node) {
        Place::Good => true,
        Place::Bad(TaskReason::NodeDraining(_)) => is_heard(view, node),
        Place::Coming | Place::Away | Place::Missing | Place::Bad(_) => false,
    }
}

fn is_heard(view: View<'_>, node: NodeId) -> bool {
    view.state.node(node).is_some_and(|known| known.state.is_heard())
}

/// Why a partition needs another replica, if it does and its group can take one in.
fn lacks(view: View<'_>, record: &MetaRecord) -> Option<TaskReason> {
    let reason = bad_member(view, record).map(|(_, reason)| reason);
    // Without a leader nobody can join.
    let (_, report) = leader_report(view, record)?;
    // Who is about to go may yet be the one to take in.
    let is_few = record.members.len() < target(view) && has_members(report, &record.members);
    let few = is_few.then_some(TaskReason::TooFew);
    // A learner that was given up leaves first: made anew, it would lack what the group believes it to have.
    // (One that is decided to be a member is none of these.)
    reason.or(few).filter(|_| report.learners.iter().all(|it| record.members.contains(it)))
}

/// Who is to be replaced next. One that still serves, and has to go, waits for those that are lost: the group
/// would have to make its change without both. It stays as well while there are too few, whoever joins: with the next
/// failure the group would stand still.
fn bad_member(view: View<'_>, record: &MetaRecord) -> Option<(NodeId, TaskReason)> {
    let is_few = record.members.len() < target(view);
    let bad = record.members.iter().filter_map(|node| match meta_place(view, record, *node) {
        Place::Bad(reason) => Some((*node, reason)),
        Place::Good | Place::Coming | Place::Away | Place::Missing => None,
    });
    let bad = bad.map(|(node, reason)| (serves(view, record, node), node, reason));
    let (serves, node, reason) = bad.min_by_key(|(serves, ..)| *serves)?;
    (!serves || !is_few).then_some((node, reason))
}

/// How many members a partition should have.
fn target(view: View<'_>) -> usize {
    usize::from(view.policy.meta_replicas)
}

/// The members but those whose replicas are lost, and whose nodes are not, if they can go on by themselves. All at once: each
/// that is kept would be needed for the next change, and take part in nothing.
fn without_lost(view: View<'_>, record: &MetaRecord) -> Option<Vec<NodeId>> {
    let (_, TaskReason::ReplicaLost(_)) = bad_member(view, record)? else { return None };
    let is_lost = |node: &NodeId| {
        matches!(meta_place(view, record, *node), Place::Bad(TaskReason::ReplicaLost(_)))
    };
    let others: Vec<NodeId> =
        record.members.iter().copied().filter(|node| !is_lost(node)).collect();
    let is_majority = others.len() * 2 > record.members.len();
    (others.len() > 1 && is_majority && are_in_service(view, record, &others)).then_some(others)
}

/// What the leader of the group says, if it is heard.
pub(super) fn leader_report<'a>(
    view: View<'a>,
    record: &'a MetaRecord,
) -> Option<(NodeId, &'a MetaPartitionReport)> {
    // One that is to be taken out may still lead: it is no member of the record any more.
    let heard = view.state.nodes().filter(|node| node.state.is_heard()).map(|node| node.id);
    let reports =
        heard.filter_map(|node| Some((node, view.loads.report(node)?.meta.get(&record.id)?)));
    let leaders = reports.filter(|(node, report)| report.leader == Some(*node));
    leaders.max_by_key(|(_, report)| report.term)
}

/// Whether a voter of the group, or who is to be one, does what it is for, whether or not it is to stay: its node is heard and
/// has the replica, not a damaged one, whose group may acknowledge entries all the same, and it is current.
pub(super) fn takes_part(
    view: View<'_>,
    record: &MetaRecord,
    (leader, report): (NodeId, &MetaPartitionReport),
    voter: NodeId,
) -> bool {
    let has_it = |node: NodeId| view.loads.report(node)?.meta.get(&record.id);
    is_heard(view, voter) && has_it(voter).is_some() && is_current((leader, report), voter)
}

/// Whether a node has nearly all of the log: who leads has all, and names the others that do.
fn is_current((leader, report): (NodeId, &MetaPartitionReport), node: NodeId) -> bool {
    node == leader || report.current.contains(&node)
}

fn has_members(report: &MetaPartitionReport, members: &[NodeId]) -> bool {
    are_same(&report.voters, members)
}

/// Whether these are the same nodes, in whatever order.
fn are_same(one: &[NodeId], other: &[NodeId]) -> bool {
    let sorted = |nodes: &[NodeId]| nodes.iter().copied().collect::<BTreeSet<NodeId>>();
    sorted(one) == sorted(other)
}

fn follow(view: View<'_>, record: &MetaRecord, task: &Task) -> Option<CommandV1> {
    let owner = task.place.node;
    let end = |done| Some(CommandV1::EndTask { partition: record.id, id: task.id, done });
    let (leader, report) = leader_report(view, record)?;
    let is_late = view.unix_ms >= task.deadline_unix_ms;
    // One that was chosen as it had just been started may say later that it has a damaged replica.
    let is_lost = matches!(meta_place(view, record, owner), Place::Bad(_));
    let Some(joining) = record.joining else {
        let is_done = has_members(report, &record.members);
        return if is_done || is_late || is_lost { end(is_done) } else { None };
    };
    let bad = bad_member(view, record).map(|(node, _)| node);
    let is_needless = bad.is_none() && record.members.len() >= target(view);
    if is_late || is_lost || is_needless {
        return end(false);
    }
    // It says who the members are as soon as it has a vote, and a memory of it.
    let knows = view.loads.report(joining).and_then(|load| load.meta.get(&record.id));
    // One that was decided to go, and has not gone yet, is in already.
    let is_in = report.learners.contains(&joining) || report.voters.contains(&joining);
    let is_ready = is_in && is_current((leader, report), joining);
    if !is_ready || !knows.is_some_and(|own| has_members(own, &report.voters)) {
        return None;
    }
    let stay = record.members.iter().copied().filter(|node| Some(*node) != bad);
    let members = stay.chain([joining]).collect();
    Some(CommandV1::SetMembers { partition: record.id, members })
}

/// What the group has to be told, if its members are not those decided.
pub fn step(view: View<'_>, record: &MetaRecord) -> Option<Step> {
    let (leader, report) = leader_report(view, record)?;
    let joining: Vec<NodeId> = record.joining.into_iter().collect();
    // A replica that does not exist yet cannot learn.
    let has_it = |node: &NodeId| {
        view.loads.report(*node).is_some_and(|load| load.meta.contains_key(&record.id))
    };
    let is_right = has_members(report, &record.members) && report.learners == joining;
    if is_right || !joining.iter().all(has_it) {
        return None;
    }
    let ask = ask_order(view, Some(leader), &record.members);
    let partition = record.id;
    if !can_go_on(view, record, leader, report) {
        // Who is to be in may learn, beside all that are: without it nobody might ever be able to go.
        let to_be_in = record.members.iter().chain(&record.joining).copied();
        let learners: Vec<NodeId> =
            to_be_in.filter(|node| !report.voters.contains(node) && has_it(node)).collect();
        let voters = report.voters.clone();
        return (!are_same(&report.learners, &learners)).then_some(Step::SetMembers {
            partition,
            voters,
            learners,
            ask,
        });
    }
    // One that takes itself out leaves an election behind: it hands over first. Who has no room may not even be able to
    // write down that it leads.
    let takes = |node: &&NodeId| {
        let can_lead = report.voters.contains(node) && is_current((leader, report), **node);
        can_lead && has_room(view, record, **node)
    };
    let heirs = record.members.iter().filter(takes);
    if !record.members.contains(&leader)
        && let Some(to) = heirs.min_by_key(|node| view.loads.declines_leads(**node))
    {
        return Some(Step::TransferLeader { partition, from: leader, to: *to });
    }
    let voters = record.members.clone();
    Some(Step::SetMembers { partition, voters, learners: joining, ask })
}

/// Whether those who stay can go on without those who go: the group might make the change with the help of whom it
/// takes out, and stand still. Without replacement all who stay have to be there; otherwise a majority, and no fewer than
/// serve before: who has to go and serves waits for who takes its place.
fn can_go_on(
    view: View<'_>,
    record: &MetaRecord,
    leader: NodeId,
    report: &MetaPartitionReport,
) -> bool {
    if report.voters.iter().all(|voter| record.members.contains(voter)) {
        return true;
    }
    let takes_part = |node: &&NodeId| takes_part(view, record, (leader, report), **node);
    let (there, all) = (record.members.iter().filter(takes_part).count(), record.members.len());
    let serving = report.voters.iter().filter(takes_part).count();
    let is_shrunk = all < target(view);
    there >= if is_shrunk { all } else { serving.max(all / 2 + 1).min(all) }
}

/// Whether the partition has all its replicas, in service and current, and each knows the others: only then
/// may one that was taken out be deleted. Made again later it would remember nothing, and whoever still
/// counted it as a voter could be elected by it.
#[must_use]
pub fn is_whole(view: View<'_>, record: &MetaRecord) -> bool {
    record.members.len() >= target(view) && is_settled(view, record)
}

/// The same, however few they are: enough to delete what is damaged, of which nothing can be had.
#[must_use]
pub fn is_settled(view: View<'_>, record: &MetaRecord) -> bool {
    let is_complete = |report: &MetaPartitionReport| {
        has_members(report, &record.members) && report.learners.is_empty()
    };
    leader_report(view, record).is_some_and(|(_, report)| is_complete(report))
        && are_in_service(view, record, &record.members)
}

/// Whether all of these members serve, are current, and know the members as they were decided.
fn are_in_service(view: View<'_>, record: &MetaRecord, members: &[NodeId]) -> bool {
    let Some((leader, report)) = leader_report(view, record) else { return false };
    let own_report = |node: NodeId| view.loads.report(node)?.meta.get(&record.id);
    members.iter().all(|node| {
        serves(view, record, *node)
            && own_report(*node).is_some_and(|own| has_members(own, &record.members))
            && is_current((leader, report), *node)
    })
}
