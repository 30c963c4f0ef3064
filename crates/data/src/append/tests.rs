//! Scripts of the append cores, and one random schedule of a primary with two backups.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use milpa_types::{DataError, Epoch, ExtentId, InodeId, NodeId, SessionId};
use milpa_wire::data::{AppendTarget, Configuration, ExtentState};
use proptest::prelude::*;

use super::primary::ANNOUNCE_PAUSE_MS;
use super::*;

const HEADER: u64 = 48;

fn limits() -> Limits {
    Limits {
        requests_max: 100,
        extents_max: 10,
        small_extent_bytes_max: 1000,
        batch_bytes_max: 500,
        piece_header_bytes: HEADER,
        member_silent_ms: 2000,
        idle_ms: 60_000,
        tokens_max: 64,
    }
}

fn configuration(epoch: u64, members: &[u32]) -> Configuration {
    let members = members.iter().copied().map(NodeId).collect();
    Configuration { epoch: Epoch(epoch), members, primary: NodeId(1), learners: Vec::new() }
}

fn head(target: AppendTarget, length: u64) -> AppendHead {
    let (epoch, inode, session) = (Epoch(1), InodeId(5), SessionId(9));
    AppendHead { epoch, inode, session, target, length, sync: false }
}

/// A primary and what it ordered.
struct Script {
    primary: Primary,
    effects: Vec<Effect>,
}

impl Script {
    fn new(members: &[u32]) -> Script {
        let mut primary = Primary::new(NodeId(1), configuration(1, members), limits());
        primary.ids_reserved(0, 100_000);
        Script { primary, effects: Vec::new() }
    }

    fn append(&mut self, request: RequestNumber, head: AppendHead) -> &mut Script {
        self.primary.append(request, &head, || None, &mut self.effects);
        self
    }

    fn starts(&mut self) -> Vec<Start> {
        let mut starts = Vec::new();
        self.effects.retain(|effect| match effect {
            Effect::Start(start) => {
                starts.push(start.clone());
                false
            }
            _ => true,
        });
        starts
    }

    fn start(&mut self) -> Start {
        let mut starts = self.starts();
        assert_eq!(starts.len(), 1, "{starts:?}");
        starts.remove(0)
    }

    fn done(&mut self, start: &Start) {
        for member in [1, 2, 3] {
            self.primary.member_done(start.operation, NodeId(member), Ok(()), &mut self.effects);
        }
    }

    fn answers(&mut self) -> Vec<(RequestNumber, Result<Placed, DataError>)> {
        let answers = std::mem::take(&mut self.effects).into_iter();
        answers
            .filter_map(|effect| match effect {
                Effect::Answer { request, result } => Some((request, result)),
                _ => None,
            })
            .collect()
    }
}

fn more(extent: ExtentId, offset: u64, length: u64) -> AppendHead {
    head(AppendTarget::Extent { extent, offset }, length)
}

#[test]
fn an_append_is_acknowledged_when_every_member_has_it_and_in_order() {
    let mut script = Script::new(&[1, 2, 3]);
    let first = script.append(1, head(AppendTarget::New { token: 1 }, 10)).start();
    assert_eq!((first.offset, first.backups.as_slice()), (0, &[NodeId(2), NodeId(3)][..]));
    let second = script.append(2, more(first.extent, 10, 5)).start();
    script.done(&second);
    script.primary.member_done(first.operation, NodeId(1), Ok(()), &mut script.effects);
    script.primary.member_done(first.operation, NodeId(2), Ok(()), &mut script.effects);
    assert_eq!(script.answers(), vec![], "one member is missing");
    script.primary.member_done(first.operation, NodeId(3), Ok(()), &mut script.effects);
    let placed = |offset, committed| Ok(Placed { extent: first.extent, offset, committed });
    assert_eq!(script.answers(), vec![(1, placed(0, 10)), (2, placed(10, 15))]);
}

#[test]
fn repeats_are_answered_and_not_applied_twice() {
    let mut script = Script::new(&[1, 2, 3]);
    let new = head(AppendTarget::New { token: 1 }, 10);
    let first = script.append(1, new).start();
    assert_eq!(script.append(2, new).starts(), vec![], "the same token while it is under way");
    script.done(&first);
    let placed = Ok(Placed { extent: first.extent, offset: 0, committed: 10 });
    assert_eq!(script.answers(), vec![(1, placed.clone()), (2, placed.clone())]);
    script.append(3, new).append(4, more(first.extent, 0, 10));
    assert_eq!(script.answers(), vec![(3, placed.clone()), (4, placed.clone())]);
    let other = script.append(5, head(AppendTarget::New { token: 2 }, 10)).start();
    assert_ne!(other.extent, first.extent, "another token, another extent");
    // A repeat that wants its bytes on disk gets a barrier.
    let barrier = script.append(6, AppendHead { sync: true, ..new }).start();
    assert!(barrier.sync && barrier.requests.is_empty() && barrier.offset == 10);
    script.done(&barrier);
    assert_eq!(script.answers(), vec![(6, placed)]);
}

#[test]
fn pieces_that_arrive_while_a_batch_is_under_way_make_the_next_one() {
    let mut script = Script::new(&[1, 2, 3]);
    let piece = |token, length| head(AppendTarget::Small { token }, length);
    let first = script.append(1, piece(1, 100)).start();
    assert_eq!((first.offset, first.extent.is_small()), (0, true));
    script.append(2, piece(2, 100)).append(3, piece(3, 100)).append(4, piece(4, 300));
    assert_eq!(script.starts(), vec![]);
    script.done(&first);
    let second = script.start();
    assert_eq!((second.offset, &second.requests[..]), (148, &[2, 3][..]), "the fourth has no room");
    let extent = first.extent;
    let placed = |offset, committed| Ok(Placed { extent, offset, committed });
    assert_eq!(script.answers(), vec![(1, placed(48, 148))]);
    script.done(&second);
    let third = script.start();
    assert_eq!(third.requests, vec![4]);
    assert_eq!(script.answers(), vec![(2, placed(196, 444)), (3, placed(344, 444))]);
    script.append(5, piece(2, 100));
    assert_eq!(script.answers(), vec![(5, placed(196, 444))], "a repeat of the second");
}

/// The story: a repeat with other bytes took the place of the first copy in a batch that had been measured
/// with that one; all pieces behind it were acknowledged at offsets where other clients' bytes lay.
#[test]
fn a_repeat_of_another_length_is_refused() {
    let mut script = Script::new(&[1, 2, 3]);
    let piece = |token, length| head(AppendTarget::Small { token }, length);
    let first = script.append(1, piece(1, 100)).start();
    script.append(2, piece(2, 100)).append(3, piece(3, 100));
    let refused = Err(DataError::Invalid);
    script.append(4, piece(2, 120));
    assert_eq!(script.answers(), vec![(4, refused.clone())], "while it waits for its batch");
    script.append(5, piece(1, 90));
    assert_eq!(script.answers(), vec![(5, refused.clone())], "while it is under way");
    script.done(&first);
    let second = script.start();
    assert_eq!(second.requests, [2, 3]);
    script.done(&second);
    script.answers();
    script.append(6, piece(2, 120)).append(7, head(AppendTarget::New { token: 3 }, 90));
    assert_eq!(script.answers(), vec![(6, refused.clone()), (7, refused)], "when it has its place");
}

#[test]
fn a_full_shared_extent_is_closed_and_the_next_one_begun() {
    let mut script = Script::new(&[1, 2, 3]);
    let mut extents = BTreeSet::new();
    for request in 0..10 {
        let small = head(AppendTarget::Small { token: request }, 300);
        let start = script.append(request, small).start();
        extents.insert(start.extent);
        script.done(&start);
    }
    assert_eq!(extents.len(), 4, "three pieces of 348 bytes pass the bound of 1000");
    let closed = |effect: &&Effect| matches!(effect, Effect::Closed { length: 1044, .. });
    assert_eq!(script.effects.iter().filter(closed).count(), 3);
}

#[test]
fn a_failed_member_ends_the_extent_at_the_commit_offset() {
    let mut script = Script::new(&[1, 2, 3]);
    let first = script.append(1, head(AppendTarget::New { token: 1 }, 10)).start();
    script.done(&first);
    script.answers();
    let extent = first.extent;
    let second = script.append(2, more(extent, 10, 5)).start();
    script.append(3, more(extent, 15, 5)).start();
    let silent = DataError::MemberSilent { node: NodeId(3) };
    script.primary.member_done(
        second.operation,
        NodeId(3),
        Err(silent.clone()),
        &mut script.effects,
    );
    assert!(script.effects.contains(&Effect::Broken { extent, committed: 10 }));
    let sealed = || Err(DataError::Sealed { length: 10 });
    assert_eq!(script.answers(), vec![(2, sealed()), (3, sealed())]);
    script.append(4, more(extent, 10, 5));
    assert_eq!(script.answers(), vec![(4, sealed())], "later appends too");
    // Others would stall behind the same member: they are told at once, for a short while.
    script.append(5, head(AppendTarget::New { token: 2 }, 10));
    assert_eq!(script.answers(), vec![(5, Err(silent))]);
    script.primary.tick(5_000, &mut script.effects);
    script.append(6, head(AppendTarget::New { token: 2 }, 10)).start();
}

#[test]
fn a_silent_member_is_noticed_by_the_deadline() {
    let mut script = Script::new(&[1, 2, 3]);
    script.primary.tick(1_000, &mut script.effects);
    let start = script.append(1, head(AppendTarget::New { token: 1 }, 10)).start();
    script.primary.member_done(start.operation, NodeId(1), Ok(()), &mut script.effects);
    script.primary.member_done(start.operation, NodeId(2), Ok(()), &mut script.effects);
    script.primary.tick(3_000, &mut script.effects);
    assert_eq!(script.answers(), vec![]);
    script.primary.tick(3_001, &mut script.effects);
    assert_eq!(script.answers(), vec![(1, Err(DataError::MemberSilent { node: NodeId(3) }))]);
}

#[test]
fn a_new_epoch_fences_what_is_under_way() {
    let mut script = Script::new(&[1, 2, 3]);
    let start = script.append(1, head(AppendTarget::New { token: 1 }, 10)).start();
    script.primary.configure(configuration(2, &[1, 2]), &mut script.effects);
    assert_eq!(script.answers(), vec![(1, Err(DataError::Sealed { length: 0 }))]);
    script.done(&start);
    assert_eq!(script.effects, vec![], "late answers of the old epoch mean nothing");
    script.append(2, head(AppendTarget::New { token: 1 }, 10));
    let stale = Err(DataError::StaleEpoch { current: Epoch(2) });
    assert_eq!(script.answers(), vec![(2, stale)]);
    let new = AppendHead { epoch: Epoch(2), ..head(AppendTarget::New { token: 1 }, 10) };
    let again = script.append(3, new).start();
    assert!(again.extent > start.extent && again.backups == vec![NodeId(2)]);
}

#[test]
fn what_is_open_ends_when_a_member_returns() {
    let mut script = Script::new(&[1, 2, 3]);
    let start = script.append(1, head(AppendTarget::New { token: 1 }, 10)).start();
    script.done(&start);
    let extent = start.extent;
    script.append(2, more(extent, 10, 5));
    script.append(3, head(AppendTarget::Small { token: 2 }, 7));
    script.append(4, head(AppendTarget::Small { token: 3 }, 7));
    script.effects.clear();
    script.primary.member_returned(&mut script.effects);
    let broken = Effect::Broken { extent, committed: 10 };
    assert!(script.effects.contains(&broken), "{:?}", script.effects);
    // The piece that waited for its batch goes to another shared extent.
    let starts = script.effects.iter().filter(|effect| matches!(effect, Effect::Start(_)));
    assert_eq!(starts.count(), 1, "{:?}", script.effects);
    let sealed = |length| Err(DataError::Sealed { length });
    assert_eq!(script.answers(), vec![(2, sealed(10)), (3, sealed(0))]);
}

/// A member that leads the Raft group takes overwrites only of what it knows to be committed.
#[test]
fn a_commit_offset_is_announced_until_every_member_has_heard_of_it() {
    let announced = |script: &mut Script, now_ms| {
        script.primary.tick(now_ms, &mut script.effects);
        std::mem::take(&mut script.effects)
            .iter()
            .filter(|effect| matches!(effect, Effect::Announce { committed: 10, .. }))
            .count()
    };
    let mut script = Script::new(&[1, 2, 3]);
    let start = script.append(1, head(AppendTarget::New { token: 1 }, 10)).start();
    script.done(&start);
    assert_eq!(announced(&mut script, 10), 1);
    assert_eq!(announced(&mut script, 20), 0, "all have heard, as far as is known");
    let silent = DataError::MemberSilent { node: NodeId(2) };
    script.primary.announcement_failed(start.extent, silent, &mut script.effects);
    assert_eq!(announced(&mut script, 30), 0, "not again at once");
    assert_eq!(announced(&mut script, 20 + ANNOUNCE_PAUSE_MS), 1);
    assert_eq!(announced(&mut script, 10_000), 0);
    let sealed = DataError::Sealed { length: 10 };
    script.primary.announcement_failed(start.extent, sealed, &mut script.effects);
    let broken = Effect::Broken { extent: start.extent, committed: 10 };
    assert_eq!(script.effects, [broken], "it takes no more appends there");
}

#[test]
fn refusals_table() {
    let new = head(AppendTarget::New { token: 1 }, 10);
    let check = |members: &[u32], head: AppendHead, expected: DataError| {
        let mut script = Script::new(members);
        script.append(1, head);
        assert_eq!(script.answers(), vec![(1, Err(expected))], "{head:?}");
    };
    check(&[1], new, DataError::ReadOnly);
    check(&[1, 2], AppendHead { length: 0, ..new }, DataError::Invalid);
    check(&[1, 2], AppendHead { length: 2 << 20, ..new }, DataError::Invalid);
    check(&[1, 2], more(ExtentId(77), 0, 1), DataError::NoExtent);
    let mut backup = Script::new(&[1, 2]);
    backup.primary.configure(
        Configuration { primary: NodeId(2), ..configuration(2, &[1, 2]) },
        &mut backup.effects,
    );
    backup.append(1, AppendHead { epoch: Epoch(2), ..new });
    let hint = Some(NodeId(2));
    assert_eq!(backup.answers(), vec![(1, Err(DataError::NotPrimary { hint }))]);
}

#[test]
fn the_queue_has_a_bound_and_ids_wait_for_their_reservation() {
    let mut script = Script::new(&[1, 2, 3]);
    let first = script.append(0, head(AppendTarget::New { token: 0 }, 1)).start();
    for request in 1..100 {
        script.append(request, more(first.extent, request, 1));
    }
    script.append(100, more(first.extent, 100, 1));
    assert_eq!(script.answers(), vec![(100, Err(DataError::Busy))]);
    let mut unreserved = Primary::new(NodeId(1), configuration(1, &[1, 2]), limits());
    let mut effects = Vec::new();
    unreserved.append(1, &head(AppendTarget::New { token: 0 }, 1), || None, &mut effects);
    assert!(matches!(
        effects[..],
        [Effect::ReserveIds { .. }, Effect::Answer { result: Err(DataError::Busy), .. }]
    ));
}

#[test]
fn a_backup_takes_bytes_only_at_its_end_and_only_in_its_epoch() {
    let mut backup = Backup::new(NodeId(2), configuration(1, &[1, 2, 3]));
    let extent = ExtentId(7);
    let head = |offset, length| ReplicateHead {
        from: NodeId(1),
        epoch: Epoch(1),
        extent,
        offset,
        length,
        committed: 0,
        sync: false,
    };
    let run = |backup: &mut Backup, request, head: ReplicateHead| {
        let mut effects = Vec::new();
        backup.replicate(request, &head, || None, &mut effects);
        effects
    };
    let refused = |request, error| vec![BackupEffect::Answer { request, result: Err(error) }];
    let out_of_order = |expected| DataError::OutOfOrder { expected };
    assert_eq!(run(&mut backup, 1, head(5, 5)), refused(1, out_of_order(0)));
    assert_eq!(
        run(&mut backup, 2, head(0, 5)),
        vec![BackupEffect::Write { request: 2, create: true }]
    );
    assert_eq!(
        run(&mut backup, 3, head(5, 5)),
        vec![BackupEffect::Write { request: 3, create: false }]
    );
    assert_eq!(run(&mut backup, 4, head(11, 5)), refused(4, out_of_order(10)));
    assert_eq!(run(&mut backup, 5, head(0, 5)), vec![], "a repeat waits for the first copy");
    let mut effects = Vec::new();
    backup.written(2, extent, 5, Ok(()), &mut effects);
    let confirmed = BackupEffect::Confirm { request: 5 };
    assert_eq!(effects, vec![confirmed, BackupEffect::Answer { request: 2, result: Ok(()) }]);
    let stale = ReplicateHead { epoch: Epoch(0), ..head(10, 1) };
    let current = Epoch(1);
    assert_eq!(run(&mut backup, 6, stale), refused(6, DataError::StaleEpoch { current }));
    let impostor = ReplicateHead { from: NodeId(3), ..head(10, 1) };
    let hint = Some(NodeId(1));
    assert_eq!(run(&mut backup, 7, impostor), refused(7, DataError::NotPrimary { hint }));
}

/// The members of a new epoch may have decided about the extent before these bytes were written:
/// then they cut them off, and nobody may have been told that they are safe.
#[test]
fn a_write_that_ends_in_a_later_epoch_does_not_count() {
    let mut backup = Backup::new(NodeId(2), configuration(1, &[1, 2, 3]));
    let extent = ExtentId(7);
    let (from, epoch) = (NodeId(1), Epoch(1));
    let head =
        ReplicateHead { from, epoch, extent, offset: 0, length: 5, committed: 0, sync: false };
    let mut effects = Vec::new();
    backup.replicate(1, &head, || None, &mut effects);
    backup.configure(configuration(2, &[2, 3]), &mut effects);
    effects.clear();
    backup.written(1, extent, 5, Ok(()), &mut effects);
    let result = Err(DataError::StaleEpoch { current: Epoch(2) });
    assert_eq!(effects, vec![BackupEffect::Answer { request: 1, result }]);
}

/// Alignment asks the members one after the other; an extent that grew meanwhile has more
/// acknowledged bytes than any of them told of, even if it is closed by the time it is looked at.
#[test]
fn extents_that_changed_while_the_members_were_asked_are_known() {
    let mut script = Script::new(&[1, 2, 3]);
    let extent = |script: &mut Script, token| {
        let start = script.append(token, head(AppendTarget::New { token }, 10)).start();
        script.done(&start);
        start.extent
    };
    let earlier = extent(&mut script, 1);
    script.primary.close(earlier, &mut script.effects);
    let open = extent(&mut script, 2);
    let closed = extent(&mut script, 3);
    script.primary.watch();
    script.primary.close(closed, &mut script.effects);
    let short_lived = extent(&mut script, 4);
    script.primary.break_extent(short_lived, &mut script.effects);
    let changing = BTreeSet::from([open, closed, short_lived]);
    assert_eq!(script.primary.end_watch(), changing, "not {earlier}");
    assert_eq!(script.primary.end_watch(), BTreeSet::from([open]), "the watch has ended");
}

/// Three replicas joined by queues that a random schedule serves.
struct World {
    primary: Primary,
    backups: BTreeMap<NodeId, Backup>,
    /// Length of each extent on each node: what survives.
    held: BTreeMap<(NodeId, ExtentId), u64>,
    /// Operations on their way to each member, in order.
    links: BTreeMap<NodeId, VecDeque<Start>>,
    sizes: BTreeMap<RequestNumber, u64>,
    acknowledged: BTreeMap<ExtentId, u64>,
    next: RequestNumber,
}

impl World {
    fn new() -> World {
        let configuration = configuration(1, &[1, 2, 3]);
        let mut primary = Primary::new(NodeId(1), configuration.clone(), limits());
        primary.ids_reserved(0, 100_000);
        let backup = |node| (NodeId(node), Backup::new(NodeId(node), configuration.clone()));
        World {
            primary,
            backups: [backup(2), backup(3)].into(),
            held: BTreeMap::new(),
            links: BTreeMap::new(),
            sizes: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
            next: 0,
        }
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Start(start) => {
                    for member in [1, 2, 3] {
                        self.links.entry(NodeId(member)).or_default().push_back(start.clone());
                    }
                }
                Effect::Answer { result: Ok(placed), .. } => {
                    let end = self.acknowledged.entry(placed.extent).or_default();
                    *end = placed.committed.max(*end);
                }
                _ => {}
            }
        }
        for (extent, end) in &self.acknowledged {
            for member in [1, 2, 3] {
                let held = self.held.get(&(NodeId(member), *extent)).copied().unwrap_or(0);
                assert!(held >= *end, "{member} holds {held} of {extent}, acknowledged {end}");
            }
        }
    }

    fn append(&mut self, target: AppendTarget, length: u64) {
        self.next += 1;
        self.sizes.insert(self.next, length);
        let mut effects = Vec::new();
        self.primary.append(self.next, &head(target, length), || None, &mut effects);
        self.perform(effects);
    }

    /// One operation reaches one member, which takes it, or fails.
    fn deliver(&mut self, member: NodeId, fails: bool) {
        let Some(start) = self.links.get_mut(&member).and_then(VecDeque::pop_front) else { return };
        let header = if start.extent.is_small() { HEADER } else { 0 };
        let length: u64 = start.requests.iter().map(|r| self.sizes[r] + header).sum();
        let result = if fails {
            Err(DataError::MemberSilent { node: member })
        } else {
            self.take(member, &start, length)
        };
        let mut effects = Vec::new();
        self.primary.member_done(start.operation, member, result, &mut effects);
        self.perform(effects);
    }

    fn take(&mut self, member: NodeId, start: &Start, length: u64) -> Result<(), DataError> {
        let end = start.offset + length;
        let held = self.held.entry((member, start.extent)).or_default();
        let Some(backup) = self.backups.get_mut(&member) else {
            assert_eq!(*held, start.offset, "the primary's own writes are in order");
            *held = end;
            return Ok(());
        };
        let head = ReplicateHead {
            from: NodeId(1),
            epoch: Epoch(1),
            extent: start.extent,
            offset: start.offset,
            length,
            committed: start.committed,
            sync: start.sync,
        };
        let mut effects = Vec::new();
        backup.replicate(start.operation, &head, || None::<ExtentState>, &mut effects);
        match effects.remove(0) {
            BackupEffect::Write { .. } => {
                assert_eq!(*held, start.offset, "a backup writes at its end");
                *held = end;
                backup.written(start.operation, start.extent, end, Ok(()), &mut effects);
                Ok(())
            }
            BackupEffect::Confirm { .. } => Ok(()),
            BackupEffect::Answer { result, .. } => result,
        }
    }
}

proptest! {
    /// Whatever the order of deliveries, and whoever fails: bytes told to be committed are on
    /// every member.
    #[test]
    fn acknowledged_bytes_are_on_all_members(
        steps in proptest::collection::vec((0u8..10, 1u64..200, 0u8..40), 1..200),
    ) {
        let mut world = World::new();
        let mut now = 0;
        for (action, length, luck) in steps {
            let opened = world.acknowledged.last_key_value().map(|(extent, end)| (*extent, *end));
            match (action, opened) {
                (0, _) => world.append(AppendTarget::New { token: length }, length),
                (1, _) => world.append(AppendTarget::Small { token: length }, length),
                (2, Some((extent, offset))) => {
                    world.append(AppendTarget::Extent { extent, offset }, length);
                }
                (3, _) => {
                    now += length * 10;
                    let mut effects = Vec::new();
                    world.primary.tick(now, &mut effects);
                    world.perform(effects);
                }
                _ => world.deliver(NodeId(1 + u32::from(action % 3)), luck == 0),
            }
        }
    }
}
