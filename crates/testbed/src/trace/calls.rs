//! Traced calls, and whether a flush covers what was written.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// What a call did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// pwrite64(2).
    Write {
        /// Where in the file.
        offset: u64,
    },
    /// fdatasync(2) or fsync(2).
    Flush,
}

/// A system call that succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// What it did.
    pub kind: Kind,
    /// On which file or directory.
    pub path: PathBuf,
    /// The bytes of a write as strace shows them: escaped, and cut off at some length.
    pub shown: String,
    /// When it was entered, in microseconds since 1970.
    pub begun_us: u64,
    /// When it had returned.
    pub ended_us: u64,
}

/// All calls of one process that succeeded, by their begin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The calls.
    pub calls: Vec<Call>,
}

/// From before a call into the file system until after its return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Taken before the call, in microseconds since 1970: the clock that strace shows.
    pub from_us: u64,
    /// Taken after it returned.
    pub to_us: u64,
}

impl Window {
    /// Makes a call into the file system and notes when.
    pub fn around<T>(work: impl FnOnce() -> T) -> (Window, T) {
        let from_us = now_us();
        let result = work();
        (Window { from_us, to_us: now_us() }, result)
    }
}

fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

impl Trace {
    /// Reads the output of `strace -f -ttt -T -y`. Lines of other kinds, and calls that failed or
    /// had not returned when the tracer left, are passed over.
    #[must_use]
    pub fn parse(text: &str) -> Trace {
        let mut begun: Vec<(&str, String)> = Vec::new();
        let mut calls = Vec::new();
        for line in text.lines() {
            let Some((thread, rest)) = line.split_once(' ') else { continue };
            let rest = rest.trim_start();
            if let Some(head) = rest.strip_suffix("<unfinished ...>") {
                begun.push((thread, head.trim_end().to_owned()));
            } else if let Some((_, tail)) = rest.split_once(" resumed>")
                && rest.split_once(' ').is_some_and(|(_, call)| call.starts_with("<... "))
            {
                // A thread is in one call at a time.
                let Some(at) = begun.iter().position(|(of, _)| *of == thread) else { continue };
                let (_, head) = begun.swap_remove(at);
                calls.extend(call(&(head + tail)));
            } else {
                calls.extend(call(rest));
            }
        }
        calls.sort_by_key(|call| call.begun_us);
        Trace { calls }
    }

    /// Whether every write in the window that `chosen` names was followed by a flush of its file,
    /// which had returned when the window closed. A window without such a write proves nothing.
    ///
    /// # Errors
    ///
    /// What is missing, in words.
    pub fn all_flushed(
        &self,
        window: Window,
        chosen: impl Fn(&Call) -> bool,
    ) -> Result<(), String> {
        let writes = self.writes(window, &chosen);
        if writes.is_empty() {
            return Err("wrote nothing".to_owned());
        }
        match writes.into_iter().find(|write| !self.is_flushed(window, write)) {
            None => Ok(()),
            Some(write) => Err(format!("wrote {} without a flush", write.path.display())),
        }
    }

    /// Whether at least one write in the window that `chosen` names was flushed within it. For
    /// logs: an entry may be written again later, by which time it is long durable.
    ///
    /// # Errors
    ///
    /// What is missing, in words.
    pub fn one_flushed(
        &self,
        window: Window,
        chosen: impl Fn(&Call) -> bool,
    ) -> Result<(), String> {
        let writes = self.writes(window, &chosen);
        match writes.first() {
            None => Err("wrote nothing".to_owned()),
            Some(_) if writes.iter().any(|write| self.is_flushed(window, write)) => Ok(()),
            Some(write) => Err(format!("wrote {} without a flush", write.path.display())),
        }
    }

    /// Whether a file or directory was flushed from begin to end within the window.
    #[must_use]
    pub fn has_flush(&self, window: Window, path: &Path) -> bool {
        self.is_flushed_since(window.from_us, window.to_us, path)
    }

    fn writes(&self, window: Window, chosen: &impl Fn(&Call) -> bool) -> Vec<&Call> {
        let is_in = |call: &&Call| {
            matches!(call.kind, Kind::Write { .. })
                && (window.from_us..=window.to_us).contains(&call.begun_us)
        };
        self.calls.iter().filter(is_in).filter(|call| chosen(call)).collect()
    }

    fn is_flushed(&self, window: Window, write: &Call) -> bool {
        self.is_flushed_since(write.ended_us, window.to_us, &write.path)
    }

    fn is_flushed_since(&self, from_us: u64, to_us: u64, path: &Path) -> bool {
        let covers = |call: &Call| {
            call.kind == Kind::Flush
                && call.path == path
                && call.begun_us >= from_us
                && call.ended_us <= to_us
        };
        self.calls.iter().any(covers)
    }
}

/// One whole call: `1700000000.000001 fdatasync(5</path>) = 0 <0.000123>`.
fn call(text: &str) -> Option<Call> {
    let (time, rest) = text.split_once(' ')?;
    let begun_us = microseconds(time)?;
    let (name, rest) = rest.trim_start().split_once('(')?;
    let (rest, took) = rest.strip_suffix('>')?.rsplit_once(" <")?;
    let (arguments, result) = rest.rsplit_once("= ")?;
    let arguments = arguments.trim_end().strip_suffix(')')?;
    // A call that failed has promised nothing.
    let _: u64 = result.trim().parse().ok()?;
    let (_, rest) = arguments.split_once('<')?;
    let (path, rest) = rest.split_once('>')?;
    let (kind, shown) = match name {
        "fdatasync" | "fsync" => (Kind::Flush, String::new()),
        "pwrite64" => {
            let (rest, offset) = rest.rsplit_once(", ")?;
            let (shown, _length) = rest.rsplit_once(", ")?;
            (
                Kind::Write { offset: offset.parse().ok()? },
                shown.trim_start_matches(", ").to_owned(),
            )
        }
        _ => return None,
    };
    let ended_us = begun_us + microseconds(took)?;
    Some(Call { kind, path: path.into(), shown, begun_us, ended_us })
}

/// `12.000345`, always with six digits.
fn microseconds(text: &str) -> Option<u64> {
    let (seconds, micros) = text.split_once('.').filter(|(_, micros)| micros.len() == 6)?;
    seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(micros.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Window = Window { from_us: 100_000_000, to_us: 101_000_000 };

    fn verdict(text: &str) -> Result<(), String> {
        Trace::parse(text).all_flushed(WINDOW, |call| call.path == Path::new("/d/a"))
    }

    const WRITE: &str =
        r#"7 100.000100 pwrite64(5</d/a>, "x\") = 0 <0.1>", 4096, 8192) = 4096 <0.000020>"#;

    #[test]
    fn calls_are_read_whole_interrupted_and_failed() {
        let text = format!(
            "{WRITE}\n\
             8 100.000200 fdatasync(5</d/a> <unfinished ...>\n\
             9  100.000300 fsync(6</d>) = -1 EIO (Input/output error) <0.000001>\n\
             8 100.400200 <... fdatasync resumed>)  = 0 <0.400000>\n\
             9 100.500000 fdatasync(5</d/a> <detached ...>\n\
             9 100.500001 +++ exited with 0 +++\n"
        );
        let calls = Trace::parse(&text).calls;
        let found: Vec<_> = calls.iter().map(|c| (c.kind, c.begun_us, c.ended_us)).collect();
        let write = (Kind::Write { offset: 8192 }, 100_000_100, 100_000_120);
        assert_eq!(found, [write, (Kind::Flush, 100_000_200, 100_400_200)]);
        assert_eq!(calls[0].shown, r#""x\") = 0 <0.1>""#);
        assert_eq!(calls[1].path, Path::new("/d/a"));
    }

    #[test]
    fn a_flush_counts_that_begins_after_the_write_and_ends_in_the_window() {
        let flush = |at: &str, took: &str| format!("{WRITE}\n8 {at} fsync(5</d/a>) = 0 <{took}>");
        assert_eq!(verdict(&flush("100.000120", "0.5")), Err(without_flush()), "bad duration");
        assert_eq!(verdict(&flush("100.000120", "0.500000")), Ok(()));
        assert_eq!(verdict(&flush("100.000119", "0.500000")), Err(without_flush()), "too early");
        assert_eq!(verdict(&flush("100.900000", "0.100001")), Err(without_flush()), "too late");
    }

    #[test]
    fn no_flush_a_failed_one_and_one_of_another_file_do_not_count() {
        assert_eq!(verdict(WRITE), Err(without_flush()));
        let failed = "8 100.5 fsync(5</d/a>) = -1 EIO (Input/output error) <0.000001>";
        assert_eq!(verdict(&format!("{WRITE}\n{failed}")), Err(without_flush()));
        let other = "8 100.500000 fsync(5</d/b>) = 0 <0.000001>";
        assert_eq!(verdict(&format!("{WRITE}\n{other}")), Err(without_flush()));
    }

    #[test]
    fn a_flush_between_two_writes_covers_only_the_first() {
        let flush = "8 100.100000 fsync(5</d/a>) = 0 <0.000001>";
        let again = r#"7 100.200000 pwrite64(5</d/a>, "y", 1, 0) = 1 <0.000020>"#;
        let text = format!("{WRITE}\n{flush}\n{again}");
        assert_eq!(verdict(&text), Err(without_flush()));
        let trace = Trace::parse(&text);
        assert_eq!(trace.one_flushed(WINDOW, |call| call.shown.contains('x')), Ok(()));
        assert_eq!(
            trace.one_flushed(WINDOW, |call| call.shown.contains('y')),
            Err(without_flush())
        );
    }

    #[test]
    fn a_window_without_a_write_proves_nothing() {
        let flush = "8 100.100000 fsync(5</d/a>) = 0 <0.000001>";
        assert_eq!(verdict(flush), Err("wrote nothing".to_owned()));
        assert!(Trace::parse(flush).has_flush(WINDOW, Path::new("/d/a")));
    }

    fn without_flush() -> String {
        "wrote /d/a without a flush".to_owned()
    }
}
