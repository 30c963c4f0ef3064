//! Offers unpublished bytes to their inodes' partitions, and deletes what nobody wants. Slowly:
//! one partition after the other, a few extents at a time.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::now_ms;
use milpa_types::{
    ExtentId, FreedRange, MetaError, MetaSlot, NodeId, PartitionId, Role, VolumeId, VolumeView,
};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};
use milpa_wire::meta::{ExtentOffer, MetaAnswer, MetaReply, MetaRequest, Verdict};

use crate::offers::Outcome;
use crate::store::StoreError;

use super::disk::Disk;
use super::service::free_everywhere;
use super::shared::Shared;

/// Between two rounds over the partitions.
const ROUND_MIN: Duration = Duration::from_millis(250);
const ROUND_MAX: Duration = Duration::from_secs(5);
/// Extents of one partition in one round.
const EXTENTS_MAX: usize = 64;
/// Pieces of one shared extent in one round.
const PIECES_MAX: usize = 512;
/// How long a volume's routes are believed.
const VIEW_MS: u64 = 30_000;
const ASK_WAIT: Duration = Duration::from_secs(3);
/// Leaders that are tried for one question.
const HOPS_MAX: usize = 4;

/// An extent, or pieces of one.
struct Question {
    extent: ExtentId,
    offers: Vec<ExtentOffer>,
    /// Where further pieces begin.
    next: Option<u64>,
}

/// Routes of volumes, as last fetched.
#[derive(Default)]
struct Views {
    views: BTreeMap<VolumeId, (u64, Box<VolumeView>)>,
}

/// Runs until the node ends.
pub(crate) async fn offer_for_ever(shared: Rc<Shared>) -> Infallible {
    let mut views = Views::default();
    // Nothing is due sooner than that, and each round looks at all extents.
    let round =
        Duration::from_millis(shared.config.writer_silent_ms / 8).max(ROUND_MIN).min(ROUND_MAX);
    loop {
        tokio::time::sleep(round).await;
        let partitions: Vec<(PartitionId, usize)> =
            shared.routes.borrow().iter().map(|(id, disk)| (*id, *disk)).collect();
        for (partition, disk) in partitions {
            offer_some(&shared, &mut views, partition, disk).await;
        }
    }
}

async fn offer_some(
    shared: &Rc<Shared>,
    views: &mut Views,
    partition: PartitionId,
    disk: usize,
) -> Option<()> {
    let silent_ms = shared.config.writer_silent_ms;
    let store = shared.ask_disk(disk, move |disk| disk.store_of(partition)).await??;
    let list = store.clone();
    let held = shared.run_slow(disk, move || list.held()).await?;
    let pick = move |disk: &mut Disk| {
        let replica = disk.partitions.get_mut(&partition)?;
        let due = replica.offers.due(&held, now_ms(), silent_ms, EXTENTS_MAX);
        Some((due, replica.state.volume))
    };
    let (due, volume) = shared.ask_disk(disk, pick).await??;
    if due.is_empty() {
        return None;
    }
    let questions = shared.run_slow(disk, move || {
        let question = |(extent, from)| (extent, question(&store, partition, extent, from));
        due.into_iter().map(question).collect()
    });
    let questions: Vec<(ExtentId, Result<Question, StoreError>)> = questions.await?;
    for (extent, question) in questions {
        let outcome = match question {
            Ok(question) => ask(shared, views, volume, &question).await,
            Err(error) => {
                // Repair first, then ask again.
                let note = move |disk: &mut Disk| disk.note_damage(partition, extent, &error);
                shared.ask_disk(disk, note).await;
                Outcome::Later
            }
        };
        let note = move |disk: &mut Disk| {
            if let Some(replica) = disk.partitions.get_mut(&partition) {
                replica.offers.answered(extent, outcome, now_ms());
            }
        };
        shared.ask_disk(disk, note).await;
    }
    Some(())
}

/// What there is to ask about an extent. On a disk thread.
fn question(
    store: &crate::store::ExtentStore,
    partition: PartitionId,
    extent: ExtentId,
    from: u64,
) -> Result<Question, StoreError> {
    if extent.is_small() {
        let (pieces, next) = store.live_pieces(extent, from, PIECES_MAX)?;
        let offers = pieces.iter().map(|piece| ExtentOffer {
            inode: piece.header.inode,
            session: piece.header.session,
            range: FreedRange {
                partition,
                extent,
                offset: piece.offset,
                length: u64::from(piece.header.length),
            },
        });
        return Ok(Question { extent, offers: offers.collect(), next });
    }
    let owners = store.states(&[extent]).into_iter().filter(|state| state.inode.0 != 0);
    let offers = owners.map(|state| ExtentOffer {
        inode: state.inode,
        session: state.session,
        range: FreedRange { partition, extent, offset: 0, length: u64::MAX },
    });
    Ok(Question { extent, offers: offers.collect(), next: None })
}

async fn ask(
    shared: &Rc<Shared>,
    views: &mut Views,
    volume: VolumeId,
    question: &Question,
) -> Outcome {
    let mut by_slot: BTreeMap<MetaSlot, Vec<ExtentOffer>> = BTreeMap::new();
    for offer in &question.offers {
        by_slot.entry(offer.inode.slot()).or_default().push(*offer);
    }
    let mut waits = false;
    for (slot, offers) in by_slot {
        let Some(verdicts) = ask_partition(shared, views, volume, slot, &offers).await else {
            return Outcome::Later;
        };
        let judged = offers.iter().zip(&verdicts);
        let unwanted: Vec<FreedRange> = judged
            .filter(|(_, verdict)| **verdict == Verdict::Delete)
            .map(|(offer, _)| offer.range)
            .collect();
        if !unwanted.is_empty() {
            tracing::info!(extent = %question.extent, ranges = unwanted.len(),
                "deleting bytes that no file got");
            waits |= free_everywhere(shared, unwanted).await.is_err();
        }
        waits |= verdicts.contains(&Verdict::Wait) || verdicts.len() != offers.len();
    }
    match waits {
        true => Outcome::Waits(question.next),
        false => question.next.map_or(Outcome::Settled, Outcome::UpTo),
    }
}

/// Asks the leader of the inode's partition. `None` if nobody says anything.
async fn ask_partition(
    shared: &Rc<Shared>,
    views: &mut Views,
    volume: VolumeId,
    slot: MetaSlot,
    offers: &[ExtentOffer],
) -> Option<Vec<Verdict>> {
    let view = views.get(shared, volume).await?;
    let partition = view.meta.iter().find(|partition| partition.slot == slot)?;
    let address = |node: NodeId| view.nodes.iter().find(|n| n.id == node).map(|n| n.address);
    let request = MetaRequest::OfferExtents { partition: partition.id, offers: offers.to_vec() };
    let mut others = partition.members.iter().copied();
    let mut next = partition.leader.or_else(|| others.next());
    for _ in 0..HOPS_MAX {
        let target = next.take()?;
        let called = match address(target) {
            Some(address) => shared
                .pool
                .call::<_, MetaReply>(address, Role::Meta, &request, Bytes::new(), ASK_WAIT)
                .await
                .ok(),
            None => None,
        };
        next = match called {
            Some((Ok(MetaAnswer::Verdicts(verdicts)), _)) => return Some(verdicts),
            Some((Err(MetaError::NotLeader { leader }), _)) => leader.or_else(|| others.next()),
            Some(_) => return None,
            None => others.next(),
        };
    }
    None
}

impl Views {
    async fn get(&mut self, shared: &Shared, volume: VolumeId) -> Option<&VolumeView> {
        let now = now_ms();
        let known = self.views.get(&volume).map(|(fetched, _)| *fetched);
        if known.is_none_or(|fetched| now.saturating_sub(fetched) > VIEW_MS) {
            let request = ManagerRequest::GetVolumeById { volume };
            if let Ok(ManagerAnswer::Volume(view)) = shared.managers.call(&request, ASK_WAIT).await
            {
                self.views.insert(volume, (now, view));
            }
        }
        self.views.get(&volume).map(|(_, view)| &**view)
    }
}
