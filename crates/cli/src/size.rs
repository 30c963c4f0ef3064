//! Byte sizes as people write and read them.

/// Parses a byte size such as `64KiB` or `3GiB`; a bare number is bytes.
///
/// Only binary units are accepted (`B`, `KiB`, `MiB`, `GiB`, `TiB`), so that `1GB` cannot silently
/// mean two things. The result is in bytes.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return Err(format!("size {text:?}: unit must be B, KiB, MiB, GiB or TiB")),
    };
    let number: u64 =
        digits.parse().map_err(|_| format!("size {text:?}: number is missing or too large"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("size {text:?}: does not fit in 64 bits"))
}

/// A byte count in the largest unit that keeps it at or above 1, with one decimal: `1.5 GiB`.
pub fn show_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let name = UNITS.get(unit).copied().unwrap_or("B");
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Result<u64, &str>) {
        let actual = parse_bytes(text);
        match expected {
            Ok(bytes) => assert_eq!(actual, Ok(bytes), "{text:?}"),
            Err(part) => {
                assert!(actual.as_ref().is_err_and(|e| e.contains(part)), "{text:?}: {actual:?}");
            }
        }
    }

    #[test]
    fn parse_bytes_table() {
        check("0", Ok(0));
        check("512", Ok(512));
        check("64KiB", Ok(65_536));
        check("16777215TiB", Ok(16_777_215 << 40));
        check("16777216TiB", Err("does not fit"));
        check("1GB", Err("unit must be"));
        check("KiB", Err("number is missing"));
        check("", Err("number is missing"));
    }

    #[test]
    fn show_bytes_table() {
        assert_eq!(show_bytes(0), "0 B");
        assert_eq!(show_bytes(1023), "1023 B");
        assert_eq!(show_bytes(1536), "1.5 KiB");
        assert_eq!(show_bytes(u64::MAX), "16777216.0 TiB");
    }
}
