//! Changes to bytes that were valid.

use milpa_wire::decoder::Random;

/// Inputs grow no longer than this.
const BYTES_MAX: usize = 256 << 10;

/// Numbers at the edges, as they stand in our formats: little-endian, or as a varint.
const NUMBERS: [u64; 14] = [
    0,
    1,
    7,
    0x7f,
    0x80,
    0xff,
    0x1000,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 32,
    1 << 62,
    u64::MAX - 1,
    u64::MAX,
];

fn varint(mut number: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
    out
}

fn at(random: &mut Random, bytes: &[u8]) -> usize {
    // Half of the time near the front, where headers are.
    let length = bytes.len() as u64;
    let limit = if random.below(2) == 0 { length.min(128) } else { length };
    random.below(limit) as usize
}

fn range(random: &mut Random, bytes: &[u8]) -> std::ops::Range<usize> {
    let start = at(random, bytes);
    let longest = 1 << random.below(10);
    let end = (start + 1 + random.below(longest) as usize).min(bytes.len());
    start..end
}

fn overwrite(bytes: &mut [u8], at: usize, new: &[u8]) {
    bytes.iter_mut().skip(at).zip(new).for_each(|(old, new)| *old = *new);
}

/// One change. `other` is another input of the same target, to take bytes from.
pub fn mutate(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    if bytes.is_empty() {
        bytes.extend(random.bytes(64));
        return;
    }
    let place = at(random, bytes);
    let number = NUMBERS[random.below(NUMBERS.len() as u64) as usize];
    match random.below(14) {
        0..=2 => bytes[place] ^= 1 << random.below(8),
        3 => bytes[place] = random.draw() as u8,
        4 => bytes[place] = bytes[place].wrapping_add(1 + 254 * random.below(2) as u8),
        5 => {
            let width = 1 << random.below(4);
            overwrite(bytes, place, &number.to_le_bytes()[..width]);
        }
        6 => {
            bytes.splice(place..=place, varint(number));
        }
        7 => {
            bytes.splice(place..place, varint(number));
        }
        8 => bytes.truncate(place),
        9 => {
            let range = range(random, bytes);
            bytes.drain(range);
        }
        10 => {
            let copy = bytes[range(random, bytes)].to_vec();
            bytes.splice(place..place, copy);
        }
        11 if !other.is_empty() => {
            let copy = &other[range(random, other)];
            overwrite(bytes, place, copy);
        }
        12 if !other.is_empty() => {
            let from = at(random, other);
            bytes.truncate(place);
            bytes.extend_from_slice(&other[from..]);
        }
        _ => {
            let fill = [0, 0xff, b'/', b'a'][random.below(4) as usize];
            let range = range(random, bytes);
            bytes[range].fill(fill);
        }
    }
    bytes.truncate(BYTES_MAX);
}
