//! Disks and their ids: what `DISK` in each one's directory says, and the node's [`Ledger`].

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use milpa_host::disk as files;
use milpa_types::DiskId;
use milpa_wire::frame::crc32c;

use crate::DiskConfig;

use super::ledger::Ledger;
use super::open::Unopened;

const LABEL_FILE: &str = "DISK";
const LABEL_FORMAT: u32 = 2;

/// Which disk of which node a directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Label {
    pub incarnation: u128,
    pub disk: DiskId,
}

/// A disk of the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Labelled {
    /// The id that it has, if that is known.
    pub id: Option<DiskId>,
    /// Or why it cannot be used.
    pub label: Result<(), String>,
}

/// Finds each disk's id: the one in its directory, or one that no disk was ever given. Written down where it is new. Of a
/// disk that has failed it is the one that was given to its directory.
///
/// # Errors
///
/// What is wrong with the settings, or the node's directory.
pub(crate) fn label_disks(
    disks: &[DiskConfig],
    incarnation: u128,
    ledger: &mut Ledger,
) -> Result<Vec<Labelled>, String> {
    let mut labels = Vec::new();
    for disk in disks {
        labels.push(refusal_or(read_label(&disk.path, incarnation))?);
    }
    let ids = ids_of(disks, &labels, ledger)?;
    let named = ids.iter().zip(disks);
    let noted: Vec<_> = named.filter_map(|(id, disk)| Some(((*id)?, &*disk.path))).collect();
    ledger.note_disks(&noted).map_err(|error| format!("cannot note its disks: {error}"))?;
    let mut labelled = Vec::new();
    for ((disk, label), id) in disks.iter().zip(labels).zip(ids) {
        let label = match (label, id) {
            (Ok(None), Some(disk_id)) => {
                refusal_or(write_label(&disk.path, Label { incarnation, disk: disk_id }))?
            }
            (label, _) => label.map(drop),
        };
        labelled.push(Labelled { id, label });
    }
    Ok(labelled)
}

/// One for each disk, if it is known.
fn ids_of(
    disks: &[DiskConfig],
    labels: &[Result<Option<Label>, String>],
    ledger: &Ledger,
) -> Result<Vec<Option<DiskId>>, String> {
    let known: BTreeSet<DiskId> = labels.iter().flatten().flatten().map(|it| it.disk).collect();
    let mut free = ledger.free_ids().filter(|id| !known.contains(id));
    let mut ids: Vec<Option<DiskId>> = Vec::new();
    for (disk, label) in disks.iter().zip(labels) {
        let id = match label {
            Ok(Some(label)) => Some(label.disk),
            Ok(None) => free.next(),
            Err(_) => ledger.disk_in(&disk.path).filter(|id| !known.contains(id)),
        };
        if id.is_some() && ids.contains(&id) {
            return Err(format!("{:?} is a copy of another of this node's disks", disk.path));
        }
        ids.push(id);
    }
    Ok(ids)
}

/// What is wrong with the settings is an error; that a disk has failed is said of that one.
fn refusal_or<T>(done: Result<T, Unopened>) -> Result<Result<T, String>, String> {
    match done {
        Ok(done) => Ok(Ok(done)),
        Err(Unopened::Failed(problem)) => Ok(Err(problem)),
        Err(Unopened::Refused(problem)) => Err(problem),
    }
}

/// Writes a label of the first format anew. Not before the disk's log has said the same: the first format has no checksum.
pub(crate) fn renew_label(directory: &Path, label: Label) -> Result<(), Unopened> {
    let is_current = files::read(&directory.join(LABEL_FILE))
        .is_ok_and(|bytes| bytes == label.to_text().into_bytes());
    if is_current { Ok(()) } else { write_label(directory, label) }
}

fn read_label(directory: &Path, incarnation: u128) -> Result<Option<Label>, Unopened> {
    files::create_directory(directory)
        .map_err(|error| Unopened::of(&error, format!("cannot make {directory:?}: {error}")))?;
    let path = directory.join(LABEL_FILE);
    let bytes = match files::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Unopened::of(&error, format!("cannot read {path:?}: {error}"))),
    };
    match Label::parse(&String::from_utf8_lossy(&bytes), incarnation) {
        Ok(label) => Ok(Some(label)),
        Err(problem @ BadLabel::Damaged) => Err(Unopened::Failed(format!("{path:?} {problem}"))),
        Err(problem) => Err(Unopened::Refused(format!("{path:?} {problem}"))),
    }
}

/// What is wrong with a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadLabel {
    #[error("is damaged")]
    Damaged,
    #[error("is of a newer format")]
    Version,
    #[error("belongs to another data node")]
    Foreign,
}

impl Label {
    /// Reads the label of a disk of the node with this incarnation, or says what is wrong. The first format had no
    /// checksum.
    pub fn parse(text: &str, incarnation: u128) -> Result<Label, BadLabel> {
        let (content, checksum) = text.rsplit_once("crc = ").unwrap_or((text, ""));
        let fields: BTreeMap<&str, &str> =
            content.lines().filter_map(|line| line.split_once(" = ")).collect();
        let field = |name: &str| fields.get(name).copied().ok_or(BadLabel::Damaged);
        let format: u32 = field("format")?.parse().map_err(|_| BadLabel::Damaged)?;
        let is_sound =
            u32::from_str_radix(checksum.trim_end(), 16) == Ok(crc32c(content.as_bytes()));
        match format {
            1 if checksum.is_empty() => {}
            _ if !is_sound => return Err(BadLabel::Damaged),
            LABEL_FORMAT => {}
            _ => return Err(BadLabel::Version),
        }
        let found = u128::from_str_radix(field("incarnation")?, 16);
        let disk = field("disk")?.parse().map_err(|_| BadLabel::Damaged)?;
        match found {
            Ok(found) if found == incarnation => Ok(Label { incarnation, disk: DiskId(disk) }),
            Ok(_) => Err(BadLabel::Foreign),
            Err(_) => Err(BadLabel::Damaged),
        }
    }

    pub fn to_text(self) -> String {
        let Label { incarnation, disk } = self;
        let content =
            format!("format = {LABEL_FORMAT}\nincarnation = {incarnation:032x}\ndisk = {disk}\n");
        let crc = crc32c(content.as_bytes());
        format!("{content}crc = {crc:08x}\n")
    }
}

fn write_label(directory: &Path, label: Label) -> Result<(), Unopened> {
    let path = directory.join(LABEL_FILE);
    files::replace(&path, label.to_text().as_bytes())
        .map_err(|error| Unopened::of(&error, format!("cannot write {path:?}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(labelled: Result<Vec<Labelled>, String>) -> Vec<Option<u32>> {
        labelled.unwrap().into_iter().map(|disk| disk.id.map(|id| id.0)).collect()
    }

    #[test]
    fn disks_keep_their_ids_in_whatever_order_they_are_named() {
        let base = tempfile::tempdir().unwrap();
        let disk = |name: &str| DiskConfig::new(base.path().join(name));
        let (a, b, c) = (disk("a"), disk("b"), disk("c"));
        let mut ledger = Ledger::open(base.path()).unwrap();
        assert_eq!(ids(label_disks(&[a.clone(), b.clone()], 7, &mut ledger)), [Some(1), Some(2)]);
        let later = label_disks(&[c, b.clone(), a.clone()], 7, &mut ledger);
        assert_eq!(ids(later), [Some(3), Some(2), Some(1)]);
        let foreign = label_disks(std::slice::from_ref(&a), 8, &mut ledger).unwrap_err();
        assert!(foreign.contains("another data node"), "{foreign}");
        std::fs::copy(a.path.join(LABEL_FILE), b.path.join(LABEL_FILE)).unwrap();
        let copied = label_disks(&[a, b], 7, &mut ledger).unwrap_err();
        assert!(copied.contains("copy"), "{copied}");
    }

    /// Found by a reader: one rotten byte in one disk's label, and no disk of the node was served any more. And a blank
    /// disk was given the id of one whose label could not be read: when it could, none was served.
    #[test]
    fn a_damaged_label_costs_no_other_disk_and_its_id_is_not_given_again() {
        let base = tempfile::tempdir().unwrap();
        let disks = ["a", "b", "c"].map(|name| DiskConfig::new(base.path().join(name)));
        let mut ledger = Ledger::open(base.path()).unwrap();
        label_disks(&disks[..2], 7, &mut ledger).unwrap();
        let path = disks[0].path.join(LABEL_FILE);
        let whole = std::fs::read(&path).unwrap();
        for (at, bit) in (0..whole.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut rotten = whole.clone();
            rotten[at] ^= 1 << bit;
            std::fs::write(&path, rotten).unwrap();
            let labelled = label_disks(&disks[..2], 7, &mut ledger);
            assert_eq!(ids(labelled.clone()), [Some(1), Some(2)], "{at} {bit}");
            assert_eq!(labelled.unwrap()[1].label, Ok(()));
        }
        std::fs::write(&path, "").unwrap();
        let mut ledger = Ledger::open(base.path()).unwrap();
        let labelled = label_disks(&disks, 7, &mut ledger).unwrap();
        assert_eq!(
            labelled.iter().map(|disk| disk.label.is_ok()).collect::<Vec<_>>(),
            [false, true, true]
        );
        assert_eq!(ids(Ok(labelled)), [Some(1), Some(2), Some(3)]);
        std::fs::write(&path, whole).unwrap();
        let labelled = label_disks(&disks, 7, &mut ledger).unwrap();
        assert!(labelled.iter().all(|disk| disk.label.is_ok()), "{labelled:?}");
        // Another disk in the same place is another one.
        std::fs::remove_file(&path).unwrap();
        assert_eq!(ids(label_disks(&disks, 7, &mut ledger)), [Some(4), Some(2), Some(3)]);
    }

    #[test]
    fn a_label_without_a_checksum_is_of_the_first_format_and_is_written_anew() {
        let first = "format = 1\nincarnation = 7\ndisk = 3\n";
        let label = Label { incarnation: 7, disk: DiskId(3) };
        assert_eq!(Label::parse(first, 7), Ok(label));
        assert_eq!(Label::parse(first, 8), Err(BadLabel::Foreign));
        let second = first.replace("format = 1", "format = 2");
        assert_eq!(Label::parse(&second, 7), Err(BadLabel::Damaged));
        let base = tempfile::tempdir().unwrap();
        std::fs::write(base.path().join(LABEL_FILE), first).unwrap();
        renew_label(base.path(), label).unwrap();
        let written = std::fs::read_to_string(base.path().join(LABEL_FILE)).unwrap();
        assert_eq!(written, label.to_text());
    }
}
