//! Who may ask what. The match is exhaustive: a new request without a row does not compile.

use milpa_types::{PartitionId, Role};
use milpa_wire::data::DataRequest;

/// Whether a role may make a request at all. A client's volume is checked with the partition.
pub(crate) fn is_allowed(role: Role, request: &DataRequest) -> bool {
    use DataRequest as R;
    let roles: &[Role] = match request {
        R::Append(_) | R::Flush { .. } | R::Overwrite(_) | R::Close { .. } => &[Role::Client],
        R::Read(_) => &[Role::Client, Role::Data, Role::Admin],
        R::Replicate(_)
        | R::Seal { .. }
        | R::Fetch { .. }
        | R::Doubtful { .. }
        | R::Licence { .. }
        | R::Returned { .. }
        | R::Probe => &[Role::Data],
        R::ExtentInfo { .. } | R::Freed { .. } => &[Role::Data, Role::Admin],
        R::Free { .. } => &[Role::Meta, Role::Data],
        R::CreatePartition(_)
        | R::DeletePartition { .. }
        | R::Configure { .. }
        | R::SetRelaxed { .. } => &[Role::Manager],
        R::Report => &[Role::Manager, Role::Data, Role::Admin],
        R::Digest { .. } => &[Role::Admin, Role::Data],
        R::LostBlocks { .. } => &[Role::Admin],
    };
    roles.contains(&role)
}

/// The partition that a request is for; `None` for those that concern the node, or several.
pub(crate) fn partition_of(request: &DataRequest) -> Option<PartitionId> {
    use DataRequest as R;
    match request {
        R::Append(append) => Some(append.partition),
        R::Replicate(replicate) => Some(replicate.partition),
        R::Read(read) => Some(read.partition),
        R::Overwrite(overwrite) => Some(overwrite.partition),
        R::CreatePartition(create) => Some(create.partition),
        R::Flush { partition, .. }
        | R::Close { partition, .. }
        | R::ExtentInfo { partition, .. }
        | R::Seal { partition, .. }
        | R::Fetch { partition, .. }
        | R::Doubtful { partition, .. }
        | R::Freed { partition, .. }
        | R::LostBlocks { partition, .. }
        | R::Licence { partition, .. }
        | R::Returned { partition, .. }
        | R::DeletePartition { partition, .. }
        | R::Configure { partition, .. }
        | R::Digest { partition, .. } => Some(*partition),
        R::Free { .. } | R::Report | R::SetRelaxed { .. } | R::Probe => None,
    }
}

#[cfg(test)]
mod tests {
    use milpa_types::Deletion;

    use super::*;

    #[test]
    fn a_client_may_neither_replicate_nor_manage() {
        let partition = PartitionId(1);
        assert!(is_allowed(
            Role::Client,
            &DataRequest::Flush { partition, epoch: milpa_types::Epoch(1), extents: vec![] }
        ));
        for request in [
            DataRequest::DeletePartition { partition, deletion: Deletion::Any },
            DataRequest::Free { ranges: vec![] },
            DataRequest::Report,
            DataRequest::Probe,
            DataRequest::Digest { partition, lengths: Vec::new() },
        ] {
            assert!(!is_allowed(Role::Client, &request), "{request:?}");
        }
        assert!(!is_allowed(
            Role::Meta,
            &DataRequest::DeletePartition { partition, deletion: Deletion::Any }
        ));
    }
}
