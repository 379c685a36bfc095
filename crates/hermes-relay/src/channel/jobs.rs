//! Publications for one member of each group: jobs.
//!
//! In: a job, and the members with room in their queues. Out: the job in the queue of one member of each group, in turn; of
//! another one if that one goes. Without a member it waits for one. Never: a job in the history.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::{ChannelState, Member};
use crate::limits::RelayLimits;
use crate::publication::Publication;
use crate::publishing::Place;
use crate::queue::Delivery;

/// The members of groups that get a job.
pub(super) struct Takers {
    /// One member of each group with room.
    pub(super) takers: Vec<u64>,
    /// All members of the groups that have no room.
    pub(super) full: Vec<u64>,
    pub(super) full_groups: u64,
}

impl ChannelState {
    /// Gives a member the jobs that wait for one of its group.
    pub(super) fn give_orphans(&mut self, number: u64, now: Duration) {
        let Some(member) = self.members.get(&number).filter(|member| member.takes_jobs()) else { return };
        let ours = |job: &(Option<Arc<str>>, Arc<Publication>)| job.0 == member.group;
        let (taken, rest): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut self.orphans).into_iter().partition(ours);
        for (_, job) in taken {
            member.queue.push(Delivery::Publication(job), now);
        }
        self.orphans = rest;
    }

    /// Keeps a job of the relay that feeds this channel for the next member: the publisher has been told that it was
    /// delivered.
    pub(super) fn keep_fed(
        &mut self,
        place: Place,
        takers: &[u64],
        job: &Arc<Publication>,
        limits: &RelayLimits,
        now: Duration,
    ) {
        if takers.is_empty() && matches!(place, Place::Fed(_)) {
            self.hand_on(&None, vec![job.clone()], limits, now);
        }
    }

    /// The next member with room of each group, in turn; and the members of groups that are all full.
    pub(super) fn takers(&self, room: &BTreeMap<u64, usize>) -> Takers {
        let mut groups: BTreeMap<&Option<Arc<str>>, Vec<(u64, usize)>> = BTreeMap::new();
        for (number, free) in room {
            if let Some(member) = self.members.get(number).filter(|member| member.takes_jobs()) {
                groups.entry(&member.group).or_default().push((*number, *free));
            }
        }
        let mut all = Takers { takers: Vec::new(), full: Vec::new(), full_groups: 0 };
        for (group, members) in groups {
            let last = self.groups.get(group).and_then(|group| group.last);
            let in_turn = |(number, free): &&(u64, usize)| *free > 0 && last.is_none_or(|last| *number > last);
            match members.iter().find(in_turn).or_else(|| members.iter().find(|(_, free)| *free > 0)) {
                Some((number, _)) => all.takers.push(*number),
                None => {
                    all.full.extend(members.iter().map(|(number, _)| *number));
                    all.full_groups += 1;
                }
            }
        }
        all
    }

    /// Gives a job to a member, or to another one of its group if the member's subscription has ended meanwhile.
    pub(super) fn give(&mut self, number: u64, job: &Arc<Publication>, limits: &RelayLimits, now: Duration) {
        let Some(member) = self.members.get(&number) else { return };
        let group = member.group.clone();
        if member.queue.push(Delivery::Publication(job.clone()), now) {
            self.groups.entry(group).or_default().last = Some(number);
        } else {
            self.hand_on(&group, vec![job.clone()], limits, now);
        }
    }

    /// Gives jobs to members of a group, even to full ones; without a member they wait for one.
    pub(super) fn hand_on(
        &mut self,
        group: &Option<Arc<str>>,
        jobs: Vec<Arc<Publication>>,
        limits: &RelayLimits,
        now: Duration,
    ) {
        // The members are not searched for a subscriber that leaves without a job, as most do.
        let Some(bytes) = jobs.first().map(|job| job.bytes()) else { return };
        let mut members: Vec<(usize, &Member)> = self
            .members
            .values()
            .filter(|member| member.group == *group && member.takes_jobs())
            .filter_map(|member| Some((member.queue.room(bytes, now)?, member)))
            .collect();
        members.sort_by_key(|(free, _)| std::cmp::Reverse(*free));
        for (at, job) in jobs.into_iter().enumerate() {
            let in_turn = members.iter().cycle().skip(at % members.len().max(1)).take(members.len());
            let mut takers = in_turn.filter(|(_, member)| member.queue.push(Delivery::Publication(job.clone()), now));
            if takers.next().is_some() {
            } else if self.orphans.len() < limits.queue.max(1) {
                self.orphans.push_back((group.clone(), job));
            } else {
                self.losses.jobs += 1;
            }
        }
    }
}
