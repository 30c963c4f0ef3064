//! The frame: the one unit that travels on a connection after the handshake.
//!
//! ```text
//! offset size field
//!      0    4 magic "MLP1"
//!      4    1 kind: 1 request, 2 reply, 3 one-way, 4 handshake
//!      5    1 reserved, 0
//!      6    2 channel of a one-way frame, else 0
//!      8    8 request id, chosen by the caller, echoed by the reply; 0 in a one-way frame
//!     16    4 request: milliseconds the caller will wait; else 0
//!     20    4 body bytes, at most 8 MiB
//!     24    4 payload bytes, at most 8 MiB
//!     28    4 CRC32C of bytes 0..28
//!     32    4 CRC32C of the body
//!     36    . body, then payload
//! ```
//!
//! Numbers are little-endian. The header has a checksum of its own because the lengths in it are
//! used before the body is there: with a wrong one the receiver would take all that follows, up to 16
//! MiB of heartbeats and requests, for the rest of one frame, and each side would wait for the other.
//! The payload has no checksum here: what travels in it is checked block by block, from the client's
//! buffer to the disk, by the checksums in the body.

use bytes::{Bytes, BytesMut};

use crate::DecodeError;

/// Bytes of the fixed header.
pub const HEADER_BYTES: usize = 36;
/// Bytes of it that its own checksum covers.
const CHECKED_BYTES: usize = 28;
/// Largest body.
pub const BODY_BYTES_MAX: usize = 8 << 20;
/// Largest payload.
pub const PAYLOAD_BYTES_MAX: usize = 8 << 20;

const MAGIC: [u8; 4] = *b"MLP1";

/// CRC32C (Castagnoli, RFC 3720), the one checksum of MilpaFS.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// CRC32C of these parts, one behind the other.
#[must_use]
pub fn crc32c_of(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// Asks for one reply with the same id.
    Request,
    /// Answers a request.
    Reply,
    /// Asks for nothing: Raft messages.
    OneWay,
    /// Before the connection is established.
    Handshake,
}

impl FrameKind {
    fn code(self) -> u8 {
        match self {
            FrameKind::Request => 1,
            FrameKind::Reply => 2,
            FrameKind::OneWay => 3,
            FrameKind::Handshake => 4,
        }
    }

    fn from_code(code: u8) -> Option<FrameKind> {
        Some(match code {
            1 => FrameKind::Request,
            2 => FrameKind::Reply,
            3 => FrameKind::OneWay,
            4 => FrameKind::Handshake,
            _ => return None,
        })
    }
}

/// One frame, its body and payload sharing the buffer they arrived in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it is for.
    pub kind: FrameKind,
    /// Which consumer of one-way frames it is for.
    pub channel: u16,
    /// Joins a reply to its request.
    pub id: u64,
    /// How long the caller of a request will wait, in milliseconds.
    pub wait_ms: u32,
    /// An encoded message.
    pub body: Bytes,
    /// Bulk bytes.
    pub payload: Bytes,
}

impl Frame {
    /// The header and body as one buffer; the payload follows it on the wire.
    #[must_use]
    pub fn encode_head(&self) -> Bytes {
        debug_assert!(self.body.len() <= BODY_BYTES_MAX, "callers bound their bodies");
        debug_assert!(self.payload.len() <= PAYLOAD_BYTES_MAX, "callers bound their payloads");
        let mut head = Vec::with_capacity(HEADER_BYTES + self.body.len());
        head.extend_from_slice(&MAGIC);
        head.extend_from_slice(&[self.kind.code(), 0]);
        head.extend_from_slice(&self.channel.to_le_bytes());
        head.extend_from_slice(&self.id.to_le_bytes());
        head.extend_from_slice(&self.wait_ms.to_le_bytes());
        head.extend_from_slice(&(self.body.len() as u32).to_le_bytes());
        head.extend_from_slice(&(self.payload.len() as u32).to_le_bytes());
        head.extend_from_slice(&crc32c(&head).to_le_bytes());
        head.extend_from_slice(&crc32c(&self.body).to_le_bytes());
        head.extend_from_slice(&self.body);
        head.into()
    }

    /// Takes one frame from the front of `buffer`, or tells how many bytes a whole one needs.
    ///
    /// # Errors
    ///
    /// [`DecodeError::Frame`] when the header is damaged or out of bounds: the connection cannot
    /// be trusted any further and must be closed.
    pub fn take(buffer: &mut BytesMut) -> Result<Taken, DecodeError> {
        let Some(header) = buffer.first_chunk::<HEADER_BYTES>() else {
            return Ok(Taken::NeedsBytes { total: HEADER_BYTES, payload: 0 });
        };
        if header[0..4] != MAGIC {
            return Err(DecodeError::Frame("wrong magic number: not a MilpaFS peer"));
        }
        if crc32c(&header[..CHECKED_BYTES]) != u32_at(header, CHECKED_BYTES) {
            return Err(DecodeError::Frame("checksum mismatch of the header"));
        }
        let kind = FrameKind::from_code(header[4]).ok_or(DecodeError::Frame("unknown kind"))?;
        let (body_bytes, payload_bytes) =
            (u32_at(header, 20) as usize, u32_at(header, 24) as usize);
        if body_bytes > BODY_BYTES_MAX || payload_bytes > PAYLOAD_BYTES_MAX {
            return Err(DecodeError::Frame("length exceeds the bound"));
        }
        let total = HEADER_BYTES + body_bytes + payload_bytes;
        if buffer.len() < total {
            return Ok(Taken::NeedsBytes { total, payload: payload_bytes });
        }
        let (channel, id) = (u16::from_le_bytes([header[6], header[7]]), u64_at(header, 8));
        let (wait_ms, crc) = (u32_at(header, 16), u32_at(header, CHECKED_BYTES + 4));
        let mut bytes = buffer.split_to(total).freeze();
        let _ = bytes.split_to(HEADER_BYTES);
        let body = bytes.split_to(body_bytes);
        if crc32c(&body) != crc {
            return Err(DecodeError::Frame("checksum mismatch"));
        }
        Ok(Taken::Frame(Frame { kind, channel, id, wait_ms, body, payload: bytes }))
    }
}

/// What [`Frame::take`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken {
    /// A whole frame.
    Frame(Frame),
    /// The buffer must hold more before a frame can be taken.
    NeedsBytes {
        /// So many bytes, as far as is known.
        total: usize,
        /// The last so many of these are the payload.
        payload: usize,
    },
}

fn u32_at(header: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

fn u64_at(header: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from(u32_at(header, at)) | u64::from(u32_at(header, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame() -> Frame {
        Frame {
            kind: FrameKind::Request,
            channel: 3,
            id: 0x1122_3344_5566_7788,
            wait_ms: 10_000,
            body: Bytes::from_static(b"body"),
            payload: Bytes::from_static(b"payload"),
        }
    }

    fn bytes_of(frame: &Frame) -> BytesMut {
        let mut bytes = BytesMut::from(&frame.encode_head()[..]);
        bytes.extend_from_slice(&frame.payload);
        bytes
    }

    #[test]
    fn a_frame_survives_the_wire_byte_by_byte() {
        let whole = bytes_of(&frame());
        let mut arrived = BytesMut::new();
        for (count, byte) in whole.iter().enumerate() {
            match Frame::take(&mut arrived) {
                Ok(Taken::NeedsBytes { total, .. }) => assert!(total > count),
                other => panic!("{other:?} after {count} bytes"),
            }
            arrived.extend_from_slice(&[*byte]);
        }
        assert_eq!(Frame::take(&mut arrived), Ok(Taken::Frame(frame())));
        assert!(arrived.is_empty());
    }

    /// The story: one flipped bit of a length, and a meta node took minutes of heartbeats for the body of
    /// one frame, while its group had only two members left and nobody knew.
    #[test]
    fn every_flipped_bit_of_head_and_body_is_noticed_at_once() {
        let whole = bytes_of(&frame());
        for bit in 0..(HEADER_BYTES + 4) * 8 {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Frame::take(&mut damaged).is_err(), "bit {bit} went unnoticed");
        }
    }

    #[test]
    fn a_length_bomb_is_refused_before_anything_is_allocated() {
        let mut whole = bytes_of(&frame());
        whole[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
        let crc = crc32c(&whole[..CHECKED_BYTES]);
        whole[CHECKED_BYTES..][..4].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Frame::take(&mut whole), Err(DecodeError::Frame("length exceeds the bound")));
    }
}
