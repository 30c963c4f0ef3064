//! `milpa fsck`: checks volumes, and prints what is wrong.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use milpa_fsck::{Counts, Options, Report, Stage};
use milpa_host::managers::Managers;
use milpa_types::Volume;
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};

use super::{MANAGERS_WAIT, ask_managers, block_on, print_json, unexpected};
use crate::cluster::Cluster;
use crate::failure::{Failure, Outcome};
use crate::size::show_bytes;

/// Between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);

/// Checks one volume, or all.
pub fn run(given: Option<&Path>, volume: Option<String>, options: &Options, json: bool) -> Outcome {
    // Exit code 1 says that something is wrong with a volume, and nothing else.
    let reports = check(given, volume, options, json).map_err(Failure::of_cluster)?;
    if json {
        print_json(&reports)?;
    }
    outcome_of(&reports)
}

/// What the reports, which are printed, come to.
fn outcome_of(reports: &[Report]) -> Outcome {
    let cut_off: Vec<&str> =
        reports.iter().filter(|it| it.incomplete.is_some()).map(|it| it.volume.as_str()).collect();
    if !cut_off.is_empty() {
        let what = format!("not all of {} could be checked", cut_off.join(", "));
        return Err(Failure::cluster(what).fix("`milpa status` shows which servers are silent"));
    }
    let found: u64 = reports.iter().map(|r| r.findings.len() as u64 + r.unlisted).sum();
    let unjudged: u64 = reports.iter().map(|report| report.unjudged).sum();
    if found > 0 {
        let fix = "docs/operations.md says what each finding means and what to do";
        return Err(Failure::user(format!("{found} findings")).fix(fix));
    }
    if unjudged > 0 {
        let what = format!("{unjudged} inodes changed all the time and could not be judged");
        return Err(Failure::cluster(what).fix("run it again when there is less to do"));
    }
    Ok(())
}

fn check(
    given: Option<&Path>,
    volume: Option<String>,
    options: &Options,
    json: bool,
) -> Outcome<Vec<Report>> {
    let cluster = Cluster::find(given)?;
    block_on(async {
        let managers = cluster.managers()?;
        let mut reports = Vec::new();
        for volume in volumes(&managers, volume).await? {
            let mut progress = Progress::new();
            let mut show = |stage, counts: &Counts| progress.show(stage, counts);
            let report = milpa_fsck::check(&managers, &volume, options, &mut show).await;
            progress.clear();
            if !json {
                print(&report);
            }
            reports.push(report);
        }
        Ok(reports)
    })
}

async fn volumes(managers: &Managers, name: Option<String>) -> Outcome<Vec<Volume>> {
    let answer = ask_managers(managers, &ManagerRequest::ListVolumes, MANAGERS_WAIT).await?;
    let ManagerAnswer::Volumes(volumes) = answer else { return Err(unexpected(&answer)) };
    let is_wanted = |known: &str| name.as_ref().is_none_or(|name| name == known);
    let volumes = volumes.into_iter().map(|one| one.volume);
    let wanted: Vec<Volume> = volumes.filter(|volume| is_wanted(&volume.name)).collect();
    match name.filter(|_| wanted.is_empty()) {
        Some(name) => Err(Failure::cluster(format!("no volume {name:?}")).fix("milpa volume list")),
        None => Ok(wanted),
    }
}

fn print(report: &Report) {
    for finding in &report.findings {
        println!("{finding}");
    }
    let Counts { inodes, dentries, segments, extents, .. } = report.counts;
    let without_file = without_file(&report.counts);
    let outcome = match report.findings.len() as u64 + report.unlisted {
        0 if report.unjudged > 0 => format!("{} not judged", report.unjudged),
        0 if report.incomplete.is_some() => "no findings so far".to_owned(),
        0 => "clean".to_owned(),
        found if report.unlisted > 0 => {
            format!("{found} FINDINGS, {} of them not listed", report.unlisted)
        }
        found => format!("{found} FINDINGS"),
    };
    println!(
        "volume {}: checked {inodes} inodes, {dentries} dentries, {segments} segments, {extents} extents{without_file} in {:.1} s: {outcome}",
        report.volume, report.seconds
    );
    if let Some(why) = &report.incomplete {
        println!("volume {}: NOT ALL WAS CHECKED: {why}", report.volume);
    }
}

/// How many of the extents no file referred to, if any: what takes space and is in no file's size.
fn without_file(counts: &Counts) -> String {
    match (counts.unreferenced, counts.unreferenced_bytes) {
        (0, _) => String::new(),
        (extents, bytes) => format!(
            " ({extents} of no file, up to {}: being written, or waiting to be deleted)",
            show_bytes(bytes)
        ),
    }
}

/// One line on a terminal that says how far the check is.
struct Progress {
    is_shown: bool,
    last: Instant,
    has_line: bool,
}

impl Progress {
    fn new() -> Progress {
        let is_shown = std::io::stderr().is_terminal();
        Progress { is_shown, last: Instant::now(), has_line: false }
    }

    fn show(&mut self, stage: Stage, counts: &Counts) {
        if !self.is_shown || self.last.elapsed() < PROGRESS_EVERY {
            return;
        }
        (self.last, self.has_line) = (Instant::now(), true);
        let what = match stage {
            Stage::Inodes => "reading inodes",
            Stage::Names => "counting names",
            Stage::Content => "comparing content maps with extents",
            Stage::Suspects => "looking again at what was changing",
            Stage::Strays => "waiting until bytes of no file are deleted",
        };
        let Counts { inodes, dentries, .. } = counts;
        eprint!("\r\x1b[K{what}: {inodes} inodes, {dentries} dentries so far");
        let _ = std::io::stderr().flush();
    }

    fn clear(&mut self) {
        if self.has_line {
            eprint!("\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::ExitCode;

    /// Exit codes by reports: one volume that was not checked to its end outweighs what was found.
    #[test]
    fn exit_codes_table() {
        let report = |unlisted, unjudged, incomplete: Option<&str>| Report {
            volume: "home".to_owned(),
            counts: Counts::default(),
            findings: Vec::new(),
            unlisted,
            unjudged,
            incomplete: incomplete.map(str::to_owned),
            seconds: 0.0,
        };
        let clean = || report(0, 0, None);
        let code = |reports: &[Report]| outcome_of(reports).err().map(|it| it.exit_code());
        assert_eq!(code(&[clean(), clean()]), None);
        assert_eq!(code(&[report(1, 0, None), clean()]), Some(ExitCode::from(1)));
        assert_eq!(code(&[report(0, 1, None)]), Some(ExitCode::from(2)));
        assert_eq!(
            code(&[report(1, 0, None), report(0, 0, Some("silent"))]),
            Some(ExitCode::from(2))
        );
    }

    #[test]
    fn extents_without_a_file_are_told_if_there_are_any() {
        let told = |unreferenced, unreferenced_bytes| {
            without_file(&Counts { unreferenced, unreferenced_bytes, ..Counts::default() })
        };
        assert_eq!(told(0, 0), "");
        let expected = " (2 of no file, up to 3.0 MiB: being written, or waiting to be deleted)";
        assert_eq!(told(2, 3 << 20), expected);
    }
}
