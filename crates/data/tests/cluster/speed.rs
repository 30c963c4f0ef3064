//! Rates of three nodes on one machine: run by hand, in release mode, with `--ignored`.

use std::time::Instant;

use milpa_wire::data::AppendTarget;

use crate::nodes::{Cluster, pattern};
use crate::{join_all, run};

const PACKET: usize = 128 << 10;

#[test]
#[ignore = "a measurement, not a check"]
fn rates() {
    run(async |cluster| {
        stream(cluster).await;
        pieces(cluster).await;
        reads_and_overwrites(cluster).await;
    });
}

/// 512 MiB in two extents, 16 packets in flight.
async fn stream(cluster: &Cluster) {
    let bytes = pattern(1, PACKET);
    let started = Instant::now();
    let mut total = 0;
    for token in 0..2 {
        let new = AppendTarget::New { token };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        for window in 0..127u64 {
            let packets = (0..16u64).map(|packet| {
                let offset = (window * 16 + packet + 1) * PACKET as u64;
                cluster.append(1, 1, AppendTarget::Extent { extent, offset }, &bytes)
            });
            for result in join_all(packets).await {
                result.unwrap();
            }
            total += 16 * PACKET;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("append: {:.0} MiB/s, three copies", total as f64 / seconds / 1048576.0);
}

/// 20,000 small files of 4 KiB, 64 in flight; then one at a time.
async fn pieces(cluster: &Cluster) {
    let bytes = pattern(2, 4096);
    let small = |token| cluster.append(1, 1, AppendTarget::Small { token }, &bytes);
    let started = Instant::now();
    for window in 0..312u64 {
        for result in join_all((0..64).map(|piece| small(window * 64 + piece))).await {
            result.unwrap();
        }
    }
    println!("small, 64 in flight: {:.0}/s", 19_968.0 / started.elapsed().as_secs_f64());
    let started = Instant::now();
    for token in 100_000..102_000 {
        small(token).await.unwrap();
    }
    println!("small, one at a time: {:.0}/s", 2_000.0 / started.elapsed().as_secs_f64());
}

async fn reads_and_overwrites(cluster: &Cluster) {
    let bytes = pattern(3, PACKET);
    let new = AppendTarget::New { token: 77_777_777 };
    let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
    let started = Instant::now();
    for _ in 0..2_000 {
        cluster.read(2, extent, 0..PACKET as u64, false).await.unwrap();
    }
    let rate = 2_000.0 / started.elapsed().as_secs_f64();
    println!("read of 128 KiB, one at a time: {rate:.0}/s");
    let started = Instant::now();
    for _ in 0..500 {
        cluster.overwrite(&[1, 2, 3], 1, extent, 4096, &bytes[..4096]).await;
    }
    let rate = 500.0 / started.elapsed().as_secs_f64();
    println!("overwrite of 4 KiB, one at a time, leader looked up each time: {rate:.0}/s");
}
