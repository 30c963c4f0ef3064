//! The main job on real input: a whole cluster on this machine, mounted, doing real work while its
//! processes are killed, and cleaned up.
//!
//! `make demo` builds and runs it. It ends with 0 only if every byte was verified.

// Around the nodes, not in them: the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use milpa_testbed::tree::{self, Tree};
use milpa_testbed::{Mounted, Outcome, ServerProcess, Testbed};
use sha2::{Digest, Sha256};

/// The source tree has at least this many files.
const FILES_MIN: usize = 5_000;
/// And no more than this: the demonstration has four minutes.
const FILES_MAX: usize = 6_500;
/// The large file.
const LARGE_BYTES: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn main() -> ExitCode {
    let started = Instant::now();
    let mut report = Report::default();
    match demonstrate(&mut report) {
        Ok(()) => {
            report.print();
            println!(
                "\nAll bytes verified, everything taken down, {:.0} s.",
                started.elapsed().as_secs_f64()
            );
            ExitCode::SUCCESS
        }
        Err(problem) => {
            report.print();
            eprintln!("\nerror: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn demonstrate(report: &mut Report) -> Outcome {
    let source = Source::find()?;
    step("start 3 managers, 3 meta nodes and 3 data nodes, each a process of its own");
    let started = Instant::now();
    let mut bed = Testbed::start()?;
    report.line("start the cluster", started, 9, 0);
    let first = bed.mount("default")?;
    let second = bed.mount("default")?;
    let expected = copy_under_fire(&bed, &source, &first, report)?;
    verify(&expected, &second, report)?;
    build(&first, report)?;
    version(&first, report)?;
    write_large(&first, &second, report)?;
    show_replicas(&bed, &first)?;
    delete(&bed, &first, report)?;
    step("unmount and stop");
    bed.umount(&second)?;
    bed.umount(&first)?;
    bed.down()
}

/// Real source trees: the crates that the build itself fetched.
struct Source {
    crates: Vec<PathBuf>,
}

impl Source {
    fn find() -> Outcome<Source> {
        let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
        let registry = home.ok_or("neither CARGO_HOME nor HOME is set")?.join("registry/src");
        let mut all = Vec::new();
        for index in directories(&registry)? {
            all.extend(directories(&index)?);
        }
        all.sort();
        let (mut crates, mut files) = (Vec::new(), 0);
        for directory in all {
            if files >= FILES_MIN {
                break;
            }
            let paths = tree::list(&directory)?;
            let count = paths.iter().filter(|path| directory.join(path).is_file()).count();
            if files + count <= FILES_MAX {
                crates.push(directory);
                files += count;
            }
        }
        if files < FILES_MIN {
            let place = registry.display();
            return Err(format!("only {files} source files in {place}; run `cargo fetch` first"));
        }
        Ok(Source { crates })
    }
}

fn directories(path: &Path) -> Outcome<Vec<PathBuf>> {
    let entries = std::fs::read_dir(path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect())
}

/// Copies the source tree while a meta leader and a data node are killed.
fn copy_under_fire(
    bed: &Testbed,
    source: &Source,
    mount: &Mounted,
    report: &mut Report,
) -> Outcome<Tree> {
    step("copy a source tree; kill -9 the leader of a meta partition and a data node meanwhile");
    let target = mount.path.join("src");
    let started = Instant::now();
    let (mut files, mut bytes, mut expected) = (0, 0, Tree::new());
    let victims = [meta_leader(bed)?, bed.process("data2")?.clone()];
    let mut shots = victims.iter();
    for (index, directory) in source.crates.iter().enumerate() {
        let name = directory.file_name().map(PathBuf::from).unwrap_or_default();
        // One at a third of the way, one at two thirds.
        if index * 3 >= source.crates.len() * (3 - shots.len())
            && let Some(victim) = shots.next()
        {
            let pid = victim.kill()?;
            note(&format!("killed {} (pid {pid})", victim.name));
        }
        let before = (files, bytes);
        let copied = tree::copy(directory, &target.join(&name), |f, b| {
            progress(&format!("{} files, {} MiB", before.0 + f, (before.1 + b) / MIB));
        });
        let (copied_files, copied_bytes) = copied?;
        files += copied_files;
        bytes += copied_bytes;
        let tree = tree::read(directory)?;
        expected.insert(name.clone(), "directory".to_owned());
        expected.extend(tree.into_iter().map(|(path, what)| (name.join(path), what)));
    }
    progress_end();
    report.line("copy files, two kills", started, files, bytes);
    Ok(expected)
}

/// The process that leads the first meta partition of the volume: the one of the root directory.
fn meta_leader(bed: &Testbed) -> Outcome<ServerProcess> {
    let partitions = bed.json(&["partition", "list"])?;
    let leader = &partitions["Partitions"]["meta"][0]["leader"];
    let nodes = bed.json(&["node", "list"])?;
    let nodes = nodes.as_array().ok_or("node list is no list")?;
    let node = nodes.iter().find(|node| &node["id"] == leader).ok_or("no meta leader yet")?;
    let address = node["address"].as_str().unwrap_or_default();
    let found = bed.processes().iter().find(|process| process.listen == address);
    found.cloned().ok_or_else(|| format!("nobody listens on {address}"))
}

fn verify(expected: &Tree, mount: &Mounted, report: &mut Report) -> Outcome {
    step("verify every file's checksum through a second mount");
    let started = Instant::now();
    let found = tree::read(&mount.path.join("src"))?;
    let differences = tree::differences(expected, &found);
    if let Some(first) = differences.first() {
        return Err(format!("{} differences, the first: {first}", differences.len()));
    }
    report.line("verify checksums", started, expected.len() as u64, 0);
    Ok(())
}

/// Builds a real program inside the mount: the wire crate of this very workspace, with its tests.
fn build(mount: &Mounted, report: &mut Report) -> Outcome {
    step("build a real program inside the mount and run its tests");
    let workspace =
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).ok_or("no workspace")?;
    let started = Instant::now();
    let target = mount.path.join("build");
    for part in ["crates/types", "crates/wire"] {
        tree::copy(&workspace.join(part), &target.join(part), |_, _| {})?;
    }
    for part in ["Cargo.toml", "Cargo.lock", "clippy.toml"] {
        tree::copy_file(&workspace.join(part), &target.join(part))?;
    }
    let mut cargo = Command::new("cargo");
    cargo.args(["test", "--offline", "--quiet", "-p", "milpa-wire"]).current_dir(&target);
    cargo.env_remove("CARGO_TARGET_DIR");
    run(&mut cargo)?;
    let built = tree::list(&target.join("target"))?.len() as u64;
    report.line("cargo test in the mount", started, built, 0);
    Ok(())
}

fn version(mount: &Mounted, report: &mut Report) -> Outcome {
    step("make a git repository of the tree and check it");
    let started = Instant::now();
    let directory = mount.path.join("src");
    let git = |words: &[&str]| {
        let mut command = Command::new("git");
        command.args(["-c", "user.name=demo", "-c", "user.email=demo@example.invalid"]);
        command.args(["-c", "init.defaultBranch=main", "-c", "gc.auto=0"]);
        run(command.args(words).current_dir(&directory))
    };
    git(&["init", "--quiet"])?;
    git(&["add", "--force", "."])?;
    git(&["commit", "--quiet", "--message", "all"])?;
    git(&["fsck", "--full", "--strict", "--no-progress"])?;
    let objects = tree::list(&directory.join(".git/objects"))?.len() as u64;
    report.line("git add, commit, fsck", started, objects, 0);
    Ok(())
}

fn run(command: &mut Command) -> Outcome {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let tail: Vec<&str> = text.lines().rev().take(10).collect();
    let tail: Vec<&str> = tail.into_iter().rev().collect();
    Err(format!("{command:?}: {}\n{}", output.status, tail.join("\n")))
}

fn write_large(first: &Mounted, second: &Mounted, report: &mut Report) -> Outcome {
    step("write 1 GiB with fsync, read it back through the second mount");
    let path = first.path.join("large");
    let started = Instant::now();
    let written = write_random(&path)?;
    report.line("write 1 GiB and fsync", started, 1, LARGE_BYTES);
    let started = Instant::now();
    let read = tree::digest(&second.path.join("large"))?;
    report.line("read 1 GiB back", started, 1, LARGE_BYTES);
    if read == written { Ok(()) } else { Err(format!("read {read}, wrote {written}")) }
}

/// Bytes that no layer can compress or guess: a xorshift generator is fast and reproducible.
fn write_random(path: &Path) -> Outcome<String> {
    let mut file = File::create(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut chunk = vec![0_u8; MIB as usize];
    let mut hash = Sha256::new();
    for written in 0..LARGE_BYTES / MIB {
        for word in chunk.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        hash.update(&chunk);
        file.write_all(&chunk).map_err(|e| format!("write: {e}"))?;
        progress(&format!("{written} MiB"));
    }
    file.sync_all().map_err(|e| format!("fsync: {e}"))?;
    tree::close(file).map_err(|e| format!("close: {e}"))?;
    progress_end();
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn show_replicas(bed: &Testbed, mount: &Mounted) -> Outcome {
    step("where the replicas lie, and whether they are equal");
    let info = bed.milpa(&["info", &mount.path.join("large").display().to_string()])?;
    for line in info.lines().take(16) {
        println!("    {line}");
    }
    // The killed node may still be catching up.
    let limit = Duration::from_secs(60);
    bed.wait_until("all replicas equal", limit, |bed| {
        progress("comparing");
        bed.milpa(&["partition", "compare"]).is_ok()
    })?;
    progress_end();
    print!("    {}", bed.milpa(&["partition", "compare"])?);
    Ok(())
}

fn delete(bed: &Testbed, mount: &Mounted, report: &mut Report) -> Outcome {
    step("delete everything; the disks get their space back");
    let before = bed.allocated_bytes()?;
    let started = Instant::now();
    let mut count = 0;
    for name in ["src", "build", "large"] {
        let path = mount.path.join(name);
        count += if path.is_dir() { tree::list(&path)?.len() as u64 } else { 1 };
        let removed = if path.is_dir() {
            std::fs::remove_dir_all(&path)
        } else {
            std::fs::remove_file(&path)
        };
        removed.map_err(|e| format!("{}: {e}", path.display()))?;
    }
    report.line("delete", started, count, 0);
    let limit = Duration::from_secs(60);
    bed.wait_until("space given back", limit, |bed| {
        bed.allocated_bytes().is_ok_and(|bytes| bytes < before / 10)
    })?;
    note(&format!(
        "{} MiB allocated before, {} MiB after",
        before / MIB,
        bed.allocated_bytes()? / MIB
    ));
    Ok(())
}

/// The table at the end.
#[derive(Default)]
struct Report {
    lines: Vec<(String, f64, u64, u64)>,
}

impl Report {
    fn line(&mut self, what: &str, started: Instant, count: u64, bytes: u64) {
        self.lines.push((what.to_owned(), started.elapsed().as_secs_f64(), count, bytes));
    }

    fn print(&self) {
        println!(
            "\n{:<26}{:>9}{:>9}{:>11}{:>11}{:>10}",
            "operation", "seconds", "count", "per s", "MiB", "MiB/s"
        );
        for (what, seconds, count, bytes) in &self.lines {
            let rate = *count as f64 / seconds.max(1e-3);
            let (mib, speed) = match bytes / MIB {
                0 => (String::from("-"), String::from("-")),
                mib => (mib.to_string(), format!("{:.0}", mib as f64 / seconds.max(1e-3))),
            };
            println!("{what:<26}{seconds:>9.1}{count:>9}{rate:>11.0}{mib:>11}{speed:>10}");
        }
    }
}

fn step(text: &str) {
    println!("\x1b[1m==> {text}\x1b[0m");
}

fn note(text: &str) {
    progress_end();
    println!("    {text}");
}

/// Rewrites one line on a terminal; silent elsewhere.
fn progress(text: &str) {
    if std::io::stdout().is_terminal() {
        print!("\r    {text}\x1b[K");
        let _ = std::io::stdout().flush();
    }
}

fn progress_end() {
    if std::io::stdout().is_terminal() {
        print!("\r\x1b[K");
    }
}
