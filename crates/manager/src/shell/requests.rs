//! Requests, one function each where there is something to decide.

use milpa_host::clock::now_ms;
use milpa_raft::MultiRaft;
use milpa_types::{DiskId, ManagerError, NodeId, NodeState, Role, VolumeId, VolumeOptions};
use milpa_wire::manager::{Heartbeat, ManagerAnswer, ManagerReply, ManagerRequest, Register};

use super::access::{self, Caller};
use super::event::Responder;
use super::leader::{Waiting, unix_ms, view_of};
use super::replica::{GROUP, Replica, Then};
use super::snapshot;
use crate::core::{
    Applied, CommandV1, NewDataPartition, Registration, VolumeRecord, VolumeState, volume_problems,
};
use crate::planner::{View, drain, growth, place, removal};
use crate::view;

/// What becomes of a request that changes something: a command and what follows it.
type Change = Result<Vec<CommandV1>, ManagerError>;

impl Replica {
    /// Answers, or sees to it that it is answered later.
    pub(super) fn request(
        &mut self,
        multi: &mut MultiRaft,
        caller: Caller,
        request: ManagerRequest,
        responder: Responder,
    ) {
        if let Err(error) = access::check(caller, &request) {
            return responder.send(Err(error));
        }
        if let ManagerRequest::FetchSnapshot { index, offset } = request {
            return self.serve_snapshot(index, offset, responder);
        }
        if matches!(request, ManagerRequest::IsFounded) {
            let answer = match multi.is_rejoining(GROUP) {
                true => ManagerAnswer::CatchesUp,
                false => ManagerAnswer::Founded(multi.has_begun(GROUP)),
            };
            return responder.send(Ok(answer));
        }
        if self.leadership.is_none() {
            // Elected but not yet sure of everything committed before: soon.
            let is_elected = self.leader == Some(self.own);
            let error = if is_elected { ManagerError::Busy } else { self.not_leader() };
            return responder.send(Err(error));
        }
        match request {
            ManagerRequest::Register(register) => self.register(multi, register, responder),
            ManagerRequest::Heartbeat(heartbeat) => {
                let reply = self.heartbeat(heartbeat);
                responder.send(reply);
            }
            ManagerRequest::CreateVolume { name, options, meta_partitions, data_partitions } => {
                let counts = (meta_partitions, data_partitions);
                self.create_volume(multi, &name, &options, counts, responder);
            }
            ManagerRequest::SetVolume { name, options } => {
                let change = self.with_volume(&name, |_, volume| {
                    Ok(vec![CommandV1::SetVolumeOptions { volume: volume.id, options }])
                });
                self.change(multi, change, responder, Then::Volume);
            }
            ManagerRequest::DeleteVolume { name } => {
                let change = self.with_volume(&name, |_, volume| {
                    Ok(vec![CommandV1::DeleteVolume { volume: volume.id }])
                });
                self.change(multi, change, responder, Then::Done);
            }
            ManagerRequest::GrowVolume { name, meta_partitions, data_partitions } => {
                self.grow_volume(multi, &name, meta_partitions, data_partitions, responder);
            }
            ManagerRequest::DrainNode { node, drains } => {
                let change = self.plan_drain(node, None, drains);
                self.change(multi, change, responder, Then::Done);
            }
            ManagerRequest::DrainDisk { node, disk, drains } => {
                let change = self.plan_drain(node, Some(disk), drains);
                self.change(multi, change, responder, Then::Done);
            }
            ManagerRequest::RemoveNode { node } => {
                let change = self.plan_removal(node);
                self.change(multi, change, responder, Then::Done);
            }
            ManagerRequest::Leave { node, incarnation } => {
                let change = self.leave(node, incarnation);
                self.change(multi, change, responder, Then::Done);
            }
            ManagerRequest::RenewLife { node, incarnation, life } => {
                let change = Ok(vec![CommandV1::RenewLife { node, incarnation, life }]);
                self.change(multi, change, responder, Then::Done);
            }
            read => {
                let reply = self.read(caller, read);
                // Nobody else led while this was computed, or the answer may be out of date.
                let is_current = multi.lease_valid(GROUP, now_ms());
                responder.send(if is_current { reply } else { Err(ManagerError::Busy) });
            }
        }
    }

    fn read(&mut self, caller: Caller, request: ManagerRequest) -> ManagerReply {
        use ManagerRequest as R;
        let Some(leadership) = &self.leadership else { return Err(ManagerError::Busy) };
        let view = view_of(&self.state, leadership, &self.config.policy);
        match request {
            R::GetVolume { name, known_version } => {
                let volume = find_volume(view, &name)?;
                if caller.role == Role::Client {
                    check_client(caller, volume)?;
                }
                let id = volume.id;
                self.volume_view(id, Some(known_version))
            }
            R::GetVolumeById { volume } => {
                if self.state.volume(volume).is_none() {
                    return Err(ManagerError::NoVolume { name: format!("with id {volume}") });
                }
                self.volume_view(volume, None)
            }
            R::ListVolumes => {
                let volumes = self.state.volumes().map(|volume| view::summary(view, volume));
                Ok(ManagerAnswer::Volumes(volumes.collect()))
            }
            R::ListNodes | R::GetNodes => Ok(ManagerAnswer::Nodes(view::nodes(view))),
            R::ListTasks => Ok(ManagerAnswer::Tasks(view::tasks(view))),
            R::GetMetaReplicas => {
                Ok(ManagerAnswer::MetaReplicas { wanted: view.policy.meta_replicas })
            }
            R::ListPartitions { volume } => list_partitions(view, volume.as_deref()),
            R::Status => {
                let managers = self.config.managers();
                let status = view::status(view, managers, self.own, &leadership.all_problems());
                Ok(ManagerAnswer::Status(Box::new(status)))
            }
            R::GetVolumeKey { name } => {
                let volume = find_volume(view, &name)?;
                Ok(ManagerAnswer::Key(self.secret.volume_key(volume.id).to_hex()))
            }
            R::Register(_)
            | R::Heartbeat(_)
            | R::CreateVolume { .. }
            | R::SetVolume { .. }
            | R::DeleteVolume { .. }
            | R::GrowVolume { .. }
            | R::DrainNode { .. }
            | R::DrainDisk { .. }
            | R::RemoveNode { .. }
            | R::Leave { .. }
            | R::RenewLife { .. }
            | R::FetchSnapshot { .. }
            | R::IsFounded => Err(ManagerError::Busy),
        }
    }

    fn volume_view(&mut self, id: VolumeId, known_version: Option<u64>) -> ManagerReply {
        let (Some(leadership), Some(volume)) = (&mut self.leadership, self.state.volume(id)) else {
            return Err(ManagerError::Busy);
        };
        let mut view = view::volume(view_of(&self.state, leadership, &self.config.policy), volume);
        leadership.versions.stamp(&mut view);
        if known_version == Some(view.version) {
            return Ok(ManagerAnswer::Unchanged);
        }
        Ok(ManagerAnswer::Volume(Box::new(view)))
    }

    fn register(&mut self, multi: &mut MultiRaft, register: Register, responder: Responder) {
        let Register { node, incarnation, life, role, address, http_address, zone, region, disks } =
            register;
        let registration =
            Registration { node, incarnation, role, address, http_address, zone, region, disks };
        let change = Ok(vec![CommandV1::StartNode { registration, life }]);
        self.change(multi, change, responder, Then::Register);
    }

    fn heartbeat(&mut self, heartbeat: Heartbeat) -> ManagerReply {
        let refused = |reason: String| Err(ManagerError::NodeRefused { reason });
        let id = heartbeat.node;
        let Some(node) = self.state.node(id) else {
            return refused(format!("node {id} is not registered; register first"));
        };
        if node.incarnation != heartbeat.incarnation {
            return refused(format!(
                "node {id} is another one, at {}; start with an empty directory to join anew",
                node.address
            ));
        }
        if node.is_removed {
            return refused(format!("node {id} was removed from the cluster"));
        }
        let Some(leadership) = &mut self.leadership else { return Err(ManagerError::Busy) };
        let is_news = leadership.loads.hear(heartbeat, now_ms());
        let is_back = matches!(node.state, NodeState::Silent | NodeState::Dead);
        leadership.pass_wanted |= is_news || is_back || !leadership.waiting.is_empty();
        Ok(ManagerAnswer::Alive { nodes_version: self.state.nodes_version() })
    }

    /// A node that stops cleanly is silent at once: its partitions go on without waiting.
    fn leave(&mut self, node: NodeId, incarnation: u128) -> Change {
        let known = self.state.node(node).filter(|known| known.incarnation == incarnation);
        let (Some(_), Some(leadership)) = (known, &mut self.leadership) else {
            let reason = format!("node {node} is not registered");
            return Err(ManagerError::NodeRefused { reason });
        };
        leadership.loads.leave(node);
        Ok(vec![CommandV1::SetNodeState { node, state: NodeState::Silent }])
    }

    fn plan_removal(&self, node: NodeId) -> Change {
        let Some(leadership) = &self.leadership else { return Err(ManagerError::Busy) };
        removal::check(view_of(&self.state, leadership, &self.config.policy), node)?;
        Ok(vec![CommandV1::RemoveNode { node }])
    }

    /// A drain that cannot end is refused at once, with the rule that stands against it.
    fn plan_drain(&self, node: NodeId, disk: Option<DiskId>, drains: bool) -> Change {
        let Some(leadership) = &self.leadership else { return Err(ManagerError::Busy) };
        let view = view_of(&self.state, leadership, &self.config.policy);
        if drains {
            drain::check(view, node, disk)?;
        }
        let begun_unix_ms = unix_ms();
        Ok(vec![match disk {
            Some(disk) => CommandV1::DrainDisk { node, disk, drains, begun_unix_ms },
            None => CommandV1::DrainNode { node, drains, begun_unix_ms },
        }])
    }

    fn create_volume(
        &mut self,
        multi: &mut MultiRaft,
        name: &str,
        options: &VolumeOptions,
        counts: (u32, u32),
        responder: Responder,
    ) {
        if let Some(volume) = self.state.volume_by_name(name) {
            // A repeat while the first request is under way waits with it.
            let (volume, is_same) =
                (volume.id, volume.state == VolumeState::Creating && volume.options == *options);
            if is_same {
                return self.wait_for_volume(Waiting { volume, responder, is_creation: true });
            }
            return responder.send(Err(ManagerError::VolumeExists { name: name.to_owned() }));
        }
        let change = self.plan_volume(name, options, counts);
        self.change(multi, change, responder, Then::Create);
    }

    fn plan_volume(&self, name: &str, options: &VolumeOptions, counts: (u32, u32)) -> Change {
        let Some(leadership) = &self.leadership else { return Err(ManagerError::Busy) };
        let view = view_of(&self.state, leadership, &self.config.policy);
        let active_meta = self
            .state
            .nodes()
            .filter(|node| node.role == Role::Meta && node.state == NodeState::Active);
        let meta_count = match counts.0 {
            0 => active_meta.count().max(3),
            count => count as usize,
        };
        let data_count = match counts.1 {
            0 => self.config.policy.data_partitions_initial as usize,
            count => count as usize,
        };
        let problems = volume_problems(name, options, meta_count, data_count);
        if !problems.is_empty() {
            return Err(ManagerError::Invalid { problems });
        }
        let meta = growth::new_meta_partitions(view, meta_count)?;
        let replicas = usize::from(options.replicas);
        let data = place::place_many(view, Role::Data, replicas, data_count)?;
        let data = data.into_iter().map(|replicas| NewDataPartition { replicas }).collect();
        let (name, options) = (name.to_owned(), options.clone());
        Ok(vec![CommandV1::CreateVolume { name, options, meta, data }])
    }

    fn grow_volume(
        &mut self,
        multi: &mut MultiRaft,
        name: &str,
        meta_count: u32,
        data_count: u32,
        responder: Responder,
    ) {
        let volume = self.state.volume_by_name(name).map(|volume| volume.id).unwrap_or_default();
        let change = self.with_volume(name, |view, volume| {
            let mut commands = Vec::new();
            let open = growth::open_partitions(view, volume);
            if meta_count as usize > open.len() {
                let problem = format!(
                    "meta_partitions: value is {meta_count}, allowed 0 to {}, as each is split off \
                     an open one",
                    open.len()
                );
                return Err(ManagerError::Invalid { problems: vec![problem] });
            }
            if data_count > 0 {
                commands.push(growth::add_data_partitions(view, volume, data_count as usize)?);
            }
            let cut = open.into_iter().take(meta_count as usize);
            let records = cut.filter_map(|partition| view.state.meta_partition(partition));
            commands.extend(records.map(|record| growth::begin_split(view, record)));
            Ok(commands)
        });
        self.change(multi, change, responder, |responder| Then::Grow(responder, volume));
    }

    /// Plans a change to a volume that exists.
    fn with_volume(
        &self,
        name: &str,
        plan: impl FnOnce(View<'_>, &VolumeRecord) -> Change,
    ) -> Change {
        let Some(leadership) = &self.leadership else { return Err(ManagerError::Busy) };
        let view = view_of(&self.state, leadership, &self.config.policy);
        plan(view, find_volume(view, name)?)
    }

    /// Proposes the commands of a change; the last one's result answers the caller.
    fn change(
        &mut self,
        multi: &mut MultiRaft,
        change: Change,
        responder: Responder,
        then: impl FnOnce(Responder) -> Then,
    ) {
        let mut commands = match change {
            Ok(commands) => commands,
            Err(error) => return responder.send(Err(error)),
        };
        let Some(last) = commands.pop() else {
            return responder.send(Ok(ManagerAnswer::Done));
        };
        for command in commands {
            if let Err((error, _)) = self.propose(multi, command, Then::Planned) {
                return responder.send(Err(self.refusal(&error)));
            }
        }
        if let Err((error, then)) = self.propose(multi, last, then(responder)) {
            let refusal = self.refusal(&error);
            if let Some(responder) = then.into_responder() {
                responder.send(Err(refusal));
            }
        }
    }

    /// Answers the caller of a command that has been applied.
    pub(super) fn answer_applied(&mut self, then: Then, applied: Applied) {
        if let Applied::Refused(error) = applied {
            if let Some(responder) = then.into_responder() {
                responder.send(Err(error));
            }
            return;
        }
        match (then, applied) {
            (Then::Register(responder), Applied::Registered(node)) => {
                if let Some(leadership) = &mut self.leadership {
                    leadership.loads.register(node, now_ms());
                }
                let cluster = self.state.cluster();
                responder.send(Ok(ManagerAnswer::Registered { cluster, node }));
            }
            (Then::Create(responder), Applied::Volume(volume)) => {
                self.wait_for_volume(Waiting { volume, responder, is_creation: true });
            }
            (Then::Grow(responder, volume), _) => {
                self.wait_for_volume(Waiting { volume, responder, is_creation: false });
            }
            (Then::Volume(responder), Applied::Volume(volume)) => {
                let described = self.state.volume(volume).map(VolumeRecord::describe);
                responder
                    .send(described.map(ManagerAnswer::VolumeCreated).ok_or(ManagerError::Busy));
            }
            (then, _) => {
                if let Some(responder) = then.into_responder() {
                    responder.send(Ok(ManagerAnswer::Done));
                }
            }
        }
    }

    fn serve_snapshot(&self, index: u64, offset: u64, responder: Responder) {
        let kept = self.checkpoints.kept.iter().find(|(d, _)| d.position.index == index);
        match kept {
            Some((_, bytes)) => {
                let (reply, payload) = snapshot::piece(bytes, offset);
                responder.send_with(reply, payload);
            }
            None => responder.send(Err(ManagerError::Busy)),
        }
    }
}

impl Then {
    /// Who waits for the answer, if anybody.
    pub(super) fn into_responder(self) -> Option<Responder> {
        match self {
            Then::Lead | Then::Planned => None,
            Then::Register(responder)
            | Then::Done(responder)
            | Then::Volume(responder)
            | Then::Create(responder)
            | Then::Grow(responder, _) => Some(responder),
        }
    }
}

fn find_volume<'a>(view: View<'a>, name: &str) -> Result<&'a VolumeRecord, ManagerError> {
    let missing = || ManagerError::NoVolume { name: name.to_owned() };
    view.state.volume_by_name(name).ok_or_else(missing)
}

/// A client sees its own volume only, and only when it can be used.
fn check_client(caller: Caller, volume: &VolumeRecord) -> Result<(), ManagerError> {
    if caller.volume != Some(volume.id) {
        let reason = "this access key opens another volume".to_owned();
        return Err(ManagerError::NotAllowed { reason });
    }
    match volume.state {
        VolumeState::Ready => Ok(()),
        VolumeState::Creating => Err(ManagerError::Busy),
    }
}

fn list_partitions(view: View<'_>, volume: Option<&str>) -> ManagerReply {
    let only = match volume {
        Some(name) => Some(find_volume(view, name)?.id),
        None => None,
    };
    let is_asked = |volume: VolumeId| only.is_none_or(|only| only == volume);
    let meta = view.state.meta_partitions().filter(|record| is_asked(record.volume));
    let data = view.state.data_partitions().filter(|record| is_asked(record.volume));
    Ok(ManagerAnswer::Partitions {
        meta: meta.map(|record| view::meta_partition(view, record)).collect(),
        data: data.map(|record| view::data_partition(view, record)).collect(),
    })
}
