//! The state on disk, as of some log index. The Raft log is the truth; losing a checkpoint that
//! was never confirmed costs a longer replay and nothing else.
//!
//! One redb file with one table: `state` holds [`State::encode`], `descriptor-2` the Raft position and configuration
//! there (CRC32C, little-endian, and postcard of [`SnapshotDescriptor`]; before, `descriptor` without the checksum).
//! Both change in one transaction.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use milpa_host::disk::{self, File, Open};
use milpa_host::telemetry::with_sources;
use milpa_raft::SnapshotDescriptor;
use milpa_wire::frame::crc32c;
use redb::{Database, ReadableDatabase, StorageBackend, TableDefinition};

use crate::core::{SnapshotError, State};

const TABLE: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("manager");
pub(super) const FILE: &str = "state.redb";
/// The file until it is whole.
const NEW_FILE: &str = "state.redb.new";
const STATE_KEY: &str = "state";
const DESCRIPTOR_KEY: &str = "descriptor-2";
/// Where it stood, without a checksum.
const BARE_DESCRIPTOR_KEY: &str = "descriptor";
/// Bytes that the file grows by in one write.
const GROW_BYTES: usize = 256 << 10;

/// State and descriptor, as far as they are there and are what was written.
type Values = (Option<Vec<u8>>, Option<SnapshotDescriptor>);

/// Why the checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file or its structure.
    #[error("checkpoint file {}", path.display())]
    Database {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<redb::Error>,
    },
    /// The state in it.
    #[error("checkpoint file {}", path.display())]
    State {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: SnapshotError,
    },
    /// Whoever wrote it panicked.
    #[error("checkpoint file {}: writing it ended early", path.display())]
    Ended {
        /// Which.
        path: PathBuf,
    },
    /// The state is there and its position is not, or is damaged, or the reverse.
    #[error("checkpoint file {} holds half a checkpoint", path.display())]
    Incomplete {
        /// Which.
        path: PathBuf,
    },
}

impl CheckpointError {
    /// Whether all that is missing is room on the disk.
    #[must_use]
    pub fn is_for_lack_of_space(&self) -> bool {
        let CheckpointError::Database { source, .. } = self else { return false };
        matches!(&**source, redb::Error::Io(error) if error.kind() == io::ErrorKind::StorageFull)
    }

    /// Whether the file is not as it was written. redb calls one without its magic number invalid data.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            CheckpointError::Database { source, .. } => match &**source {
                redb::Error::Io(error) => {
                    matches!(
                        error.kind(),
                        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
                    )
                }
                redb::Error::Corrupted(_)
                | redb::Error::TableTypeMismatch { .. }
                | redb::Error::TypeDefinitionChanged { .. }
                | redb::Error::TableIsMultimap(_)
                // There never was another format.
                | redb::Error::UpgradeRequired(_) => true,
                _ => false,
            },
            CheckpointError::State { source, .. } => {
                matches!(source, SnapshotError::Malformed { .. } | SnapshotError::Damaged)
            }
            CheckpointError::Incomplete { .. } => true,
            CheckpointError::Ended { .. } => false,
        }
    }
}

/// The file under redb. The lock of the manager's directory keeps other processes away.
#[derive(Debug)]
struct Backend(File);

impl Backend {
    fn fill_up_to(&self, mut end: u64, len: u64) -> io::Result<()> {
        let zeros = vec![0; GROW_BYTES];
        while end < len {
            let step = usize::try_from(len - end).unwrap_or(GROW_BYTES).min(GROW_BYTES);
            self.0.write_at(zeros.get(..step).unwrap_or_default(), end)?;
            end += step as u64;
        }
        Ok(())
    }
}

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        self.0.length()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        match self.0.read_at(out, offset)? {
            count if count == out.len() => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// What is added is written, not left a hole: so a full disk is noticed here, where redb can go
    /// back, and never when a transaction or a start writes into what the file has already.
    fn set_len(&self, len: u64) -> io::Result<()> {
        let before = self.0.length()?;
        self.fill_up_to(before, len).inspect_err(|_| drop(self.0.truncate(before)))?;
        self.0.truncate(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(data, offset)
    }
}

/// Where the open file is, or was.
#[derive(Debug, Default)]
struct Place(Option<Database>);

impl Place {
    /// What was saved is durable before: closing a damaged file has nothing to add, and may panic.
    fn close(&mut self) {
        let _ = guarded(|| {
            drop(self.0.take());
            Ok(())
        });
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.close();
    }
}

/// The file. Cheap to clone; reads and writes come one after the other.
#[derive(Clone, Debug)]
pub struct CheckpointStore {
    /// `None` after a failure: redb refuses a file that failed once until it is opened again.
    database: Arc<Mutex<Place>>,
    path: Arc<Path>,
}

impl CheckpointStore {
    /// Opens or makes the file in a manager's directory.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Database`].
    pub fn open(directory: &Path) -> Result<CheckpointStore, CheckpointError> {
        let path: Arc<Path> = directory.join(FILE).into();
        let store = CheckpointStore { database: Arc::default(), path };
        store.with(|_| Ok(()))?;
        Ok(store)
    }

    /// Removes the file from a manager's directory, if there is one.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Database`].
    pub fn discard(directory: &Path) -> Result<(), CheckpointError> {
        let path = directory.join(FILE);
        match disk::remove(&path).and_then(|()| disk::sync_directory(directory)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(CheckpointError::Database { path, source: Box::new(redb::Error::Io(error)) })
            }
            _ => Ok(()),
        }
    }

    fn with<T>(
        &self,
        operation: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, CheckpointError> {
        let mut place = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        let done = guarded(|| open_database(&mut place.0, &self.path).and_then(operation));
        if done.is_err() {
            place.close();
        }
        done.map_err(|source| CheckpointError::Database {
            path: self.path.to_path_buf(),
            source: Box::new(source),
        })
    }

    /// The last checkpoint, if there is one.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] when there is one and it cannot be read.
    pub fn load(&self) -> Result<Option<(State, SnapshotDescriptor)>, CheckpointError> {
        let values = self.with(read)?;
        decode(values, &self.path)
    }

    /// What became of a write that never said so.
    #[must_use]
    pub fn ended(&self) -> CheckpointError {
        CheckpointError::Ended { path: self.path.to_path_buf() }
    }

    /// Replaces the checkpoint, unless the one there is newer: the log may have been cut where that
    /// one stands. Durable when it returns. Blocks on the disk: call it on a thread that may.
    ///
    /// A file that has rotted is replaced by a new one: what it had is in the state.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Database`]; the checkpoint before is still there.
    pub fn save(
        &self,
        state: &[u8],
        descriptor: &SnapshotDescriptor,
    ) -> Result<(), CheckpointError> {
        let saved = self.with(|database| match saved_index(database)? {
            Some(index) if index > descriptor.position.index => Ok(()),
            _ => write(database, state, descriptor),
        });
        match saved {
            Err(error) if error.is_damage() => {
                let error = with_sources(&error);
                tracing::warn!(error, "the state's file is damaged: it is written anew");
                self.with_new(|database| write(database, state, descriptor))
            }
            saved => saved,
        }
    }

    /// As [`Self::with`], of a new file that takes the old one's place with what `operation` has put in it.
    fn with_new(
        &self,
        operation: impl FnOnce(&Database) -> Result<(), redb::Error>,
    ) -> Result<(), CheckpointError> {
        let mut place = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        place.close();
        let made = guarded(|| make(&self.path, operation));
        made.map(drop).map_err(|source| CheckpointError::Database {
            path: self.path.to_path_buf(),
            source: Box::new(source),
        })
    }
}

/// redb checks its pages when it repairs, not when it opens, and panics on some that rotted (found by
/// `milpa-fuzz`): that is a damaged checkpoint like any other.
fn guarded<T>(call: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, redb::Error> {
    let damaged = |_| redb::Error::Corrupted("redb panicked while it read the file".to_owned());
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(damaged(panic)))
}

fn open_database<'a>(
    place: &'a mut Option<Database>,
    path: &Path,
) -> Result<&'a Database, redb::Error> {
    let database = match place.take() {
        Some(database) => database,
        None => open_or_make(path)?,
    };
    Ok(place.insert(database))
}

fn open_or_make(path: &Path) -> Result<Database, redb::Error> {
    // An earlier life, or an earlier try of this one, may have failed to flush what the page cache has.
    let file = match File::open_from_medium(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => make(path, |_| Ok(()))?,
        opened => opened?,
    };
    Ok(Database::builder().create_with_backend(Backend(file))?)
}

/// Makes the file under another name first: redb refuses one whose making was cut short.
fn make(
    path: &Path,
    fill: impl FnOnce(&Database) -> Result<(), redb::Error>,
) -> Result<File, redb::Error> {
    let fresh = path.with_file_name(NEW_FILE);
    let file = File::open(&fresh, Open::Empty)?;
    fill(&Database::builder().create_with_backend(Backend(file))?)?;
    disk::rename(&fresh, path)?;
    disk::sync_directory(path.parent().unwrap_or(path))?;
    Ok(File::open(path, Open::Existing)?)
}

fn write(
    database: &Database,
    state: &[u8],
    descriptor: &SnapshotDescriptor,
) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    {
        let mut table = transaction.open_table(TABLE)?;
        table.insert(STATE_KEY, state)?;
        let descriptor = milpa_wire::encode(descriptor);
        let checksum = crc32c(&descriptor).to_le_bytes();
        table.insert(DESCRIPTOR_KEY, [&checksum[..], &descriptor].concat().as_slice())?;
        table.remove(BARE_DESCRIPTOR_KEY)?;
    }
    transaction.commit()?;
    Ok(())
}

/// Where the checkpoint stands; `None` if there is none, or it says nothing that can be read.
fn saved_index(database: &Database) -> Result<Option<u64>, redb::Error> {
    Ok(descriptor(database)?.map(|descriptor| descriptor.position.index))
}

/// `None` as well for one that is damaged.
fn descriptor(database: &Database) -> Result<Option<SnapshotDescriptor>, redb::Error> {
    let bare = |value: Vec<u8>| {
        let (checksum, bare) = value.split_first_chunk()?;
        (u32::from_le_bytes(*checksum) == crc32c(bare)).then(|| bare.to_vec())
    };
    let bytes = match value(database, DESCRIPTOR_KEY)? {
        Some(value) => bare(value),
        None => value(database, BARE_DESCRIPTOR_KEY)?,
    };
    Ok(bytes.and_then(|bytes| milpa_wire::decode(&bytes).ok()))
}

/// What a checkpoint holds, if all of it is there.
fn decode(
    values: Values,
    path: &Path,
) -> Result<Option<(State, SnapshotDescriptor)>, CheckpointError> {
    let path = || path.to_path_buf();
    let incomplete = || CheckpointError::Incomplete { path: path() };
    let (state, descriptor) = match values {
        (None, None) => return Ok(None),
        (Some(state), Some(descriptor)) => (state, descriptor),
        _ => return Err(incomplete()),
    };
    let state =
        State::decode(&state).map_err(|source| CheckpointError::State { path: path(), source })?;
    Ok(Some((state, descriptor)))
}

fn read(database: &Database) -> Result<Values, redb::Error> {
    Ok((value(database, STATE_KEY)?, descriptor(database)?))
}

/// What is saved under a key. Nobody writes meanwhile: the store's users take turns.
fn value(database: &Database, key: &str) -> Result<Option<Vec<u8>>, redb::Error> {
    let transaction = database.begin_read()?;
    let table = match transaction.open_table(TABLE) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok(table.get(key)?.map(|value| value.value().to_vec()))
}

/// A whole file in memory, for fuzzing: what a manager makes of it at its start.
#[cfg(any(test, feature = "decoders"))]
pub(crate) mod decoding {
    use redb::backends::InMemoryBackend;

    use super::*;

    pub(crate) fn sample(state: &[u8], descriptor: &SnapshotDescriptor) -> Option<Vec<u8>> {
        let backend = Arc::new(InMemoryBackend::new());
        let database =
            Database::builder().create_with_backend(Shared(Arc::clone(&backend))).ok()?;
        write(&database, state, descriptor).ok()?;
        drop(database);
        let mut bytes = vec![0; usize::try_from(backend.len().ok()?).ok()?];
        backend.read(0, &mut bytes).ok()?;
        Some(bytes)
    }

    pub(crate) fn load(bytes: &[u8]) -> Option<(State, SnapshotDescriptor)> {
        let backend = InMemoryBackend::new();
        backend.set_len(bytes.len() as u64).ok()?;
        backend.write(0, bytes).ok()?;
        let mut place = Place::default();
        let values =
            guarded(|| read(place.0.insert(Database::builder().create_with_backend(backend)?)));
        decode(values.ok()?, Path::new("")).ok()?
    }

    #[derive(Debug)]
    struct Shared(Arc<InMemoryBackend>);

    impl StorageBackend for Shared {
        fn len(&self) -> io::Result<u64> {
            self.0.len()
        }
        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.0.read(offset, out)
        }
        fn set_len(&self, length: u64) -> io::Result<()> {
            self.0.set_len(length)
        }
        fn sync_data(&self) -> io::Result<()> {
            self.0.sync_data()
        }
        fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            self.0.write(offset, bytes)
        }
    }
}

/// What a file holds as text, a line for each row of each table: table, key, and the value in hexadecimal. For the
/// golden file: the pages of a file are redb's own, and not the same from one release of it to the next.
#[cfg(test)]
pub(crate) mod rows {
    use milpa_wire::decoder::{from_hex, hex};
    use redb::backends::InMemoryBackend;
    use redb::{ReadableTable, TableHandle};

    use super::*;

    fn definition(table: &str) -> TableDefinition<'_, &'static str, &'static [u8]> {
        TableDefinition::new(table)
    }

    pub(crate) fn of(state: &State, descriptor: &SnapshotDescriptor) -> String {
        let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
        write(&database, &state.encode(), descriptor).unwrap();
        let transaction = database.begin_read().unwrap();
        let mut text = String::new();
        for table in transaction.list_tables().unwrap() {
            let name = table.name();
            for row in transaction.open_table(definition(name)).unwrap().iter().unwrap() {
                let (key, value) = row.unwrap();
                text += &format!("{name} {} {}\n", key.value(), hex(value.value()));
            }
        }
        text
    }

    /// What a manager makes of a file with these rows.
    pub(crate) fn load(text: &str) -> Option<(State, SnapshotDescriptor)> {
        let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
        let transaction = database.begin_write().unwrap();
        for row in text.lines() {
            let [table, key, value] = row.split(' ').collect::<Vec<_>>().try_into().ok()?;
            let mut table = transaction.open_table(definition(table)).unwrap();
            table.insert(key, from_hex(value)?.as_slice()).unwrap();
        }
        transaction.commit().unwrap();
        decode(read(&database).unwrap(), Path::new("")).ok()?
    }
}

#[cfg(test)]
mod tests {
    use milpa_raft::{LogPosition, Members};
    use milpa_types::{ClusterId, NodeId};

    use super::*;

    #[test]
    fn the_last_checkpoint_comes_back_and_a_damaged_one_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let store = CheckpointStore::open(temp.path()).unwrap();
        assert!(store.load().unwrap().is_none());
        let mut state = State::new(ClusterId(7));
        for index in [3, 5] {
            state.skip(index);
            let position = LogPosition { term: 2, index };
            let members = Members::new(&[NodeId(1)], &[]);
            store.save(&state.encode(), &SnapshotDescriptor { position, members }).unwrap();
        }
        drop(store);
        let store = CheckpointStore::open(temp.path()).unwrap();
        let (loaded, descriptor) = store.load().unwrap().unwrap();
        assert_eq!((loaded, descriptor.position.index), (state.clone(), 5));

        let mut bytes = state.encode();
        bytes[20] ^= 1;
        store.save(&bytes, &descriptor).unwrap();
        assert!(matches!(store.load(), Err(CheckpointError::State { .. })));
    }

    /// What has rotted where a start reads nothing was found by the next save, and ended the manager, again and again.
    #[test]
    fn a_checkpoint_that_turns_out_to_be_damaged_by_the_next_is_written_anew() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join(FILE);
        let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&path).unwrap());
        let save = |store: &CheckpointStore, index| {
            let mut state = State::new(ClusterId(7));
            state.skip(index);
            let position = LogPosition { term: 2, index };
            let members = Members::new(&[NodeId(1)], &[]);
            store.save(&state.encode(), &SnapshotDescriptor { position, members }).unwrap();
        };
        let mut anew = 0;
        // What says which pages are in use is read by who writes.
        for at in 4_096..4_160 {
            let store = CheckpointStore::open(temp.path()).unwrap();
            (1..20).for_each(|index| save(&store, index));
            drop(store);
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[at] ^= 0x10;
            std::fs::write(&path, &bytes).unwrap();
            let before = inode();
            let opened = CheckpointStore::open(temp.path());
            if let Ok(store) = opened.and_then(|store| store.load().map(|_| store)) {
                save(&store, 20);
                save(&store, 21);
                assert_eq!(store.load().unwrap().unwrap().0.applied(), 21);
            }
            anew += u64::from(inode() != before);
            std::fs::remove_file(&path).unwrap();
        }
        assert!(anew > 0);
    }

    /// The log is cut where the newer one stands: with the older one the manager would not start.
    #[test]
    fn an_older_checkpoint_does_not_take_the_place_of_a_newer_one() {
        let temp = tempfile::tempdir().unwrap();
        let store = CheckpointStore::open(temp.path()).unwrap();
        for index in [5, 4] {
            let mut state = State::new(ClusterId(7));
            state.skip(index);
            let position = LogPosition { term: 2, index };
            let members = Members::new(&[NodeId(1)], &[]);
            store.save(&state.encode(), &SnapshotDescriptor { position, members }).unwrap();
        }
        let (state, descriptor) = store.load().unwrap().unwrap();
        assert_eq!((state.applied(), descriptor.position.index), (5, 5));
    }

    #[test]
    fn a_descriptor_from_before_it_had_a_checksum_is_read() {
        let temp = tempfile::tempdir().unwrap();
        let store = CheckpointStore::open(temp.path()).unwrap();
        let mut state = State::new(ClusterId(7));
        state.skip(5);
        let position = LogPosition { term: 2, index: 5 };
        let descriptor = SnapshotDescriptor { position, members: Members::new(&[NodeId(1)], &[]) };
        let before = |database: &Database| {
            let transaction = database.begin_write()?;
            {
                let mut table = transaction.open_table(TABLE)?;
                table.insert(STATE_KEY, state.encode().as_slice())?;
                table.insert(BARE_DESCRIPTOR_KEY, milpa_wire::encode(&descriptor).as_slice())?;
            }
            Ok(transaction.commit()?)
        };
        store.with(before).unwrap();
        assert_eq!(store.load().unwrap(), Some((state.clone(), descriptor.clone())));
        store.save(&state.encode(), &descriptor).unwrap();
        assert_eq!(store.load().unwrap(), Some((state, descriptor)));
    }

    /// Found by the simulation: a manager that was killed while it made the file never started again.
    #[test]
    fn a_file_whose_making_was_cut_short_is_made_anew() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join(NEW_FILE), vec![0; 4096]).unwrap();
        drop(CheckpointStore::open(temp.path()).unwrap());
        assert!(!temp.path().join(NEW_FILE).exists());
        let store = CheckpointStore::open(temp.path()).unwrap();
        assert!(store.load().unwrap().is_none());
    }

    /// redb panics on some pages that rotted: found by `milpa-fuzz`.
    #[test]
    fn a_file_that_rotted_is_refused_or_read() {
        let position = LogPosition { term: 2, index: 3 };
        let descriptor = SnapshotDescriptor { position, members: Members::new(&[NodeId(1)], &[]) };
        let whole = decoding::sample(&State::new(ClusterId(7)).encode(), &descriptor).unwrap();
        let loaded = decoding::load(&whole);
        assert!(loaded.is_some());
        let mut refused = 0;
        for at in (0..whole.len()).filter(|at| whole[*at] != 0).step_by(3) {
            let mut rotten = whole.clone();
            rotten[at] ^= 0xff;
            match decoding::load(&rotten) {
                None => refused += 1,
                rotten => assert_eq!(rotten, loaded, "byte {at}"),
            }
        }
        assert!(refused > 0);
        let written = milpa_wire::encode(&descriptor);
        let place = whole.windows(written.len()).position(|window| window == written).unwrap();
        for at in place..place + written.len() {
            let mut rotten = whole.clone();
            rotten[at] ^= 1;
            assert_eq!(decoding::load(&rotten), None, "byte {at} of the descriptor");
        }
    }
}
