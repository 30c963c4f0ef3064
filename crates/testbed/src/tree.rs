//! Trees of files: found, copied, compared.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::Outcome;

/// How much is read at once.
const CHUNK_BYTES: usize = 1 << 20;

/// A tree: every file with its SHA-256, every symlink with its target, every directory.
pub type Tree = BTreeMap<PathBuf, String>;

fn failed<'a>(what: &'a str, path: &'a Path) -> impl Fn(std::io::Error) -> String + 'a {
    move |error| format!("{what} {}: {error}", path.display())
}

/// All paths below `root`, relative, parents before what they hold.
///
/// # Errors
///
/// When a directory cannot be read.
pub fn list(root: &Path) -> Outcome<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut waiting = vec![PathBuf::new()];
    while let Some(directory) = waiting.pop() {
        let path = root.join(&directory);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(failed("list", &path))? {
            let entry = entry.map_err(failed("list", &path))?;
            names.push((directory.join(entry.file_name()), entry.file_type()));
        }
        names.sort_by(|a, b| a.0.cmp(&b.0));
        for (name, kind) in names {
            if kind.is_ok_and(|kind| kind.is_dir()) {
                waiting.push(name.clone());
            }
            found.push(name);
        }
    }
    Ok(found)
}

/// Reads a whole tree.
///
/// # Errors
///
/// When something cannot be read.
pub fn read(root: &Path) -> Outcome<Tree> {
    let describe = |name: PathBuf| {
        let path = root.join(&name);
        Ok((name, describe(&path)?))
    };
    list(root)?.into_iter().map(describe).collect()
}

fn describe(path: &Path) -> Outcome<String> {
    let metadata = std::fs::symlink_metadata(path).map_err(failed("stat", path))?;
    if metadata.is_dir() {
        return Ok("directory".to_owned());
    }
    if metadata.is_symlink() {
        let target = std::fs::read_link(path).map_err(failed("read link", path))?;
        return Ok(format!("link to {}", target.display()));
    }
    digest(path)
}

/// SHA-256 of a file, in hexadecimal.
///
/// # Errors
///
/// When it cannot be read.
pub fn digest(path: &Path) -> Outcome<String> {
    let mut file = File::open(path).map_err(failed("open", path))?;
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk).map_err(failed("read", path))? {
            0 => return Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect()),
            length => hash.update(chunk.get(..length).unwrap_or_default()),
        }
    }
}

/// Copies a tree; `progress` is told the files and bytes copied so far.
///
/// # Errors
///
/// The first failure.
pub fn copy(from: &Path, to: &Path, mut progress: impl FnMut(u64, u64)) -> Outcome<(u64, u64)> {
    std::fs::create_dir_all(to).map_err(failed("create", to))?;
    let (mut files, mut bytes) = (0, 0);
    for name in list(from)? {
        let (source, target) = (from.join(&name), to.join(&name));
        let metadata = std::fs::symlink_metadata(&source).map_err(failed("stat", &source))?;
        if metadata.is_dir() {
            std::fs::create_dir(&target).map_err(failed("create", &target))?;
        } else if metadata.is_symlink() {
            let points_to = std::fs::read_link(&source).map_err(failed("read link", &source))?;
            std::os::unix::fs::symlink(points_to, &target).map_err(failed("link", &target))?;
        } else {
            bytes += copy_file(&source, &target)?;
            files += 1;
            progress(files, bytes);
        }
    }
    Ok((files, bytes))
}

/// Copies one file by read and write, as cp does.
///
/// # Errors
///
/// When it cannot be read or written.
pub fn copy_file(source: &Path, target: &Path) -> Outcome<u64> {
    let mut input = File::open(source).map_err(failed("open", source))?;
    let mut output = File::create(target).map_err(failed("create", target))?;
    let mut chunk = vec![0; 128 * 1024];
    let mut bytes = 0;
    loop {
        let length = input.read(&mut chunk).map_err(failed("read", source))?;
        if length == 0 {
            return close(output).map(|()| bytes).map_err(failed("close", target));
        }
        let part = chunk.get(..length).unwrap_or_default();
        output.write_all(part).map_err(failed("write", target))?;
        bytes += length as u64;
    }
}

/// Closes a file and tells what close(2) said, which a drop would swallow.
///
/// # Errors
///
/// The errno of close(2).
#[allow(unsafe_code)]
pub fn close(file: File) -> std::io::Result<()> {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor was taken out of the file, so nobody else closes it.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The differences between two trees, one line each.
#[must_use]
pub fn differences(expected: &Tree, found: &Tree) -> Vec<String> {
    let mut lines = Vec::new();
    for (path, what) in expected {
        match found.get(path) {
            None => lines.push(format!("{} is missing", path.display())),
            Some(other) if other != what => {
                lines.push(format!("{}: {other}, expected {what}", path.display()));
            }
            Some(_) => {}
        }
    }
    let extra = found.keys().filter(|path| !expected.contains_key(*path));
    lines.extend(extra.map(|path| format!("{} should not be there", path.display())));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copied_tree_is_equal_and_a_changed_byte_is_seen() {
        let temp = tempfile::tempdir().unwrap();
        let (from, to) = (temp.path().join("a"), temp.path().join("b"));
        std::fs::create_dir_all(from.join("x/y")).unwrap();
        std::fs::write(from.join("x/y/file"), "content").unwrap();
        std::os::unix::fs::symlink("y", from.join("x/link")).unwrap();
        assert_eq!(copy(&from, &to, |_, _| {}).unwrap(), (1, 7));
        let expected = read(&from).unwrap();
        assert_eq!(differences(&expected, &read(&to).unwrap()), Vec::<String>::new());
        std::fs::write(to.join("x/y/file"), "cOntent").unwrap();
        std::fs::write(to.join("more"), "").unwrap();
        assert_eq!(differences(&expected, &read(&to).unwrap()).len(), 2);
    }
}
