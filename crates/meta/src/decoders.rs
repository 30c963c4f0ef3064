//! The decoders of this crate, for golden files and fuzzing.

mod tables;

use milpa_raft::{LogPosition, Members, SnapshotDescriptor};
use milpa_types::{
    FileKind, InodeId, MetaSlot, Name, NodeId, PartitionId, SessionId, Timestamp, VolumeId,
    VolumeOptions,
};
use milpa_wire::decoder::{Decoder, Random, generate, put};
use milpa_wire::frame::{crc32c, crc32c_of};
use milpa_wire::meta::{CreateMetaPartition, MetaWrite, NewInode, RequestId};

use crate::core::{Command, Partition, PartitionSetup};
use crate::node::snapshot_file::{self, FileHeader};
use crate::node::snapshot_store::{decode_definition, encode_definition};

/// All of them. `meta-log` applies what it decodes: what a client sends reaches the state machine.
#[must_use]
pub fn all() -> Vec<Decoder> {
    vec![
        Decoder { name: "meta-command", sample: command, again: command_again, seal: |_| {} },
        Decoder { name: "meta-log", sample: log, again: log_again, seal: |_| {} },
        Decoder {
            name: "definition",
            sample: definition,
            again: definition_again,
            seal: |b| seal_crc(b),
        },
        Decoder {
            name: "snapshot",
            sample: snapshot,
            again: snapshot_again,
            seal: |b| snapshot_seal(b),
        },
        Decoder {
            name: "snapshot-tables",
            sample: snapshot_of_tables,
            again: snapshot_again,
            seal: |b| snapshot_seal(b),
        },
    ]
}

const SESSION: SessionId = SessionId(1 << 100 | 5);

fn client(sequence: u64, write: MetaWrite) -> Command {
    let id = RequestId { session: SESSION, sequence, unanswered: 1 };
    Command::Client { id, now: Timestamp(1_700_000_000_000_000_000), write }
}

/// What makes an inode in the root directory, or in another partition.
fn create(kind: FileKind, name: &[u8], placement: Option<MetaSlot>) -> Option<MetaWrite> {
    let (target, content) = match kind {
        FileKind::Symlink => (b"file".to_vec(), None),
        FileKind::File if name == b"file" => (Vec::new(), Some(b"content".to_vec())),
        _ => (Vec::new(), None),
    };
    let name = Name::new(name).ok()?;
    let inode = NewInode { kind, mode: 0o755, uid: 1000, gid: 100, device: 0, target };
    let parent = InodeId::ROOT;
    Some(MetaWrite::Create { parent, name, inode, placement, open_existing: false, content })
}

/// A directory, a small file with its content, and a symlink.
fn tree() -> Vec<Command> {
    let writes = [
        Some(MetaWrite::OpenSession),
        create(FileKind::Directory, b"directory", None),
        create(FileKind::File, b"file", None),
        create(FileKind::Symlink, b"symlink", None),
    ];
    (1..).zip(writes.into_iter().flatten()).map(|(n, write)| client(n, write)).collect()
}

fn command(seed: u64) -> Vec<u8> {
    match seed {
        0 => tree().pop().map(|command| command.encode()).unwrap_or_default(),
        _ => generate::<Command>(seed).encode(),
    }
}

fn command_again(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(Command::decode(bytes).ok()?.encode())
}

/// Commands of a session that is open, most of them; otherwise of any kind.
fn commands(seed: u64) -> Vec<Command> {
    let mut random = Random::new(seed);
    let mut commands = tree();
    for sequence in 10..10 + random.below(20) {
        let write = generate::<MetaWrite>(random.draw());
        commands.push(match random.below(4) {
            0 => generate(random.draw()),
            _ => client(sequence, write),
        });
    }
    commands
}

fn log(seed: u64) -> Vec<u8> {
    milpa_wire::encode(&if seed == 0 { tree() } else { commands(seed) })
}

fn create_partition() -> CreateMetaPartition {
    CreateMetaPartition {
        joins: false,
        partition: PartitionId(3),
        volume: VolumeId(1),
        options: VolumeOptions::default(),
        slot: MetaSlot(0),
        members: vec![NodeId(101), NodeId(102), NodeId(103)],
    }
}

fn applied(commands: &[Command]) -> Partition {
    let mut partition = Partition::new(PartitionSetup::from(&create_partition()));
    for (index, command) in (1..).zip(commands) {
        partition.apply(index, command);
    }
    partition
}

fn log_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let commands: Vec<Command> = milpa_wire::decode(bytes).ok()?;
    let partition = applied(&commands);
    let mut snapshot = partition.begin_snapshot(1);
    let pieces: Vec<Vec<u8>> = std::iter::from_fn(|| snapshot.next_piece(1000)).collect();
    let restored = crate::core::restore(pieces.concat().as_slice());
    assert!(
        restored.is_ok_and(|(restored, _)| restored.hash() == partition.hash()),
        "a state does not survive its snapshot"
    );
    Some(milpa_wire::encode(&commands))
}

fn definition(seed: u64) -> Vec<u8> {
    let create = if seed == 0 { create_partition() } else { generate(seed) };
    encode_definition(&create)
}

fn definition_again(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(encode_definition(&decode_definition(bytes)?))
}

/// A partition with records in all tables.
fn snapshot_of_tables(seed: u64) -> Vec<u8> {
    let mut all = tables::filled().unwrap_or_default();
    if seed != 0 {
        all.extend(commands(seed));
    }
    encoded_at(&applied(&all))
}

/// The checksum stands before what it covers.
fn seal_crc(bytes: &mut [u8]) {
    let crc = bytes.get(4..).map(crc32c).unwrap_or_default();
    put(bytes, 0, &crc.to_le_bytes());
}

fn encoded(header: &FileHeader, partition: &Partition) -> Vec<u8> {
    let mut snapshot = partition.begin_snapshot(header.descriptor.position.term);
    let mut bytes = snapshot_file::encode_header(header);
    while let Some(piece) = snapshot.next_piece(1 << 20) {
        bytes.extend(piece);
    }
    bytes
}

fn snapshot(seed: u64) -> Vec<u8> {
    encoded_at(&applied(&if seed == 0 { tree() } else { commands(seed) }))
}

fn encoded_at(partition: &Partition) -> Vec<u8> {
    let position = LogPosition { term: 2, index: partition.applied() };
    let members = Members::new(&create_partition().members, &[]);
    let descriptor = SnapshotDescriptor { position, members };
    encoded(&FileHeader { definition: create_partition(), descriptor }, partition)
}

fn snapshot_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let (header, partition) = snapshot_file::decode(&mut &*bytes).ok()?;
    Some(encoded(&header, &partition))
}

/// The header's checksum, each piece's, and the trailer's count and checksum of checksums.
fn snapshot_seal(bytes: &mut [u8]) {
    let length = |bytes: &[u8], at: usize| {
        let field = bytes.get(at..).and_then(|rest| rest.first_chunk::<4>());
        field.map_or(usize::MAX, |field| u32::from_le_bytes(*field) as usize)
    };
    let header = length(bytes, 8);
    let Some(body) = bytes.get(16..).and_then(|rest| rest.get(..header)) else { return };
    let crc = crc32c_of(&[bytes.get(..12).unwrap_or_default(), body]);
    put(bytes, 12, &crc.to_le_bytes());
    let (mut at, mut pieces, mut crcs) = (16 + header, 0_u64, Vec::new());
    while let Some(payload) = bytes.get(at + 8..).and_then(|rest| rest.get(..length(bytes, at))) {
        let count = payload.len();
        if payload.first() == Some(&3) {
            put(bytes, at + 9, &pieces.to_le_bytes());
            put(bytes, at + 17, &crc32c(&crcs).to_le_bytes());
        }
        let payload = bytes.get(at + 8..at + 8 + count).unwrap_or_default();
        let crc = crc32c(payload).to_le_bytes();
        put(bytes, at + 4, &crc);
        crcs.extend_from_slice(&crc);
        (at, pieces) = (at + 8 + count, pieces + 1);
    }
}

#[cfg(test)]
mod tests {
    use milpa_wire::decoder::{check_golden_kinds, variant_name};

    use super::*;

    #[test]
    fn golden_files_are_read_and_written_as_ever() {
        milpa_wire::decoder::check_all_golden(env!("CARGO_MANIFEST_DIR"), &all()).unwrap();
    }

    /// Story: of 13 tables nine were in no golden file.
    #[test]
    fn a_golden_snapshot_has_records_in_all_tables() {
        let partition = applied(&tables::filled().unwrap());
        let counts = partition.begin_snapshot(2).header().counts.clone();
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
        let step = |slot, step, committed| (MetaSlot(slot), variant_name(&step), committed);
        let steps = partition.next_steps(10);
        let steps = steps.into_iter().map(|next| step(next.slot.0, next.step, next.committed));
        let of_stage = |name: &str, committed| (MetaSlot(1), name.to_owned(), committed);
        assert_eq!(
            steps.collect::<Vec<_>>(),
            [of_stage("PrepareInode", false), of_stage("Abort", false), of_stage("Finish", true)]
        );
        assert_eq!(partition.intents(10).len(), 5, "one of each kind");
    }

    /// Found by the fuzzer: an option of a log entry allowed 4 GiB in an inode; a file was extended to 64 MiB
    /// of zeros there, and no snapshot of the partition could be read.
    #[test]
    fn an_inode_holds_no_more_than_a_snapshot_can_whatever_the_options_say() {
        let session = SessionId(1 << 100);
        let client = |sequence, write| Command::Client {
            id: RequestId { session, sequence, unanswered: 1 },
            now: Timestamp(1),
            write,
        };
        let (kind, mode, target) = (FileKind::File, 0o644, Vec::new());
        let inode = NewInode { kind, mode, uid: 0, gid: 0, device: 0, target };
        let create = MetaWrite::Create {
            parent: InodeId::ROOT,
            name: Name::new(b"file").unwrap(),
            inode,
            placement: None,
            open_existing: false,
            content: Some(b"content".to_vec()),
        };
        let changes = milpa_types::AttributeChanges {
            size: Some(64 << 20),
            ..milpa_types::AttributeChanges::default()
        };
        let grow = MetaWrite::SetAttributes { inode: InodeId(2), changes };
        let options = VolumeOptions { inline_bytes_max: u32::MAX, ..VolumeOptions::default() };
        let commands = vec![
            client(1, MetaWrite::OpenSession),
            client(2, create),
            Command::SetOptions { options },
            client(3, grow),
        ];
        assert!(log_again(&milpa_wire::encode(&commands)).is_some());
        let size = applied(&commands).inode(InodeId(2)).map(|inode| inode.size);
        assert_eq!(size, Ok(64 << 20), "the rest is a hole");
    }

    /// Story: a field was put into `Publish`, and no golden file held one.
    #[test]
    fn golden_commands_are_read_and_written_as_ever() {
        let kind = |command: &Command| match command {
            Command::Client { write, .. } => format!("Client/{}", variant_name(write)),
            Command::Participate { step, .. } => format!("Participate/{}", variant_name(step)),
            Command::Advance { outcome: Ok(outcome), .. } => {
                format!("Advance/{}", variant_name(outcome))
            }
            Command::Advance { outcome: Err(_), .. } => "Advance/error".to_owned(),
            other => variant_name(other),
        };
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/meta-commands");
        check_golden_kinds(path.as_ref(), kind).unwrap();
    }
}
