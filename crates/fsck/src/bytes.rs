//! The walk over content maps and extents.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use milpa_host::clock::Instant;
use milpa_types::{DataPartition, ExtentId, InodeId, NodeId, PartitionId};
use milpa_wire::check::{MetaCheck, MetaChecked};
use milpa_wire::data::{DataAnswer, DataRequest, EXTENT_STATES_MAX, ExtentState, FREED_RANGES_MAX};

use crate::ask::{FsckError, PAUSE, Servers, WAIT, strange};
use crate::check::{Found, Stage};
use crate::extents::{
    PLACE_FIRST, Place, Problem, REFERENCES_MAX, Reference, Replica, What, Window, compare, shared,
};
use crate::finding::of_bytes;

/// Files of one window that are looked at again.
const SUSPECTS_MAX: usize = 4096;
/// So many looks in a row have to find the same, with a pause in between: replicas that were away
/// are made equal meanwhile.
const LOOKS: usize = 3;
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// Checks that data nodes have the bytes that files refer to.
pub(crate) async fn check(
    servers: &mut Servers<'_>,
    found: &mut Found<'_>,
) -> Result<(), FsckError> {
    let mut first = Some(PLACE_FIRST);
    while let Some(begin) = first {
        let mut window = Window::new(begin, REFERENCES_MAX);
        fill(servers, found, &mut window).await?;
        let last = window.last;
        let (references, next) = window.close();
        let mut problems = shared(&references);
        servers.refresh().await?;
        problems
            .extend(compare_all(servers, found, &references, Extents::Between(begin, last)).await?);
        drop(references);
        judge(servers, found, &problems).await?;
        first = next;
    }
    Ok(())
}

async fn fill(
    servers: &mut Servers<'_>,
    found: &mut Found<'_>,
    window: &mut Window,
) -> Result<(), FsckError> {
    for partition in servers.meta() {
        let mut after = None;
        loop {
            let check = MetaCheck::Segments { after, first: window.first, last: window.last };
            let checked = servers.check(partition, check).await?;
            let MetaChecked::Segments { found: segments, next } = checked else {
                return Err(strange(partition));
            };
            let references =
                segments.iter().filter_map(|(inode, segment)| Reference::of(*inode, segment));
            references.for_each(|reference| window.push(reference));
            found.tell(Stage::Content);
            after = next;
            if after.is_none() {
                break;
            }
        }
    }
    Ok(())
}

/// Which extents of a data partition are asked for.
#[derive(Clone, Copy)]
pub(crate) enum Extents {
    /// All in this range, also those that no file refers to.
    Between(Place, Place),
    /// Those that are referred to.
    Referred,
}

/// Compares references, in order, with what the data partitions hold.
async fn compare_all(
    servers: &mut Servers<'_>,
    found: &mut Found<'_>,
    references: &[Reference],
    extents: Extents,
) -> Result<Vec<Problem>, FsckError> {
    let mut problems = Vec::new();
    let known: Vec<PartitionId> = servers.view().data.iter().map(|data| data.id).collect();
    let mut asked: BTreeSet<PartitionId> = references.iter().map(|it| it.place.0).collect();
    if let Extents::Between(first, last) = extents {
        asked.extend(known.iter().filter(|id| (first.0..=last.0).contains(id)));
    }
    for partition in asked {
        let of_it = references.partition_point(|it| it.place.0 < partition)
            ..references.partition_point(|it| it.place.0 <= partition);
        let of_it = references.get(of_it).unwrap_or_default();
        if !known.contains(&partition) {
            problems.extend(of_it.iter().map(|reference| (*reference, What::NoPartition)));
            continue;
        }
        let mut referred: Vec<ExtentId> = of_it.iter().map(|it| it.place.1).collect();
        referred.dedup();
        let replicas = replicas(servers, partition, &referred, extents).await?;
        if let Extents::Between(..) = extents {
            count(found, partition, &referred, &replicas);
        }
        problems.extend(compare(of_it, &replicas));
        found.tell(Stage::Content);
    }
    Ok(problems)
}

/// Counts the extents of a partition, and notes those to which no file refers; `referred` is in order.
fn count(
    found: &mut Found<'_>,
    partition: PartitionId,
    referred: &[ExtentId],
    replicas: &[Replica],
) {
    let mut longest: BTreeMap<ExtentId, &ExtentState> = BTreeMap::new();
    for state in replicas.iter().flat_map(|it| it.extents.values()) {
        let known = longest.entry(state.extent).or_insert(state);
        if known.length < state.length {
            *known = state;
        }
    }
    found.counts.extents += longest.len() as u64;
    longest.retain(|extent, _| referred.binary_search(extent).is_err());
    for (extent, state) in longest {
        found.counts.unreferenced += 1;
        found.counts.unreferenced_bytes += state.length;
        found.unreferenced.add((partition, extent), state);
    }
}

/// What the members of a data partition hold, and what is freed there of the extents `referred`. A member
/// that does not answer is soon none any more.
pub(crate) async fn replicas(
    servers: &mut Servers<'_>,
    partition: PartitionId,
    referred: &[ExtentId],
    extents: Extents,
) -> Result<Vec<Replica>, FsckError> {
    let started = Instant::now();
    loop {
        let record = servers.view().data.iter().find(|data| data.id == partition).cloned();
        let Some(record) = record else { return Ok(Vec::new()) };
        let last = match all_members(servers, &record, referred, extents).await {
            Ok(replicas) => return Ok(replicas),
            Err(error) => error,
        };
        if started.elapsed() >= WAIT {
            let waited_s = started.elapsed().as_secs();
            return Err(FsckError::Silent { partition, waited_s, last });
        }
        tokio::time::sleep(PAUSE).await;
        servers.refresh().await?;
    }
}

async fn all_members(
    servers: &Servers<'_>,
    record: &DataPartition,
    referred: &[ExtentId],
    extents: Extents,
) -> Result<Vec<Replica>, String> {
    let mut replicas = Vec::new();
    for node in &record.members {
        let member = Member { servers, record, node: *node };
        let states = match extents {
            Extents::Referred => member.some_states(referred).await?,
            Extents::Between(first, last) => {
                let low = if first.0 == record.id { first.1 } else { ExtentId(0) };
                let high = if last.0 == record.id { last.1 } else { ExtentId(u64::MAX) };
                member.all_states(low, high).await?
            }
        };
        let freed = member.freed(referred).await?;
        let extents = states.into_iter().map(|state| (state.extent, state)).collect();
        let lost = member.lost(referred).await?;
        replicas.push(Replica { node: *node, extents, freed, lost });
    }
    Ok(replicas)
}

/// One replica, and how to ask it.
struct Member<'a> {
    servers: &'a Servers<'a>,
    record: &'a DataPartition,
    node: NodeId,
}

impl Member<'_> {
    async fn states(
        &self,
        extents: Vec<ExtentId>,
        after: Option<ExtentId>,
    ) -> Result<Vec<ExtentState>, String> {
        let (partition, epoch) = (self.record.id, self.record.epoch);
        let request = DataRequest::ExtentInfo { partition, epoch, extents, after };
        match self.servers.data(self.node, &request).await? {
            DataAnswer::Extents(states) => Ok(states),
            _ => Err(format!("node {} answered something else", self.node)),
        }
    }

    async fn some_states(&self, extents: &[ExtentId]) -> Result<Vec<ExtentState>, String> {
        let mut states = Vec::new();
        for some in extents.chunks(EXTENT_STATES_MAX) {
            states.extend(self.states(some.to_vec(), None).await?);
        }
        Ok(states)
    }

    async fn all_states(&self, low: ExtentId, high: ExtentId) -> Result<Vec<ExtentState>, String> {
        let (mut all, mut after) = (Vec::new(), low.0.checked_sub(1).map(ExtentId));
        loop {
            let page = self.states(Vec::new(), after).await?;
            let last = page.last().map(|state| state.extent);
            let is_end = page.len() < EXTENT_STATES_MAX || last <= after;
            all.extend(page.into_iter().filter(|state| (low..=high).contains(&state.extent)));
            after = last;
            if is_end || last.is_none_or(|last| last >= high) {
                return Ok(all);
            }
        }
    }

    /// What is freed of these extents. An answer that is full may not be all of it: fewer are
    /// asked for then.
    async fn freed(
        &self,
        extents: &[ExtentId],
    ) -> Result<BTreeMap<ExtentId, Vec<(u64, u64)>>, String> {
        let (partition, epoch) = (self.record.id, self.record.epoch);
        let mut freed: BTreeMap<ExtentId, Vec<(u64, u64)>> = BTreeMap::new();
        let mut left: Vec<&[ExtentId]> = extents.chunks(EXTENT_STATES_MAX).collect();
        while let Some(some) = left.pop() {
            let request = DataRequest::Freed { partition, epoch, extents: some.to_vec() };
            let DataAnswer::Freed(ranges) = self.servers.data(self.node, &request).await? else {
                return Err(format!("node {} answered something else", self.node));
            };
            if ranges.len() >= FREED_RANGES_MAX && some.len() > 1 {
                let (low, high) = some.split_at(some.len() / 2);
                left.extend([low, high]);
                continue;
            }
            for range in ranges {
                let end = range.offset.saturating_add(range.length);
                freed.entry(range.extent).or_default().push((range.offset, end));
            }
        }
        Ok(freed)
    }

    /// The blocks of these extents that this member calls lost.
    async fn lost(&self, extents: &[ExtentId]) -> Result<BTreeSet<(ExtentId, u64)>, String> {
        let (partition, epoch) = (self.record.id, self.record.epoch);
        let mut lost = BTreeSet::new();
        for some in extents.chunks(EXTENT_STATES_MAX) {
            let request = DataRequest::LostBlocks { partition, epoch, extents: some.to_vec() };
            let DataAnswer::LostBlocks(some) = self.servers.data(self.node, &request).await? else {
                return Err(format!("node {} answered something else", self.node));
            };
            lost.extend(some);
        }
        Ok(lost)
    }
}

/// Looks at the files again: what is wrong must be wrong each time, with bytes that the file refers to
/// before and after.
async fn judge(
    servers: &mut Servers<'_>,
    found: &mut Found<'_>,
    problems: &[Problem],
) -> Result<(), FsckError> {
    let files: BTreeSet<InodeId> = problems.iter().map(|(reference, _)| reference.inode).collect();
    found.unjudged += files.len().saturating_sub(SUSPECTS_MAX) as u64;
    let mut files: Vec<InodeId> = files.into_iter().take(SUSPECTS_MAX).collect();
    found.counts.suspects += files.len() as u64;
    let places: BTreeSet<Place> = problems.iter().map(|(reference, _)| reference.place).collect();
    let mut left: Option<Wrong> = None;
    for _ in 0..LOOKS {
        if files.is_empty() {
            break;
        }
        tokio::time::sleep(LOOK_PAUSE).await;
        found.tell(Stage::Suspects);
        let mut wrong = look(servers, found, &files, &places).await?;
        if let Some(before) = left {
            wrong.retain(|key, _| before.contains_key(key));
        }
        let still: BTreeSet<InodeId> = wrong.keys().map(|(inode, _)| *inode).collect();
        files.retain(|file| still.contains(file));
        left = Some(wrong);
    }
    for ((inode, what), references) in left.unwrap_or_default() {
        found.add(of_bytes(inode, what, &references));
    }
    Ok(())
}

/// What is wrong with which file, and where.
type Wrong = BTreeMap<(InodeId, What), Vec<Reference>>;

async fn look(
    servers: &mut Servers<'_>,
    found: &mut Found<'_>,
    files: &[InodeId],
    places: &BTreeSet<Place>,
) -> Result<Wrong, FsckError> {
    servers.refresh().await?;
    let before = references_of(servers, files, places).await?;
    let mut problems = shared(&before);
    problems.extend(compare_all(servers, found, &before, Extents::Referred).await?);
    let mut after = references_of(servers, files, places).await?;
    let key = |reference: &Reference| (reference.inode, reference.place, reference.offset);
    after.sort_unstable_by_key(key);
    let mut wrong = Wrong::new();
    for (reference, what) in problems {
        // A file's own references do not overlap: the last that does not begin above it.
        let above = after.partition_point(|now| key(now) <= key(&reference));
        let now = above.checked_sub(1).and_then(|index| after.get(index));
        if now.is_some_and(|now| reference.is_within(now)) {
            wrong.entry((reference.inode, what)).or_default().push(reference);
        }
    }
    Ok(wrong)
}

/// References of some files to some extents, in order.
async fn references_of(
    servers: &mut Servers<'_>,
    files: &[InodeId],
    places: &BTreeSet<Place>,
) -> Result<Vec<Reference>, FsckError> {
    let mut references = Vec::new();
    for file in files {
        let segments = servers.layout(*file).await?.unwrap_or_default();
        let all = segments.iter().filter_map(|segment| Reference::of(*file, segment));
        references.extend(all.filter(|reference| places.contains(&reference.place)));
    }
    references.sort_unstable();
    Ok(references)
}
