//! Sessions and the request-id table: every request is applied once.
//!
//! A session is opened once and ends once. Its end is remembered, so that no delayed message opens
//! it again with an empty request-id table and has an old request executed a second time. (The
//! last 2,048 ends at least are remembered: a message would have to be later than that.) A client
//! that is told `UnknownSession` goes on under a *new* session id and repeats nothing; least of all
//! a publish, which under a new id could bring segments back whose bytes are being freed.

use milpa_types::{InodeId, MetaError, SessionId, Timestamp};
use milpa_wire::meta::{MetaAnswer, MetaReply, RequestId};

use super::Partition;
use super::command::Outcome;
use super::engine::is_retried;
use super::participant::forget_oldest;
use super::table::{Answer, Number, Session};

/// How far a sequence may be above the lowest unanswered one.
const UNANSWERED_MAX: u64 = 256;
/// Sessions in one partition, at most.
pub(super) const SESSIONS_MAX: u64 = 65_536;

impl Partition {
    pub(crate) fn open_session(&mut self, id: SessionId, now: Timestamp) -> MetaReply {
        if self.tables.ended_sessions.contains(&id) {
            return Err(MetaError::UnknownSession);
        }
        let session = self.tables.sessions.get(&id);
        if session.is_none() && self.tables.sessions.count() >= SESSIONS_MAX {
            return Err(MetaError::Busy);
        }
        let unanswered = session.map_or(0, |session| session.unanswered);
        self.tables.sessions.insert(&id, &Session { is_opened: true, unanswered });
        self.date_root(now);
        Ok(MetaAnswer::Done)
    }

    /// The root is made by no client; its first user's clock dates it.
    fn date_root(&mut self, now: Timestamp) {
        if let Some(mut root) = self.tables.inodes.get(&InodeId::ROOT)
            && root.changed == Timestamp(0)
        {
            (root.accessed, root.modified, root.changed) = (now, now, now);
            self.tables.inodes.insert(&InodeId::ROOT, &root);
        }
    }

    /// Ends a session: what it held open goes. Ending it again, or one that never was, is
    /// harmless.
    pub(crate) fn end_session(&mut self, index: u64, id: SessionId) -> MetaReply {
        if !self.tables.ended_sessions.contains(&id) {
            self.tables.ended_sessions.insert(&id, &index);
            forget_oldest(&mut self.tables.ended_sessions);
        }
        self.tables.sessions.remove(&id);
        let answers = self.tables.answers.range(&id).take_while(|(key, _)| key.0 == id);
        for (key, _) in answers.collect::<Vec<_>>() {
            self.tables.answers.remove(&key);
        }
        let held = self.tables.held.iter().filter(|(key, ())| key.1 == id);
        for ((inode, _), ()) in held.collect::<Vec<_>>() {
            self.release(inode, id);
        }
        Ok(MetaAnswer::Done)
    }

    /// The outcome to give at once to a request that is not to be executed: a repeat, or a wrong
    /// one. `None` admits it.
    pub(crate) fn refuse(&mut self, id: &RequestId) -> Option<Outcome> {
        let refuse = |error| Some(Outcome::Reply(Err(error)));
        let session = self.tables.sessions.get(&id.session).filter(|session| session.is_opened);
        let Some(session) = session else {
            return refuse(MetaError::UnknownSession);
        };
        if let Some(outcome) = self.recorded(id) {
            return Some(outcome);
        }
        if id.sequence < session.unanswered {
            return refuse(MetaError::Stale);
        }
        let unanswered = id.unanswered.max(session.unanswered);
        if unanswered > id.sequence || id.sequence - unanswered > UNANSWERED_MAX {
            return refuse(MetaError::Invalid);
        }
        if unanswered > session.unanswered {
            self.tables.sessions.insert(&id.session, &Session { unanswered, ..session });
            self.forget_answers(id.session, unanswered);
        }
        None
    }

    /// What the request-id table knows of a request.
    pub(crate) fn recorded(&self, id: &RequestId) -> Option<Outcome> {
        match self.tables.answers.get(&(id.session, Number(id.sequence)))? {
            Answer::Final(reply) => Some(Outcome::Reply(reply)),
            Answer::Running(operation) => Some(Outcome::Deferred(operation)),
        }
    }

    fn forget_answers(&mut self, session: SessionId, below: u64) {
        let old = self.tables.answers.range(&session);
        let old = old.take_while(|(key, _)| key.0 == session && key.1.0 < below);
        // A running one is forgotten when it ends.
        let old = old.filter(|(_, answer)| matches!(answer, Answer::Final(_)));
        for (key, _) in old.collect::<Vec<_>>() {
            self.tables.answers.remove(&key);
        }
    }

    /// Remembers the outcome of a request, unless nobody will ask for it.
    pub(crate) fn record(&mut self, id: &RequestId, outcome: &Outcome) {
        match outcome {
            Outcome::Reply(reply) => self.record_answer(id, reply),
            Outcome::Deferred(operation) => {
                let key = (id.session, Number(id.sequence));
                self.tables.answers.insert(&key, &Answer::Running(*operation));
            }
        }
    }

    /// Remembers a reply. One that says "again later" is not kept: nothing was changed, and the
    /// repeat is to be executed.
    pub(crate) fn record_answer(&mut self, id: &RequestId, reply: &MetaReply) {
        let key = (id.session, Number(id.sequence));
        let session = self.tables.sessions.get(&id.session);
        if session.is_some_and(|session| id.sequence >= session.unanswered) && !is_retried(reply) {
            self.tables.answers.insert(&key, &Answer::Final(reply.clone()));
        } else {
            self.tables.answers.remove(&key);
        }
    }
}
