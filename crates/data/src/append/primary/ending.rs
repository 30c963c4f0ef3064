//! How extents end: closed by their writer, broken by a failure, or left alone for too long.

use milpa_types::{DataError, ExtentId, NodeId};

use super::{ANNOUNCE_PAUSE_MS, BROKEN_MAX, Operation, Primary, SUSPECT_MS};
use crate::append::Effect;

impl Primary {
    /// The writer appends no more.
    pub fn close(&mut self, extent: ExtentId, effects: &mut Vec<Effect>) {
        if let Some(open) = self.extents.get_mut(&extent) {
            open.closing = true;
            self.finish_close(extent, effects);
        }
    }

    pub(super) fn finish_close(&mut self, extent: ExtentId, effects: &mut Vec<Effect>) {
        let done = self.extents.get(&extent).filter(|o| o.closing && o.operations.is_empty());
        let Some(length) = done.map(|open| open.committed) else { return };
        self.extents.remove(&extent);
        self.remember_ended(extent, length);
        effects.push(Effect::Closed { extent, length });
    }

    /// Nothing more is added. What is under way is answered with what is committed.
    pub(super) fn end_extent(
        &mut self,
        extent: ExtentId,
        cause: Option<DataError>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(open) = self.extents.remove(&extent) else { return };
        let committed = open.committed;
        self.remember_ended(extent, committed);
        if self.small == Some(extent) {
            self.small = None;
        }
        effects.push(Effect::Broken { extent, committed });
        let sealed = DataError::Sealed { length: committed };
        for operation in open.operations {
            self.operations.remove(&operation.number);
            for token in &operation.tokens {
                self.tokens.forget(token);
            }
            for waiter in operation.answers {
                // A client that does not know the extent's id has no use for its length.
                let error = match &cause {
                    Some(cause) if !waiter.knows_extent => cause_for_client(cause),
                    _ => sealed.clone(),
                };
                self.answer(waiter.request, Err(error), effects);
            }
        }
    }

    fn remember_ended(&mut self, extent: ExtentId, committed: u64) {
        self.ended.insert(extent, committed);
        if self.ended.len() > BROKEN_MAX {
            self.ended.pop_first();
        }
    }

    /// Extents broken by the shell's own knowledge: a read found one corrupt, or it was deleted.
    pub fn break_extent(&mut self, extent: ExtentId, effects: &mut Vec<Effect>) {
        self.end_extent(extent, None, effects);
    }

    /// A member was started again and may lack what it had acknowledged: everything open ends, so that
    /// it is made whole; the writers go on elsewhere.
    pub fn member_returned(&mut self, effects: &mut Vec<Effect>) {
        let open: Vec<ExtentId> = self.extents.keys().copied().collect();
        for extent in open {
            self.end_extent(extent, None, effects);
        }
        self.start_batch(effects);
    }

    /// Lets time pass: deadlines, idle extents, commit offsets that no operation carried.
    pub fn tick(&mut self, now_ms: u64, effects: &mut Vec<Effect>) {
        self.now_ms = now_ms;
        self.suspects.retain(|_, until| *until > now_ms);
        for (extent, node) in self.silent_members() {
            self.suspects.insert(node, now_ms.saturating_add(SUSPECT_MS));
            self.end_extent(extent, Some(DataError::MemberSilent { node }), effects);
        }
        self.start_batch(effects);
        if self.configuration.primary == self.node {
            self.reserve_ids(effects);
        }
        let mut idle = Vec::new();
        for (extent, open) in &mut self.extents {
            if !open.operations.is_empty() {
                continue;
            }
            if open.announced < open.committed && now_ms >= open.announce_from_ms {
                open.announced = open.committed;
                effects.push(Effect::Announce { extent: *extent, committed: open.committed });
            }
            if now_ms.saturating_sub(open.touched_ms) > self.limits.idle_ms {
                idle.push(*extent);
            }
        }
        for extent in idle {
            self.close(extent, effects);
        }
    }

    /// A member did not hear of the commit offset. One that leads the Raft group accepts overwrites
    /// only below it, so it is told again; one that does not hold the bytes it had confirmed ends
    /// the extent, as it would at the next append.
    pub fn announcement_failed(
        &mut self,
        extent: ExtentId,
        error: DataError,
        effects: &mut Vec<Effect>,
    ) {
        match error {
            // The member knows of a later epoch, and this node will: all that is open ends then.
            DataError::StaleEpoch { .. } | DataError::NotPrimary { .. } => {}
            DataError::Sealed { .. } | DataError::OutOfOrder { .. } | DataError::NoExtent => {
                self.end_extent(extent, Some(error), effects);
            }
            _ => {
                if let Some(open) = self.extents.get_mut(&extent) {
                    open.announced = 0;
                    open.announce_from_ms = self.now_ms.saturating_add(ANNOUNCE_PAUSE_MS);
                }
            }
        }
    }

    fn silent_members(&self) -> Vec<(ExtentId, NodeId)> {
        let late = |operation: &Operation| {
            let patience = self.limits.member_silent_ms * if operation.sync { 4 } else { 1 };
            self.now_ms.saturating_sub(operation.started_ms) > patience
        };
        let silent = |operation: &Operation| {
            operation.waits_for.iter().copied().find(|member| *member != self.node)
        };
        self.extents
            .iter()
            .filter_map(|(extent, open)| {
                let first = open.operations.iter().find(|operation| late(operation))?;
                Some((*extent, silent(first)?))
            })
            .collect()
    }
}

/// What a client is told of a failure at some member: only what it can act on.
fn cause_for_client(cause: &DataError) -> DataError {
    match cause {
        DataError::NoSpace | DataError::DiskFailed | DataError::MemberSilent { .. } => {
            cause.clone()
        }
        DataError::DamagedInTransit | DataError::Busy => DataError::Busy,
        DataError::StaleEpoch { current } => DataError::StaleEpoch { current: *current },
        _ => DataError::Sealed { length: 0 },
    }
}
