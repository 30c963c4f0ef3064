//! Old copies of disks (F7): made now and then, put back under a server, and what must come of it.
//!
//! A copy can be told from the disk only by who has heard of something that it lacks. So one is put back only
//! when the managers have committed a life of the node that it knows nothing of (docs/decisions/0011): then it
//! must be refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::disk::Image;
use crate::machine::Machine;
use crate::trace;

/// Between two copies of all disks.
const COPIED_EVERY_MS: u64 = 10_000;

/// Copies by the places of their servers.
#[derive(Debug, Default)]
pub(crate) struct OldDisks {
    copies: BTreeMap<usize, Image>,
    /// Servers that have an old disk now.
    put_back: BTreeSet<usize>,
    next_copies_ms: u64,
    /// How often one was put back.
    pub count: u64,
}

impl OldDisks {
    /// Whether it is time for other copies.
    pub fn are_due(&mut self, now_ms: u64) -> bool {
        let are_due = now_ms >= self.next_copies_ms;
        if are_due {
            self.next_copies_ms = now_ms + COPIED_EVERY_MS;
        }
        are_due
    }

    /// Copies what is durable on a server's disk, unless that is an old one.
    pub fn copy(&mut self, place: usize, machine: &Machine) {
        if !self.put_back.contains(&place) {
            self.copies.insert(place, machine.disk().image());
        }
    }

    /// Puts the copy under a server that is switched off, if it must be told from the disk.
    pub fn put_back(&mut self, place: usize, machine: &Machine) {
        let Some(copy) = self.copies.get(&place) else { return };
        let known = Lives::on(copy, machine);
        let begun = Lives::on(&machine.disk().image(), machine).map(|lives| lives.last);
        let (Some(known), Some(begun)) = (known, begun) else { return };
        if begun != known.last && begun != known.next {
            trace::note("its disk is an old one");
            machine.disk().exchange(Some(copy.clone()));
            self.put_back.insert(place);
            self.count += 1;
        }
    }

    /// Whether a server has an old disk.
    pub fn has(&self, place: usize) -> bool {
        self.put_back.contains(&place)
    }

    /// A server that is switched off gets an empty disk. Says whether it had an old one, and the managers had
    /// taken that for the newest.
    pub fn take_away(&mut self, place: usize, machine: &Machine) -> bool {
        let disk = machine.disk().image();
        machine.disk().exchange(None);
        if !self.put_back.remove(&place) {
            return false;
        }
        let last = |image: &Image| Lives::on(image, machine).map(|lives| lives.last);
        let was = self.copies.get(&place).and_then(last);
        was != last(&disk)
    }
}

/// What a disk says of its node's lives: the last one that the managers have heard of, and the next.
struct Lives {
    last: String,
    next: String,
}

impl Lives {
    fn on(image: &Image, machine: &Machine) -> Option<Lives> {
        let text = image.text(&Path::new("/").join(machine.name).join("LIFE"))?;
        let mut words = text.split(' ').map(str::to_owned);
        let (_format, last, next) = (words.next()?, words.next()?, words.next()?);
        Some(Lives { last, next })
    }
}
