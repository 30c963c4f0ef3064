//! What a client must be told, and why it may fail to start.

use std::net::SocketAddr;
use std::time::Duration;

use milpa_host::keys::Key;
use milpa_types::ClusterId;

/// Smallest write buffer: one file's packets in flight must fit several times.
const BUFFER_BYTES_MIN: u64 = 4 << 20;

/// Settings of one client. [`ClientConfig::new`] fills in what has a sensible value.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Where managers listen; one that answers is enough.
    pub managers: Vec<SocketAddr>,
    /// Name of the volume.
    pub volume: String,
    /// The volume's access key.
    pub key: Key,
    /// The cluster that is meant; `None` takes the one that answers and can prove the key.
    pub cluster: Option<ClusterId>,
    /// A call that could not be carried out fails after this long: 1 s or more. `None` never gives
    /// up, as a hard NFS mount.
    pub io_deadline: Option<Duration>,
    /// How long connecting may take before it fails: 100 ms or more.
    pub connect_deadline: Duration,
    /// Written bytes that may wait in memory, over all files: 4 MiB or more.
    pub buffer_bytes: u64,
    /// The longest that a written byte stays in the buffer before it is sent and published without
    /// being asked for: 100 ms or more.
    pub dirty_age_max: Duration,
    /// Append packets in flight for one file: 1 to 64.
    pub packets_in_flight: usize,
    /// How long attributes and names may be used without asking again: half of it here, the other half in the kernel, which
    /// may be answered from here.
    pub cache_timeout: Duration,
    /// Inodes, names and layouts each remembered at most: 1,000 or more.
    pub cache_entries: usize,
    /// How long the servers keep a silent client's session; it is renewed every third of this.
    pub session_lease: Duration,
}

impl ClientConfig {
    /// The usual settings for a volume.
    #[must_use]
    pub fn new(managers: Vec<SocketAddr>, volume: &str, key: Key) -> ClientConfig {
        ClientConfig {
            managers,
            volume: volume.to_owned(),
            key,
            cluster: None,
            io_deadline: Some(Duration::from_secs(60)),
            connect_deadline: Duration::from_secs(5),
            buffer_bytes: 64 << 20,
            dirty_age_max: Duration::from_secs(5),
            packets_in_flight: 8,
            cache_timeout: Duration::from_secs(1),
            cache_entries: 100_000,
            session_lease: Duration::from_secs(30),
        }
    }

    /// How long answers are used here.
    pub(crate) fn cache_timeout_here(&self) -> Duration {
        self.cache_timeout / 2
    }

    /// Returns every violated bound, one line each.
    ///
    /// # Errors
    ///
    /// The lines, when there are any.
    pub fn validate(&self) -> Result<(), Vec<String>> {
        let mut problems = Vec::new();
        let mut check = |holds: bool, line: String| {
            if !holds {
                problems.push(line);
            }
        };
        check(!self.managers.is_empty(), "managers: none given, allowed 1 or more".to_owned());
        check(
            milpa_types::is_volume_name(&self.volume),
            format!("volume: value is {:?}, allowed 1 to 64 of a-z 0-9 - _", self.volume),
        );
        let deadline = self.io_deadline.unwrap_or(Duration::MAX);
        check(
            deadline >= Duration::from_secs(1),
            format!("io_deadline: value is {deadline:?}, allowed 1 s or more"),
        );
        check(
            self.buffer_bytes >= BUFFER_BYTES_MIN,
            format!("buffer_bytes: value is {}, allowed 4 MiB or more", self.buffer_bytes),
        );
        check(
            (1..=64).contains(&self.packets_in_flight),
            format!("packets_in_flight: value is {}, allowed 1 to 64", self.packets_in_flight),
        );
        check(
            self.dirty_age_max >= Duration::from_millis(100),
            format!("dirty_age_max: value is {:?}, allowed 100 ms or more", self.dirty_age_max),
        );
        check(
            self.cache_entries >= 1000,
            format!("cache_entries: value is {}, allowed 1,000 or more", self.cache_entries),
        );
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

/// Why a client did not start. Each is one line that says what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Settings out of bounds: every problem.
    #[error("bad settings: {}", .0.join("; "))]
    Config(Vec<String>),
    /// No volume of that name.
    #[error("no volume named {name:?}: look at `milpa volume list`")]
    NoVolume {
        /// As asked.
        name: String,
    },
    /// The managers did not accept us: wrong key, cluster or protocol version.
    #[error(
        "{address} refused volume {volume:?}: {reason}; check the key and the cluster's address"
    )]
    Refused {
        /// Who.
        address: SocketAddr,
        /// Which volume was asked for.
        volume: String,
        /// Their words.
        reason: String,
    },
    /// Nobody answered.
    #[error("no manager answered ({reason}): check the addresses and that the cluster runs")]
    Unreachable {
        /// Whom we asked and what came of it.
        reason: String,
    },
    /// Another cluster answered.
    #[error("the managers belong to cluster {found}, not {expected}: check the addresses")]
    OtherCluster {
        /// Who answered.
        found: ClusterId,
        /// Who should have.
        expected: ClusterId,
    },
    /// The managers answered with something else.
    #[error("the managers did not open volume {volume:?}: {reason}")]
    Failed {
        /// Which.
        volume: String,
        /// What they said.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_is_told_at_once() {
        let mut config = ClientConfig::new(vec![], "Bad Name", Key::random().unwrap());
        config.buffer_bytes = 1;
        let problems = config.validate().unwrap_err();
        assert_eq!(problems.len(), 3, "{problems:?}");
    }
}
