//! Where replicas go (DESIGN.md section 6).
//!
//! 1. Never two replicas on one node (CFS), at most one in a region, at least one in a trusted
//!    region (InterFS). A node without a region is a region of its own, and trusted.
//! 2. Replicas in the home zone as the policy says (ZoneFS).
//! 3. Among those, the least used of a few candidates drawn by lot: power of d choices.
//! 4. All from one Raft set where that is possible (CFS 2.5).
//!
//! Rules 1 and 2 are laws: what they forbid is refused with the rule and the shortage named.
//! Rules 3 and 4 are wishes.

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{Disk, DiskId, ManagerError, NodeId, NodeState, Role};

use super::View;
use super::seed::SplitMix;
use crate::config::Policy;
use crate::core::{NodeRecord, Replica};

/// One replica weighs as much as this many per mille of utilization: an empty partition will fill.
const REPLICA_WEIGHT: u64 = 10;
/// A primary or leader works more than its backups.
const PRIMARY_WEIGHT: u64 = 30;
/// A replica that is being made writes its disk full for as long as that takes, and who reads or writes
/// there waits behind it: more than what lies there already should weigh against one more.
const MAKING_WEIGHT: u64 = 50;
/// This many extents weigh as much as one per mille of utilization.
const EXTENTS_PER_MILLE: u64 = 1000;

/// How many replicas must be in the home zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ZoneRule {
    /// All.
    Local(String),
    /// The first, which is the primary.
    Primary(String),
    /// None need be.
    Spread,
}

/// What is to be placed, and by which rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementPolicy {
    /// Copies.
    pub replicas: usize,
    /// Rule 2.
    pub zone: ZoneRule,
    /// The d of rule 3.
    pub choices: usize,
}

/// A disk that may take a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskChoice {
    /// Which.
    pub id: DiskId,
    /// Per mille in use.
    pub utilization: u64,
    /// Replicas that are or will be there.
    pub replicas: u64,
    /// Those of them that are being made now.
    pub making: u64,
}

impl DiskChoice {
    fn score(&self) -> u64 {
        self.utilization + self.replicas * REPLICA_WEIGHT
    }

    fn score_of_making(&self) -> u64 {
        self.score() + self.making * MAKING_WEIGHT
    }
}

/// A node that may take a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub node: NodeId,
    /// Its leaf switch.
    pub zone: String,
    /// Its fault domain; empty for one of its own.
    pub region: String,
    /// Whether its region is trusted.
    pub trusted: bool,
    /// Its Raft set.
    pub set: u32,
    /// Per mille in use: disks of a data node, memory of a meta node.
    pub utilization: u64,
    /// Extents held.
    pub extents: u64,
    /// Replicas that are or will be there.
    pub replicas: u64,
    /// Those of them that are primaries, or campaigned first.
    pub primaries: u64,
    /// Disks with room. Never empty.
    pub disks: Vec<DiskChoice>,
}

impl Candidate {
    fn score(&self, as_primary: bool) -> u64 {
        let work = if as_primary { self.primaries * PRIMARY_WEIGHT } else { 0 };
        self.utilization + self.extents / EXTENTS_PER_MILLE + self.replicas * REPLICA_WEIGHT + work
    }

    fn fault_domain(&self) -> FaultDomain<'_> {
        if self.region.is_empty() {
            FaultDomain::Node(self.node)
        } else {
            FaultDomain::Region(&self.region)
        }
    }

    fn disk_mut(&mut self, id: DiskId) -> Option<&mut DiskChoice> {
        self.disks.iter_mut().find(|disk| disk.id == id)
    }

    /// The disk for a replica that is empty at first.
    fn disk(&self) -> DiskId {
        let best = self.disks.iter().min_by_key(|disk| (disk.score(), disk.id));
        best.map(|disk| disk.id).unwrap_or_default()
    }

    /// The disk for a replica that is made from others.
    fn offer(&self) -> Offer {
        let best = self.disks.iter().min_by_key(|disk| (disk.score_of_making(), disk.id));
        let (disk, making) = best.map(|disk| (disk.id, disk.making)).unwrap_or_default();
        Offer { place: Replica { node: self.node, disk }, score: self.score(false), making }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FaultDomain<'a> {
    Region(&'a str),
    Node(NodeId),
}

/// The nodes of one role that may take replicas, and why others may not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Meta or data.
    pub role: Role,
    /// In order of their ids.
    pub candidates: Vec<Candidate>,
    /// Nodes that may not, with the reason.
    pub excluded: Vec<String>,
    /// The fault domain of every node of the role: its region, or itself.
    pub domains: BTreeMap<NodeId, (String, NodeId)>,
    /// Nodes in trusted regions.
    pub trusted: BTreeSet<NodeId>,
}

/// Which rule could not be met, and what is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{rule}: {missing}")]
pub struct Shortage {
    /// The rule in words.
    pub rule: &'static str,
    /// What is there and what is needed.
    pub missing: String,
}

const NODE_RULE: &str = "never two replicas on one node";
const REGION_RULE: &str = "at most one replica in a region";
const TRUST_RULE: &str = "at least one replica in a trusted region";
const ZONE_RULE: &str = "replicas in the home zone";

/// Chooses a place for each replica; the first is the primary.
///
/// # Errors
///
/// [`Shortage`] exactly when no choice meets rules 1 and 2.
pub fn place(
    policy: &PlacementPolicy,
    topology: &Topology,
    seed: u64,
) -> Result<Vec<Replica>, Shortage> {
    let all: Vec<&Candidate> = topology.candidates.iter().collect();
    check(policy, topology, &all)?;
    let mut random = SplitMix::new(seed);
    let chosen =
        from_one_set(policy, topology, &mut random).or_else(|| choose(policy, &all, &mut random));
    let chosen = chosen.ok_or_else(|| Shortage {
        rule: NODE_RULE,
        missing: format!("no choice of {} nodes meets all rules", policy.replicas),
    })?;
    Ok(chosen.iter().map(|c| Replica { node: c.node, disk: c.disk() }).collect())
}

/// A disk that may take one more replica of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Where.
    pub place: Replica,
    /// What lies on its node.
    pub score: u64,
    /// Replicas that are being made there.
    making: u64,
}

impl Offer {
    fn weight(&self) -> u64 {
        self.score + self.making * MAKING_WEIGHT
    }

    /// Whether it would be taken instead of `best` if that made one replica more.
    #[must_use]
    pub fn is_nearly_as_good_as(&self, best: &Offer) -> bool {
        self.score <= best.score + MAKING_WEIGHT
    }
}

/// Looks for a place for one more replica of a partition that has places already: the best first, of
/// a few drawn by lot. It is made from them, so what a disk is making already weighs against it. It
/// goes to none of the nodes `held`, and meets rule 1 together with those `kept`. None if a place can
/// be had, but only on nodes that `allowed` turns down.
///
/// # Errors
///
/// [`Shortage`] when no node meets rule 1.
pub fn offers(
    topology: &Topology,
    (held, kept): (&[NodeId], &[NodeId]),
    choices: usize,
    seed: u64,
    allowed: impl Fn(NodeId) -> bool,
) -> Result<Vec<Offer>, Shortage> {
    let known = |node: &NodeId| topology.domains.get(node);
    let used: BTreeSet<&(String, NodeId)> = kept.iter().filter_map(known).collect();
    let free = |c: &&Candidate| {
        !held.contains(&c.node) && known(&c.node).is_none_or(|domain| !used.contains(domain))
    };
    let able: Vec<&Candidate> = topology.candidates.iter().filter(free).collect();
    if able.is_empty() {
        let role = topology.role;
        let mut missing = format!("another {role} node is needed, none can take a replica");
        if !topology.excluded.is_empty() {
            missing = format!("{missing} ({})", topology.excluded.join(", "));
        }
        return Err(Shortage { rule: NODE_RULE, missing });
    }
    let has_trust = kept.iter().any(|node| topology.trusted.contains(node));
    let mut able: Vec<&Candidate> = if has_trust || kept.is_empty() {
        able
    } else {
        able.into_iter().filter(|candidate| candidate.trusted).collect()
    };
    if able.is_empty() {
        let missing = format!("no {} node with room is in one", topology.role);
        return Err(Shortage { rule: TRUST_RULE, missing });
    }
    able.retain(|candidate| allowed(candidate.node));
    SplitMix::new(seed).sample(&mut able, choices);
    let mut offers: Vec<Offer> = able.into_iter().map(Candidate::offer).collect();
    offers.sort_by_key(|offer| (offer.weight(), offer.place.node));
    Ok(offers)
}

/// Rule 4: the least used of a few sets that can hold all replicas by themselves.
fn from_one_set<'a>(
    policy: &PlacementPolicy,
    topology: &'a Topology,
    random: &mut SplitMix,
) -> Option<Vec<&'a Candidate>> {
    let mut sets: BTreeMap<u32, Vec<&Candidate>> = BTreeMap::new();
    for candidate in &topology.candidates {
        sets.entry(candidate.set).or_default().push(candidate);
    }
    let mut able: Vec<Vec<&Candidate>> =
        sets.into_values().filter(|set| check(policy, topology, set).is_ok()).collect();
    random.sample(&mut able, policy.choices);
    let mean = |set: &Vec<&Candidate>| {
        let total: u64 = set.iter().map(|candidate| candidate.score(true)).sum();
        total * 1000 / (set.len().max(1) as u64)
    };
    let set = able.iter().min_by_key(|set| (mean(set), set.first().map(|c| c.set)))?;
    choose(policy, set, random)
}

/// Rules 1 to 3 among candidates that passed [`check`]: one replica after the other. It never runs
/// into a dead end: each pick uses up one fault domain, and the last one is trusted if none was.
fn choose<'a>(
    policy: &PlacementPolicy,
    among: &[&'a Candidate],
    random: &mut SplitMix,
) -> Option<Vec<&'a Candidate>> {
    let mut chosen: Vec<&Candidate> = Vec::new();
    for place in 0..policy.replicas {
        let is_last = place + 1 == policy.replicas;
        let needs_trust = is_last && !chosen.iter().any(|candidate| candidate.trusted);
        let used: BTreeSet<FaultDomain<'_>> = chosen.iter().map(|c| c.fault_domain()).collect();
        let mut able: Vec<&Candidate> = (among.iter().copied())
            .filter(|c| !used.contains(&c.fault_domain()))
            .filter(|c| c.trusted || !needs_trust)
            .filter(|c| zone_allows(&policy.zone, place, &c.zone))
            .collect();
        random.sample(&mut able, policy.choices);
        chosen.push(able.into_iter().min_by_key(|c| (c.score(place == 0), c.node))?);
    }
    Some(chosen)
}

fn zone_allows(rule: &ZoneRule, place: usize, zone: &str) -> bool {
    match rule {
        ZoneRule::Local(home) => zone == home,
        ZoneRule::Primary(home) => place > 0 || zone == home,
        ZoneRule::Spread => true,
    }
}

/// Whether rules 1 and 2 can be met, and if not, the first that cannot.
fn check(
    policy: &PlacementPolicy,
    topology: &Topology,
    among: &[&Candidate],
) -> Result<(), Shortage> {
    let needed = policy.replicas;
    let shortage = |rule, missing| Err(Shortage { rule, missing });
    let role = topology.role;
    if among.len() < needed {
        let mut missing = format!("{needed} {role} nodes are needed, {} can take one", among.len());
        if !topology.excluded.is_empty() {
            missing = format!("{missing} ({})", topology.excluded.join(", "));
        }
        return shortage(NODE_RULE, missing);
    }
    let regions = count_domains(among);
    if regions < needed {
        return shortage(REGION_RULE, format!("{needed} regions are needed, {regions} have room"));
    }
    if !among.iter().any(|candidate| candidate.trusted) {
        return shortage(TRUST_RULE, format!("no {role} node with room is in one"));
    }
    let (home, needed_at_home) = match &policy.zone {
        ZoneRule::Spread => return Ok(()),
        ZoneRule::Local(home) => (home, needed),
        ZoneRule::Primary(home) => (home, 1),
    };
    let local: Vec<&Candidate> = among.iter().copied().filter(|c| c.zone == *home).collect();
    let regions = count_domains(&local);
    if regions < needed_at_home {
        let missing =
            format!("{needed_at_home} nodes in zone {home:?} are needed, {regions} have room");
        return shortage(ZONE_RULE, missing);
    }
    // All replicas are at home: then so is the trusted one.
    if needed_at_home == needed && !local.iter().any(|candidate| candidate.trusted) {
        return shortage(TRUST_RULE, format!("no node with room in zone {home:?} is in one"));
    }
    Ok(())
}

fn count_domains(among: &[&Candidate]) -> usize {
    among.iter().map(|candidate| candidate.fault_domain()).collect::<BTreeSet<_>>().len()
}

impl Topology {
    /// No node at all.
    #[must_use]
    pub fn empty(role: Role) -> Topology {
        Topology {
            role,
            candidates: Vec::new(),
            excluded: Vec::new(),
            domains: BTreeMap::new(),
            trusted: BTreeSet::new(),
        }
    }

    /// The nodes of `role` as they are now.
    #[must_use]
    pub fn of(view: View<'_>, role: Role) -> Topology {
        let mut topology = Topology::empty(role);
        let set_nodes = view.policy.raft_set_nodes.max(1);
        let nodes = view.state.nodes().filter(|node| node.role == role);
        for (rank, node) in (0_u32..).zip(nodes) {
            let region = node.region.clone();
            let alone = if region.is_empty() { node.id } else { NodeId::default() };
            topology.domains.insert(node.id, (region, alone));
            if is_trusted(view.policy, node) {
                topology.trusted.insert(node.id);
            }
            match candidate(view, node, rank / set_nodes) {
                Ok(candidate) => topology.candidates.push(candidate),
                Err(reason) => topology.excluded.push(format!("node {} {reason}", node.id)),
            }
        }
        topology.count_present(view);
        topology
    }

    fn count_present(&mut self, view: View<'_>) {
        match self.role {
            Role::Meta => {
                for record in view.state.meta_partitions() {
                    let place = |node: &NodeId| Replica { node: *node, disk: DiskId::default() };
                    let replicas: Vec<Replica> =
                        record.members.iter().chain(&record.joining).map(place).collect();
                    self.count(&replicas, record.members.first().copied());
                }
            }
            Role::Data => {
                for record in view.state.data_partitions() {
                    self.count(&record.replicas, Some(record.configuration.primary));
                }
                for task in view.state.tasks() {
                    self.count_making(task.place);
                }
            }
            Role::Manager | Role::Client | Role::Admin => {}
        }
    }

    /// Takes replicas into account that are, or have just been, placed.
    pub fn count(&mut self, replicas: &[Replica], primary: Option<NodeId>) {
        for replica in replicas {
            let Some(candidate) = self.candidate_mut(replica.node) else { continue };
            candidate.replicas += 1;
            candidate.primaries += u64::from(primary == Some(replica.node));
            if let Some(disk) = candidate.disk_mut(replica.disk) {
                disk.replicas += 1;
            }
        }
    }

    /// Takes a replica into account that is, or will at once be, made from others.
    pub fn count_making(&mut self, place: Replica) {
        let candidate = self.candidate_mut(place.node);
        if let Some(disk) = candidate.and_then(|candidate| candidate.disk_mut(place.disk)) {
            disk.making += 1;
        }
    }

    /// How many replicas each disk is making.
    #[must_use]
    pub fn making(&self) -> BTreeMap<Replica, u64> {
        let disks = self.candidates.iter().flat_map(|candidate| {
            let place = |disk: DiskId| Replica { node: candidate.node, disk };
            candidate.disks.iter().map(move |disk| (place(disk.id), disk.making))
        });
        disks.collect()
    }

    fn candidate_mut(&mut self, node: NodeId) -> Option<&mut Candidate> {
        let found = self.candidates.binary_search_by_key(&node, |candidate| candidate.node);
        found.ok().and_then(|at| self.candidates.get_mut(at))
    }
}

/// Places several partitions, each seeing those before it.
///
/// # Errors
///
/// [`ManagerError::NoPlacement`] with the rule and the shortage.
pub fn place_many(
    view: View<'_>,
    role: Role,
    replicas: usize,
    count: usize,
) -> Result<Vec<Vec<Replica>>, ManagerError> {
    let mut topology = Topology::of(view, role);
    let choices = view.policy.choices as usize;
    let policy = PlacementPolicy { replicas, zone: ZoneRule::Spread, choices };
    let mut random = SplitMix::new(view.seed);
    let mut placed = Vec::with_capacity(count);
    for _ in 0..count {
        let replicas = place(&policy, &topology, random.next_u64()).map_err(|shortage| {
            let wanted = format!("{replicas} replicas of a {role} partition");
            ManagerError::NoPlacement { wanted, shortage: shortage.to_string() }
        })?;
        topology.count(&replicas, replicas.first().map(|replica| replica.node));
        placed.push(replicas);
    }
    Ok(placed)
}

fn candidate(view: View<'_>, node: &NodeRecord, set: u32) -> Result<Candidate, &'static str> {
    match node.state {
        NodeState::Active => {}
        NodeState::Silent => return Err("is silent"),
        NodeState::Draining => return Err("is drained"),
        NodeState::Dead => return Err("is dead"),
    }
    let load = view.loads.report(node.id);
    let disks = view.loads.disks(node);
    // Only disks that the state knows can be named in a command.
    let registered = |disk: &&Disk| node.disks.iter().any(|known| known.id == disk.id);
    let stays = |disk: &&Disk| !node.disks_draining.contains_key(&disk.id);
    let usable: Vec<&Disk> = (disks.iter().filter(registered).filter(stays))
        .filter(|disk| has_room(view.policy, disk))
        .collect();
    if node.role == Role::Meta && disks.iter().any(|disk| disk.fenced.is_some()) {
        return Err("has a failed disk");
    }
    if usable.is_empty() {
        return Err("has no disk with room");
    }
    let utilization = match node.role {
        Role::Meta => {
            let memory = load.map_or(0, |load| load.memory_bytes);
            per_mille(memory, view.policy.meta_memory_bytes)
        }
        // Taken last: what is placed there waits for it.
        _ if is_slow(view, node) => 1000,
        _ => {
            let capacity =
                usable.iter().map(|disk| disk.capacity_bytes).fold(0, u64::saturating_add);
            let free = usable.iter().map(|disk| disk.free_bytes).fold(0, u64::saturating_add);
            per_mille(capacity.saturating_sub(free), capacity)
        }
    };
    let choice = |disk: &&Disk| DiskChoice {
        id: disk.id,
        utilization: per_mille(
            disk.capacity_bytes.saturating_sub(disk.free_bytes),
            disk.capacity_bytes,
        ),
        replicas: 0,
        making: 0,
    };
    Ok(Candidate {
        node: node.id,
        zone: node.zone.clone(),
        region: node.region.clone(),
        trusted: is_trusted(view.policy, node),
        set,
        utilization,
        extents: load.map_or(0, |load| load.data.values().map(|report| report.extents).sum()),
        replicas: 0,
        primaries: 0,
        disks: usable.iter().map(choice).collect(),
    })
}

fn is_slow(view: View<'_>, node: &NodeRecord) -> bool {
    view.loads.avoided_ms(node.id, view.now_ms).is_some()
        || view.loads.slow(node.id, view.now_ms, view.policy.silence_period_ms).is_some()
}

fn is_trusted(policy: &Policy, node: &NodeRecord) -> bool {
    let trusted = &policy.trusted_regions;
    node.region.is_empty() || trusted.is_empty() || trusted.contains(&node.region)
}

/// Whether a disk may take new extents.
#[must_use]
pub fn has_room(policy: &Policy, disk: &Disk) -> bool {
    let reserve = policy.disk_free_bytes_min.min(disk.capacity_bytes / 20);
    disk.fenced.is_none() && disk.free_bytes > reserve
}

fn per_mille(part: u64, whole: u64) -> u64 {
    let scaled = u128::from(part) * 1000 / u128::from(whole.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX).min(1000)
}
