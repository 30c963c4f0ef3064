//! `milpa-fuzz`: hostile bytes for every decoder (docs/reliability.md).
//!
//! Each target is a decoder with its samples ([`milpa_wire::decoder::Decoder`]). Samples are changed
//! (bits, numbers at the edges, cuts, copies, splices), their checksums made right again most of the
//! time, and decoded. No panic, memory bounded by the input, an end, and what was decoded encodes to
//! bytes that decode to the same. Built by `make fuzz`, inputs that reach new code are kept and
//! changed further; see [`coverage`].
//!
//! # What is deliberately absent
//!
//! Comparisons are not traced: checksums and magic numbers, where that would help, are put right by
//! the targets. Kept inputs are not saved: a run finds its way again within seconds.

// Around the nodes, not in them: the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod coverage;
mod finding;
mod fuzzer;
mod memory;
mod mutate;
mod targets;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;

use coverage::Coverage;
use fuzzer::Fuzzer;
use targets::{Family, Target};

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

/// Calls of one target before the next one has its turn.
const TURN: Duration = Duration::from_millis(200);

const EXAMPLES: &str = "Examples:
  milpa-fuzz --list
  milpa-fuzz --family disk --seconds 600
  milpa-fuzz --target wal --replay fuzz-wal-0123abcd";

/// Hostile bytes for every decoder
#[derive(Debug, Parser)]
#[command(name = "milpa-fuzz", after_help = EXAMPLES)]
struct Arguments {
    /// Print all targets with their families
    #[arg(long)]
    list: bool,
    /// Only this target
    #[arg(long)]
    target: Option<String>,
    /// Only this family
    #[arg(long)]
    family: Option<Family>,
    /// How long each family is fuzzed
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Another seed, other mutations
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Decode this file only: what a finding left
    #[arg(long, requires = "target")]
    replay: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let mut targets = targets::all();
    targets.retain(|target| {
        arguments.family.is_none_or(|family| family == target.family)
            && arguments.target.as_ref().is_none_or(|name| name == target.decoder.name)
    });
    targets.sort_by_key(|target| target.family);
    if targets.is_empty() {
        eprintln!("error: no such target; `milpa-fuzz --list` prints all");
        return ExitCode::from(2);
    }
    if arguments.list {
        targets.iter().for_each(|t| println!("{:?}\t{}", t.family, t.decoder.name));
        return ExitCode::SUCCESS;
    }
    finding::watch();
    if let Some(path) = &arguments.replay {
        return replay(&targets, path);
    }
    let mut coverage = Coverage::take();
    println!("coverage guidance: {}", if coverage.is_there() { "yes" } else { "no" });
    let mut findings = 0;
    for family in targets.chunk_by(|a, b| a.family == b.family) {
        findings += fuzz(family, &arguments, &mut coverage);
    }
    ExitCode::from(u8::from(findings > 0))
}

fn replay(targets: &[Target], path: &Path) -> ExitCode {
    let read = std::fs::read(path).map_err(|error| format!("cannot read {path:?}: {error}"));
    let checked = read.and_then(|input| match targets {
        [target] => Fuzzer::new(target.decoder, 0).check(&input),
        _ => Err("name one target".to_owned()),
    });
    match checked {
        Ok(()) => {
            println!("no promise is broken");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

/// Fuzzes the targets of one family in turns; gives the number of findings.
fn fuzz(family: &[Target], arguments: &Arguments, coverage: &mut Coverage) -> u64 {
    // Findings print the panic themselves.
    std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
    let begun = Instant::now();
    let mut fuzzers: Vec<Fuzzer> =
        family.iter().map(|target| Fuzzer::new(target.decoder, arguments.seed)).collect();
    let end = begun + Duration::from_secs(arguments.seconds);
    while Instant::now() < end {
        for fuzzer in &mut fuzzers {
            let turn = Instant::now() + TURN;
            // A target that is broken is not worth more of the same.
            while Instant::now() < turn && fuzzer.findings < 20 {
                fuzzer.step(coverage);
            }
        }
    }
    let name = family.first().map(|target| format!("{:?}", target.family)).unwrap_or_default();
    let (mut executions, mut findings) = (0, 0);
    for (target, fuzzer) in family.iter().zip(&fuzzers) {
        println!(
            "{name}/{}: {} executions, {} decoded, {} inputs kept, {} KiB of memory at most, {} findings",
            target.decoder.name,
            fuzzer.executions,
            fuzzer.decoded,
            fuzzer.kept(),
            fuzzer.memory_max >> 10,
            fuzzer.findings,
        );
        executions += fuzzer.executions;
        findings += fuzzer.findings;
    }
    println!(
        "{name}: {} s, {executions} executions, {} edges reached so far, {findings} findings",
        begun.elapsed().as_secs(),
        coverage.reached(),
    );
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The short form of `make fuzz`: the same inputs each time, a few hundred for each decoder.
    #[test]
    fn no_decoder_breaks_its_promises() {
        let mut coverage = Coverage::take();
        for target in targets::all() {
            let mut fuzzer = Fuzzer::new(target.decoder, 1);
            let samples = (0..8).map(target.decoder.sample);
            for sample in samples {
                let decoded = fuzzer.check(&sample);
                assert_eq!(decoded, Ok(()), "{}: a sample", target.decoder.name);
            }
            for _ in 0..150 {
                fuzzer.step(&mut coverage);
            }
            assert_eq!(fuzzer.findings, 0, "{}", target.decoder.name);
        }
    }

    fn decoder(name: &str) -> milpa_wire::decoder::Decoder {
        let mut all = targets::all().into_iter();
        all.find(|target| target.decoder.name == name).unwrap().decoder
    }

    /// Lengths on a disk were believed: memory was reserved for a piece of 16 MiB that was not there,
    /// and for a log of any size.
    #[test]
    fn a_length_is_not_believed_before_the_bytes_are_there() {
        let decoder_of = decoder("snapshot");
        let mut snapshot = (decoder_of.sample)(0);
        let header = u32::from_le_bytes(snapshot[8..12].try_into().unwrap()) as usize;
        snapshot[16 + header..][..4].copy_from_slice(&(16_u32 << 20).to_le_bytes());
        assert_eq!(Fuzzer::new(decoder_of, 0).check(&snapshot), Ok(()));

        let decoder_of = decoder("wal");
        let mut log = (decoder_of.sample)(0);
        for copy in [0, 4096] {
            log[copy + 64..][..8].copy_from_slice(&(512_u64 << 20).to_le_bytes());
        }
        (decoder_of.seal)(&mut log);
        assert_eq!(Fuzzer::new(decoder_of, 0).check(&log), Ok(()));
    }

    #[test]
    fn names_are_unique_and_samples_are_decoded() {
        let all = targets::all();
        let names: std::collections::BTreeSet<&str> =
            all.iter().map(|target| target.decoder.name).collect();
        assert_eq!(names.len(), all.len());
        for target in &all {
            let name = target.decoder.name;
            // These have nothing to encode again.
            if !["kernel", "http-body", "checkpoint", "store"].contains(&name) {
                let sample = (target.decoder.sample)(3);
                assert!((target.decoder.again)(&sample).is_some(), "{name}: a sample is refused");
            }
        }
    }

    /// Were the allocator not ours, memory would never be out of bounds.
    #[test]
    fn memory_is_measured() {
        let ((), bytes) = memory::measured(|| drop(vec![1_u8; 5 << 20]));
        assert!((5 << 20..6 << 20).contains(&bytes), "{bytes}");
    }
}
