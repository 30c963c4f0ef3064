//! Real sockets on loopback: a server that answers nobody who comes directly, and a manager that reaches it.

use std::cell::RefCell;
use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use milpa_types::{ClusterId, NodeId};
use tokio::task::LocalSet;

use super::*;
use crate::keys::Key;
use crate::rpc::{CallError, Credential, Pool, Reply, serve};

const CLUSTER: ClusterId = ClusterId(42);
const WAIT: Duration = Duration::from_secs(5);

/// Says who it is, and where it thinks that the caller is; carries to those of its list.
#[derive(Default)]
struct Server {
    heard: RefCell<Vec<SocketAddr>>,
}

impl Service for Server {
    fn request(&self, peer: &Peer, _body: Bytes, payload: Bytes, reply: Reply) {
        reply.send(&peer.node.0, payload);
    }

    fn carries_to(&self, address: SocketAddr) -> bool {
        self.heard.borrow().contains(&address)
    }
}

fn identity(secret: &Key, role: Role, node: u32) -> Arc<Identity> {
    let credential = Credential::Cluster(secret.clone());
    let identity = Arc::new(Identity::new(Some(CLUSTER), role, credential));
    identity.set_node(NodeId(node));
    identity
}

async fn listener() -> (net::Listener, SocketAddr) {
    let listener = net::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

async fn ask(pool: &Pool, to: SocketAddr, bytes: usize) -> Result<u32, CallError> {
    let payload = Bytes::from(vec![7; bytes]);
    let called = pool.call(to, Role::Data, &"who am I?", payload.clone(), WAIT).await;
    called.map(|(node, returned)| {
        assert!(returned == payload);
        node
    })
}

/// A manager, and a data node to which the first connection is lost on the way: the caller's own.
fn with_broken_link<F: Future<Output = ()>>(
    test: impl FnOnce(Key, Rc<Server>, SocketAddr, SocketAddr) -> F,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        let secret = Key::random().unwrap();
        let (at_manager, manager) = listener().await;
        let (at_data, data) = listener().await;
        let service = Rc::new(Server::default());
        let managing = serve(at_manager, identity(&secret, Role::Manager, 1), service.clone());
        tokio::task::spawn_local(managing);
        let serving = identity(&secret, Role::Data, 104);
        tokio::task::spawn_local(async move {
            let _unheard = at_data.accept().await.unwrap();
            serve(at_data, serving, Rc::new(Server::default())).await.unwrap();
        });
        let test = test(secret, service, manager, data);
        tokio::time::timeout(Duration::from_secs(30), test).await.unwrap();
    });
}

#[test]
fn a_manager_carries_what_does_not_get_through_until_it_does() {
    with_broken_link(|secret, service, manager, data| async move {
        service.heard.borrow_mut().push(data);
        let pool = Pool::around(identity(&secret, Role::Meta, 106), vec![manager]);
        // Whoever is carried proves who it is to the server itself.
        assert_eq!(ask(&pool, data, 3 << 20).await.unwrap(), 106);
        assert!(pool.is_around(data));
        // The direct way is open by now, and is found.
        while pool.is_around(data) {
            assert_eq!(ask(&pool, data, 1).await.unwrap(), 106);
            tokio::task::yield_now().await;
        }
        assert_eq!(ask(&pool, data, 1).await.unwrap(), 106);
    });
}

#[test]
fn nothing_is_carried_to_where_no_server_is_heard() {
    with_broken_link(|secret, _, manager, data| async move {
        let stranger =
            through(manager, data, &identity(&secret, Role::Meta, 106), Role::Data).await;
        let Err(HandshakeError::Refused(reason)) = stranger else { panic!() };
        assert!(reason.contains("no server that is heard"), "{reason}");
        let pool = Pool::around(identity(&secret, Role::Meta, 106), vec![manager]);
        let called = ask(&pool, data, 1).await;
        assert!(matches!(called, Err(CallError::Unreachable { .. })), "{called:?}");
        assert!(!pool.is_around(data));
    });
}

#[test]
fn nobody_is_carried_without_proof() {
    with_broken_link(|_, service, manager, data| async move {
        service.heard.borrow_mut().push(data);
        let other = identity(&Key::random().unwrap(), Role::Meta, 106);
        let refused = through(manager, data, &other, Role::Data).await;
        assert!(matches!(refused, Err(HandshakeError::Refused(_))));
    });
}

#[test]
fn no_more_is_carried_than_there_is_room_for() {
    let carried = Carried::default();
    let mut all: Vec<CarriedOne> = (0..CARRIED_MAX).map(|_| carried.one_more().unwrap()).collect();
    assert!(carried.one_more().is_none());
    all.pop();
    assert!(carried.one_more().is_some());
}
