//! A million inodes: what they cost in memory, and how soon a restarted meta node serves them.

use std::time::{Duration, Instant};

use milpa_client::{Client, ClientConfig, Creation};
use milpa_host::keys::Key;
use milpa_testbed::{Outcome, Testbed};
use milpa_types::{FileKind, InodeId, Name};

/// Files in one directory.
const FILES_PER_DIRECTORY: u64 = 10_000;
/// Creations under way at once.
const IN_FLIGHT: usize = 256;

/// Creates the files, then restarts each meta node.
pub fn run(files: u64) -> Outcome {
    let bed = Testbed::start()?;
    let empty = memory_of_meta_nodes(&bed);
    let started = Instant::now();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|e| e.to_string())?;
    runtime.block_on(fill(&bed, files))?;
    let seconds = started.elapsed().as_secs_f64();
    println!("created {files} files in {seconds:.1} s: {:.0}/s", files as f64 / seconds);
    let full = memory_of_meta_nodes(&bed);
    for ((name, before), (_, after)) in empty.iter().zip(&full) {
        let grown = after.saturating_sub(*before);
        println!("{name}: {} MiB more, {} bytes a file", grown >> 20, grown / files.max(1));
    }
    for name in ["meta1", "meta2", "meta3"] {
        let process = bed.process(name)?;
        process.kill()?;
        let started = Instant::now();
        bed.wait_until("serving again", Duration::from_secs(60), |_| {
            serves(&process.http_listen, files)
        })?;
        let (seconds, memory) = (started.elapsed().as_secs_f64(), process.memory_bytes());
        let each = memory.unwrap_or(0) / files.max(1);
        println!(
            "{name}: killed, serving {files} inodes again after {seconds:.1} s; {each} bytes a file"
        );
    }
    Ok(())
}

fn memory_of_meta_nodes(bed: &Testbed) -> Vec<(String, u64)> {
    let metas = bed.processes().iter().filter(|process| process.role == "meta");
    metas.map(|process| (process.name.clone(), process.memory_bytes().unwrap_or(0))).collect()
}

/// Whether the node's own metrics say that it holds so many inodes again.
fn serves(http: &str, files: u64) -> bool {
    milpa_testbed::metric(http, "milpa_meta_inodes").is_some_and(|inodes| inodes >= files as f64)
}

/// One directory with so many files: `ls -f`, `ls -l`, and what the mount takes in memory.
pub fn directory(files: u64) -> Outcome {
    let mut bed = Testbed::start()?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|e| e.to_string())?;
    let started = Instant::now();
    runtime.block_on(async {
        let client = connect(&bed).await?;
        let creation = Creation { mode: 0o755, uid: 0, gid: 0 };
        let made = client.mkdir(InodeId::ROOT, &name("large")?, creation).await;
        create(&client, made.map_err(|e| e.to_string())?.inode, files, creation).await?;
        client.shutdown().await.map_err(|e| e.to_string())
    })?;
    println!("created {files} files in {:.1} s", started.elapsed().as_secs_f64());
    let mount = bed.mount("default")?;
    let pid = mount.pid()?;
    for arguments in ["-f", "-l", "-lU"] {
        let started = Instant::now();
        let mut ls = std::process::Command::new("ls");
        let output = ls.arg(arguments).arg(mount.path.join("large")).output();
        let output = output.map_err(|e| e.to_string())?;
        let lines = String::from_utf8_lossy(&output.stdout).lines().count();
        let memory = milpa_testbed::memory_bytes(pid).unwrap_or(0) >> 20;
        let seconds = started.elapsed().as_secs_f64();
        println!(
            "ls {arguments:<3}: {lines} lines in {seconds:.2} s; the mount takes {memory} MiB"
        );
    }
    bed.umount(&mount)?;
    bed.down()
}

async fn fill(bed: &Testbed, files: u64) -> Outcome {
    let client = connect(bed).await?;
    let creation = Creation { mode: 0o644, uid: 0, gid: 0 };
    let directories = files.div_ceil(FILES_PER_DIRECTORY);
    for directory in 0..directories {
        let name = name(&format!("dir{directory:05}"))?;
        let made = client.mkdir(InodeId::ROOT, &name, creation).await.map_err(|e| e.to_string())?;
        let count = FILES_PER_DIRECTORY.min(files - directory * FILES_PER_DIRECTORY);
        create(&client, made.inode, count, creation).await?;
    }
    client.shutdown().await.map_err(|e| e.to_string())
}

async fn create(client: &Client, parent: InodeId, count: u64, creation: Creation) -> Outcome {
    let mut under_way = tokio::task::JoinSet::new();
    for number in 0..count {
        if under_way.len() >= IN_FLIGHT {
            finish(under_way.join_next().await)?;
        }
        // Sixteen bytes, as the aim says.
        let (client, name) = (client.clone(), name(&format!("file-{number:011}"))?);
        under_way.spawn(async move {
            client.mknod(parent, &name, FileKind::File, 0, creation).await.map(drop)
        });
    }
    while let Some(joined) = under_way.join_next().await {
        finish(Some(joined))?;
    }
    Ok(())
}

pub(crate) fn finish<E: std::fmt::Display>(
    joined: Option<Result<Result<(), E>, tokio::task::JoinError>>,
) -> Outcome {
    match joined {
        Some(Ok(Err(error))) => Err(error.to_string()),
        Some(Err(error)) => Err(error.to_string()),
        _ => Ok(()),
    }
}

pub(crate) fn name(text: &str) -> Outcome<Name> {
    Name::new(text.as_bytes()).map_err(|e| e.to_string())
}

pub(crate) async fn connect(bed: &Testbed) -> Outcome<Client> {
    let key = bed.milpa(&["volume", "key", "default"])?;
    let key = Key::from_hex(&key).map_err(|e| e.to_string())?;
    let managers = bed.processes().iter().filter(|process| process.role == "manager");
    let managers: Result<Vec<_>, _> = managers.map(|process| process.listen.parse()).collect();
    let config = ClientConfig::new(managers.map_err(|e| format!("{e}"))?, "default", key);
    Client::connect(config).await.map_err(|e| e.to_string())
}
