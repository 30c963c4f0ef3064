//! `milpa fsck`: clean is what is sound, also in use; what is damaged is found.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use milpa_host::keys::Key;
use milpa_host::rpc::{Credential, Identity, Pool};
use milpa_testbed::Testbed;
use milpa_testbed::load::Writer;
use milpa_types::{BLOCK_BYTES, Epoch, InodeId, MetaSlot, PartitionId, Role, SessionId, VolumeId};
use milpa_wire::data::{Append, AppendTarget, DataAnswer, DataReply, DataRequest};
use milpa_wire::frame::crc32c;
use serde_json::Value;

use crate::{pattern, write_synced};

const WRITER: &str = env!("CARGO_BIN_EXE_milpa-writer");

/// Makes, links, moves and removes files and directories, across partitions, until `stop` is there.
const NAMES_LOAD: &str = r#"
cd "$1" && i=0
for d in 0 1 2 3 4 5 6 7; do mkdir -p d$d; done
while [ ! -e ../stop ]; do
  i=$((i+1)); a=$((i%8)); b=$(((i*5+3)%8))
  echo $i > d$a/f$i && ln d$a/f$i d$b/g$i && mv d$a/f$i d$b/h$i || exit 1
  mkdir d$a/s$i && mv d$a/s$i d$b/t$i && mv d$b/t$i d$a/t$i && rmdir d$a/t$i || exit 1
  rm d$b/g$i || exit 1
  head -c 300000 /dev/urandom > d$a/w && mv d$a/w d$b/large || exit 1
  if [ $((i%3)) = 0 ]; then rm d$b/h$i || exit 1; fi
done
"#;

/// A shell, with what it works on as `$1`.
fn shell(script: &str, directory: &Path) -> Child {
    let mut command = Command::new("sh");
    command
        .args(["-c", script, "load"])
        .arg(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command.spawn().unwrap()
}

/// The report of the one volume, and the exit code.
pub(crate) fn fsck(bed: &Testbed, words: &[&str]) -> (Value, Option<i32>) {
    let output = bed.milpa_output(&[&["--json", "fsck"], words].concat()).unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let reports: Value = serde_json::from_str(&text).unwrap_or_else(|e| {
        panic!("{e}: {text}{}", String::from_utf8_lossy(&output.stderr));
    });
    (reports[0].clone(), output.status.code())
}

#[track_caller]
pub(crate) fn assert_clean(bed: &Testbed) -> Value {
    let (report, code) = fsck(bed, &[]);
    assert_eq!((code, &report["findings"]), (Some(0), &Value::Array(Vec::new())), "{report}");
    report
}

/// A file of each kind: in the inode, shared extent, several packets, with holes, empty, links.
fn make_one_of_each(directory: &Path) {
    let at = |name: &str| directory.join(name);
    for (seed, size) in [0, 100, 10_000, 5_000_000].into_iter().enumerate() {
        write_synced(&at(&format!("f{size}")), &pattern(seed as u64, size)).unwrap();
    }
    let sparse = std::fs::File::create(at("sparse")).unwrap();
    sparse.set_len(100 << 20).unwrap();
    sparse.write_all_at(&pattern(9, 70_000), 50 << 20).unwrap();
    sparse.sync_all().unwrap();
    drop(sparse);
    std::fs::create_dir_all(at("a/b/c")).unwrap();
    std::fs::hard_link(at("f10000"), at("a/b/hard")).unwrap();
    std::os::unix::fs::symlink("nowhere", at("a/symlink")).unwrap();
    let made = Command::new("mkfifo").arg(at("a/b/fifo")).status().unwrap();
    assert!(made.success());
}

#[test]
fn files_of_every_kind_are_clean_and_stay_so_in_use() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    make_one_of_each(&mount.path);
    // Open, without a name.
    let script = "exec 3> \"$1/held\"; echo x >&3; rm \"$1/held\"; echo; read line";
    let mut holder = shell(script, &mount.path);
    holder.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let text = bed.milpa(&["fsck", "default"]).unwrap();
    assert!(text.starts_with("volume default: checked ") && text.ends_with(": clean\n"), "{text}");
    let report = assert_clean(&bed);
    // The root, 6 files with content of their own or none, 3 directories, symlink, fifo, and what is held.
    let (inodes, dentries) = (&report["counts"]["inodes"], &report["counts"]["dentries"]);
    assert_eq!((inodes, dentries), (&12.into(), &11.into()), "{report}");

    let loads: Vec<Child> = ["one", "two"]
        .map(|name| mount.path.join(name))
        .iter()
        .map(|path| {
            std::fs::create_dir(path).unwrap();
            shell(NAMES_LOAD, path)
        })
        .collect();
    let files = mount.path.join("files");
    std::fs::create_dir(&files).unwrap();
    let writer = Writer::start(WRITER, &files).unwrap();
    let (started, mut checks, mut suspects, mut without_file) = (Instant::now(), 0, 0, 0);
    while started.elapsed() < Duration::from_secs(15) {
        let report = assert_clean(&bed);
        checks += 1;
        suspects += report["counts"]["suspects"].as_u64().unwrap_or(0);
        without_file += report["counts"]["unreferenced"].as_u64().unwrap_or(0);
    }
    std::fs::write(mount.path.join("stop"), "").unwrap();
    writer.finish().unwrap();
    for load in loads {
        let output = load.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    println!(
        "{checks} checks in use; {suspects} inodes were looked at again, {without_file} extents were of no file"
    );
    assert!(checks > 5, "{checks} checks");
    assert_clean(&bed);
    drop(holder.stdin.take());
    holder.wait().unwrap();
    assert_clean(&bed);
}

/// Where a file's first bytes lie: data partition, extent, nodes.
pub(crate) fn first_segment(bed: &Testbed, path: &Path) -> (u64, u64, Vec<u64>) {
    let found = bed.json(&["info", &path.display().to_string()]).unwrap();
    let segment = &found["segments"][0];
    let nodes = segment["members"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap());
    (segment["partition"].as_u64().unwrap(), segment["extent"].as_u64().unwrap(), nodes.collect())
}

/// The files of an extent below `directory`.
fn extent_files(directory: &Path, partition: u64, extent: u64) -> Vec<PathBuf> {
    let name = format!("partitions/{partition}/{extent:016x}.extent");
    let all = milpa_testbed::tree::list(directory).unwrap();
    let found = all.into_iter().filter(|path| path.ends_with(&name));
    found.map(|path| directory.join(path)).collect()
}

/// Deletes the files of an extent below `directory`; how many there were.
fn delete_extent(directory: &Path, partition: u64, extent: u64) -> usize {
    let found = extent_files(directory, partition, extent);
    found.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    found.len()
}

/// Changes a byte of an extent in all its files below `directory`; how many there were.
fn rot_extent(directory: &Path, partition: u64, extent: u64, at: u64) -> usize {
    let found = extent_files(directory, partition, extent);
    for path in &found {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
    }
    found.len()
}

#[track_caller]
pub(crate) fn finding(report: &Value, code: &str, path: &str) -> Value {
    let findings = report["findings"].as_array().unwrap();
    let found = findings.iter().find(|it| it["code"] == code && it["path"] == path);
    found.unwrap_or_else(|| panic!("no {code} of {path}: {report}")).clone()
}

/// A block rots on one disk after the other: the operator reads of which file it is, and that it is mended.
#[test]
fn a_block_that_is_damaged_on_every_node_is_told_with_its_file() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let path = mount.path.join("photograph");
    write_synced(&path, &pattern(1, 3_000_000)).unwrap();
    let (partition, extent, nodes) = first_segment(&bed, &path);
    assert_eq!(nodes.len(), 3);
    assert_clean(&bed);
    let at = 12 * BLOCK_BYTES;
    assert_eq!(rot_extent(&bed.data(), partition, extent, at + 10), 3);
    let fresh = bed.mount("default").unwrap();
    let read = std::fs::read(fresh.path.join("photograph")).unwrap_err();
    assert_eq!(read.raw_os_error(), Some(libc::EIO), "{read}");
    let inode = std::fs::metadata(&path).unwrap().ino();
    let log = std::fs::read_to_string(fresh.path.with_file_name("mount2.log")).unwrap();
    let told =
        log.lines().find(|line| line.contains("a block of this file is whole on no replica"));
    assert!(told.is_some_and(|line| line.contains(&format!("inode={inode}"))), "{log}");
    let is_told = |bed: &Testbed| {
        let status = bed.json(&["status"]).unwrap();
        let warnings = status["warnings"].as_array().unwrap();
        let told = "blocks of 4 KiB that are whole on no replica";
        warnings.iter().any(|warning| warning.as_str().unwrap().contains(told))
    };
    bed.wait_until("the status tells of it", Duration::from_secs(60), is_told).unwrap();
    bed.wait_until("all nodes have looked for it", Duration::from_secs(60), |bed| {
        fsck(bed, &[]).0["findings"].as_array().is_some_and(|findings| !findings.is_empty())
    })
    .unwrap();
    let (report, code) = fsck(&bed, &["default"]);
    let found = finding(&report, "lost-bytes", "/photograph");
    assert_eq!((code, report["findings"].as_array().unwrap().len()), (Some(1), 1), "{report}");
    let place =
        format!("{BLOCK_BYTES} bytes in 1 ranges, from {at} on (data partition {partition}");
    assert!(found["text"].as_str().unwrap().starts_with(&place), "{found}");
    let restored = File::options().write(true).open(&path).unwrap();
    let block = &pattern(1, 3_000_000)[at as usize..][..BLOCK_BYTES as usize];
    restored.write_all_at(block, at).unwrap();
    restored.sync_all().unwrap();
    bed.wait_until("the status is silent", Duration::from_secs(60), |bed| !is_told(bed)).unwrap();
    assert_clean(&bed);
    let fresh = bed.mount("default").unwrap();
    assert!(std::fs::read(fresh.path.join("photograph")).unwrap() == pattern(1, 3_000_000));
}

/// While the cluster is down, the file of an extent vanishes from all nodes, and that of another from one,
/// which gets it back.
#[test]
fn bytes_that_no_node_has_are_found_with_their_file() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    std::fs::create_dir(mount.path.join("directory")).unwrap();
    let (lost, whole) = (mount.path.join("directory/lost"), mount.path.join("whole"));
    write_synced(&lost, &pattern(1, 3_000_000)).unwrap();
    write_synced(&whole, &pattern(2, 3_000_000)).unwrap();
    let (partition, extent, nodes) = first_segment(&bed, &lost);
    assert_eq!(nodes.len(), 3);
    let other = first_segment(&bed, &whole);
    assert_clean(&bed);
    bed.down().unwrap();
    assert_eq!(delete_extent(&bed.data(), partition, extent), 3);
    let one = bed.process("data1").unwrap().directory.clone();
    assert_eq!(delete_extent(&one, other.0, other.1), 1);
    bed.up(&[]).unwrap();
    bed.wait_until("one node is made equal again", Duration::from_secs(60), |bed| {
        fsck(bed, &[]).0["findings"].as_array().is_some_and(|findings| findings.len() == 1)
    })
    .unwrap();
    let (report, code) = fsck(&bed, &["default"]);
    let found = finding(&report, "lost-bytes", "/directory/lost");
    assert_eq!((code, report["findings"].as_array().unwrap().len()), (Some(1), 1), "{report}");
    assert!(found["text"].as_str().unwrap().contains("are whole on no replica"), "{found}");
    let said = bed.milpa(&["fsck"]).unwrap_err();
    assert!(
        said.contains("lost-bytes: /directory/lost (inode ") && said.contains("1 FINDINGS"),
        "{said}"
    );
    let fresh = bed.mount("default").unwrap();
    assert!(std::fs::read(fresh.path.join("whole")).unwrap() == pattern(2, 3_000_000));
    // Removing the file removes the finding.
    std::fs::remove_file(fresh.path.join("directory/lost")).unwrap();
    assert_clean(&bed);
}

/// Appends bytes to an extent of its own for a file of this inode, as a client would that never tells the
/// inode's partition.
fn write_for(bed: &Testbed, inode: InodeId, bytes: Vec<u8>) {
    let list = bed.json(&["partition", "list", "default"]).unwrap();
    let partition = &list["Partitions"]["data"][0];
    let number = |key: &str| partition[key].as_u64().unwrap();
    let append = Append {
        partition: PartitionId(number("id")),
        epoch: Epoch(number("epoch")),
        inode,
        session: SessionId(4711),
        file_offset: 0,
        target: AppendTarget::New { token: inode.0 },
        sync: true,
        checksums: bytes.chunks(BLOCK_BYTES as usize).map(crc32c).collect(),
    };
    let nodes = bed.json(&["node", "list"]).unwrap();
    let nodes = nodes.as_array().unwrap();
    let primary = nodes.iter().find(|node| node["id"] == partition["primary"]).unwrap();
    let address = primary["address"].as_str().unwrap().parse().unwrap();
    let key = Key::from_hex(&bed.milpa(&["volume", "key", "default"]).unwrap()).unwrap();
    let credential = Credential::Volume { name: "default".to_owned(), key };
    let identity = Identity::new(None, Role::Client, credential);
    identity.set_volume(VolumeId(number("volume") as u32));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let reply: DataReply = runtime.unwrap().block_on(async {
        let pool = Pool::new(Arc::new(identity));
        let request = DataRequest::Append(append);
        let wait = Duration::from_secs(10);
        pool.call(address, Role::Data, &request, bytes.into(), wait).await.unwrap().0
    });
    assert!(matches!(reply, Ok(DataAnswer::Appended { offset: 0, .. })), "{reply:?}");
}

/// How long each data node waits for a writer.
fn set_silence(bed: &Testbed, writer_silent_ms: i64) {
    for process in bed.processes().iter().filter(|process| process.role == "data") {
        let path = process.directory.join("config.toml");
        let mut table: toml::Table = std::fs::read_to_string(&path).unwrap().parse().unwrap();
        table.insert("writer_silent_ms".to_owned(), toml::Value::Integer(writer_silent_ms));
        std::fs::write(&path, toml::to_string(&table).unwrap()).unwrap();
    }
}

/// Findings as (code, inode, what was repaired).
fn strays(report: &Value) -> Vec<(&str, u64, Option<&str>)> {
    let findings = report["findings"].as_array().unwrap().iter();
    let told = |it: &Value| (it["code"].clone(), it["inode"].as_u64().unwrap());
    assert!(findings.clone().map(told).all(|(code, _)| code == "stray-bytes"), "{report}");
    findings
        .map(|it| ("stray-bytes", it["inode"].as_u64().unwrap(), it["repair"].as_str()))
        .collect()
}

/// Bytes took space on the data nodes for ever, in no file and on nobody's list, and every check was clean.
/// Now what no partition can have freed is found at once, and what no data node has offered for longer than it
/// should take; that goes when the nodes are started again, as docs/operations.md says.
#[test]
fn bytes_that_no_file_refers_to_and_nobody_frees_are_found() {
    let mut bed = Testbed::start().unwrap();
    bed.down().unwrap();
    set_silence(&bed, 3_600_000);
    bed.up(&[]).unwrap();
    let mount = bed.mount("default").unwrap();
    write_synced(&mount.path.join("file"), &pattern(1, 3_000_000)).unwrap();
    let report = assert_clean(&bed);
    assert_eq!(report["counts"]["unreferenced"], 0, "{report}");

    let (unknown, deleted) = (MetaSlot(1000).first_inode(), InodeId(1 << 39));
    write_for(&bed, unknown, pattern(2, 300_000));
    let started = Instant::now();
    let (report, code) = fsck(&bed, &["default"]);
    assert_eq!((code, strays(&report)), (Some(1), vec![("stray-bytes", unknown.0, None)]));
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    let text = report["findings"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("300000 bytes in 1 extents (first extent "), "{text}");

    write_for(&bed, deleted, pattern(3, 200_000));
    let (report, code) = fsck(&bed, &["--repair", "--patience", "5"]);
    let found = strays(&report);
    let inodes: Vec<u64> = found.iter().map(|it| it.1).collect();
    assert_eq!((code, inodes), (Some(1), vec![deleted.0, unknown.0]), "{report}");
    assert!(found.iter().all(|it| it.2.unwrap().starts_with("not repaired: ")), "{report}");
    let said = bed.milpa(&["fsck", "--patience", "5"]).unwrap_err();
    assert!(
        said.contains(" extents (2 of no file, up to ") && said.contains("2 FINDINGS"),
        "{said}"
    );

    bed.down().unwrap();
    set_silence(&bed, 1_000);
    bed.up(&[]).unwrap();
    bed.wait_until("the data nodes have it freed", Duration::from_secs(60), |bed| {
        strays(&fsck(bed, &["--patience", "0"]).0) == [("stray-bytes", unknown.0, None)]
    })
    .unwrap();
    let fresh = bed.mount("default").unwrap();
    assert!(std::fs::read(fresh.path.join("file")).unwrap() == pattern(1, 3_000_000));
}

/// What a killed client had sent and not published is of no file, until its session has ended and a data node has
/// asked. That takes its time, and nothing is wrong. Beside a client that is killed in the middle of a stream
/// there are bytes for a file by a session that nobody knows any more, so that there are some for sure.
#[test]
fn bytes_of_a_client_that_was_killed_are_no_finding() {
    let mut bed = Testbed::start_tuned(&[], |process, table| {
        let settings = match process.role.as_str() {
            "meta" => ("session_lease_ms", 2_000),
            "data" => ("writer_silent_ms", 15_000),
            _ => return,
        };
        table.insert(settings.0.to_owned(), toml::Value::Integer(settings.1));
    })
    .unwrap();
    let mount = bed.mount("default").unwrap();
    let script = "exec 3> \"$1/file\"; echo; while head -c 3000000 /dev/urandom >&3; do :; done";
    let mut writer = shell(script, &mount.path);
    writer.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let file = std::fs::metadata(mount.path.join("file")).unwrap();
    bed.wait_until("bytes of the file are on their way", Duration::from_secs(30), |_| {
        std::fs::metadata(mount.path.join("file")).is_ok_and(|file| file.len() > 30_000_000)
    })
    .unwrap();
    milpa_testbed::kill(mount.pid().unwrap()).unwrap();
    writer.wait().unwrap();
    write_for(&bed, InodeId(file.ino()), pattern(1, 500_000));
    // Who does not wait sees what looks like a leak.
    let (report, _) = fsck(&bed, &["--patience", "0"]);
    finding(&report, "stray-bytes", "/file");
    // Before the killed client's session has ended, until all of it is gone.
    let mut most = 0;
    bed.wait_until("nothing is of no file", Duration::from_secs(120), |bed| {
        let started = Instant::now();
        let report = assert_clean(bed);
        let unreferenced = report["counts"]["unreferenced"].as_u64().unwrap();
        println!("{unreferenced} extents of no file, clean after {:?}", started.elapsed());
        most = unreferenced.max(most);
        unreferenced == 0
    })
    .unwrap();
    assert!(most > 0, "everything was part of the file: that proved nothing");
}
