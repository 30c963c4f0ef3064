//! Bytes on data nodes that were never published: may they be deleted?
//!
//! # Why a `Delete` is safe
//!
//! It is wrong only if a file refers to the bytes later, and only a `Publish` by the session that
//! wrote them makes one. The verdict is `Delete` when the inode does not refer to them *and* the
//! session does not live here. A session that does not live publishes nothing (`UnknownSession`),
//! and cannot come to life: one that ended is remembered and not opened again, and one that was
//! never here is put among the ended by the entry that decides ([`Command::JudgeOffers`]). So the
//! decision has a place in the log; every publish of the session lies before it, and was seen.
//!
//! An inode that does not exist was deleted, as bytes are written for inodes that exist; its id is
//! never given again. Nothing can refer to its bytes, whoever wrote them and whether or not they
//! live: so a client that keeps running does not keep the bytes of files that are gone.
//!
//! What is decided is decided for every replica: each offers what it holds, but perhaps at another
//! time, or not any more. So the bytes go on the free list, like those of a deleted file.
//!
//! Clients, for their part, open their session in an inode's partition before they write bytes for
//! that inode.
//!
//! [`Command::JudgeOffers`]: super::Command::JudgeOffers

use milpa_types::MetaError;
use milpa_wire::meta::{ExtentOffer, MetaAnswer, MetaReply, Verdict};

use super::Partition;
use super::participant::forget_oldest;

/// Offers in one entry, at most.
const OFFERS_MAX: usize = 4096;

impl Partition {
    pub(crate) fn judge(&self, offer: &ExtentOffer) -> Verdict {
        if !self.owns(offer.inode) {
            // Sent to the wrong partition: nothing is known here, so nothing is deleted.
            Verdict::Wait
        } else if self.refers_to(offer.inode, &offer.range) {
            Verdict::Keep
        } else if !self.tables.inodes.contains(&offer.inode) {
            // Deleted: ids are never reused, so no publish can ever name these bytes.
            Verdict::Delete
        } else if self.tables.sessions.contains(&offer.session) {
            Verdict::Wait
        } else {
            Verdict::Delete
        }
    }

    pub(crate) fn judge_offers(&mut self, index: u64, offers: &[ExtentOffer]) -> MetaReply {
        if offers.len() > OFFERS_MAX {
            return Err(MetaError::Invalid);
        }
        let verdicts: Vec<_> = offers.iter().map(|offer| self.judge(offer)).collect();
        let judged = offers.iter().zip(&verdicts);
        for (offer, _) in judged.filter(|(_, verdict)| **verdict == Verdict::Delete) {
            let lives = self.tables.sessions.contains(&offer.session);
            let ended = &mut self.tables.ended_sessions;
            if !lives && !ended.contains(&offer.session) {
                ended.insert(&offer.session, &index);
            }
            self.tables.free(&mut self.counters.next_order, offer.range);
        }
        forget_oldest(&mut self.tables.ended_sessions);
        Ok(MetaAnswer::Verdicts(verdicts))
    }
}
