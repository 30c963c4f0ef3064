//! The buffer of one FUSE thread.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::abi::{InHeader, MIN_READ_BUFFER, WriteIn};

/// Alignment of the buffer, and of the data of a write within it.
const PAGE_BYTES: usize = 4096;

/// What lies before the data of a write.
const WRITE_HEAD: usize = size_of::<InHeader>() + size_of::<WriteIn>();

/// Messages start here, so that the data of a write starts on the second page.
const START: usize = PAGE_BYTES - WRITE_HEAD;

/// Zeroed, page-aligned memory for one message.
///
/// The data of a write request is page-aligned in it, so that it can go to a disk with O_DIRECT.
/// Pages that no message has reached cost no memory.
pub(crate) struct Buffer {
    memory: NonNull<u8>,
    layout: Layout,
}

impl Buffer {
    /// A buffer for writes of up to `write_bytes`; `None` when there is no memory.
    pub(crate) fn new(write_bytes: u32) -> Option<Buffer> {
        let payload = usize::try_from(write_bytes).ok()?.max(2 * MIN_READ_BUFFER);
        // One more page than a write needs: 64 KiB of xattr have a name, symlinks have two texts.
        let size = payload.next_multiple_of(PAGE_BYTES).checked_add(2 * PAGE_BYTES)?;
        let layout = Layout::from_size_align(size, PAGE_BYTES).ok()?;
        // SAFETY: `layout` has a size of at least two pages, so it is not zero.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Buffer { memory, layout })
    }

    /// Where the next message is read to.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        let length = self.layout.size() - START;
        // SAFETY: `memory` is ours alone and has `layout.size()` initialised bytes, of which
        // `START < PAGE_BYTES` are skipped; the slice borrows `self` mutably.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(START), length) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout and freed only here.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) }
    }
}

// SAFETY: the buffer owns its memory; nothing else points to it.
unsafe impl Send for Buffer {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_of_a_write_is_page_aligned_and_fits() {
        for write_bytes in [0, 4096, 1 << 20] {
            let mut buffer = Buffer::new(write_bytes).unwrap();
            let space = buffer.space();
            assert!(space.len() >= WRITE_HEAD + write_bytes as usize);
            assert!(space.len() >= MIN_READ_BUFFER);
            assert_eq!(space[WRITE_HEAD..].as_ptr() as usize % PAGE_BYTES, 0);
            space.fill(1);
        }
    }
}
