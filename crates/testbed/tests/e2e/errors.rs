//! Bad input and missing servers: one clear line that says what to do, a non-zero exit, and
//! nothing changed.

use std::net::TcpListener;
use std::path::Path;

use milpa_testbed::Testbed;

/// Runs a command that must fail, checks what a person reads, and gives the exit code.
#[track_caller]
fn check(bed: &Testbed, words: &[&str], parts: &[&str]) -> Option<i32> {
    let output = bed.milpa_output(words).unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "milpa {} succeeded", words.join(" "));
    assert!(text.starts_with("error: "), "{text}");
    for part in parts {
        assert!(text.contains(part), "milpa {}: {part:?} is not in\n{text}", words.join(" "));
    }
    assert!(!text.contains("panicked"), "{text}");
    output.status.code()
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn wrong_names_keys_and_mount_points() {
    let mut bed = Testbed::start().unwrap();
    let free = bed.scratch().join("free");
    std::fs::create_dir(&free).unwrap();
    let free = shown(&free);
    let code = check(&bed, &["mount", "nosuch", &free], &["no volume named \"nosuch\""]);
    assert_eq!(code, Some(1));
    let missing = shown(&bed.scratch().join("missing"));
    check(&bed, &["mount", "default", &missing], &["No such file", "mkdir"]);
    let file = bed.scratch().join("file");
    std::fs::write(&file, "precious").unwrap();
    check(&bed, &["mount", "default", &shown(&file)], &["not a directory"]);
    let mounted = bed.mount("default").unwrap();
    check(&bed, &["mount", "default", &shown(&mounted.path)], &["already a mount point"]);
    check(&bed, &["mount", "default", &free, "-o", "writeback"], &["unknown mount option"]);
    check(&bed, &["umount", &free], &["not a MilpaFS mount point"]);
    check(&bed, &["volume", "create", "Bad Name"], &["Bad Name"]);
    check(&bed, &["volume", "create", "x", "--replicas", "9"], &["replicas", "2 to 7"]);
    check(&bed, &["volume", "delete", "default"], &["--yes"]);
    check(&bed, &["volume", "info", "nosuch"], &["nosuch", "milpa volume list"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    let busy = std::fs::File::create(mounted.path.join("open")).unwrap();
    check(&bed, &["umount", &shown(&mounted.path)], &["busy", "--force"]);
    drop(busy);

    let key = bed.scratch().join("wrong.key");
    std::fs::write(&key, "ab".repeat(32)).unwrap();
    let manager = bed.process("manager1").unwrap().listen.clone();
    let log = shown(&bed.scratch().join("refused.log"));
    let words = ["mount", "default", &free, "--managers", &manager, "--key-file", &shown(&key)];
    let words = [&words[..], &["--log-file", &log]].concat();
    check(&bed, &words, &["wrong access key"]);
    std::fs::write(&key, "short").unwrap();
    check(&bed, &words, &["64 hexadecimal digits"]);
}

#[test]
fn who_gets_eio_finds_in_a_log_who_did_not_answer() {
    let bed = Testbed::start().unwrap();
    let directory = bed.scratch().join("mounted");
    std::fs::create_dir(&directory).unwrap();
    bed.milpa(&["mount", "default", &shown(&directory), "-o", "io_deadline=2"]).unwrap();
    let meta = || bed.processes().iter().filter(|process| process.role == "meta");
    let signal_all = |signal| meta().for_each(|server| assert!(server.signal(signal).is_ok()));
    signal_all(libc::SIGSTOP);
    let failed = std::fs::write(directory.join("file"), "x").unwrap_err();
    signal_all(libc::SIGCONT);
    assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{failed}");
    let log = std::fs::read_to_string(bed.data().join("logs/mount-default.log")).unwrap();
    let given_up = log.lines().find(|line| line.contains("gave up")).unwrap_or_default();
    assert!(meta().any(|server| given_up.contains(&server.listen)), "{log}");
    bed.milpa(&["umount", &shown(&directory)]).unwrap();
}

#[test]
fn absent_managers_and_foreign_directories() {
    let mut bed = Testbed::start().unwrap();
    let (data, scratch) = (bed.data(), bed.scratch().to_owned());
    let foreign = scratch.join("photos");
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("cat.jpg"), "precious").unwrap();
    check(&bed, &["up", "--data", &shown(&foreign)], &["something else", "--data"]);
    check(&bed, &["up", "--data", &shown(&data), "--nodes", "5"], &["has 3 data nodes, not 5"]);
    bed.down().unwrap();
    let unreachable = ["managers cannot be reached", "milpa up"];
    let free = shown(&scratch);
    let mount = ["mount", "default", &free];
    for words in [&["status"][..], &mount] {
        assert_eq!(check(&bed, words, &unreachable), Some(2), "{words:?}");
    }
    check(&bed, &["--cluster", "/nonexistent", "status"], &["cannot read the cluster file"]);
    assert_eq!(std::fs::read_to_string(foreign.join("cat.jpg")).unwrap(), "precious");

    let meta = bed.process("meta1").unwrap().clone();
    let squatter = TcpListener::bind(&meta.listen).unwrap();
    check(&bed, &["up", "--data", &shown(&data)], &["meta1 cannot listen on", "stop the process"]);
    drop(squatter);

    let config = meta.directory.join("config.toml");
    let good = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("leese_ms = 3\n{good}")).unwrap();
    check(&bed, &["meta", &shown(&meta.directory)], &["unknown field `leese_ms`"]);
    std::fs::write(&config, good.replace("proposals_max = 20000", "proposals_max = 0")).unwrap();
    check(&bed, &["meta", &shown(&meta.directory)], &["proposals_max"]);
    std::fs::write(&config, &good).unwrap();

    // The directory of another cluster: its identity does not fit.
    let other = scratch.join("other");
    let words = ["init", "--managers", "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", &shown(&other)];
    bed.milpa(&words).unwrap();
    let file = shown(&other.join("cluster.toml"));
    let words = ["--cluster", &file, "meta", &shown(&meta.directory)];
    check(&bed, &words, &["belongs to cluster", "use another directory"]);
    bed.up(&[]).unwrap();
    bed.milpa(&["status"]).unwrap();
}

#[test]
fn help_of_every_command_has_examples_or_options() {
    let bed_free = milpa_testbed::program().unwrap();
    for words in [&["--help"][..], &["up", "--help"], &["mount", "--help"], &["volume", "--help"]] {
        let output = std::process::Command::new(&bed_free).args(words).output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("Usage"), "{words:?}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let output =
            std::process::Command::new(&bed_free).args(["completion", shell]).output().unwrap();
        assert!(output.status.success() && output.stdout.len() > 1000, "{shell}");
    }
}
