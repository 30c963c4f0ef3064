//! Nodes that were slow, this one among them, and are written to no more are asked, again and again, to write a block: so that it is known
//! when they are fast again, and one stall is not held against them for long (docs/decisions/0014).

use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::{now_ms, now_us};
use milpa_host::disk::{File, Open};
use milpa_types::{BLOCK_BYTES, DataError, NodeId};
use milpa_wire::data::DataRequest;
use tokio::task::JoinSet;

use super::disk::Disk;
use super::shared::Shared;

/// Between two probes of a node.
const PAUSE: Duration = Duration::from_millis(500);
/// Who has not written a block by then is as slow as that. No probe waits longer for its turn.
const WAIT: Duration = Duration::from_secs(2);
/// Probes that a node carries out at a time: each writes to all of its disks, and takes a thread that flushes.
pub(crate) const PROBES_MAX: usize = 2;
/// The block that a disk writes for a probe.
const FILE: &str = "probe";

/// Probes whoever was slow, until the node ends.
pub(crate) async fn probe_for_ever(shared: Rc<Shared>) -> Infallible {
    let mut turns = tokio::time::interval(PAUSE);
    turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        turns.tick().await;
        let suspects = shared.peers.borrow().suspects(now_ms(), PAUSE);
        let mut asked: JoinSet<()> = JoinSet::new();
        for node in suspects {
            let shared = Rc::clone(&shared);
            asked.spawn_local(async move { ask(shared, node).await });
        }
        while asked.join_next().await.is_some() {}
    }
}

async fn ask(shared: Rc<Shared>, node: NodeId) {
    let sent_us = now_us();
    let answer = match node == shared.node {
        true => tokio::time::timeout(WAIT, probe(Rc::clone(&shared)))
            .await
            .unwrap_or(Err(DataError::MemberSilent { node })),
        false => shared.ask_node(node, &DataRequest::Probe, Bytes::new(), WAIT).await.map(|_| ()),
    };
    let took_us = now_us().saturating_sub(sent_us);
    shared.peers.borrow_mut().note(node, &answer, took_us, now_ms());
}

/// Answers a probe: when a block is on each of the node's disks that are in service.
///
/// # Errors
///
/// [`DataError::Busy`] when no turn came in the time that askers wait, as a disk hangs perhaps; what a disk that
/// failed says.
pub(crate) async fn probe(shared: Rc<Shared>) -> Result<(), DataError> {
    let turn = tokio::time::timeout(WAIT, shared.probes.acquire()).await;
    let _turn = turn.map_err(|_| DataError::Busy)?.map_err(|_| DataError::Busy)?;
    let disks = shared.disks.borrow().len();
    let mut writing = JoinSet::new();
    for disk in 0..disks {
        let shared = Rc::clone(&shared);
        writing.spawn_local(async move { write_block(&shared, disk).await });
    }
    let mut result = Ok(());
    while let Some(written) = writing.join_next().await {
        result = result.and(written.ok().flatten().unwrap_or(Err(DataError::Busy)));
    }
    result
}

/// `None` if the disk's task is gone.
async fn write_block(shared: &Shared, disk: usize) -> Option<Result<(), DataError>> {
    let describe = |disk: &mut Disk| {
        let in_service = !disk.is_fenced();
        in_service.then(|| (disk.directory.join(FILE), Arc::clone(&disk.store_disk)))
    };
    let Some((file, store_disk)) = shared.ask_disk(disk, describe).await? else {
        return Some(Ok(()));
    };
    let write = move || {
        let block = [0; BLOCK_BYTES as usize];
        let file =
            File::open(&file, Open::Empty).map_err(|error| store_disk.open_failed(&error))?;
        file.write_at(&block, 0)
            .map_err(|error| store_disk.write_failed("write a probe", &error))?;
        file.sync().map_err(|error| store_disk.sync_failed(&error))
    };
    let written = shared.run_slow(disk, write).await?;
    Some(written.map_err(DataError::from))
}
