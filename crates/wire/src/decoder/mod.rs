//! What every decoder of bytes from a disk, a socket or a person owes, as data: for the golden files of
//! each crate's tests and for `milpa-fuzz`. Built with the feature `decoders` only.
//!
//! The contract: any bytes give a value or a refusal, never a panic; memory stays within a small
//! multiple of what was given; and what was decoded encodes to bytes that decode to the same.

mod generate;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use generate::{Random, generate};

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
        Err(_) if std::env::var_os("MILPA_GOLDEN").is_some_and(|v| v == "write") => {
            std::fs::write(&path, &written).map_err(|e| format!("cannot write {shown}: {e}"))?;
            written.clone()
        }
        Err(error) => return Err(format!("cannot read {shown}: {error}")),
    };
    const ADVICE: &str = "Disks in use hold the golden bytes. If the format was changed on \
        purpose: raise its version, keep reading the old one, leave this golden file as it is, and \
        add one of a new name (MILPA_GOLDEN=write); docs/format.md tells both.";
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
