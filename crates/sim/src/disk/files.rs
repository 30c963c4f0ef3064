//! How a node reaches its disk: the ports of `milpa-host`, bound to one life of the node.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use milpa_host::disk::{Disk, Held, Open, SimulatedFile, Space, Status};

use super::names::{Entry, NameChange};
use super::platter::Platter;

/// The disk as one life of a node sees it.
#[derive(Clone, Debug)]
pub struct Mount {
    platter: Arc<Mutex<Platter>>,
    life: u64,
    device: u64,
}

fn lock(platter: &Mutex<Platter>) -> MutexGuard<'_, Platter> {
    platter.lock().unwrap_or_else(PoisonError::into_inner)
}

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

impl Mount {
    /// For the life that begins now. `device` tells disks apart.
    pub fn new(platter: Arc<Mutex<Platter>>, device: u64) -> Mount {
        let life = lock(&platter).life;
        Mount { platter, life, device }
    }

    /// The disk, if this life may still use it.
    fn alive(&self) -> io::Result<MutexGuard<'_, Platter>> {
        let platter = lock(&self.platter);
        platter.check(self.life)?;
        Ok(platter)
    }

    /// The disk, for a change.
    fn changing(&self) -> io::Result<MutexGuard<'_, Platter>> {
        let mut platter = lock(&self.platter);
        platter.effect(self.life)?;
        Ok(platter)
    }

    fn handle(&self, number: u64) -> Arc<dyn SimulatedFile> {
        Arc::new(Handle { mount: self.clone(), number })
    }
}

impl Mount {
    /// Whether the path names a directory.
    ///
    /// # Errors
    ///
    /// `NotFound`; EIO once this life is over.
    pub fn is_directory(&self, path: &Path) -> io::Result<bool> {
        match self.alive()?.names.get(path) {
            Some(entry) => Ok(*entry == Entry::Directory),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl Disk for Mount {
    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn SimulatedFile>> {
        let found = self.alive()?.names.get(path).copied();
        let number = match (found, how) {
            (Some(Entry::Directory), _) => return Err(errno(libc::EISDIR)),
            (Some(Entry::File(_)), Open::New | Open::Private) => {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            (Some(Entry::File(number)), Open::Existing | Open::Read) => number,
            (Some(Entry::File(number)), Open::Empty) => {
                self.changing()?.truncate(number, 0)?;
                number
            }
            (None, Open::Existing | Open::Read) => return Err(io::ErrorKind::NotFound.into()),
            (None, _) => self.changing()?.create(path)?,
        };
        Ok(self.handle(number))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut platter = self.changing()?;
        match platter.names.get(path) {
            Some(Entry::File(_)) => platter.change_names(NameChange::Removed(path.to_owned())),
            Some(Entry::Directory) => Err(errno(libc::EISDIR)),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        let below: Vec<PathBuf> =
            self.alive()?.names.keys().filter(|name| name.starts_with(path)).cloned().collect();
        if below.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        // Deepest first, each by itself: a crash leaves a part.
        for path in below.into_iter().rev() {
            self.changing()?.change_names(NameChange::Removed(path))?;
        }
        Ok(())
    }

    fn rename(&self, source: &Path, target: &Path) -> io::Result<()> {
        let mut platter = self.changing()?;
        if !platter.names.contains_key(source) {
            return Err(io::ErrorKind::NotFound.into());
        }
        platter.require_parent(target)?;
        platter.change_names(NameChange::Renamed(source.to_owned(), target.to_owned()))
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        let missing: Vec<PathBuf> = {
            let platter = self.alive()?;
            let known = |path: &&Path| platter.names.contains_key(*path);
            path.ancestors().take_while(|path| !known(path)).map(Path::to_owned).collect()
        };
        for path in missing.into_iter().rev() {
            self.changing()?.add_name(&path, Entry::Directory)?;
        }
        match self.alive()?.names.get(path) {
            Some(Entry::Directory) => Ok(()),
            _ => Err(io::ErrorKind::AlreadyExists.into()),
        }
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        let platter = self.alive()?;
        match platter.names.get(directory) {
            Some(Entry::Directory) => {}
            Some(Entry::File(_)) => return Err(errno(libc::ENOTDIR)),
            None => return Err(io::ErrorKind::NotFound.into()),
        }
        let inside = platter.names.keys().filter(|path| path.parent() == Some(directory));
        Ok(inside.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect())
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        let mut platter = self.changing()?;
        match platter.names.get(directory) {
            Some(Entry::Directory) => platter.sync_names(directory),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn status(&self, path: &Path) -> io::Result<Status> {
        let mut platter = self.alive()?;
        match platter.names.get(path).copied() {
            Some(Entry::File(number)) => {
                let content = &platter.file(number)?.current;
                let (length, allocated) = (content.length, content.allocated());
                Ok(Status { length, allocated, device: self.device })
            }
            Some(Entry::Directory) => Ok(Status { length: 0, allocated: 0, device: self.device }),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn space(&self, _path: &Path) -> io::Result<Space> {
        let platter = self.alive()?;
        let (total, used) = (platter.options.capacity_bytes, platter.allocated());
        Ok(Space { total, free: total.saturating_sub(used), used })
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn Held>> {
        if !self.alive()?.names.contains_key(path) {
            self.changing()?.create(path)?;
        }
        if !self.alive()?.locks.insert(path.to_owned()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(Lock { mount: self.clone(), path: path.to_owned() }))
    }
}

/// A lock file that is held.
#[derive(Debug)]
struct Lock {
    mount: Mount,
    path: PathBuf,
}

impl Held for Lock {}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Ok(mut platter) = self.mount.alive() {
            platter.locks.remove(&self.path);
        }
    }
}

/// An open file.
#[derive(Debug)]
struct Handle {
    mount: Mount,
    number: u64,
}

impl SimulatedFile for Handle {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.mount.alive()?.read(self.number, buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.mount.changing()?.write(self.number, bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.mount.changing()?.sync(self.number)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        self.mount.changing()?.punch(self.number, offset, length)
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        self.mount.changing()?.truncate(self.number, length)
    }

    fn release(&self) {
        if let Ok(mut platter) = self.mount.alive() {
            platter.release(self.number);
        }
    }

    fn status(&self) -> io::Result<Status> {
        let mut platter = self.mount.alive()?;
        let content = &platter.file(self.number)?.current;
        let (length, allocated) = (content.length, content.allocated());
        Ok(Status { length, allocated, device: self.mount.device })
    }
}
