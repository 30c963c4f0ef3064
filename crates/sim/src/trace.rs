//! What happened, in order: the last events in words for people, all of them in one hash.
//!
//! The trace belongs to the thread, because a seed runs on a thread of its own and the log lines of
//! the nodes under test arrive through a global hook. Two runs of a seed took the same course if
//! and only if their hashes are equal, as far as 64 bits tell.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;

use tracing::field::{Field, Visit};
use tracing::{Level, Metadata, Subscriber, span};

/// Events kept in words.
const EVENTS_KEPT: usize = 400;
/// Different lines of level ERROR kept.
const ERRORS_KEPT: usize = 200;
/// What a replica says of itself when it leads.
const ELECTED: &str = "milpa_raft::elected";

/// What a manager says of a node, and how that ends if it is dead.
const NODE_STATE: &str = "node state";
const DEAD: &str = " state=Dead";
/// What a data node says when it puts a configuration into force, and what of it follows partition and epoch.
const CONFIGURED: &str = "configuration";
const MEMBERS: &str = " members=";

/// The course of one run.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    /// Simulated milliseconds.
    pub now_ms: u64,
    /// Whose code runs.
    pub machine: &'static str,
    hash: u64,
    events: VecDeque<String>,
    /// Lines of level ERROR by their text, and how often they came.
    pub errors: BTreeMap<String, u64>,
    /// Panics of nodes: each is a failure of the run.
    pub panics: Vec<String>,
    /// Who led which group in which term (Raft's election safety), and who else did.
    leaders: BTreeMap<(bool, u64, u64), (&'static str, u64)>,
    /// The members and the primary of each partition and epoch.
    configurations: BTreeMap<String, String>,
    /// What broke a promise: the check, and what it saw.
    broken: Vec<(&'static str, String)>,
    /// What the managers said of nodes that are dead to them.
    called_dead: BTreeSet<String>,
    /// Everything is printed as it comes.
    pub is_verbose: bool,
}

thread_local! {
    static TRACE: RefCell<Trace> = RefCell::default();
}

fn with<T>(act: impl FnOnce(&mut Trace) -> T) -> T {
    TRACE.with_borrow_mut(act)
}

/// Begins anew.
pub(crate) fn begin(is_verbose: bool) {
    with(|trace| *trace = Trace { is_verbose, ..Trace::default() });
}

/// Ends the run: all that was recorded.
pub(crate) fn end() -> Trace {
    with(std::mem::take)
}

/// The simulated time of all that follows.
pub(crate) fn set_now(now_ms: u64) {
    with(|trace| trace.now_ms = now_ms);
}

/// The simulated time.
pub(crate) fn now_ms() -> u64 {
    with(|trace| trace.now_ms)
}

/// Whose code runs from here on.
pub(crate) fn set_machine(name: &'static str) {
    with(|trace| trace.machine = name);
}

/// Counts numbers into the hash that need no words.
pub(crate) fn mix(numbers: &[u64]) {
    with(|trace| numbers.iter().for_each(|number| trace.mix(*number)));
}

/// Records an event.
pub(crate) fn note(text: &str) {
    with(|trace| trace.note(text));
}

/// How many panics there were so far.
pub(crate) fn panics() -> usize {
    with(|trace| trace.panics.len())
}

/// What broke a promise since this was asked last: the check, and what it saw.
pub(crate) fn broken() -> Vec<(&'static str, String)> {
    with(|trace| std::mem::take(&mut trace.broken))
}

impl Trace {
    fn elected(&mut self, Election { group, term, node }: &Election) {
        // The managers number their group by themselves.
        let key = (self.machine.starts_with("manager"), *group, *term);
        let this = (self.machine, *node);
        let known = *self.leaders.entry(key).or_insert(this);
        if known != this {
            let detail = format!("group {group}, term {term}: {known:?} and {this:?}");
            self.broken.push(("one leader per term", detail));
        }
    }

    /// Every node that comes to an epoch finds the same members in it, and the same primary.
    fn configured(&mut self, fields: &str) {
        let Some((epoch, members)) = fields.split_once(MEMBERS) else { return };
        let known = self.configurations.entry(epoch.to_owned()).or_insert(members.to_owned());
        if known != members {
            let detail = format!("{epoch}: {known} and {members}");
            self.broken.push(("one configuration per epoch", detail));
        }
    }

    fn mix(&mut self, number: u64) {
        self.hash = (self.hash.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn note(&mut self, text: &str) {
        self.mix(self.now_ms);
        for chunk in text.as_bytes().chunks(8) {
            let number = chunk.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
            self.mix(number);
        }
        let line = format!("{:>9.3} {:<8} {text}", self.now_ms as f64 / 1000.0, self.machine);
        if self.is_verbose {
            // Who closes the pipe has read enough.
            let _ = writeln!(std::io::stdout(), "{line}");
        }
        if self.events.len() >= EVENTS_KEPT {
            self.events.pop_front();
        }
        self.events.push_back(line);
    }

    /// The hash of all events.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// How many replicas were seen to lead, each in a term of its own.
    pub fn elections(&self) -> u64 {
        self.leaders.len() as u64
    }

    /// How many epochs data nodes have come to.
    pub fn epochs(&self) -> u64 {
        self.configurations.len() as u64
    }

    /// The last events, oldest first.
    pub fn last(&self, count: usize) -> impl Iterator<Item = &str> {
        let skipped = self.events.len().saturating_sub(count);
        self.events.iter().skip(skipped).map(String::as_str)
    }
}

/// Takes the log lines of the nodes under test into the trace.
#[derive(Debug)]
pub(crate) struct LogLines {
    /// Lines below this level are passed over.
    pub level: Level,
}

/// Of a replica that leads.
#[derive(Default)]
struct Election {
    group: u64,
    term: u64,
    node: u64,
}

impl Visit for Election {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "group" => self.group = value,
            "term" => self.term = value,
            "node" => self.node = value,
            _ => {}
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

/// A log line as text: the message first, then the fields.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

impl Subscriber for LogLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        target == ELECTED || *metadata.level() <= self.level && target.starts_with("milpa")
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        if event.metadata().target() == ELECTED {
            let mut election = Election::default();
            event.record(&mut election);
            return with(|trace| trace.elected(&election));
        }
        let mut line = Line::default();
        event.record(&mut line);
        let level = *event.metadata().level();
        with(|trace| {
            trace.note(&format!("{level} {}{}", line.message, line.fields));
            if line.message == NODE_STATE && line.fields.ends_with(DEAD) {
                trace.called_dead.insert(line.fields);
                return;
            }
            if line.message == CONFIGURED {
                trace.configured(&line.fields);
            }
            if level == Level::ERROR
                && (trace.errors.len() < ERRORS_KEPT || trace.errors.contains_key(&line.message))
            {
                *trace.errors.entry(line.message).or_default() += 1;
            }
        });
    }
}

/// Whether the managers have called the node at this address dead.
pub(crate) fn was_called_dead(address: SocketAddr) -> bool {
    with(|trace| trace.called_dead.iter().any(|fields| fields.contains(&address.to_string())))
}

/// Whether a line of level ERROR with this text has come.
pub(crate) fn has_error(text: &str) -> bool {
    with(|trace| trace.errors.contains_key(text))
}

/// Panics of nodes are caught by their tasks; here they are remembered.
pub(crate) fn catch_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let _ = TRACE.try_with(|trace| {
            let Ok(mut trace) = trace.try_borrow_mut() else { return };
            trace.note(&format!("PANIC {panic}"));
            let machine = trace.machine;
            // redb panics on some pages that have rotted, and the managers' checkpoint catches that.
            if !panic.location().is_some_and(|at| at.file().contains("/redb-")) {
                trace.panics.push(format!("{machine}: {panic}"));
            }
        });
        print(panic);
    }));
}
