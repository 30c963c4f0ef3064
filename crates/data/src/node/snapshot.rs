//! Raft snapshots: a member that is too far behind copies what was overwritten.
//!
//! The snapshot of a partition is its extents as they are. The leader only names an index; the
//! follower copies every extent that the leader has marked as overwritten, from a replica that
//! has applied at least that index; what the leader lacks, from another one (`gaps`). What the follower lacks
//! besides is filled by alignment.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use milpa_raft::{InstallSnapshot, SnapshotDescriptor};
use milpa_types::{DataError, Epoch, ExtentId, NodeId, PartitionId};
use milpa_wire::data::{Configuration, DataAnswer, DataPartitionReport, DataRequest, ExtentState};

use crate::store::StoreError;

use super::disk::Disk;
use super::fill::Filling;
use super::gaps;

const ASK_WAIT: Duration = Duration::from_secs(5);
/// The leader renews its report this often, and more.
const REPORT_PAUSE: Duration = Duration::from_millis(50);
const REPORT_TRIES: u32 = 60;
/// What is being applied is looked at so often.
const APPLYING_PAUSE: Duration = Duration::from_millis(50);
const APPLYING_TRIES: u32 = 100;

impl Disk {
    /// Leader: a follower needs entries that are gone. The extents as they are take their place.
    pub fn offer_snapshot(&mut self, id: PartitionId) {
        let Some(applied) = self.applied(id) else { return };
        if let Some(snapshot) = self.driver.multi.describe(id, applied) {
            self.hand_out(id, snapshot);
        }
    }

    /// Lets followers take a snapshot: not of a replica that is given the rest by one of them, and lacks something
    /// that was overwritten (or may yet be found to). That stands in the log alone.
    pub(super) fn hand_out(&mut self, id: PartitionId, snapshot: SnapshotDescriptor) {
        let Some(partition) = self.partitions.get(&id) else { return };
        let state = &partition.state;
        let may_lack = state.lacks_overwritten
            || partition.applying.borrow().applied() < state.configured.index;
        if !(state.is_given_rest && may_lack) {
            self.driver.multi.set_snapshot(id, snapshot);
        }
    }

    /// Follower: copies what the leader overwrote.
    pub fn install_snapshot(&mut self, install: InstallSnapshot) {
        let id = install.group;
        let Some(filling) = self.filling(id) else { return self.driver.multi.snapshot_failed(id) };
        if let Some(partition) = self.partitions.get_mut(&id) {
            partition.is_installing = true;
            partition.applying.borrow_mut().cover(install.snapshot.position.index);
        }
        tracing::info!(partition = %id, leader = %install.from,
            index = install.snapshot.position.index, "copying a snapshot");
        tokio::task::spawn_local(async move {
            let mut left = Vec::new();
            let copied = copy(&filling, install.from, &install.snapshot, &mut left).await;
            let done =
                move |disk: &mut Disk| disk.snapshot_copied(id, install.snapshot, copied, left);
            filling.shared.ask_disk(filling.disk, done).await;
        });
    }

    fn snapshot_copied(
        &mut self,
        id: PartitionId,
        snapshot: SnapshotDescriptor,
        copied: Result<Copied, DataError>,
        left: Vec<(ExtentId, u64)>,
    ) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        // Damaged here, whether or not the rest was copied.
        left.into_iter().for_each(|(extent, block)| partition.lost.find_anew(extent, block));
        let Copied { configuration, lacking, overwritten } = match copied {
            Ok(copied) => copied,
            Err(error) => {
                tracing::info!(partition = %id, %error, "the snapshot was not copied");
                partition.is_installing = false;
                self.driver.multi.snapshot_failed(id);
                return;
            }
        };
        let index = snapshot.position.index;
        partition.state.lacks_overwritten |= !lacking.is_empty();
        partition.lacking.extend(lacking);
        partition.state.applied = partition.state.applied.max(index);
        partition.state.overwritten = partition.state.overwritten.max(overwritten);
        partition.state.snapshot = Some(snapshot);
        if configuration.epoch > partition.state.configuration.epoch {
            partition.state.adopt(configuration.clone(), self.shared.node);
            self.driver.multi.set_roster(id, configuration.epoch, &configuration.members);
        }
        self.save_state(
            id,
            Box::new(move |disk| {
                let Some(partition) = disk.partitions.get_mut(&id) else { return };
                partition.applying.borrow_mut().jump(index, overwritten);
                partition.is_installing = false;
                disk.driver.multi.snapshot_installed(id, index);
                disk.enforce(id, configuration);
            }),
        );
    }
}

/// What came with a snapshot.
struct Copied {
    configuration: Configuration,
    /// Extents that the leader has marked as overwritten, and of which bytes are missing here.
    lacking: BTreeSet<ExtentId>,
    /// No entry behind this one that the snapshot stands for is an overwrite.
    overwritten: u64,
}

/// Copies all overwritten extents, and learns the configuration in force at the leader. Adds to `left` the blocks
/// that nobody gave.
async fn copy(
    filling: &Filling,
    leader: NodeId,
    snapshot: &SnapshotDescriptor,
    left: &mut Vec<(ExtentId, u64)>,
) -> Result<Copied, DataError> {
    let report = report_with_us(filling, leader, snapshot.position.index).await?;
    let (configuration, overwritten) = (report.configuration.clone(), report.overwritten);
    // Whom it learns from may have been given a word once more, to be given the rest from here.
    if !report.is_given_rest {
        let (id, later, term) = (filling.partition, configuration.clone(), snapshot.position.term);
        let retire = move |disk: &mut Disk| disk.retire_if_in_vain(id, &later, term);
        if filling.shared.ask_disk(filling.disk, retire).await != Some(false) {
            return Err(DataError::DiskFailed);
        }
    }
    let index = snapshot.position.index;
    // Before the leader's: what grows here meanwhile was not overwritten before.
    let own = filling.states_of(filling.shared.node, configuration.epoch, None).await?;
    let led = filling.states_of(leader, configuration.epoch, None).await?;
    let lacks = |state: &&ExtentState| {
        let own = own.get(&state.extent);
        state.overwritten && own.is_none_or(|own| !own.sealed && own.length < state.length)
    };
    let lacking = led.values().filter(lacks).map(|state| state.extent).collect();
    let may_lack = may_lack_overwrites(filling, overwritten).await?;
    let gaps = match may_lack {
        true => Some(gaps::find(filling, (leader, index), &report, &own, &led).await?),
        false => None,
    };
    for state in led.values().filter(|state| state.overwritten) {
        let blocks = copy_extent(filling, leader, state, index, may_lack).await?;
        left.extend(blocks.into_iter().map(|block| (state.extent, block)));
    }
    if let Some(gaps) = gaps {
        gaps.close(filling, left).await?;
    }
    let store = filling.store.clone();
    let flushed = filling.shared.run_slow(filling.disk, move || store.flush_all()).await;
    flushed.ok_or(DataError::Busy)?.map_err(DataError::from)?;
    if !left.is_empty() {
        tracing::warn!(partition = %filling.partition, blocks = left.len(),
            "blocks that nobody gave did not come with the snapshot; they are repaired");
    }
    Ok(Copied { configuration, lacking, overwritten })
}

/// Whether anything may have been overwritten that is not here, if the log that the snapshot stands for has overwritten nothing behind an
/// index. What was applied before a start is applied again, which takes a moment.
async fn may_lack_overwrites(filling: &Filling, overwritten: u64) -> Result<bool, DataError> {
    let id = filling.partition;
    for tries in 0.. {
        let look = move |disk: &mut Disk| {
            let applying = disk.partitions.get(&id)?.applying.borrow();
            Some((applying.applied(), applying.delivered(), applying.overwritten()))
        };
        let look = filling.shared.ask_disk(filling.disk, look).await.flatten();
        let (applied, delivered, own) = look.ok_or(DataError::WrongPartition)?;
        if applied == delivered || tries >= APPLYING_TRIES {
            // An overwrite here that is behind theirs is one of another log.
            return Ok(overwritten > applied || own > overwritten);
        }
        tokio::time::sleep(APPLYING_PAUSE).await;
    }
    Ok(true)
}

/// Gives the blocks that the leader could not give. `NotHere` if it has lost the extent since it was asked for its state.
async fn copy_extent(
    filling: &Filling,
    leader: NodeId,
    state: &ExtentState,
    index: u64,
    may_lack: bool,
) -> Result<Vec<u64>, DataError> {
    let (extent, store) = (state.extent, filling.store.clone());
    let key = (filling.partition, extent);
    let mark = move || store.mark_overwritten(extent);
    match filling.shared.run_copy(filling.disk, key, mark).await.ok_or(DataError::Busy)? {
        Ok(()) => {}
        // Missing here: alignment brings all of it, from somebody who is as far in the log.
        Err(StoreError::NoExtent | StoreError::Removed) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    }
    match filling.replace_all(extent, state.length, (leader, index), may_lack).await {
        // Removed at the leader meanwhile.
        Err(DataError::NoExtent) => Ok(Vec::new()),
        Err(error) => {
            tracing::info!(partition = %filling.partition, %extent, %error,
                "an extent of the snapshot could not be copied");
            Err(error)
        }
        copied => copied,
    }
}

/// The configuration that took this replica in is below the snapshot, so it does not come with the
/// log: the leader's report is asked until it shows it. It was made a moment ago, and is to say what the log up to
/// `index` has overwritten.
async fn report_with_us(
    filling: &Filling,
    leader: NodeId,
    index: u64,
) -> Result<DataPartitionReport, DataError> {
    let node = filling.shared.node;
    for _ in 0..REPORT_TRIES {
        let report = report_of(filling, leader).await?;
        let Configuration { epoch, members, learners, .. } = &report.configuration;
        let names_us = members.contains(&node) || learners.contains(&node);
        let knows_all = report.applied >= index;
        if names_us && knows_all && is_in_force(filling, leader, *epoch).await {
            return Ok(report);
        }
        tokio::time::sleep(REPORT_PAUSE).await;
    }
    Err(DataError::Busy)
}

/// Whether a configuration that was reported is the newest there: that one may be below the snapshot too. Not by
/// asking for a licence: a leader may need this very replica to become one that can give it.
async fn is_in_force(filling: &Filling, leader: NodeId, epoch: Epoch) -> bool {
    let partition = filling.partition;
    // Of no extent that there is.
    let extents = vec![ExtentId(u64::MAX)];
    let request = DataRequest::ExtentInfo { partition, epoch, extents, after: None };
    filling.shared.ask_node(leader, &request, Bytes::new(), ASK_WAIT).await.is_ok()
}

async fn report_of(filling: &Filling, leader: NodeId) -> Result<DataPartitionReport, DataError> {
    let answer =
        filling.shared.ask_node(leader, &DataRequest::Report, Bytes::new(), ASK_WAIT).await?;
    let (DataAnswer::Report(report), _) = answer else { return Err(DataError::Invalid) };
    let mut partitions = report.partitions.into_iter();
    let found = partitions.find(|report| report.partition == filling.partition);
    found.ok_or(DataError::WrongPartition)
}
