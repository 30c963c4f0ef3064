//! Goal: three managers over real sockets keep what they promised through the loss of any one of
//! them, and lead nodes through theirs. Method: stand-ins for the nodes, see `cluster`.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cluster;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cluster::{Cluster, PATIENCE, run};
use milpa_host::keys::Key;
use milpa_host::rpc::CallError;
use milpa_types::{Epoch, ManagerError, NodeId, Role, VolumeOptions};
use milpa_wire::manager::{ManagerAnswer, ManagerReply, ManagerRequest};

/// A started cluster with three nodes of each role and the volume "home".
async fn with_volume(change: impl Fn(&mut milpa_manager::ManagerConfig)) -> Cluster {
    let mut cluster = Cluster::new(change);
    cluster.start_all();
    cluster.add_nodes(Role::Meta, 3).await;
    cluster.add_nodes(Role::Data, 3).await;
    let created = cluster.create_volume("home").await;
    assert!(matches!(created, Ok(ManagerAnswer::VolumeCreated(_))), "{created:?}");
    cluster
}

#[test]
fn a_new_volume_is_complete_and_spread_when_its_creation_is_answered() {
    run(async {
        let started = Instant::now();
        let cluster = with_volume(|_| {}).await;
        println!("from nothing to a usable volume: {:?}", started.elapsed());
        let view = cluster.volume("home").await;
        assert_eq!((view.meta.len(), view.data.len(), view.nodes.len()), (3, 6, 6));
        let leaders: BTreeSet<NodeId> = view.meta.iter().filter_map(|m| m.leader).collect();
        assert_eq!(leaders.len(), 3, "one meta partition is led by each meta node");
        for partition in &view.data {
            let members: BTreeSet<&NodeId> = partition.members.iter().collect();
            assert_eq!((members.len(), partition.epoch), (3, Epoch(1)));
            assert!(partition.takes_extents);
        }
        let primaries = |node| view.data.iter().filter(|d| d.primary == node).count();
        assert_eq!([104, 105, 106].map(|id| primaries(NodeId(id))), [2, 2, 2]);
        // Every replica is there already, so a mount right now works.
        assert!(
            cluster
                .nodes
                .borrow()
                .iter()
                .all(|node| { node.meta.borrow().len() + node.data.borrow().len() >= 3 })
        );
        let again = cluster.create_volume("home").await.unwrap_err();
        assert_eq!(again, "volume \"home\" exists");
    });
}

#[test]
fn a_creation_that_cannot_be_placed_says_what_is_missing() {
    run(async {
        let mut cluster = Cluster::new(|_| {});
        cluster.start_all();
        cluster.add_nodes(Role::Meta, 3).await;
        cluster.add_nodes(Role::Data, 2).await;
        let error = cluster.create_volume("home").await.unwrap_err();
        assert!(error.contains("3 data nodes are needed, 2 can take one"), "{error}");
        let two = ManagerRequest::CreateVolume {
            name: "two".to_owned(),
            options: VolumeOptions { replicas: 2, ..VolumeOptions::default() },
            meta_partitions: 3,
            data_partitions: 1,
        };
        assert!(matches!(cluster.ask(two).await, Ok(ManagerAnswer::VolumeCreated(_))));
    });
}

#[test]
fn a_follower_names_the_leader_and_another_one_leads_when_it_is_gone() {
    run(async {
        let mut cluster = with_volume(|_| {}).await;
        let before = cluster.volume("home").await;
        let leader = cluster.leader().await;
        let address = cluster.configs[leader].listen;
        for place in (0..3).filter(|place| *place != leader) {
            let reply = cluster.ask_one(place, &ManagerRequest::ListVolumes).await;
            assert_eq!(reply, Err(ManagerError::NotLeader { leader: Some(address) }));
        }
        let stopped = Instant::now();
        cluster.stop(leader).await;
        let next = cluster.leader().await;
        println!("another manager answered after {:?}", stopped.elapsed());
        assert_ne!(next, leader);
        let after =
            cluster.wait_for("home", |view| view.meta.iter().all(|m| m.leader.is_some())).await;
        assert_eq!(after.data, before.data, "no epoch was raised: nobody was silent");
        assert!(after.version > before.version, "a new leader's versions are higher");
        cluster.start(leader);
        let created = cluster.create_volume("second").await;
        assert!(matches!(created, Ok(ManagerAnswer::VolumeCreated(_))), "{created:?}");
    });
}

#[test]
fn a_silent_node_leaves_its_partitions_and_comes_back() {
    run(async {
        let cluster = with_volume(|_| {}).await;
        let lost = NodeId(104);
        cluster.node(lost).is_up.set(false);
        let stopped = Instant::now();
        let view =
            cluster.wait_for("home", |view| view.data.iter().all(|d| d.members.len() == 2)).await;
        println!("reconfigured after {:?} of silence", stopped.elapsed());
        for partition in &view.data {
            assert_eq!(partition.epoch, Epoch(2));
            assert!(!partition.members.contains(&lost) && partition.primary != lost);
            assert!(partition.takes_extents && partition.replicas.len() == 3);
        }
        let Ok(ManagerAnswer::Status(status)) = cluster.ask(ManagerRequest::Status).await else {
            panic!()
        };
        assert!(status.warnings.iter().any(|w| w.starts_with("data node 104")), "{status:?}");

        cluster.node(lost).is_up.set(true);
        let view =
            cluster.wait_for("home", |view| view.data.iter().all(|d| d.members.len() == 3)).await;
        for partition in &view.data {
            assert_eq!(partition.epoch, Epoch(4));
            assert_ne!(partition.primary, lost, "it lacks bytes");
        }
    });
}

#[test]
fn everything_is_there_after_a_restart_of_all() {
    run(async {
        let mut cluster = with_volume(|config| config.checkpoint.entries = 5).await;
        let before = cluster.volume("home").await;
        for place in 0..3 {
            cluster.stop(place).await;
        }
        // Longer than the silence period: the nodes are not blamed for the managers' absence.
        tokio::time::sleep(Duration::from_millis(1000)).await;
        cluster.start_all();
        let after =
            cluster.wait_for("home", |view| view.meta.iter().all(|m| m.leader.is_some())).await;
        assert_eq!((&after.data, &after.meta), (&before.data, &before.meta));
        // What does not fit is refused, and changes nothing.
        cluster.stop(0).await;
        let refused = |config: milpa_manager::ManagerConfig, id| {
            milpa_manager::run(config, id, cluster.secret.clone(), std::future::pending())
        };
        let good = cluster.configs[0].clone();
        let mut swapped = good.clone();
        swapped.peers.swap(0, 1);
        let error = refused(swapped, cluster::CLUSTER).await.unwrap_err().to_string();
        assert!(error.contains("is the directory of manager 1, not 2"), "{error}");
        let alone = alone(&good);
        let error = refused(alone, cluster::CLUSTER).await.unwrap_err().to_string();
        assert!(error.contains("managers cannot be added or taken away"), "{error}");
        let mut taken = good.clone();
        taken.http_listen = cluster.configs[1].http_listen;
        let error = refused(taken, cluster::CLUSTER).await.unwrap_err().to_string();
        assert!(error.contains("is another process using it?"), "{error}");
        let error = refused(good.clone(), milpa_types::ClusterId(0xbad)).await.unwrap_err();
        assert!(matches!(error, milpa_manager::RunError::Directory(_)), "{error}");
    });
}

/// The story: a manager whose log had rotted ended until somebody emptied its directory.
#[test]
fn a_manager_whose_log_has_rotted_sets_it_aside_and_counts_again() {
    run(async {
        let cluster = with_volume(|config| config.checkpoint.entries = 5).await;
        damage_one(cluster, |directory| rot(&directory.join("raft"))).await;
    });
}

/// A directory without its log must not vote.
#[test]
fn a_manager_without_its_log_counts_again() {
    run(async {
        let cluster = with_volume(|config| config.checkpoint.entries = 5).await;
        let lose = |directory: &Path| std::fs::remove_dir_all(directory.join("raft")).unwrap();
        damage_one(cluster, lose).await;
    });
}

/// What the state had is not in the log any more.
#[test]
fn a_manager_whose_state_has_rotted_sets_its_log_aside_too() {
    run(async {
        let cut_often = |config: &mut milpa_manager::ManagerConfig| {
            (config.checkpoint.entries, config.checkpoint.entries_kept) = (5, 0);
        };
        let cluster = with_volume(cut_often).await;
        let rot = |directory: &Path| std::fs::write(directory.join("state.redb"), "x").unwrap();
        let aside = damage_one(cluster, rot).await;
        assert!(aside.contains("raft.damaged.1"), "{aside:?}");
    });
}

/// Damages what the first manager has, and sees it take part again. Gives what is in its directory then.
async fn damage_one(mut cluster: Cluster, harm: fn(&Path)) -> BTreeSet<String> {
    let before = cluster.volume("home").await;
    cluster.stop(0).await;
    harm(&cluster.configs[0].directory);
    cluster.start(0);
    cluster.until_rejoined(0).await;
    let names = std::fs::read_dir(&cluster.configs[0].directory).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: BTreeSet<String> = names.collect();
    assert!(names.contains("state.redb.damaged.1"), "nothing is thrown away: {names:?}");
    // It is half of the majority.
    cluster.stop(1).await;
    assert_eq!(cluster.volume("home").await.volume, before.volume);
    let created = cluster.create_volume("later").await;
    assert!(created.is_ok(), "{created:?}");
    names
}

/// Simulation, seeds 273430 and 273971: the disk of another one had lost what this one had acknowledged with it. The others
/// went on without that, and this one ended whenever it was started.
#[test]
fn a_manager_that_has_what_the_others_have_lost_sets_it_aside_and_counts_again() {
    run(async {
        let mut cluster = with_volume(|config| config.checkpoint.entries = 5).await;
        let directories = cluster.configs.iter().map(|config| config.directory.clone());
        let directories: Vec<_> = directories.collect();
        let old = directories[1].with_extension("old");
        cluster.stop(2).await;
        cluster.stop(1).await;
        copy(&directories[1], &old);
        cluster.start(1);
        cluster.create_volume("lost").await.unwrap();
        cluster.stop(0).await;
        cluster.stop(1).await;
        std::fs::remove_dir_all(&directories[1]).unwrap();
        std::fs::rename(&old, &directories[1]).unwrap();
        cluster.start(1);
        cluster.start(2);
        cluster.create_volume("other").await.unwrap();
        let (config, secret) = (cluster.configs[0].clone(), cluster.secret.clone());
        let life = milpa_manager::run(config, cluster::CLUSTER, secret, std::future::pending());
        let error = life.await.unwrap_err().to_string();
        assert!(error.contains("start it again"), "{error}");
        assert!(directories[0].join("raft.damaged.1").exists(), "nothing is thrown away");
        cluster.start(0);
        cluster.until_rejoined(0).await;
        cluster.stop(1).await;
        cluster.create_volume("lost").await.unwrap();
    });
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (path, copied) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &copied);
        } else {
            std::fs::copy(&path, &copied).unwrap();
        }
    }
}

#[test]
fn the_only_manager_says_what_is_damaged_and_that_nobody_has_it_else() {
    run(async {
        let mut cluster = with_volume(|config| config.checkpoint.entries = 5).await;
        cluster.stop(0).await;
        let alone = alone(&cluster.configs[0]);
        rot(&alone.directory.join("raft"));
        let forever = std::future::pending();
        let ended =
            milpa_manager::run(alone.clone(), cluster::CLUSTER, cluster.secret.clone(), forever);
        let error = ended.await.unwrap_err().to_string();
        assert!(
            error.contains("log cannot be used") && error.contains("restore its directory"),
            "{error}"
        );
        assert!(alone.directory.join("raft").exists());
    });
}

/// Fewer than a majority could not bring back what only this directory has: it stays as it is, and counts for nothing.
#[test]
fn a_damaged_manager_gives_up_nothing_before_a_majority_of_the_others_is_there() {
    run(async {
        let mut cluster = with_volume(|config| config.checkpoint.entries = 5).await;
        let before = cluster.volume("home").await;
        cluster.stop(0).await;
        cluster.stop(1).await;
        let directory = cluster.configs[0].directory.clone();
        rot(&directory.join("raft"));
        cluster.start(0);
        // It says for as long as it waits that it can say nothing, and asks the others meanwhile.
        for _ in 0..20 {
            cluster.until_it_says(0, &Err(ManagerError::Busy)).await;
        }
        assert!(directory.join("raft").exists() && !directory.join("raft.damaged.1").exists());
        assert!(!directory.join("REJOINING").exists());
        cluster.start(1);
        cluster.until_rejoined(0).await;
        assert_eq!(cluster.volume("home").await.volume, before.volume);
        assert!(directory.join("raft.damaged.1").exists());
    });
}

/// The only manager, too: nothing was cut from its log.
#[test]
fn a_damaged_state_is_made_again_from_a_log_that_has_all_of_it() {
    run(async {
        let mut cluster = with_volume(|config| config.checkpoint.entries = 5).await;
        let before = cluster.volume("home").await;
        cluster.stop(0).await;
        cluster.stop(1).await;
        let directory = cluster.configs[0].directory.clone();
        std::fs::write(directory.join("state.redb"), "nonsense").unwrap();
        cluster.start(0);
        assert_eq!(cluster.volume("home").await.volume, before.volume);
        assert!(directory.join("state.redb.damaged.1").exists());
        assert!(!directory.join("raft.damaged.1").exists());
    });
}

/// The settings of a manager, as if there were no other.
fn alone(config: &milpa_manager::ManagerConfig) -> milpa_manager::ManagerConfig {
    let mut alone = config.clone();
    alone.peers.truncate(1);
    alone.http_peers.clear();
    alone
}

/// A bit in every third block that holds something.
fn rot(directory: &Path) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let written = bytes.chunks_mut(4096).filter(|block| block.iter().any(|byte| *byte != 0));
        written.skip(2).step_by(3).for_each(|block| block[50] ^= 4);
        std::fs::write(&path, bytes).unwrap();
    }
}

#[test]
fn a_manager_that_was_away_too_long_takes_over_the_state() {
    run(async {
        let mut cluster = with_volume(|config| {
            (config.checkpoint.entries, config.checkpoint.entries_kept) = (5, 0);
        })
        .await;
        let away = (cluster.leader().await + 1) % 3;
        cluster.stop(away).await;
        assert!(cluster.create_volume("late").await.is_ok());
        for inline_bytes_max in 0..20 {
            let options = VolumeOptions { inline_bytes_max, ..VolumeOptions::default() };
            let name = "late".to_owned();
            cluster.ask(ManagerRequest::SetVolume { name, options }).await.unwrap();
        }
        cluster.start(away);
        // A client's handshake by name shows what this manager itself knows.
        let ManagerAnswer::Key(key) =
            cluster.ask(ManagerRequest::GetVolumeKey { name: "late".to_owned() }).await.unwrap()
        else {
            panic!()
        };
        let key = Key::from_hex(&key).unwrap();
        let request = ManagerRequest::GetVolume { name: "late".to_owned(), known_version: 0 };
        let started = Instant::now();
        loop {
            let pool = cluster.client("late", &key);
            let to = cluster.configs[away].listen;
            let wait = Duration::from_secs(2);
            let called =
                pool.call::<_, ManagerReply>(to, Role::Manager, &request, Bytes::new(), wait);
            match called.await {
                Ok((Err(ManagerError::NotLeader { .. }), _)) => break,
                Err(CallError::Refused { reason, .. }) => {
                    assert!(reason.contains("no volume named"))
                }
                _ => {}
            }
            assert!(started.elapsed() < PATIENCE, "it never caught up");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // With the third one gone it is half of the majority.
        let leader = cluster.leader().await;
        cluster.stop(3 - leader - away).await;
        assert!(cluster.create_volume("later").await.is_ok());
    });
}

/// The story: a manager whose disk had been replaced began as if it founded the cluster, and voted. What it
/// had helped to commit before was lost when the one that had it was down.
#[test]
fn a_manager_with_an_empty_directory_catches_up_and_then_counts_again() {
    run(async {
        let mut cluster = with_volume(|_| {}).await;
        let before = cluster.volume("home").await;
        let emptied = (cluster.leader().await + 1) % 3;
        cluster.stop(emptied).await;
        std::fs::remove_dir_all(&cluster.configs[emptied].directory).unwrap();
        cluster.start(emptied);
        cluster.until_rejoined(emptied).await;
        let leader = cluster.leader().await;
        cluster.stop(leader).await;
        assert_eq!(cluster.volume("home").await.volume, before.volume);
        let created = cluster.create_volume("later").await;
        assert!(created.is_ok(), "{created:?}");
        cluster.start(leader);
        cluster.stop(3 - leader - emptied).await;
        assert_eq!(cluster.volume("home").await.volume, before.volume);
        let created = cluster.create_volume("latest").await;
        assert!(created.is_ok(), "{created:?}");
    });
}

#[test]
fn two_emptied_managers_of_three_found_nothing_and_one_restored_directory_is_enough() {
    run(async {
        let mut cluster = with_volume(|_| {}).await;
        let before = cluster.volume("home").await;
        let kept = |directory: &Path| directory.with_extension("kept");
        for place in [0, 1] {
            cluster.stop(place).await;
            let directory = &cluster.configs[place].directory;
            std::fs::rename(directory, kept(directory)).unwrap();
        }
        cluster.start(0);
        cluster.start(1);
        for place in [0, 1] {
            cluster.until_it_says(place, &Ok(ManagerAnswer::CatchesUp)).await;
        }
        let wait = Duration::from_secs(3);
        let answer = cluster.admin.call(&ManagerRequest::ListVolumes, wait).await;
        assert!(answer.is_err(), "{answer:?}");
        assert!(cluster.is_rejoining(0) && cluster.is_rejoining(1));
        cluster.stop(0).await;
        let directory = cluster.configs[0].directory.clone();
        std::fs::remove_dir_all(&directory).unwrap();
        std::fs::rename(kept(&directory), &directory).unwrap();
        cluster.start(0);
        assert_eq!(cluster.volume("home").await.volume, before.volume);
        cluster.until_rejoined(1).await;
    });
}

#[test]
fn a_client_sees_its_own_volume_and_nothing_else() {
    run(async {
        let cluster = with_volume(|_| {}).await;
        cluster.create_volume("other").await.unwrap();
        let volume = cluster.volume("home").await.volume.id;
        let client = cluster.client("home", &cluster.secret.volume_key(volume));
        let to = cluster.configs[cluster.leader().await].listen;
        let ask = async |request: ManagerRequest| {
            let wait = Duration::from_secs(2);
            let called =
                client.call::<_, ManagerReply>(to, Role::Manager, &request, Bytes::new(), wait);
            called.await.unwrap().0
        };
        let get = |name: &str, known_version| {
            ask(ManagerRequest::GetVolume { name: name.to_owned(), known_version })
        };
        let Ok(ManagerAnswer::Volume(view)) = get("home", 0).await else { panic!() };
        assert_eq!(get("home", view.version).await, Ok(ManagerAnswer::Unchanged));
        let refused = get("other", 0).await.unwrap_err().to_string();
        assert_eq!(refused, "not allowed: this access key opens another volume");
        let refused = ask(ManagerRequest::ListNodes).await.unwrap_err().to_string();
        assert_eq!(refused, "not allowed: a client may not ask for list_nodes");
        let stranger = cluster.client("home", &Key::random().unwrap());
        let request = ManagerRequest::ListNodes;
        let wait = Duration::from_secs(2);
        let called =
            stranger.call::<_, ManagerReply>(to, Role::Manager, &request, Bytes::new(), wait).await;
        assert!(matches!(called, Err(CallError::Refused { .. })), "{called:?}");
    });
}

#[test]
fn growth_splits_and_deletion_reach_the_nodes() {
    run(async {
        let cluster = with_volume(|_| {}).await;
        let grow = |meta_partitions, data_partitions| ManagerRequest::GrowVolume {
            name: "home".to_owned(),
            meta_partitions,
            data_partitions,
        };
        assert_eq!(cluster.ask(grow(1, 2)).await, Ok(ManagerAnswer::Done));
        let view = cluster.volume("home").await;
        assert_eq!((view.meta.len(), view.data.len()), (4, 8));
        let takes: Vec<bool> = view.meta.iter().map(|m| m.takes_inodes).collect();
        assert_eq!(takes, [true, true, false, true], "the last one was cut, the next one is open");
        let splits = |cluster: &Cluster| {
            let nodes = cluster.nodes.borrow();
            let done: Vec<String> = nodes.iter().flat_map(|n| n.done.borrow().clone()).collect();
            done.iter().filter(|what| what.starts_with("split 3 at")).count()
        };
        assert!(splits(&cluster) >= 1);
        let error = cluster.ask(grow(9, 0)).await.unwrap_err();
        assert!(error.contains("meta_partitions: value is 9, allowed 0 to 3"), "{error}");

        let delete = ManagerRequest::DeleteVolume { name: "home".to_owned() };
        assert_eq!(cluster.ask(delete.clone()).await, Ok(ManagerAnswer::Done));
        assert_eq!(cluster.ask(delete).await.unwrap_err(), "no volume named \"home\"");
        let started = Instant::now();
        let held = || -> usize {
            let nodes = cluster.nodes.borrow();
            nodes.iter().map(|n| n.meta.borrow().len() + n.data.borrow().len()).sum()
        };
        while held() > 0 {
            assert!(started.elapsed() < PATIENCE, "{} replicas are left", held());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
}

#[test]
fn operators_can_use_http() {
    run(async {
        let cluster = with_volume(|_| {}).await;
        let leader = cluster.leader().await;
        let at = cluster.configs[leader].http_listen;
        let token = cluster.secret.admin_token();
        let call = async |head: &str, body: &str| http(at, head, body).await;

        let status = call("GET /api/v1/status", "").await;
        assert!(
            status.starts_with("HTTP/1.1 200") && status.contains("\"name\":\"home\""),
            "{status}"
        );
        let described = call("GET /api/openapi.json", "").await;
        assert!(described.contains("/api/v1/volumes/{name}"));
        assert!(call("GET /metrics", "").await.contains("milpa_manager_raft_is_leader 1"));
        assert!(call("GET /healthz", "").await.ends_with("ok\n"));
        assert!(call("GET /api/v1/volumes/none", "").await.starts_with("HTTP/1.1 404"));

        let new = r#"{"name":"web","data_partitions":1}"#;
        assert!(call("POST /api/v1/volumes", new).await.starts_with("HTTP/1.1 401"));
        let authorized = |line: &str| format!("{line}\u{0}Authorization: Bearer {token}");
        let created = call(&authorized("POST /api/v1/volumes"), new).await;
        assert!(created.starts_with("HTTP/1.1 201"), "{created}");
        let typo = call(&authorized("POST /api/v1/volumes"), r#"{"nam":"x"}"#).await;
        assert!(typo.starts_with("HTTP/1.1 422") && typo.contains("nam"), "{typo}");
        let deleted = call(&authorized("DELETE /api/v1/volumes/web"), "").await;
        assert!(deleted.starts_with("HTTP/1.1 204"), "{deleted}");

        let follower = cluster.configs[(leader + 1) % 3].http_listen;
        let redirected = http(follower, "GET /api/v1/nodes", "").await;
        assert!(redirected.starts_with("HTTP/1.1 307"), "{redirected}");
        assert!(
            redirected.contains(&format!("location: http://{at}/api/v1/nodes")),
            "{redirected}"
        );
    });
}

/// One HTTP request; after a NUL in `head` comes a further header.
async fn http(to: std::net::SocketAddr, head: &str, body: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (line, header) = head.split_once('\u{0}').unwrap_or((head, "X-None: 1"));
    let length = body.len();
    let request = format!(
        "{line} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n{header}\r\n\r\n{body}"
    );
    let mut stream = tokio::net::TcpStream::connect(to).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[test]
fn one_manager_alone_is_a_cluster() {
    run(async {
        let mut cluster = Cluster::of(1, |_| {});
        cluster.start_all();
        cluster.add_nodes(Role::Meta, 3).await;
        cluster.add_nodes(Role::Data, 3).await;
        assert!(cluster.create_volume("home").await.is_ok());
        cluster.stop(0).await;
        cluster.start_all();
        assert_eq!(cluster.volume("home").await.data.len(), 6);
    });
}

#[test]
fn a_second_incarnation_is_refused_and_a_moved_node_is_found_again() {
    run(async {
        let cluster = with_volume(|_| {}).await;
        let Ok(ManagerAnswer::Nodes(nodes)) = cluster.ask(ManagerRequest::ListNodes).await else {
            panic!()
        };
        let known = nodes.iter().find(|node| node.id == NodeId(104)).unwrap();
        let register = |incarnation: u128, port: u16| {
            ManagerRequest::Register(milpa_wire::manager::Register {
                node: Some(known.id),
                incarnation,
                life: milpa_types::Life::default(),
                role: Role::Data,
                address: ([127, 0, 0, 1], port).into(),
                http_address: known.http_address,
                zone: String::new(),
                region: String::new(),
                disks: known.disks.clone(),
            })
        };
        let as_node = milpa_host::managers::Managers::new(
            cluster::pool(Role::Data, &cluster.secret),
            cluster.configs[0].peers.clone(),
        );
        let copy = as_node.call(&register(1, known.address.port()), PATIENCE).await;
        let refused = copy.unwrap_err().to_string();
        assert!(refused.contains("another node with the id 104 is running"), "{refused}");
        let own = u128::from(known.address.port());
        let moved = as_node.call(&register(own, 9), PATIENCE).await;
        assert!(matches!(moved, Ok(ManagerAnswer::Registered { .. })), "{moved:?}");
        let view = cluster.volume("home").await;
        let node = view.nodes.iter().find(|node| node.id == known.id).unwrap();
        assert_eq!(node.address.port(), 9);
    });
}
