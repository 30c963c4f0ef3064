//! `milpa mount`, `milpa umount`, and `mount -t milpa` through `mount.milpa`.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use milpa_client::{Client, ClientConfig, ConnectError};
use milpa_fuse::adapter::Adapter;
use milpa_fuse::{MountError, MountOptions, Session, Unmount};
use milpa_host::keys::Key;
use milpa_host::{descriptors, telemetry};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};
use tokio::signal::unix::{SignalKind, signal};

use super::{ask, info, mount_log, unexpected};
use crate::arguments::{Mount, Umount};
use crate::cluster::Cluster;
use crate::cluster::process::{Running, open_log};
use crate::failure::{Blame, Failure, Outcome};

/// What the mounted process writes to its parent once the mount can be used.
const READY: &str = "ready";

/// How long the process behind a mount may take to send what is buffered after an unmount.
const END_WAIT: Duration = Duration::from_secs(70);

/// Mounts: in the foreground, or in a process of its own that is ready when this returns.
pub fn mount(arguments: &Mount, cluster: Option<&Path>) -> Outcome {
    if arguments.foreground {
        return serve(arguments, cluster);
    }
    check_mount_point(&arguments.directory)?;
    let mut words: Vec<String> = vec!["mount".into(), arguments.volume.clone()];
    words.push(arguments.directory.display().to_string());
    for option in &arguments.options {
        words.extend(["-o".into(), option.clone()]);
    }
    for manager in &arguments.managers {
        words.extend(["--managers".into(), manager.to_string()]);
    }
    let named = [("--key-file", &arguments.key_file), ("--log-file", &arguments.log_file)];
    for (flag, path) in named {
        if let Some(path) = path {
            words.extend([flag.into(), path.display().to_string()]);
        }
    }
    if let Some(address) = arguments.http_listen {
        words.extend(["--http-listen".into(), address.to_string()]);
    }
    if let Some(path) = cluster {
        words.extend(["--cluster".into(), path.display().to_string()]);
    }
    let log = match &arguments.log_file {
        Some(path) => open_log(path).map(Stdio::from).map_err(|e| {
            Failure::user(format!("cannot write the log {}", path.display())).because(&e)
        })?,
        None => default_log(arguments, cluster),
    };
    spawn(&words, log)
}

/// A mount does not fail for the log that nobody asked for.
fn default_log(arguments: &Mount, cluster: Option<&Path>) -> Stdio {
    let is_from_file = arguments.managers.is_empty();
    let cluster = is_from_file.then(|| Cluster::find(cluster).ok()).flatten();
    match mount_log::open(&arguments.volume, &arguments.directory, cluster.as_ref()) {
        Ok(log) => log.into(),
        Err(error) => {
            eprintln!(
                "warning: this mount will not log: {error}\n  fix: name a file with --log-file"
            );
            Stdio::null()
        }
    }
}

/// Mounts a volume of an embedded cluster in the background.
pub fn mount_in_background(cluster: &Cluster, volume: &str, directory: &Path) -> Outcome {
    let words = [
        "--cluster".to_owned(),
        cluster.path.display().to_string(),
        "mount".to_owned(),
        volume.to_owned(),
        directory.display().to_string(),
    ];
    let log = mount_log::open(volume, directory, Some(cluster)).map_err(|e| {
        Failure::user(format!("cannot write the log of the mount of {volume}")).because(&e)
    })?;
    spawn(&words, log.into())
}

/// Starts the process behind a mount and waits for its word.
fn spawn(words: &[String], log: Stdio) -> Outcome {
    let failed = |e: std::io::Error| Failure::user("cannot start the mount process").because(&e);
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(words).arg("--foreground").stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(log).process_group(0);
    let mut child = command.spawn().map_err(failed)?;
    let mut report = String::new();
    if let Some(stdout) = child.stdout.take() {
        let mut lines = BufReader::new(stdout).lines();
        for line in lines.by_ref().map_while(Result::ok) {
            if line == READY {
                return Ok(());
            }
            report.push_str(&line);
            report.push('\n');
        }
    }
    let ended = child.wait().map_err(failed)?;
    // The child has printed its whole failure already, in our words; its exit code says whose it is.
    let text = report.trim_end().trim_start_matches("error: ");
    let failure = match text {
        "" => Failure::user(format!("the mount process ended without a word: {ended}")),
        text => Failure::user(text),
    };
    let is_clusters = ended.code() == Some(Blame::Cluster as i32);
    Err(if is_clusters { failure.of_cluster() } else { failure })
}

/// The process behind a mount.
fn serve(arguments: &Mount, cluster: Option<&Path>) -> Outcome {
    telemetry::init_logs();
    if let Err(error) = descriptors::raise_limit() {
        tracing::warn!(%error, "cannot raise RLIMIT_NOFILE");
    }
    let result = Options::parse(&arguments.options)
        .and_then(|options| serve_source(arguments, &options, Source::find(arguments, cluster)?));
    if let Err(failure) = &result {
        // For the parent, which reads our standard output until "ready", and is gone after that.
        let _ = writeln!(std::io::stdout(), "{failure}");
    }
    result
}

fn serve_source(arguments: &Mount, options: &Options, source: Source) -> Outcome {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(options.workers)
        .enable_all()
        .build()
        .map_err(|e| Failure::user("cannot start the runtime").because(&e))?;
    runtime.block_on(async {
        let client = connect(arguments, options, source).await?;
        if let Some(address) = arguments.http_listen {
            let routes = telemetry::http_routes();
            telemetry::serve_http(address, routes).await.map_err(|e| {
                Failure::user(format!("cannot serve metrics on {address}")).because(&e)
            })?;
        }
        let session = attach(arguments, options, client.clone())?;
        let mut parent = std::io::stdout();
        let _ = writeln!(parent, "{READY}").and_then(|()| parent.flush());
        wait_for_end(session).await?;
        client
            .shutdown()
            .await
            .map_err(|e| Failure::cluster("some written bytes could not be stored").because(&e))
    })
}

async fn connect(arguments: &Mount, options: &Options, source: Source) -> Outcome<Client> {
    let mut config = ClientConfig::new(source.managers, &arguments.volume, source.key);
    config.cluster = source.cluster;
    config.io_deadline = options.io_deadline;
    config.buffer_bytes = options.buffer_bytes;
    Client::connect(config).await.map_err(|error| {
        let what = format!("cannot mount volume {:?}: {error}", arguments.volume);
        match error {
            ConnectError::Unreachable { .. } => Failure::cluster(what),
            _ => Failure::user(what),
        }
    })
}

fn attach(arguments: &Mount, options: &Options, client: Client) -> Outcome<Session> {
    let identity = client.cluster();
    let description = serde_json::json!({
        "pid": std::process::id(),
        "volume": arguments.volume,
        "cluster": identity.to_string(),
    });
    let adapter =
        Adapter::new(client, tokio::runtime::Handle::current(), description.to_string().into());
    let mount_options = MountOptions {
        fsname: format!("milpa:{identity}/{}", arguments.volume),
        allow_other: options.allow_other,
        read_only: options.read_only,
        no_suid: options.no_suid,
        no_devices: options.no_devices,
        no_exec: options.no_exec,
        no_atime: options.no_atime,
        ..MountOptions::default()
    };
    milpa_fuse::mount(Arc::new(adapter), &arguments.directory, &mount_options)
        .map_err(|error| mount_failure(&arguments.directory, &error))
}

fn mount_failure(directory: &Path, error: &MountError) -> Failure {
    let failure = Failure::user(format!("cannot mount on {}", directory.display())).because(error);
    match error {
        MountError::MountPointMissing { .. } => {
            failure.fix(format!("mkdir {}", directory.display()))
        }
        MountError::NotADirectory { .. } => failure.fix("name a directory"),
        MountError::AlreadyMounted { .. } => {
            failure.fix("unmount what is there, or name another directory")
        }
        MountError::StaleMount { .. } => failure.fix(format!("umount {}", directory.display())),
        MountError::NoDevice { .. } => failure.fix("load the kernel module: modprobe fuse"),
        _ => failure,
    }
}

/// Finds the usual mistakes before anything is started.
pub fn check_mount_point(directory: &Path) -> Outcome {
    let shown = directory.display();
    let metadata = std::fs::metadata(directory).map_err(|e| {
        let failure = Failure::user(format!("mount point {shown} cannot be used")).because(&e);
        match e.raw_os_error() {
            Some(libc::ENOENT) => failure.fix(format!("mkdir {shown}")),
            Some(libc::ENOTCONN) => {
                failure.fix(format!("a mount whose process is gone is there: umount {shown}"))
            }
            _ => failure,
        }
    })?;
    if !metadata.is_dir() {
        let what = format!("mount point {shown} is not a directory");
        return Err(Failure::user(what).fix("name a directory"));
    }
    let path = directory.canonicalize().unwrap_or(directory.to_owned());
    if let Some(mounted) = mounts()?.into_iter().rfind(|m| m.directory == path) {
        let what = format!("{shown} is already a mount point (of {})", mounted.source);
        return Err(Failure::user(what).fix("unmount what is there, or name another directory"));
    }
    Ok(())
}

/// Waits until somebody unmounts; SIGTERM and SIGINT ask us to do it.
async fn wait_for_end(session: Session) -> Outcome {
    let failed = |e: std::io::Error| Failure::user("cannot wait for signals").because(&e);
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let session = Arc::new(session);
    let waiting = Arc::clone(&session);
    let mut ended = tokio::task::spawn_blocking(move || waiting.wait());
    loop {
        tokio::select! {
            _ = &mut ended => return Ok(()),
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let asked = Arc::clone(&session);
        let result = tokio::task::spawn_blocking(move || asked.unmount(Unmount::Clean)).await;
        if let Ok(Err(error)) = result {
            tracing::warn!(%error, "asked to end, but the mount is in use; detached: it ends when the last file is closed");
            let asked = Arc::clone(&session);
            let _ = tokio::task::spawn_blocking(move || asked.unmount(Unmount::Detach)).await;
        }
    }
}

/// `milpa umount`.
pub fn umount(arguments: &Umount) -> Outcome {
    unmount(&arguments.directory, arguments.force)
}

/// Unmounts, and waits until the process behind the mount has ended: then all is stored.
pub fn unmount(directory: &Path, force: bool) -> Outcome {
    let shown = directory.display();
    let path = match directory.canonicalize() {
        Ok(path) => path,
        // A mount whose process is gone cannot be looked at, only detached.
        Err(_) => std::path::absolute(directory).unwrap_or(directory.to_owned()),
    };
    if !mounts()?.iter().any(|m| m.directory == path && m.kind == "fuse.milpa") {
        return Err(Failure::user(format!("{shown} is not a MilpaFS mount point")));
    }
    // Who does not wait for it must not ask for it: a hard mount answers when its servers do.
    let server = if force { None } else { server_of(&path) };
    let flags = if force { libc::MNT_DETACH } else { 0 };
    umount2(&path, flags).map_err(|e| {
        let failure = Failure::user(format!("cannot unmount {shown}")).because(&e);
        match e.raw_os_error() {
            Some(libc::EBUSY) => failure.fix(format!(
                "close the files below it (`fuser -vm {shown}` shows who has them), or add --force"
            )),
            _ => failure,
        }
    })?;
    match server {
        Some(server) if !server.wait(END_WAIT) => Err(Failure::cluster(format!(
            "{shown} is unmounted, but its process has not ended"
        ))
        .fix("it still tries to store what was written; look at the cluster with `milpa status`")),
        _ => Ok(()),
    }
}

/// The process behind a mount, as it tells itself.
fn server_of(path: &Path) -> Option<Running> {
    let mount = info::mount_of(path).ok()?;
    Running::find(i32::try_from(mount["pid"].as_i64()?).ok()?, &["mount"])
}

#[allow(unsafe_code)]
fn umount2(path: &Path, flags: i32) -> std::io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: a NUL-terminated path and flags of umount2(2).
    match unsafe { libc::umount2(path.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// One line of the mount table.
struct MountLine {
    directory: PathBuf,
    kind: String,
    source: String,
}

fn mounts() -> Outcome<Vec<MountLine>> {
    let text = std::fs::read_to_string("/proc/self/mounts")
        .map_err(|e| Failure::user("cannot read the mount table").because(&e))?;
    let line = |line: &str| {
        let mut fields = line.split(' ');
        let source = unescape(fields.next()?);
        let directory = PathBuf::from(unescape(fields.next()?));
        Some(MountLine { directory, kind: fields.next()?.to_owned(), source })
    };
    Ok(text.lines().filter_map(line).collect())
}

/// fstab(5): space, tab, newline and backslash are octal.
fn unescape(field: &str) -> String {
    let pairs = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    pairs.iter().fold(field.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

/// Where volumes of this cluster are mounted on this machine.
pub fn mounts_of(cluster: &Cluster) -> Outcome<Vec<PathBuf>> {
    let prefix = format!("milpa:{}/", cluster.id);
    let ours = |m: &MountLine| m.kind == "fuse.milpa" && m.source.starts_with(&prefix);
    Ok(mounts()?.into_iter().filter(ours).map(|m| m.directory).collect())
}

/// Whom to ask, and with which key.
struct Source {
    managers: Vec<SocketAddr>,
    key: Key,
    cluster: Option<milpa_types::ClusterId>,
}

impl Source {
    fn find(arguments: &Mount, cluster: Option<&Path>) -> Outcome<Source> {
        let key = match &arguments.key_file {
            Some(path) => {
                let read = Key::read(path);
                Some(read.map_err(|e| Failure::user("cannot read the volume's key").because(&e))?)
            }
            None => None,
        };
        if let (Some(key), false) = (&key, arguments.managers.is_empty()) {
            let managers = arguments.managers.clone();
            return Ok(Source { managers, key: key.clone(), cluster: None });
        }
        let cluster = Cluster::find(cluster)?;
        let key = match key {
            Some(key) => key,
            None => volume_key(&cluster, &arguments.volume)?,
        };
        let managers = cluster.file.managers.clone();
        Ok(Source { managers, key, cluster: Some(cluster.id) })
    }
}

/// Whoever has the cluster's secret may ask for any volume's key.
fn volume_key(cluster: &Cluster, volume: &str) -> Outcome<Key> {
    let request = ManagerRequest::GetVolumeKey { name: volume.to_owned() };
    match ask(cluster, &request)? {
        ManagerAnswer::Key(hex) => Key::from_hex(&hex)
            .map_err(|e| Failure::cluster("the manager gave a bad key").because(&e)),
        other => Err(unexpected(&other)),
    }
}

/// `-o` options.
#[derive(Debug)]
struct Options {
    read_only: bool,
    allow_other: bool,
    no_suid: bool,
    no_devices: bool,
    no_exec: bool,
    no_atime: bool,
    io_deadline: Option<Duration>,
    buffer_bytes: u64,
    workers: usize,
}

impl Options {
    fn parse(words: &[String]) -> Outcome<Options> {
        let mut options = Options {
            read_only: false,
            allow_other: true,
            no_suid: true,
            no_devices: true,
            no_exec: false,
            no_atime: false,
            io_deadline: Some(Duration::from_secs(60)),
            buffer_bytes: 64 << 20,
            workers: 2,
        };
        for word in words.iter().filter(|word| !word.is_empty()) {
            options.apply(word)?;
        }
        Ok(options)
    }

    fn apply(&mut self, word: &str) -> Outcome {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let number = || {
            let bad = || Failure::user(format!("mount option {word:?}: a number is needed"));
            value.parse::<u64>().map_err(|_| bad())
        };
        match name {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" => self.allow_other = true,
            "noallow_other" => self.allow_other = false,
            "suid" => self.no_suid = false,
            "nosuid" => self.no_suid = true,
            "dev" => self.no_devices = false,
            "nodev" => self.no_devices = true,
            "exec" => self.no_exec = false,
            "noexec" => self.no_exec = true,
            "noatime" => self.no_atime = true,
            "hard" => self.io_deadline = None,
            "io_deadline" | "io-deadline" => match number()? {
                0 => {
                    return Err(Failure::user(format!("mount option {word:?}: 1 s at least"))
                        .fix("`hard` waits for ever"));
                }
                seconds => self.io_deadline = Some(Duration::from_secs(seconds)),
            },
            "buffer" => self.buffer_bytes = number()?.saturating_mul(1 << 20),
            "threads" => self.workers = (number()? as usize).clamp(1, 64),
            // What mount(8) passes on and means nothing to us.
            "defaults" | "_netdev" | "nofail" | "auto" | "noauto" | "user" | "users" | "atime"
            | "relatime" | "async" => {}
            _ => {
                return Err(Failure::user(format!("unknown mount option {word:?}"))
                    .fix("`milpa mount --help` lists them"));
            }
        }
        Ok(())
    }
}

/// `mount.milpa SPEC DIR [-sfnv] [-o OPTIONS]`, as mount(8) calls it. SPEC is
/// `IP:PORT,IP:PORT/VOLUME`, or just a volume with `-o cluster=FILE`.
pub fn helper(words: &[String]) -> Outcome {
    let mut positional = Vec::new();
    let mut options = Vec::new();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        match word.as_str() {
            "-o" => options
                .extend(rest.next().into_iter().flat_map(|o| o.split(',')).map(str::to_owned)),
            flag if flag.starts_with('-') => {}
            plain => positional.push(plain.to_owned()),
        }
    }
    let [spec, directory] = positional.as_slice() else {
        return Err(Failure::user("usage: mount.milpa MANAGERS/VOLUME DIR [-o OPTIONS]"));
    };
    let take = |options: &mut Vec<String>, name: &str| {
        let at = options.iter().position(|o| o.split_once('=').is_some_and(|(n, _)| n == name))?;
        options.remove(at).split_once('=').map(|(_, value)| PathBuf::from(value))
    };
    let (key_file, cluster) = (take(&mut options, "key_file"), take(&mut options, "cluster"));
    let log_file = take(&mut options, "log_file");
    let (managers, volume) = spec.rsplit_once('/').unwrap_or(("", spec));
    let managers: Result<Vec<SocketAddr>, _> =
        managers.split(',').filter(|m| !m.is_empty()).map(str::parse).collect();
    let managers = managers.map_err(|e| {
        Failure::user(format!("{spec:?} is not IP:PORT,IP:PORT/VOLUME")).because(&e)
    })?;
    if !managers.is_empty() && key_file.is_none() {
        return Err(Failure::user("the volume's key is needed")
            .fix("add key_file=FILE to the options (`milpa volume key NAME` prints the key)"));
    }
    let arguments = Mount {
        volume: volume.to_owned(),
        directory: PathBuf::from(directory),
        options,
        managers,
        key_file,
        foreground: false,
        http_listen: None,
        log_file,
    };
    mount(&arguments, cluster.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_options_table() {
        let parse = |words: &[&str]| {
            Options::parse(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>())
        };
        let options = parse(&["ro", "_netdev", "io_deadline=5", "buffer=8"]).unwrap();
        assert!(options.read_only);
        assert_eq!(options.io_deadline, Some(Duration::from_secs(5)));
        assert_eq!(options.buffer_bytes, 8 << 20);
        assert!(parse(&["io_deadline=0"]).unwrap_err().to_string().contains("hard"));
        assert_eq!(parse(&["hard"]).unwrap().io_deadline, None);
        let failure = parse(&["writeback"]).unwrap_err().to_string();
        assert!(failure.contains("\"writeback\""), "{failure}");
        assert!(parse(&["buffer=lots"]).is_err());
    }

    #[test]
    fn the_mount_helper_names_what_is_missing() {
        let help = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
            helper(&words).unwrap_err().to_string()
        };
        assert!(help(&["x"]).contains("usage"));
        assert!(help(&["1.2.3.4:5/v", "/mnt"]).contains("key_file"));
        assert!(help(&["nonsense:x/v", "/mnt", "-o", "ro,key_file=k"]).contains("is not IP:PORT"));
    }
}
