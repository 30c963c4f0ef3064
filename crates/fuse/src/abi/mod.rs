//! The kernel's FUSE protocol, version 7.45 (Linux 6.18), as plain structs and constants.
//!
//! Source: `include/uapi/linux/fuse.h`. Names are the kernel's without the `fuse_` prefix, so that
//! one can be read beside the other. The modules state the ABI whole, also the parts which no code
//! of ours uses yet: a reader who looks for a constant must find it here and nowhere else.
//!
//! Everything is in the host's byte order: the kernel speaks to processes of its own machine only.
#![allow(dead_code)]

mod input;
mod opcode;
mod output;
mod plain;
mod statx;

pub(crate) use input::*;
pub(crate) use opcode::*;
pub(crate) use output::*;
pub(crate) use plain::Plain;
pub(crate) use statx::*;

/// Major protocol version. It has been 7 since 2005.
pub(crate) const KERNEL_VERSION: u32 = 7;

/// Newest minor version that this crate knows.
pub(crate) const KERNEL_MINOR_VERSION: u32 = 45;

/// Oldest minor version that this crate serves (Linux 5.4). Below it structs have other sizes.
pub(crate) const KERNEL_MINOR_VERSION_MIN: u32 = 31;

/// The kernel refuses a read with a smaller buffer.
pub(crate) const MIN_READ_BUFFER: usize = 8192;

/// `_IOR(229, 0, u32)`: binds a fresh `/dev/fuse` descriptor to the connection of another one.
pub(crate) const DEV_IOC_CLONE: libc::c_ulong = 0x8004_e500;

/// Length of a directory entry once padded to eight bytes.
pub(crate) const fn align_record(length: usize) -> usize {
    (length + 7) & !7
}
