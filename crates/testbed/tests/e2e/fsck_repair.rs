//! `milpa fsck --repair`: what is damaged is mended in use, without losing anything.
//!
//! The damage is done by an operator who lies: a repair says how many names were counted, and a partition takes
//! the asker's word for it, as it cannot see names elsewhere (`meta/src/core/repair.rs`).

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use milpa_host::keys::Key;
use milpa_host::rpc::{Credential, Identity, Pool};
use milpa_testbed::Testbed;
use milpa_types::{InodeId, PartitionId, Role, Timestamp};
use milpa_wire::check::{LookedInode, MetaCheck, MetaChecked, MetaRepair};
use milpa_wire::meta::{MetaAnswer, MetaReply, MetaRequest};
use serde_json::Value;

use super::fsck::{assert_clean, finding, fsck};
use super::repair::{finish, first_meta_partition, start_load};
use crate::{pattern, write_synced};

const WAIT: Duration = Duration::from_secs(10);

/// Who has the cluster's secret, and speaks to the partition of the volume's first inodes.
struct Operator {
    secret: Key,
    partition: PartitionId,
    leader: SocketAddr,
}

impl Operator {
    fn of(bed: &Testbed) -> Operator {
        let secret = Key::read(&bed.data().join("cluster.key")).unwrap();
        let first = first_meta_partition(bed);
        let nodes = bed.json(&["node", "list"]).unwrap();
        let leads = |node: &&Value| node["id"] == first["leader"];
        let leader = nodes.as_array().unwrap().iter().find(leads).unwrap();
        Operator {
            secret,
            partition: PartitionId(first["id"].as_u64().unwrap()),
            leader: leader["address"].as_str().unwrap().parse().unwrap(),
        }
    }

    fn ask(&self, request: &MetaRequest) -> MetaAnswer {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let credential = Credential::Cluster(self.secret.clone());
        let identity = Arc::new(Identity::new(None, Role::Admin, credential));
        let (reply, _): (MetaReply, Bytes) = runtime
            .block_on(Pool::new(identity).call(
                self.leader,
                Role::Meta,
                request,
                Bytes::new(),
                WAIT,
            ))
            .unwrap();
        reply.unwrap()
    }

    fn look(&self, inode: InodeId) -> LookedInode {
        let check = MetaCheck::Names { inodes: vec![inode] };
        let request = MetaRequest::Check { partition: self.partition, check };
        match self.ask(&request) {
            MetaAnswer::Checked(MetaChecked::Names(looked)) => looked[0].inode.unwrap(),
            other => panic!("not names: {other:?}"),
        }
    }

    fn damage(&self, repair: MetaRepair) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let now = Timestamp(now.as_nanos() as i64);
        let request = MetaRequest::Repair { partition: self.partition, now, repair };
        assert_eq!(self.ask(&request), MetaAnswer::Done);
    }

    /// The file has so many names, it says.
    fn set_links(&self, inode: InodeId, links: u32) {
        let changed = self.look(inode).changed;
        self.damage(MetaRepair::SetLinks { inode, changed, links });
    }

    /// No name names it, it says.
    fn delete(&self, inode: InodeId) {
        let changed = self.look(inode).changed;
        self.damage(MetaRepair::DeleteInode { inode, changed });
    }
}

fn create(path: &Path, bytes: &[u8]) -> InodeId {
    write_synced(path, bytes).unwrap();
    InodeId(std::fs::metadata(path).unwrap().ino())
}

/// What was done about the finding of this code that is about an inode.
#[track_caller]
fn repair_of(report: &Value, code: &str, inode: InodeId) -> String {
    let findings = report["findings"].as_array().unwrap();
    let found = findings.iter().find(|it| it["code"] == code && it["inode"] == inode.0);
    let found = found.unwrap_or_else(|| panic!("no {code} of inode {inode}: {report}"));
    found["repair"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn what_is_safe_to_mend_is_mended_in_use_and_the_rest_is_left_alone() {
    let mut bed = Testbed::start().unwrap();
    let load = start_load(&mut bed);
    let at = |name: &str| load.mount.path.join(name);
    let content = pattern(1, 300_000);
    let counted = create(&at("counted"), &content);
    let dangling = create(&at("dangling"), b"");
    let empty = create(&at("empty"), b"");
    let wanted = create(&at("wanted"), &content);
    assert_clean(&bed);

    let operator = Operator::of(&bed);
    operator.set_links(counted, 5);
    operator.delete(dangling);
    // With a link too many, the last name goes and the inode stays.
    for (inode, name) in [(empty, "empty"), (wanted, "wanted")] {
        operator.set_links(inode, 2);
        std::fs::remove_file(at(name)).unwrap();
    }

    let (report, code) = fsck(&bed, &["default"]);
    assert_eq!((code, report["findings"].as_array().unwrap().len()), (Some(1), 4), "{report}");
    finding(&report, "wrong-links", "/counted");
    for (what, inode) in [("missing-inode", dangling), ("no-name", empty), ("no-name", wanted)] {
        assert_eq!(repair_of(&report, what, inode), "", "nobody asked for it");
    }

    let (report, code) = fsck(&bed, &["default", "--repair"]);
    assert_eq!((code, report["findings"].as_array().unwrap().len()), (Some(1), 4), "{report}");
    assert_eq!(repair_of(&report, "wrong-links", counted), "repaired: link count is 1");
    assert_eq!(repair_of(&report, "missing-inode", dangling), "repaired: name removed");
    assert_eq!(repair_of(&report, "no-name", empty), "repaired: deleted");
    // It holds something that may be wanted: a person decides.
    let left = repair_of(&report, "no-name", wanted);
    assert!(left.starts_with("not repaired: "), "{left}");

    let (report, _) = fsck(&bed, &["default"]);
    assert_eq!(report["findings"].as_array().unwrap().len(), 1, "{report}");
    repair_of(&report, "no-name", wanted);
    assert_eq!(operator.look(wanted).size, content.len() as u64, "nothing of it is lost");

    let fresh = bed.mount("default").unwrap();
    let mut names: Vec<_> =
        std::fs::read_dir(&fresh.path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["counted", "files"]);
    let path = fresh.path.join("counted");
    assert_eq!(std::fs::metadata(&path).unwrap().nlink(), 1);
    assert!(std::fs::read(&path).unwrap() == content);
    // With the count right again its last name takes it along.
    std::fs::remove_file(&path).unwrap();
    let (report, _) = fsck(&bed, &["default"]);
    assert_eq!(report["findings"].as_array().unwrap().len(), 1, "{report}");
    finish(&mut bed, load);
}
