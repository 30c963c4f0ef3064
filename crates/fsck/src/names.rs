//! The walk over inodes and names.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use milpa_types::{InodeId, MetaSlot, PartitionId};
use milpa_wire::check::{CHECK_INODES_MAX, CheckedInode, MetaCheck, MetaChecked};

use crate::ask::{FsckError, Servers, strange};
use crate::check::{Found, Stage};
use crate::finding::{of_fault, of_look};
use crate::links::{INODES_MAX, Named, Window};
use crate::suspects::{Suspect, Verdict};

/// Suspects of one window: with more of them the volume lies in ruins, or changes faster than they can
/// be looked at.
const SUSPECTS_MAX: usize = 65_536;
/// Looks at a suspect until it is given up, and the pause between two.
const LOOKS_MAX: usize = 12;
const LOOK_PAUSE: Duration = Duration::from_millis(250);

/// Checks what each meta partition holds, and that inodes have the names that they should.
pub(crate) async fn check(
    servers: &mut Servers<'_>,
    found: &mut Found<'_>,
) -> Result<(), FsckError> {
    let mut young = Young::of(servers).await?;
    let mut inodes = Inodes::of(servers);
    let mut first = InodeId(0);
    loop {
        let mut window = Window::new(first, INODES_MAX);
        inodes.fill(&mut window, &young, servers, found).await?;
        let (low, high) = window.range(inodes.has_ended());
        let mut suspects = Suspects::default();
        for partition in servers.meta() {
            let mut after = None;
            loop {
                let check = MetaCheck::Dentries { after, first: low, last: high };
                let checked = servers.check(partition, check).await?;
                let MetaChecked::Dentries { named, next } = checked else {
                    return Err(strange(partition));
                };
                for (inode, kind) in named {
                    if young.is(inode) {
                        young.note(inode);
                    } else if window.count(inode, kind) == Named::Suspect {
                        suspects.add(inode);
                    }
                }
                found.tell(Stage::Names);
                after = next;
                if after.is_none() {
                    break;
                }
            }
        }
        window.wrong().for_each(|inode| suspects.add(inode));
        drop(window);
        judge(servers, found, suspects).await?;
        if inodes.has_ended() {
            break;
        }
        first = InodeId(high.0.saturating_add(1));
    }
    let never_given = young.never_given(servers).await?;
    judge(servers, found, never_given).await
}

/// The inodes of all partitions, in order.
struct Inodes {
    partitions: VecDeque<PartitionId>,
    /// Where the next page of the first of them begins.
    from: InodeId,
    page: VecDeque<CheckedInode>,
}

impl Inodes {
    fn of(servers: &Servers<'_>) -> Inodes {
        let partitions = servers.meta().into();
        Inodes { partitions, from: InodeId(0), page: VecDeque::new() }
    }

    fn has_ended(&self) -> bool {
        self.page.is_empty() && self.partitions.is_empty()
    }

    /// Fills a window, if there is enough left.
    async fn fill(
        &mut self,
        window: &mut Window,
        young: &Young,
        servers: &mut Servers<'_>,
        found: &mut Found<'_>,
    ) -> Result<(), FsckError> {
        loop {
            while let Some(inode) = self.page.front() {
                if !young.is(inode.inode) && !window.push(inode) {
                    return Ok(());
                }
                self.page.pop_front();
            }
            let Some(partition) = self.partitions.front().copied() else { return Ok(()) };
            self.turn_page(partition, servers, found).await?;
        }
    }

    async fn turn_page(
        &mut self,
        partition: PartitionId,
        servers: &mut Servers<'_>,
        found: &mut Found<'_>,
    ) -> Result<(), FsckError> {
        let checked = servers.check(partition, MetaCheck::Inodes { from: self.from }).await?;
        let MetaChecked::Inodes { inodes, faults, unlisted, dentries, segments, next } = checked
        else {
            return Err(strange(partition));
        };
        faults.iter().for_each(|fault| found.add(of_fault(fault)));
        found.unlisted += unlisted;
        found.counts.inodes += inodes.len() as u64;
        found.counts.dentries += dentries;
        found.counts.segments += segments;
        found.tell(Stage::Inodes);
        self.page = inodes.into();
        match next.filter(|next| *next > self.from) {
            Some(next) => self.from = next,
            None => {
                self.partitions.pop_front();
                self.from = InodeId(0);
            }
        }
        Ok(())
    }
}

/// Inodes that were made after the check began, those of partitions that have opened since among them:
/// names and inodes of these are not counted, or a busy volume would be all suspects.
struct Young {
    /// The highest inode of each slot at the beginning.
    given: BTreeMap<MetaSlot, InodeId>,
    /// The highest of those that names name.
    named: BTreeSet<InodeId>,
}

impl Young {
    async fn of(servers: &mut Servers<'_>) -> Result<Young, FsckError> {
        Ok(Young { given: given(servers).await?, named: BTreeSet::new() })
    }

    fn is(&self, inode: InodeId) -> bool {
        self.given.get(&inode.slot()).is_none_or(|highest| inode > *highest)
    }

    fn note(&mut self, inode: InodeId) {
        self.named.insert(inode);
        if self.named.len() > SUSPECTS_MAX {
            self.named.pop_first();
        }
    }

    /// What names name and no partition ever gave.
    async fn never_given(mut self, servers: &mut Servers<'_>) -> Result<Suspects, FsckError> {
        servers.refresh().await?;
        self.given = given(servers).await?;
        let inodes = std::mem::take(&mut self.named);
        let inodes = inodes.into_iter().filter(|inode| self.is(*inode)).collect();
        Ok(Suspects { inodes, left_out: 0 })
    }
}

async fn given(servers: &mut Servers<'_>) -> Result<BTreeMap<MetaSlot, InodeId>, FsckError> {
    let slots: Vec<_> = servers.view().meta.iter().map(|meta| (meta.slot, meta.id)).collect();
    let mut given = BTreeMap::new();
    for (slot, partition) in slots {
        given.insert(slot, servers.statistics(partition).await?.inode_highest);
    }
    Ok(given)
}

/// Inodes to look at again.
#[derive(Default)]
struct Suspects {
    inodes: BTreeSet<InodeId>,
    left_out: u64,
}

impl Suspects {
    fn add(&mut self, inode: InodeId) {
        if self.inodes.len() < SUSPECTS_MAX {
            self.inodes.insert(inode);
        } else {
            self.left_out += u64::from(!self.inodes.contains(&inode));
        }
    }
}

/// Looks at suspects until each is sound, or wrong the same way several times.
async fn judge(
    servers: &mut Servers<'_>,
    found: &mut Found<'_>,
    suspects: Suspects,
) -> Result<(), FsckError> {
    found.unjudged += suspects.left_out;
    let inodes: Vec<InodeId> = suspects.inodes.into_iter().collect();
    for some in inodes.chunks(CHECK_INODES_MAX) {
        let mut left: Vec<Suspect> = some.iter().copied().map(Suspect::new).collect();
        found.counts.suspects += left.len() as u64;
        for _ in 0..LOOKS_MAX {
            found.tell(Stage::Suspects);
            let ids: Vec<InodeId> = left.iter().map(|suspect| suspect.id).collect();
            let looks = servers.look(&ids).await?;
            let mut unsteady = Vec::new();
            for (mut suspect, look) in left.into_iter().zip(looks) {
                match suspect.look(look) {
                    Verdict::Sound => {}
                    Verdict::Unsteady => unsteady.push(suspect),
                    Verdict::Wrong(wrong) => found.add(of_look(suspect.id, &suspect.last, wrong)),
                }
            }
            left = unsteady;
            if left.is_empty() {
                break;
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
        found.unjudged += left.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inodes_above_the_highest_of_the_beginning_are_young_and_so_are_all_of_an_unknown_slot() {
        let given = [(MetaSlot(0), InodeId(7))].into();
        let young = Young { given, named: BTreeSet::new() };
        let of_slot_1 = MetaSlot(1).first_inode();
        let is_young = [InodeId(7), InodeId(8), of_slot_1].map(|inode| young.is(inode));
        assert_eq!(is_young, [false, true, true]);
    }
}
