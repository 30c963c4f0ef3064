//! Pure functions from what is agreed on ([`State`]) and what was heard ([`Loads`]) to what shall
//! be done next.
//!
//! A [`Plan`] has two parts: *commands* to commit, and *steps* for nodes to take. A step only
//! carries out what is already committed, so it is planned in the pass after its command, and
//! again in every pass until the nodes report that it is done. Plans can be printed and compared;
//! nothing here waits, sends or draws randomness (the seed is handed in).
//!
//! | planner | looks at | plans |
//! |---|---|---|
//! | [`silence`] | when each node was heard | node states |
//! | [`repair`] | members that are away or back | data configurations, epoch by epoch |
//! | [`replace`] | places of data partitions that are lost or have to go | tasks, places to drop |
//! | [`divergence`] | states of meta replicas that differ | steps that refuse the wrong ones |
//! | [`members`] | the same for meta partitions | tasks, members, steps for their groups |
//! | [`balance`] | who orders appends, who leads | primaries and leaders that move |
//! | [`growth`] | how full partitions are | new data partitions, splits (Algorithm 1) |
//! | [`reconcile`] | what nodes lack or hold too much of | steps |
//! | `spread` | places that several replicas to be made could have | who makes which |
//! | [`mod@place`] | nodes, zones, regions, use | where replicas go; called by growth and creation |

pub mod balance;
mod budget;
pub mod divergence;
pub mod drain;
pub mod growth;
pub mod health;
pub mod members;
pub mod place;
pub mod readiness;
pub mod reconcile;
pub mod removal;
pub mod repair;
pub mod replace;
pub mod room;
pub mod seed;
pub mod silence;
mod spread;

use crate::config::Policy;
use crate::core::{CommandV1, State};
use crate::loads::Loads;

pub use place::{Candidate, PlacementPolicy, Shortage, Topology, ZoneRule, place};
pub use readiness::{Lacking, lacking};
pub use reconcile::{Step, StepKey};

/// Replicas confirmed in one command: it must fit into a log entry.
const REPLICAS_PER_COMMAND: usize = 1000;

/// What all planners look at.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// What is agreed on.
    pub state: &'a State,
    /// What was heard.
    pub loads: &'a Loads,
    /// What is aimed at.
    pub policy: &'a Policy,
    /// The leader's monotonic clock.
    pub now_ms: u64,
    /// The leader's wall clock in milliseconds since 1970: for operators, and to give a task up.
    pub unix_ms: u64,
    /// Decides between equals; another one each pass.
    pub seed: u64,
}

/// What one pass wants done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// To commit, in this order. Each was planned against the same state; one that no longer holds
    /// when its turn comes is refused by the state machine and planned anew.
    pub commands: Vec<CommandV1>,
    /// For nodes to take.
    pub steps: Vec<Step>,
    /// What should be done and cannot, for the operator.
    pub problems: Vec<String>,
}

/// One pass of all planners.
#[must_use]
pub fn plan(view: View<'_>) -> Plan {
    let mut plan = Plan::default();
    silence::plan(view, &mut plan);
    repair::plan(view, &mut plan);
    replace::plan(view, &mut plan);
    divergence::plan(view, &mut plan);
    members::plan(view, &mut plan);
    room::plan(view, &mut plan);
    growth::plan(view, &mut plan);
    readiness::plan(view, &mut plan);
    reconcile::plan(view, &mut plan);
    let is_quiet = plan.commands.is_empty() && plan.steps.is_empty();
    if view.policy.balances && is_quiet {
        balance::plan(view, &mut plan);
    }
    plan
}

#[cfg(test)]
pub(crate) mod tests;
