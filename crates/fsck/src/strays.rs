//! Extents to which no file refers: are they on their way out, or has everybody forgotten them?
//!
//! # How bytes without a file go
//!
//! * What a file gives back waits on the free list of its inode's partition until every replica of the
//!   data partition has freed it.
//! * What was never published is offered to that partition by each data node that holds it, a minute after the
//!   last append (`writer_silent_ms`), and again a minute later while its writer's session lives.
//!
//! So most extents without a file are nothing wrong. A *stray* is one that neither way takes:
//!
//! 1. No file refers to it, and none ever will: its inode's partition would have it deleted. That is of one
//!    log index, and final, as sessions end for ever and inode ids are given once.
//! 2. It does not wait on the free list: the list was seen empty after that, and the bytes are there all
//!    the same. What no file refers to comes on the list by an offer only.
//! 3. Nobody has offered it for longer than an offer takes.
//!
//! Or the volume has no meta partition for its inode: then there is nobody to whom it could be offered.
//!
//! # What is deliberately absent
//!
//! Pieces of small extents: whose they are, only data nodes can tell. Bytes of an extent to other bytes of which
//! its file refers: data nodes offer such an extent whole, when the file has given it back.

use std::collections::BTreeMap;
use std::time::Duration;

use milpa_host::clock::Instant;
use milpa_types::{ExtentId, FreedRange, InodeId, MetaSlot, NodeId, SessionId};
use milpa_wire::check::{CHECK_INODES_MAX, MetaCheck, MetaChecked};
use milpa_wire::data::ExtentState;
use milpa_wire::meta::{ExtentOffer, Verdict as Offered};

use crate::ask::{FsckError, Servers, strange};
use crate::bytes::{Extents, replicas};
use crate::check::{Found, Stage};
use crate::extents::{Place, Replica};
use crate::finding::of_strays;

/// How long a data node may take to offer bytes of no file, by its usual settings: a minute of silence, a minute
/// until it asks again when a session lived or a leader was away, and a minute for its rounds.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Extents without a file that are looked at: 5 MiB. Of the others only their number is told.
const CANDIDATES_MAX: usize = 65_536;
/// At least so many looks.
const LOOKS: u32 = 3;
/// Between two looks: what is being deleted is gone after the first pauses, what waits for an offer takes a
/// minute.
const PAUSE_FIRST: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Extents to which no file referred when they were listed.
#[derive(Default)]
pub(crate) struct Unreferenced {
    extents: BTreeMap<Place, (InodeId, SessionId)>,
}

impl Unreferenced {
    pub(crate) fn add(&mut self, place: Place, state: &ExtentState) {
        if !place.1.is_small() && self.extents.len() < CANDIDATES_MAX {
            self.extents.insert(place, (state.inode, state.session));
        }
    }

    fn take(&mut self) -> Vec<Candidate> {
        let extents = std::mem::take(&mut self.extents).into_iter();
        extents.map(|(place, (inode, session))| Candidate::new(place, inode, session)).collect()
    }
}

/// Who holds bytes of an extent that are not freed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// The most that one of them holds.
    pub bytes: u64,
    pub nodes: Vec<NodeId>,
}

impl Held {
    fn of(extent: ExtentId, replicas: &[Replica]) -> Held {
        let live = replicas.iter().map(|replica| (replica.node, replica.live_bytes(extent)));
        let live: Vec<(NodeId, u64)> = live.filter(|(_, bytes)| *bytes > 0).collect();
        let bytes = live.iter().map(|(_, bytes)| *bytes).max().unwrap_or_default();
        Held { bytes, nodes: live.into_iter().map(|(node, _)| node).collect() }
    }
}

/// What the inode's partition says of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    /// A file refers to it, or may do so yet.
    Wanted,
    /// None ever will.
    Unwanted {
        /// Nothing at all waited to be freed, just after that was said.
        is_list_empty: bool,
    },
    /// There is no such partition.
    Nobody,
}

/// What looks say of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It is gone, or nothing is wrong.
    Sound,
    /// Somebody may be about to free it.
    Unsure,
    /// Nobody does.
    Stray,
}

/// An extent that is being looked at.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub place: Place,
    pub inode: InodeId,
    session: SessionId,
    /// As of the last look.
    pub held: Held,
    /// Looks at which no file wanted it, all in a row.
    looks: u32,
    /// Of them those, the last ones, at which there was nobody to ask.
    looks_homeless: u32,
    /// It was seen not to be on the free list.
    is_off_list: bool,
}

impl Candidate {
    fn new(place: Place, inode: InodeId, session: SessionId) -> Candidate {
        let (held, looks, looks_homeless) = (Held::default(), 0, 0);
        Candidate { place, inode, session, held, looks, looks_homeless, is_off_list: false }
    }

    /// Whether there is nobody to whom it could be offered.
    pub(crate) fn is_homeless(&self) -> bool {
        self.looks_homeless > 0
    }

    /// Takes another look in: who held it, and what was said of it afterwards. `is_late`: the first look is
    /// longer ago than an offer takes.
    fn look(&mut self, held: Held, word: Word, is_late: bool) -> Verdict {
        // That the list was empty says something of bytes that are there later.
        let was_off_list = self.is_off_list;
        match word {
            Word::Wanted => return Verdict::Sound,
            Word::Unwanted { is_list_empty } => {
                self.looks_homeless = 0;
                self.is_off_list |= is_list_empty;
            }
            Word::Nobody => self.looks_homeless += 1,
        }
        (self.looks, self.held) = (self.looks + 1, held);
        if self.held.bytes == 0 {
            Verdict::Sound
        } else if self.looks_homeless >= LOOKS
            || (self.looks >= LOOKS && was_off_list && is_late && !self.is_homeless())
        {
            Verdict::Stray
        } else {
            Verdict::Unsure
        }
    }

    fn offer(&self) -> ExtentOffer {
        let (partition, extent) = self.place;
        let range = FreedRange { partition, extent, offset: 0, length: u64::MAX };
        ExtentOffer { inode: self.inode, session: self.session, range }
    }
}

/// Looks at extents without a file until each is gone, wanted, or a stray; for `patience` at most, and as
/// long as looks take. Whatever may still be on its way then is none.
pub(crate) async fn judge(
    servers: &mut Servers<'_>,
    found: &mut Found<'_>,
    patience: Duration,
) -> Result<(), FsckError> {
    let (mut left, mut strays) = (found.unreferenced.take(), Vec::new());
    let (started, mut looks, mut pause) = (Instant::now(), 0, PAUSE_FIRST);
    while !left.is_empty() {
        found.tell(Stage::Strays);
        let is_late = started.elapsed() >= patience;
        let looked = look(servers, &left).await?;
        let mut unsure = Vec::new();
        for (mut candidate, (held, word)) in left.into_iter().zip(looked) {
            match candidate.look(held, word, is_late) {
                Verdict::Sound => {}
                Verdict::Unsure => unsure.push(candidate),
                Verdict::Stray => strays.push(candidate),
            }
        }
        (left, looks) = (unsure, looks + 1);
        if left.is_empty() || (is_late && looks >= LOOKS) {
            break;
        }
        tokio::time::sleep(pause).await;
        pause = pause.saturating_mul(2).min(PAUSE_MAX);
    }
    let mut by_inode: BTreeMap<InodeId, Vec<Candidate>> = BTreeMap::new();
    for stray in strays {
        by_inode.entry(stray.inode).or_default().push(stray);
    }
    for (inode, strays) in by_inode {
        found.add(of_strays(inode, &strays, started.elapsed()));
    }
    Ok(())
}

/// Who holds each of these extents, which are in order, and what is said of it afterwards.
async fn look(
    servers: &mut Servers<'_>,
    candidates: &[Candidate],
) -> Result<Vec<(Held, Word)>, FsckError> {
    servers.refresh().await?;
    let mut held = Vec::new();
    for of_one in candidates.chunk_by(|one, next| one.place.0 == next.place.0) {
        let Some(partition) = of_one.first().map(|candidate| candidate.place.0) else { continue };
        let extents: Vec<ExtentId> = of_one.iter().map(|candidate| candidate.place.1).collect();
        let replicas = replicas(servers, partition, &extents, Extents::Referred).await?;
        held.extend(extents.iter().map(|extent| Held::of(*extent, &replicas)));
    }
    let words = words(servers, candidates).await?;
    Ok(held.into_iter().zip(words).collect())
}

async fn words(
    servers: &mut Servers<'_>,
    candidates: &[Candidate],
) -> Result<Vec<Word>, FsckError> {
    let mut by_slot: BTreeMap<MetaSlot, Vec<(usize, ExtentOffer)>> = BTreeMap::new();
    for (at, candidate) in candidates.iter().enumerate() {
        by_slot.entry(candidate.inode.slot()).or_default().push((at, candidate.offer()));
    }
    let mut words = vec![Word::Nobody; candidates.len()];
    for (slot, offers) in by_slot {
        let home = servers.view().meta.iter().find(|meta| meta.slot == slot);
        let Some(partition) = home.map(|meta| meta.id) else { continue };
        for some in offers.chunks(CHECK_INODES_MAX) {
            let check =
                MetaCheck::Offers { offers: some.iter().map(|(_, offer)| *offer).collect() };
            let MetaChecked::Offers(verdicts) = servers.check(partition, check).await? else {
                return Err(strange(partition));
            };
            if verdicts.len() != some.len() {
                return Err(strange(partition));
            }
            let is_list_empty = servers.statistics(partition).await?.freed_waiting == 0;
            for ((at, _), verdict) in some.iter().zip(verdicts) {
                if let Some(word) = words.get_mut(*at) {
                    *word = match verdict {
                        Offered::Keep | Offered::Wait => Word::Wanted,
                        Offered::Delete => Word::Unwanted { is_list_empty },
                    };
                }
            }
        }
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use milpa_types::{Epoch, PartitionId};

    const EMPTY: Word = Word::Unwanted { is_list_empty: true };
    const BUSY: Word = Word::Unwanted { is_list_empty: false };

    fn held(bytes: u64) -> Held {
        Held { bytes, nodes: vec![NodeId(4)] }
    }

    /// The last verdict after looks with these words, bytes held, and whether patience was over.
    #[track_caller]
    fn check(looks: &[(Word, u64, bool)], expected: Verdict) {
        let place = (PartitionId(1), ExtentId(3));
        let mut candidate = Candidate::new(place, InodeId(5), SessionId(7));
        let mut verdict = Verdict::Unsure;
        for (word, bytes, is_late) in looks {
            assert_eq!(verdict, Verdict::Unsure, "judged before its last look: {looks:?}");
            verdict = candidate.look(held(*bytes), *word, *is_late);
        }
        assert_eq!(verdict, expected, "{looks:?}");
    }

    #[test]
    fn verdicts_table() {
        let (early, late) = (false, true);
        check(&[(EMPTY, 9, early), (EMPTY, 9, early), (EMPTY, 9, late)], Verdict::Stray);
        // Gone, freed in part or whole, or wanted by then.
        check(&[(EMPTY, 9, early), (EMPTY, 9, early), (EMPTY, 0, late)], Verdict::Sound);
        check(&[(Word::Wanted, 9, early)], Verdict::Sound);
        check(&[(EMPTY, 9, early), (EMPTY, 9, early), (Word::Wanted, 9, late)], Verdict::Sound);
        // Somebody may still offer it.
        check(&[(EMPTY, 9, early); 9], Verdict::Unsure);
        // Too few looks.
        check(&[(EMPTY, 9, late), (EMPTY, 9, late)], Verdict::Unsure);
        check(&[(EMPTY, 9, late); 3], Verdict::Stray);
    }

    /// What a list that is never empty says of an extent is: it may be on it.
    #[test]
    fn what_may_wait_on_the_free_list_is_no_stray() {
        check(&[(BUSY, 9, true); 9], Verdict::Unsure);
        // Empty, but who held it was asked before.
        check(
            &[(BUSY, 9, true), (BUSY, 9, true), (BUSY, 9, true), (EMPTY, 9, true)],
            Verdict::Unsure,
        );
        check(&[(BUSY, 9, true), (EMPTY, 9, true), (BUSY, 9, true)], Verdict::Stray);
    }

    /// Nobody can free it, however long one waits; but its partition may have opened just now.
    #[test]
    fn an_extent_without_a_partition_to_be_offered_to_is_a_stray_at_once() {
        let nobody = Word::Nobody;
        check(&[(nobody, 9, false); 3], Verdict::Stray);
        check(&[(nobody, 9, false), (nobody, 9, false), (Word::Wanted, 9, false)], Verdict::Sound);
        check(&[(nobody, 9, false), (nobody, 9, false), (EMPTY, 9, false)], Verdict::Unsure);
        check(&[(nobody, 9, true), (EMPTY, 9, true), (nobody, 9, true)], Verdict::Unsure);
    }

    #[test]
    fn what_is_held_is_what_is_not_freed() {
        let (extent, session) = (ExtentId(3), SessionId(7));
        let state = |length| ExtentState {
            extent,
            epoch: Epoch(1),
            inode: InodeId(5),
            session,
            length,
            committed: length,
            sealed: false,
            overwritten: false,
        };
        let replica = |node, length, freed: &[(u64, u64)]| Replica {
            node: NodeId(node),
            extents: [(extent, state(length))].into(),
            freed: [(extent, freed.to_vec())].into(),
            ..Replica::default()
        };
        let none = Replica { node: NodeId(9), ..Replica::default() };
        let held = |replicas: &[Replica]| Held::of(extent, replicas);
        assert_eq!(held(std::slice::from_ref(&none)), Held::default());
        assert_eq!(held(&[replica(4, 100, &[(0, u64::MAX)])]), Held::default());
        assert_eq!(held(&[replica(4, 100, &[(0, 40), (60, 100)])]).bytes, 20);
        let some =
            [replica(4, 100, &[(0, 100)]), replica(5, 90, &[(0, 10)]), none, replica(6, 100, &[])];
        assert_eq!(held(&some), Held { bytes: 100, nodes: vec![NodeId(5), NodeId(6)] });
    }

    /// Small extents hold pieces of many files; and memory is bounded.
    #[test]
    fn not_every_extent_without_a_file_is_looked_at() {
        let state = ExtentState {
            extent: ExtentId(0),
            epoch: Epoch(1),
            inode: InodeId(5),
            session: SessionId(7),
            length: 1,
            committed: 1,
            sealed: false,
            overwritten: false,
        };
        let mut unreferenced = Unreferenced::default();
        unreferenced.add((PartitionId(1), ExtentId::small(1)), &state);
        assert!(unreferenced.take().is_empty());
        for extent in 0..CANDIDATES_MAX as u64 + 10 {
            unreferenced.add((PartitionId(1), ExtentId(extent)), &state);
        }
        assert_eq!(unreferenced.take().len(), CANDIDATES_MAX);
    }
}
