//! The check of one volume, from its partitions to its report.

use std::time::Duration;

use milpa_host::clock::Instant;
use milpa_host::managers::Managers;
use milpa_host::telemetry::with_sources;
use milpa_types::{MetaPartition, Volume, VolumeView};
use serde::Serialize;

use crate::ask::{FsckError, Servers};
use crate::finding::{Code, Finding};
use crate::strays::Unreferenced;
use crate::{bytes, names, paths, repair, strays};

/// Findings that are told one by one; the others are counted.
const FINDINGS_MAX: usize = 10_000;

/// What was looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Inodes.
    pub inodes: u64,
    /// Names.
    pub dentries: u64,
    /// Segments of content maps.
    pub segments: u64,
    /// Extents on data nodes.
    pub extents: u64,
    /// Extents to which no file referred: they were being written, or waited to be deleted. Those that nobody
    /// deletes are found one by one.
    pub unreferenced: u64,
    /// Their lengths; some of these bytes may be freed already.
    pub unreferenced_bytes: u64,
    /// Inodes that were looked at several times, as something was being done to them.
    pub suspects: u64,
}

/// The outcome for one volume.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Its name.
    pub volume: String,
    /// What was looked at.
    pub counts: Counts,
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// Further findings that are not listed.
    pub unlisted: u64,
    /// Inodes that could not be judged: they changed whenever they were looked at.
    pub unjudged: u64,
    /// Why not all was looked at, if so. What was found stands: each finding is certain by itself.
    pub incomplete: Option<String>,
    /// How long it took.
    pub seconds: f64,
}

impl Report {
    /// Whether all was looked at and judged, and nothing is wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.incomplete.is_none()
            && self.findings.is_empty()
            && self.unlisted == 0
            && self.unjudged == 0
    }
}

/// What is being done, for who waits.
#[derive(Clone, Copy, Debug)]
pub enum Stage {
    /// Inodes are read.
    Inodes,
    /// Names are counted.
    Names,
    /// Content maps are compared with what data nodes hold.
    Content,
    /// What looked wrong is looked at again.
    Suspects,
    /// Extents of no file are given time to go.
    Strays,
}

/// What to do.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Mend what is safe to mend.
    pub repairs: bool,
    /// How long bytes of no file may wait for a data node to ask about them. [`PATIENCE`](crate::PATIENCE), unless the
    /// nodes' `writer_silent_ms` is longer than usual.
    pub patience: Duration,
}

/// Checks one volume while it is in use, and mends what is safe to mend if asked to. `tell` hears how
/// far it is, now and then. When a server does not answer the report is [`Report::incomplete`].
pub async fn check(
    managers: &Managers,
    volume: &Volume,
    options: &Options,
    tell: &mut dyn FnMut(Stage, &Counts),
) -> Report {
    let started = Instant::now();
    let mut found = Found::new(tell);
    let outcome = look_and_mend(managers, volume, options, &mut found).await;
    Report {
        volume: volume.name.clone(),
        counts: found.counts,
        findings: found.findings,
        unlisted: found.unlisted,
        unjudged: found.unjudged,
        incomplete: outcome.err().map(|error| with_sources(&error)),
        seconds: started.elapsed().as_secs_f64(),
    }
}

async fn look_and_mend(
    managers: &Managers,
    volume: &Volume,
    options: &Options,
    found: &mut Found<'_>,
) -> Result<(), FsckError> {
    let mut servers = Servers::of(managers, volume.id).await?;
    let meta_replicas = servers.meta_replicas().await?;
    of_view(servers.view(), meta_replicas).into_iter().for_each(|finding| found.add(finding));
    let looked = look(&mut servers, found, options.patience).await;
    // What was found until then needs its paths, and its repairs, each of which is proven by itself.
    let mended = async {
        paths::find(&mut servers, &mut found.findings).await?;
        if options.repairs {
            repair::repair(&mut servers, &mut found.findings).await
        } else {
            Ok(())
        }
    };
    let mended = mended.await;
    looked.and(mended)
}

async fn look(
    servers: &mut Servers<'_>,
    found: &mut Found<'_>,
    patience: Duration,
) -> Result<(), FsckError> {
    names::check(servers, found).await?;
    bytes::check(servers, found).await?;
    strays::judge(servers, found, patience).await
}

/// What was found so far.
pub(crate) struct Found<'a> {
    pub counts: Counts,
    pub findings: Vec<Finding>,
    pub unlisted: u64,
    pub unjudged: u64,
    pub unreferenced: Unreferenced,
    tell: &'a mut dyn FnMut(Stage, &Counts),
}

impl<'a> Found<'a> {
    fn new(tell: &'a mut dyn FnMut(Stage, &Counts)) -> Found<'a> {
        let (counts, unreferenced) = (Counts::default(), Unreferenced::default());
        Found { counts, findings: Vec::new(), unlisted: 0, unjudged: 0, unreferenced, tell }
    }

    /// Notes a finding; of very many the number only.
    pub(crate) fn add(&mut self, finding: Finding) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        } else {
            self.unlisted += 1;
        }
    }

    /// Tells how far the check is.
    pub(crate) fn tell(&mut self, stage: Stage) {
        (self.tell)(stage, &self.counts);
    }
}

/// Slots without gaps, and as many replicas as there should be.
fn of_view(view: &VolumeView, meta_replicas: usize) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |code, text| findings.push(Finding::new(code, None, text));
    let mut meta: Vec<&MetaPartition> = view.meta.iter().collect();
    meta.sort_by_key(|partition| partition.slot);
    for (slot, partition) in (0..).zip(&meta) {
        let (id, found) = (partition.id, partition.slot.0);
        if found != slot {
            let text = format!("meta partition {id} has slot {found} where {slot} is due");
            add(Code::PartitionRanges, text);
        }
        let replicas = partition.members.len();
        if replicas < meta_replicas {
            let text = format!("meta partition {id} has {replicas} of {meta_replicas} replicas");
            add(Code::FewReplicas, text);
        }
    }
    let wanted = usize::from(view.volume.options.replicas);
    for partition in view.data.iter().filter(|partition| partition.members.len() < wanted) {
        let (id, replicas) = (partition.id, partition.members.len());
        let text = format!("data partition {id} has {replicas} of {wanted} replicas in service");
        add(Code::FewReplicas, text);
    }
    findings
}
