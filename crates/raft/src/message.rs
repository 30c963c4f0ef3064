//! What travels between nodes: our own messages in our own encoding.
//!
//! The Raft library's protobuf never touches the network: its decoder has had holes
//! (RUSTSEC-2024-0437), and ours can be bounded. A frame carries the messages of all groups from
//! one node to another, of one turn, so that a hundred heartbeats cost one write.
//!
//! | bytes | |
//! |---|---|
//! | 0..4 | length of the head, u32 little-endian |
//! | 4.. | head, postcard: messages, then term, kind, context length and data length of each entry |
//! | then | context and data of each entry, in order |
//!
//! Decoding checks counts, lengths and numbers, so that what reaches the core is of the right
//! shape; whether it makes sense is checked there. Entry bodies of 4 KiB and more stay slices of
//! the received buffer; smaller ones are copied, or one of them could keep a large buffer alive.

use bytes::{BufMut, Bytes, BytesMut};
use milpa_types::{Epoch, PartitionId};
use serde::{Deserialize, Serialize};

use crate::types::{LogPosition, SnapshotDescriptor};
use crate::wal::{EntryKind, LogEntry};

/// Bodies of at least this many bytes are not copied.
const SHARED_BYTES_MIN: usize = 4096;
/// Bounds of what is accepted; what we send stays far below.
const HEAD_BYTES_MAX: usize = 16 << 20;
const MESSAGES_MAX: usize = 1 << 16;
const ENTRIES_MAX: usize = 1 << 18;
const MEMBERS_MAX: usize = 64;
/// Terms and indexes stay below this, so that adding to them cannot overflow.
const NUMBER_MAX: u64 = 1 << 62;
/// What a message or an entry takes besides its bytes, for sizing frames.
const OVERHEAD_BYTES: usize = 64;

/// The messages of all groups from one node to another, of one turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Frame {
    pub(crate) messages: Vec<(PartitionId, Message)>,
}

/// One message of one group. Opaque: only [`MultiRaft`](crate::MultiRaft) makes and reads them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub(crate) term: u64,
    /// Of the newest configuration that the sender's owner has noted; 0 in groups whose owner numbers none.
    pub(crate) epoch: Epoch,
    pub(crate) body: Body,
}

/// The messages of Raft, in the words of the paper and its thesis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Body {
    /// Leader to follower: entries after `prev`.
    Append {
        prev: LogPosition,
        commit: u64,
        count: u32,
        #[serde(skip)]
        entries: Vec<LogEntry>,
    },
    /// Follower: everything up to `index` is the leader's, and durable here.
    Appended { index: u64, commit: u64 },
    /// Follower: there is something else, or nothing, at `index`. Try after `hint`.
    AppendRejected { index: u64, hint: LogPosition, commit: u64 },
    /// Leader: I am here. `stamp_ms` is the leader's clock, for its lease.
    Heartbeat { commit: u64, stamp_ms: u64, read: Option<u64> },
    /// Follower: and I follow. `installing` is the index of a snapshot being fetched, or 0.
    HeartbeatAnswer { commit: u64, stamp_ms: u64, read: Option<u64>, installing: u64 },
    /// Candidate: will you vote, or (`is_pre`) would you?
    Vote { is_pre: bool, last: LogPosition, commit: LogPosition, is_transfer: bool },
    /// Voter.
    VoteAnswer { is_pre: bool, is_granted: bool, commit: LogPosition },
    /// Leader: what you need is gone from my log; fetch this.
    Snapshot(SnapshotDescriptor),
    /// Follower: the snapshot could not be fetched.
    SnapshotFailed,
    /// Leader: stand for election now, I hand over to you.
    TimeoutNow,
    /// Follower: you count on entries that my log has lost; up to here it has what is committed.
    LogLost { last: u64 },
    /// Follower: I have forgotten what I promised. Which entry must I have before I may promise again?
    Rejoining { nonce: u64 },
    /// Leader: this one, which I appended when you asked.
    Barrier { nonce: u64, index: u64 },
    /// About a leader that holds its group up. `round` is its own number for the question.
    Relief { round: u64, word: ReliefWord },
}

/// What is said about a leader that holds its group up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ReliefWord {
    /// Leader: could you lead better?
    Asked,
    /// Who was asked, to the other voters: answer at once.
    Echo,
    /// Voter: here.
    Echoed,
    /// Who was asked: yes, a majority answers me quickly.
    Able,
}

#[derive(Serialize, Deserialize)]
struct WireEntry {
    term: u64,
    is_change: bool,
    context_bytes: u32,
    data_bytes: u32,
}

/// Bytes that are no frame. The connection they came from should be closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Cut short, or not of our making.
    #[error("malformed frame")]
    Malformed,
    /// More of something than is ever sent.
    #[error("frame has {count} {what}, at most {limit} are accepted")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// A number or list that no correct node sends.
    #[error("frame is inconsistent: {what}")]
    Inconsistent {
        /// Which.
        what: &'static str,
    },
}

impl Message {
    /// A message whose epoch is set when it goes out.
    pub(crate) fn new(term: u64, body: Body) -> Message {
        Message { term, epoch: Epoch(0), body }
    }

    /// About how many bytes it adds to a frame.
    pub(crate) fn approximate_bytes(&self) -> usize {
        let entries: usize = match &self.body {
            Body::Append { entries, .. } => entries.iter().map(approximate_entry_bytes).sum(),
            _ => 0,
        };
        OVERHEAD_BYTES + entries
    }

    fn entries(&self) -> &[LogEntry] {
        match &self.body {
            Body::Append { entries, .. } => entries,
            _ => &[],
        }
    }

    /// Whether all numbers and lists are such as a correct node sends.
    fn check(&self) -> Result<(), FrameError> {
        let bad = |what| Err(FrameError::Inconsistent { what });
        let numbers = match &self.body {
            Body::Append { prev, commit, .. } => [prev.term, prev.index, *commit, 0],
            Body::Appended { index, commit } => [*index, *commit, 0, 0],
            Body::AppendRejected { index, hint, commit } => {
                [*index, hint.term, hint.index, *commit]
            }
            Body::Heartbeat { commit, .. } => [*commit, 0, 0, 0],
            Body::HeartbeatAnswer { commit, installing, .. } => [*commit, *installing, 0, 0],
            Body::Vote { last, commit, .. } => [last.term, last.index, commit.term, commit.index],
            Body::VoteAnswer { commit, .. } => [commit.term, commit.index, 0, 0],
            Body::Snapshot(snapshot) => {
                check_snapshot(snapshot)?;
                [snapshot.position.term, snapshot.position.index, 0, 0]
            }
            Body::SnapshotFailed | Body::TimeoutNow => [0; 4],
            Body::LogLost { last } => [*last, 0, 0, 0],
            Body::Rejoining { .. } | Body::Relief { .. } => [0; 4],
            Body::Barrier { index, .. } => [*index, 0, 0, 0],
        };
        if self.term == 0 || self.term >= NUMBER_MAX {
            return bad("term out of bounds");
        }
        if numbers.iter().any(|&number| number >= NUMBER_MAX) {
            return bad("number out of bounds");
        }
        self.check_entries()
    }

    fn check_entries(&self) -> Result<(), FrameError> {
        let Body::Append { prev, entries, .. } = &self.body else { return Ok(()) };
        if (prev.term == 0) != (prev.index == 0) {
            return Err(FrameError::Inconsistent { what: "only index 0 has term 0" });
        }
        // The library takes term 0 for that of any entry that it does not have.
        let mut term = prev.term.max(1);
        for entry in entries {
            if entry.position.term < term || entry.position.term > self.term {
                return Err(FrameError::Inconsistent { what: "terms of entries must not fall" });
            }
            term = entry.position.term;
        }
        Ok(())
    }
}

/// The Raft library panics on a configuration that contradicts itself.
fn check_snapshot(snapshot: &SnapshotDescriptor) -> Result<(), FrameError> {
    let members = &snapshot.members;
    let lists = [&members.voters, &members.learners, &members.outgoing, &members.learners_next];
    let is_plain = |list: &[_]| {
        let mut sorted = list.to_vec();
        sorted.sort_unstable();
        sorted.windows(2).all(|pair| pair.first() != pair.last())
    };
    let is_good = lists.iter().all(|list| list.len() <= MEMBERS_MAX && is_plain(list))
        && !members.voters.is_empty()
        && !members.learners.iter().any(|node| members.voters.contains(node))
        && !members.learners.iter().any(|node| members.outgoing.contains(node))
        && members.learners_next.iter().all(|node| members.outgoing.contains(node))
        && !members.learners_next.iter().any(|node| members.voters.contains(node))
        && (members.is_joint() || !members.auto_leave)
        && snapshot.position.index > 0
        && snapshot.position.term > 0;
    if is_good { Ok(()) } else { Err(FrameError::Inconsistent { what: "configuration" }) }
}

/// About how many bytes an entry adds to a frame.
pub(crate) fn approximate_entry_bytes(entry: &LogEntry) -> usize {
    OVERHEAD_BYTES / 2 + entry.context.len() + entry.data.len()
}

impl Frame {
    /// The frame as pieces for a vectored write. Entry bodies of 4 KiB and more are not copied.
    #[must_use]
    pub fn encode_parts(&self) -> Vec<Bytes> {
        let mut parts = Vec::new();
        let mut small = BytesMut::from(self.head().as_slice());
        let entries = self.messages.iter().flat_map(|(_, message)| message.entries());
        for bytes in entries.flat_map(|entry| [&entry.context, &entry.data]) {
            if bytes.len() < SHARED_BYTES_MIN {
                small.put_slice(bytes);
            } else {
                parts.push(small.split().freeze());
                parts.push(bytes.clone());
            }
        }
        parts.push(small.freeze());
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// The frame in one piece.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let parts = self.encode_parts();
        let mut out = BytesMut::with_capacity(parts.iter().map(Bytes::len).sum());
        parts.iter().for_each(|part| out.put_slice(part));
        out.freeze()
    }

    /// Length and head.
    fn head(&self) -> Vec<u8> {
        let entries: Vec<WireEntry> = self
            .messages
            .iter()
            .flat_map(|(_, message)| message.entries())
            .map(|entry| WireEntry {
                term: entry.position.term,
                is_change: entry.kind == EntryKind::Change,
                context_bytes: entry.context.len() as u32,
                data_bytes: entry.data.len() as u32,
            })
            .collect();
        let out = vec![0; 4];
        // Writing to a vector cannot fail, and these types have no failing parts; an empty frame
        // would be refused by the receiver.
        let mut out = postcard::to_extend(&(&self.messages, entries), out).unwrap_or_default();
        let length = (out.len().saturating_sub(4) as u32).to_le_bytes();
        out.iter_mut().zip(length).for_each(|(to, from)| *to = from);
        out
    }

    /// Reads a frame. Large entry bodies stay slices of `bytes`.
    ///
    /// # Errors
    ///
    /// [`FrameError`] for anything that `encode` does not produce. Never panics, never allocates
    /// more than a small multiple of the input.
    pub fn decode(mut bytes: Bytes) -> Result<Frame, FrameError> {
        let length = take(&mut bytes, 4)?;
        let length = length.as_ref().try_into().map_err(|_| FrameError::Malformed)?;
        let length = u32::from_le_bytes(length) as usize;
        check_count("bytes of head", length, HEAD_BYTES_MAX)?;
        let head = take(&mut bytes, length)?;
        let (mut messages, rest) =
            take_list::<(PartitionId, Message)>("messages", &head, MESSAGES_MAX)?;
        let (wire_entries, rest) = take_list::<WireEntry>("entries", rest, ENTRIES_MAX)?;
        if !rest.is_empty() {
            return Err(FrameError::Malformed);
        }
        let mut wire_entries = wire_entries.into_iter();
        for (_, message) in &mut messages {
            if let Body::Append { prev, count, entries, .. } = &mut message.body {
                *entries = decode_entries(prev.index, *count, &mut wire_entries, &mut bytes)?;
            }
            message.check()?;
        }
        if wire_entries.next().is_some() || !bytes.is_empty() {
            return Err(FrameError::Malformed);
        }
        Ok(Frame { messages })
    }
}

fn check_count(what: &'static str, count: usize, limit: usize) -> Result<(), FrameError> {
    if count > limit { Err(FrameError::TooMany { what, count, limit }) } else { Ok(()) }
}

/// A list's length stands before it, so that one that is too long is refused before it takes memory: a message
/// may have four bytes on the wire, and takes many times that here.
fn take_list<'a, T: Deserialize<'a>>(
    what: &'static str,
    bytes: &'a [u8],
    limit: usize,
) -> Result<(Vec<T>, &'a [u8]), FrameError> {
    let (count, _) =
        postcard::take_from_bytes::<usize>(bytes).map_err(|_| FrameError::Malformed)?;
    check_count(what, count, limit)?;
    postcard::take_from_bytes(bytes).map_err(|_| FrameError::Malformed)
}

fn take(bytes: &mut Bytes, length: usize) -> Result<Bytes, FrameError> {
    if bytes.len() < length { Err(FrameError::Malformed) } else { Ok(bytes.split_to(length)) }
}

fn take_body(bytes: &mut Bytes, length: u32) -> Result<Bytes, FrameError> {
    let body = take(bytes, length as usize)?;
    Ok(if body.len() < SHARED_BYTES_MIN { Bytes::copy_from_slice(&body) } else { body })
}

fn decode_entries(
    prev_index: u64,
    count: u32,
    wire_entries: &mut impl Iterator<Item = WireEntry>,
    bytes: &mut Bytes,
) -> Result<Vec<LogEntry>, FrameError> {
    // No capacity is reserved for `count`: it is not yet known to be true.
    let mut entries = Vec::new();
    let first = prev_index.min(NUMBER_MAX) + 1;
    for index in first..first + u64::from(count) {
        let wire = wire_entries.next().ok_or(FrameError::Malformed)?;
        entries.push(LogEntry {
            position: LogPosition { term: wire.term, index },
            kind: if wire.is_change { EntryKind::Change } else { EntryKind::Normal },
            context: take_body(bytes, wire.context_bytes)?,
            data: take_body(bytes, wire.data_bytes)?,
        });
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use milpa_types::NodeId;
    use proptest::prelude::*;

    use super::*;
    use crate::types::Members;

    fn position(term: u64, index: u64) -> LogPosition {
        LogPosition { term, index }
    }

    fn sample() -> Frame {
        let entry = |index, bytes: usize| LogEntry {
            position: position(3, index),
            kind: if bytes == 5 { EntryKind::Change } else { EntryKind::Normal },
            context: Bytes::from(vec![1; bytes / 5]),
            data: Bytes::from(vec![index as u8; bytes]),
        };
        let entries = vec![entry(8, 5), entry(9, 132 << 10), entry(10, 0), entry(11, 100)];
        let members = Members::new(&[NodeId(0), NodeId(1)], &[NodeId(2)]);
        let bodies = [
            Body::Append { prev: position(2, 7), commit: 6, count: 4, entries },
            Body::Appended { index: 7, commit: 6 },
            Body::AppendRejected { index: 7, hint: position(1, 3), commit: 2 },
            Body::Heartbeat { commit: 1, stamp_ms: u64::MAX, read: Some(u64::MAX) },
            Body::HeartbeatAnswer { commit: 1, stamp_ms: 5, read: None, installing: 9 },
            Body::Vote {
                is_pre: true,
                last: position(2, 2),
                commit: position(1, 1),
                is_transfer: false,
            },
            Body::VoteAnswer { is_pre: false, is_granted: true, commit: position(0, 0) },
            Body::Snapshot(SnapshotDescriptor { position: position(2, 5), members }),
            Body::SnapshotFailed,
            Body::TimeoutNow,
            Body::LogLost { last: 7 },
            Body::Rejoining { nonce: u64::MAX },
            Body::Barrier { nonce: 5, index: 8 },
            Body::Relief { round: u64::MAX, word: ReliefWord::Able },
        ];
        let messages = bodies.into_iter().enumerate();
        let messages = messages.map(|(i, body)| (PartitionId(i as u64), Message::new(3, body)));
        Frame { messages: messages.collect() }
    }

    #[test]
    fn every_message_survives_the_network() {
        let frame = sample();
        let bytes = frame.encode();
        assert_eq!(Frame::decode(bytes.clone()), Ok(frame.clone()));
        let parts = frame.encode_parts();
        assert_eq!(parts.concat(), bytes);
        let large = parts.iter().find(|part| part.len() == 132 << 10).unwrap();
        assert_eq!(large.as_ptr(), frame.messages[0].1.entries()[1].data.as_ptr(), "not copied");
    }

    #[test]
    fn every_truncation_is_refused() {
        let mut frame = sample();
        if let Body::Append { entries, .. } = &mut frame.messages[0].1.body {
            entries[1].data = Bytes::from_static(b"short");
        }
        let bytes = frame.encode();
        for length in 0..bytes.len() {
            assert!(Frame::decode(bytes.slice(..length)).is_err(), "{length}");
        }
    }

    #[test]
    fn nonsense_of_the_right_shape_is_refused() {
        let check = |body: Body, term: u64| {
            let frame = Frame { messages: vec![(PartitionId(1), Message::new(term, body))] };
            assert!(matches!(
                Frame::decode(frame.encode()),
                Err(FrameError::Inconsistent { .. } | FrameError::Malformed)
            ));
        };
        check(Body::TimeoutNow, 0);
        check(Body::Appended { index: u64::MAX, commit: 0 }, 1);
        let members = Members::new(&[NodeId(1), NodeId(1)], &[]);
        check(Body::Snapshot(SnapshotDescriptor { position: position(1, 1), members }), 1);
        check(
            Body::Append { prev: position(1, 1), commit: 1, count: u32::MAX, entries: vec![] },
            1,
        );
    }

    /// Found by a reader: the Raft library takes term 0 for that of any entry that it does not have, so it
    /// believed to have what was named, and panicked when that was to be committed; and it panics on a
    /// configuration that leaves a change by itself and is in none.
    #[test]
    fn messages_that_the_library_panics_on_are_refused() {
        let check = |body: Body| {
            let frame = Frame { messages: vec![(PartitionId(1), Message::new(3, body))] };
            let decoded = Frame::decode(frame.encode());
            assert!(matches!(decoded, Err(FrameError::Inconsistent { .. })), "{frame:?}");
        };
        let append = |prev: LogPosition, term| {
            let position = position(term, prev.index + 1);
            let entries = vec![LogEntry { position, ..LogEntry::default() }];
            Body::Append { prev, commit: 100, count: 1, entries }
        };
        check(append(position(0, 50), 3));
        check(append(position(3, 0), 3));
        check(append(position(0, 0), 0));
        let members = Members::new(&[NodeId(1), NodeId(2)], &[]);
        let snapshot = |position, members| Body::Snapshot(SnapshotDescriptor { position, members });
        check(snapshot(position(0, 50), members.clone()));
        check(snapshot(position(1, 50), Members { auto_leave: true, ..members }));
    }

    /// Found by a reader: a frame of 16 MiB whose messages have four bytes each took some 600 MiB of memory
    /// before it was refused.
    #[test]
    fn too_many_messages_are_refused_before_they_take_memory() {
        let mut head = postcard::to_stdvec(&(1_u32 << 20)).unwrap();
        let mut bytes = (head.len() as u32).to_le_bytes().to_vec();
        bytes.append(&mut head);
        let (what, count, limit) = ("messages", 1 << 20, MESSAGES_MAX);
        let expected = Err(FrameError::TooMany { what, count, limit });
        assert_eq!(Frame::decode(Bytes::from(bytes)), expected);
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Frame::decode(Bytes::from(bytes));
        }

        #[test]
        fn a_changed_byte_never_panics(at in any::<prop::sample::Index>(), to in any::<u8>()) {
            let mut bytes = sample().encode().to_vec();
            bytes.truncate(300);
            let at = at.index(bytes.len());
            bytes[at] = to;
            let _ = Frame::decode(Bytes::from(bytes));
        }
    }
}
