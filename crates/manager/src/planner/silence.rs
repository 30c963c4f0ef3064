//! Who is silent, who is dead, who is back.

use milpa_types::NodeState;

use super::health::is_replaced;
use super::{Plan, View};
use crate::core::CommandV1;

/// Plans node states. A node is silent when this leader has listened for a whole silence period
/// and not heard it; so nobody is declared silent right after a restart or a change of leader. The
/// same holds for the dead period, which begins anew with each leader. One whose server was set up anew is
/// dead at once: what it was does not come back.
pub fn plan(view: View<'_>, plan: &mut Plan) {
    let period_ms = view.policy.silence_period_ms;
    for node in view.state.nodes() {
        let silent_ms = view.now_ms.saturating_sub(view.loads.heard_ms(node.id));
        let is_heard = view.loads.is_heard(node.id, view.now_ms, period_ms);
        let state = match node.state {
            NodeState::Active | NodeState::Draining if silent_ms >= period_ms => NodeState::Silent,
            NodeState::Silent | NodeState::Dead if is_heard && !node.is_removed => {
                NodeState::Active
            }
            NodeState::Silent
                if silent_ms >= view.policy.dead_after_ms || is_replaced(view, node) =>
            {
                NodeState::Dead
            }
            NodeState::Active | NodeState::Draining | NodeState::Silent | NodeState::Dead => {
                continue;
            }
        };
        plan.commands.push(CommandV1::SetNodeState { node: node.id, state });
    }
}
