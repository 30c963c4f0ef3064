//! The machines of a cluster and the production nodes that run on them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use milpa_client::ClientConfig;
use milpa_data::{DataNodeConfig, DiskConfig};
use milpa_host::keys::Key;
use milpa_host::telemetry::with_sources;
use milpa_manager::ManagerConfig;
use milpa_meta::MetaNodeConfig;
use milpa_types::{ClusterId, VolumeOptions};

use crate::machine::Node;
use crate::options::Options;

pub(crate) const CLUSTER: ClusterId = ClusterId(0x51);
pub(crate) const VOLUME: &str = "v";
pub(crate) const MANAGERS: usize = 3;
/// No call is given up before: a shorter one would hide hangs behind errors.
pub(crate) const IO_DEADLINE: Duration = Duration::from_secs(60);
pub(crate) const PORT: u16 = 7000;
const HTTP_PORT: u16 = 80;

/// What a machine is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Manager,
    Meta,
    Data,
    Client,
    /// Watches and checks; no fault touches it.
    Observer,
}

impl Part {
    pub fn name(self, number: usize) -> &'static str {
        const NAMES: [[&str; 5]; 5] = [
            ["manager1", "manager2", "manager3", "manager4", "manager5"],
            ["meta1", "meta2", "meta3", "meta4", "meta5"],
            ["data1", "data2", "data3", "data4", "data5"],
            ["client1", "client2", "client3", "client4", "client5"],
            ["observer", "verifier", "deleter", "observer4", "observer5"],
        ];
        NAMES.get(self as usize).and_then(|names| names.get(number)).copied().unwrap_or("?")
    }

    pub fn address(self, number: usize) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 0, self as u8, number as u8 + 1))
    }

    pub fn socket(self, number: usize, port: u16) -> SocketAddr {
        SocketAddr::new(self.address(number), port)
    }

    pub fn is_server(self) -> bool {
        matches!(self, Part::Manager | Part::Meta | Part::Data)
    }
}

pub(crate) fn secret() -> Key {
    // The same in every run: nothing here is to be kept from anybody.
    Key::from_hex(&"5a".repeat(32)).unwrap_or_else(|_| unreachable!("64 hexadecimal digits"))
}

pub(crate) fn managers() -> Vec<SocketAddr> {
    (0..MANAGERS).map(|number| Part::Manager.socket(number, PORT)).collect()
}

/// Where a server listens.
pub(crate) fn listens(part: Part, number: usize) -> SocketAddr {
    part.socket(number, PORT)
}

/// The production code of a server.
pub(crate) fn server(part: Part, number: usize, options: &Options) -> Node {
    let (listen, http) = (part.socket(number, PORT), part.socket(number, HTTP_PORT));
    let directory = PathBuf::from(format!("/{}", part.name(number)));
    let forever = std::future::pending;
    match part {
        Part::Manager => {
            let mut config = ManagerConfig::new(directory, listen, http, managers());
            config.checkpoint.entries = 200;
            config.checkpoint.interval_ms = 5_000;
            config.checkpoint.entries_kept = 100;
            config.policy.dead_after_ms = options.dead_after_ms;
            Box::pin(async move {
                let ended = milpa_manager::run(config, CLUSTER, secret(), forever()).await;
                ended_as(ended)
            })
        }
        Part::Meta => {
            let mut config = MetaNodeConfig::new(directory, listen, http, managers());
            config.session_lease_ms = options.session_lease_ms;
            config.reserve_bytes = 8 << 20;
            config.snapshot_after_entries = options.snapshot_after_entries;
            config.scrub_period_s = 20;
            (config.managers_wait_ms, config.life_ms) = lives(options);
            Box::pin(async move {
                let ended = milpa_meta::run(config, CLUSTER, secret(), forever()).await;
                ended_as(ended)
            })
        }
        Part::Data => {
            let mut disk = DiskConfig::new(directory.join("disk"));
            disk.reserve_bytes = 8 << 20;
            let mut config = DataNodeConfig::new(directory, vec![disk], listen, http, managers());
            config.writer_silent_ms = 2_000;
            config.scrub_period_s = 20;
            config.log_trim_ms = options.log_trim_ms;
            config.small_extent_bytes_max = options.small_extent_bytes_max;
            (config.managers_wait_ms, config.life_ms) = lives(options);
            Box::pin(async move {
                let ended = milpa_data::run(config, CLUSTER, secret(), forever()).await;
                ended_as(ended)
            })
        }
        Part::Client | Part::Observer => Box::pin(async { "not a server".to_owned() }),
    }
}

/// How long a node waits for the managers when it starts, and how often it tells them of another life.
/// Where old disks come back, nobody serves without their word; elsewhere that is tried too.
fn lives(options: &Options) -> (u64, u64) {
    if options.weights.old_disk > 0 { (86_400_000, 2_000) } else { (2_000, 600_000) }
}

/// The end of a node in words, causes and all.
fn ended_as<E: std::error::Error + 'static>(ended: Result<(), E>) -> String {
    ended.map_or_else(|error| with_sources(&error), |()| "ended".to_owned())
}

pub(crate) fn volume_options(options: &Options) -> VolumeOptions {
    VolumeOptions {
        inline_bytes_max: options.inline_bytes_max,
        small_file_bytes_max: options.small_file_bytes_max,
        meta_partition_entries_max: 1_000,
        ..VolumeOptions::default()
    }
}

pub(crate) fn client_config(key: &Key, options: &Options) -> ClientConfig {
    let mut config = ClientConfig::new(managers(), VOLUME, key.clone());
    config.io_deadline = Some(IO_DEADLINE);
    config.session_lease = Duration::from_millis(options.session_lease_ms);
    config.buffer_bytes = 4 << 20;
    config.dirty_age_max = Duration::from_secs(2);
    config.cache_timeout = Duration::from_millis(if options.caches_names { 1_000 } else { 0 });
    config
}
