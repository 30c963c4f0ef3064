//! What a replica holds of each extent, asked of this node or of another one.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{DataError, Epoch, ExtentId, NodeId};
use milpa_wire::data::{DataAnswer, DataRequest, EXTENT_STATES_MAX, ExtentState};

use super::fill::Filling;

const ASK_WAIT: Duration = Duration::from_secs(5);

/// States of extents by their ids. Those that a replica does not have are missing.
pub(super) type States = BTreeMap<ExtentId, ExtentState>;

impl Filling {
    /// What a node holds of these extents; of all, if none are named.
    pub(super) async fn states_of(
        &self,
        node: NodeId,
        epoch: Epoch,
        only: Option<&[ExtentId]>,
    ) -> Result<States, DataError> {
        let mut states = States::new();
        let chunks: Vec<Vec<ExtentId>> = match only {
            Some(only) => only.chunks(EXTENT_STATES_MAX).map(<[ExtentId]>::to_vec).collect(),
            None => vec![Vec::new()],
        };
        for extents in chunks {
            let found = match node == self.shared.node {
                true => self.states_here(extents).await?,
                false => self.states_there(node, epoch, extents).await?,
            };
            states.extend(found.into_iter().map(|state| (state.extent, state)));
        }
        Ok(states)
    }

    /// What a node says of its replica of an extent; `None` if it has none.
    pub(super) async fn state_at(
        &self,
        extent: ExtentId,
        node: NodeId,
    ) -> Result<Option<ExtentState>, DataError> {
        let epoch = self.epoch().await?;
        Ok(self.states_of(node, epoch, Some(&[extent])).await?.remove(&extent))
    }

    async fn states_here(&self, extents: Vec<ExtentId>) -> Result<Vec<ExtentState>, DataError> {
        let store = self.store.clone();
        let states = self.shared.run_slow(self.disk, move || store.states(&extents)).await;
        states.ok_or(DataError::Busy)
    }

    /// Page by page.
    async fn states_there(
        &self,
        node: NodeId,
        epoch: Epoch,
        extents: Vec<ExtentId>,
    ) -> Result<Vec<ExtentState>, DataError> {
        let (partition, mut after, mut states) = (self.partition, None, Vec::new());
        loop {
            let extents = extents.clone();
            let request = DataRequest::ExtentInfo { partition, epoch, extents, after };
            let answer = self.shared.ask_node(node, &request, Bytes::new(), ASK_WAIT).await?;
            let (DataAnswer::Extents(page), _) = answer else { return Err(DataError::Invalid) };
            let (is_full, last) =
                (page.len() >= EXTENT_STATES_MAX, page.last().map(|state| state.extent));
            states.extend(page);
            // A page that does not move on would be asked for without end.
            if !is_full || last <= after {
                return Ok(states);
            }
            after = last;
        }
    }
}
