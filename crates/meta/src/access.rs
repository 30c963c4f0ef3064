//! Who may ask a meta node for what.
//!
//! Each request has its row in one exhaustive match: a new request does not compile without one
//! (RELIABILITY.md F25).

use milpa_types::{Role, VolumeId};
use milpa_wire::meta::MetaRequest;

/// Whether a peer may make a request at all; whether a partition belongs to the client's volume
/// is checked where the partition is known.
#[must_use]
pub fn is_allowed(role: Role, request: &MetaRequest) -> bool {
    use Role::{Admin, Client, Data, Manager, Meta};
    let allowed: &[Role] = match request {
        MetaRequest::Read { .. } => &[Client, Admin],
        MetaRequest::Write { .. } | MetaRequest::KeepAlive { .. } => &[Client],
        // Whoever may make any request may batch it: the requests inside are checked one by one.
        MetaRequest::Batch(_) => &[Client, Admin, Manager, Meta, Data],
        MetaRequest::Participate { .. } | MetaRequest::FetchSnapshot { .. } => &[Meta],
        MetaRequest::OfferExtents { .. } => &[Data],
        MetaRequest::CreatePartition(_)
        | MetaRequest::DeletePartition { .. }
        | MetaRequest::Split { .. }
        | MetaRequest::SetVolumeOptions { .. }
        | MetaRequest::Configure { .. }
        | MetaRequest::TransferLeader { .. } => &[Manager],
        MetaRequest::Report => &[Manager, Admin],
        MetaRequest::Check { .. } | MetaRequest::Repair { .. } => &[Admin],
        MetaRequest::RefuseReplica { .. } => &[Manager],
        MetaRequest::StateHash { .. } => &[Admin, Manager],
    };
    allowed.contains(&role)
}

/// Whether a peer may touch partitions of `volume`: a client only those of the volume whose key
/// it proved to have.
#[must_use]
pub fn may_touch(role: Role, proven: Option<VolumeId>, volume: VolumeId) -> bool {
    role != Role::Client || proven == Some(volume)
}

#[cfg(test)]
mod tests {
    use super::*;
    use milpa_types::{
        Deletion, InodeId, MetaSlot, NodeId, PartitionId, SessionId, Timestamp, VolumeOptions,
    };
    use milpa_wire::check::{MetaCheck, MetaRepair};
    use milpa_wire::meta::{
        CreateMetaPartition, MetaRead, MetaWrite, OperationId, RequestId, StateMark, Step,
    };

    /// The whole matrix: every request by every role.
    #[test]
    fn roles_table() {
        let partition = PartitionId(7);
        let id = RequestId { session: SessionId(1), sequence: 1, unanswered: 1 };
        let operation = OperationId { partition, index: 3 };
        let create = CreateMetaPartition {
            partition,
            volume: VolumeId(1),
            options: VolumeOptions::default(),
            slot: MetaSlot(0),
            members: vec![NodeId(1)],
            joins: false,
        };
        let now = Timestamp(0);
        let options = VolumeOptions::default();
        let repair = MetaRepair::Recount { inode: InodeId(9) };
        let mark = StateMark { format: 1, index: 1, hash: 1 };
        let names = MetaCheck::Names { inodes: Vec::new() };
        let rows = [
            (
                MetaRequest::Read { partition, reader: None, read: MetaRead::Statistics },
                "client admin",
            ),
            (MetaRequest::Write { partition, id, now, write: MetaWrite::OpenSession }, "client"),
            (MetaRequest::Batch(Vec::new()), "manager meta data client admin"),
            (MetaRequest::KeepAlive { session: SessionId(1) }, "client"),
            (MetaRequest::Participate { partition, operation, now, step: Step::Inquire }, "meta"),
            (MetaRequest::OfferExtents { partition, offers: Vec::new() }, "data"),
            (MetaRequest::CreatePartition(create), "manager"),
            (MetaRequest::DeletePartition { partition, deletion: Deletion::Any }, "manager"),
            (MetaRequest::Split { partition, end: InodeId(9) }, "manager"),
            (MetaRequest::FetchSnapshot { partition, index: 1, offset: 0 }, "meta"),
            (MetaRequest::Report, "manager admin"),
            (MetaRequest::SetVolumeOptions { volume: VolumeId(1), options }, "manager"),
            (
                MetaRequest::Configure { partition, voters: Vec::new(), learners: Vec::new() },
                "manager",
            ),
            (MetaRequest::TransferLeader { partition, to: NodeId(1) }, "manager"),
            (MetaRequest::StateHash { partition }, "manager admin"),
            (MetaRequest::Check { partition, check: names }, "admin"),
            (MetaRequest::Repair { partition, now, repair }, "admin"),
            (MetaRequest::RefuseReplica { partition, mark }, "manager"),
        ];
        for (request, expected) in rows {
            let roles = [Role::Manager, Role::Meta, Role::Data, Role::Client, Role::Admin];
            let allowed: Vec<&str> =
                roles.iter().filter(|r| is_allowed(**r, &request)).map(|r| r.as_str()).collect();
            assert_eq!(allowed.join(" "), expected, "{request:?}");
        }
    }

    #[test]
    fn a_client_touches_only_its_own_volume() {
        assert!(may_touch(Role::Client, Some(VolumeId(1)), VolumeId(1)));
        assert!(!may_touch(Role::Client, Some(VolumeId(2)), VolumeId(1)));
        assert!(!may_touch(Role::Client, None, VolumeId(1)));
        assert!(may_touch(Role::Meta, None, VolumeId(1)));
    }
}
