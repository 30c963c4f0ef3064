//! The HTTP interface for operators: JSON under `/api/v1`, its description at
//! `/api/openapi.json`, and `/metrics` and `/healthz` as every role has them.
//!
//! Reading needs nothing. Changing needs `Authorization: Bearer <token>`, the token being derived
//! from the cluster's secret. A follower redirects to the leader when it knows its HTTP address.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use axum::extract::{Path, State};
use axum::http::header::{AUTHORIZATION, LOCATION, RETRY_AFTER as RETRY_AFTER_HEADER};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, put};
use axum::{Json, Router};
use milpa_host::clock::Instant;
use milpa_host::keys::Key;
use milpa_host::telemetry;
use milpa_types::{DiskId, ManagerError, NodeId};
use milpa_wire::manager::{ManagerAnswer, ManagerReply, ManagerRequest};
use tokio::sync::oneshot;
use utoipa::OpenApi;

use super::access::Caller;
use super::event::{Event, Inbox, Responder};
use super::{RETRY_AFTER, offer};
use crate::config::ManagerConfig;

pub(crate) mod body;

use body::{
    DrainBody, ErrorBody, NewVolumeBody, NodeBody, PartitionsBody, StatusBody, TaskBody,
    VolumeBody, VolumeDetailBody,
};

/// How long a reader waits.
const READ_WAIT: std::time::Duration = std::time::Duration::from_secs(5);
/// How long the creation of a volume may take.
const CREATE_WAIT: std::time::Duration = std::time::Duration::from_secs(30);

/// Where the managers' HTTP interfaces are, by the address under which they listen for nodes.
pub(super) type LeaderUrls = BTreeMap<SocketAddr, SocketAddr>;

pub(super) fn leader_urls(config: &ManagerConfig) -> LeaderUrls {
    config.peers.iter().copied().zip(config.http_peers.iter().copied()).collect()
}

#[derive(Clone)]
struct Web {
    inbox: Inbox,
    secret: Key,
    leaders: LeaderUrls,
}

#[derive(OpenApi)]
#[openapi(
    info(title = "MilpaFS manager", description = "Nodes, volumes and partitions of a cluster."),
    paths(
        get_status,
        list_nodes,
        drain_node,
        remove_node,
        drain_disk,
        list_tasks,
        list_volumes,
        get_volume,
        list_partitions,
        create_volume,
        delete_volume
    ),
    components(schemas(ErrorBody))
)]
struct Description;

/// All routes of a manager.
pub(super) fn routes(inbox: Inbox, secret: &Key, leaders: LeaderUrls) -> Router {
    let web = Web { inbox, secret: secret.clone(), leaders };
    Router::new()
        .route("/api/v1/status", get(get_status))
        .route("/api/v1/nodes", get(list_nodes))
        .route("/api/v1/nodes/{node}", delete(remove_node))
        .route("/api/v1/nodes/{node}/drain", put(drain_node))
        .route("/api/v1/nodes/{node}/disks/{disk}/drain", put(drain_disk))
        .route("/api/v1/tasks", get(list_tasks))
        .route("/api/v1/volumes", get(list_volumes).post(create_volume))
        .route("/api/v1/volumes/{name}", get(get_volume).merge(delete(delete_volume)))
        .route("/api/v1/partitions", get(list_partitions))
        .route("/api/openapi.json", get(|| async { Json(Description::openapi()) }))
        .with_state(web)
        .merge(telemetry::http_routes())
}

/// The cluster in one look.
#[utoipa::path(get, path = "/api/v1/status", responses((status = 200, body = StatusBody), (status = 503, body = ErrorBody)))]
async fn get_status(State(web): State<Web>, uri: Uri) -> Response {
    match web.ask(&uri, ManagerRequest::Status, READ_WAIT).await {
        Ok(ManagerAnswer::Status(status)) => Json(StatusBody::from(*status)).into_response(),
        other => unexpected(other),
    }
}

/// All nodes.
#[utoipa::path(get, path = "/api/v1/nodes", responses((status = 200, body = [NodeBody])))]
async fn list_nodes(State(web): State<Web>, uri: Uri) -> Response {
    match web.ask(&uri, ManagerRequest::ListNodes, READ_WAIT).await {
        Ok(ManagerAnswer::Nodes(nodes)) => {
            Json(nodes.into_iter().map(NodeBody::from).collect::<Vec<_>>()).into_response()
        }
        other => unexpected(other),
    }
}

/// Empties a node, or takes that back.
#[utoipa::path(
    put,
    path = "/api/v1/nodes/{node}/drain",
    params(("node" = u32, Path, description = "The node's id.")),
    request_body = DrainBody,
    responses((status = 204), (status = 409, body = ErrorBody), (status = 507, body = ErrorBody)),
    security(("token" = []))
)]
async fn drain_node(
    State(web): State<Web>,
    uri: Uri,
    headers: HeaderMap,
    Path(node): Path<u32>,
    Json(DrainBody { drains }): Json<DrainBody>,
) -> Response {
    web.change(&uri, &headers, ManagerRequest::DrainNode { node: NodeId(node), drains }).await
}

/// Empties a disk of a data node, or takes that back.
#[utoipa::path(
    put,
    path = "/api/v1/nodes/{node}/disks/{disk}/drain",
    params(
        ("node" = u32, Path, description = "The node's id."),
        ("disk" = u32, Path, description = "The disk's id.")
    ),
    request_body = DrainBody,
    responses((status = 204), (status = 409, body = ErrorBody), (status = 507, body = ErrorBody)),
    security(("token" = []))
)]
async fn drain_disk(
    State(web): State<Web>,
    uri: Uri,
    headers: HeaderMap,
    Path((node, disk)): Path<(u32, u32)>,
    Json(DrainBody { drains }): Json<DrainBody>,
) -> Response {
    let request = ManagerRequest::DrainDisk { node: NodeId(node), disk: DiskId(disk), drains };
    web.change(&uri, &headers, request).await
}

/// Forgets a node that is empty, or gives up one that will not come back.
#[utoipa::path(
    delete,
    path = "/api/v1/nodes/{node}",
    params(("node" = u32, Path, description = "The node's id.")),
    responses((status = 204), (status = 409, body = ErrorBody)),
    security(("token" = []))
)]
async fn remove_node(
    State(web): State<Web>,
    uri: Uri,
    headers: HeaderMap,
    Path(node): Path<u32>,
) -> Response {
    web.change(&uri, &headers, ManagerRequest::RemoveNode { node: NodeId(node) }).await
}

/// What is being repaired and moved.
#[utoipa::path(get, path = "/api/v1/tasks", responses((status = 200, body = [TaskBody])))]
async fn list_tasks(State(web): State<Web>, uri: Uri) -> Response {
    match web.ask(&uri, ManagerRequest::ListTasks, READ_WAIT).await {
        Ok(ManagerAnswer::Tasks(tasks)) => {
            Json(tasks.into_iter().map(TaskBody::from).collect::<Vec<_>>()).into_response()
        }
        other => unexpected(other),
    }
}

/// All volumes.
#[utoipa::path(get, path = "/api/v1/volumes", responses((status = 200, body = [VolumeBody])))]
async fn list_volumes(State(web): State<Web>, uri: Uri) -> Response {
    match web.ask(&uri, ManagerRequest::ListVolumes, READ_WAIT).await {
        Ok(ManagerAnswer::Volumes(volumes)) => {
            Json(volumes.into_iter().map(VolumeBody::from).collect::<Vec<_>>()).into_response()
        }
        other => unexpected(other),
    }
}

/// One volume with its partitions.
#[utoipa::path(
    get,
    path = "/api/v1/volumes/{name}",
    params(("name" = String, Path, description = "The volume's name.")),
    responses((status = 200, body = VolumeDetailBody), (status = 404, body = ErrorBody))
)]
async fn get_volume(State(web): State<Web>, uri: Uri, Path(name): Path<String>) -> Response {
    let request = ManagerRequest::GetVolume { name, known_version: 0 };
    match web.ask(&uri, request, READ_WAIT).await {
        Ok(ManagerAnswer::Volume(view)) => Json(VolumeDetailBody::from(*view)).into_response(),
        other => unexpected(other),
    }
}

/// All partitions of all volumes.
#[utoipa::path(get, path = "/api/v1/partitions", responses((status = 200, body = PartitionsBody)))]
async fn list_partitions(State(web): State<Web>, uri: Uri) -> Response {
    match web.ask(&uri, ManagerRequest::ListPartitions { volume: None }, READ_WAIT).await {
        Ok(ManagerAnswer::Partitions { meta, data }) => {
            Json(PartitionsBody::from((meta, data))).into_response()
        }
        other => unexpected(other),
    }
}

/// A new volume; answered when it can be mounted.
#[utoipa::path(
    post,
    path = "/api/v1/volumes",
    request_body = NewVolumeBody,
    responses((status = 201, body = body::CreatedBody), (status = 400, body = ErrorBody), (status = 409, body = ErrorBody)),
    security(("token" = []))
)]
async fn create_volume(
    State(web): State<Web>,
    uri: Uri,
    headers: HeaderMap,
    Json(new): Json<NewVolumeBody>,
) -> Response {
    if !web.has_token(&headers) {
        return unauthorized();
    }
    match web.ask(&uri, ManagerRequest::from(new), CREATE_WAIT).await {
        Ok(ManagerAnswer::VolumeCreated(volume)) => {
            (StatusCode::CREATED, Json(body::CreatedBody::from(volume))).into_response()
        }
        other => unexpected(other),
    }
}

/// Deletes a volume and all its bytes.
#[utoipa::path(
    delete,
    path = "/api/v1/volumes/{name}",
    params(("name" = String, Path, description = "The volume's name.")),
    responses((status = 204), (status = 404, body = ErrorBody)),
    security(("token" = []))
)]
async fn delete_volume(
    State(web): State<Web>,
    uri: Uri,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Response {
    if !web.has_token(&headers) {
        return unauthorized();
    }
    match web.ask(&uri, ManagerRequest::DeleteVolume { name }, READ_WAIT).await {
        Ok(ManagerAnswer::Done) => StatusCode::NO_CONTENT.into_response(),
        other => unexpected(other),
    }
}

impl Web {
    /// A change that is answered when it is committed; what follows shows in the tasks.
    async fn change(&self, uri: &Uri, headers: &HeaderMap, request: ManagerRequest) -> Response {
        if !self.has_token(headers) {
            return unauthorized();
        }
        match self.ask(uri, request, READ_WAIT).await {
            Ok(ManagerAnswer::Done) => StatusCode::NO_CONTENT.into_response(),
            other => unexpected(other),
        }
    }

    /// Asks the loop as an operator.
    async fn ask(
        &self,
        uri: &Uri,
        request: ManagerRequest,
        wait: std::time::Duration,
    ) -> Result<ManagerAnswer, Response> {
        let (sender, answer) = oneshot::channel::<ManagerReply>();
        let responder = Responder::http(sender, &request, Instant::now() + wait);
        let (caller, request) = (Caller::ADMIN, Box::new(request));
        offer(&self.inbox, Event::Request { caller, request, responder });
        match tokio::time::timeout(wait, answer).await {
            Ok(Ok(Ok(answer))) => Ok(answer),
            Ok(Ok(Err(error))) => Err(self.failure(uri, &error)),
            Ok(Err(_)) => Err(unknown_outcome("the leader changed meanwhile")),
            Err(_) => Err(unknown_outcome("no answer in time")),
        }
    }

    fn failure(&self, uri: &Uri, error: &ManagerError) -> Response {
        let leader = match error {
            ManagerError::NotLeader { leader } => {
                leader.and_then(|leader| self.leaders.get(&leader))
            }
            _ => None,
        };
        match leader {
            Some(leader) => {
                let there = format!("http://{leader}{uri}");
                (StatusCode::TEMPORARY_REDIRECT, [(LOCATION, there)]).into_response()
            }
            None => failed(status_of(error), error.to_string()),
        }
    }

    /// Compares the keyed hashes of both tokens, so that the time taken tells nothing.
    fn has_token(&self, headers: &HeaderMap) -> bool {
        let header = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = header.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
        let expected = self.secret.mac(&[self.secret.admin_token().as_bytes()]);
        self.secret.verify(&[given.trim().as_bytes()], &expected)
    }
}

fn unauthorized() -> Response {
    let text = "this needs the header `Authorization: Bearer <admin token>`";
    failed(StatusCode::UNAUTHORIZED, text.to_owned())
}

fn status_of(error: &ManagerError) -> StatusCode {
    match error {
        ManagerError::NotLeader { .. } | ManagerError::Busy => StatusCode::SERVICE_UNAVAILABLE,
        ManagerError::NoVolume { .. } => StatusCode::NOT_FOUND,
        ManagerError::VolumeExists { .. }
        | ManagerError::NodeRefused { .. }
        | ManagerError::Refused { .. } => StatusCode::CONFLICT,
        ManagerError::Invalid { .. } => StatusCode::BAD_REQUEST,
        ManagerError::NoPlacement { .. } => StatusCode::INSUFFICIENT_STORAGE,
        ManagerError::NotAllowed { .. } => StatusCode::FORBIDDEN,
        ManagerError::NodeFailed { .. } => StatusCode::BAD_GATEWAY,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn failed(status: StatusCode, error: String) -> Response {
    let body = Json(ErrorBody { error });
    if status == StatusCode::SERVICE_UNAVAILABLE {
        let seconds = RETRY_AFTER.as_secs().to_string();
        return (status, [(RETRY_AFTER_HEADER, seconds)], body).into_response();
    }
    (status, body).into_response()
}

fn unknown_outcome(why: &str) -> Response {
    let text = format!("{why}; look whether it was done before you repeat it");
    failed(StatusCode::GATEWAY_TIMEOUT, text)
}

/// A refusal as it is; an answer to another question is our own mistake.
fn unexpected(answer: Result<ManagerAnswer, Response>) -> Response {
    match answer {
        Err(response) => response,
        Ok(_) => failed(StatusCode::INTERNAL_SERVER_ERROR, "answer out of turn".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_described() {
        let paths = Description::openapi().paths.paths;
        let described: Vec<&str> = paths.keys().map(String::as_str).collect();
        assert_eq!(
            described,
            [
                "/api/v1/nodes",
                "/api/v1/nodes/{node}",
                "/api/v1/nodes/{node}/disks/{disk}/drain",
                "/api/v1/nodes/{node}/drain",
                "/api/v1/partitions",
                "/api/v1/status",
                "/api/v1/tasks",
                "/api/v1/volumes",
                "/api/v1/volumes/{name}"
            ]
        );
    }

    #[test]
    fn only_the_admin_token_opens() {
        let (inbox, _events) = tokio::sync::mpsc::channel(1);
        let secret = Key::random().unwrap();
        let web = Web { inbox, secret: secret.clone(), leaders: LeaderUrls::new() };
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().unwrap());
            web.has_token(&headers)
        };
        assert!(with(&format!("Bearer {}", secret.admin_token())));
        assert!(!with(&secret.admin_token()));
        assert!(!with("Bearer "));
        assert!(!with(&format!("Bearer {}", secret.to_hex())));
        assert!(!web.has_token(&HeaderMap::new()));
    }
}
