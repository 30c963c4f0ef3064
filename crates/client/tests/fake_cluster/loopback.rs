//! The same fake servers behind real sockets: handshakes, frames and the pool on the way.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use milpa_client::{Client, ClientConfig, ConnectError};
use milpa_host::keys::Key;
use milpa_host::rpc::{Credential, Identity, Peer, Reply, Service, serve};
use milpa_types::{ClusterId, InodeId, ManagerError, NodeId, Role, VolumeId};
use milpa_wire::decode;
use milpa_wire::manager::{ManagerAnswer, ManagerReply, ManagerRequest};

use crate::cluster::{Cluster, State, create, pattern, read};

struct Server {
    cluster: Arc<Cluster>,
    role: Role,
    node: NodeId,
}

impl Service for Server {
    fn request(&self, peer: &Peer, body: Bytes, payload: Bytes, reply: Reply) {
        assert_eq!(peer.volume, Some(VolumeId(1)), "proven by the handshake");
        let mut state = self.cluster.lock();
        let State { view, meta, data } = &mut *state;
        match self.role {
            Role::Meta => {
                reply.send(&meta.answer(self.node, &decode(&body).unwrap()), Bytes::new());
            }
            Role::Data => {
                let request = decode(&body).unwrap();
                let (answer, bytes) = data.answer(view, self.node, &request, &payload);
                reply.send(&answer, bytes);
            }
            _ => {
                let ManagerRequest::GetVolume { name, .. } = decode(&body).unwrap() else {
                    panic!("a client asks for volumes only");
                };
                let found = view.volume.name == name;
                let answer: ManagerReply = match found {
                    true => Ok(ManagerAnswer::Volume(Box::new(view.clone()))),
                    false => Err(ManagerError::NoVolume { name }),
                };
                reply.send(&answer, Bytes::new());
            }
        }
    }

    fn volume_named(&self, name: &str) -> Option<VolumeId> {
        (name == "field").then_some(VolumeId(1))
    }
}

/// Starts all servers on a thread of their own; gives the manager's address and the volume's key.
fn start() -> (SocketAddr, Key) {
    let secret = Key::random().unwrap();
    let key = secret.volume_key(VolumeId(1));
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async move {
            let cluster = Cluster::new();
            let nodes = cluster.lock().view.nodes.clone();
            for (at, node) in nodes.iter().enumerate() {
                let address = listen(&cluster, &secret, node.role, node.id).await;
                cluster.lock().view.nodes[at].address = address;
            }
            let manager = listen(&cluster, &secret, Role::Manager, NodeId(99)).await;
            tell.send(manager).unwrap();
            std::future::pending::<()>().await;
        });
    });
    (told.recv().unwrap(), key)
}

async fn listen(cluster: &Arc<Cluster>, secret: &Key, role: Role, node: NodeId) -> SocketAddr {
    let listener = milpa_host::net::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let credential = Credential::Cluster(secret.clone());
    let identity = Arc::new(Identity::new(Some(ClusterId(7)), role, credential));
    identity.set_node(node);
    let service = Rc::new(Server { cluster: Arc::clone(cluster), role, node });
    tokio::task::spawn_local(async move { serve(listener, identity, service).await });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_share_one_client_over_real_sockets() {
    let (manager, key) = start();
    let client = Client::connect(ClientConfig::new(vec![manager], "field", key)).await.unwrap();
    let work = |i: u8| {
        let client = client.clone();
        async move {
            let file = format!("f{i}");
            let opened = create(&client, &file).await;
            let content = pattern(i, 200_000 * usize::from(i));
            for at in (0..content.len()).step_by(70_000) {
                let piece = content.slice(at..content.len().min(at + 70_000));
                client.write(opened.handle, at as u64, piece, false).await.unwrap();
            }
            client.fsync(opened.handle, false).await.unwrap();
            client.release(opened.handle).await.unwrap();
            assert!(read(&client, &file).await == content, "{file}");
        }
    };
    let tasks: Vec<_> = (0..8).map(|i| tokio::spawn(work(i))).collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(client.list(InodeId::ROOT).await.unwrap().len(), 8);
    client.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_key_or_address_is_told_apart() {
    let (manager, _) = start();
    let wrong = ClientConfig::new(vec![manager], "field", Key::random().unwrap());
    let error = Client::connect(wrong).await.unwrap_err();
    assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
    let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
    let mut lonely = ClientConfig::new(vec![nobody], "field", Key::random().unwrap());
    lonely.connect_deadline = std::time::Duration::from_millis(300);
    let error = Client::connect(lonely).await.unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
}
