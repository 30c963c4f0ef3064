//! `--repair`: what can be mended without losing anything is, each by its partition, which refuses when
//! what was found is not so any more.

use milpa_host::clock::wall;
use milpa_types::{InodeId, Timestamp};
use milpa_wire::check::MetaRepair;

use crate::ask::{FsckError, Servers};
use crate::finding::{Finding, Remedy};

/// Mends what it can, and notes what was done with each finding.
pub(crate) async fn repair(
    servers: &mut Servers<'_>,
    findings: &mut [Finding],
) -> Result<(), FsckError> {
    for finding in findings {
        let remedy = std::mem::take(&mut finding.remedy);
        let why_not = match &remedy {
            Remedy::None => "nothing is known to be safe",
            Remedy::Elsewhere(remedy) => remedy,
            _ => "it is not so any more",
        };
        let mut outcome = format!("not repaired: {why_not}");
        let repairs = match remedy {
            Remedy::Repairs(repairs) => repairs,
            Remedy::Delete(inode) => deletion(servers, inode).await?.into_iter().collect(),
            Remedy::RemoveNames(inode, removals) if is_missing(servers, inode).await? => removals,
            Remedy::RemoveNames(..) | Remedy::Elsewhere(_) | Remedy::None => Vec::new(),
        };
        if !repairs.is_empty() {
            finding.repair = Some("repair begun, without an answer".to_owned());
        }
        for (owner, repair) in repairs {
            outcome = match servers.repair(owner, now(), repair.clone()).await? {
                Ok(()) => format!("repaired: {}", done(&repair)),
                Err(reason) => format!("not repaired: {reason}"),
            };
        }
        finding.repair = Some(outcome);
    }
    Ok(())
}

/// The last look before something is deleted: there is still no name, in any partition.
async fn deletion(
    servers: &mut Servers<'_>,
    inode: InodeId,
) -> Result<Option<(InodeId, MetaRepair)>, FsckError> {
    let looks = servers.look(&[inode]).await?;
    let look = looks.first().filter(|look| look.names == 0 && !look.is_unsure());
    let changed = look.and_then(|look| look.inode).map(|inode| inode.changed);
    Ok(changed.map(|changed| (inode, MetaRepair::DeleteInode { inode, changed })))
}

/// The last look before a name is removed. The name's partition cannot see whether an inode of another
/// one is there, and takes our word for it.
async fn is_missing(servers: &mut Servers<'_>, inode: InodeId) -> Result<bool, FsckError> {
    let looks = servers.look(&[inode]).await?;
    Ok(looks.first().is_some_and(|look| look.inode.is_none() && !look.is_unsure()))
}

fn done(repair: &MetaRepair) -> String {
    match repair {
        MetaRepair::Recount { .. } => "counted anew".to_owned(),
        MetaRepair::SetLinks { links, .. } => format!("link count is {links}"),
        MetaRepair::DeleteInode { .. } => "deleted".to_owned(),
        MetaRepair::RemoveName { .. } => "name removed".to_owned(),
    }
}

fn now() -> Timestamp {
    let since = wall().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timestamp(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}
