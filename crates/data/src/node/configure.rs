//! Configurations: proposed by the manager, committed by the group, adopted by each member.

use milpa_host::clock::now_ms;
use milpa_host::rpc::Reply;
use milpa_raft::{LogPosition, MemberChange, ProposeError, word_of_term};
use milpa_types::{DataError, Epoch, NodeId, PartitionId};
use milpa_wire::data::Configuration;

use crate::overwrite::{EntryHead, encode_entry};

use super::disk::Disk;
use super::partition::{Partition, Waiting, answer, answer_done};

/// Members and learners of a partition at most: a volume's replicas, and one that replaces each of
/// them.
const MEMBERS_MAX: usize = 14;

impl Disk {
    /// The manager's word to the group's leader.
    pub fn configure(
        &mut self,
        id: PartitionId,
        wanted: Configuration,
        lost: &[NodeId],
        reply: Reply,
    ) {
        let node = self.shared.node;
        self.driver.multi.do_not_wait_for(id, lost);
        let partition = match self.partition(id) {
            Ok(partition) => partition,
            Err(error) => return answer(reply, Err(error)),
        };
        // What came out of the log: it need not be in force yet, and is what the group has.
        let present = partition.state.configuration.clone();
        if !partition.leads() {
            let error = match survivor_without(&wanted, &present, node) {
                Some(lost) => self.go_alone(id, lost, wanted.epoch),
                None => partition.not_leader(),
            };
            return answer(reply, Err(error));
        }
        if partition.configuration == wanted {
            return answer_done(reply, Ok(()));
        }
        if let Some(replies) = waiting_for(partition, &wanted) {
            return replies.push(reply);
        }
        if present == wanted {
            return answer(reply, Err(DataError::Busy));
        }
        if let Err(error) = check(&wanted, &present) {
            return answer(reply, Err(error));
        }
        let proposed = self.propose_configuration(id, &wanted, lost);
        let waiting = Waiting::Configure { configuration: wanted, replies: vec![reply] };
        self.proposed(id, proposed, waiting);
    }

    /// The other one of two members is lost for good (docs/decisions/0007): this one is to lead without
    /// it, and then commits the configuration like any other. The managers repeat themselves until then.
    fn go_alone(&mut self, id: PartitionId, lost: NodeId, word: Epoch) -> DataError {
        match self.driver.multi.go_alone(id, lost, word.0, now_ms()) {
            Ok(()) => {
                self.refuse_overwrites(id);
                DataError::Busy
            }
            Err(ProposeError::Busy { .. }) => DataError::Busy,
            Err(error) => {
                tracing::info!(partition = %id, %lost, %error, "cannot go on alone");
                DataError::NotPrimary { hint: None }
            }
        }
    }

    /// The survivor of two may have forgotten, with its log's newest commit index, that its group needs
    /// nobody else. (What counts is the newest configuration that came out of the log, as in the group: the
    /// one in force may be older.) Whom it is to teach joins the group once that is led.
    pub fn tick_alone(&mut self) {
        let node = self.shared.node;
        let alone = self.partitions.values().filter(|partition| {
            partition.broken.is_none() && partition.state.configuration.members == [node]
        });
        let alone: Vec<_> = alone.map(|it| (it.id, it.state.configuration.epoch)).collect();
        for (id, word) in alone {
            let Some(status) = self.driver.multi.status(id) else { continue };
            match status.members.voters[..] {
                [one, other] => {
                    let lost = if one == node { other } else { one };
                    self.go_alone(id, lost, word);
                }
                _ => self.teach_as_configured(id, &status.members.learners),
            }
        }
    }

    /// Takes in a learner that came with the word to go on alone: then that was all there was to decide in one step.
    fn teach_as_configured(&mut self, id: PartitionId, present: &[NodeId]) {
        let Some(partition) = self.partitions.get(&id) else { return };
        let configuration = partition.configuration.clone();
        let is_in_force = configuration == partition.state.configuration;
        let is_missing = !configuration.learners.iter().all(|learner| present.contains(learner));
        if partition.leads() && is_in_force && is_missing {
            // Busy, or led elsewhere: at the next tick.
            drop(self.propose_configuration(id, &configuration, &[]));
        }
    }

    fn propose_configuration(
        &mut self,
        id: PartitionId,
        wanted: &Configuration,
        lost: &[NodeId],
    ) -> Result<LogPosition, ProposeError> {
        let (voters, mut learners) = (wanted.members.clone(), wanted.learners.clone());
        let members = self.driver.multi.status(id).map(|status| status.members);
        if let ([_], Some(members)) = (&voters[..], members)
            && members.voters.len() == 2
        {
            // In one step: of two at once the second could be lost in a crash, and with it the majority.
            learners = members.learners;
        }
        let change = MemberChange { voters, learners };
        let context = milpa_wire::encode(wanted).into();
        match self.driver.multi.propose_change(id, &change, lost, context) {
            // The same members, another primary: an ordinary entry says so.
            Err(ProposeError::BadChange { .. }) => {
                let entry = encode_entry(&EntryHead::Configure(wanted.clone()), &[]);
                self.driver.multi.propose(id, entry)
            }
            other => other,
        }
    }

    /// A committed configuration: written down, then in force. Repeats and older ones (the log
    /// comes again after a restart) change nothing.
    pub fn adopt(&mut self, id: PartitionId, position: LogPosition, wanted: Configuration) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        if wanted.epoch <= partition.state.configuration.epoch {
            return self.entry_applied(id, position, None, Ok(()));
        }
        let newer = (&wanted, position.term);
        if was_in_vain(&partition.state.configuration, newer, self.shared.node) {
            return self.retire_replica(id);
        }
        let was_one_of_two = partition.state.configuration.members.len() == 2;
        let goes_alone = wanted.members == [self.shared.node] && !wanted.learners.is_empty();
        partition.state.is_given_rest =
            goes_alone && (was_one_of_two || partition.state.is_given_rest);
        partition.state.adopt(wanted.clone(), self.shared.node);
        partition.state.configured = position;
        // Whom to hear does not wait for a disk that may be full.
        self.driver.multi.set_roster(id, wanted.epoch, &wanted.members);
        self.save_state(
            id,
            Box::new(move |disk| {
                disk.enforce(id, wanted);
                disk.entry_applied(id, position, None, Ok(()));
            }),
        );
    }

    /// Whether this replica cannot follow a group that has come to a configuration: it is out of service then.
    pub fn retire_if_in_vain(&mut self, id: PartitionId, later: &Configuration, term: u64) -> bool {
        let own = self.partitions.get(&id).map(|partition| &partition.state.configuration);
        let was_in_vain = own.is_some_and(|own| was_in_vain(own, (later, term), self.shared.node));
        if was_in_vain {
            self.retire_replica(id);
        }
        was_in_vain
    }

    /// Puts a configuration that is written down into force: the old epoch's appends end here.
    pub fn enforce(&mut self, id: PartitionId, configuration: Configuration) {
        let node = self.shared.node;
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        if configuration.epoch <= partition.configuration.epoch {
            return;
        }
        tracing::info!(partition = %id, epoch = %configuration.epoch,
            members = ?configuration.members, primary = %configuration.primary, "configuration");
        let is_member = |node: &NodeId| configuration.members.contains(node);
        if !partition.configuration.members.iter().all(is_member) {
            partition.licence.dropped(now_ms());
        }
        partition.configuration = configuration.clone();
        partition.marked_everywhere.clear();
        // Other members may have what those of before did not.
        partition.lost.doubt_all();
        let (mut appends, mut backups) = (Vec::new(), Vec::new());
        partition.primary.configure(configuration.clone(), &mut appends);
        partition.backup.configure(configuration.clone(), &mut backups);
        partition.alignment.broken.clear();
        partition.alignment.unaligned = 0;
        partition.alignment.wants_all = configuration.primary == node;
        partition.alignment.is_unknown = configuration.primary == node;
        partition.alignment.next_ms = 0;
        partition.alignment.failures = 0;
        self.perform_appends(id, appends);
        self.perform_backup(id, backups);
        self.report_soon();
    }

    /// The entry of a configuration was applied: it is in force, or another one is.
    pub fn answer_configure(
        &mut self,
        id: PartitionId,
        wanted: &Configuration,
        replies: Vec<Reply>,
    ) {
        let Some(partition) = self.partitions.get(&id) else { return };
        let current = partition.configuration.epoch;
        let adopted = partition.configuration == *wanted;
        for reply in replies {
            let result = if adopted { Ok(()) } else { Err(DataError::StaleEpoch { current }) };
            answer_done(reply, result);
        }
    }
}

fn check(wanted: &Configuration, present: &Configuration) -> Result<(), DataError> {
    if !wanted.follows(present) {
        return Err(DataError::StaleEpoch { current: present.epoch });
    }
    let members = &wanted.members;
    let mut sorted: Vec<_> = members.iter().chain(&wanted.learners).copied().collect();
    let count = sorted.len();
    sorted.sort_unstable();
    sorted.dedup();
    let unique = sorted.len() == count;
    let bounded = !members.is_empty() && count <= MEMBERS_MAX;
    if unique && bounded && members.contains(&wanted.primary) {
        Ok(())
    } else {
        Err(DataError::Invalid)
    }
}

/// Whether a replica has followed one that went on alone, and that may have been lost before anybody joined it: then another
/// one went on instead, who has nothing of what was committed there (docs/decisions/0007). The bytes that came of it are
/// in this replica. The lost one may be a member again, made anew: then the group's terms are of a later word. Who is a member
/// has taken part in what came later: its disk has forgotten that.
fn was_in_vain(own: &Configuration, (later, term): (&Configuration, u64), node: NodeId) -> bool {
    let [alone] = own.members[..] else { return false };
    let is_without = !later.members.contains(&alone) || word_of_term(term) > own.epoch.0;
    later.epoch > own.epoch && is_without && !later.members.contains(&node)
}

/// Whom this node is to go on without, if it is the survivor of two.
fn survivor_without(
    wanted: &Configuration,
    present: &Configuration,
    node: NodeId,
) -> Option<NodeId> {
    let is_survivor = wanted.members == [node] && present.members.len() == 2;
    let others = || present.members.iter().copied().filter(|member| *member != node);
    (is_survivor && check(wanted, present).is_ok()).then(others).and_then(|mut lost| lost.next())
}

/// Those who wait for the same configuration already.
fn waiting_for<'a>(
    partition: &'a mut Partition,
    wanted: &Configuration,
) -> Option<&'a mut Vec<Reply>> {
    let term = partition.term;
    partition.proposals.values_mut().find_map(|proposal| match &mut proposal.waiting {
        Waiting::Configure { configuration, replies }
            if configuration == wanted && proposal.term == term =>
        {
            Some(replies)
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use milpa_types::Epoch;

    use super::*;

    fn configuration(epoch: u64, members: &[u32], primary: u32) -> Configuration {
        let members = members.iter().copied().map(NodeId).collect();
        let learners = Vec::new();
        Configuration { epoch: Epoch(epoch), members, primary: NodeId(primary), learners }
    }

    #[test]
    fn the_survivor_of_two_goes_on_without_the_other_one() {
        let pair = configuration(4, &[1, 2], 2);
        let alone = configuration(5, &[1], 1);
        assert_eq!(survivor_without(&alone, &pair, NodeId(1)), Some(NodeId(2)));
        assert_eq!(survivor_without(&alone, &pair, NodeId(2)), None, "the word is for the other");
        assert_eq!(survivor_without(&alone, &configuration(4, &[1, 2, 3], 2), NodeId(1)), None);
        let missed_one = survivor_without(&configuration(6, &[1], 1), &pair, NodeId(1));
        assert_eq!(missed_one, Some(NodeId(2)), "one epoch between could not be committed");
        assert_eq!(survivor_without(&configuration(4, &[1], 1), &pair, NodeId(1)), None);
    }

    #[test]
    fn who_has_followed_one_that_went_on_alone_follows_nobody_without_it() {
        let alone = configuration(5, &[1], 1);
        let in_vain = |own: &Configuration, later| was_in_vain(own, (&later, 5 << 21), NodeId(4));
        assert!(in_vain(&alone, configuration(7, &[2], 2)));
        assert!(in_vain(&alone, configuration(9, &[2, 3], 2)), "it may have been");
        assert!(!in_vain(&alone, configuration(7, &[1, 3], 1)));
        let made_anew = configuration(9, &[1, 2], 2);
        assert!(was_in_vain(&alone, (&made_anew, 7 << 21), NodeId(4)));
        assert!(!in_vain(&alone, configuration(4, &[2, 3], 2)), "before");
        assert!(!in_vain(&alone, configuration(9, &[3, 4], 3)), "it has followed them");
        assert!(!in_vain(&configuration(5, &[1, 2], 1), configuration(7, &[2], 2)));
    }

    #[test]
    fn only_the_next_epoch_with_sound_members_is_proposed() {
        let present = configuration(4, &[1, 2, 3], 1);
        assert_eq!(check(&configuration(5, &[1, 2], 2), &present), Ok(()));
        let stale = Err(DataError::StaleEpoch { current: Epoch(4) });
        assert_eq!(check(&configuration(4, &[1, 2], 2), &present), stale);
        assert_eq!(check(&configuration(6, &[1, 2], 2), &present), Ok(()), "5 was taken back");
        assert_eq!(check(&configuration(6, &[1, 2, 4], 2), &present), stale, "4 has not learned");
        assert_eq!(check(&configuration(5, &[1, 2, 4], 2), &present), stale);
        let filling = Configuration { learners: vec![NodeId(4)], ..present.clone() };
        assert_eq!(check(&configuration(5, &[1, 2, 4], 2), &filling), Ok(()));
        assert_eq!(
            check(&configuration(6, &[1, 2, 4], 2), &filling),
            stale,
            "may lack what 5 took"
        );
        for (members, primary) in [(&[][..], 1), (&[1, 1], 1), (&[1, 2], 3)] {
            let wanted = configuration(5, members, primary);
            assert_eq!(check(&wanted, &present), Err(DataError::Invalid), "{wanted:?}");
        }
        let filled = |learners: &[u32]| Configuration {
            learners: learners.iter().copied().map(NodeId).collect(),
            ..configuration(5, &[1, 2], 1)
        };
        assert_eq!(check(&filled(&[4]), &present), Ok(()));
        assert_eq!(check(&filled(&[2]), &present), Err(DataError::Invalid), "it has a vote");
    }
}
