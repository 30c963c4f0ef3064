//! Space: what is deleted comes back, what is full says so.

use std::time::Duration;

use milpa_testbed::{Testbed, tree};

use crate::{pattern, write_synced};

#[test]
fn deleted_files_leave_no_inode_and_give_their_space_back() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let before = bed.allocated_bytes().unwrap();
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
    tree::copy(&source, &mount.path.join("tree"), |_, _| {}).unwrap();
    write_synced(&mount.path.join("large"), &pattern(1, 40 << 20)).unwrap();
    bed.wait_until("allocated", Duration::from_secs(10), |bed| {
        bed.allocated_bytes().is_ok_and(|bytes| bytes > before + (120 << 20))
    })
    .unwrap();
    std::fs::remove_dir_all(mount.path.join("tree")).unwrap();
    std::fs::remove_file(mount.path.join("large")).unwrap();
    bed.wait_until("space given back", Duration::from_secs(60), |bed| {
        bed.allocated_bytes().is_ok_and(|bytes| bytes < before + (1 << 20))
    })
    .unwrap();
    let volumes = bed.json(&["volume", "list"]).unwrap();
    assert_eq!(volumes[0]["inodes"], 1, "only the root directory remains: {volumes}");
}
