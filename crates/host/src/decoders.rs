//! The decoders of this crate, for golden files and fuzzing.

use milpa_wire::decoder::{Decoder, Random};

use crate::address_book;
use crate::keys::Key;
use crate::node_directory::decoding;

/// All of them.
#[must_use]
pub fn all() -> Vec<Decoder> {
    vec![
        Decoder {
            name: "identity-2",
            sample: |seed| decoding::sample((seed != 1).then_some(101 + seed as u32)),
            again: decoding::again,
            seal: |bytes| decoding::seal(bytes),
        },
        Decoder {
            name: "life",
            sample: |seed| decoding::sample_life(7, 7 + u128::from(seed)),
            again: decoding::life_again,
            seal: |_| {},
        },
        Decoder {
            name: "nodes",
            sample: |seed| address_book::decoding::sample(7002 + (seed % 100) as u16),
            again: |bytes| Some(address_book::decoding::again(bytes)),
            seal: |_| {},
        },
        Decoder {
            name: "key",
            sample: |seed| {
                let mut random = Random::new(seed);
                let digits = (0..4).map(|_| format!("{:016x}", random.draw()));
                (digits.collect::<String>() + "\n").into_bytes()
            },
            again: |bytes| {
                let key = Key::from_hex(&String::from_utf8_lossy(bytes)).ok()?;
                Some((key.to_hex() + "\n").into_bytes())
            },
            seal: |_| {},
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_files_are_read_and_written_as_ever() {
        milpa_wire::decoder::check_all_golden(env!("CARGO_MANIFEST_DIR"), &all()).unwrap();
    }
}
