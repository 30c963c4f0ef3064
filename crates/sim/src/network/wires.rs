//! All connections of all machines, and what is under way on them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::Waker;

use bytes::BufMut;

use super::link::{LinkFaults, NetworkCounts};
use crate::disk::Effects;
use crate::random::Random;

/// Bytes of one direction that may be under way or unread.
const WINDOW_BYTES: usize = 1 << 20;
/// Bytes in one packet; large, as offloading makes them.
const PACKET_BYTES: usize = 64 << 10;
/// A sender that waits longer than this for a blocked link gives the connection up.
const GIVE_UP_MS: u64 = VANISHED_MS;
/// Whoever has a connection to a machine without power has noticed by then: what production sets, and a probe.
const VANISHED_MS: u64 = milpa_host::net::VANISHED_AFTER.as_millis() as u64 + 1_000;
/// Between two looks at packets that wait before a blocked link.
const BLOCKED_RETRY_MS: u64 = 200;
/// Connections that wait to be accepted.
const BACKLOG: usize = 1024;

pub(super) type ConnectionId = u64;

/// One end of a connection.
#[derive(Debug)]
struct End {
    address: SocketAddr,
    /// Which life of the machine it belongs to; `None` when that is over or it let go.
    life: Option<u64>,
    inbox: VecDeque<u8>,
    /// The other side will send no more.
    at_end: bool,
    is_reset: bool,
    /// This side has said that it sends no more.
    has_closed: bool,
    /// Bytes sent from here that the other side has not read.
    outstanding: usize,
    /// When the last packet from here arrives: the next one is not earlier.
    last_arrival: u64,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl End {
    fn new(address: SocketAddr, life: u64) -> End {
        End {
            address,
            life: Some(life),
            inbox: VecDeque::new(),
            at_end: false,
            is_reset: false,
            has_closed: false,
            outstanding: 0,
            last_arrival: 0,
            reader: None,
            writer: None,
        }
    }

    fn wake(&mut self, woken: &mut Vec<Waker>) {
        woken.extend(self.reader.take());
        woken.extend(self.writer.take());
    }
}

/// A connection: the caller's end and the listener's.
#[derive(Debug)]
struct Connection {
    ends: [End; 2],
    /// Packets that stand before a blocked link, for each direction, and since when.
    stalled: [VecDeque<(Packet, u64)>; 2],
}

/// What travels on a connection, from one end to the other.
#[derive(Debug)]
enum Packet {
    Bytes(Vec<u8>),
    End,
    Reset,
}

/// What happens at a later time.
#[derive(Debug)]
enum Event {
    Arrival {
        connection: ConnectionId,
        to: usize,
        packet: Packet,
    },
    /// A connection request arrives; `tries` were lost before.
    Call {
        call: u64,
        tries: u32,
    },
    /// The answer to it is back.
    Answer {
        call: u64,
    },
    /// Stalled packets look whether their link is open again.
    Look {
        connection: ConnectionId,
        to: usize,
    },
    /// Nobody has confirmed anything to either end.
    Vanished {
        connection: ConnectionId,
    },
}

/// A connection attempt.
#[derive(Debug)]
pub(super) struct Call {
    from: SocketAddr,
    life: u64,
    to: SocketAddr,
    pub waker: Option<Waker>,
    pub outcome: Option<Result<ConnectionId, i32>>,
}

#[derive(Debug, Default)]
struct Listening {
    life: u64,
    waiting: VecDeque<(ConnectionId, SocketAddr)>,
    waker: Option<Waker>,
}

/// How a machine's life ended, as the network sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The kernel lives: it resets the connections and refuses new ones.
    Process,
    /// Nothing answers any more.
    Power,
}

#[derive(Debug, Default)]
struct MachineState {
    life: u64,
    /// Answers to packets: false after a power cut.
    has_kernel: bool,
    /// Every packet of its node is one.
    effects: Arc<Effects>,
    next_port: u16,
}

/// The network.
#[derive(Debug)]
pub(crate) struct Wires {
    pub now_ms: u64,
    /// Nothing arrives sooner: machines run one tick ahead of each other.
    pub tick_ms: u64,
    pub faults: LinkFaults,
    pub counts: NetworkCounts,
    random: Random,
    machines: BTreeMap<IpAddr, MachineState>,
    /// Links on which nothing passes, from and to.
    blocked: BTreeSet<(IpAddr, IpAddr)>,
    /// Machines whose links are all sound: the observer's.
    exempt: BTreeSet<IpAddr>,
    /// Extra latency of everything to and from a machine (F11).
    slow: BTreeMap<IpAddr, u64>,
    connections: BTreeMap<ConnectionId, Connection>,
    listeners: BTreeMap<SocketAddr, Listening>,
    calls: BTreeMap<u64, Call>,
    next_id: u64,
    events: BinaryHeap<Reverse<(u64, u64, Slot)>>,
}

/// An event without an order of its own.
#[derive(Debug)]
struct Slot(Event);

impl PartialEq for Slot {
    fn eq(&self, _: &Slot) -> bool {
        true
    }
}
impl Eq for Slot {}
impl PartialOrd for Slot {
    fn partial_cmp(&self, other: &Slot) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Slot {
    fn cmp(&self, _: &Slot) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl Wires {
    pub fn new(faults: LinkFaults, random: Random) -> Wires {
        Wires {
            now_ms: 0,
            tick_ms: 1,
            faults,
            counts: NetworkCounts::default(),
            random,
            machines: BTreeMap::new(),
            blocked: BTreeSet::new(),
            exempt: BTreeSet::new(),
            slow: BTreeMap::new(),
            connections: BTreeMap::new(),
            listeners: BTreeMap::new(),
            calls: BTreeMap::new(),
            next_id: 1,
            events: BinaryHeap::new(),
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn schedule(&mut self, at: u64, event: Event) {
        let order = self.id();
        self.events.push(Reverse((at, order, Slot(event))));
    }

    /// A machine begins a life.
    pub fn boot(&mut self, address: IpAddr, life: u64, effects: Arc<Effects>) {
        let machine = self.machines.entry(address).or_default();
        (machine.life, machine.has_kernel, machine.effects) = (life, true, effects);
    }

    pub fn exempt(&mut self, address: IpAddr) {
        self.exempt.insert(address);
    }

    /// A machine's life is over. What its node still does reaches nobody.
    pub fn end_life(&mut self, address: IpAddr, ending: Ending) -> Vec<Waker> {
        let machine = self.machines.entry(address).or_default();
        machine.life += 1;
        machine.has_kernel = ending == Ending::Process;
        self.listeners.retain(|listens, _| listens.ip() != address);
        self.calls.retain(|_, call| call.from.ip() != address);
        let mine = self.connections.iter().flat_map(|(id, connection)| {
            let ends = connection.ends.iter().enumerate();
            ends.filter(|(_, end)| end.address.ip() == address && end.life.is_some())
                .map(|(side, _)| (*id, side))
        });
        let mine: Vec<_> = mine.collect();
        let mut dropped = Vec::new();
        for (id, side) in mine {
            match ending {
                Ending::Process => self.send(id, side, Packet::Reset),
                Ending::Power => {
                    self.schedule(self.now_ms + VANISHED_MS, Event::Vanished { connection: id });
                }
            }
            self.let_go(id, side, &mut dropped);
        }
        dropped
    }

    /// Blocks or opens the way from one machine to another.
    pub fn set_blocked(&mut self, from: IpAddr, to: IpAddr, blocked: bool) {
        if blocked {
            self.blocked.insert((from, to));
        } else {
            self.blocked.remove(&(from, to));
        }
    }

    pub fn heal(&mut self) {
        self.blocked.clear();
        self.slow.clear();
    }

    pub fn set_slow(&mut self, machine: IpAddr, extra_ms: u64) {
        self.slow.insert(machine, extra_ms);
    }

    fn is_exempt(&self, from: IpAddr, to: IpAddr) -> bool {
        self.exempt.contains(&from) || self.exempt.contains(&to)
    }

    fn is_open(&self, from: IpAddr, to: IpAddr) -> bool {
        self.is_exempt(from, to) || !self.blocked.contains(&(from, to))
    }

    fn latency(&mut self, from: IpAddr, to: IpAddr) -> u64 {
        if self.is_exempt(from, to) {
            return self.tick_ms;
        }
        let extra = self
            .slow
            .get(&from)
            .copied()
            .unwrap_or(0)
            .max(self.slow.get(&to).copied().unwrap_or(0));
        let drawn = self.faults.latency(&mut self.random, &mut self.counts) + extra;
        drawn.max(self.tick_ms)
    }

    /// Performs everything that is due. Gives who is to be woken, and whose machine they are on.
    pub fn advance(&mut self, now_ms: u64) -> Vec<Waker> {
        self.now_ms = now_ms;
        let mut woken = Vec::new();
        while self.events.peek().is_some_and(|Reverse((at, ..))| *at <= now_ms) {
            let Some(Reverse((_, _, Slot(event)))) = self.events.pop() else { break };
            match event {
                Event::Arrival { connection, to, packet } => {
                    self.arrive(connection, to, packet, &mut woken);
                }
                Event::Call { call, tries } => self.called(call, tries, &mut woken),
                Event::Answer { call } => {
                    let waker = self.calls.get_mut(&call).and_then(|call| call.waker.take());
                    woken.extend(waker);
                }
                Event::Look { connection, to } => self.look(connection, to, &mut woken),
                Event::Vanished { connection } => self.give_up(connection, &mut woken),
            }
        }
        woken
    }

    fn addresses(&self, connection: ConnectionId, to: usize) -> Option<(IpAddr, IpAddr)> {
        let ends = &self.connections.get(&connection)?.ends;
        Some((ends.get(1 - to)?.address.ip(), ends.get(to)?.address.ip()))
    }

    fn arrive(&mut self, id: ConnectionId, to: usize, packet: Packet, woken: &mut Vec<Waker>) {
        let Some((source, target)) = self.addresses(id, to) else { return };
        let is_open = self.is_open(source, target);
        let now_ms = self.now_ms;
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let [first, second] = &mut connection.stalled;
        let stalled = if to == 0 { first } else { second };
        if !is_open || !stalled.is_empty() {
            let was_empty = stalled.is_empty();
            stalled.push_back((packet, now_ms));
            self.counts.stalled += 1;
            if was_empty {
                self.schedule(now_ms + BLOCKED_RETRY_MS, Event::Look { connection: id, to });
            }
            return;
        }
        self.deliver(id, to, packet, woken);
    }

    /// Stalled packets go on when the link is open again, or their sender gives up.
    fn look(&mut self, id: ConnectionId, to: usize, woken: &mut Vec<Waker>) {
        let Some((source, target)) = self.addresses(id, to) else { return };
        let is_open = self.is_open(source, target);
        let now_ms = self.now_ms;
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let [first, second] = &mut connection.stalled;
        let stalled = if to == 0 { first } else { second };
        if is_open {
            for (packet, _) in std::mem::take(stalled) {
                self.deliver(id, to, packet, woken);
            }
            return;
        }
        if stalled.front().is_some_and(|(_, since)| now_ms - since > GIVE_UP_MS) {
            stalled.clear();
            self.give_up(id, woken);
            return;
        }
        self.schedule(now_ms + BLOCKED_RETRY_MS, Event::Look { connection: id, to });
    }

    /// Both ends have noticed that nothing passes: who waits for an answer sends probes.
    fn give_up(&mut self, id: ConnectionId, woken: &mut Vec<Waker>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        self.counts.given_up += 1;
        for end in &mut connection.ends {
            end.is_reset = true;
            end.wake(woken);
        }
    }

    fn deliver(&mut self, id: ConnectionId, to: usize, packet: Packet, woken: &mut Vec<Waker>) {
        let Some((source, target)) = self.addresses(id, to) else { return };
        let faults = !self.is_exempt(source, target);
        let (corrupts, resets) = (self.faults.corruption, self.faults.resets);
        let is_corrupted = faults && self.random.per_million(corrupts);
        let is_reset = faults && self.random.per_million(resets);
        let has_kernel = self.machines.get(&target).is_some_and(|machine| machine.has_kernel);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let [first, second] = &mut connection.ends;
        let (end, peer) = if to == 0 { (first, second) } else { (second, first) };
        if end.life.is_none() || end.is_reset {
            // Nobody there. A kernel says so; without one the sender waits.
            if has_kernel && !matches!(packet, Packet::Reset) && peer.life.is_some() {
                self.send(id, to, Packet::Reset);
            }
            return;
        }
        match packet {
            Packet::Bytes(_) if is_reset => {
                self.counts.resets += 1;
                for end in [end, peer] {
                    end.is_reset = true;
                    end.wake(woken);
                }
                return;
            }
            Packet::Bytes(mut bytes) => {
                self.counts.packets += 1;
                self.counts.bytes += bytes.len() as u64;
                if is_corrupted {
                    self.counts.corrupted += 1;
                    let place = self.random.below(bytes.len() as u64) as usize;
                    let bit = self.random.below(8);
                    if let Some(byte) = bytes.get_mut(place) {
                        *byte ^= 1 << bit;
                    }
                }
                end.inbox.extend(bytes);
            }
            Packet::End => end.at_end = true,
            Packet::Reset => {
                end.is_reset = true;
                woken.extend(end.writer.take());
            }
        }
        woken.extend(end.reader.take());
    }

    /// Sends what a node sends: an effect of its machine.
    fn emit(&mut self, id: ConnectionId, from: usize, packet: Packet) {
        let source = self.addresses(id, from).map(|(_, source)| source);
        let machine = source.and_then(|source| self.machines.get(&source));
        if machine.is_some_and(|machine| machine.effects.happens()) {
            self.send(id, from, packet);
        }
    }

    /// Sends a packet from one side: from its node, or from its kernel when the node is gone.
    fn send(&mut self, id: ConnectionId, from: usize, packet: Packet) {
        let Some((target, source)) = self.addresses(id, from) else { return };
        let latency = self.latency(source, target);
        let at = self.now_ms + latency;
        let Some(end) = self.connections.get_mut(&id).and_then(|c| c.ends.get_mut(from)) else {
            return;
        };
        // A reset overtakes nothing either: the cruel order is the one of retries on a new
        // connection, and those are free.
        end.last_arrival = end.last_arrival.max(at);
        let at = end.last_arrival;
        self.schedule(at, Event::Arrival { connection: id, to: 1 - from, packet });
    }

    /// One side lets go of a connection; with both gone it is forgotten.
    fn let_go(&mut self, id: ConnectionId, side: usize, dropped: &mut Vec<Waker>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if let Some(end) = connection.ends.get_mut(side) {
            end.life = None;
            end.inbox = VecDeque::new();
            end.wake(dropped);
        }
        if connection.ends.iter().all(|end| end.life.is_none()) {
            self.connections.remove(&id);
        }
    }

    // ---- what a node's streams and listeners ask -------------------------------------------

    /// Whether this life of a machine still counts.
    fn is_alive(&self, address: IpAddr, life: u64) -> bool {
        self.machines.get(&address).is_some_and(|machine| machine.life == life)
    }

    pub(super) fn bind(&mut self, address: SocketAddr, life: u64) -> Result<SocketAddr, i32> {
        if !self.is_alive(address.ip(), life) {
            return Err(libc::EADDRNOTAVAIL);
        }
        if self.listeners.contains_key(&address) {
            return Err(libc::EADDRINUSE);
        }
        self.listeners.insert(address, Listening { life, ..Listening::default() });
        Ok(address)
    }

    pub(super) fn unbind(&mut self, address: SocketAddr, life: u64) {
        if self.listeners.get(&address).is_some_and(|listening| listening.life == life) {
            self.listeners.remove(&address);
        }
    }

    pub(super) fn accept(
        &mut self,
        address: SocketAddr,
        life: u64,
        waker: &Waker,
    ) -> Option<(ConnectionId, SocketAddr)> {
        let listening = self.listeners.get_mut(&address)?;
        if listening.life != life {
            return None;
        }
        let accepted = listening.waiting.pop_front();
        if accepted.is_none() {
            listening.waker = Some(waker.clone());
        }
        accepted
    }

    /// Begins to connect. The outcome is in the call.
    pub(super) fn call(&mut self, from: IpAddr, life: u64, to: SocketAddr) -> u64 {
        let id = self.id();
        let machine = self.machines.entry(from).or_default();
        machine.next_port = machine.next_port.checked_add(1).unwrap_or(0).max(30_000);
        let from = SocketAddr::new(from, machine.next_port);
        self.calls.insert(id, Call { from, life, to, waker: None, outcome: None });
        let at = self.now_ms + self.latency(from.ip(), to.ip());
        self.schedule(at, Event::Call { call: id, tries: 0 });
        id
    }

    pub(super) fn call_mut(&mut self, id: u64) -> Option<&mut Call> {
        self.calls.get_mut(&id)
    }

    /// Nobody waits for this call any more.
    pub(super) fn hang_up(&mut self, id: u64, dropped: &mut Vec<Waker>) {
        let Some(call) = self.calls.remove(&id) else { return };
        dropped.extend(call.waker);
        if let Some(Ok(connection)) = call.outcome {
            self.close(connection, 0, dropped);
        }
    }

    pub(super) fn forget_call(&mut self, id: u64) {
        self.calls.remove(&id);
    }

    /// A connection request arrives, or is lost before a blocked link and sent again.
    fn called(&mut self, id: u64, tries: u32, woken: &mut Vec<Waker>) {
        let Some(call) = self.calls.get(&id) else { return };
        let (from, to, life) = (call.from, call.to, call.life);
        if !self.is_alive(from.ip(), life) {
            self.calls.remove(&id);
            return;
        }
        let is_there = self.machines.get(&to.ip()).is_some_and(|machine| machine.has_kernel);
        let is_open = self.is_open(from.ip(), to.ip()) && self.is_open(to.ip(), from.ip());
        if !is_open || !is_there {
            // As Linux: 1 s, 2 s, 4 s. The caller gives up by itself.
            if tries < 6 {
                self.schedule(
                    self.now_ms + (1000 << tries),
                    Event::Call { call: id, tries: tries + 1 },
                );
            }
            return;
        }
        let outcome = self.establish(from, life, to, woken);
        let at = self.now_ms + self.latency(to.ip(), from.ip());
        if let Some(call) = self.calls.get_mut(&id) {
            call.outcome = Some(outcome);
        }
        self.schedule(at, Event::Answer { call: id });
    }

    fn establish(
        &mut self,
        from: SocketAddr,
        life: u64,
        to: SocketAddr,
        woken: &mut Vec<Waker>,
    ) -> Result<ConnectionId, i32> {
        let id = self.id();
        let Some(listening) = self.listeners.get_mut(&to) else {
            self.counts.refused += 1;
            return Err(libc::ECONNREFUSED);
        };
        if listening.waiting.len() >= BACKLOG {
            return Err(libc::ECONNREFUSED);
        }
        listening.waiting.push_back((id, from));
        woken.extend(listening.waker.take());
        let ends = [End::new(from, life), End::new(to, listening.life)];
        let stalled = [VecDeque::new(), VecDeque::new()];
        self.connections.insert(id, Connection { ends, stalled });
        self.counts.connections += 1;
        Ok(id)
    }

    fn end(&mut self, id: ConnectionId, side: usize) -> Option<&mut End> {
        let end = self.connections.get_mut(&id)?.ends.get_mut(side)?;
        end.life.is_some().then_some(end)
    }

    pub(super) fn peer_address(&self, id: ConnectionId, side: usize) -> Option<SocketAddr> {
        Some(self.connections.get(&id)?.ends.get(1 - side)?.address)
    }

    /// Reads what is there; `None` would block.
    pub(super) fn read(
        &mut self,
        id: ConnectionId,
        side: usize,
        buffer: &mut dyn BufMut,
        woken: &mut Vec<Waker>,
    ) -> Option<Result<usize, i32>> {
        let Some(end) = self.end(id, side) else { return Some(Err(libc::ECONNRESET)) };
        if end.inbox.is_empty() {
            if end.is_reset {
                return Some(Err(libc::ECONNRESET));
            }
            return end.at_end.then_some(Ok(0));
        }
        let count = end.inbox.len().min(buffer.remaining_mut());
        let (front, back) = end.inbox.as_slices();
        for slice in [front, back] {
            let room = buffer.remaining_mut();
            buffer.put_slice(slice.get(..room).unwrap_or(slice));
        }
        end.inbox.drain(..count);
        if let Some(peer) = self.connections.get_mut(&id).and_then(|c| c.ends.get_mut(1 - side)) {
            peer.outstanding = peer.outstanding.saturating_sub(count);
            woken.extend(peer.writer.take());
        }
        Some(Ok(count))
    }

    pub(super) fn is_readable(&mut self, id: ConnectionId, side: usize, waker: &Waker) -> bool {
        let Some(end) = self.end(id, side) else { return true };
        let is_ready = !end.inbox.is_empty() || end.at_end || end.is_reset;
        if !is_ready {
            end.reader = Some(waker.clone());
        }
        is_ready
    }

    pub(super) fn is_writable(&mut self, id: ConnectionId, side: usize, waker: &Waker) -> bool {
        let Some(end) = self.end(id, side) else { return true };
        let is_ready = end.outstanding < WINDOW_BYTES || end.is_reset || end.has_closed;
        if !is_ready {
            end.writer = Some(waker.clone());
        }
        is_ready
    }

    /// Takes bytes to send, as many as the window has room for; `None` would block.
    pub(super) fn write(
        &mut self,
        id: ConnectionId,
        side: usize,
        slices: &[std::io::IoSlice<'_>],
    ) -> Option<Result<usize, i32>> {
        let Some(end) = self.end(id, side) else { return Some(Err(libc::ECONNRESET)) };
        if end.is_reset {
            return Some(Err(libc::ECONNRESET));
        }
        if end.has_closed {
            return Some(Err(libc::EPIPE));
        }
        let room = WINDOW_BYTES.saturating_sub(end.outstanding);
        let total: usize = slices.iter().map(|slice| slice.len()).sum();
        let count = total.min(room);
        if count == 0 && total > 0 {
            return None;
        }
        end.outstanding += count;
        let mut bytes: Vec<u8> = Vec::with_capacity(count);
        for slice in slices {
            let left = count - bytes.len();
            bytes.extend(slice.iter().take(left));
        }
        while !bytes.is_empty() {
            let rest = bytes.split_off(bytes.len().min(PACKET_BYTES));
            self.emit(id, side, Packet::Bytes(bytes));
            bytes = rest;
        }
        Some(Ok(count))
    }

    pub(super) fn close_write(&mut self, id: ConnectionId, side: usize) {
        let Some(end) = self.end(id, side) else { return };
        if !end.has_closed {
            end.has_closed = true;
            self.emit(id, side, Packet::End);
        }
    }

    /// The stream is dropped: bytes that were not read are answered with a reset, as TCP does.
    pub(super) fn close(&mut self, id: ConnectionId, side: usize, dropped: &mut Vec<Waker>) {
        let Some(end) = self.end(id, side) else { return };
        if !end.inbox.is_empty() {
            self.emit(id, side, Packet::Reset);
        } else {
            self.close_write(id, side);
        }
        self.let_go(id, side, dropped);
    }
}
