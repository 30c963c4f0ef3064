//! Every decoder of bytes that come from a disk, a socket, the kernel or a person.

use std::path::PathBuf;

use milpa_wire::decoder::{Decoder, Random};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Where the bytes come from: targets of one family are run together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Family {
    /// Sockets and the kernel.
    Wire,
    /// Logs: the write-ahead log, and what its entries say.
    Log,
    /// All other files: extents, snapshots, states, labels, keys, settings.
    Disk,
}

/// One decoder to be fuzzed.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its family.
    pub family: Family,
    /// The decoder.
    pub decoder: Decoder,
}

/// All of them.
pub fn all() -> Vec<Target> {
    let theirs = [
        milpa_wire::decoder::all(),
        milpa_host::decoders::all(),
        milpa_raft::decoders::all(),
        milpa_meta::decoders::all(),
        milpa_data::decoders::all(),
        milpa_manager::decoders::all(),
        ours(),
    ];
    let target = |decoder: Decoder| Target { family: family_of(decoder.name), decoder };
    theirs.into_iter().flatten().map(target).collect()
}

fn family_of(name: &str) -> Family {
    match name {
        "frame" | "handshake" | "raft-frame" | "kernel" | "http-body" => Family::Wire,
        "wal" | "overwrite-entry" => Family::Log,
        _ if name.ends_with("-request") || name.ends_with("-reply") => Family::Wire,
        _ if name.ends_with("-command") || name.ends_with("-log") => Family::Log,
        _ => Family::Disk,
    }
}

/// Decoders with nothing to be private: settings, and the kernel's requests.
fn ours() -> Vec<Decoder> {
    vec![
        Decoder {
            name: "kernel",
            sample: kernel,
            again: |bytes| {
                milpa_fuse::decoders::serve(bytes);
                None
            },
            seal: |bytes| {
                let length = (bytes.len() as u32).to_ne_bytes();
                milpa_wire::decoder::put(bytes, 0, &length);
            },
        },
        Decoder { name: "manager-config", sample: manager, again: manager_again, seal: |_| {} },
        Decoder { name: "meta-config", sample: meta, again: meta_again, seal: |_| {} },
        Decoder { name: "data-config", sample: data, again: data_again, seal: |_| {} },
    ]
}

/// A request of any kind: `fuse_in_header` of linux/fuse.h, numbers, one or two names, data.
fn kernel(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let opcode = random.below(55) as u32;
    let mut body: Vec<u8> =
        (0..random.below(14)).flat_map(|_| random.number().to_ne_bytes()).collect();
    for _ in 0..random.below(3) {
        body.extend_from_slice(b"name");
        body.push(0);
    }
    body.extend(random.bytes(40));
    let mut bytes = ((40 + body.len()) as u32).to_ne_bytes().to_vec();
    bytes.extend_from_slice(&opcode.to_ne_bytes());
    for number in [random.draw(), 1 + random.below(5), 0, 0] {
        bytes.extend_from_slice(&number.to_ne_bytes());
    }
    bytes.extend_from_slice(&body);
    bytes
}

fn address(seed: u64) -> std::net::SocketAddr {
    ([127, 0, 0, 1], seed as u16).into()
}

fn managers(seed: u64) -> Vec<std::net::SocketAddr> {
    (0..3).map(|number| address(seed + number)).collect()
}

fn text<T: Serialize>(config: &T) -> Vec<u8> {
    toml::to_string(config).unwrap_or_default().into_bytes()
}

fn parsed<T: Serialize + DeserializeOwned>(
    bytes: &[u8],
    is_valid: fn(&T) -> bool,
) -> Option<Vec<u8>> {
    let config: T = toml::from_slice(bytes).ok().filter(is_valid)?;
    Some(text(&config))
}

fn manager(seed: u64) -> Vec<u8> {
    let directory = PathBuf::from("/var/lib/milpa/manager1");
    text(&milpa_manager::ManagerConfig::new(directory, address(seed), address(1), managers(seed)))
}

fn manager_again(bytes: &[u8]) -> Option<Vec<u8>> {
    parsed::<milpa_manager::ManagerConfig>(bytes, |config| config.validate().is_ok())
}

fn meta(seed: u64) -> Vec<u8> {
    let directory = PathBuf::from("/var/lib/milpa/meta1");
    text(&milpa_meta::MetaNodeConfig::new(directory, address(seed), address(1), managers(seed)))
}

fn meta_again(bytes: &[u8]) -> Option<Vec<u8>> {
    parsed::<milpa_meta::MetaNodeConfig>(bytes, |config| config.validate().is_ok())
}

fn data(seed: u64) -> Vec<u8> {
    let disks = vec![milpa_data::DiskConfig::new(PathBuf::from("/disk1"))];
    let directory = PathBuf::from("/var/lib/milpa/data1");
    let (listen, http) = (address(seed), address(1));
    text(&milpa_data::DataNodeConfig::new(directory, disks, listen, http, managers(seed)))
}

fn data_again(bytes: &[u8]) -> Option<Vec<u8>> {
    parsed::<milpa_data::DataNodeConfig>(bytes, |config| config.validate().is_ok())
}
