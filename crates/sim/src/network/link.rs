//! What may be wrong with the way from one machine to another.

use crate::random::Random;

/// How packets fare on their way. The same everywhere, but for blocked links.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkFaults {
    /// Shortest way, in milliseconds. At least 1: a machine runs one tick ahead of the others.
    pub latency_min_ms: u64,
    pub latency_max_ms: u64,
    /// Packets that are lost and sent again, in a million.
    pub loss: u32,
    /// Packets of which one bit flips, in a million.
    pub corruption: u32,
    /// Packets upon which the connection is reset, in a million.
    pub resets: u32,
    /// Packets that take up to a second, in a million.
    pub delays: u32,
}

/// First wait before a lost packet is sent again; doubled for each further loss.
const RETRANSMIT_MS: u64 = 200;

impl LinkFaults {
    /// How long the next packet takes.
    pub fn latency(&self, random: &mut Random, counts: &mut NetworkCounts) -> u64 {
        let mut taken = random.between(self.latency_min_ms.max(1), self.latency_max_ms.max(1));
        let mut again = RETRANSMIT_MS;
        while random.per_million(self.loss) && again < 10_000 {
            counts.lost += 1;
            taken += again;
            again *= 2;
        }
        if random.per_million(self.delays) {
            counts.delayed += 1;
            taken += random.below(1000);
        }
        taken
    }
}

/// How often something happened on the network.
#[derive(Clone, Debug, Default)]
pub(crate) struct NetworkCounts {
    pub packets: u64,
    pub bytes: u64,
    pub connections: u64,
    pub lost: u64,
    pub delayed: u64,
    pub corrupted: u64,
    pub resets: u64,
    pub stalled: u64,
    pub refused: u64,
    pub given_up: u64,
}

impl NetworkCounts {
    pub fn by_name(&self) -> [(&'static str, u64); 10] {
        [
            ("packets", self.packets),
            ("bytes", self.bytes),
            ("connections", self.connections),
            ("lost packets", self.lost),
            ("delayed packets", self.delayed),
            ("corrupted packets", self.corrupted),
            ("resets", self.resets),
            ("packets before a cut link", self.stalled),
            ("refused connections", self.refused),
            ("connections given up", self.given_up),
        ]
    }
}
