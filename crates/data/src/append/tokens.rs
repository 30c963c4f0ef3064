//! What the primary remembers to recognize repeats of `New` and `Small` appends.

use std::collections::{BTreeMap, VecDeque};

use milpa_types::{ExtentId, SessionId};

/// The client's name for one append.
pub(super) type Token = (SessionId, u64);

/// Where an append with a token went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenPlace {
    /// The extent; `None` while a piece waits for its batch.
    pub extent: Option<ExtentId>,
    /// Where its first byte went.
    pub offset: u64,
    /// Where its last byte ends.
    pub end: u64,
    /// Whether it was flushed before it was answered.
    pub synced: bool,
}

impl TokenPlace {
    /// A piece that waits: it is as long as this, and nowhere yet.
    pub(super) fn gathered(length: u64, synced: bool) -> TokenPlace {
        TokenPlace { extent: None, offset: 0, end: length, synced }
    }

    pub(super) fn length(&self) -> u64 {
        self.end.saturating_sub(self.offset)
    }
}

/// A bounded memory of tokens: the oldest are forgotten first. A repeat of a forgotten one is
/// placed anew, which costs space until the unpublished first copy is deleted, and nothing else.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    places: BTreeMap<Token, TokenPlace>,
    order: VecDeque<Token>,
}

impl Tokens {
    pub(super) fn get(&self, token: &Token) -> Option<TokenPlace> {
        self.places.get(token).copied()
    }

    pub(super) fn set(&mut self, token: Token, place: TokenPlace, bound: usize) {
        if self.places.insert(token, place).is_none() {
            self.order.push_back(token);
        }
        while self.order.len() > bound {
            if let Some(oldest) = self.order.pop_front() {
                self.places.remove(&oldest);
            }
        }
    }

    /// Forgets a token whose append failed: a repeat is a new append.
    pub(super) fn forget(&mut self, token: &Token) {
        if self.places.remove(token).is_some() {
            self.order.retain(|known| known != token);
        }
    }

    pub(super) fn clear(&mut self) {
        self.places.clear();
        self.order.clear();
    }
}
