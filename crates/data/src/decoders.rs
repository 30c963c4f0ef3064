//! The decoders of this crate, for golden files and fuzzing.

use bytes::Bytes;
use milpa_raft::{LogPosition, Members, SnapshotDescriptor};
use milpa_types::{Epoch, ExtentId, NodeId, PartitionId, VolumeId};
use milpa_wire::data::Configuration;
use milpa_wire::decoder::{Decoder, Random, generate, put};
use milpa_wire::frame::{crc32c, crc32c_of};

use crate::node::decoding::{
    Label, Ledger, PartitionState, parse_lost, parse_place, text_of_lost, text_of_place,
};
use crate::overwrite::{EntryHead, decode_entry, encode_entry};

/// All of them.
#[must_use]
pub fn all() -> Vec<Decoder> {
    let mut all = crate::store::decoders::all();
    all.extend([
        Decoder {
            name: "partition-state-6",
            sample: state,
            again: state_again,
            seal: |b| state_seal(b),
        },
        Decoder { name: "overwrite-entry", sample: entry, again: entry_again, seal: |_| {} },
        Decoder {
            name: "disk-label-2",
            sample: label,
            again: label_again,
            seal: |b| label_seal(b),
        },
        Decoder {
            name: "disk-ledger",
            sample: ledger,
            again: ledger_again,
            seal: |b| state_seal(b),
        },
        Decoder { name: "lost-blocks-2", sample: lost, again: lost_again, seal: |_| {} },
        Decoder { name: "scrub-place", sample: place, again: place_again, seal: |_| {} },
    ]);
    all
}

fn configuration() -> Configuration {
    let members = vec![NodeId(201), NodeId(202), NodeId(203)];
    Configuration { epoch: Epoch(3), members, primary: NodeId(202), learners: Vec::new() }
}

fn state(seed: u64) -> Vec<u8> {
    let members = Members::new(&configuration().members, &[]);
    let position = LogPosition { term: 4, index: 90 };
    match seed {
        0 => PartitionState {
            partition: PartitionId(7),
            volume: VolumeId(1),
            configuration: configuration(),
            applied: 99,
            snapshot: Some(SnapshotDescriptor { position, members }),
            ids_until: 16,
            relaxed: false,
            configured: LogPosition { term: 5, index: 97 },
            lacks_overwritten: true,
            is_given_rest: true,
            overwritten: 93,
            is_new: true,
        },
        _ => generate(seed),
    }
    .encode()
}

fn state_again(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(PartitionState::decode(bytes).ok()?.encode())
}

fn state_seal(bytes: &mut [u8]) {
    let (head, body) = (bytes.get(..8).unwrap_or_default(), bytes.get(12..).unwrap_or_default());
    let crc = crc32c_of(&[head, body]);
    put(bytes, 8, &crc.to_le_bytes());
}

fn entry(seed: u64) -> Vec<u8> {
    let head = match seed {
        0 => EntryHead::Overwrite { extent: ExtentId(9), offset: 8192, checksums: vec![1, 2] },
        _ => generate(seed),
    };
    encode_entry(&head, &Random::new(seed).bytes(50)).to_vec()
}

fn entry_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let (head, rest) = decode_entry(&Bytes::copy_from_slice(bytes))?;
    Some(encode_entry(&head, &rest).to_vec())
}

const INCARNATION: u128 = 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef;

fn label(seed: u64) -> Vec<u8> {
    let disk = milpa_types::DiskId(1 + seed as u32);
    Label { incarnation: INCARNATION, disk }.to_text().into_bytes()
}

fn label_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let label = Label::parse(&String::from_utf8_lossy(bytes), INCARNATION).ok()?;
    Some(label.to_text().into_bytes())
}

fn ledger(seed: u64) -> Vec<u8> {
    generate::<Ledger>(seed).encode()
}

fn ledger_again(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(Ledger::decode(bytes).ok()?.encode())
}

fn lost(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut line = |_| {
        let state = if random.below(2) == 0 { "damaged" } else { "lost" };
        format!("{} {} {} {state}\n", random.number(), random.number(), random.number())
    };
    let lines: String = (0..2 + seed % 3).map(&mut line).collect();
    format!("2\n{lines}").into_bytes()
}

fn label_seal(bytes: &mut [u8]) {
    let name = b"crc = ";
    let Some(at) = bytes.windows(name.len()).rposition(|window| window == name) else { return };
    let crc = crc32c(bytes.get(..at).unwrap_or_default());
    put(bytes, at + name.len(), format!("{crc:08x}").as_bytes());
}

fn lost_again(bytes: &[u8]) -> Option<Vec<u8>> {
    parse_lost(&String::from_utf8_lossy(bytes)).map(|noted| text_of_lost(&noted).into_bytes())
}

fn place(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    format!("1 {} {} {}\n", random.number(), random.number(), random.number()).into_bytes()
}

fn place_again(bytes: &[u8]) -> Option<Vec<u8>> {
    parse_place(&String::from_utf8_lossy(bytes)).map(|place| text_of_place(place).into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_formats_of_a_partition_s_state_are_read() {
        let now = PartitionState::decode(&state(0)).unwrap();
        let fifth = PartitionState { is_new: false, ..now };
        let bytes = include_bytes!("../golden/partition-state-5");
        assert_eq!(PartitionState::decode(bytes), Ok(fifth.clone()));
        let fourth = PartitionState { overwritten: fifth.applied, ..fifth };
        let bytes = include_bytes!("../golden/partition-state-4");
        assert_eq!(PartitionState::decode(bytes), Ok(fourth.clone()));
        let third = PartitionState { lacks_overwritten: false, is_given_rest: false, ..fourth };
        let then = PartitionState { configured: LogPosition::default(), ..third.clone() };
        let first = include_bytes!("../golden/partition-state");
        assert_eq!(PartitionState::decode(first), Ok(then.clone()));
        let second = include_bytes!("../golden/partition-state-2");
        assert_eq!(PartitionState::decode(second), Ok(then));
        let bytes = include_bytes!("../golden/partition-state-3");
        assert_eq!(PartitionState::decode(bytes), Ok(third));
    }

    #[test]
    fn the_first_format_of_a_partition_s_label_is_read() {
        let label = all().into_iter().find(|decoder| decoder.name == "partition-label-2").unwrap();
        let read = (label.again)(include_bytes!("../golden/partition-label"));
        assert_eq!(read.unwrap(), (label.sample)(0));
    }

    #[test]
    fn the_first_format_of_a_disk_s_label_is_read() {
        let read = label_again(include_bytes!("../golden/disk-label"));
        assert_eq!(read.unwrap(), label(0));
    }

    #[test]
    fn the_first_format_of_the_note_of_damaged_blocks_is_read() {
        let read = lost_again(include_bytes!("../golden/lost-blocks")).unwrap();
        let lines = "3980143261097177850 1870870783258 7 lost\n9 7 34359738367 lost\n";
        assert_eq!(String::from_utf8(read).unwrap(), format!("2\n{lines}"));
    }

    #[test]
    fn golden_files_are_read_and_written_as_ever() {
        let golden = |decoder: &&Decoder| decoder.name != "store";
        milpa_wire::decoder::check_all_golden(
            env!("CARGO_MANIFEST_DIR"),
            all().iter().filter(golden),
        )
        .unwrap();
    }
}
