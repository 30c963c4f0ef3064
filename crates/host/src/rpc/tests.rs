//! Real sockets on loopback: what a caller sees of good, bad and dying servers.

use std::cell::Cell;

use tokio::task::LocalSet;

use super::*;
use crate::net;

const CLUSTER: ClusterId = ClusterId(42);
const WAIT: Duration = Duration::from_secs(5);

/// Echoes; forgets requests whose body says so.
struct Echo {
    one_way: Cell<u32>,
}

impl Service for Echo {
    fn request(&self, peer: &Peer, body: Bytes, payload: Bytes, reply: Reply) {
        match decode::<String>(&body).as_deref() {
            Ok("forget") => drop(reply),
            Ok("hold") => std::mem::forget(reply),
            Ok("volume") => reply.send(&format!("{:?}", peer.volume), payload),
            Ok("node") => reply.send(&peer.node.to_string(), payload),
            Ok("count") => reply.send(&format!("{}", self.one_way.get()), payload),
            Ok(text) => reply.send(&text, payload),
            Err(error) => reply.send(&error.to_string(), payload),
        }
    }

    fn one_way(&self, _peer: &Peer, channel: u16, _body: Bytes) {
        assert_eq!(channel, 9);
        self.one_way.set(self.one_way.get() + 1);
    }

    fn volume_named(&self, name: &str) -> Option<VolumeId> {
        (name == "home").then_some(VolumeId(3))
    }
}

fn server_identity(secret: &Key) -> Arc<Identity> {
    let credential = Credential::Cluster(secret.clone());
    Arc::new(Identity::new(Some(CLUSTER), Role::Manager, credential))
}

/// Runs `test` with the address of an echo server.
fn with_server<F: Future<Output = ()>>(secret: &Key, test: impl FnOnce(SocketAddr) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        let listener = net::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = Rc::new(Echo { one_way: Cell::new(0) });
        let server = tokio::task::spawn_local(serve(listener, server_identity(secret), service));
        tokio::time::timeout(Duration::from_secs(30), test(address)).await.unwrap();
        server.abort();
    });
}

fn admin(secret: &Key) -> Pool {
    let credential = Credential::Cluster(secret.clone());
    Pool::new(Arc::new(Identity::new(Some(CLUSTER), Role::Admin, credential)))
}

async fn echo(pool: &Pool, to: SocketAddr, text: &str) -> Result<String, CallError> {
    let (answer, _) = pool.call(to, Role::Manager, &text, Bytes::new(), WAIT).await?;
    Ok(answer)
}

#[test]
fn many_calls_share_one_connection_and_bulk_bytes_arrive_whole() {
    let secret = Key::random().unwrap();
    with_server(&secret, |to| {
        let pool = admin(&secret);
        async move {
            let mut calls = tokio::task::JoinSet::new();
            for n in 0..200_usize {
                let pool = pool.clone();
                calls.spawn(async move {
                    let sent = Bytes::from(vec![n as u8; n * 2000]);
                    let text = n.to_string();
                    let called =
                        pool.call(to, Role::Manager, &text, sent.clone(), WAIT).await.unwrap();
                    assert_eq!(called, (text, sent));
                });
            }
            while let Some(joined) = calls.join_next().await {
                joined.unwrap();
            }
        }
    });
}

#[test]
fn one_way_messages_wait_for_the_connection() {
    let secret = Key::random().unwrap();
    with_server(&secret, |to| {
        let pool = admin(&secret);
        async move {
            for _ in 0..3 {
                pool.post(to, Role::Manager, 9, Bytes::from_static(b"x"));
            }
            assert_eq!(echo(&pool, to, "count").await.unwrap(), "3");
        }
    });
}

#[test]
fn a_forgotten_reply_is_lost_at_once_and_a_held_one_times_out() {
    let secret = Key::random().unwrap();
    with_server(&secret, |to| {
        let pool = admin(&secret);
        async move {
            assert_eq!(echo(&pool, to, "forget").await, Err(CallError::Lost { address: to }));
            let short = Duration::from_millis(50);
            let held =
                pool.call::<_, String>(to, Role::Manager, &"hold", Bytes::new(), short).await;
            assert!(matches!(held, Err(CallError::TimedOut { .. })), "{held:?}");
        }
    });
}

#[test]
fn strangers_are_refused_with_the_reason() {
    let secret = Key::random().unwrap();
    let other = Key::random().unwrap();
    with_server(&secret, |to| {
        let (secret, other) = (secret.clone(), other.clone());
        async move {
            let check = |identity: Identity, expects: Role, part: &'static str| async move {
                let pool = Pool::new(Arc::new(identity));
                let called =
                    pool.call::<_, String>(to, expects, &"hello", Bytes::new(), WAIT).await;
                match called {
                    Err(CallError::Refused { reason, .. }) => {
                        assert!(reason.contains(part), "{reason:?} lacks {part:?}");
                    }
                    other => panic!("{other:?}, expected a refusal with {part:?}"),
                }
            };
            let cluster = Credential::Cluster(secret.clone());
            let volume = |name: &str, key: Key| Credential::Volume { name: name.to_owned(), key };
            let home = secret.volume_key(VolumeId(3));
            let wrong = Credential::Cluster(other.clone());
            check(Identity::new(None, Role::Admin, wrong), Role::Manager, "secret").await;
            let elsewhere = Some(ClusterId(1));
            check(Identity::new(elsewhere, Role::Admin, cluster.clone()), Role::Manager, "cluster")
                .await;
            check(Identity::new(None, Role::Admin, cluster.clone()), Role::Data, "not a data node")
                .await;
            check(Identity::new(None, Role::Client, cluster), Role::Manager, "volume").await;
            let lost = volume("lost", home.clone());
            check(Identity::new(None, Role::Client, lost), Role::Manager, "no volume named").await;
            let wrong = volume("home", other);
            check(Identity::new(None, Role::Client, wrong), Role::Manager, "access key").await;
            let disguised = volume("home", home);
            check(Identity::new(None, Role::Meta, disguised), Role::Manager, "secret").await;
        }
    });
}

#[test]
fn a_client_proves_its_volume() {
    let secret = Key::random().unwrap();
    with_server(&secret, |to| {
        let key = secret.volume_key(VolumeId(3));
        async move {
            let credential = Credential::Volume { name: "home".to_owned(), key };
            let pool = Pool::new(Arc::new(Identity::new(None, Role::Client, credential)));
            assert_eq!(echo(&pool, to, "volume").await.unwrap(), "Some(VolumeId(3))");
        }
    });
}

/// A node that registered as 0 and was told its id kept its old connection, and the manager refused
/// every heartbeat: "node 0 cannot speak for node 106".
#[test]
fn a_node_introduces_itself_anew_when_it_learns_its_id() {
    let secret = Key::random().unwrap();
    with_server(&secret, |to| {
        let pool = admin(&secret);
        async move {
            assert_eq!(echo(&pool, to, "node").await.unwrap(), "0");
            pool.identity().set_node(NodeId(106));
            assert_eq!(echo(&pool, to, "node").await.unwrap(), "106");
        }
    });
}

#[test]
fn nobody_there_is_unreachable_and_a_restart_is_noticed() {
    let secret = Key::random().unwrap();
    with_server(&secret, |to| {
        let pool = admin(&secret);
        async move {
            let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
            let called = echo(&pool, nobody, "hello").await;
            assert!(matches!(called, Err(CallError::Unreachable { .. })), "{called:?}");
            assert_eq!(echo(&pool, to, "hello").await.unwrap(), "hello");
        }
    });
}

#[test]
fn bytes_that_are_no_frame_close_the_connection() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let secret = Key::random().unwrap();
    with_server(&secret, |to| async move {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n                    "[..], &[0xff; 64]] {
            let mut stream = net::connect(to).await.unwrap();
            stream.write_all(garbage).await.unwrap();
            let mut rest = Vec::new();
            // A reset is as good as an end: either way the server let go.
            let _ = stream.read_to_end(&mut rest).await;
        }
    });
}
