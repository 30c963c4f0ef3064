//! The settings of [`MultiRaft`](crate::MultiRaft).

/// Times, windows and limits of all groups of a node. Times are in milliseconds of the monotonic
/// clock whose readings the owner passes in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RaftConfig {
    /// The grain of time: heartbeats and elections happen at multiples of it. Finer costs CPU for
    /// idle groups, coarser makes two candidates collide. 5 to 100.
    pub tick_ms: u64,
    /// A leader's heartbeat. At least one tick.
    pub heartbeat_ms: u64,
    /// A follower that hears nothing for at least this long stands for election; and for at
    /// least this long after hearing a leader it votes for nobody else. More than two heartbeats.
    pub election_min_ms: u64,
    /// The upper bound of the drawn election timeout, exclusive. More than `election_min_ms`.
    pub election_max_ms: u64,
    /// How long after sending a heartbeat that a majority answered the leader may serve reads
    /// alone. Less than `election_min_ms` by at least two ticks (for the grain and for drift).
    pub lease_ms: u64,
    /// Followers are told at once what is committed. If not, they learn it with the next entries or
    /// the next heartbeat: a lone change then costs half the messages, and its followers apply it
    /// up to a heartbeat later.
    pub announces_commits: bool,
    /// Append messages in flight to one follower of one group.
    pub inflight_max: usize,
    /// Entry bytes in one append message.
    pub message_bytes_max: usize,
    /// Bytes of one proposal.
    pub entry_bytes_max: usize,
    /// Uncommitted bytes of one group, above which proposals answer `Busy`. Also what a group takes in while it
    /// fetches a snapshot, about: a few messages more.
    pub uncommitted_bytes_max: usize,
    /// Entry bytes of one group handed to the owner in one turn.
    pub committed_bytes_max: usize,
    /// Bytes of one frame; what is above goes into a further frame of the same turn.
    pub frame_bytes_max: usize,
    /// Bytes of applied entries that one group keeps in memory for followers that lag. One that
    /// lags further gets a snapshot. The log on disk is not concerned.
    pub tail_bytes_max: usize,
    /// The same for all groups of the node together: each has its equal share, but
    /// 256 KiB at least.
    pub tail_bytes_node_max: usize,
}

impl Default for RaftConfig {
    fn default() -> RaftConfig {
        RaftConfig {
            tick_ms: 25,
            heartbeat_ms: 100,
            election_min_ms: 500,
            election_max_ms: 1000,
            lease_ms: 400,
            announces_commits: true,
            inflight_max: 256,
            message_bytes_max: 1 << 20,
            entry_bytes_max: 1 << 20,
            uncommitted_bytes_max: 64 << 20,
            committed_bytes_max: 8 << 20,
            frame_bytes_max: 4 << 20,
            // Some 30,000 creations: a follower may be away for five seconds of 6,000 a second,
            // which a restart takes.
            tail_bytes_max: 8 << 20,
            tail_bytes_node_max: 64 << 20,
        }
    }
}

/// The settings contradict each other. Lists every problem, not only the first.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad Raft settings: {}", problems.join("; "))]
pub struct ConfigError {
    /// One sentence each.
    pub problems: Vec<String>,
}

impl RaftConfig {
    /// Checks the bounds named at the fields.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every problem found.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let checks = [
            ((5..=100).contains(&self.tick_ms), "tick_ms must be 5 to 100"),
            (self.heartbeat_ms >= self.tick_ms, "heartbeat_ms must be at least tick_ms"),
            (
                self.election_min_ms > 2 * self.heartbeat_ms,
                "election_min_ms must exceed two heartbeats",
            ),
            (
                self.election_max_ms >= self.election_min_ms + 2 * self.tick_ms,
                "election_max_ms must exceed election_min_ms by two ticks or more",
            ),
            (
                self.lease_ms + 2 * self.tick_ms <= self.election_min_ms,
                "lease_ms must be two ticks or more below election_min_ms",
            ),
            (self.inflight_max > 0, "inflight_max must be positive"),
            (self.message_bytes_max > 0, "message_bytes_max must be positive"),
            (
                self.entry_bytes_max <= self.frame_bytes_max,
                "entry_bytes_max must not exceed frame_bytes_max",
            ),
            (
                self.uncommitted_bytes_max >= self.message_bytes_max.max(self.entry_bytes_max),
                "uncommitted_bytes_max must hold one message and one entry",
            ),
            (self.frame_bytes_max <= 64 << 20, "frame_bytes_max must not exceed 64 MiB"),
        ];
        let problems: Vec<String> =
            checks.iter().filter(|(ok, _)| !ok).map(|(_, text)| (*text).to_owned()).collect();
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }

    /// Each of so many groups' share of the memory for applied entries.
    pub(crate) fn tail_bytes(&self, groups: usize) -> usize {
        const SHARE_BYTES_MIN: usize = 256 << 10;
        let share = self.tail_bytes_node_max / groups.max(1);
        self.tail_bytes_max.min(share.max(SHARE_BYTES_MIN))
    }

    /// How many ticks a time takes, at least one.
    pub(crate) fn ticks(&self, ms: u64) -> usize {
        usize::try_from(ms.div_ceil(self.tick_ms)).unwrap_or(usize::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::RaftConfig;

    #[test]
    fn the_default_is_valid_and_every_problem_is_named() {
        assert_eq!(RaftConfig::default().validate(), Ok(()));
        let bad = RaftConfig { tick_ms: 1, lease_ms: 500, ..RaftConfig::default() };
        let problems = bad.validate().unwrap_err().problems;
        assert_eq!(problems.len(), 2, "{problems:?}");
    }
}
