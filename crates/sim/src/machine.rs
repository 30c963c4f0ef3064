//! A simulated server: a disk, an address, a clock of its own, and the lives of one node on it.
//!
//! Each life has a tokio runtime of its own whose clock is paused: it jumps from timer to timer and
//! never waits. The simulation lets all machines run one tick after the other, so the only thing
//! that passes between them is what the network delivers at the beginning of a tick. A machine on
//! which nothing happens sits out ticks (`IDLE_MS`): most machines do, most of the time.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, SystemTime};

use milpa_host::disk::Disk;
use milpa_host::net::Network;
use milpa_host::world::{self, Memory, World};
use tokio::runtime::Runtime;
use tokio::task::LocalSet;
use tokio::time::Instant;

use crate::disk::{Mount, Platter};
use crate::network::{Card, Ending, Wires};
use crate::random::Random;
use crate::trace;

/// Where all wall clocks begin: some day in 2027.
const WALL_START: Duration = Duration::from_secs(1_800_000_000);
/// For how long a machine to which nothing happens may sit out ticks: its timers fire so much late,
/// as seen from the others. On its own clock they fire in time.
const IDLE_MS: u64 = 5;
/// What a machine says it has.
const MEMORY: Memory = Memory { used: 64 << 20, total: 16 << 30 };

/// How long jobs of a machine's threads take, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobTimes {
    pub min_us: u64,
    pub max_us: u64,
}

/// A machine in one of its lives, as its node sees it.
struct Life {
    network: Card,
    disk: Mount,
    started: Instant,
    /// Milliseconds that the wall clock is off.
    wall_offset_ms: Rc<Cell<i64>>,
    /// How many times slower than usual the disk is.
    slowness: Rc<Cell<u64>>,
    times: JobTimes,
    random: RefCell<Random>,
    born_ms: u64,
}

impl World for Life {
    fn network(&self) -> &dyn Network {
        &self.network
    }

    fn disk(&self) -> &dyn Disk {
        &self.disk
    }

    fn started(&self) -> Instant {
        self.started
    }

    fn wall(&self) -> SystemTime {
        let age_ms = self.started.elapsed().as_millis() as i64;
        let since = self.born_ms as i64 + age_ms + self.wall_offset_ms.get();
        SystemTime::UNIX_EPOCH + WALL_START + Duration::from_millis(since.max(0) as u64)
    }

    fn fill(&self, bytes: &mut [u8]) {
        self.random.borrow_mut().fill(bytes);
    }

    fn job_pause(&self, _thread: &str) -> Duration {
        let slowness = self.slowness.get();
        let drawn = self.random.borrow_mut().between(self.times.min_us, self.times.max_us);
        Duration::from_micros(drawn * slowness)
    }

    fn memory(&self) -> Memory {
        MEMORY
    }
}

/// Whether a machine's tasks have been woken since they ran, by its timers or by the network.
#[derive(Debug)]
struct Woken {
    is_woken: AtomicBool,
    /// Wakes the machine's runtime during a step.
    runtime: Mutex<Option<Waker>>,
}

impl Woken {
    fn take(&self) -> bool {
        self.is_woken.swap(false, Ordering::Relaxed)
    }

    fn is_woken(&self) -> bool {
        self.is_woken.load(Ordering::Relaxed)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Woken>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Woken>) {
        self.is_woken.store(true, Ordering::Relaxed);
        if let Some(runtime) = &*locked(&self.runtime) {
            runtime.wake_by_ref();
        }
    }
}

/// A node that runs.
struct Running {
    // In the order in which they must be dropped.
    local: LocalSet,
    runtime: Runtime,
    world: Rc<dyn World>,
    started: Instant,
    woken: Arc<Woken>,
    /// Milliseconds of its own clock that it has run.
    ran_ms: u64,
    /// The world's clock at its last step, and whether anything happened in it.
    stepped_ms: u64,
    was_busy: bool,
    born_ms: u64,
    ended: Rc<RefCell<Option<String>>>,
}

impl Running {
    /// Whether it may not sit out the tick.
    fn is_due(&self, now_ms: u64) -> bool {
        self.was_busy || self.woken.is_woken() || now_ms - self.stepped_ms >= IDLE_MS
    }

    /// Runs its tasks, its own clock going from `begin_ms` to `end_ms`.
    fn run(&mut self, begin_ms: u64, end_ms: u64) {
        if end_ms <= self.ran_ms {
            return;
        }
        let missed = Duration::from_millis(begin_ms.saturating_sub(self.ran_ms));
        self.ran_ms = end_ms;
        let until = self.started + Duration::from_millis(end_ms);
        let (local, woken) = (&mut self.local, &self.woken);
        let waker = Waker::from(Arc::clone(woken));
        let mut was_busy = false;
        self.runtime.block_on(async {
            if !missed.is_zero() {
                tokio::time::advance(missed).await;
            }
            let mut end = std::pin::pin!(tokio::time::sleep_until(until));
            std::future::poll_fn(|cx| {
                if end.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(());
                }
                locked(&woken.runtime).get_or_insert_with(|| cx.waker().clone());
                if woken.take() {
                    was_busy = true;
                    // Not over when the node is: the machine is stopped then.
                    let _ = Pin::new(&mut *local).poll(&mut Context::from_waker(&waker));
                }
                Poll::Pending
            })
            .await;
        });
        self.was_busy = was_busy;
    }
}

/// What runs on a machine: made anew for each life.
pub(crate) type Node = Pin<Box<dyn Future<Output = String>>>;

/// A simulated server.
pub(crate) struct Machine {
    pub name: &'static str,
    pub address: IpAddr,
    pub platter: Arc<Mutex<Platter>>,
    /// The world's clock when it is to run again; 0 if it is not paused (F18).
    pub paused_until_ms: u64,
    /// How fast its clock runs, in millionths (F17).
    pub clock_rate_ppm: u64,
    pub wall_offset_ms: Rc<Cell<i64>>,
    pub slowness: Rc<Cell<u64>>,
    pub lives: u64,
    wires: Arc<Mutex<Wires>>,
    times: JobTimes,
    seed: u64,
    running: Option<Running>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    pub fn new(
        name: &'static str,
        address: IpAddr,
        platter: Platter,
        wires: Arc<Mutex<Wires>>,
        times: JobTimes,
        seed: u64,
    ) -> Machine {
        Machine {
            name,
            address,
            platter: Arc::new(Mutex::new(platter)),
            paused_until_ms: 0,
            clock_rate_ppm: 1_000_000,
            wall_offset_ms: Rc::default(),
            slowness: Rc::new(Cell::new(1)),
            lives: 0,
            wires,
            times,
            seed,
            running: None,
        }
    }

    pub fn disk(&self) -> MutexGuard<'_, Platter> {
        locked(&self.platter)
    }

    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Begins a life: `node` makes what runs on it.
    ///
    /// # Errors
    ///
    /// When the system gives no runtime.
    pub fn start(&mut self, now_ms: u64, node: impl FnOnce() -> Node) -> std::io::Result<()> {
        self.lives += 1;
        let life = self.lives * 2;
        trace::set_machine(self.name);
        trace::note(&format!("starts its life {}", self.lives));
        let effects = Arc::clone(&self.disk().effects);
        locked(&self.wires).boot(self.address, life, effects);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()?;
        let started = {
            let _inside = runtime.enter();
            Instant::now()
        };
        let device = match self.address {
            IpAddr::V4(address) => u64::from(address.to_bits()),
            IpAddr::V6(address) => address.to_bits() as u64,
        };
        let world: Rc<dyn World> = Rc::new(Life {
            network: Card::new(Arc::clone(&self.wires), self.address, life),
            disk: Mount::new(Arc::clone(&self.platter), device),
            started,
            wall_offset_ms: Rc::clone(&self.wall_offset_ms),
            slowness: Rc::clone(&self.slowness),
            times: self.times,
            random: RefCell::new(Random::new(self.seed, &format!("{} {life}", self.name))),
            born_ms: now_ms,
        });
        let local = LocalSet::new();
        let ended = Rc::new(RefCell::new(None));
        {
            let _world = world::enter(Rc::clone(&world));
            let _inside = runtime.enter();
            let (node, ended) = (node(), Rc::clone(&ended));
            local.spawn_local(async move {
                let reason = node.await;
                *ended.borrow_mut() = Some(reason);
            });
        }
        let woken = Arc::new(Woken { is_woken: AtomicBool::new(true), runtime: Mutex::default() });
        let (ran_ms, born_ms, stepped_ms, was_busy) = (0, now_ms, now_ms, true);
        self.running = Some(Running {
            local,
            runtime,
            world,
            started,
            woken,
            ran_ms,
            stepped_ms,
            was_busy,
            born_ms,
            ended,
        });
        Ok(())
    }

    /// Lets the node run up to the world's time. Gives the reason if it ended by itself.
    pub fn step(&mut self, now_ms: u64) -> Option<String> {
        let running = self.running.as_mut()?;
        if now_ms < self.paused_until_ms {
            return None;
        }
        let wakes = std::mem::take(&mut self.paused_until_ms) > 0;
        if !wakes && !running.is_due(now_ms) {
            return None;
        }
        trace::set_machine(self.name);
        let _world = world::enter(Rc::clone(&running.world));
        let on_its_clock = |world_ms: u64| {
            let age_ms = world_ms.saturating_sub(running.born_ms);
            (u128::from(age_ms) * u128::from(self.clock_rate_ppm) / 1_000_000) as u64
        };
        let (begin_ms, end_ms) = (on_its_clock(now_ms - 1), on_its_clock(now_ms));
        // One that was paused finds its clock far ahead before any of its timers has fired; so does
        // one that sat out ticks, if the network wakes it.
        let skips = (wakes || running.woken.is_woken()) && begin_ms > running.ran_ms;
        running.run(if skips { begin_ms } else { running.ran_ms }, end_ms);
        running.stepped_ms = now_ms;
        running.ended.borrow_mut().take()
    }

    /// Whether it runs, and nothing that it does has an effect any more: it must be stopped now.
    pub fn is_at_end(&self) -> bool {
        self.is_running() && self.disk().effects.are_over()
    }

    /// Ends the life, whatever the node was doing.
    pub fn stop(&mut self, ending: Ending) {
        let Some(running) = self.running.take() else { return };
        trace::set_machine(self.name);
        trace::note(&format!("ends its life {}: {ending:?}", self.lives));
        // First nothing that it does counts any more, then it is dropped.
        let dropped = locked(&self.wires).end_life(self.address, ending);
        drop(dropped);
        match ending {
            Ending::Process => self.disk().end_life(),
            Ending::Power => self.disk().cut_power(),
        }
        self.paused_until_ms = 0;
        let _world = world::enter(Rc::clone(&running.world));
        let Running { local, runtime, .. } = running;
        {
            let _inside = runtime.enter();
            drop(local);
        }
        drop(runtime);
        trace::set_machine("");
    }
}
