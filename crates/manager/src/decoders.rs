//! The decoders of this crate, for golden files and fuzzing.

use milpa_raft::{LogPosition, Members, SnapshotDescriptor};
use milpa_types::{ClusterId, Disk, DiskId, Epoch, Life, NodeId, Role, VolumeOptions};
use milpa_wire::data::Configuration;
use milpa_wire::decoder::{Decoder, Random, generate, put};
use milpa_wire::frame::crc32c_of;

use crate::core::{
    Command, CommandV1, NewDataPartition, NewMetaPartition, Registration, Replica, State,
};
use crate::shell::checkpoint::decoding;
use crate::shell::http::body::{DrainBody, NewVolumeBody};

/// All of them. `manager-log` applies what it decodes.
#[must_use]
pub fn all() -> Vec<Decoder> {
    vec![
        Decoder { name: "manager-command", sample: command, again: command_again, seal: |_| {} },
        Decoder { name: "manager-log", sample: log, again: log_again, seal: |_| {} },
        Decoder {
            name: "manager-state-9",
            sample: state,
            again: state_again,
            seal: |b| state_seal(b),
        },
        Decoder { name: "checkpoint", sample: checkpoint, again: checkpoint_again, seal: |_| {} },
        Decoder { name: "http-body", sample: body, again: body_again, seal: |_| {} },
    ]
}

fn register(role: Role, number: u16) -> CommandV1 {
    let disk = Disk {
        id: DiskId(1),
        path: "/disk1".to_owned(),
        capacity_bytes: 1 << 40,
        free_bytes: 1 << 39,
        used_bytes: 0,
        device: 5,
        fenced: None,
    };
    CommandV1::RegisterNode(Registration {
        node: None,
        incarnation: u128::from(number) + 1,
        role,
        address: ([127, 0, 0, 1], 10_000 + number).into(),
        http_address: ([127, 0, 0, 1], 20_000 + number).into(),
        zone: "rack1".to_owned(),
        region: String::new(),
        disks: vec![disk],
    })
}

/// Three meta and three data nodes, and a volume on them.
fn cluster() -> Vec<Command> {
    let mut commands = vec![CommandV1::Lead { manager: NodeId(1) }];
    commands.extend((0..3).map(|number| register(Role::Meta, number)));
    commands.extend((3..6).map(|number| register(Role::Data, number)));
    let members = vec![NodeId(101), NodeId(102), NodeId(103)];
    let place = |node| Replica { node: NodeId(node), disk: DiskId(1) };
    let replicas = vec![place(104), place(105), place(106)];
    commands.push(CommandV1::CreateVolume {
        name: "photos".to_owned(),
        options: VolumeOptions::default(),
        meta: vec![NewMetaPartition { members }],
        data: vec![NewDataPartition { replicas }; 2],
    });
    commands.into_iter().map(Command::V1).collect()
}

fn commands(seed: u64) -> Vec<Command> {
    let mut random = Random::new(seed);
    let mut commands = cluster();
    if seed != 0 {
        commands.extend((0..random.below(20)).map(|_| generate(random.draw())));
    }
    commands
}

fn applied(commands: &[Command]) -> State {
    let mut state = State::new(ClusterId(7));
    for (index, command) in (1..).zip(commands) {
        state.apply(index, command);
    }
    state
}

fn command(seed: u64) -> Vec<u8> {
    match seed {
        0 => milpa_wire::encode(&cluster().pop()),
        _ => milpa_wire::encode(&Some(generate::<Command>(seed))),
    }
    .split_off(1)
}

fn command_again(bytes: &[u8]) -> Option<Vec<u8>> {
    milpa_wire::decode::<Command>(bytes).ok().map(|command| milpa_wire::encode(&command))
}

fn log(seed: u64) -> Vec<u8> {
    milpa_wire::encode(&commands(seed))
}

fn log_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let commands: Vec<Command> = milpa_wire::decode(bytes).ok()?;
    let state = applied(&commands);
    assert!(
        State::decode(&state.encode()).is_ok_and(|decoded| decoded == state),
        "a state does not survive its encoding"
    );
    Some(milpa_wire::encode(&commands))
}

fn state(seed: u64) -> Vec<u8> {
    let mut state = state_with_replaced(seed);
    // One goes, comes back, and has not been compared when another one goes.
    for members in [&[104, 105][..], &[104, 105, 106], &[105, 106]] {
        let configured = state.data_partitions().last().map(|record| {
            let epoch = Epoch(record.configuration.epoch.0 + 1);
            let members: Vec<NodeId> = members.iter().copied().map(NodeId).collect();
            let (primary, learners) = (NodeId(105), Vec::new());
            let configuration = Configuration { epoch, members, primary, learners };
            CommandV1::SetConfiguration { partition: record.id, configuration }
        });
        if let Some(command) = configured {
            state.apply(state.applied() + 1, &Command::V1(command));
        }
    }
    state.encode()
}

fn state_with_replaced(seed: u64) -> State {
    let mut state = applied(&commands(seed));
    let epochs = state.data_partitions().map(|record| (record.id, record.configuration.epoch));
    let whole = CommandV1::MembersWhole { partitions: epochs.collect() };
    let life = Life { last: 1, next: 2 };
    let renewed = CommandV1::RenewLife { node: NodeId(101), incarnation: 1, life };
    let replaced = state.data_partitions().next().map(|record| {
        let (partition, adopted) = (record.id, record.configuration.epoch);
        let epoch = Epoch(adopted.0 + 1);
        let configuration = Configuration { epoch, ..record.configuration.clone() };
        CommandV1::ReplaceConfiguration { partition, configuration, adopted }
    });
    for command in [whole, renewed].into_iter().chain(replaced) {
        state.apply(state.applied() + 1, &Command::V1(command));
    }
    state
}

fn state_again(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(State::decode(bytes).ok()?.encode())
}

fn state_seal(bytes: &mut [u8]) {
    let Some((header, body)) = bytes.split_at_checked(12) else { return };
    let crc = crc32c_of(&[&header[..8], body]);
    put(bytes, 8, &crc.to_le_bytes());
}

fn checkpoint(seed: u64) -> Vec<u8> {
    let state = applied(&commands(seed));
    decoding::sample(&state.encode(), &descriptor_of(&state)).unwrap_or_default()
}

fn descriptor_of(state: &State) -> SnapshotDescriptor {
    let position = LogPosition { term: 2, index: state.applied() };
    let members = Members::new(&[NodeId(1), NodeId(2), NodeId(3)], &[]);
    SnapshotDescriptor { position, members }
}

/// The file's pages are redb's own: what they hold is compared, not they.
fn checkpoint_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let (state, _) = decoding::load(bytes)?;
    assert!(State::decode(&state.encode()).is_ok_and(|decoded| decoded == state));
    None
}

fn body(seed: u64) -> Vec<u8> {
    let body = match seed % 3 {
        0 => r#"{"drains": true}"#.to_owned(),
        1 => format!(r#"{{"name": "v{seed}", "replicas": 3, "durability": "memory"}}"#),
        _ => format!(r#"{{"name": "\u00e9", "capacity_bytes": {seed}, "data_partitions": 4}}"#),
    };
    body.into_bytes()
}

fn body_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let new = serde_json::from_slice::<NewVolumeBody>(bytes);
    let drain = serde_json::from_slice::<DrainBody>(bytes);
    drop((new.map(|new| format!("{new:?}")), drain.map(|drain| format!("{drain:?}"))));
    None
}

#[cfg(test)]
mod tests {
    use milpa_types::{InodeId, NodeState, PartitionId, VolumeId};
    use milpa_wire::decoder::{check_golden_kinds, variant_name};

    use super::*;
    use crate::core::{NewTask, TaskReason};
    use crate::shell::checkpoint::rows;

    #[test]
    fn golden_commands_are_read_and_written_as_ever() {
        let kind = |Command::V1(command): &Command| variant_name(command);
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/manager-commands");
        check_golden_kinds(path.as_ref(), kind).unwrap();
    }

    #[test]
    fn states_of_older_formats_are_read() {
        let golden: [&[u8]; 2] = [
            include_bytes!("../golden/manager-state"),
            include_bytes!("../golden/manager-state-3"),
        ];
        let seen_whole = |mut state: State| {
            let members =
                state.data_partitions().map(|record| (record.id, record.configuration.epoch));
            let whole = CommandV1::MembersWhole { partitions: members.collect() };
            state.apply(state.applied() + 1, &Command::V1(whole));
            state
        };
        let present = seen_whole(applied(&commands(0)));
        for golden in golden {
            // They do not say who is whole; that is seen again.
            assert_eq!(State::decode(golden).map(seen_whole).as_ref(), Ok(&present));
        }
        let golden = include_bytes!("../golden/manager-state-4");
        assert_eq!(State::decode(golden), Ok(present.clone()));
        let mut with_lives = present;
        let life = Life { last: 1, next: 2 };
        let renewed = CommandV1::RenewLife { node: NodeId(101), incarnation: 1, life };
        with_lives.apply(with_lives.applied() + 1, &Command::V1(renewed));
        let golden = include_bytes!("../golden/manager-state-5");
        assert_eq!(State::decode(golden), Ok(with_lives));
        let golden: [&[u8]; 2] = [
            include_bytes!("../golden/manager-state-6"),
            include_bytes!("../golden/manager-state-7"),
        ];
        for golden in golden {
            assert_eq!(State::decode(golden), Ok(state_with_replaced(0).without_possible()));
        }
        let golden = include_bytes!("../golden/manager-state-8");
        let present = State::decode(&state(0)).map(State::without_possible);
        assert_eq!(State::decode(golden), present);
    }

    /// A state with something in each of its maps.
    fn full_state() -> State {
        let mut state = State::decode(&state(0)).unwrap();
        for command in fillings() {
            state.apply(state.applied() + 1, &Command::V1(command));
        }
        state
    }

    /// What is not in [`state`] yet: another node, one that is silent, drains, a split, a task, a volume that was deleted,
    /// and one of which one member of two goes on alone.
    fn fillings() -> Vec<CommandV1> {
        let place = |node| Replica { node: NodeId(node), disk: DiskId(1) };
        let volume = |name: &str| CommandV1::CreateVolume {
            name: name.to_owned(),
            options: VolumeOptions { replicas: 2, ..VolumeOptions::default() },
            meta: vec![NewMetaPartition { members: vec![NodeId(101)] }],
            data: vec![NewDataPartition { replicas: vec![place(104), place(105)] }],
        };
        let options = VolumeOptions { capacity_bytes: 1 << 40, ..VolumeOptions::default() };
        let alone = Configuration {
            epoch: Epoch(2),
            members: vec![NodeId(104)],
            primary: NodeId(104),
            learners: Vec::new(),
        };
        let (drains, begun_unix_ms) = (true, 1_700_000_000_000);
        let task = NewTask {
            partition: PartitionId(2),
            place: place(107),
            reason: TaskReason::DiskDraining(NodeId(104), DiskId(1)),
            begun_unix_ms,
            deadline_unix_ms: begun_unix_ms + 86_400_000,
        };
        vec![
            register(Role::Data, 6),
            CommandV1::SetNodeState { node: NodeId(102), state: NodeState::Silent },
            CommandV1::DrainNode { node: NodeId(103), drains, begun_unix_ms },
            CommandV1::DrainDisk { node: NodeId(104), disk: DiskId(1), drains, begun_unix_ms },
            CommandV1::VolumeReady { volume: VolumeId(1) },
            CommandV1::SetVolumeOptions { volume: VolumeId(1), options },
            CommandV1::ReplicasCreated { replicas: vec![(PartitionId(1), NodeId(101))] },
            CommandV1::BeginSplit { partition: PartitionId(1), end: InodeId(9) },
            CommandV1::BeginTask(task),
            volume("deleted"),
            CommandV1::DeleteVolume { volume: VolumeId(2) },
            volume("pair"),
            CommandV1::SetConfiguration { partition: PartitionId(7), configuration: alone },
        ]
    }

    /// The rows of the checkpoint's file. Its bytes are redb's.
    const CHECKPOINT_ROWS: Decoder = Decoder {
        name: "checkpoint-rows",
        sample: |_| {
            let state = full_state();
            rows::of(&state, &descriptor_of(&state)).into_bytes()
        },
        again: |bytes| {
            let (state, descriptor) = rows::load(std::str::from_utf8(bytes).ok()?)?;
            Some(rows::of(&state, &descriptor).into_bytes())
        },
        seal: |_| {},
    };

    #[test]
    fn golden_rows_of_the_checkpoint_are_read_and_written_as_ever() {
        let shown = format!("{:#?}", full_state());
        let is_empty_map = |line: &&str| line.starts_with("    ") && line[4..].ends_with(": {},");
        let of_state = |line: &&str| !line.starts_with("     ");
        let empty: Vec<&str> = shown.lines().filter(of_state).filter(is_empty_map).collect();
        assert!(empty.is_empty(), "{empty:?}");
        let directory = env!("CARGO_MANIFEST_DIR");
        milpa_wire::decoder::check_all_golden(directory, &[CHECKPOINT_ROWS]).unwrap();
    }

    #[test]
    fn golden_files_are_read_and_written_as_ever() {
        let golden =
            |decoder: &&Decoder| ["manager-command", "manager-state-9"].contains(&decoder.name);
        milpa_wire::decoder::check_all_golden(
            env!("CARGO_MANIFEST_DIR"),
            all().iter().filter(golden),
        )
        .unwrap();
    }
}
