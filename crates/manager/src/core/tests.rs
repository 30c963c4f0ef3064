//! Goal: what applying commands promises, and that equal commands give equal bytes.

use milpa_types::{
    ClusterId, Disk, DiskId, Epoch, InodeId, Life, MetaSlot, NodeId, NodeState, PartitionId, Role,
    VolumeId, VolumeOptions,
};
use milpa_wire::data::Configuration;
use milpa_wire::frame::crc32c_of;
use proptest::prelude::*;

use super::*;
use milpa_types::ManagerError;

/// A state to which commands are applied at rising indexes.
pub(crate) struct Log {
    pub(crate) state: State,
}

impl Log {
    pub(crate) fn new() -> Log {
        Log { state: State::new(ClusterId(7)) }
    }

    /// A cluster of this many meta nodes (ids from 101) and data nodes (ids after them).
    pub(crate) fn with_nodes(meta: u32, data: u32) -> Log {
        let mut log = Log::new();
        for number in 0..meta {
            log.register(registration(Role::Meta, number));
        }
        for number in 0..data {
            log.register(registration(Role::Data, 1000 + number));
        }
        log
    }

    pub(crate) fn apply(&mut self, command: CommandV1) -> Applied {
        let index = self.state.applied() + 1;
        self.state.apply(index, &Command::V1(command))
    }

    #[track_caller]
    pub(crate) fn register(&mut self, registration: Registration) -> NodeId {
        match self.apply(CommandV1::RegisterNode(registration)) {
            Applied::Registered(node) => node,
            other => panic!("{other:?}"),
        }
    }

    /// A volume with `slots` meta partitions on the first three meta nodes, and `parts` data
    /// partitions on the first three data nodes.
    #[track_caller]
    pub(crate) fn volume(&mut self, name: &str, slots: usize, parts: usize) -> VolumeId {
        let of = |state: &State, role| -> Vec<NodeId> {
            state.nodes().filter(|n| n.role == role).map(|n| n.id).take(3).collect()
        };
        let members = of(&self.state, Role::Meta);
        let replicas = (of(&self.state, Role::Data).into_iter())
            .map(|node| Replica { node, disk: DiskId(1) })
            .collect::<Vec<_>>();
        let created = self.apply(CommandV1::CreateVolume {
            name: name.to_owned(),
            options: VolumeOptions::default(),
            meta: vec![NewMetaPartition { members }; slots],
            data: vec![NewDataPartition { replicas }; parts],
        });
        match created {
            Applied::Volume(volume) => volume,
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn disk(id: u32) -> Disk {
    Disk {
        id: DiskId(id),
        path: format!("/disk{id}"),
        capacity_bytes: 1 << 40,
        free_bytes: 1 << 40,
        used_bytes: 0,
        device: u64::from(id),
        fenced: None,
    }
}

pub(crate) fn registration(role: Role, number: u32) -> Registration {
    let port = 10_000 + number as u16;
    Registration {
        node: None,
        incarnation: u128::from(number) + 1,
        role,
        address: ([127, 0, 0, 1], port).into(),
        http_address: ([127, 0, 0, 2], port).into(),
        zone: String::new(),
        region: String::new(),
        disks: vec![disk(1)],
    }
}

#[track_caller]
fn check_refused(applied: &Applied, part: &str) {
    match applied {
        Applied::Refused(error) => assert!(error.to_string().contains(part), "{error}"),
        other => panic!("expected a refusal with {part:?}, got {other:?}"),
    }
}

#[test]
fn node_ids_start_at_101_and_a_lost_answer_gives_no_second_id() {
    let mut log = Log::new();
    let first = log.register(registration(Role::Meta, 0));
    assert_eq!(first, NodeId(101));
    assert_eq!(log.register(registration(Role::Meta, 0)), first, "the answer was lost: same id");
    assert_eq!(log.register(registration(Role::Data, 1)), NodeId(102));
    assert_eq!(log.state.nodes_version(), 2);
}

#[test]
fn a_node_may_move_but_not_change_its_role_or_its_incarnation() {
    let mut log = Log::new();
    let node = log.register(registration(Role::Meta, 0));
    let again = Registration { node: Some(node), ..registration(Role::Meta, 0) };

    let moved = Registration { address: ([10, 0, 0, 9], 1).into(), ..again.clone() };
    assert_eq!(log.register(moved.clone()), node);
    assert_eq!(log.state.node(node).unwrap().address, moved.address);
    assert_eq!(log.state.nodes_version(), 2);

    let copy = Registration { incarnation: 99, ..again.clone() };
    check_refused(
        &log.apply(CommandV1::RegisterNode(copy)),
        "is running at 10.0.0.9:1; start with",
    );
    let other = Registration { role: Role::Data, ..again.clone() };
    check_refused(&log.apply(CommandV1::RegisterNode(other)), "is a meta node, not a data node");
    let stranger = Registration { node: Some(NodeId(555)), ..again };
    check_refused(&log.apply(CommandV1::RegisterNode(stranger)), "not of this cluster");
}

/// A restored image has forgotten what its node promised since: the vote it gave, the bytes it
/// acknowledged. However often it is started, it is not that node.
#[test]
fn an_old_copy_of_a_directory_is_refused_and_a_lost_answer_is_not() {
    let mut log = Log::new();
    let start = |node, last, next| CommandV1::StartNode {
        registration: Registration { node, ..registration(Role::Data, 0) },
        life: Life { last, next },
    };
    let node = NodeId(101);
    let taken = Applied::Registered(node);
    assert_eq!(log.apply(start(None, 1, 2)), taken);
    assert_eq!(log.apply(start(None, 1, 2)), taken, "the answer was lost");
    assert_eq!(log.apply(start(Some(node), 1, 2)), taken, "it died before it wrote that down");
    assert_eq!(log.apply(start(Some(node), 2, 2)), taken, "it had no room for another life");
    assert_eq!(log.apply(start(Some(node), 2, 3)), taken);
    let renew = |incarnation, last, next| CommandV1::RenewLife {
        node,
        incarnation,
        life: Life { last, next },
    };
    assert_eq!(log.apply(renew(1, 3, 4)), Applied::Done);
    check_refused(&log.apply(renew(9, 4, 5)), "is not registered");
    log.apply(CommandV1::SetNodeState { node, state: NodeState::Silent });
    for copy in [start(None, 1, 2), start(Some(node), 2, 77), start(Some(node), 3, 3)] {
        check_refused(&log.apply(copy), "is an older copy");
    }
    check_refused(&log.apply(renew(1, 3, 78)), "is an older copy");
    assert_eq!(log.state.node(node).unwrap().state, NodeState::Silent);
    assert_eq!(log.apply(start(Some(node), 4, 5)), taken);
    // Forgotten with the node.
    log.apply(CommandV1::RemoveNode { node });
    assert_eq!(log.apply(start(None, 1, 2)), Applied::Registered(NodeId(102)));
}

/// Nodes of before that said nothing of their lives.
#[test]
fn the_first_life_that_is_told_is_believed() {
    let mut log = Log::with_nodes(1, 0);
    let registration = Registration { node: Some(NodeId(101)), ..registration(Role::Meta, 0) };
    let life = Life { last: 0, next: 5 };
    let start = |life| CommandV1::StartNode { registration: registration.clone(), life };
    assert_eq!(log.apply(start(life)), Applied::Registered(NodeId(101)));
    check_refused(&log.apply(start(Life { last: 0, next: 6 })), "is an older copy");
}

#[test]
fn every_problem_of_a_registration_is_named() {
    let bad = Registration {
        role: Role::Client,
        zone: "z".repeat(65),
        disks: vec![disk(1), disk(1)],
        ..registration(Role::Data, 0)
    };
    let applied = Log::new().apply(CommandV1::RegisterNode(bad));
    check_refused(&applied, "role: a client does not register");
    check_refused(&applied, "zone: 65 bytes");
    check_refused(&applied, "two have the same id");
}

#[test]
fn a_silent_node_is_active_again_when_it_is_heard_or_registers() {
    let mut log = Log::with_nodes(1, 0);
    let node = NodeId(101);
    let state = |log: &Log| log.state.node(node).unwrap().state;
    log.apply(CommandV1::SetNodeState { node, state: NodeState::Silent });
    assert_eq!(state(&log), NodeState::Silent);
    log.apply(CommandV1::SetNodeState { node, state: NodeState::Active });
    assert_eq!(state(&log), NodeState::Active);
    log.apply(CommandV1::SetNodeState { node, state: NodeState::Silent });
    log.register(Registration { node: Some(node), ..registration(Role::Meta, 0) });
    assert_eq!(state(&log), NodeState::Active);
}

#[test]
fn a_volume_gets_its_partitions_by_slot_and_its_name_is_taken() {
    let mut log = Log::with_nodes(3, 3);
    let volume = log.volume("home", 3, 2);
    assert_eq!(volume, VolumeId(1));
    let slots: Vec<MetaSlot> = log.state.meta_partitions().map(|m| m.slot).collect();
    assert_eq!(slots, [MetaSlot(0), MetaSlot(1), MetaSlot(2)]);
    let data = log.state.data_partition(PartitionId(4)).unwrap();
    assert_eq!(data.configuration.epoch, Epoch(1));
    assert_eq!(data.configuration.primary, data.replicas[0].node);
    let again = log.apply(CommandV1::CreateVolume {
        name: "home".to_owned(),
        options: VolumeOptions::default(),
        meta: Vec::new(),
        data: Vec::new(),
    });
    check_refused(&again, "volume \"home\" exists");
}

#[test]
fn a_placement_that_no_longer_holds_is_refused_whole() {
    let mut log = Log::with_nodes(3, 3);
    let before = log.state.clone();
    let members =
        |ids: &[u32]| NewMetaPartition { members: ids.iter().map(|i| NodeId(*i)).collect() };
    let replicas = |ids: &[(u32, u32)]| NewDataPartition {
        replicas: ids.iter().map(|(n, d)| Replica { node: NodeId(*n), disk: DiskId(*d) }).collect(),
    };
    let cases = [
        (members(&[101, 101]), replicas(&[(104, 1), (105, 1)]), "two on one node"),
        (members(&[104]), replicas(&[(104, 1), (105, 1)]), "104 is not a meta node"),
        (members(&[101]), replicas(&[(104, 1)]), "1 replicas, 2 are needed"),
        (members(&[101]), replicas(&[(104, 1), (105, 9)]), "105 has no disk 9"),
    ];
    for (meta, data, part) in cases {
        let applied = log.apply(CommandV1::CreateVolume {
            name: "v".to_owned(),
            options: VolumeOptions::default(),
            meta: vec![meta],
            data: vec![data],
        });
        check_refused(&applied, part);
    }
    assert_eq!(log.state.volumes().count(), 0);
    assert_eq!(State { applied: before.applied, ..log.state.clone() }, before);
}

#[test]
fn an_epoch_is_given_once_and_who_was_always_a_member_has_everything() {
    let mut log = Log::with_nodes(3, 3);
    log.volume("home", 1, 1);
    let partition = PartitionId(2);
    let configuration = |epoch, members: &[u32], primary| CommandV1::SetConfiguration {
        partition,
        configuration: Configuration {
            epoch: Epoch(epoch),
            members: members.iter().map(|id| NodeId(*id)).collect(),
            primary: NodeId(primary),
            learners: Vec::new(),
        },
    };
    assert_eq!(log.apply(configuration(2, &[104, 105], 104)), Applied::Done);
    check_refused(
        &log.apply(configuration(2, &[104, 106], 104)),
        "another configuration came first",
    );
    check_refused(
        &log.apply(configuration(4, &[104, 106], 104)),
        "another configuration came first",
    );
    check_refused(&log.apply(configuration(3, &[106], 106)), "not a configuration");
    check_refused(&log.apply(configuration(3, &[104, 104], 104)), "not a configuration");
    check_refused(&log.apply(configuration(3, &[104, 105], 106)), "not a configuration");
    check_refused(&log.apply(configuration(3, &[104, 101], 104)), "not a configuration");
    assert_eq!(log.state.data_partition(partition).unwrap().configuration.epoch, Epoch(2));
    // One that was away lacks what was acknowledged meanwhile, until all were seen to hold the same.
    assert_eq!(log.apply(configuration(3, &[104, 105, 106], 104)), Applied::Done);
    assert!(!log.state.is_whole(partition, NodeId(106)));
    // Who was there from the first byte on lacks nothing (simulation, seed 19935).
    assert!(log.state.is_whole(partition, NodeId(105)));
    assert_eq!(log.apply(configuration(4, &[105], 105)), Applied::Done);
}

#[test]
fn algorithm_1_cuts_the_range_first_and_opens_the_next_slot_once() {
    let mut log = Log::with_nodes(3, 3);
    log.volume("home", 3, 1);
    let last = PartitionId(3);
    let next = || NewMetaPartition { members: vec![NodeId(101)] };
    let finish = CommandV1::FinishSplit { partition: last, next: next() };
    check_refused(&log.apply(finish.clone()), "not being split");

    let outside = CommandV1::BeginSplit { partition: last, end: InodeId(5) };
    check_refused(&log.apply(outside), "outside the partition's range");
    let end = InodeId(MetaSlot(2).first_inode().0 + 1000);
    assert_eq!(log.apply(CommandV1::BeginSplit { partition: last, end }), Applied::Done);
    assert_eq!(log.state.meta_partition(last).unwrap().split, SplitState::Cutting { end });

    let Applied::Partitions(opened) = log.apply(finish.clone()) else { panic!() };
    assert_eq!(log.state.meta_partition(opened[0]).unwrap().slot, MetaSlot(3));
    assert_eq!(log.state.meta_partition(last).unwrap().split, SplitState::Cut { end });
    check_refused(&log.apply(finish), "not being split");
}

#[test]
fn new_options_are_told_to_every_meta_node_and_an_old_confirmation_does_not_count() {
    let mut log = Log::with_nodes(3, 3);
    let volume = log.volume("home", 3, 1);
    let options = VolumeOptions { inline_bytes_max: 0, ..VolumeOptions::default() };
    log.apply(CommandV1::SetVolumeOptions { volume, options });
    let untold = |log: &Log| log.state.volume(volume).unwrap().options_untold.len();
    assert_eq!(untold(&log), 6, "meta and data nodes");
    log.apply(CommandV1::OptionsTaken { volume, node: NodeId(101), version: 1 });
    assert_eq!(untold(&log), 6);
    log.apply(CommandV1::OptionsTaken { volume, node: NodeId(101), version: 2 });
    assert_eq!(untold(&log), 5);
    let bad = VolumeOptions { replicas: 2, ..VolumeOptions::default() };
    check_refused(&log.apply(CommandV1::SetVolumeOptions { volume, options: bad }), "replicas: 3");
}

#[test]
fn a_deleted_volumes_replicas_are_remembered_until_each_is_gone() {
    let mut log = Log::with_nodes(3, 3);
    let volume = log.volume("home", 1, 1);
    assert_eq!(log.apply(CommandV1::DeleteVolume { volume }), Applied::Done);
    assert_eq!(log.state.meta_partitions().count() + log.state.data_partitions().count(), 0);
    let (partition, removal) = log.state.removals().next().unwrap();
    assert_eq!((removal.kind, removal.nodes.len()), (PartitionKind::Meta, 3));
    for node in 101..=103 {
        log.apply(CommandV1::ReplicasRemoved { replicas: vec![(partition, NodeId(node))] });
    }
    assert_eq!(log.state.removals().count(), 1, "the data partition's is left");
    check_refused(&log.apply(CommandV1::DeleteVolume { volume }), "gone");
    let next = log.volume("home", 1, 1);
    assert_eq!(next, VolumeId(2), "the name is free, the id is not");
    assert!(log.state.was_given(PartitionId(1)) && !log.state.was_given(PartitionId(5)));
}

#[test]
fn entries_that_come_a_second_time_change_nothing() {
    let mut log = Log::with_nodes(1, 0);
    let before = log.state.clone();
    let index = log.state.applied();
    let again = Command::V1(CommandV1::RegisterNode(registration(Role::Data, 77)));
    assert_eq!(log.state.apply(index, &again), Applied::Done);
    assert_eq!(log.state, before);
}

#[test]
fn a_snapshot_gives_the_state_back_and_damage_is_told() {
    let mut log = Log::with_nodes(3, 3);
    log.volume("home", 3, 6);
    let bytes = log.state.encode();
    assert_eq!(State::decode(&bytes).as_ref(), Ok(&log.state));
    // Seed 378645: a flipped bit of the format passed for a newer program's state, and the manager never started again.
    for bit in 32..8 * bytes.len() {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(State::decode(&flipped), Err(SnapshotError::Damaged), "bit {bit}");
    }
    let of_format = |format: u32, covered: &[&[u8]]| {
        let head = [*b"MLMS", format.to_le_bytes(), crc32c_of(covered).to_le_bytes()];
        [&head.concat(), &bytes[12..]].concat()
    };
    let newer = of_format(10, &[b"MLMS", &[10, 0, 0, 0], &bytes[12..]]);
    assert_eq!(State::decode(&newer), Err(SnapshotError::Newer { found: 10 }));
    let older = of_format(1, &[&bytes[12..]]);
    assert_eq!(State::decode(&older), Err(SnapshotError::Older { found: 1 }));
    assert!(matches!(State::decode(&bytes[..11]), Err(SnapshotError::Malformed { .. })));
    assert!(matches!(State::decode(b"something else"), Err(SnapshotError::Malformed { .. })));
}

/// Commands that are mostly refused but sometimes hit: small ids, few names.
fn any_command() -> impl Strategy<Value = CommandV1> {
    let node = (100_u32..110).prop_map(NodeId);
    let partition = (0_u64..12).prop_map(PartitionId);
    let volume = (0_u32..4).prop_map(VolumeId);
    let members = proptest::collection::vec(node.clone(), 0..4);
    let meta = members.clone().prop_map(|members| NewMetaPartition { members });
    let data = members.clone().prop_map(|nodes| NewDataPartition {
        replicas: nodes.into_iter().map(|node| Replica { node, disk: DiskId(1) }).collect(),
    });
    prop_oneof![
        (any::<bool>(), 0_u32..8).prop_map(|(meta, number)| {
            let role = if meta { Role::Meta } else { Role::Data };
            CommandV1::RegisterNode(registration(role, number))
        }),
        (0_u32..8, 0_u128..3, 0_u128..3).prop_map(|(number, last, next)| CommandV1::StartNode {
            registration: registration(Role::Data, number),
            life: Life { last, next },
        }),
        (node.clone(), any::<bool>()).prop_map(|(node, active)| CommandV1::SetNodeState {
            node,
            state: if active { NodeState::Active } else { NodeState::Silent },
        }),
        ("[ab]", meta.clone(), data.clone()).prop_map(|(name, meta, data)| {
            let options = VolumeOptions::default();
            CommandV1::CreateVolume { name, options, meta: vec![meta], data: vec![data] }
        }),
        volume.clone().prop_map(|volume| CommandV1::VolumeReady { volume }),
        volume.clone().prop_map(|volume| CommandV1::DeleteVolume { volume }),
        (volume, data)
            .prop_map(|(volume, data)| CommandV1::AddDataPartitions { volume, data: vec![data] }),
        (partition.clone(), 1_u64..1000)
            .prop_map(|(partition, end)| CommandV1::BeginSplit { partition, end: InodeId(end) }),
        (partition.clone(), meta)
            .prop_map(|(partition, next)| CommandV1::FinishSplit { partition, next }),
        (partition.clone(), 1_u64..4, members, node.clone()).prop_map(
            |(partition, epoch, members, primary)| CommandV1::SetConfiguration {
                partition,
                configuration: Configuration {
                    epoch: Epoch(epoch),
                    members,
                    primary,
                    learners: Vec::new()
                },
            }
        ),
        (partition.clone(), node.clone()).prop_map(|(partition, node)| {
            CommandV1::ReplicasCreated { replicas: vec![(partition, node)] }
        }),
        (partition, node).prop_map(|(partition, node)| CommandV1::ReplicasRemoved {
            replicas: vec![(partition, node)]
        }),
    ]
}

proptest! {
    /// Determinism, and the invariants of the module's documentation, under any commands.
    #[test]
    fn equal_commands_give_equal_bytes_and_keep_the_invariants(
        commands in proptest::collection::vec(any_command(), 0..120)
    ) {
        let (mut one, mut two) = (Log::with_nodes(2, 3), Log::with_nodes(2, 3));
        let mut epochs = std::collections::BTreeMap::new();
        for command in &commands {
            prop_assert_eq!(one.apply(command.clone()), two.apply(command.clone()));
            for data in one.state.data_partitions() {
                let nodes: std::collections::BTreeSet<_> = data.configuration.members.iter().collect();
                prop_assert!(nodes.len() >= 2 && nodes.contains(&data.configuration.primary));
                let epoch = data.configuration.epoch.0;
                let before = epochs.insert(data.id, epoch).unwrap_or(epoch);
                prop_assert!(epoch == before || epoch == before + 1);
            }
        }
        prop_assert_eq!(one.state.hash(), two.state.hash());
        prop_assert_eq!(State::decode(&one.state.encode()), Ok(one.state));
    }

    /// Hostile bytes give an error, never a panic.
    #[test]
    fn any_bytes_are_decoded_or_refused(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..400),
        format in 2_u32..=8,
    ) {
        let _ = State::decode(&bytes);
        if bytes.len() >= 12 {
            bytes[..4].copy_from_slice(b"MLMS");
            bytes[4..8].copy_from_slice(&format.to_le_bytes());
            let header = if format >= 7 { &bytes[..8] } else { &[] };
            let sum = crc32c_of(&[header, &bytes[12..]]);
            bytes[8..12].copy_from_slice(&sum.to_le_bytes());
            let _ = State::decode(&bytes);
        }
    }
}

#[test]
fn volume_problems_name_every_field() {
    let options = VolumeOptions { replicas: 1, ..VolumeOptions::default() };
    let problems = volume::volume_problems("No Way", &options, 0, 5000);
    for part in ["replicas", "name", "meta_partitions", "data_partitions"] {
        assert!(problems.iter().any(|p| p.starts_with(part)), "{part}: {problems:?}");
    }
    let error = ManagerError::Invalid { problems };
    assert_eq!(error.next(), milpa_types::Next::GiveUp);
}
