//! The client against a cluster that runs: `milpa up`, then
//!
//! ```text
//! MILPA_TEST_MANAGERS=127.0.0.1:7436 MILPA_TEST_SECRET=DIR/cluster.key \
//!     cargo test -p milpa-client --test real_cluster -- --ignored
//! ```
//!
//! The volume is the one that `milpa up` makes, with id 1. It works in a directory of its own and removes it.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(clippy::unwrap_used, clippy::panic)] // a test crate: clippy sees its functions as any

use std::path::Path;

use bytes::Bytes;
use milpa_client::{Client, ClientConfig, Creation, OpenFlags};
use milpa_host::keys::Key;
use milpa_types::{InodeId, Name, VolumeId};

const OWNER: Creation = Creation { mode: 0o755, uid: 0, gid: 0 };

async fn connect() -> Client {
    let setting = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let managers = setting("MILPA_TEST_MANAGERS");
    let managers = managers.split(',').map(|address| address.parse().unwrap()).collect();
    let secret = Key::read(Path::new(&setting("MILPA_TEST_SECRET"))).unwrap();
    let key = secret.volume_key(VolumeId(1));
    Client::connect(ClientConfig::new(managers, "default", key)).await.unwrap()
}

fn pattern(seed: u64, length: usize) -> Bytes {
    let byte = |i: usize| ((i as u64 ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8;
    (0..length).map(byte).collect::<Vec<u8>>().into()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a running cluster"]
async fn files_written_here_are_read_elsewhere() {
    let (writer, reader) = (connect().await, connect().await);
    let top = format!("/client-test-{}", std::process::id());
    writer.make_directories(top.as_bytes(), OWNER).await.unwrap();
    for length in [0, 100, 512, 513, 100_000, 131_072, 131_073, 5_000_000] {
        let path = format!("{top}/f{length}");
        let content = pattern(length as u64, length);
        writer.write_path(path.as_bytes(), content.clone(), OWNER, true).await.unwrap();
        assert!(reader.read_path(path.as_bytes()).await.unwrap() == content, "{length} bytes");
    }
    random_writes(&writer, &reader, &format!("{top}/f5000000")).await;
    unlinked_while_open(&writer, &top).await;
    writer.remove_tree(top.as_bytes()).await.unwrap();
    writer.shutdown().await.unwrap();
    reader.shutdown().await.unwrap();
}

async fn random_writes(writer: &Client, reader: &Client, path: &str) {
    let inode = writer.resolve(path.as_bytes(), true).await.unwrap().inode;
    let opened = writer.open(inode, OpenFlags::read_write()).await.unwrap();
    let mut model = writer.read_path(path.as_bytes()).await.unwrap();
    for i in 0..50 {
        let at = (i * 1_299_709) % (model.len() + 10_000);
        let data = pattern(i as u64, 4096);
        model.resize(model.len().max(at + 4096), 0);
        model[at..at + 4096].copy_from_slice(&data);
        writer.write(opened.handle, at as u64, data, false).await.unwrap();
        if i % 7 == 0 {
            writer.fsync(opened.handle, false).await.unwrap();
        }
    }
    writer.flush(opened.handle).await.unwrap();
    writer.release(opened.handle).await.unwrap();
    assert!(reader.read_path(path.as_bytes()).await.unwrap() == model);
}

async fn unlinked_while_open(client: &Client, top: &str) {
    let parent = client.resolve(top.as_bytes(), true).await.unwrap().inode;
    assert_ne!(parent, InodeId::ROOT);
    let name = Name::new(b"temporary").unwrap();
    let opened = client.create(parent, &name, OWNER, OpenFlags::read_write()).await.unwrap();
    client.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    client.unlink(parent, &name).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    let seen = client.read(opened.handle, 0, 1 << 20).await.unwrap().concat();
    assert!(seen == pattern(1, 200_000));
    client.release(opened.handle).await.unwrap();
}
