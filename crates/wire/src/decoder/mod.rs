//! What every decoder of bytes from a disk, a socket or a person owes, as data: for the golden files of
//! each crate's tests and for `milpa-fuzz`. Built with the feature `decoders` only.
//!
//! The contract: any bytes give a value or a refusal, never a panic; memory stays within a small
//! multiple of what was given; and what was decoded encodes to bytes that decode to the same.

mod generate;

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use generate::{Random, generate};

/// Seeds among which values for golden lines are looked for, and how long these may be.
const SEEDS_LOOKED_AT: u64 = 20_000;
const GOLDEN_BYTES_MAX: usize = 500;
const ADVICE: &str = "Disks in use hold the golden bytes. If the format was changed on \
    purpose: raise its version, keep reading the old one, leave this golden file as it is, and \
    add one of a new name (MILPA_GOLDEN=write); docs/format.md tells both.";

/// One decoder.
#[derive(Clone, Copy)]
pub struct Decoder {
    /// Its name, unique in its crate: also the golden file's.
    pub name: &'static str,
    /// A valid encoding, another one for each seed. Seed 0 gives the golden one.
    pub sample: fn(u64) -> Vec<u8>,
    /// Decodes, and encodes again; `None` for a refusal.
    pub again: fn(&[u8]) -> Option<Vec<u8>>,
    /// Makes the checksums and lengths of changed bytes right, so that what lies behind them is
    /// reached too.
    pub seal: fn(&mut Vec<u8>),
}

impl Decoder {
    /// The decoder of a message that [`encode`](crate::encode) wrote.
    #[must_use]
    pub const fn of_message<T: Serialize + DeserializeOwned>(name: &'static str) -> Decoder {
        Decoder {
            name,
            sample: |seed| crate::encode(&generate::<T>(seed)),
            again: |bytes| crate::decode::<T>(bytes).ok().map(|message| crate::encode(&message)),
            seal: |_| {},
        }
    }
}

/// Writes `value` over the bytes at `at`, if they are there.
pub fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..value.len())) {
        place.copy_from_slice(value);
    }
}

/// Compares a decoder with its golden files `<directory>/<name>`: the committed bytes must decode, encode
/// to themselves, and be what this build writes for the same value.
///
/// With `MILPA_GOLDEN=write` in the environment, missing golden files are written.
///
/// # Errors
///
/// What differs, and what to do about it.
#[allow(clippy::disallowed_methods)]
fn check_golden(decoder: &Decoder, directory: &std::path::Path) -> Result<(), String> {
    let path = directory.join(decoder.name);
    let shown = path.display();
    let written = (decoder.sample)(0);
    let golden = match std::fs::read(&path) {
        Ok(golden) => golden,
        Err(_) if golden_is_written() => {
            std::fs::write(&path, &written).map_err(|e| format!("cannot write {shown}: {e}"))?;
            written.clone()
        }
        Err(error) => return Err(format!("cannot read {shown}: {error}")),
    };
    match (decoder.again)(&golden) {
        None => Err(format!("{shown} is refused. {ADVICE}")),
        Some(again) if again != golden => {
            Err(format!("{shown} is read, and then written otherwise. {ADVICE}"))
        }
        Some(_) if written != golden => {
            Err(format!("what {shown} holds is written otherwise. {ADVICE}"))
        }
        Some(_) => Ok(()),
    }
}

/// Compares decoders with their golden files in the directory `golden` of the crate whose manifest is there.
///
/// # Errors
///
/// The first that differs.
pub fn check_all_golden<'a>(
    manifest_directory: &str,
    decoders: impl IntoIterator<Item = &'a Decoder>,
) -> Result<(), String> {
    let directory = std::path::Path::new(manifest_directory).join("golden");
    decoders.into_iter().try_for_each(|decoder| check_golden(decoder, &directory))
}

/// Compares a logged command with the golden file at `path`: text, a line for each kind, its name and
/// bytes in hexadecimal. Each line must be read as what its name says, and written as it was. A kind that
/// has no line yet is an error; with `MILPA_GOLDEN=write` one is added. (Lines are not compared with
/// generated values: a new variant makes others of the same seeds.)
///
/// # Errors
///
/// What differs, and what to do about it.
#[allow(clippy::disallowed_methods)]
pub fn check_golden_kinds<T: Serialize + DeserializeOwned>(
    path: &std::path::Path,
    kind: impl Fn(&T) -> String,
) -> Result<(), String> {
    let (shown, adds) = (path.display(), golden_is_written());
    let text = match std::fs::read_to_string(path) {
        Err(_) if adds => String::new(),
        read => read.map_err(|error| format!("cannot read {shown}: {error}"))?,
    };
    let mut golden: BTreeMap<&str, String> = text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, bytes)| (name, bytes.to_owned()))
        .collect();
    for (name, bytes) in &golden {
        match from_hex(bytes).and_then(|bytes| crate::decode::<T>(&bytes).ok()) {
            None => return Err(format!("{name} of {shown} is refused. {ADVICE}")),
            Some(read) if kind(&read) != *name => {
                return Err(format!("{name} of {shown} is read as {}. {ADVICE}", kind(&read)));
            }
            Some(read) if hex(&crate::encode(&read)) != *bytes => {
                return Err(format!(
                    "{name} of {shown} is read, and then written otherwise. {ADVICE}"
                ));
            }
            Some(_) => {}
        }
    }
    let known = one_of_each(&kind);
    let missing: Vec<_> = known.iter().filter(|(name, _)| !golden.contains_key(&***name)).collect();
    if let Some((name, _)) = missing.first().filter(|_| !adds) {
        return Err(format!("{shown} has no line for {name}: add it (MILPA_GOLDEN=write)"));
    }
    if adds {
        golden.extend(missing.iter().map(|(name, value)| (&***name, hex(&crate::encode(value)))));
        let text: String = golden.iter().map(|(name, bytes)| format!("{name} {bytes}\n")).collect();
        std::fs::write(path, text).map_err(|error| format!("cannot write {shown}: {error}"))?;
    }
    Ok(())
}

/// One of each kind, among the values of the first thousands of seeds: of those that are not too long for
/// a line the longest, so that as many fields as possible are there.
fn one_of_each<T: Serialize + DeserializeOwned>(
    kind: impl Fn(&T) -> String,
) -> BTreeMap<String, T> {
    let mut chosen: BTreeMap<String, (usize, T)> = BTreeMap::new();
    for seed in 1..SEEDS_LOOKED_AT {
        let value = generate::<T>(seed);
        let length = crate::encode(&value).len();
        let name = kind(&value);
        let is_longer = chosen.get(&name).is_none_or(|(known, _)| *known < length);
        if length <= GOLDEN_BYTES_MAX && is_longer {
            chosen.insert(name, (length, value));
        }
    }
    chosen.into_iter().map(|(name, (_, value))| (name, value)).collect()
}

/// The name of a variant: the first word of what Debug writes.
pub fn variant_name(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned()
}

/// Bytes as a golden file of text has them.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The inverse of [`hex`].
#[must_use]
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok()).collect()
}

fn golden_is_written() -> bool {
    std::env::var_os("MILPA_GOLDEN").is_some_and(|value| value == "write")
}

/// The frame, and every message that travels in one.
#[must_use]
pub fn all() -> Vec<Decoder> {
    use crate::{data, handshake, manager, meta};
    vec![
        Decoder {
            name: "frame",
            sample: frame_sample,
            again: frame_again,
            seal: |b| frame_seal(b),
        },
        Decoder::of_message::<handshake::Handshake>("handshake"),
        Decoder::of_message::<meta::MetaRequest>("meta-request"),
        Decoder::of_message::<meta::MetaReply>("meta-reply"),
        Decoder::of_message::<data::DataRequest>("data-request"),
        Decoder::of_message::<data::DataReply>("data-reply"),
        Decoder::of_message::<manager::ManagerRequest>("manager-request"),
        Decoder::of_message::<manager::ManagerReply>("manager-reply"),
    ]
}

fn frame_sample(seed: u64) -> Vec<u8> {
    use crate::frame::{Frame, FrameKind};
    let mut random = Random::new(seed);
    let kinds = [FrameKind::Request, FrameKind::Reply, FrameKind::OneWay, FrameKind::Handshake];
    let mut bytes = |limit| random.bytes(limit).into();
    let (body, payload) = (bytes(100), bytes(100));
    let kind = kinds.get(random.below(4) as usize).copied().unwrap_or(FrameKind::Request);
    let (channel, id) = (random.draw() as u16, random.draw());
    let wait_ms = random.draw() as u32;
    let frame = Frame { kind, channel, id, wait_ms, body, payload };
    [&frame.encode_head()[..], &frame.payload].concat()
}

/// Several frames may stand in the buffer, and the last be cut.
fn frame_again(bytes: &[u8]) -> Option<Vec<u8>> {
    use crate::frame::{Frame, Taken};
    let mut buffer = bytes::BytesMut::from(bytes);
    let mut out = Vec::new();
    while let Taken::Frame(frame) = Frame::take(&mut buffer).ok()? {
        out.extend_from_slice(&frame.encode_head());
        out.extend_from_slice(&frame.payload);
    }
    Some(out)
}

fn frame_seal(bytes: &mut [u8]) {
    use crate::frame::{HEADER_BYTES, crc32c};
    put(bytes, 0, b"MLP1");
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return };
    let crc = crc32c(&header[..28]);
    let length = header[20..24].iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
    let body = bytes.get(HEADER_BYTES..).and_then(|rest| rest.get(..length)).map(crc32c);
    put(bytes, 28, &crc.to_le_bytes());
    put(bytes, 32, &body.unwrap_or_default().to_le_bytes());
}
