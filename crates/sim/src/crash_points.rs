//! Every point at which a machine can crash (F1, F19) or stand still (F18): after each effect that it has in a seed's
//! calm course.

use std::fmt;
use std::str::FromStr;

use crate::outcome::Outcome;

/// What a machine keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// Its disk: its process is killed.
    Kill,
    /// What it has synced, and anything of the rest: its power goes.
    Power,
    /// Everything but its time: its process is stopped for so long that others take over, and goes on.
    Pause,
}

/// A machine crashes after so many effects: changes of its disk, and packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrashPoint {
    /// Such as `meta1`.
    pub machine: String,
    /// Counted from the first start of its node.
    pub effects: u64,
    /// What it keeps.
    pub crash: Crash,
}

impl fmt::Display for CrashPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let crash = match self.crash {
            Crash::Kill => "kill",
            Crash::Power => "power",
            Crash::Pause => "pause",
        };
        write!(f, "{}:{}:{crash}", self.machine, self.effects)
    }
}

impl FromStr for CrashPoint {
    type Err = String;

    fn from_str(text: &str) -> Result<CrashPoint, String> {
        let parse = || {
            let (machine, rest) = text.split_once(':')?;
            let (effects, crash) = rest.split_once(':')?;
            let crash = match crash {
                "kill" => Crash::Kill,
                "power" => Crash::Power,
                "pause" => Crash::Pause,
                _ => return None,
            };
            Some(CrashPoint { machine: machine.to_owned(), effects: effects.parse().ok()?, crash })
        };
        parse().ok_or_else(|| format!("{text} is no crash point; write it as meta1:312:power"))
    }
}

/// A machine, and how many effects it had.
#[derive(Clone, Copy, Debug)]
pub struct Effectful {
    /// Its name.
    pub machine: &'static str,
    /// Its power can take something.
    pub has_disk: bool,
    /// Changes of its disk, and packets.
    pub effects: u64,
}

impl Effectful {
    fn points(self) -> impl Iterator<Item = CrashPoint> {
        let crashes = match self.has_disk {
            true => &[Crash::Kill, Crash::Pause, Crash::Power][..],
            false => &[Crash::Kill, Crash::Pause],
        };
        crashes.iter().flat_map(move |crash| {
            let (machine, crash) = (self.machine, *crash);
            (0..self.effects).map(move |effects| {
                let machine = machine.to_owned();
                CrashPoint { machine, effects, crash }
            })
        })
    }
}

/// One point of every `every` in a calm course.
#[must_use]
pub fn crash_points(calm: &Outcome, every: u64) -> Vec<CrashPoint> {
    let step = usize::try_from(every.max(1)).unwrap_or(usize::MAX);
    let points = calm.effects.iter().flat_map(|machine| machine.points());
    points.step_by(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_read_as_they_are_written_and_each_is_there() {
        let machine = |machine, has_disk, effects| Effectful { machine, has_disk, effects };
        let effects = vec![machine("meta1", true, 3), machine("client1", false, 2)];
        let calm = Outcome { effects, ..Outcome::default() };
        let points = crash_points(&calm, 1);
        let written: Vec<String> = points.iter().map(ToString::to_string).collect();
        assert_eq!(written[1..4], ["meta1:1:kill", "meta1:2:kill", "meta1:0:pause"]);
        assert_eq!(written[6], "meta1:0:power");
        assert_eq!(written[9..12], ["client1:0:kill", "client1:1:kill", "client1:0:pause"]);
        for (point, written) in points.iter().zip(&written) {
            assert_eq!(written.parse().as_ref(), Ok(point));
        }
        let few = crash_points(&calm, 2);
        assert!(few.iter().any(|point| point.crash == Crash::Power), "{few:?}");
        assert!("meta1:x:kill".parse::<CrashPoint>().is_err());
    }
}
