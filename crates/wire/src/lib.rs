//! What travels between MilpaFS processes: frames, and the messages.
//!
//! A frame ([`frame`]) is a fixed header, a small encoded *body* and a bulk *payload* that is never
//! copied into or out of the body. Bodies are [postcard] encodings of the enums in [`meta`]
//! (with [`check`]), [`data`], [`manager`] and [`handshake`]; the variant order is part of the protocol, so variants
//! are only ever appended within a version.
//!
//! Decoding is total: hostile bytes give a [`DecodeError`], never a panic, and take no more memory
//! than a small multiple of the frame that carried them (`milpa-fuzz` holds every message to it).
//!
//! # What is deliberately absent
//!
//! Sockets, clocks and retries (`milpa-host`), and the Raft messages themselves: they travel as
//! opaque one-way bodies and are `milpa-raft`'s own business.

pub mod check;
pub mod data;
#[cfg(any(test, feature = "decoders"))]
pub mod decoder;
pub mod frame;
pub mod handshake;
pub mod manager;
pub mod meta;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The newest protocol version this build speaks. Peers agree on the highest common one.
pub const PROTOCOL_VERSION: u16 = 11;
/// The oldest protocol version this build still speaks.
pub const PROTOCOL_VERSION_MIN: u16 = 11;

/// Bytes that are not a message of this protocol version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The body is not an encoding of the expected message.
    #[error("body of {length} bytes is not a {expected}")]
    Body {
        /// Bytes in the body.
        length: usize,
        /// The message type that was expected.
        expected: &'static str,
    },
    /// A frame header is damaged, or its lengths exceed the bounds.
    #[error("bad frame: {0}")]
    Frame(&'static str),
}

/// Encodes a message body.
///
/// # Panics
///
/// Never: the messages are plain data, and encoding plain data into memory cannot fail. An empty
/// body, which no message decodes from, stands in for the impossible.
#[must_use]
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    let encoded = postcard::to_stdvec(message);
    debug_assert!(encoded.is_ok(), "messages are plain data");
    encoded.unwrap_or_default()
}

/// Decodes a message body. Every byte must be used.
///
/// # Errors
///
/// [`DecodeError::Body`] when the bytes are not exactly one `T`.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, DecodeError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(DecodeError::Body { length: body.len(), expected: std::any::type_name::<T>() }),
    }
}
