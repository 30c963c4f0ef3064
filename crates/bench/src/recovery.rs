//! A data node is lost for good: how soon all its replicas are made again, and what clients notice.
//!
//! InterFS (section 4.2) reports 5,500 small files a second.

use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use milpa_client::{Client, Creation, OpenFlags};
use milpa_testbed::{Outcome, Testbed};
use milpa_types::InodeId;
use serde_json::Value;

use crate::million::{connect, finish, name};

/// Data nodes, and on how many of them each file is.
const NODES: u64 = 5;
const COPIES_OF_FILE: u64 = 3;
const FILE_BYTES: usize = 4096;
const FILES_PER_DIRECTORY: u64 = 10_000;
/// Files under way at once while the cluster is filled.
const IN_FLIGHT: usize = 128;
/// Callers whose latency is measured, one file after the other each.
const CALLERS: usize = 4;
/// How long the quiet cluster is measured. What makes its slowest hundredth comes in bursts some seconds apart: of seven
/// times ten seconds one had none.
const QUIET: Duration = Duration::from_secs(30);
/// What is copied on the plain disk for comparison, and how often.
const COPY_BYTES: usize = 256 << 20;
const COPIES: usize = 7;
const HEAL_MAX: Duration = Duration::from_secs(3600);

/// Fills the cluster until a data node has to hold `files_lost` files or more, kills that and deletes its directory, and
/// watches.
pub fn run(files_lost: u64, repair_mib: Option<u64>) -> Outcome {
    let files = (files_lost * NODES).div_ceil(COPIES_OF_FILE);
    let nodes = NODES.to_string();
    let bed = Testbed::start_tuned(&["--nodes", &nodes], |process, table| match &*process.role {
        "manager" => set(table, Some("policy"), "dead_after_ms", 5_000),
        "data" => {
            let bytes = repair_mib.map(|mib| mib << 20);
            bytes.iter().for_each(|bytes| set(table, None, "repair_bytes_per_second", *bytes));
        }
        _ => {}
    })?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|e| e.to_string())?;
    let client = runtime.block_on(connect(&bed))?;
    let started = Instant::now();
    let directory = runtime.block_on(fill(&client, files))?;
    let seconds = started.elapsed().as_secs_f64();
    println!("filled: {files} files of 4 KiB in {seconds:.1} s");
    let copied = copy_rate(bed.scratch())?;
    println!("the disk copies {:.0} MB/s by itself", copied / 1e6);

    settle(bed.scratch())?;
    let quiet =
        runtime.block_on(measure(&client, directory, 0, |began| began.elapsed() < QUIET))?;
    let quiet = Latencies::of(&quiet, |_| true);
    println!("write + close + read of 4 KiB, {CALLERS} callers, quiet:   {}", quiet.describe());
    let lost = largest(&bed)?;
    let all: u64 = used(&bed)?.iter().map(|(_, bytes)| bytes).sum();
    let share = lost.bytes as f64 / (all as f64 / COPIES_OF_FILE as f64);
    let files_lost = files as f64 * share;
    println!("killing {}: {} MB, {files_lost:.0} files", lost.name, lost.bytes / 1_000_000);
    let process = bed.process(&lost.name)?;
    let pid = process.signal(libc::SIGSTOP)?;
    std::fs::remove_dir_all(&process.directory).map_err(|e| e.to_string())?;
    milpa_testbed::kill(pid)?;

    let killed = Instant::now();
    let (watching, watched) = std::sync::mpsc::channel();
    let healed = std::sync::atomic::AtomicBool::new(false);
    let busy = std::thread::scope(|scope| {
        scope.spawn(|| {
            let watch = watch(&bed, lost.id);
            healed.store(true, std::sync::atomic::Ordering::Release);
            let _ = watching.send(watch);
        });
        let goes_on = |_| !healed.load(std::sync::atomic::Ordering::Acquire);
        runtime.block_on(measure(&client, directory, 1, goes_on))
    })?;
    let (waited, healing) = watched.recv().map_err(|e| e.to_string())??;
    let begun = killed + waited;
    let missing = Latencies::of(&busy, |ended| ended < begun);
    let busy = Latencies::of(&busy, |ended| ended >= begun);
    println!("the same from the loss until it is dead:                {}", missing.describe());
    println!("the same while its replicas are made again:             {}", busy.describe());
    let seconds = healing.as_secs_f64().max(1e-3);
    let rate = lost.bytes as f64 / seconds;
    println!(
        "dead after {:.1} s, fully redundant {seconds:.1} s later: {:.0} files/s, {:.0} MB/s, \
         {:.2} of the disk's copy rate; p99 {:.2} times that of the quiet cluster",
        waited.as_secs_f64(),
        files_lost / seconds,
        rate / 1e6,
        rate / copied,
        busy.percentile(99) / quiet.percentile(99).max(1e-9),
    );
    runtime.block_on(client.shutdown()).map_err(|e| e.to_string())
}

/// Waits until the disk has what was written, or the quiet cluster would not be quiet: half a minute long the kernel
/// would go on writing what filled it.
fn settle(directory: &Path) -> Outcome {
    match std::process::Command::new("sync").arg("--file-system").arg(directory).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("sync: {status}")),
        Err(error) => Err(format!("sync: {error}")),
    }
}

/// Sets a number in a config file.
fn set(table: &mut toml::Table, section: Option<&str>, key: &str, value: u64) {
    let table = match section {
        Some(section) => table.get_mut(section).and_then(|section| section.as_table_mut()),
        None => Some(table),
    };
    let Some(table) = table else { return };
    table.insert(key.to_owned(), toml::Value::Integer(value.try_into().unwrap_or(i64::MAX)));
}

/// A data node, as the managers see it.
struct Node {
    id: u64,
    name: String,
    bytes: u64,
}

fn used(bed: &Testbed) -> Outcome<Vec<(u64, u64)>> {
    let nodes = bed.json(&["node", "list"])?;
    let nodes = nodes.as_array().ok_or("node list is no list")?;
    let data = nodes.iter().filter(|node| node["role"] == "Data");
    let bytes = |node: &Value| -> u64 {
        let disks = node["disks"].as_array().into_iter().flatten();
        disks.filter_map(|disk| disk["used_bytes"].as_u64()).sum()
    };
    Ok(data.filter_map(|node| Some((node["id"].as_u64()?, bytes(node)))).collect())
}

/// The node that holds most. Waits until the nodes have counted what was written.
fn largest(bed: &Testbed) -> Outcome<Node> {
    std::thread::sleep(Duration::from_secs(5));
    let used = used(bed)?;
    let (id, bytes) = used.iter().max_by_key(|(_, bytes)| *bytes).copied().ok_or("no nodes")?;
    let names = bed.processes().iter().filter(|process| process.role == "data");
    for process in names {
        if bed.node_id(&process.name)? == id {
            return Ok(Node { id, name: process.name.clone(), bytes });
        }
    }
    Err(format!("no process is node {id}"))
}

/// How long until the first task, and from there until everything is whole again. By a manager's metrics, and only at the
/// end with a command: one every moment would be a load of its own on what is measured.
fn watch(bed: &Testbed, lost: u64) -> Outcome<(Duration, Duration)> {
    let started = Instant::now();
    let mut begun: Option<Duration> = None;
    bed.wait_until("fully redundant", HEAL_MAX, |bed| {
        let Some(tasks) = tasks(bed) else { return false };
        if begun.is_none() && tasks > 0.0 {
            begun = Some(started.elapsed());
        }
        begun.is_some() && tasks == 0.0 && is_whole(bed, lost)
    })?;
    let begun = begun.unwrap_or_default();
    Ok((begun, started.elapsed() - begun))
}

/// Replicas being made, as the manager says that leads.
fn tasks(bed: &Testbed) -> Option<f64> {
    let mut managers = bed.processes().iter().filter(|process| process.role == "manager");
    let leader = managers.find(|process| {
        let leads = milpa_testbed::metric(&process.http_listen, "milpa_manager_raft_is_leader");
        leads == Some(1.0)
    })?;
    milpa_testbed::metric(&leader.http_listen, "milpa_manager_tasks")
}

fn is_whole(bed: &Testbed, lost: u64) -> bool {
    let Ok(list) = bed.json(&["partition", "list"]) else { return false };
    let Some(partitions) = list["Partitions"]["data"].as_array() else { return false };
    partitions.iter().all(|partition| {
        let members = partition["members"].as_array().cloned().unwrap_or_default();
        members.len() as u64 == COPIES_OF_FILE && !members.contains(&lost.into())
    })
}

async fn fill(client: &Client, files: u64) -> Outcome<InodeId> {
    let creation = Creation { mode: 0o755, uid: 0, gid: 0 };
    let mut last = InodeId::ROOT;
    for directory in 0..files.div_ceil(FILES_PER_DIRECTORY) {
        let made = client.mkdir(InodeId::ROOT, &name(&format!("d{directory}"))?, creation).await;
        last = made.map_err(|e| e.to_string())?.inode;
        let count = FILES_PER_DIRECTORY.min(files - directory * FILES_PER_DIRECTORY);
        let mut under_way = tokio::task::JoinSet::new();
        for number in 0..count {
            if under_way.len() >= IN_FLIGHT {
                finish(under_way.join_next().await)?;
            }
            let client = client.clone();
            under_way
                .spawn(async move { write(&client, last, &format!("f{number}")).await.map(drop) });
        }
        while let Some(joined) = under_way.join_next().await {
            finish(Some(joined))?;
        }
    }
    Ok(last)
}

async fn write(client: &Client, parent: InodeId, text: &str) -> Outcome<InodeId> {
    let creation = Creation { mode: 0o644, uid: 0, gid: 0 };
    let failed = |e: milpa_client::FsError| e.to_string();
    let flags = OpenFlags::read_write();
    let file = client.create(parent, &name(text)?, creation, flags).await.map_err(failed)?;
    let written = client.write_slice(file.handle, 0, &[7; FILE_BYTES], false).await;
    let flushed = client.flush(file.handle).await;
    client.release(file.handle).await.map_err(failed)?;
    written.and(flushed).map_err(failed)?;
    Ok(file.attributes.inode)
}

async fn read(client: &Client, inode: InodeId) -> Outcome {
    let failed = |e: milpa_client::FsError| e.to_string();
    let file = client.open(inode, OpenFlags::read_only()).await.map_err(failed)?;
    let bytes = client.read(file.handle, 0, FILE_BYTES as u32).await;
    client.release(file.handle).await.map_err(failed)?;
    let length: usize = bytes.map_err(failed)?.iter().map(|piece| piece.len()).sum();
    if length == FILE_BYTES { Ok(()) } else { Err(format!("{length} bytes read")) }
}

/// An operation: when it ended, and how many seconds it took.
type Taken = (Instant, f64);

/// Seconds of each operation, sorted.
struct Latencies(Vec<f64>);

impl Latencies {
    /// Of the operations that ended when `is_meant`.
    fn of(taken: &[Taken], is_meant: impl Fn(Instant) -> bool) -> Latencies {
        let meant = taken.iter().filter(|(ended, _)| is_meant(*ended));
        let mut seconds: Vec<f64> = meant.map(|(_, seconds)| *seconds).collect();
        seconds.sort_by(f64::total_cmp);
        Latencies(seconds)
    }

    fn percentile(&self, percent: usize) -> f64 {
        let at = (self.0.len() * percent / 100).min(self.0.len().saturating_sub(1));
        self.0.get(at).copied().unwrap_or(0.0)
    }

    fn describe(&self) -> String {
        let ms = |percent| self.percentile(percent) * 1e3;
        let most = self.0.last().copied().unwrap_or(0.0) * 1e3;
        let count = self.0.len();
        format!("{count} times, p50 {:.1} ms, p99 {:.1} ms, most {most:.0} ms", ms(50), ms(99))
    }
}

async fn measure(
    client: &Client,
    directory: InodeId,
    round: u32,
    goes_on: impl Fn(Instant) -> bool,
) -> Outcome<Vec<Taken>> {
    let began = Instant::now();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..CALLERS {
        let (client, stopped) = (client.clone(), stopped.clone());
        callers.spawn(async move {
            let mut taken = Vec::new();
            while !*stopped.borrow() {
                let started = Instant::now();
                let text = format!("m{round}-{caller}-{}", taken.len());
                let inode = write(&client, directory, &text).await?;
                read(&client, inode).await?;
                taken.push((Instant::now(), started.elapsed().as_secs_f64()));
            }
            Ok::<_, String>(taken)
        });
    }
    while goes_on(began) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let _ = stop.send(true);
    let mut all = Vec::new();
    while let Some(joined) = callers.join_next().await {
        all.extend(joined.map_err(|e| e.to_string())??);
    }
    Ok(all)
}

/// Bytes a second that a file is copied with on the same disk, flushed at its end: the median of
/// [`COPIES`], of which one alone says little (352 to 605 MB/s within a minute on one machine).
fn copy_rate(directory: &Path) -> Outcome<f64> {
    let (from, to) = (directory.join("copy.from"), directory.join("copy.to"));
    let rates = || -> std::io::Result<Vec<f64>> {
        let mut file = std::fs::File::create(&from)?;
        let piece = vec![3; 1 << 20];
        for _ in 0..COPY_BYTES / piece.len() {
            file.write_all(&piece)?;
        }
        file.sync_all()?;
        let rates: std::io::Result<Vec<f64>> = (0..COPIES)
            .map(|_| copy(&from, &to).map(|seconds| COPY_BYTES as f64 / seconds))
            .collect();
        std::fs::remove_file(&from).and(std::fs::remove_file(&to)).and(rates)
    };
    let mut rates = rates().map_err(|e| e.to_string())?;
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().ok_or_else(|| "nothing was copied".to_owned())
}

/// Copies a file, flushes the copy, and returns how many seconds that took. With read(2) and write(2), as
/// repair does: what the kernel copies by itself (`std::fs::copy`) never passes through a program.
fn copy(from: &Path, to: &Path) -> std::io::Result<f64> {
    let started = Instant::now();
    let (mut source, mut target) = (std::fs::File::open(from)?, std::fs::File::create(to)?);
    let mut piece = vec![0; 1 << 20];
    loop {
        let length = source.read(&mut piece)?;
        if length == 0 {
            break;
        }
        target.write_all(piece.get(..length).unwrap_or_default())?;
    }
    target.sync_all()?;
    Ok(started.elapsed().as_secs_f64())
}
