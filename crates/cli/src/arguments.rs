//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// The POSIX distributed file system for servers that already have another job.
#[derive(Debug, Parser)]
#[command(name = "milpa", version, arg_required_else_help = true, after_help = EXAMPLES)]
pub struct Arguments {
    /// Cluster file, or the data directory of an embedded cluster
    /// [default: /var/lib/milpa, or ~/.local/share/milpa for ordinary users]
    #[arg(long, global = true, env = "MILPA_CLUSTER", value_name = "FILE")]
    pub cluster: Option<PathBuf>,
    /// Print JSON instead of tables
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  milpa up --mount /mnt/milpa           a whole cluster on this machine, mounted
  milpa status                          how it is
  milpa volume create photos            another volume
  milpa mount photos /mnt/photos        and its mount
  milpa info /mnt/photos/cat.jpg        where the bytes of a file lie
  milpa umount /mnt/photos
  milpa down                            stop everything; `milpa up` brings it back";

/// All commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a whole cluster on this machine: 3 managers, 3 meta nodes, 3 data nodes
    #[command(after_help = "\
Examples:
  milpa up
  milpa up --mount /mnt/milpa
  milpa up --data /disk1/milpa,/disk2/milpa,/disk3/milpa --nodes 6")]
    Up(Up),
    /// Stop the cluster that `milpa up` started; its data stays
    Down(Down),
    /// The cluster in one look
    Status,
    /// Mount a volume
    #[command(after_help = "\
Examples:
  milpa mount default /mnt/milpa
  milpa mount photos /mnt/photos -o ro
  milpa mount photos /mnt/photos --managers 10.0.0.1:7400,10.0.0.2:7400 --key-file photos.key
In /etc/fstab (after `make install`):
  10.0.0.1:7400,10.0.0.2:7400/photos  /mnt/photos  milpa  key_file=/etc/milpa/photos.key,_netdev  0 0")]
    Mount(Mount),
    /// Unmount
    Umount(Umount),
    /// Create, list, change and delete volumes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Look at the servers, empty or remove one
    #[command(subcommand)]
    Node(NodeCommand),
    /// Empty a disk of a data node
    #[command(subcommand)]
    Disk(DiskCommand),
    /// What is being repaired and moved
    #[command(subcommand)]
    Task(TaskCommand),
    /// Look at the partitions
    #[command(subcommand)]
    Partition(PartitionCommand),
    /// Check volumes for damage while they are in use
    #[command(after_help = "\
Examples:
  milpa fsck                    all volumes
  milpa fsck photos --json
  milpa fsck --repair           and mend what is safe to mend
  milpa fsck --patience 600     bytes of clients that died have ten minutes to go
Exit code: 0 nothing is wrong, 1 something is, 2 it could not be checked.
docs/operations.md says what each finding means and what to do.")]
    Fsck {
        /// Only this volume
        volume: Option<String>,
        /// Mend what can be mended without losing anything, and say what was done
        #[arg(long)]
        repair: bool,
        /// How long to wait for bytes of no file to be deleted before they count as stray. Give more where the data
        /// nodes' `writer_silent_ms` is more than a minute
        #[arg(long, value_name = "SECONDS", default_value_t = milpa_fsck::PATIENCE.as_secs(),
              value_parser = clap::value_parser!(u64).range(..=86_400))]
        patience: u64,
    },
    /// Inode, layout and replicas of a file on a mounted volume
    Info {
        /// A file or directory below a mount point
        path: PathBuf,
    },
    /// Make the cluster file and key of a new cluster of several machines
    #[command(after_help = "\
Example: a cluster of three machines. On one of them:
  milpa init --managers 10.0.0.1:7400,10.0.0.2:7400,10.0.0.3:7400 /etc/milpa
then copy /etc/milpa to the others, write a config for each process with `milpa config`, and
start one manager, one meta and one data process on each machine.")]
    Init {
        /// Where the three managers will listen
        #[arg(long, value_delimiter = ',', required = true)]
        managers: Vec<SocketAddr>,
        /// Directory for cluster.toml and cluster.key
        directory: PathBuf,
    },
    /// Print a config file with the default of every field
    Config {
        /// For which role
        role: ServerRole,
    },
    /// Run a manager (stays in the foreground)
    Manager(Serve),
    /// Run a meta node (stays in the foreground)
    Meta(Serve),
    /// Run a data node (stays in the foreground)
    Data(Serve),
    /// Print a completion script for a shell
    #[command(after_help = "Example: milpa completion bash > /etc/bash_completion.d/milpa")]
    Completion {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Keep the processes of an embedded cluster running (`milpa up` starts this)
    #[command(hide = true)]
    Supervise {
        /// The data directory
        directory: PathBuf,
    },
}

impl Command {
    /// Whether the command asks and prints, and serves nobody.
    pub fn only_prints(&self) -> bool {
        matches!(
            self,
            Command::Status
                | Command::Volume(_)
                | Command::Node(_)
                | Command::Disk(_)
                | Command::Task(_)
                | Command::Partition(_)
                | Command::Fsck { .. }
                | Command::Info { .. }
                | Command::Config { .. }
                | Command::Completion { .. }
        )
    }
}

/// The roles of servers.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ServerRole {
    /// Knows who, where and what policy
    Manager,
    /// Holds names and inodes
    Meta,
    /// Holds file content
    Data,
}

/// `milpa up`.
#[derive(Debug, Args)]
pub struct Up {
    /// Mount the volume `default` here when the cluster is ready
    #[arg(long, value_name = "DIR")]
    pub mount: Option<PathBuf>,
    /// Data directories; several are spread over the data nodes
    #[arg(long, value_delimiter = ',', value_name = "DIR")]
    pub data: Vec<PathBuf>,
    /// Number of data nodes [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(3..=64))]
    pub nodes: Option<u16>,
    /// Number of meta nodes [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(3..=64))]
    pub meta_nodes: Option<u16>,
}

/// `milpa down`.
#[derive(Debug, Args)]
pub struct Down {
    /// The data directory, if not the default one
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Detach mounts that are in use, too
    #[arg(long)]
    pub force: bool,
}

/// `milpa mount`.
#[derive(Debug, Args)]
pub struct Mount {
    /// The volume's name
    pub volume: String,
    /// An existing directory
    pub directory: PathBuf,
    /// Options, comma-separated: ro, allow_other (default for root), noallow_other, nosuid, nodev, noexec,
    /// io_deadline=SECONDS (60), hard (wait for ever), buffer=MIB (64), threads=N
    #[arg(short = 'o', value_delimiter = ',', value_name = "OPTION")]
    pub options: Vec<String>,
    /// Managers to ask, instead of a cluster file
    #[arg(long, value_delimiter = ',', requires = "key_file")]
    pub managers: Vec<SocketAddr>,
    /// File with the volume's access key (`milpa volume key NAME`)
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// Stay in the foreground, log to standard error
    #[arg(long)]
    pub foreground: bool,
    /// Serve /metrics of this mount here
    #[arg(long, value_name = "IP:PORT")]
    pub http_listen: Option<SocketAddr>,
    /// Write logs to this file [default: logs/mount-VOLUME.log of a cluster of `milpa up`; of others
    /// /var/log/milpa/mount-DIR.log, or ~/.local/state/milpa/mount-DIR.log for ordinary users]
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
}

/// `milpa umount`.
#[derive(Debug, Args)]
pub struct Umount {
    /// The mount point
    pub directory: PathBuf,
    /// Detach it even if it is in use
    #[arg(long)]
    pub force: bool,
}

/// `milpa volume …`.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Create a volume
    #[command(after_help = "Example: milpa volume create photos --capacity 500GiB --replicas 3")]
    Create {
        /// 1 to 64 of a-z 0-9 - _
        name: String,
        /// Its options
        #[command(flatten)]
        options: VolumeOptionArguments,
        /// Meta partitions at the start [default: one for each meta node, at least 3]
        #[arg(long)]
        meta_partitions: Option<u32>,
        /// Data partitions at the start [default: 6]
        #[arg(long)]
        data_partitions: Option<u32>,
    },
    /// List all volumes
    List,
    /// Everything about one volume
    Info {
        /// Its name
        name: String,
    },
    /// Change a volume's options
    Set {
        /// Its name
        name: String,
        /// The options to change
        #[command(flatten)]
        options: VolumeOptionArguments,
    },
    /// Delete a volume and all its files
    Delete {
        /// Its name
        name: String,
        /// Do not ask
        #[arg(short = 'y', long)]
        yes: bool,
    },
    /// Print the key that mounts a volume
    Key {
        /// Its name
        name: String,
    },
    /// Add partitions now instead of when the volume's are nearly full
    Grow {
        /// Its name
        name: String,
        /// Meta partitions to add; each splits off the inode range that follows
        #[arg(long, default_value_t = 0)]
        meta_partitions: u32,
        /// Data partitions to add
        #[arg(long, default_value_t = 0)]
        data_partitions: u32,
    },
}

/// Options of a volume, each optional.
#[derive(Debug, Args)]
pub struct VolumeOptionArguments {
    /// What `df` shows and writes may fill, such as 500GiB; 0 for as much as the disks hold
    #[arg(long, value_parser = crate::size::parse_bytes)]
    pub capacity: Option<u64>,
    /// Copies of the data: 2 to 7
    #[arg(long)]
    pub replicas: Option<u8>,
    /// When fsync returns: with the bytes on the disks of all replicas, or in their memory. With
    /// "memory" a power cut may lose bytes that fsync has acknowledged in the last seconds; a killed
    /// process loses nothing. Names and attributes are on the disks of a majority either way
    #[arg(long, value_enum)]
    pub durability: Option<DurabilityArgument>,
    /// Files up to this size live in their inode: 0 to 4KiB
    #[arg(long, value_parser = crate::size::parse_bytes)]
    pub inline_max: Option<u64>,
    /// Files up to this size share extents: 0 to 128KiB
    #[arg(long, value_parser = crate::size::parse_bytes)]
    pub small_file_max: Option<u64>,
    /// Inodes and dentries after which a meta partition is split: 1,000 or more
    #[arg(long)]
    pub meta_partition_entries_max: Option<u64>,
}

/// `--durability`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum DurabilityArgument {
    /// On disk (the default of a new volume)
    Synced,
    /// In memory of the replicas
    Memory,
}

/// `milpa node …`.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// List all meta and data nodes with their disks
    List,
    /// Move everything off a node, which stays in service until it is empty
    #[command(after_help = "Example: milpa node drain 105, then watch: milpa task list")]
    Drain {
        /// Its id, as `milpa node list` shows it
        node: u32,
        /// Take the node back into service instead
        #[arg(long)]
        undo: bool,
    },
    /// Forget a node: one that is empty, or one that has stopped and will not come back
    Remove {
        /// Its id, as `milpa node list` shows it
        node: u32,
        /// Do not ask
        #[arg(short = 'y', long)]
        yes: bool,
    },
}

/// `milpa disk …`.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Move everything off a disk, which stays in service until it is empty
    #[command(after_help = "Example: milpa disk drain 105 2, then watch: milpa task list")]
    Drain {
        /// The node's id, as `milpa node list` shows it
        node: u32,
        /// The disk's id on that node
        disk: u32,
        /// Take the disk back into service instead
        #[arg(long)]
        undo: bool,
    },
}

/// `milpa task …`.
#[derive(Debug, Subcommand)]
pub enum TaskCommand {
    /// List replicas being made, and nodes and disks being emptied
    List,
}

/// `milpa partition …`.
#[derive(Debug, Subcommand)]
pub enum PartitionCommand {
    /// List partitions
    List {
        /// Only of this volume
        volume: Option<String>,
    },
    /// Compare the replicas of data partitions byte by byte, and those of meta partitions by hash
    Compare {
        /// Only of this volume
        volume: Option<String>,
    },
}

/// `milpa manager|meta|data`.
#[derive(Debug, Args)]
pub struct Serve {
    /// The node's directory
    pub directory: PathBuf,
    /// Its config file [default: config.toml in the directory]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}
