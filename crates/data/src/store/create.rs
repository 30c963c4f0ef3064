//! New extents.

use std::sync::Arc;

use milpa_types::ExtentId;

use super::extent::{Extent, ExtentParts, State};
use super::format::{HEADER_OFFSET, Header, Sum};
use super::{ExtentStore, NewExtent, StoreError, extent_path, free, lock, write_lock};

/// The file, a first header, and its place in memory. Nothing is flushed here: an extent that a
/// power failure takes away was never flushed, so nothing was promised.
pub(super) fn create_extent(store: &ExtentStore, new: NewExtent) -> Result<(), StoreError> {
    store.disk.check()?;
    store.check_open()?;
    if lock(&store.freed).is_removed(new.id) {
        return Err(StoreError::Removed);
    }
    let path = extent_path(&store.directory, new.id);
    let file = store.disk.files().create(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => StoreError::Exists,
        _ => store.disk.open_failed(&error),
    })?;
    let entry = store.entries.created();
    let header = first_header(store, new);
    if let Err(error) = file.write_at(&header.encode(0), HEADER_OFFSET) {
        // A file without a header is removed when the partition is opened, should this fail too.
        let _removed = store.disk.files().remove(&path);
        return Err(store.disk.write_failed("pwrite", &error));
    }
    store.disk.keep_open((store.number, new.id), file);
    // Slot 0 is unflushed like all of the file: the next header may replace it.
    let state = State { writes: 1, ..State::default() };
    let parts = ExtentParts { header, slot: 1, entry, state, recovered: false, needs_cut: false };
    let extent = Arc::new(Extent::new(parts));
    write_lock(&store.extents).insert(new.id, Arc::clone(&extent));
    // In this order: who frees it meanwhile finds it, or has left word here. Under the log's lock:
    // a compaction sees the ranges in one of the two places.
    let mut freed = lock(&store.freed);
    if freed.is_removed(new.id) {
        drop(freed);
        free::remove(store, new.id)?;
        return Err(StoreError::Removed);
    }
    let dead = freed.take_absent(new.id);
    let mut state = extent.state();
    for (start, end) in dead.iter() {
        state.dead.insert(start, end);
    }
    Ok(())
}

pub(super) fn discard_unreadable(store: &ExtentStore, id: ExtentId) -> Result<(), StoreError> {
    store.check_open()?;
    if !store.unreadable.contains(&id) || store.present(id).is_some() {
        return Err(StoreError::Exists);
    }
    match store.disk.files().remove(&extent_path(&store.directory, id)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(store.disk.write_failed("unlink", &error))
        }
        _ => Ok(()),
    }
}

fn first_header(store: &ExtentStore, new: NewExtent) -> Header {
    Header {
        sequence: 1,
        partition: store.partition,
        extent: new.id,
        epoch: new.epoch,
        inode: new.inode,
        session: new.session,
        sealed: false,
        overwritten: false,
        cut_pending: false,
        tail: Sum::default(),
        length: 0,
        floor: 0,
        committed: 0,
    }
}
