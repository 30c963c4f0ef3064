//! A disk that forgets what was not synced, as POSIX allows, and that lies, as real ones do.
//!
//! Each machine has one. It outlives the lives of its node: a life reaches it through [`Mount`],
//! whose handles fail once that life is over. What is written is volatile until a sync; what a
//! power cut then keeps of it is drawn sector by sector ([`Platter::cut_power`]).

mod content;
mod effects;
mod file;
mod files;
mod names;
mod platter;

pub use effects::Effects;
pub use files::Mount;
pub use platter::{DiskCounts, DiskOptions, Image, NameLoss, Ordered, Platter};
