//! From inodes to paths: nobody keeps names by inode, so each level costs a look at all names.

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::InodeId;

use crate::ask::{FsckError, Servers};
use crate::finding::{Finding, shown};
use crate::suspects::Look;

/// Findings whose paths are looked for.
const PATHS_MAX: usize = 256;
/// Levels of directories that are climbed.
const DEPTH_MAX: usize = 256;

/// Finds a path for each finding about an inode, as far as there is one.
pub(crate) async fn find(
    servers: &mut Servers<'_>,
    findings: &mut [Finding],
) -> Result<(), FsckError> {
    let wanted: BTreeSet<InodeId> =
        findings.iter().filter_map(|finding| finding.inode).take(PATHS_MAX).collect();
    let mut named: BTreeMap<InodeId, Option<(InodeId, String)>> = BTreeMap::new();
    let mut level: Vec<InodeId> = wanted.into_iter().collect();
    for _ in 0..DEPTH_MAX {
        level.retain(|inode| *inode != InodeId::ROOT && !named.contains_key(inode));
        if level.is_empty() {
            break;
        }
        let looks = servers.look(&level).await?;
        let names: Vec<_> = level.iter().copied().zip(looks.iter().map(a_name)).collect();
        level = names.iter().filter_map(|(_, name)| Some(name.as_ref()?.0)).collect();
        named.extend(names);
    }
    for finding in findings {
        finding.path = finding.inode.and_then(|inode| path(&named, inode));
    }
    Ok(())
}

fn a_name(look: &Look) -> Option<(InodeId, String)> {
    look.examples.first().map(|(directory, name, _)| (*directory, shown(name)))
}

fn path(named: &BTreeMap<InodeId, Option<(InodeId, String)>>, inode: InodeId) -> Option<String> {
    let (mut parts, mut at) = (Vec::new(), inode);
    while at != InodeId::ROOT && parts.len() < DEPTH_MAX {
        let (directory, name) = named.get(&at)?.as_ref()?;
        parts.push(name.as_str());
        at = *directory;
    }
    parts.reverse();
    (at == InodeId::ROOT).then(|| format!("/{}", parts.join("/")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_end_at_the_root_or_are_none() {
        let name = |directory, text: &str| Some((InodeId(directory), text.to_owned()));
        let named: BTreeMap<_, _> = [
            (InodeId(5), name(3, "file")),
            (InodeId(3), name(1, "directory")),
            (InodeId(6), name(9, "lost")),
            (InodeId(9), None),
            (InodeId(7), name(8, "round")),
            (InodeId(8), name(7, "and")),
        ]
        .into();
        assert_eq!(path(&named, InodeId(5)).as_deref(), Some("/directory/file"));
        assert_eq!(path(&named, InodeId::ROOT).as_deref(), Some("/"));
        assert_eq!(path(&named, InodeId(6)), None);
        assert_eq!(path(&named, InodeId(7)), None, "a loop has an end");
    }
}
