//! What operators watch. One set for the process, made at its first use.

use std::sync::OnceLock;
use std::time::Duration;

use milpa_host::telemetry;
use milpa_types::{NodeState, Role};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::planner::View;
use crate::view::partitions_below_target;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NodeLabels {
    role: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StepLabels {
    step: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    op: &'static str,
    result: &'static str,
}

/// The manager's metrics.
pub(super) struct Metrics {
    /// 1 while this manager leads and answers.
    pub(super) is_leader: Gauge,
    /// Raft term.
    pub(super) term: Gauge,
    /// Applied log index.
    pub(super) applied: Gauge,
    /// Events dropped because the inbox was full.
    pub(super) dropped: Counter,
    /// Connections that clients wanted to have carried to nodes that they do not reach.
    pub(super) carried: Counter,
    /// Checkpoints, by duration.
    pub(super) checkpoint: Histogram,
    nodes: Family<NodeLabels, Gauge>,
    below_target: Gauge,
    steps: Family<StepLabels, Counter>,
    steps_in_flight: Gauge,
    tasks: Gauge,
    requests: Family<RequestLabels, Histogram, fn() -> Histogram>,
}

/// The one set of this process.
pub(super) fn metrics() -> &'static Metrics {
    static METRICS: OnceLock<Metrics> = OnceLock::new();
    METRICS.get_or_init(|| {
        let (nodes, steps) = (Family::default(), Family::default());
        {
            let mut registry = telemetry::registry();
            registry.register(
                "milpa_manager_nodes",
                "Nodes by role and state.",
                Family::clone(&nodes),
            );
            registry.register(
                "milpa_manager_steps",
                "Steps asked of nodes, by kind and result.",
                Family::clone(&steps),
            );
        }
        Metrics {
            is_leader: telemetry::gauge(
                "milpa_manager_raft_is_leader",
                "1 while this manager leads and answers.",
            ),
            term: telemetry::gauge("milpa_manager_raft_term", "Raft term."),
            applied: telemetry::gauge("milpa_manager_raft_applied_index", "Applied log index."),
            dropped: telemetry::counter(
                "milpa_manager_inbox_dropped",
                "Messages dropped because the inbox was full.",
            ),
            carried: telemetry::counter(
                "milpa_manager_connections_carried",
                "Connections to nodes that are heard here and that their callers do not reach.",
            ),
            checkpoint: telemetry::histogram(
                "milpa_manager_checkpoint_duration_seconds",
                "Writing the state out, on its own thread.",
            ),
            nodes,
            below_target: telemetry::gauge(
                "milpa_manager_partitions_below_target_copies",
                "Data partitions with fewer members than they should have.",
            ),
            steps,
            steps_in_flight: telemetry::gauge(
                "milpa_manager_steps_in_flight",
                "Steps that nodes have been asked for and not answered.",
            ),
            tasks: telemetry::gauge(
                "milpa_manager_tasks",
                "Replicas being made: repairs and moves under way.",
            ),
            requests: telemetry::histograms(
                "milpa_manager_request_duration_seconds",
                "Requests, from arrival to answer.",
            ),
        }
    })
}

impl Metrics {
    pub(super) fn request(&self, op: &'static str, is_ok: bool, took: Duration) {
        let result = if is_ok { "ok" } else { "error" };
        self.requests.get_or_create(&RequestLabels { op, result }).observe(took.as_secs_f64());
    }

    pub(super) fn step(&self, step: &'static str, is_ok: bool) {
        let result = if is_ok { "ok" } else { "error" };
        self.steps.get_or_create(&StepLabels { step, result }).inc();
    }

    /// Gauges that only the leader knows; called once each pass.
    pub(super) fn observe(&self, view: View<'_>, in_flight: usize) {
        let set = |gauge: &Gauge, value: usize| {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        for role in [Role::Meta, Role::Data] {
            use NodeState::{Active, Dead, Draining, Silent};
            for state in [Active, Silent, Draining, Dead] {
                let matches =
                    |node: &&crate::core::NodeRecord| node.role == role && node.state == state;
                let labels = NodeLabels { role: role.as_str(), state: state.as_str() };
                set(&self.nodes.get_or_create(&labels), view.state.nodes().filter(matches).count());
            }
        }
        set(&self.below_target, partitions_below_target(view));
        set(&self.steps_in_flight, in_flight);
        set(&self.tasks, view.state.tasks().count());
    }
}
