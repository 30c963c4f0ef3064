//! The ordering side of an append.

mod ending;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use milpa_types::{DataError, EXTENT_BYTES_MAX, ExtentId, InodeId, NodeId, SessionId};
use milpa_wire::data::{AppendTarget, Configuration, ExtentState, TRANSFER_BYTES_MAX};

use super::tokens::{Token, TokenPlace, Tokens};
use super::{AppendHead, Effect, Limits, OperationNumber, Placed, RequestNumber, Start};

/// How many broken extents are remembered with their commit offset.
const BROKEN_MAX: usize = 4096;
/// Ids that are reserved at once: one small durable write for so many extents.
const IDS_RESERVED: u32 = 16_384;
/// After a member was silent, new extents are refused at once for this long: each would stall a
/// client until its deadline. Then one may try.
const SUSPECT_MS: u64 = 500;
/// A member that did not hear of a commit offset is told again after this long.
pub(super) const ANNOUNCE_PAUSE_MS: u64 = 500;

/// Orders the appends of one partition in one epoch.
#[derive(Debug)]
pub struct Primary {
    node: NodeId,
    configuration: Configuration,
    limits: Limits,
    extents: BTreeMap<ExtentId, Open>,
    /// The commit offsets of extents that broke or were closed, for late appends to them.
    ended: BTreeMap<ExtentId, u64>,
    operations: BTreeMap<OperationNumber, ExtentId>,
    next_operation: OperationNumber,
    tokens: Tokens,
    small: Option<ExtentId>,
    /// Pieces that wait for the operation of the shared extent under way.
    gathered: VecDeque<Piece>,
    ids: IdRange,
    /// Requests not yet answered.
    requests: usize,
    /// Members that did not answer, and until when they are not tried.
    suspects: BTreeMap<NodeId, u64>,
    /// Why nothing is accepted, if so: the disk is full or failed.
    refusal: Option<DataError>,
    /// While somebody compares the members: extents that take appends since that began.
    watched: Option<BTreeSet<ExtentId>>,
    now_ms: u64,
}

#[derive(Debug, Default)]
struct IdRange {
    next: u32,
    until: u32,
    asked: bool,
}

/// One small file's bytes before they have a place.
#[derive(Clone, Copy, Debug)]
struct Piece {
    request: RequestNumber,
    token: Token,
    length: u64,
    sync: bool,
}

/// An extent that takes appends.
#[derive(Debug)]
struct Open {
    owner: (InodeId, SessionId),
    end: u64,
    committed: u64,
    announced: u64,
    /// When the commit offset may be announced again.
    announce_from_ms: u64,
    operations: VecDeque<Operation>,
    closing: bool,
    touched_ms: u64,
}

#[derive(Debug)]
struct Operation {
    number: OperationNumber,
    end: u64,
    waits_for: BTreeSet<NodeId>,
    started_ms: u64,
    sync: bool,
    /// Who is answered when it is committed.
    answers: Vec<Waiter>,
    /// Tokens whose place this operation makes.
    tokens: Vec<Token>,
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    request: RequestNumber,
    /// Where the payload's first byte is.
    offset: u64,
    /// The target named this extent; else the client does not know its id yet.
    knows_extent: bool,
}

impl Primary {
    /// Takes part in `configuration`; orders only if it is the primary there.
    #[must_use]
    pub fn new(node: NodeId, configuration: Configuration, limits: Limits) -> Primary {
        Primary {
            node,
            configuration,
            limits,
            extents: BTreeMap::new(),
            ended: BTreeMap::new(),
            operations: BTreeMap::new(),
            next_operation: 1,
            tokens: Tokens::default(),
            small: None,
            gathered: VecDeque::new(),
            ids: IdRange::default(),
            requests: 0,
            suspects: BTreeMap::new(),
            refusal: None,
            watched: None,
            now_ms: 0,
        }
    }

    /// A new epoch: everything under way ends, as sealed at what is committed.
    pub fn configure(&mut self, configuration: Configuration, effects: &mut Vec<Effect>) {
        assert!(configuration.epoch > self.configuration.epoch, "epochs only rise");
        let open: Vec<ExtentId> = self.extents.keys().copied().collect();
        for extent in open {
            self.end_extent(extent, None, effects);
        }
        self.configuration = configuration;
        let current = self.configuration.epoch;
        for piece in std::mem::take(&mut self.gathered) {
            self.answer(piece.request, Err(DataError::StaleEpoch { current }), effects);
        }
        self.tokens.clear();
        self.suspects.clear();
        self.small = None;
    }

    /// Refuses everything with this error from now on (disk full or failed), or accepts again.
    pub fn refuse(&mut self, error: Option<DataError>) {
        self.refusal = error;
    }

    /// Ids below `until` may be given; the first one that may is `next`.
    pub fn ids_reserved(&mut self, next: u32, until: u32) {
        self.ids.next = self.ids.next.max(next);
        self.ids.until = self.ids.until.max(until);
        self.ids.asked = false;
    }

    /// A client's append. `replica` tells what the store holds of the target extent; it is asked
    /// only if that one is not open.
    pub fn append(
        &mut self,
        request: RequestNumber,
        head: &AppendHead,
        replica: impl FnOnce() -> Option<ExtentState>,
        effects: &mut Vec<Effect>,
    ) {
        self.requests += 1;
        if let Err(error) = self.admit(head) {
            self.answer(request, Err(error), effects);
            return;
        }
        match head.target {
            AppendTarget::New { token } => self.append_new(request, head, token, effects),
            AppendTarget::Small { token } => self.append_small(request, head, token, effects),
            AppendTarget::Extent { extent, offset } => {
                self.append_more(request, head, (extent, offset), replica, effects);
            }
        }
    }

    fn admit(&self, head: &AppendHead) -> Result<(), DataError> {
        if head.epoch != self.configuration.epoch {
            return Err(DataError::StaleEpoch { current: self.configuration.epoch });
        }
        if self.configuration.primary != self.node {
            return Err(DataError::NotPrimary { hint: Some(self.configuration.primary) });
        }
        if self.configuration.members.len() < 2 {
            return Err(DataError::ReadOnly);
        }
        if let Some(error) = &self.refusal {
            return Err(error.clone());
        }
        if self.requests > self.limits.requests_max {
            return Err(DataError::Busy);
        }
        if head.length == 0 || head.length > TRANSFER_BYTES_MAX as u64 {
            return Err(DataError::Invalid);
        }
        Ok(())
    }

    fn append_new(
        &mut self,
        request: RequestNumber,
        head: &AppendHead,
        token: u64,
        effects: &mut Vec<Effect>,
    ) {
        let token = (head.session, token);
        match self.known(&token, head) {
            Err(error) => return self.answer(request, Err(error), effects),
            Ok(Some(place)) if self.repeat(request, head, place, effects) => return,
            Ok(_) => {}
        }
        let extent = match self.open(false, (head.inode, head.session), effects) {
            Ok(extent) => extent,
            Err(error) => return self.answer(request, Err(error), effects),
        };
        let end = head.length;
        let place = TokenPlace { extent: Some(extent), offset: 0, end, synced: head.sync };
        self.tokens.set(token, place, self.limits.tokens_max);
        let waiter = Waiter { request, offset: 0, knows_extent: false };
        self.start(extent, end, head.sync, vec![waiter], vec![token], vec![request], effects);
    }

    fn append_more(
        &mut self,
        request: RequestNumber,
        head: &AppendHead,
        (extent, offset): (ExtentId, u64),
        replica: impl FnOnce() -> Option<ExtentState>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(open) = self.extents.get_mut(&extent).filter(|open| !open.closing) else {
            let error = self.refusal_of_ended(extent, replica());
            return self.answer(request, Err(error), effects);
        };
        if open.owner != (head.inode, head.session) || extent.is_small() {
            return self.answer(request, Err(DataError::Invalid), effects);
        }
        let Some(end) = offset.checked_add(head.length).filter(|end| *end <= EXTENT_BYTES_MAX)
        else {
            return self.answer(request, Err(DataError::Invalid), effects);
        };
        let expected = open.end;
        if offset == expected {
            let waiter = Waiter { request, offset, knows_extent: true };
            self.start(extent, end, head.sync, vec![waiter], vec![], vec![request], effects);
        } else if end <= expected {
            let place = TokenPlace { extent: Some(extent), offset, end, synced: false };
            let repeated = self.repeat(request, head, place, effects);
            debug_assert!(repeated, "the extent is open and holds the bytes");
        } else {
            self.answer(request, Err(DataError::OutOfOrder { expected }), effects);
        }
    }

    fn refusal_of_ended(&self, extent: ExtentId, replica: Option<ExtentState>) -> DataError {
        if let Some(open) = self.extents.get(&extent) {
            return DataError::Sealed { length: open.committed };
        }
        match (self.ended.get(&extent), replica) {
            (Some(length), _) => DataError::Sealed { length: *length },
            (None, Some(state)) => DataError::Sealed { length: state.committed },
            (None, None) => DataError::NoExtent,
        }
    }

    fn append_small(
        &mut self,
        request: RequestNumber,
        head: &AppendHead,
        token: u64,
        effects: &mut Vec<Effect>,
    ) {
        let token = (head.session, token);
        match self.known(&token, head) {
            Err(error) => return self.answer(request, Err(error), effects),
            Ok(Some(place)) if place.extent.is_none() => {
                // The first copy still waits for its batch: one answer is enough, to the newest.
                self.replace_gathered(request, head, token, effects);
                return;
            }
            Ok(Some(place)) if self.repeat(request, head, place, effects) => return,
            Ok(_) => {}
        }
        let place = TokenPlace::gathered(head.length, head.sync);
        self.tokens.set(token, place, self.limits.tokens_max);
        let (length, sync) = (head.length, head.sync);
        self.gathered.push_back(Piece { request, token, length, sync });
        self.start_batch(effects);
    }

    /// Where an append with this token went, if it is known. A repeat has the same bytes: those of another
    /// length would be laid over what follows them in the batch, which is other clients'.
    fn known(&self, token: &Token, head: &AppendHead) -> Result<Option<TokenPlace>, DataError> {
        match self.tokens.get(token) {
            Some(place) if place.length() != head.length => Err(DataError::Invalid),
            place => Ok(place),
        }
    }

    fn replace_gathered(
        &mut self,
        request: RequestNumber,
        head: &AppendHead,
        token: Token,
        effects: &mut Vec<Effect>,
    ) {
        let is_it = |piece: &&mut Piece| piece.token == token && piece.length == head.length;
        let found = self.gathered.iter_mut().find(is_it);
        match found {
            Some(piece) => {
                piece.sync |= head.sync;
                let former = std::mem::replace(&mut piece.request, request);
                self.answer(former, Err(DataError::Busy), effects);
            }
            None => self.answer(request, Err(DataError::Busy), effects),
        }
    }

    /// Answers a repeat: now, when its bytes are committed, or after a flush that it asks for.
    /// Returns false if the place is of no use any more: the bytes must be appended anew.
    fn repeat(
        &mut self,
        request: RequestNumber,
        head: &AppendHead,
        place: TokenPlace,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(extent) = place.extent else { return false };
        let offset = place.offset;
        let knows_extent = matches!(head.target, AppendTarget::Extent { .. });
        let waiter = Waiter { request, offset, knows_extent };
        let needs_flush = head.sync && !place.synced;
        let Some(open) = self.extents.get_mut(&extent) else {
            let ended = self.ended.get(&extent).copied();
            if let Some(committed) = ended.filter(|c| place.end <= *c && !needs_flush) {
                self.answer(request, Ok(Placed { extent, offset, committed }), effects);
                return true;
            }
            return false;
        };
        let committed = open.committed;
        if place.end <= committed && !needs_flush {
            self.answer(request, Ok(Placed { extent, offset, committed }), effects);
            return true;
        }
        let under_way = open.operations.iter_mut().find(|operation| operation.end >= place.end);
        match under_way {
            Some(operation) if operation.sync || !needs_flush => operation.answers.push(waiter),
            _ => {
                let end = open.end;
                self.start(extent, end, true, vec![waiter], vec![], vec![], effects);
            }
        }
        true
    }

    /// Gives all gathered pieces a place, if none are on their way.
    fn start_batch(&mut self, effects: &mut Vec<Effect>) {
        while !self.gathered.is_empty() {
            let extent = match self.shared_extent(effects) {
                Ok(extent) => extent,
                Err(error) => return self.refuse_gathered(&error, effects),
            };
            let Some(open) = self.extents.get(&extent) else { return };
            if !open.operations.is_empty() {
                return;
            }
            self.start_pieces(extent, open.end, effects);
        }
    }

    fn start_pieces(&mut self, extent: ExtentId, start: u64, effects: &mut Vec<Effect>) {
        let mut end = start;
        let (mut waiters, mut tokens, mut requests) = (Vec::new(), Vec::new(), Vec::new());
        let sync = self.gathered.iter().any(|piece| piece.sync);
        while let Some(piece) = self.gathered.front() {
            let piece_end = end + self.limits.piece_header_bytes + piece.length;
            if end > start && piece_end - start > self.limits.batch_bytes_max {
                break;
            }
            let (request, token) = (piece.request, piece.token);
            let offset = end + self.limits.piece_header_bytes;
            let place = TokenPlace { extent: Some(extent), offset, end: piece_end, synced: sync };
            self.tokens.set(token, place, self.limits.tokens_max);
            waiters.push(Waiter { request, offset, knows_extent: false });
            tokens.push(token);
            requests.push(request);
            end = piece_end;
            self.gathered.pop_front();
        }
        self.start(extent, end, sync, waiters, tokens, requests, effects);
    }

    fn refuse_gathered(&mut self, error: &DataError, effects: &mut Vec<Effect>) {
        for piece in std::mem::take(&mut self.gathered) {
            self.tokens.forget(&piece.token);
            self.answer(piece.request, Err(error.clone()), effects);
        }
    }

    /// The shared extent with room, a new one if need be.
    fn shared_extent(&mut self, effects: &mut Vec<Effect>) -> Result<ExtentId, DataError> {
        let bound = self.limits.small_extent_bytes_max;
        if let Some(extent) = self.small {
            match self.extents.get(&extent) {
                Some(open) if open.end < bound || !open.operations.is_empty() => return Ok(extent),
                Some(_) => self.close(extent, effects),
                None => {}
            }
        }
        let extent = self.open(true, (InodeId(0), SessionId(0)), effects)?;
        self.small = Some(extent);
        Ok(extent)
    }

    fn open(
        &mut self,
        small: bool,
        owner: (InodeId, SessionId),
        effects: &mut Vec<Effect>,
    ) -> Result<ExtentId, DataError> {
        let now_ms = self.now_ms;
        let suspect = self.suspects.iter().find(|(_, until)| **until > now_ms);
        if let Some((node, _)) = suspect {
            return Err(DataError::MemberSilent { node: *node });
        }
        if self.extents.len() >= self.limits.extents_max {
            return Err(DataError::Busy);
        }
        let extent = self.give_id(small, effects)?;
        let open = Open {
            owner,
            end: 0,
            committed: 0,
            announced: 0,
            announce_from_ms: 0,
            operations: VecDeque::new(),
            closing: false,
            touched_ms: now_ms,
        };
        let before = self.extents.insert(extent, open);
        assert!(before.is_none(), "an extent id was given twice");
        if let Some(watched) = &mut self.watched {
            watched.insert(extent);
        }
        Ok(extent)
    }

    /// Ids carry the epoch, which no two primaries share, above a number that never returns.
    fn give_id(&mut self, small: bool, effects: &mut Vec<Effect>) -> Result<ExtentId, DataError> {
        self.reserve_ids(effects);
        if self.ids.next >= self.ids.until {
            return Err(DataError::Busy);
        }
        let number = u64::from(self.ids.next);
        self.ids.next += 1;
        let id = (self.configuration.epoch.0 & 0x7fff_ffff) << 32 | number;
        Ok(if small { ExtentId::small(id) } else { ExtentId(id) })
    }

    fn reserve_ids(&mut self, effects: &mut Vec<Effect>) {
        let left = self.ids.until.saturating_sub(self.ids.next);
        if left < IDS_RESERVED / 2 && !self.ids.asked {
            self.ids.asked = true;
            let until = self.ids.until.saturating_add(IDS_RESERVED);
            effects.push(Effect::ReserveIds { until });
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn start(
        &mut self,
        extent: ExtentId,
        end: u64,
        sync: bool,
        answers: Vec<Waiter>,
        tokens: Vec<Token>,
        requests: Vec<RequestNumber>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(open) = self.extents.get_mut(&extent) else { return };
        assert!(end >= open.end, "an extent only grows");
        let number = self.next_operation;
        self.next_operation += 1;
        self.operations.insert(number, extent);
        let (node, members) = (self.node, &self.configuration.members);
        let backups: Vec<NodeId> = members.iter().copied().filter(|m| *m != node).collect();
        let (offset, committed, owner) = (open.end, open.committed, open.owner);
        let waits_for = members.iter().copied().collect();
        let started_ms = self.now_ms;
        let operation = Operation { number, end, waits_for, started_ms, sync, answers, tokens };
        open.operations.push_back(operation);
        open.end = end;
        open.announced = committed;
        open.touched_ms = started_ms;
        let operation = number;
        effects.push(Effect::Start(Start {
            operation,
            extent,
            offset,
            requests,
            owner,
            sync,
            committed,
            backups,
        }));
    }

    /// A member, this node among them, has done an operation or refused it.
    pub fn member_done(
        &mut self,
        number: OperationNumber,
        member: NodeId,
        result: Result<(), DataError>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(extent) = self.operations.get(&number).copied() else { return };
        if let Err(error) = result {
            if let DataError::MemberSilent { node } = error {
                self.suspects.insert(node, self.now_ms.saturating_add(SUSPECT_MS));
            }
            self.end_extent(extent, Some(error), effects);
            self.start_batch(effects);
            return;
        }
        let Some(open) = self.extents.get_mut(&extent) else { return };
        if let Some(operation) = open.operations.iter_mut().find(|o| o.number == number) {
            operation.waits_for.remove(&member);
        }
        self.suspects.remove(&member);
        self.commit(extent, effects);
        if self.small == Some(extent) {
            self.start_batch(effects);
        }
    }

    /// Moves the commit offset over every operation at the front that all members have.
    fn commit(&mut self, extent: ExtentId, effects: &mut Vec<Effect>) {
        loop {
            let Some(open) = self.extents.get_mut(&extent) else { return };
            if open.operations.front().is_none_or(|first| !first.waits_for.is_empty()) {
                break;
            }
            let Some(done) = open.operations.pop_front() else { break };
            assert!(done.end >= open.committed, "the commit offset only rises");
            open.committed = done.end;
            let committed = open.committed;
            self.operations.remove(&done.number);
            for Waiter { request, offset, .. } in done.answers {
                self.answer(request, Ok(Placed { extent, offset, committed }), effects);
            }
        }
        self.finish_close(extent, effects);
    }

    fn answer(
        &mut self,
        request: RequestNumber,
        result: Result<Placed, DataError>,
        effects: &mut Vec<Effect>,
    ) {
        self.requests = self.requests.saturating_sub(1);
        effects.push(Effect::Answer { request, result });
    }

    /// Requests not yet answered, for metrics.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.requests
    }

    /// The members are about to be asked what they hold: from now on, notes which extents take
    /// appends.
    pub fn watch(&mut self) {
        self.watched = Some(self.extents.keys().copied().collect());
    }

    /// Extents that took appends at any time since [`watch`](Primary::watch), also if they ended
    /// meanwhile: what the members said of them is of different moments, and a decision by it
    /// could cut acknowledged bytes off.
    pub fn end_watch(&mut self) -> BTreeSet<ExtentId> {
        let mut watched = self.watched.take().unwrap_or_default();
        watched.extend(self.extents.keys());
        watched
    }
}
