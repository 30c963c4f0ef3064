//! Leases, requests that are applied once, held inodes and offers.

use milpa_types::{AttributeChanges, FreedRange};
use milpa_wire::meta::{ExtentOffer, OperationId, Step, Verdict};

use super::*;

const OTHER: SessionId = SessionId(2);

fn request(session: SessionId, sequence: u64, unanswered: u64, write: MetaWrite) -> Command {
    let id = RequestId { session, sequence, unanswered };
    Command::Client { id, now: Timestamp(1), write }
}

#[test]
fn a_repeat_gets_the_first_reply_and_changes_nothing() {
    let mut solo = Solo::new();
    let first = request(ME, 10, 9, create(ROOT, "f", FileKind::File));
    let reply = solo.apply(&first);
    let hash = solo.partition.hash();
    assert_eq!(solo.apply(&first), reply);
    assert_eq!(solo.partition.hash(), hash);
    // The name goes meanwhile; the repeat still is one.
    solo.apply(&request(ME, 11, 9, unlink(ROOT, "f")));
    assert_eq!(solo.apply(&first), reply);
    assert_eq!(solo.find(ROOT, "f"), Err(MetaError::NotFound));
    // Once answered, it is forgotten, and refused if it comes late all the same.
    solo.apply(&request(ME, 12, 11, create(ROOT, "g", FileKind::File)));
    assert_eq!(solo.apply(&first).outcome, Outcome::Reply(Err(MetaError::Stale)));
}

/// What clients count on that have had no answer to a publish: as a new request it would free the bytes that
/// others published meanwhile, and bring back its own, which are being freed.
#[test]
fn a_publish_is_repeated_after_others_changes_without_harm() {
    let mut solo = Solo::new();
    let file = solo.make(ROOT, "f", FileKind::File);
    let first = request(ME, 10, 9, publish(file, 0, vec![segment(0, 100, ExtentId(5), 0)]));
    let reply = solo.apply(&first);
    solo.open(OTHER);
    let changes = AttributeChanges { size: Some(0), ..AttributeChanges::default() };
    solo.write_as(OTHER, MetaWrite::SetAttributes { inode: file, changes }).unwrap();
    let theirs = vec![segment(0, 60, ExtentId(6), 0)];
    solo.write_as(OTHER, publish(file, 1, theirs)).unwrap();
    let hash = solo.partition.hash();
    assert_eq!(solo.apply(&first), reply);
    assert_eq!(solo.partition.hash(), hash);
}

#[test]
fn an_index_is_applied_once() {
    let mut solo = Solo::new();
    let hash = solo.partition.hash();
    let again = solo.partition.apply(1, &request(ME, 1, 1, create(ROOT, "f", FileKind::File)));
    assert_eq!(again.outcome, Outcome::Reply(Err(MetaError::OutcomeUnknown)));
    assert_eq!(solo.partition.hash(), hash);
}

#[test]
fn sequences_far_ahead_are_refused() {
    let mut solo = Solo::new();
    for (sequence, unanswered, expected) in
        [(300, 43, MetaError::Invalid), (5, 6, MetaError::Invalid)]
    {
        let reply = solo.apply(&request(ME, sequence, unanswered, unlink(ROOT, "x"))).outcome;
        assert_eq!(reply, Outcome::Reply(Err(expected)));
    }
    let reply = solo.apply(&request(ME, 300, 44, unlink(ROOT, "x"))).outcome;
    assert_eq!(reply, Outcome::Reply(Err(MetaError::NotFound)));
}

#[test]
fn a_session_that_ended_never_comes_back() {
    let mut solo = Solo::new();
    solo.make(ROOT, "f", FileKind::File);
    solo.apply(&Command::ExpireSession { session: ME });
    assert_eq!(solo.write(unlink(ROOT, "f")), Err(MetaError::UnknownSession));
    assert_eq!(solo.write(MetaWrite::OpenSession), Err(MetaError::UnknownSession));
    assert!(!solo.partition.has_session(ME));
    solo.open(OTHER);
    solo.open(OTHER);
    assert_eq!(solo.partition.sessions(), [OTHER]);
    assert_eq!(solo.write_as(OTHER, MetaWrite::CloseSession), Ok(MetaAnswer::Done));
    assert_eq!(solo.write_as(OTHER, MetaWrite::CloseSession), Ok(MetaAnswer::Done));
}

#[test]
fn an_unlinked_file_lives_while_its_holder_does() {
    for end in ["release", "close", "expire"] {
        let mut solo = Solo::new();
        solo.open(OTHER);
        let file = solo.make(ROOT, "f", FileKind::File);
        let held = MetaWrite::Unlink { parent: ROOT, name: name("f"), held: true };
        solo.write(held).unwrap();
        assert_eq!(solo.stat(file).unwrap().link_count, 0);
        let touch = MetaWrite::SetAttributes { inode: file, changes: AttributeChanges::default() };
        assert!(solo.write(touch.clone()).is_ok(), "its holder may go on");
        assert_eq!(solo.write_as(OTHER, touch), Err(MetaError::Stale));
        let read = MetaRead::GetAttributes { inode: file };
        assert_eq!(solo.partition.read(Some(OTHER), &read), Err(MetaError::Stale));
        let link = MetaWrite::Link { inode: file, parent: ROOT, name: name("g") };
        assert_eq!(solo.write(link), Err(MetaError::Stale));
        solo.write_as(OTHER, MetaWrite::Release { inode: file }).unwrap();
        assert_eq!(solo.partition.statistics().held, 1, "only its holder lets it go");
        match end {
            "release" => drop(solo.write(MetaWrite::Release { inode: file })),
            "close" => drop(solo.write(MetaWrite::CloseSession)),
            _ => drop(solo.apply(&Command::ExpireSession { session: ME })),
        }
        assert_eq!(solo.stat(file), Err(MetaError::Stale), "{end}");
        assert_eq!(solo.partition.statistics().held, 0);
    }
}

/// The holder unlinks one name, somebody else the last one: the holder's file stays open.
#[test]
fn a_holder_keeps_its_file_whoever_takes_the_last_link() {
    for released_before in [false, true] {
        let mut solo = Solo::new();
        solo.open(OTHER);
        let file = solo.make(ROOT, "f", FileKind::File);
        solo.entry(MetaWrite::Link { inode: file, parent: ROOT, name: name("g") });
        solo.write(MetaWrite::Unlink { parent: ROOT, name: name("f"), held: true }).unwrap();
        if released_before {
            solo.write(MetaWrite::Release { inode: file }).unwrap();
            assert_eq!(solo.stat(file).unwrap().link_count, 1, "a link remains");
        }
        solo.write_as(OTHER, unlink(ROOT, "g")).unwrap();
        assert_eq!(solo.stat(file).is_ok(), !released_before);
        solo.write(MetaWrite::Release { inode: file }).unwrap();
        assert_eq!(solo.stat(file), Err(MetaError::Stale));
        assert_eq!(solo.partition.statistics().held, 0);
    }
}

/// A file elsewhere that a client unlinks while open: its session may never have been opened
/// there. It holds; it may not write, and if it has ended it holds nothing.
#[test]
fn a_session_may_hold_where_it_was_never_opened() {
    for ended in [false, true] {
        let mut solo = Solo { partition: partition(1), sequence: 0 };
        let step = |solo: &mut Solo, index, step| {
            let operation = OperationId { partition: PartitionId(100), index };
            solo.apply(&Command::Participate { operation, now: Timestamp(1), step })
        };
        let inode = new_inode(FileKind::File);
        step(&mut solo, 1, Step::PrepareInode { inode, parent: ROOT });
        step(&mut solo, 1, Step::Finish);
        let inode = MetaSlot(1).first_inode();
        assert_eq!(solo.stat(inode).unwrap().link_count, 1);
        if ended {
            solo.apply(&Command::ExpireSession { session: ME });
        }
        step(&mut solo, 2, Step::DropLink { inode, held: Some(ME) });
        assert_eq!(solo.stat(inode).unwrap().link_count, 1, "nothing before the commit");
        step(&mut solo, 2, Step::Finish);
        assert_eq!(solo.stat(inode).is_err(), ended);
        assert_eq!(solo.partition.has_session(ME), !ended, "its lease is watched");
        assert_eq!(solo.write(MetaWrite::Release { inode }), Err(MetaError::UnknownSession));
        solo.apply(&Command::ExpireSession { session: ME });
        assert_eq!(solo.stat(inode), Err(MetaError::Stale));
    }
}

#[test]
fn offered_bytes_are_deleted_only_when_nobody_can_publish_them() {
    let mut solo = Solo::new();
    let file = solo.make(ROOT, "f", FileKind::File);
    let extent = ExtentId(5);
    solo.write(publish(file, 0, vec![segment(0, 100, extent, 0)])).unwrap();
    let offer = |inode, session, extent, offset| {
        let range = FreedRange { partition: PartitionId(9), extent, offset, length: 10 };
        ExtentOffer { inode, session, range }
    };
    for (offer, expected) in [
        (offer(file, ME, extent, 95), Verdict::Keep),
        (offer(file, ME, extent, 100), Verdict::Wait),
        (offer(file, OTHER, extent, 100), Verdict::Delete),
        (offer(InodeId(999), OTHER, extent, 0), Verdict::Delete),
        (offer(InodeId(999), ME, extent, 0), Verdict::Delete),
        (offer(InodeId(1 << 40), OTHER, extent, 0), Verdict::Wait),
    ] {
        assert_eq!(solo.partition.verdict(&offer), expected, "{offer:?}");
    }
    let (kept, unwanted) = (offer(file, ME, extent, 95), offer(file, OTHER, extent, 100));
    let range = unwanted.range;
    let decided = solo.apply(&Command::JudgeOffers { offers: vec![unwanted] }).outcome;
    let orders = solo.partition.free_orders(0, 9);
    assert_eq!(orders.iter().map(|order| order.range).collect::<Vec<_>>(), [range], "everywhere");
    solo.apply(&Command::JudgeOffers { offers: vec![kept] });
    assert_eq!(solo.partition.free_orders(0, 9).len(), 1);
    assert_eq!(decided, Outcome::Reply(Ok(MetaAnswer::Verdicts(vec![Verdict::Delete]))));
    let opened = solo.write_as(OTHER, MetaWrite::OpenSession);
    assert_eq!(opened, Err(MetaError::UnknownSession), "it can never publish them now");
}
