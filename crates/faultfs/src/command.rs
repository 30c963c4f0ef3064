//! What can be asked of a disk: one line of text each.

use std::str::FromStr;

use milpa_sim::disk::Ordered;

/// The words of all commands, for people.
pub const COMMANDS: &str = "  freeze            calls wait from now on
  thaw              they go on
  cut               power is cut: what is not synced is lost, torn or kept; what waits fails
  sync              everything is made durable, as at an orderly shutdown
  fail-read [PART]  the next read is EIO. Here and in the next four: with PART, the next one of a file whose
                    path contains it
  fail-write [PART] the next write, truncation or punched hole is EIO
  fail-sync [PART]  the next sync is EIO, and what it should have synced is lost
  lose-write [PART] the next write succeeds and goes nowhere
  misdirect-write [PART]
                    the next write lands in another block of its file
  fail-name         the next file or directory that is to be made, renamed or removed is EIO
  drop-syncs on|off syncs succeed and make nothing durable
  flip PART         one bit is flipped, at rest, in a file whose path contains PART
  delay MS          each write and sync takes so much longer; 0 ends it
  delay-reads MS    each read does
  fill on|off       no space is left
  counts            what has happened so far";

/// A command for a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Calls wait, or go on.
    Freeze(bool),
    /// The power goes and comes back. Kill who uses the disk before, and freeze it before that.
    Cut,
    /// Everything becomes durable.
    Sync,
    /// Something goes wrong with the next call of a kind, of a file with this in its path.
    Order(Ordered, String),
    /// Syncs pretend.
    DropSyncs(bool),
    /// A bit of a file with this in its path.
    Flip(String),
    /// Milliseconds, for writes and syncs.
    Delay(u64),
    /// Milliseconds, for reads.
    DelayReads(u64),
    /// No space is left, or as much as ever.
    Fill(bool),
    /// What has happened.
    Counts,
}

impl FromStr for Command {
    type Err = String;

    fn from_str(line: &str) -> Result<Command, String> {
        let mut words = line.split_whitespace();
        let (name, argument) = (words.next().unwrap_or(""), words.next());
        let simple = match name {
            "freeze" => Command::Freeze(true),
            "thaw" => Command::Freeze(false),
            "cut" => Command::Cut,
            "sync" => Command::Sync,
            "fail-name" => Command::Order(Ordered::FailName, String::new()),
            "counts" => Command::Counts,
            _ => return with_argument(name, argument.unwrap_or("")),
        };
        match argument {
            None => Ok(simple),
            Some(argument) => Err(format!("{name} takes no argument, not {argument:?}")),
        }
    }
}

fn with_argument(name: &str, argument: &str) -> Result<Command, String> {
    let is_on = match argument {
        "on" => Ok(true),
        "off" => Ok(false),
        other => Err(format!("{name} on or {name} off, not {other:?}")),
    };
    let milliseconds = || {
        let number = argument.parse::<u64>();
        number.map_err(|_| format!("{name}: no number of milliseconds: {argument:?}"))
    };
    let order = |failure| Ok(Command::Order(failure, argument.to_owned()));
    match name {
        "fail-read" => order(Ordered::FailRead),
        "fail-write" => order(Ordered::FailWrite),
        "fail-sync" => order(Ordered::FailSync),
        "lose-write" => order(Ordered::LoseWrite),
        "misdirect-write" => order(Ordered::MisdirectWrite),
        "drop-syncs" => is_on.map(Command::DropSyncs),
        "fill" => is_on.map(Command::Fill),
        "flip" => Ok(Command::Flip(argument.to_owned())),
        "delay" => milliseconds().map(Command::Delay),
        "delay-reads" => milliseconds().map(Command::DelayReads),
        _ => Err(format!("unknown command {name:?}; `milpa-faultfs --help` lists them")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_or_refused_with_a_reason() {
        assert_eq!("delay 20".parse(), Ok(Command::Delay(20)));
        assert_eq!("delay-reads 20".parse(), Ok(Command::DelayReads(20)));
        let order = |part: &str| Command::Order(Ordered::LoseWrite, part.to_owned());
        assert_eq!("lose-write".parse(), Ok(order("")));
        assert_eq!("lose-write 7.extent".parse(), Ok(order("7.extent")));
        assert_eq!(" flip .extent\n".parse(), Ok(Command::Flip(".extent".to_owned())));
        assert_eq!("drop-syncs off".parse(), Ok(Command::DropSyncs(false)));
        for bad in ["", "explode", "delay soon", "fill", "cut everything"] {
            assert!(bad.parse::<Command>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn every_command_is_in_the_list() {
        for line in COMMANDS.lines().filter(|line| !line.starts_with("   ")) {
            let name = line.split_whitespace().next().unwrap();
            let fits = |argument| format!("{name} {argument}").parse::<Command>().is_ok();
            assert!(["", "on", "5"].into_iter().any(fits), "{name}");
        }
    }
}
