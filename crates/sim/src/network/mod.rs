//! The network: connections with TCP's promises and TCP's ways to break them.
//!
//! Bytes of one direction of a connection arrive in order or not at all. A lost packet is a stall
//! until it is sent again; a partition is a stall that ends when the link heals or one end gives
//! up; the other end then hears of it when it next sends, or never. Duplicates and reordering
//! appear where they do in real life: across connections, and by retries (F15).

mod link;
mod stream;
mod wires;

pub(crate) use link::LinkFaults;
pub(crate) use stream::Card;
pub(crate) use wires::{Ending, Wires};
