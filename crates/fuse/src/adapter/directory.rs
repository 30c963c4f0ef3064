//! Open directories: from pages in name order to a stream with numbered positions.
//!
//! The kernel names a position by a number, the servers by the last name. Position 1 is behind `.`,
//! 2 behind `..`, 2 + n behind the n-th name. A directory that is read from front to back, as
//! nearly all are, goes from page to page by name, and changes meanwhile neither skip nor repeat
//! what stays. For a seek back there is a mark for each page that was read: its first position and
//! the name before it. So an open directory of a million names takes a page and a thousand marks, and one more
//! for each time that a page is read again from its middle on: as the kernel begins to ask for attributes there, or
//! comes for more of them when those that came with the page are not known to be so any more.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use milpa_client::{Client, DirectoryEntry, FsError};
use milpa_types::{Attributes, FileKind, InodeId, Name};
use tokio::time::Instant;

/// Names in one page: a reply of readdirplus with 1 MiB takes about 5,000.
const PAGE_NAMES: u32 = 1024;

/// Positions before the first name: `.` and `..`.
const DOTS: u64 = 2;

/// All open directories of a mount.
#[derive(Default)]
pub(super) struct Directories {
    next: AtomicU64,
    open: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<Directory>>>>,
}

/// One open directory.
struct Directory {
    inode: InodeId,
    /// Position of a page's first name, and the name before it.
    marks: BTreeMap<u64, Option<Name>>,
    page: Page,
}

/// The page that was read last.
#[derive(Default)]
struct Page {
    asked: Option<Instant>,
    /// Position of the first name.
    start: u64,
    entries: Vec<DirectoryEntry>,
    /// Whether the directory ends here.
    end: bool,
    with_attributes: bool,
}

impl Directories {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<tokio::sync::Mutex<Directory>>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn open(&self, inode: InodeId) -> u64 {
        let fh = self.next.fetch_add(1, Ordering::Relaxed);
        let marks = BTreeMap::from([(DOTS, None)]);
        let directory = Directory { inode, marks, page: Page::default() };
        self.lock().insert(fh, Arc::new(tokio::sync::Mutex::new(directory)));
        fh
    }

    pub(super) fn close(&self, fh: u64) {
        self.lock().remove(&fh);
    }

    fn get(&self, fh: u64) -> Result<Arc<tokio::sync::Mutex<Directory>>, FsError> {
        self.lock().get(&fh).cloned().ok_or(FsError::BadHandle)
    }
}

/// An entry as readdir needs it. Of its attributes there are none: they may be other ones by the time when the kernel
/// comes to it, and so may the name. Whoever wants them asks the client what it knows then.
pub(super) struct Item {
    label: Label,
    pub(super) inode: u64,
    /// Type bits.
    pub(super) mode: u32,
}

enum Label {
    Dots(&'static str),
    Name(Name),
}

impl Item {
    /// As it is shown.
    pub(super) fn name(&self) -> &OsStr {
        match &self.label {
            Label::Dots(dots) => OsStr::new(dots),
            Label::Name(name) => OsStr::from_bytes(name.as_bytes()),
        }
    }

    /// The attributes that the client knows the entry to have now.
    pub(super) fn attributes(&self, client: &Client, parent: InodeId) -> Option<Attributes> {
        match &self.label {
            Label::Dots(_) => None,
            Label::Name(name) => client.remembered(parent, name, InodeId(self.inode)),
        }
    }
}

/// Entries from a position on, as many as are at hand: more than one answer takes, usually.
pub(super) struct Stream {
    items: Vec<Item>,
    position: u64,
}

impl Stream {
    /// Hands out entries with the position behind each, until `add` says that it is full.
    pub(super) fn fill(&mut self, mut add: impl FnMut(&Item, u64) -> bool) {
        for item in &self.items {
            if !add(item, self.position + 1) {
                return;
            }
            self.position += 1;
        }
    }
}

/// What one request of the kernel wants.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    with_attributes: bool,
    /// More cannot fit its buffer.
    entries_max: usize,
}

impl Wanted {
    /// READDIR with a buffer of `size` bytes: a record has a head of 24 bytes and a name.
    pub(super) fn names(size: u32) -> Wanted {
        Wanted { with_attributes: false, entries_max: size as usize / 32 + 1 }
    }

    /// READDIRPLUS: 128 bytes more for the attributes.
    pub(super) fn names_and_attributes(size: u32) -> Wanted {
        Wanted { with_attributes: true, entries_max: size as usize / 160 + 1 }
    }
}

/// The entries from position `offset` on.
pub(super) fn stream(
    directories: &Directories,
    client: Client,
    fh: u64,
    offset: u64,
    wanted: Wanted,
) -> impl Future<Output = Result<Stream, FsError>> + Send + 'static {
    let directory = directories.get(fh);
    async move {
        let directory = directory?;
        let mut directory = directory.lock().await;
        let mut items = dots(directory.inode, offset);
        let first = offset.max(DOTS);
        directory.load(&client, first, wanted.with_attributes).await?;
        items.extend(directory.page.from(first).take(wanted.entries_max));
        Ok(Stream { items, position: offset })
    }
}

/// `.` and `..`, as far as they lie behind `offset`. The number of `..` is only shown.
fn dots(inode: InodeId, offset: u64) -> Vec<Item> {
    let dot = |dots| Item {
        label: Label::Dots(dots),
        inode: inode.0,
        mode: FileKind::Directory.mode_bits(),
    };
    [".", ".."].into_iter().skip(offset as usize).map(dot).collect()
}

impl Directory {
    /// Reads pages until the one that holds `position`, or the last.
    async fn load(
        &mut self,
        client: &Client,
        position: u64,
        with_attributes: bool,
    ) -> Result<(), FsError> {
        // From the start a directory is read afresh: rewinddir(3) must show what changed.
        let rewound = position == DOTS;
        let is_fit = !with_attributes || self.page.has_attributes(client.remembers_for());
        if !rewound && (self.page.ends(position) || self.page.holds(position) && is_fit) {
            return Ok(());
        }
        self.mark_in_page(position);
        let (mut start, mut after) = self.mark_before(position);
        loop {
            let asked = Some(Instant::now());
            let read = client.readdir(self.inode, after, PAGE_NAMES, with_attributes).await?;
            let next = start + read.entries.len() as u64;
            after = read.entries.last().map(|entry| entry.name.clone());
            if !read.end {
                self.marks.insert(next, after.clone());
            }
            self.page =
                Page { asked, start, entries: read.entries, end: read.end, with_attributes };
            if self.page.ends(position) || self.page.holds(position) || after.is_none() {
                return Ok(());
            }
            start = next;
        }
    }

    /// A page that is read again, for its attributes, goes on exactly where this one is left: names that are
    /// gone from it meanwhile are not counted on.
    fn mark_in_page(&mut self, position: u64) {
        let before = position.checked_sub(self.page.start + 1);
        if let Some(entry) = before.and_then(|before| self.page.entries.get(before as usize)) {
            self.marks.insert(position, Some(entry.name.clone()));
        }
    }

    fn mark_before(&self, position: u64) -> (u64, Option<Name>) {
        let mark = self.marks.range(..=position).next_back();
        mark.map_or((DOTS, None), |(start, name)| (*start, name.clone()))
    }
}

impl Page {
    fn stop(&self) -> u64 {
        self.start + self.entries.len() as u64
    }

    fn holds(&self, position: u64) -> bool {
        self.start <= position && position < self.stop()
    }

    /// Whether nothing follows `position`.
    fn ends(&self, position: u64) -> bool {
        self.end && position >= self.stop()
    }

    /// Whether the attributes that came with it are still known to be so: otherwise the kernel asks for each entry's
    /// by itself. A client that remembers nothing never has any.
    fn has_attributes(&self, remembered_for: Duration) -> bool {
        let age = self.asked.map(|asked| asked.elapsed());
        let is_known = remembered_for.is_zero() || age.is_some_and(|age| age < remembered_for);
        self.with_attributes && is_known
    }

    fn from(&self, position: u64) -> impl Iterator<Item = Item> + '_ {
        let skip = position.saturating_sub(self.start) as usize;
        self.entries.iter().skip(skip).map(|entry| Item {
            label: Label::Name(entry.name.clone()),
            inode: entry.inode.0,
            mode: entry.kind.mode_bits(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_attributes_for_as_long_as_they_are_remembered() {
        let half = Duration::from_millis(500);
        let page = |age, with_attributes| {
            let asked = Instant::now().checked_sub(Duration::from_millis(age));
            Page { asked, with_attributes, ..Page::default() }
        };
        assert!(page(100, true).has_attributes(half));
        assert!(!page(100, false).has_attributes(half));
        assert!(!page(600, true).has_attributes(half), "each would be asked for by itself");
        assert!(page(600, true).has_attributes(Duration::ZERO), "nor would others be kept");
    }
}
