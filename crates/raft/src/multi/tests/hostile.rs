//! Messages that no correct node sends.

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};

use super::super::*;
use super::world::{World, world};
use crate::message::{Body, Message, ReliefWord};
use crate::types::SnapshotDescriptor;
use crate::wal::{LogEntry, mix};

const GROUP: PartitionId = PartitionId(1);
const RELIEF_WORDS: [ReliefWord; 4] =
    [ReliefWord::Asked, ReliefWord::Echo, ReliefWord::Echoed, ReliefWord::Able];

/// Draws messages whose numbers are near those of the voter that gets them, so that they often concern it.
struct Hostile {
    seed: u64,
    draws: u64,
    /// The voter's term, and the end of its log.
    term: u64,
    last: u64,
}

impl Hostile {
    fn draw(&mut self, below: u64) -> u64 {
        self.draws += 1;
        mix(self.seed ^ mix(self.draws)) % below
    }

    fn index(&mut self) -> u64 {
        (self.last + self.draw(3)).saturating_sub(self.draw(5))
    }

    fn position(&mut self) -> LogPosition {
        let term = (self.term + self.draw(2)).saturating_sub(self.draw(3));
        LogPosition { term: if self.draw(8) == 0 { 0 } else { term }, index: self.index() }
    }

    fn append(&mut self) -> Body {
        let (prev, commit) = (self.position(), self.index());
        let mut term = prev.term;
        let entries: Vec<LogEntry> = (1..=self.draw(4))
            .map(|i| {
                term += self.draw(4) / 3;
                let position = LogPosition { term, index: prev.index + i };
                let data = Bytes::from_static(b"x");
                LogEntry { position, data, ..LogEntry::default() }
            })
            .collect();
        Body::Append { prev, commit, count: entries.len() as u32, entries }
    }

    fn snapshot(&mut self) -> Body {
        let mut nodes = || (0..4).map(NodeId).filter(|_| self.draw(3) == 0).collect::<Vec<_>>();
        let members = Members {
            voters: nodes(),
            learners: nodes(),
            outgoing: nodes(),
            learners_next: nodes(),
            auto_leave: self.draw(2) == 0,
        };
        Body::Snapshot(SnapshotDescriptor { position: self.position(), members })
    }

    fn body(&mut self) -> Body {
        let (index, commit) = (self.index(), self.index());
        let is_pre = self.draw(2) == 0;
        let read = (self.draw(2) == 0).then_some(1);
        match self.draw(17) {
            0..4 => self.append(),
            4 => self.snapshot(),
            5 => Body::Appended { index, commit },
            6 => Body::AppendRejected { index, hint: self.position(), commit },
            7 => Body::Heartbeat { commit, stamp_ms: 1, read },
            8 => Body::HeartbeatAnswer { commit, stamp_ms: 1, read, installing: index },
            9 => {
                let (last, commit) = (self.position(), self.position());
                Body::Vote { is_pre, last, commit, is_transfer: self.draw(2) == 0 }
            }
            10 | 11 => Body::VoteAnswer { is_pre, is_granted: true, commit: self.position() },
            12 => Body::SnapshotFailed,
            13 => Body::TimeoutNow,
            14 => Body::LogLost { last: index },
            15 => Body::Relief { round: self.draw(3), word: RELIEF_WORDS[self.draw(4) as usize] },
            _ => Body::Rejoining { nonce: 1 },
        }
    }

    /// One life of a voter, or of one that waits for a snapshot, among two that send anything. How many frames were taken, and whether it led.
    fn run(&mut self) -> (u64, bool) {
        let mut multi = MultiRaft::new(NodeId(0), RaftConfig::default(), self.seed).unwrap();
        let voters = [0, 1, 2].map(NodeId);
        let voters = if self.draw(4) == 0 { &[][..] } else { &voters };
        assert!(multi.create_group(GROUP, voters, &[], self.draw(2) == 0));
        let (mut taken, mut has_led, mut now_ms) = (0, false, 0);
        for _ in 0..60 {
            let Some(status) = multi.status(GROUP) else { break };
            (self.term, self.last) = (status.term, status.last_index);
            let body = self.body();
            let is_ahead =
                matches!(body, Body::VoteAnswer { is_pre: true, .. }) || self.draw(8) == 0;
            let message = Message::new(self.term + u64::from(is_ahead), body);
            let frame = Frame { messages: vec![(GROUP, message)] };
            let from = NodeId(1 + self.draw(2) as u32);
            taken += u64::from(multi.step_frame(from, frame.encode(), now_ms).is_ok());
            now_ms += self.draw(100);
            multi.tick(now_ms);
            let _ = multi.propose(GROUP, Bytes::from_static(b"y"));
            let turn = multi.turn(now_ms);
            if let Some(batch) = turn.batch.filter(|_| self.draw(3) > 0) {
                multi.persisted(batch.number, now_ms);
            }
            for install in turn.installs {
                multi.snapshot_installed(GROUP, install.snapshot.position.index);
            }
            has_led |= multi.leads_in(GROUP).is_some();
        }
        (taken, has_led)
    }
}

/// Goal: whatever the others send, this node goes on. Method: frames of every kind, with numbers near its own.
#[test]
fn no_frame_that_is_taken_makes_the_library_panic() {
    let (mut taken, mut led) = (0, 0);
    for seed in 0..1000 {
        let (frames, has_led) = Hostile { seed, draws: 0, term: 0, last: 0 }.run();
        taken += frames;
        led += u64::from(has_led);
    }
    assert!(taken > 10_000 && led > 50, "{taken} frames taken, {led} led");
}

/// Found by the test above: a snapshot that makes this node the only voter was installed, and before the log was
/// told of it, the node was told to lead. The library panics on a leader whose log is not all on disk.
#[test]
fn nobody_leads_before_an_installed_snapshot_is_on_disk() {
    let mut multi = MultiRaft::new(NodeId(0), RaftConfig::default(), 1).unwrap();
    assert!(multi.create_group(GROUP, &[0, 1, 2].map(NodeId), &[], false));
    let take = |multi: &mut MultiRaft, body| {
        let frame = Frame { messages: vec![(GROUP, Message::new(2, body))] };
        multi.step_frame(NodeId(1), frame.encode(), 0).unwrap();
    };
    let flush = |multi: &mut MultiRaft| {
        let turn = multi.turn(0);
        multi.persisted(turn.batch.unwrap().number, 0);
        turn.installs
    };
    let position = LogPosition { term: 1, index: 5 };
    let members = Members::new(&[NodeId(0)], &[NodeId(1)]);
    take(&mut multi, Body::Snapshot(SnapshotDescriptor { position, members }));
    assert_eq!(flush(&mut multi).len(), 1);
    multi.snapshot_installed(GROUP, 5);
    take(&mut multi, Body::TimeoutNow);
    assert_eq!(multi.leads_in(GROUP), None);
    flush(&mut multi);
    take(&mut multi, Body::TimeoutNow);
    assert_eq!(multi.leads_in(GROUP), Some(3));
}

/// Simulation, seed 772001: one that had been let go was to learn, and had no room on its disk for what came with the snapshot.
/// Its log was that of a voter still, and its owner knew the newest configuration: so it was heard when it stood.
#[test]
fn who_fetches_a_snapshot_does_not_stand() {
    let mut multi = MultiRaft::new(NodeId(0), RaftConfig::default(), 1).unwrap();
    assert!(multi.create_group(GROUP, &[0, 1, 2].map(NodeId), &[], false));
    let position = LogPosition { term: 1, index: 5 };
    let members = Members::new(&[NodeId(1)], &[NodeId(0)]);
    let offer = Body::Snapshot(SnapshotDescriptor { position, members });
    let frame = Frame { messages: vec![(GROUP, Message::new(2, offer))] };
    multi.step_frame(NodeId(1), frame.encode(), 0).unwrap();
    assert!(!stands(&mut multi, 0));
    multi.snapshot_failed(GROUP);
    assert!(stands(&mut multi, 10_000));
}

/// Whether it asks for votes within ten seconds.
fn stands(multi: &mut MultiRaft, from_ms: u64) -> bool {
    let mut asked = 0;
    for now_ms in (from_ms..from_ms + 10_000).step_by(10) {
        multi.tick(now_ms);
        let turn = multi.turn(now_ms);
        if let Some(batch) = turn.batch {
            multi.persisted(batch.number, now_ms);
        }
        let frames = turn.messages.iter().flat_map(|(_, frame)| &frame.messages);
        asked += frames.filter(|(_, it)| matches!(it.body, Body::Vote { .. })).count();
    }
    asked > 0
}

/// Found by a reader: a voter that fetched a snapshot, and had got what is in it as entries meanwhile, could be elected. It applied
/// nothing until the fetch had ended, which may take minutes, nor had it a lease; and nobody took its place, as it was heard.
#[test]
fn who_fetches_a_snapshot_does_not_stand_though_it_has_got_what_is_in_it() {
    let mut multi = MultiRaft::new(NodeId(0), RaftConfig::default(), 1).unwrap();
    assert!(multi.create_group(GROUP, &[0, 1, 2].map(NodeId), &[], false));
    let take = |multi: &mut MultiRaft, body| {
        let frame = Frame { messages: vec![(GROUP, Message::new(2, body))] };
        multi.step_frame(NodeId(1), frame.encode(), 0).unwrap();
        let turn = multi.turn(0);
        turn.batch.into_iter().for_each(|batch| multi.persisted(batch.number, 0));
        multi.turn(0).committed.into_iter().flat_map(|(_, entries)| entries).count()
    };
    let at = |term, index| LogPosition { term, index };
    let members = Members::new(&[0, 1, 2].map(NodeId), &[]);
    take(&mut multi, Body::Snapshot(SnapshotDescriptor { position: at(2, 3), members }));
    take(&mut multi, Body::TimeoutNow);
    assert_eq!(multi.status(GROUP).unwrap().term, 2, "a candidate that may not ask");
    let entry = |index| LogEntry { position: at(2, index), ..LogEntry::default() };
    let entries = vec![entry(2), entry(3)];
    let delivered = take(&mut multi, Body::Append { prev: at(1, 1), commit: 3, count: 2, entries });
    assert_eq!((multi.status(GROUP).unwrap().commit, delivered), (3, 0));
    take(&mut multi, Body::TimeoutNow);
    assert_eq!(multi.status(GROUP).unwrap().term, 2, "a leader that would apply nothing");
    assert!(!multi.campaign(GROUP));
    assert!(!stands(&mut multi, 0));
    multi.snapshot_failed(GROUP);
    assert!(stands(&mut multi, 10_000));
}

/// Nor is the lead offered to it.
#[test]
fn who_fetches_a_snapshot_is_not_current() {
    let mut world = world(11, 3);
    world.found(1, &[0, 1, 2]);
    let current = |world: &mut World| match world.leader(1) {
        Some(leader) => world.multi(leader).status(GROUP).unwrap().current(),
        None => Vec::new(),
    };
    world.until("both follow", |world| current(world).len() == 2);
    let (leader, followers) = (world.leader(1).unwrap(), current(&mut world));
    let status = world.multi(leader).status(GROUP).unwrap();
    let answer =
        Body::HeartbeatAnswer { commit: status.commit, stamp_ms: 0, read: None, installing: 9 };
    world.deliver(followers[0].0 as usize, leader, Message::new(status.term, answer));
    assert_eq!(current(&mut world), [followers[1]]);
    // The next answer says that the fetch has ended.
    world.until("both follow", |world| current(world).len() == 2);
    assert_eq!(world.leader(1), Some(leader));
}
