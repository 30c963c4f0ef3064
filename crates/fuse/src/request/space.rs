//! Requests about ranges of a file: allocation, holes, copies.

use crate::abi::{CopyFileRangeIn, FallocateIn, LseekIn};
use crate::decode::{Malformed, Reader};

/// Arguments of fallocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fallocate {
    /// The open file.
    pub fh: u64,
    /// Start in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// `FALLOC_FL_*`.
    pub mode: u32,
}

impl Fallocate {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<Fallocate, Malformed> {
        let raw: FallocateIn = body.take()?;
        Ok(Fallocate { fh: raw.fh, offset: raw.offset, length: raw.length, mode: raw.mode })
    }
}

/// Arguments of lseek (SEEK_DATA and SEEK_HOLE; the kernel does the others itself).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lseek {
    /// The open file.
    pub fh: u64,
    /// Start in bytes.
    pub offset: u64,
    /// `SEEK_*`.
    pub whence: u32,
}

impl Lseek {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<Lseek, Malformed> {
        let raw: LseekIn = body.take()?;
        Ok(Lseek { fh: raw.fh, offset: raw.offset, whence: raw.whence })
    }
}

/// Arguments of copy_file_range. The source inode is the request's nodeid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyFileRange {
    /// Open source file.
    pub fh_in: u64,
    /// Start in the source, in bytes.
    pub offset_in: u64,
    /// Target inode.
    pub nodeid_out: u64,
    /// Open target file.
    pub fh_out: u64,
    /// Start in the target, in bytes.
    pub offset_out: u64,
    /// At most so many bytes.
    pub length: u64,
    /// None are defined yet; refuse what is not 0.
    pub flags: u64,
}

impl CopyFileRange {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<CopyFileRange, Malformed> {
        let raw: CopyFileRangeIn = body.take()?;
        Ok(CopyFileRange {
            fh_in: raw.fh_in,
            offset_in: raw.off_in,
            nodeid_out: raw.nodeid_out,
            fh_out: raw.fh_out,
            offset_out: raw.off_out,
            length: raw.len,
            flags: raw.flags,
        })
    }
}
