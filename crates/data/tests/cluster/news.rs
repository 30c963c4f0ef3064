//! When the managers hear what they may be waiting for.

use std::time::{Duration, Instant};

use milpa_types::Epoch;

use super::nodes::{self, configuration};
use super::run;

/// A repair takes several steps, and each waits for the one before to be reported.
#[test]
fn news_do_not_wait_for_the_next_heartbeat() {
    run(async |cluster| {
        for node in [1, 2, 3] {
            cluster.kill_node(node).await;
            cluster.forget_heard(node);
            cluster.start_rarely_heard_node(node).await;
        }
        let heard = async |epoch, node| {
            nodes::until("the epoch is heard", async || {
                let heard = cluster.heard(node)?;
                let report = heard.data.first()?;
                // Only the primary knows whether the members are equal.
                let is_aligned = node != 1 || report.unaligned == 0;
                (report.configuration.epoch == Epoch(epoch) && is_aligned).then_some(())
            })
            .await;
        };
        heard(1, 1).await;
        let started = Instant::now();
        for epoch in 2..=7 {
            cluster.configure(configuration(epoch, &[1, 2, 3]), &[1, 2, 3]).await;
            for node in [1, 2, 3] {
                heard(epoch, node).await;
            }
        }
        // By the clock, each but the first takes a second.
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    });
}
