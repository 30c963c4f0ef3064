//! The bytes of one file.
//!
//! Each write fills its range with a pattern of its own, so bytes that are read tell which write
//! they come from. The model keeps the writes and says which of them a reader may see:
//!
//! * A client sees its own writes at once; those of others when it opens the file after they were
//!   published (close-to-open). Until then it may see them or not.
//! * Of two writes to one place the later one counts, where one was published before the other
//!   began; where they overlapped in time either may.
//! * A write that fsync confirmed is never lost. One that was only published may be lost in a power
//!   cut of more than one server, and then what was there before shows again.
//!
//! A cut (truncation) is a write of "zeros or nothing" from its length on.

use crate::Moment;

/// Bytes of one write: which byte it has at this place of the file.
#[must_use]
pub fn pattern(write: u64, offset: u64) -> u8 {
    let word = (write << 32 ^ (offset / 8)).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ (word >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    // Never zero: a hole is not mistaken for data.
    ((word >> (8 + offset % 8 * 7)) as u8) | 1
}

/// The pattern of a write over a range.
#[must_use]
pub fn fill(write: u64, offset: u64, length: u64) -> Vec<u8> {
    (offset..offset + length).map(|at| pattern(write, at)).collect()
}

/// A client in one of its lives.
pub type Client = u32;

/// One write or cut.
#[derive(Clone, Debug)]
struct Write {
    /// Names its pattern; `None` for a cut.
    pattern: Option<u64>,
    client: Client,
    offset: u64,
    /// One past its last byte.
    end: u64,
    begin: Moment,
    /// When the call returned.
    acknowledged: Option<Moment>,
    /// When a flush or fsync that began later returned.
    published: Option<Moment>,
    /// An fsync that began later has returned.
    is_synced: bool,
    /// Servers whose power was cut since it began, one bit each: with more than one of them it may
    /// be lost, unless it is synced.
    cut_at: u64,
    /// Its client was told that it failed, or died: nobody knows what became of it.
    is_failed: bool,
}

/// A file's history.
#[derive(Clone, Debug, Default)]
pub struct Content {
    writes: Vec<Write>,
}

/// Names a write in its file's history.
pub type WriteIndex = usize;

/// A reader: who, since when it has the file open, and when this read began.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    /// Which client.
    pub client: Client,
    /// When the open began through which it reads.
    pub opened: Moment,
    /// When the read began.
    pub began: Moment,
}

/// A read that cannot be explained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Where in the file.
    pub offset: u64,
    /// What was there: a byte, or the end of the file.
    pub found: Option<u8>,
    /// Which writes the reader might have seen, and which one's bytes these are.
    pub explanation: String,
}

impl Content {
    /// A write begins. Its bytes are those of `pattern`, or zeros to the end for a cut.
    pub fn write(
        &mut self,
        client: Client,
        pattern: Option<u64>,
        offset: u64,
        end: u64,
        begin: Moment,
    ) -> WriteIndex {
        self.writes.push(Write {
            pattern,
            client,
            offset,
            end,
            begin,
            acknowledged: None,
            published: None,
            is_synced: false,
            cut_at: 0,
            is_failed: false,
        });
        self.writes.len() - 1
    }

    /// A write has returned well. A cut is in the servers' logs by then.
    pub fn acknowledged(&mut self, index: WriteIndex, now: Moment) {
        if let Some(write) = self.writes.get_mut(index) {
            write.acknowledged = Some(now);
            if write.pattern.is_none() {
                (write.published, write.is_synced) = (Some(now), true);
            }
        }
    }

    /// A write through a descriptor with O_SYNC has returned well.
    pub fn synced(&mut self, index: WriteIndex, now: Moment) {
        self.acknowledged(index, now);
        if let Some(write) = self.writes.get_mut(index) {
            (write.published, write.is_synced) = (Some(now), true);
        }
    }

    /// A flush (or, with `is_sync`, an fsync) by this client that began at `began` has returned
    /// well. Gives how many writes it confirmed.
    pub fn published(
        &mut self,
        client: Client,
        began: Moment,
        now: Moment,
        is_sync: bool,
    ) -> usize {
        let mut confirmed = 0;
        let own = |write: &&mut Write| write.client == client && !write.is_failed;
        for write in self.writes.iter_mut().filter(own) {
            if write.acknowledged.is_some_and(|at| at <= began) {
                write.published.get_or_insert(now);
                if is_sync {
                    write.is_synced = true;
                    confirmed += 1;
                }
            }
        }
        confirmed
    }

    /// A data server, named by a number below 64, may have lost what was not synced: its power was cut, or its
    /// disk harmed.
    pub fn power_cut(&mut self, server: u32) {
        for write in self.writes.iter_mut().filter(|write| !write.is_synced) {
            write.cut_at |= 1 << (server % 64);
        }
    }

    /// The client died, or was told that a write or flush failed: what it had not published may be
    /// gone, and a later fsync says nothing about it.
    pub fn client_failed(&mut self, client: Client) {
        let lost = |write: &&mut Write| write.client == client && write.published.is_none();
        self.writes.iter_mut().filter(lost).for_each(|write| write.is_failed = true);
    }

    /// A flush, an fsync or a write with O_SYNC, by any client, said that bytes are lost: a later fsync says nothing about what
    /// power cuts may have taken.
    pub fn loss_was_told(&mut self) {
        let lost = |write: &&mut Write| write.may_be_cut();
        self.writes.iter_mut().filter(lost).for_each(|write| write.is_failed = true);
    }

    /// How many writes it has seen.
    #[must_use]
    pub fn len(&self) -> usize {
        self.writes.len()
    }

    /// Whether it has seen none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// The end of the furthest write.
    #[must_use]
    pub fn size_max(&self) -> u64 {
        let ends = self.writes.iter().filter(|w| w.pattern.is_some()).map(|w| w.end);
        ends.max().unwrap_or(0)
    }

    /// Judges what a read of `asked` bytes at `offset` gave; fewer bytes mean the end of the file.
    ///
    /// # Errors
    ///
    /// The first byte that no write explains.
    pub fn judge(&self, reader: Reader, offset: u64, asked: u64, got: &[u8]) -> Result<(), Wrong> {
        let mut bounds = vec![offset, offset + asked, offset + got.len() as u64];
        for write in &self.writes {
            bounds.extend([write.offset, write.end]);
        }
        bounds.retain(|bound| (offset..=offset + asked).contains(bound));
        bounds.sort_unstable();
        bounds.dedup();
        for pair in bounds.windows(2) {
            if let [from, to] = *pair {
                let bytes = got.get((from - offset) as usize..(to - offset) as usize);
                self.judge_run(reader, from, to, bytes)?;
            }
        }
        Ok(())
    }

    /// Judges bytes that the same writes cover. `None`: the file ended before them.
    fn judge_run(
        &self,
        reader: Reader,
        from: u64,
        to: u64,
        bytes: Option<&[u8]>,
    ) -> Result<(), Wrong> {
        let here: Vec<&Write> =
            self.writes.iter().filter(|w| w.offset <= from && to <= w.end).collect();
        let certain: Vec<&Write> =
            here.iter().filter(|w| w.is_certain_for(reader)).copied().collect();
        let possible: Vec<&Write> = here
            .iter()
            .filter(|write| !certain.iter().any(|later| later.is_after(write)))
            .copied()
            .collect();
        let may_be_hole = certain.is_empty() || possible.iter().any(|w| w.pattern.is_none());
        let explains = |at: u64, byte: u8| {
            (byte == 0 && may_be_hole)
                || possible.iter().any(|w| w.pattern.is_some_and(|p| pattern(p, at) == byte))
        };
        let found = match bytes {
            None if may_be_hole => return Ok(()),
            None => None,
            Some(bytes) => {
                let wrong = (from..).zip(bytes).find(|(at, byte)| !explains(*at, **byte));
                let Some((at, byte)) = wrong else { return Ok(()) };
                Some((at, *byte, bytes.get((at - from) as usize..).unwrap_or_default()))
            }
        };
        let offset = found.map_or(from, |(at, ..)| at);
        let mut explanation = format!("bytes {from}..{to}; possible here: ");
        for write in &possible {
            explanation += &format!("{write:?} ");
        }
        explanation += if may_be_hole { "or a hole" } else { "no hole" };
        if let Some((at, _, bytes)) = found {
            explanation += &format!("; found {}", self.identify(at, bytes));
        }
        Err(Wrong { offset, found: found.map(|(_, byte, _)| byte), explanation })
    }

    /// Whose bytes these are.
    fn identify(&self, at: u64, bytes: &[u8]) -> String {
        let sample = bytes.get(..bytes.len().min(16)).unwrap_or_default();
        if sample.iter().all(|byte| *byte == 0) {
            return "zeros".to_owned();
        }
        let matches = |p: u64| (at..).zip(sample).all(|(at, byte)| pattern(p, at) == *byte);
        let write = self.writes.iter().find(|w| w.pattern.is_some_and(matches));
        write.map_or_else(|| format!("bytes of no write: {sample:?}"), |write| format!("{write:?}"))
    }
}

impl Write {
    /// Whether this reader must see it, or something later.
    fn is_certain_for(&self, reader: Reader) -> bool {
        let seen = if self.client == reader.client { self.acknowledged } else { self.published };
        let since = if self.client == reader.client { reader.began } else { reader.opened };
        seen.is_some_and(|at| at <= since) && !self.is_failed && !self.may_be_cut()
    }

    /// Whether power may have taken all copies.
    fn may_be_cut(&self) -> bool {
        !self.is_synced && self.cut_at.count_ones() > 1
    }

    /// Whether it surely came after the other.
    fn is_after(&self, other: &Write) -> bool {
        let other_done =
            if self.client == other.client { other.acknowledged } else { other.published };
        other_done.is_some_and(|at| at <= self.begin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(client: Client, opened: Moment, began: Moment) -> Reader {
        Reader { client, opened, began }
    }

    /// Client 1 writes bytes 0..10 with pattern 1 and publishes, at moments 1 to 4.
    fn one_published() -> Content {
        let mut content = Content::default();
        let write = content.write(1, Some(1), 0, 10, 1);
        content.acknowledged(write, 2);
        content.published(1, 3, 4, false);
        content
    }

    #[test]
    fn after_a_loss_was_told_a_later_fsync_says_nothing_about_it() {
        for is_told in [false, true] {
            let mut content = one_published();
            content.power_cut(1);
            content.power_cut(2);
            if is_told {
                content.loss_was_told();
            }
            content.published(1, 5, 6, true);
            let judged = content.judge(reader(2, 7, 8), 0, 10, &[]);
            assert_eq!(judged.is_ok(), is_told, "{judged:?}");
        }
    }

    #[test]
    fn others_see_a_write_when_they_open_after_its_publication() {
        let content = one_published();
        let bytes = fill(1, 0, 10);
        assert_eq!(content.judge(reader(2, 5, 6), 0, 10, &bytes), Ok(()));
        assert!(content.judge(reader(2, 5, 6), 0, 10, &[]).is_err(), "it must be there");
        assert_eq!(content.judge(reader(2, 3, 6), 0, 10, &[]), Ok(()), "opened too early");
        assert!(content.judge(reader(1, 0, 3), 0, 10, &[]).is_err(), "its own client sees it");
        assert!(content.judge(reader(2, 5, 6), 0, 10, &[7; 10]).is_err(), "nobody wrote this");
    }

    #[test]
    fn the_later_of_two_writes_counts() {
        let mut content = one_published();
        let write = content.write(2, Some(2), 5, 10, 5);
        content.acknowledged(write, 6);
        content.published(2, 7, 8, true);
        let mut bytes = fill(1, 0, 5);
        bytes.extend(fill(2, 5, 5));
        assert_eq!(content.judge(reader(3, 9, 9), 0, 10, &bytes), Ok(()));
        assert!(content.judge(reader(3, 9, 9), 0, 10, &fill(1, 0, 10)).is_err(), "the older one");
        assert_eq!(content.judge(reader(3, 7, 9), 0, 10, &fill(1, 0, 10)), Ok(()));
    }

    #[test]
    fn a_power_cut_takes_only_what_was_not_synced() {
        let mut content = one_published();
        let mut synced = content.clone();
        synced.published(1, 5, 6, true);
        for server in [1, 2] {
            assert!(content.judge(reader(2, 9, 9), 0, 10, &[]).is_err(), "one copy is not all");
            content.power_cut(server);
            synced.power_cut(server);
        }
        assert_eq!(content.judge(reader(2, 9, 9), 0, 10, &[]), Ok(()));
        assert!(synced.judge(reader(2, 9, 9), 0, 10, &[]).is_err());
    }

    #[test]
    fn a_write_with_o_sync_is_not_lost() {
        let mut content = Content::default();
        let write = content.write(1, Some(1), 0, 10, 1);
        content.synced(write, 2);
        (1..=3).for_each(|server| content.power_cut(server));
        assert!(content.judge(reader(2, 3, 3), 0, 10, &[]).is_err());
        assert_eq!(content.judge(reader(2, 3, 3), 0, 10, &fill(1, 0, 10)), Ok(()));
    }

    #[test]
    fn what_was_cut_off_does_not_come_back() {
        let mut content = one_published();
        let cut = content.write(2, None, 4, u64::MAX, 5);
        content.acknowledged(cut, 6);
        assert_eq!(content.judge(reader(3, 7, 7), 0, 10, &fill(1, 0, 4)), Ok(()));
        assert!(content.judge(reader(3, 7, 7), 0, 10, &fill(1, 0, 10)).is_err());
        let mut holed = fill(1, 0, 4);
        holed.extend([0; 6]);
        assert_eq!(content.judge(reader(3, 7, 7), 0, 10, &holed), Ok(()), "zeros after a cut");
    }
}
