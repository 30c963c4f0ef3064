//! Data nodes: extents as vectors, equal on all members; what differs is what each has on disk.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use milpa_types::{BLOCK_BYTES, DataError, ExtentId, NodeId, PartitionId, VolumeView};
use milpa_wire::data::{Append, AppendTarget, DataAnswer, DataReply, DataRequest, Overwrite, Read};
use milpa_wire::frame::crc32c;

/// In which all leaders lead.
const TERM: u64 = 7;

#[derive(Default)]
pub struct DataNodes {
    pub extents: BTreeMap<(PartitionId, ExtentId), Extent>,
    next: u64,
    /// Appends, overwrites, reads and flushes that were carried out.
    pub counts: HashMap<&'static str, u64>,
}

#[derive(Default)]
pub struct Extent {
    pub bytes: Vec<u8>,
    pub sealed: bool,
    pub overwritten: bool,
    /// Bytes on each member's disk.
    pub on_disk: BTreeMap<NodeId, u64>,
    /// Blocks that no member has whole.
    pub torn: BTreeSet<u64>,
    /// A block of which members believe that, for so many flushes more.
    pub believed_torn: Option<(u64, u32)>,
}

impl DataNodes {
    pub fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    /// Power fails everywhere, and every member finds this block of each extent torn that is as long.
    pub fn tear(&mut self, block: u64) {
        for extent in self.extents.values_mut() {
            if extent.bytes.len() as u64 > block * BLOCK_BYTES {
                extent.torn.insert(block);
            }
            extent.sealed = true;
        }
    }

    /// Power left no more of any extent anywhere.
    pub fn keep(&mut self, length: usize) {
        for extent in self.extents.values_mut() {
            extent.bytes.truncate(length);
            extent.sealed = true;
        }
    }

    /// Power fails everywhere: what no disk has is gone.
    pub fn cut_power(&mut self) {
        for extent in self.extents.values_mut() {
            let kept = extent.on_disk.values().max().copied().unwrap_or(0);
            extent.bytes.truncate(kept as usize);
            extent.sealed = true;
        }
    }

    pub fn answer(
        &mut self,
        view: &VolumeView,
        node: NodeId,
        request: &DataRequest,
        payload: &Bytes,
    ) -> (DataReply, Bytes) {
        let done =
            |result: Result<(), DataError>| (result.map(|()| DataAnswer::Done), Bytes::new());
        match request {
            DataRequest::Append(append) => (self.append(view, node, append, payload), Bytes::new()),
            DataRequest::Overwrite(it) => done(self.overwrite(view, node, it, payload)),
            DataRequest::Read(read) => match self.read(view, node, read) {
                Ok((checksums, bytes)) => (Ok(DataAnswer::Bytes { checksums, hole: 0 }), bytes),
                Err(error) => (Err(error), Bytes::new()),
            },
            DataRequest::Flush { partition, epoch, extents } => {
                let flushed = self.flush(view, node, (*partition, *epoch), extents);
                let lost = self.lost(*partition, extents);
                let answer = match lost.is_empty() {
                    true => DataAnswer::Done,
                    false => DataAnswer::DoneBut { lost, in_memory: false },
                };
                (flushed.map(|()| answer), Bytes::new())
            }
            DataRequest::Close { .. } => done(Ok(())),
            other => panic!("a client does not send {other:?}"),
        }
    }

    fn append(
        &mut self,
        view: &VolumeView,
        node: NodeId,
        append: &Append,
        payload: &Bytes,
    ) -> DataReply {
        let route = check(view, append.partition, append.epoch)?;
        if route.primary != node {
            return Err(DataError::NotPrimary { hint: Some(route.primary) });
        }
        assert_eq!(append.checksums, of_payload(payload), "checksums of the payload");
        let (id, offset) = match append.target {
            AppendTarget::New { .. } => {
                self.next += 1;
                (ExtentId(self.next), 0)
            }
            AppendTarget::Small { .. } => {
                let id = ExtentId::small(1);
                let held = self.extents.get(&(append.partition, id));
                (id, held.map_or(0, |extent| extent.bytes.len() as u64))
            }
            AppendTarget::Extent { extent, offset } => (extent, offset),
        };
        let extent = self.extents.entry((append.partition, id)).or_default();
        let length = extent.bytes.len() as u64;
        if extent.sealed {
            return Err(DataError::Sealed { length });
        }
        if offset != length {
            return Err(DataError::OutOfOrder { expected: length });
        }
        extent.bytes.extend_from_slice(payload);
        let committed = extent.bytes.len() as u64;
        if append.sync {
            for member in &route.members {
                extent.on_disk.insert(*member, committed);
            }
        }
        *self.counts.entry("append").or_default() += 1;
        Ok(DataAnswer::Appended { extent: id, offset, committed })
    }

    fn overwrite(
        &mut self,
        view: &VolumeView,
        node: NodeId,
        it: &Overwrite,
        payload: &Bytes,
    ) -> Result<(), DataError> {
        let route = check(view, it.partition, it.epoch)?;
        let leader = leader(route);
        if leader != node {
            return Err(DataError::NotPrimary { hint: Some(leader) });
        }
        if it.term != TERM {
            return Err(DataError::OtherTerm { term: TERM });
        }
        assert_eq!(it.checksums, of_payload(payload), "checksums of the payload");
        let extent = self.extents.get_mut(&(it.partition, it.extent)).ok_or(DataError::NoExtent)?;
        let start = it.offset as usize;
        let there = extent.bytes.len() as u64;
        let target = extent.bytes.get_mut(start..start + payload.len());
        let target = target.ok_or(DataError::Lost { length: there })?;
        target.copy_from_slice(payload);
        extent.overwritten = true;
        *self.counts.entry("overwrite").or_default() += 1;
        Ok(())
    }

    fn read(
        &mut self,
        view: &VolumeView,
        node: NodeId,
        read: &Read,
    ) -> Result<(Vec<u32>, Bytes), DataError> {
        let route = view.data.iter().find(|p| p.id == read.partition);
        let route = route.ok_or(DataError::WrongPartition)?;
        let extent = self.extents.get(&(read.partition, read.extent)).ok_or(DataError::NoExtent)?;
        if (read.at_leader || extent.overwritten) && leader(route) != node {
            return Err(DataError::NotPrimary { hint: Some(leader(route)) });
        }
        let (start, length) = (read.offset as usize, read.length as usize);
        let there = extent.bytes.len() as u64;
        let bytes = extent.bytes.get(start..start + length);
        let bytes = bytes.ok_or(DataError::Lost { length: there })?;
        let blocks =
            start as u64 / BLOCK_BYTES..(start + length).div_ceil(BLOCK_BYTES as usize) as u64;
        if let Some(block) = extent.torn.range(blocks).next() {
            return Err(DataError::Corrupt { block: *block });
        }
        let first = (BLOCK_BYTES as usize - start % BLOCK_BYTES as usize).min(length);
        let (head, rest) = bytes.split_at(first);
        let mut checksums = vec![crc32c(head)];
        checksums.extend(of_payload(rest));
        let bytes = Bytes::copy_from_slice(bytes);
        *self.counts.entry("read").or_default() += 1;
        Ok((checksums, bytes))
    }

    /// Torn blocks below what is flushed.
    fn lost(
        &mut self,
        partition: PartitionId,
        extents: &[(ExtentId, u64)],
    ) -> Vec<(ExtentId, u64)> {
        let mut torn = Vec::new();
        for (id, length) in extents {
            let Some(extent) = self.extents.get_mut(&(partition, *id)) else { continue };
            let below = ..length.div_ceil(BLOCK_BYTES);
            torn.extend(extent.torn.range(below).map(|block| (*id, *block)));
            if let Some((block, flushes)) = extent.believed_torn.take()
                && flushes > 0
            {
                torn.push((*id, block));
                extent.believed_torn = Some((block, flushes - 1));
            }
        }
        torn
    }

    fn flush(
        &mut self,
        view: &VolumeView,
        node: NodeId,
        (partition, epoch): (PartitionId, milpa_types::Epoch),
        extents: &[(ExtentId, u64)],
    ) -> Result<(), DataError> {
        check(view, partition, epoch)?;
        for (id, length) in extents {
            let extent = self.extents.get_mut(&(partition, *id)).ok_or(DataError::NoExtent)?;
            let there = extent.bytes.len() as u64;
            if *length > there {
                assert!(extent.sealed, "flush of what is not there");
                return Err(DataError::Lost { length: there });
            }
            extent.on_disk.insert(node, extent.bytes.len() as u64);
        }
        *self.counts.entry("flush").or_default() += 1;
        Ok(())
    }
}

/// The Raft leader, which is not the primary.
pub fn leader(route: &milpa_types::DataPartition) -> NodeId {
    *route.members.iter().rfind(|member| **member != route.primary).unwrap()
}

fn check(
    view: &VolumeView,
    partition: PartitionId,
    epoch: milpa_types::Epoch,
) -> Result<&milpa_types::DataPartition, DataError> {
    let route = view.data.iter().find(|p| p.id == partition).ok_or(DataError::WrongPartition)?;
    if route.epoch == epoch {
        Ok(route)
    } else {
        Err(DataError::StaleEpoch { current: route.epoch })
    }
}

fn of_payload(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(BLOCK_BYTES as usize).map(crc32c).collect()
}
