//! Whether a manager without a log founds the group or takes part again in one that it has forgotten.
//!
//! An empty directory looks the same on the first start of a cluster and after a disk was replaced. What
//! was promised from it before must not be forgotten (`milpa_raft`'s `rejoin_group`), so the others are
//! asked. To found, all have to be known to have nothing: of three, two that lost their disks while the
//! third is down would else found another cluster over it. "Founded" is said of a group in which a term has begun: before, nobody has promised
//! anything, and those who found at the same time must not take each other for older.
//!
//! That it takes part again is noted in the directory before anything of the group is, and for as long as
//! it lasts.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::Instant;
use milpa_host::node_directory::{DirectoryError, NodeDirectory};
use milpa_host::rpc::Pool;
use milpa_host::telemetry::with_sources;
use milpa_raft::MultiRaft;
use milpa_types::{ManagerError, NodeId, Role};
use milpa_wire::manager::{ManagerAnswer, ManagerReply, ManagerRequest};
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::RunError;
use super::access;
use super::event::Event;
use super::replica::GROUP;

/// Between two rounds of questions. Managers that are started together find each other within two.
const ROUND_PAUSE: Duration = Duration::from_millis(50);
/// One answer may take this long.
const ANSWER_WAIT: Duration = Duration::from_millis(500);
/// Managers that are started together are not complained about.
const SAY_AFTER: Duration = Duration::from_secs(2);
/// Catching up takes a second or two with a state of usual size.
const SLOW_AFTER: Duration = Duration::from_secs(30);

/// How a manager without a log begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beginning {
    /// Nothing was ever promised by anybody.
    Found,
    /// It may have promised what it does not know of.
    Rejoin,
}

/// What another manager has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Nothing.
    Nothing,
    /// A group in which a term has begun, and of which it is making up for what it lost.
    CatchesUp,
    /// The group, with all that it ever promised.
    GoesOn,
}

/// What another manager said, or why it said nothing.
type Said = (NodeId, Result<Standing, String>);

/// What to say of a wait, and whom of the others it is not for.
type Waiting = (&'static str, fn(&Result<Standing, String>) -> bool);

/// The managers, as one of them sees them that has nothing yet that it could take part with.
pub(super) struct Circle<'a> {
    pub own: NodeId,
    /// All, with their addresses.
    pub managers: &'a [(NodeId, SocketAddr)],
    pub pool: &'a Pool,
    /// What others ask meanwhile.
    pub events: &'a mut mpsc::Receiver<Event>,
}

impl Circle<'_> {
    /// Asks the others until it is known how to begin. Meanwhile whoever asks here is told that there is nothing.
    pub async fn ask(&mut self) -> Beginning {
        let waiting = "this manager's directory is empty: it founds the cluster when all managers say \
            that they have nothing either, or takes part in the one that there is";
        let is_heard = |said: &Result<Standing, String>| said.is_ok();
        self.ask_until(Ok(ManagerAnswer::Founded(false)), (waiting, is_heard), judge).await
    }

    /// Returns when a majority of the others has a group that goes on. Fewer could not bring back what only this
    /// directory has. Whoever asks here meanwhile gets no answer that could count for either.
    ///
    /// # Errors
    ///
    /// [`RunError::OnlyCopy`] if the others are no majority.
    pub async fn wait_until_others_go_on(&mut self, damage: RunError) -> Result<(), RunError> {
        let enough = self.managers.len() / 2 + 1;
        let damage = with_sources(&damage);
        if self.others().count() < enough {
            return Err(RunError::OnlyCopy { damage });
        }
        warn!(
            damage,
            "what this manager has cannot be used: it is set aside when a majority of \
            the others is there, and comes again from them"
        );
        let waiting = "this manager cannot use what it has, and waits for a majority of the others";
        let judge = move |said: &[Said]| go_on(said, enough).then_some(());
        let goes_on = |said: &Result<Standing, String>| *said == Ok(Standing::GoesOn);
        self.ask_until(Err(ManagerError::Busy), (waiting, goes_on), judge).await;
        Ok(())
    }

    fn others(&self) -> impl Iterator<Item = &(NodeId, SocketAddr)> {
        self.managers.iter().filter(|(id, _)| *id != self.own)
    }

    async fn ask_until<T>(
        &mut self,
        own_answer: ManagerReply,
        waiting: Waiting,
        judge: impl Fn(&[Said]) -> Option<T>,
    ) -> T {
        let others: Vec<_> = self.others().copied().collect();
        let asking = ask_others(&others, self.pool, waiting, judge);
        tokio::pin!(asking);
        loop {
            tokio::select! {
                biased;
                judged = &mut asking => return judged,
                Some(event) = self.events.recv() => answer(event, own_answer.clone()),
            }
        }
    }
}

async fn ask_others<T>(
    others: &[(NodeId, SocketAddr)],
    pool: &Pool,
    (waiting, is_fine): Waiting,
    judge: impl Fn(&[Said]) -> Option<T>,
) -> T {
    let started = Instant::now();
    let mut complained_of = Vec::new();
    loop {
        let said = round(others, pool).await;
        if let Some(judged) = judge(&said) {
            return judged;
        }
        let missing: Vec<_> = said.iter().filter(|(_, said)| !is_fine(said)).collect();
        let who: Vec<NodeId> = missing.iter().map(|(id, _)| *id).collect();
        if started.elapsed() >= SAY_AFTER && who != complained_of {
            warn!(waits_for = ?missing, "{waiting}");
            complained_of = who;
        }
        tokio::time::sleep(ROUND_PAUSE).await;
    }
}

/// Asks all at once, and waits for all: one that knows better must be heard.
async fn round(others: &[(NodeId, SocketAddr)], pool: &Pool) -> Vec<Said> {
    let asked: Vec<_> = others
        .iter()
        .map(|(id, address)| (*id, tokio::task::spawn_local(ask_one(pool.clone(), *address))))
        .collect();
    let mut said = Vec::new();
    for (id, answer) in asked {
        said.push((id, answer.await.unwrap_or_else(|error| Err(error.to_string()))));
    }
    said
}

async fn ask_one(pool: Pool, address: SocketAddr) -> Result<Standing, String> {
    let request = ManagerRequest::IsFounded;
    let called = pool.call(address, Role::Manager, &request, Bytes::new(), ANSWER_WAIT).await;
    let (reply, _): (ManagerReply, Bytes) = called.map_err(|error| error.to_string())?;
    match reply {
        Ok(ManagerAnswer::Founded(false)) => Ok(Standing::Nothing),
        Ok(ManagerAnswer::Founded(true)) => Ok(Standing::GoesOn),
        Ok(ManagerAnswer::CatchesUp) => Ok(Standing::CatchesUp),
        Ok(_) => Err("the answer is to another question".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// What follows from what the others said; `None` if somebody who may know better said nothing.
fn judge(said: &[Said]) -> Option<Beginning> {
    if said.iter().any(|(_, said)| matches!(said, Ok(Standing::GoesOn | Standing::CatchesUp))) {
        return Some(Beginning::Rejoin);
    }
    said.iter().all(|(_, said)| said.is_ok()).then_some(Beginning::Found)
}

/// Whether so many have all that they ever promised.
fn go_on(said: &[Said], enough: usize) -> bool {
    said.iter().filter(|(_, said)| *said == Ok(Standing::GoesOn)).count() >= enough
}

fn answer(event: Event, own_answer: ManagerReply) {
    // A frame is for a group that is not there yet: dropped, as if the process were.
    let Event::Request { caller, request, responder } = event else { return };
    let reply = access::check(caller, &request).and(match *request {
        ManagerRequest::IsFounded => own_answer,
        _ => Err(ManagerError::NotLeader { leader: None }),
    });
    responder.send(reply);
}

/// The directory of a running manager, and the note in it.
pub(super) struct Notebook<'a> {
    directory: &'a mut NodeDirectory,
    /// When to say that it still catches up.
    say_at: Instant,
}

impl Notebook<'_> {
    pub(super) fn new(directory: &mut NodeDirectory) -> Notebook<'_> {
        if directory.is_rejoining() {
            info!(
                "this manager's directory is empty: it takes part again when it has caught up with a leader"
            );
        }
        Notebook { directory, say_at: Instant::now() + SLOW_AFTER }
    }

    /// Removes the note when there is no more reason for it.
    pub(super) fn keep(&mut self, multi: &MultiRaft) -> Result<(), DirectoryError> {
        if !self.directory.is_rejoining() {
            return Ok(());
        }
        if !multi.is_rejoining(GROUP) {
            info!("this manager has caught up and takes part again");
            return self.directory.set_rejoining(false);
        }
        if Instant::now() >= self.say_at {
            self.say_at = Instant::now() + SLOW_AFTER;
            let leader = multi.status(GROUP).and_then(|status| status.leader);
            warn!(
                ?leader,
                "this manager's directory was empty, and it has not caught up yet: it needs a leader \
                and a majority without itself; if several directories were lost, restore one of them \
                (docs/operations.md, \"Managers die\")"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use Standing::{CatchesUp, GoesOn, Nothing};

    fn said(said: &[Option<Standing>]) -> Vec<Said> {
        let ids = (1..).map(NodeId);
        ids.zip(said.iter().map(|said| said.ok_or_else(|| "silent".to_owned()))).collect()
    }

    #[track_caller]
    fn check(answers: &[Option<Standing>], expected: Option<Beginning>) {
        assert_eq!(judge(&said(answers)), expected, "{answers:?}");
    }

    #[test]
    fn what_cannot_be_used_is_given_up_only_before_a_majority_that_goes_on() {
        for (others, is_enough) in [
            (&[Some(GoesOn), Some(GoesOn)][..], true),
            (&[Some(GoesOn), None], false),
            (&[Some(GoesOn), Some(Nothing)], false),
            (&[Some(GoesOn), Some(CatchesUp)], false),
            (&[Some(GoesOn), Some(GoesOn), Some(GoesOn), None], true),
            (&[Some(GoesOn), Some(GoesOn), Some(Nothing), None], false),
            (&[Some(GoesOn), Some(GoesOn), Some(CatchesUp), Some(CatchesUp)], false),
        ] {
            let enough = others.len().div_ceil(2) + 1;
            assert_eq!(go_on(&said(others), enough), is_enough, "{others:?}");
        }
    }

    #[test]
    fn one_who_knows_better_decides_and_else_all_must_have_nothing() {
        let (found, rejoin) = (Some(Beginning::Found), Some(Beginning::Rejoin));
        check(&[], found);
        check(&[Some(Nothing), Some(Nothing)], found);
        check(&[Some(Nothing), None], None);
        check(&[None, None], None);
        check(&[Some(Nothing), Some(GoesOn)], rejoin);
        check(&[Some(Nothing), Some(CatchesUp)], rejoin);
        check(&[None, Some(GoesOn)], rejoin);
        check(&[Some(Nothing), Some(Nothing), Some(Nothing), None], None);
        check(&[Some(Nothing), Some(Nothing), Some(Nothing), Some(GoesOn)], rejoin);
    }
}
