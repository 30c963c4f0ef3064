//! Three nodes with real files, real threads and the loop of the crate's documentation, joined by
//! channels instead of sockets.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use milpa_raft::{
    Committed, FileStorage, Frame, LogWriter, MultiRaft, Outbox, Payload, RaftConfig, RaftDriver,
    Role, Turn, Wal, WalOptions,
};
use milpa_types::{NodeId, PartitionId};
use tokio::sync::mpsc;

type Link = mpsc::UnboundedSender<(NodeId, Bytes)>;

struct Node {
    id: NodeId,
    links: BTreeMap<NodeId, Link>,
    applied: BTreeMap<PartitionId, Vec<Bytes>>,
    leads: usize,
}

impl Outbox for Node {
    fn send(&mut self, to: NodeId, frame: Frame) {
        let _ = self.links[&to].send((self.id, frame.encode()));
    }

    fn apply(&mut self, group: PartitionId, entries: Vec<Committed>) -> Option<u64> {
        let last = entries.last().map(|entry| entry.position.index);
        let applied = self.applied.entry(group).or_default();
        applied.extend(entries.into_iter().filter_map(|entry| match entry.payload {
            Payload::Data(data) => Some(data),
            _ => None,
        }));
        last
    }

    fn perform(&mut self, turn: Turn) {
        self.leads += turn.roles.iter().filter(|role| role.role == Role::Leader).count();
    }
}

fn open(directory: &Path, id: NodeId) -> (RaftDriver, usize) {
    let options = WalOptions {
        segment_bytes: 4 << 20,
        first_segment_bytes: 1 << 20,
        ..WalOptions::new([id.0 as u8 + 1; 16], 99)
    };
    let (wal, recovered) = Wal::open(FileStorage::open(directory).unwrap(), options).unwrap();
    assert_eq!(recovered.damaged, []);
    let mut multi = MultiRaft::new(id, RaftConfig::default(), u64::from(id.0)).unwrap();
    let count = recovered.groups.len();
    assert_eq!(multi.recover(recovered, &BTreeMap::new(), 0), []);
    (RaftDriver::new(multi, LogWriter::spawn(wal).unwrap()), count)
}

/// Proposes `per_group` entries to each group this node leads, and stops when all are applied.
async fn run(
    mut driver: RaftDriver,
    mut node: Node,
    mut frames: mpsc::UnboundedReceiver<(NodeId, Bytes)>,
    groups: u64,
    per_group: usize,
) -> (Node, RaftDriver) {
    let start = Instant::now();
    let clock = || start.elapsed().as_millis() as u64;
    let mut ticks = tokio::time::interval(driver.multi.tick_interval());
    let mut proposed = vec![0; groups as usize + 1];
    let mut done_at: Option<Instant> = None;
    loop {
        tokio::select! {
            Some((from, bytes)) = frames.recv() => {
                driver.multi.step_frame(from, bytes, clock()).unwrap();
                while let Ok((from, bytes)) = frames.try_recv() {
                    driver.multi.step_frame(from, bytes, clock()).unwrap();
                }
            }
            _ = ticks.tick() => driver.multi.tick(clock()),
            progress = driver.writer.progressed() => driver.on_log(progress, clock()),
        }
        for group in 1..=groups {
            let count = &mut proposed[group as usize];
            let data = Bytes::from(vec![group as u8; 200]);
            for _ in 0..16 {
                if *count < per_group
                    && driver.multi.propose(PartitionId(group), data.clone()).is_ok()
                {
                    *count += 1;
                }
            }
        }
        driver.pump(clock(), &mut node).unwrap();
        let is_done = (1..=groups).all(|group| {
            node.applied.get(&PartitionId(group)).is_some_and(|all| all.len() >= per_group)
        });
        // Stay a little, so that the others can finish too.
        if is_done && done_at.get_or_insert_with(Instant::now).elapsed().as_millis() > 500 {
            return (node, driver);
        }
        assert!(start.elapsed() < Duration::from_secs(30), "stuck: {proposed:?}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn three_nodes_with_real_logs_agree_and_come_back() {
    let (groups, per_group) = (10, 500);
    let directory = tempfile::tempdir().unwrap();
    let ids = [NodeId(0), NodeId(1), NodeId(2)];
    let paths = ids.map(|id| directory.path().join(id.to_string()));
    let (senders, receivers): (Vec<_>, Vec<_>) =
        ids.iter().map(|_| mpsc::unbounded_channel()).unzip();
    let links: BTreeMap<NodeId, Link> = ids.into_iter().zip(senders).collect();
    let start = Instant::now();
    let mut tasks = Vec::new();
    for (id, frames) in ids.into_iter().zip(receivers) {
        let (mut driver, _) = open(&paths[id.0 as usize], id);
        for group in 1..=groups {
            let first = group % 3;
            let voters: Vec<NodeId> = (0..3).map(|i| ids[(i + first as usize) % 3]).collect();
            let campaigns = voters[0] == id;
            assert!(driver.multi.create_group(PartitionId(group), &voters, &[], campaigns));
        }
        let node = Node { id, links: links.clone(), applied: BTreeMap::new(), leads: 0 };
        tasks.push(run(driver, node, frames, groups, per_group));
    }
    let [c, b, a] = [tasks.pop(), tasks.pop(), tasks.pop()].map(Option::unwrap);
    let (a, b, c) = tokio::join!(a, b, c);
    let results = [a, b, c];
    let elapsed = start.elapsed();
    for (node, driver) in &results {
        println!("{:?} {} leads, {:?}", node.id, node.leads, driver.writer.stats());
        assert_eq!(node.applied, results[0].0.applied);
    }
    println!("{} entries of {groups} groups in {elapsed:?}", groups as usize * per_group);
    drop(results);
    for id in ids {
        let (driver, count) = open(&paths[id.0 as usize], id);
        assert_eq!(count, groups as usize);
        let status = driver.multi.status(PartitionId(1)).unwrap();
        assert!(status.last_index > per_group as u64);
    }
}
