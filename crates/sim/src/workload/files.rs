//! Operations on open files.

use bytes::Bytes;
use milpa_client::{FsError, OpenFlags};
use milpa_model::content::{Reader, fill};
use milpa_model::dentry::Call;
use milpa_types::{AttributeChanges, DataError, InodeId, MetaError};
use tokio::time::Instant;

use super::names::{CREATION, what};
use super::worker::{Opened, Worker};

/// Files are kept below this length.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Writes to one file; after that it is only read.
const WRITES_MAX: usize = 60;

fn says_lost(error: &FsError) -> bool {
    matches!(error, FsError::Data(DataError::Lost { .. }) | FsError::Lost(_))
}

impl Worker {
    pub(super) async fn create(&mut self) {
        let Some(key) = self.file_key() else { return };
        let exclusive = self.random.chance(1, 3);
        let sync = self.random.chance(1, 8);
        let flags = OpenFlags { exclusive, sync, ..OpenFlags::read_write() };
        let unknown = if exclusive { Call::Made(None) } else { Call::MadeOrFound(None) };
        let began = Instant::now();
        let (place, opened) = {
            let mut history = self.plan.history.borrow_mut();
            (history.begin_name(&key, unknown), history.moment())
        };
        let result = self.client.create(key.0, &key.1, CREATION, flags).await;
        self.ended("create", &what(&key), began, &result);
        let call = match &result {
            Ok(file) if exclusive => Some(Call::Made(Some(file.attributes.inode))),
            Ok(file) => Some(Call::MadeOrFound(Some(file.attributes.inode))),
            Err(FsError::Meta(MetaError::Exists)) => Some(Call::WasTaken),
            Err(_) => None,
        };
        self.end(&key, place, &result, call);
        if let Ok(file) = result {
            let (handle, inode) = (file.handle, file.attributes.inode);
            let file = Opened { handle, inode, opened, writes: true, syncs: sync, owes: false };
            self.files.push(file);
        }
    }

    pub(super) async fn open_existing(&mut self) {
        let Some(key) = self.file_key() else { return };
        let Some(inode) = self.look_up(&key).await else { return };
        let writes = self.random.chance(1, 2);
        let flags = if writes { OpenFlags::read_write() } else { OpenFlags::read_only() };
        let (began, opened) = (Instant::now(), self.plan.history.borrow_mut().moment());
        let result = self.client.open(inode, flags).await;
        self.ended("open", &inode.to_string(), began, &result);
        if let Ok(file) = result {
            let (handle, syncs, owes) = (file.handle, false, false);
            self.files.push(Opened { handle, inode, opened, writes, syncs, owes });
        }
    }

    fn pick_file(&mut self) -> Option<usize> {
        (!self.files.is_empty()).then(|| self.random.below(self.files.len() as u64) as usize)
    }

    /// A length: mostly small, now and then several packets.
    fn length(&mut self) -> u64 {
        match self.random.below(10) {
            0..5 => 1 + self.random.below(5000),
            5..9 => 1 + self.random.below(70_000),
            _ => 1 + self.random.below(400_000),
        }
    }

    pub(super) async fn write(&mut self) {
        let Some(place) = self.pick_file() else { return };
        let length = self.length();
        let Some(file) = self.files.get(place).filter(|file| file.writes) else { return };
        let (handle, inode, syncs) = (file.handle, file.inode, file.syncs);
        let client = self.plan.client;
        let size = self.plan.history.borrow_mut().content(inode).size_max();
        if self.plan.history.borrow_mut().content(inode).len() >= WRITES_MAX {
            return;
        }
        // At the end, within, or beyond.
        let offset = match self.random.below(10) {
            0..5 => size,
            5..9 => self.random.below(size + 1),
            _ => size + self.random.below(20_000),
        };
        if offset + length > FILE_BYTES_MAX {
            return;
        }
        let (bytes, index) = {
            let mut history = self.plan.history.borrow_mut();
            history.next_pattern += 1;
            let (pattern, begin) = (history.next_pattern, history.moment());
            let content = history.content(inode);
            let index = content.write(client, Some(pattern), offset, offset + length, begin);
            (fill(pattern, offset, length), index)
        };
        let began = Instant::now();
        let result = self.client.write(handle, offset, Bytes::from(bytes), false).await;
        self.ended("write", &format!("{inode} {offset}+{length}"), began, &result);
        if let Some(file) = self.files.get_mut(place).filter(|_| syncs) {
            file.owes = false;
        }
        let mut history = self.plan.history.borrow_mut();
        let now = history.moment();
        let content = history.content(inode);
        match result {
            Ok(()) if syncs => content.synced(index, now),
            Ok(()) => content.acknowledged(index, now),
            Err(error) => {
                if syncs && says_lost(&error) {
                    content.loss_was_told();
                }
                content.client_failed(client);
            }
        }
    }

    pub(super) async fn read(&mut self) {
        let Some(place) = self.pick_file() else { return };
        let length = self.length();
        let Some(file) = self.files.get(place) else { return };
        let (handle, inode, opened) = (file.handle, file.inode, file.opened);
        let size = self.plan.history.borrow_mut().content(inode).size_max();
        let offset = if self.random.chance(1, 3) { 0 } else { self.random.below(size + 1) };
        let began = Instant::now();
        let began_moment = self.plan.history.borrow_mut().moment();
        let result = self.client.read(handle, offset, length as u32).await;
        self.ended("read", &format!("{inode} {offset}+{length}"), began, &result);
        let pieces = match result {
            Ok(pieces) => pieces,
            Err(error) => {
                if matches!(error, FsError::Lost(_)) {
                    self.plan.history.borrow_mut().content(inode).client_failed(self.plan.client);
                }
                return;
            }
        };
        let got = pieces.concat();
        let reader = Reader { client: self.plan.client, opened, began: began_moment };
        self.judge(inode, reader, offset, length, &got);
    }

    fn judge(&self, inode: InodeId, reader: Reader, offset: u64, length: u64, got: &[u8]) {
        let mut history = self.plan.history.borrow_mut();
        history.judged_reads += 1;
        if let Err(wrong) = history.content(inode).judge(reader, offset, length, got) {
            let detail = format!(
                "inode {inode}, read of {length} at {offset} gave {} bytes to client {} (opened {}, \
                 began {}); wrong at {}: {:?}; {}",
                got.len(),
                reader.client,
                reader.opened,
                reader.began,
                wrong.offset,
                wrong.found,
                wrong.explanation
            );
            history.violated("file content", detail);
        }
    }

    pub(super) async fn fsync(&mut self) {
        self.confirm(true).await;
    }

    pub(super) async fn flush(&mut self) {
        self.confirm(false).await;
    }

    async fn confirm(&mut self, is_sync: bool) {
        let Some(place) = self.pick_file() else { return };
        let Some(file) = self.files.get(place) else { return };
        let (handle, inode, writes) = (file.handle, file.inode, file.writes);
        let (began, moment) = (Instant::now(), self.plan.history.borrow_mut().moment());
        let result = match is_sync {
            true => self.client.fsync(handle, false).await,
            false => self.client.flush(handle).await,
        };
        let operation = if is_sync { "fsync" } else { "flush" };
        self.ended(operation, &inode.to_string(), began, &result);
        self.check_debt(place, is_sync, &result);
        if is_sync || writes {
            self.confirmed(inode, moment, is_sync, result.is_ok());
        }
    }

    /// What a close said is lost, an fsync through the same descriptor says again.
    fn check_debt(&mut self, place: usize, is_sync: bool, said: &Result<(), FsError>) {
        let Some(file) = self.files.get_mut(place) else { return };
        let is_hidden = file.owes && is_sync && said.is_ok();
        file.owes = match said {
            Err(FsError::Data(DataError::NoSpace)) if !is_sync => true,
            _ => file.owes && !is_sync,
        };
        if is_hidden {
            let detail = format!("inode {}: only a close has told that bytes are lost", file.inode);
            self.plan.history.borrow_mut().violated("fsync tells a loss", detail);
        }
    }

    /// Tells the model what a flush or fsync that began then has said.
    fn confirmed(&self, inode: InodeId, began: u64, is_sync: bool, is_ok: bool) {
        let mut history = self.plan.history.borrow_mut();
        let (now, client) = (history.moment(), self.plan.client);
        let content = history.content(inode);
        if !is_ok {
            content.loss_was_told();
            return content.client_failed(client);
        }
        let confirmed = content.published(client, began, now, is_sync);
        history.synced_writes += confirmed as u64;
    }

    pub(super) async fn truncate(&mut self) {
        let Some(place) = self.pick_file() else { return };
        let Some(file) = self.files.get(place).filter(|file| file.writes) else { return };
        let (inode, client) = (file.inode, self.plan.client);
        let size = self.plan.history.borrow_mut().content(inode).size_max();
        let length = if self.random.chance(1, 4) { 0 } else { self.random.below(size + 5000) };
        let index = {
            let mut history = self.plan.history.borrow_mut();
            let begin = history.moment();
            history.content(inode).write(client, None, length, u64::MAX, begin)
        };
        let changes = AttributeChanges { size: Some(length), ..AttributeChanges::default() };
        let began = Instant::now();
        let result = self.client.setattr(inode, changes).await;
        self.ended("truncate", &format!("{inode} to {length}"), began, &result);
        if result.is_ok() {
            let mut history = self.plan.history.borrow_mut();
            let now = history.moment();
            history.content(inode).acknowledged(index, now);
        }
    }

    /// close(2): flush, then release. What others wrote through other descriptors is published only by
    /// closing one that was open for writing.
    pub(super) async fn close(&mut self, place: usize) {
        if place >= self.files.len() {
            return;
        }
        let file = self.files.swap_remove(place);
        let (began, moment) = (Instant::now(), self.plan.history.borrow_mut().moment());
        let result = self.client.flush(file.handle).await;
        self.ended("close", &file.inode.to_string(), began, &result);
        if file.writes {
            self.confirmed(file.inode, moment, false, result.is_ok());
        }
        let _ = self.client.release(file.handle).await;
    }
}
