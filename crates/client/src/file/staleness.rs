//! Whether what is known of a file's content is old: others have changed it, or may have.

/// Counts what was heard. An answer of the servers makes fresh only what had been heard when they were asked: it may have
/// been given before what was heard since.
#[derive(Debug, Default)]
pub(crate) struct Staleness {
    heard: u64,
    answered: u64,
}

/// When the servers were asked: before anything was heard of a change, unless a [`Staleness`] gave it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asked(u64);

impl Staleness {
    pub(super) fn is_stale(&self) -> bool {
        self.answered < self.heard
    }

    pub(super) fn heard_of_a_change(&mut self) {
        self.heard += 1;
    }

    pub(super) fn asks(&self) -> Asked {
        Asked(self.heard)
    }

    pub(super) fn answered(&mut self, asked: Asked) {
        self.answered = self.answered.max(asked.0);
    }
}
