//! A simulated server: a disk, an address, a clock of its own, and the lives of one node on it.
//!
//! Each life has a tokio runtime of its own whose clock is paused: it jumps from timer to timer and
//! never waits. The simulation lets all machines run one tick after the other, so the only thing
//! that passes between them is what the network delivers at the beginning of a tick.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// A node that runs.
struct Running {
    // In the order in which they must be dropped.
    local: LocalSet,
    runtime: Runtime,
    world: Rc<dyn World>,
    started: Instant,
    /// Milliseconds of its own clock that it has run.
    ran_ms: u64,
    born_ms: u64,
    ended: Rc<RefCell<Option<String>>>,
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
        let halted = Arc::clone(&self.disk().halted);
        locked(&self.wires).boot(self.address, life, halted);
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
        let (ran_ms, born_ms) = (0, now_ms);
        self.running = Some(Running { local, runtime, world, started, ran_ms, born_ms, ended });
        Ok(())
    }

    /// Lets the node run up to the world's time. Gives the reason if it ended by itself.
    pub fn step(&mut self, now_ms: u64) -> Option<String> {
        let running = self.running.as_mut()?;
        if now_ms < self.paused_until_ms {
            return None;
        }
        trace::set_machine(self.name);
        let _world = world::enter(Rc::clone(&running.world));
        let age_ms = now_ms - running.born_ms;
        let target_ms = (u128::from(age_ms) * u128::from(self.clock_rate_ppm) / 1_000_000) as u64;
        if self.paused_until_ms > 0 {
            // It wakes and finds its clock far ahead, before any of its timers has fired.
            self.paused_until_ms = 0;
            let missed = target_ms.saturating_sub(running.ran_ms + 1);
            let wake = async { tokio::time::advance(Duration::from_millis(missed)).await };
            running.runtime.block_on(wake);
        }
        if target_ms > running.ran_ms {
            running.ran_ms = target_ms;
            let until = running.started + Duration::from_millis(target_ms);
            let tick = running.local.run_until(async { tokio::time::sleep_until(until).await });
            running.runtime.block_on(tick);
        }
        running.ended.borrow_mut().take()
    }

    /// Whether the disk has frozen: the power must be cut now.
    pub fn is_frozen(&self) -> bool {
        self.disk().is_frozen
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
