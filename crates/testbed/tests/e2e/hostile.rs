//! Strangers, and a client that lies: hostile bytes to every port of a live cluster.
//!
//! Every server process must live through it in the same process, answer the mount's writer all along,
//! and keep its memory within [`GROWTH_BYTES_MAX`] of what it had. `MILPA_HOSTILE_SECONDS` says for how
//! long; docs/reliability.md tells the long run.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use milpa_host::keys::Key;
use milpa_testbed::load::Writer;
use milpa_testbed::{ServerProcess, Testbed};
use milpa_types::{NodeId, Role};
use milpa_wire::data::DataRequest;
use milpa_wire::decoder::{Random, generate};
use milpa_wire::frame::{Frame, FrameKind, HEADER_BYTES, Taken, crc32c};
use milpa_wire::handshake::{Challenge, Claim, Handshake, Hello};
use milpa_wire::manager::ManagerRequest;
use milpa_wire::meta::MetaRequest;
use milpa_wire::{PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, decode, encode};

/// What a process may grow by: the attackers hold a few frames of at most 16 MiB each, and some
/// hundreds of idle connections.
const GROWTH_BYTES_MAX: u64 = 256 << 20;
/// Idle connections held to each port.
const IDLE: usize = 60;
/// An attacker reads no longer than this.
const PATIENCE: Duration = Duration::from_millis(200);

/// One port under attack.
#[derive(Clone)]
struct Port {
    address: String,
    role: Option<Role>,
}

/// All that the attackers know and count.
struct Attack {
    ports: Vec<Port>,
    /// The key of a volume that is not the one in use.
    key: Key,
    ends: AtomicBool,
    connections: AtomicU64,
    admitted: AtomicU64,
}

fn ports(bed: &Testbed) -> Vec<Port> {
    let role = |process: &ServerProcess| match process.role.as_str() {
        "manager" => Role::Manager,
        "meta" => Role::Meta,
        _ => Role::Data,
    };
    let of = |process: &ServerProcess| {
        let rpc = Port { address: process.listen.clone(), role: Some(role(process)) };
        [rpc, Port { address: process.http_listen.clone(), role: None }]
    };
    bed.processes().iter().flat_map(of).collect()
}

impl Attack {
    fn connect(&self, port: &Port) -> Option<TcpStream> {
        let stream = TcpStream::connect(&port.address).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        stream.set_write_timeout(Some(PATIENCE)).ok()?;
        self.connections.fetch_add(1, Ordering::Relaxed);
        Some(stream)
    }

    /// One attack of any kind. What the victim does about it is its own affair: it may close the
    /// connection at any byte, so failures of the socket mean nothing.
    fn strike(&self, random: &mut Random) -> Option<()> {
        let port = self.ports.get(random.below(self.ports.len() as u64) as usize)?;
        let mut stream = self.connect(port)?;
        match (port.role, random.below(6)) {
            (_, 0) => send(&mut stream, &noise(random, 64 << 10)),
            (None, _) => send(&mut stream, &http(random)),
            (Some(role), 1) => {
                let hello = hello(random, role);
                let bytes = handshake_frame(&Handshake::Hello(hello));
                let cut = random.below(bytes.len() as u64 + 1) as usize;
                send(&mut stream, &bytes[..cut]);
            }
            (Some(_), 2) => {
                // Any handshake message, out of turn.
                send(&mut stream, &handshake_frame(&generate(random.draw())));
            }
            (Some(_), 3) => send(&mut stream, &bomb(random)),
            (Some(role), 4) => {
                let wrong = Key::random().ok()?;
                assert!(!self.enter(&mut stream, random, role, &wrong), "a wrong key opens {role}");
            }
            (Some(role), _) => self.lie(&mut stream, random, role),
        }
        read_some(&mut stream);
        Some(())
    }

    /// The handshake with this key. Whether the server let us in.
    fn enter(&self, stream: &mut TcpStream, random: &mut Random, role: Role, key: &Key) -> bool {
        let hello = hello(random, role);
        send(stream, &handshake_frame(&Handshake::Hello(hello.clone())));
        let mut buffer = BytesMut::new();
        let Some(Handshake::Challenge(challenge)) = receive(stream, &mut buffer) else {
            return false;
        };
        let said = encode(&(&hello, Challenge { proof: Default::default(), ..challenge }));
        let proof = key.mac(&[b"caller", &said]);
        send(stream, &handshake_frame(&Handshake::Proof(proof)));
        matches!(receive(stream, &mut buffer), Some(Handshake::Welcome))
    }

    /// A client of the other volume sends what no client sends.
    fn lie(&self, stream: &mut TcpStream, random: &mut Random, role: Role) {
        if !self.enter(stream, random, role, &self.key) {
            return;
        }
        self.admitted.fetch_add(1, Ordering::Relaxed);
        for _ in 0..random.below(60) {
            let mut body = match random.below(5) {
                0 => noise(random, 4096),
                1 | 2 => match role {
                    Role::Meta => encode(&generate::<MetaRequest>(random.draw())),
                    Role::Data => encode(&generate::<DataRequest>(random.draw())),
                    _ => encode(&generate::<ManagerRequest>(random.draw())),
                },
                3 => encode(&generate::<MetaRequest>(random.draw())),
                _ => encode(&generate::<DataRequest>(random.draw())),
            };
            if random.below(3) == 0 && !body.is_empty() {
                let at = random.below(body.len() as u64) as usize;
                body[at] = random.draw() as u8;
            }
            let kind = match random.below(12) {
                0 => FrameKind::OneWay,
                1 => FrameKind::Reply,
                _ => FrameKind::Request,
            };
            let longest = if random.below(20) == 0 { 1 << 20 } else { 8192 };
            let payload = noise(random, longest);
            let (channel, id) = (random.below(4) as u16, random.draw());
            let wait_ms = random.number() as u32;
            let (body, payload) = (body.into(), payload.into());
            let frame = Frame { kind, channel, id, wait_ms, body, payload };
            send(stream, &frame.encode_head());
            send(stream, &frame.payload);
        }
        if random.below(4) == 0 {
            send(stream, &bomb(random));
        }
    }
}

fn send(stream: &mut TcpStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes);
}

fn read_some(stream: &mut TcpStream) {
    let mut buffer = [0; 4096];
    for _ in 0..4 {
        match stream.read(&mut buffer) {
            Ok(count) if count > 0 => {}
            _ => return,
        }
    }
}

fn receive(stream: &mut TcpStream, buffer: &mut BytesMut) -> Option<Handshake> {
    let begun = Instant::now();
    loop {
        match Frame::take(buffer).ok()? {
            Taken::Frame(frame) => return decode(&frame.body).ok(),
            Taken::NeedsBytes { .. } if begun.elapsed() > Duration::from_secs(5) => return None,
            Taken::NeedsBytes { .. } => {}
        }
        let mut bytes = [0; 1024];
        match stream.read(&mut bytes) {
            Ok(0) => return None,
            Ok(count) => buffer.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return None,
        }
    }
}

fn noise(random: &mut Random, limit: u64) -> Vec<u8> {
    let limit = random.below(limit) + 1;
    random.bytes(limit)
}

fn hello(random: &mut Random, expects: Role) -> Hello {
    let mut nonce = [0; 32];
    nonce.fill_with(|| random.draw() as u8);
    Hello {
        version_min: PROTOCOL_VERSION_MIN,
        version_max: PROTOCOL_VERSION,
        cluster: None,
        role: Role::Client,
        expects,
        node: NodeId(0),
        // The second volume of the cluster.
        claim: Claim::Volume(milpa_types::VolumeId(2)),
        nonce,
    }
}

fn handshake_frame(message: &Handshake) -> Vec<u8> {
    let (kind, body, payload) = (FrameKind::Handshake, encode(message).into(), Default::default());
    Frame { kind, channel: 0, id: 0, wait_ms: 0, body, payload }.encode_head().to_vec()
}

/// A header that announces up to 16 MiB, or far more, with its own checksum right; then a little.
fn bomb(random: &mut Random) -> Vec<u8> {
    let frame = Frame {
        kind: FrameKind::Request,
        channel: 0,
        id: 1,
        wait_ms: 1000,
        body: noise(random, 1000).into(),
        payload: Default::default(),
    };
    let mut bytes = frame.encode_head().to_vec();
    let length = [8 << 20, u32::MAX, 1 << 24][random.below(3) as usize];
    bytes[20..24].copy_from_slice(&u32::to_le_bytes(length));
    bytes[24..28].copy_from_slice(&u32::to_le_bytes(length));
    let crc = crc32c(&bytes[..28]);
    bytes[28..32].copy_from_slice(&crc.to_le_bytes());
    assert!(bytes.len() >= HEADER_BYTES);
    bytes
}

fn http(random: &mut Random) -> Vec<u8> {
    let noise: String = noise(random, 2000).iter().map(|byte| char::from(*byte)).collect();
    let number = random.number();
    match random.below(7) {
        0 => format!("GET /{noise} HTTP/1.1\r\n\r\n"),
        1 => format!("GET /metrics HTTP/1.1\r\nHost: {noise}\r\n"),
        2 => format!("POST /api/volumes HTTP/1.1\r\nContent-Length: {number}\r\n\r\n{noise}"),
        3 => format!("POST /api/volumes HTTP/1.1\r\nAuthorization: Bearer {noise}\r\n\r\n"),
        4 => {
            "POST /api/volumes HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n".into()
        }
        5 => format!("GET / HTTP/1.1\r\n{}", "a: b\r\n".repeat(random.below(20_000) as usize)),
        _ => format!("GET /api/volumes/{number} HTTP/1.1\r\nHost: x\r\n\r\n"),
    }
    .into_bytes()
}

/// Connections that say nothing, or a byte now and then. One that was cut off is made again.
fn loiter(attack: &Attack) {
    let mut held: Vec<(usize, TcpStream)> = Vec::new();
    while !attack.ends.load(Ordering::Relaxed) {
        held.retain_mut(|(_, stream)| stream.write_all(b"M").is_ok());
        for (number, port) in attack.ports.iter().enumerate() {
            let missing = IDLE.saturating_sub(held.iter().filter(|(of, _)| *of == number).count());
            held.extend((0..missing).filter_map(|_| Some((number, attack.connect(port)?))));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn memory(bed: &Testbed) -> BTreeMap<String, (Option<i32>, u64)> {
    let of = |process: &ServerProcess| {
        let state = (process.pid(), process.memory_bytes().unwrap_or_default());
        (process.name.clone(), state)
    };
    bed.processes().iter().map(of).collect()
}

/// How long, and whether the writer has to show progress between two looks.
fn seconds() -> u64 {
    crate::from_environment("MILPA_HOSTILE_SECONDS").unwrap_or(8)
}

#[test]
fn hostile_bytes_at_every_port_hurt_nobody() {
    let mut bed = Testbed::start().unwrap();
    bed.milpa(&["volume", "create", "other"]).unwrap();
    let key = bed.milpa(&["volume", "key", "other"]).unwrap();
    let mount = bed.mount("default").unwrap();
    let directory = mount.path.join("files");
    std::fs::create_dir(&directory).unwrap();
    let writer = Writer::start(env!("CARGO_BIN_EXE_milpa-writer"), &directory).unwrap();
    let (before, ports) = (memory(&bed), ports(&bed));
    let attack = Arc::new(Attack {
        ports,
        key: Key::from_hex(&key).unwrap(),
        ends: AtomicBool::new(false),
        connections: AtomicU64::new(0),
        admitted: AtomicU64::new(0),
    });
    let mut attackers: Vec<std::thread::JoinHandle<()>> = (1..=4_u64)
        .map(|seed| {
            let attack = Arc::clone(&attack);
            std::thread::spawn(move || {
                let mut random = Random::new(seed);
                while !attack.ends.load(Ordering::Relaxed) {
                    attack.strike(&mut random);
                }
            })
        })
        .collect();
    let idle = Arc::clone(&attack);
    attackers.push(std::thread::spawn(move || loiter(&idle)));

    let end = Instant::now() + Duration::from_secs(seconds());
    let mut most: BTreeMap<String, u64> = BTreeMap::new();
    while Instant::now() < end {
        let target = writer.acknowledged() + 5;
        bed.wait_until("the writer goes on", Duration::from_secs(30), |_| {
            writer.acknowledged() >= target || writer.has_ended()
        })
        .unwrap();
        for (name, (pid, bytes)) in memory(&bed) {
            let (pid_before, bytes_before) = before[&name];
            assert_eq!(pid, pid_before, "{name} is not the process that it was");
            let growth = bytes.saturating_sub(bytes_before);
            assert!(growth <= GROWTH_BYTES_MAX, "{name} grew by {growth} bytes");
            let highest = most.entry(name).or_default();
            *highest = growth.max(*highest);
        }
    }
    attack.ends.store(true, Ordering::Relaxed);
    attackers.into_iter().for_each(|attacker| attacker.join().unwrap());
    let (files, longest) = writer.finish().unwrap();
    let connections = attack.connections.load(Ordering::Relaxed);
    let admitted = attack.admitted.load(Ordering::Relaxed);
    println!("{connections} connections, {admitted} admitted as the other volume's client");
    println!("{files} files written and synced meanwhile; the longest took {longest:?}");
    most.iter().for_each(|(name, bytes)| println!("{name} grew by at most {} KiB", bytes >> 10));
    assert!(admitted > 0, "no attacker got behind the handshake: that part proved nothing");

    let fresh = bed.mount("default").unwrap();
    for number in 0..files {
        let path = milpa_testbed::load::path(&fresh.path.join("files"), number);
        let read = std::fs::read(path).unwrap();
        assert!(read == milpa_testbed::load::content(number), "file {number} differs");
    }
    for process in bed.processes() {
        let log = bed.data().join("logs").join(format!("{}.log", process.name));
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        assert!(!text.contains("panicked"), "{} panicked: see {}", process.name, log.display());
    }
}
