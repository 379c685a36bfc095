//! The audience of a publication, its place in its channel, and its outcome.
//!
//! In: the wish of a publisher, or the identifier of another relay. Out: values that a channel and its callers share.

use std::time::Duration;

use crate::EventId;

/// The subscribers that get a publication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Audience {
    /// All subscribers.
    #[default]
    All,
    /// One subscriber of each group. Subscribers without a group form one.
    OneOfEachGroup,
}

/// The place of a publication in its channel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// The next number, or none if it is for one of each group.
    Next(Audience),
    /// The identifier that the relay has given that feeds the channel. `None`: it is for one of each group.
    Fed(Option<EventId>),
}

impl Place {
    pub(crate) fn audience(self) -> Audience {
        match self {
            Self::Next(audience) => audience,
            Self::Fed(Some(_)) => Audience::All,
            Self::Fed(None) => Audience::OneOfEachGroup,
        }
    }
}

/// The confirmed copies of a channel's publications.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// The relays that keep a copy.
    pub stand_bys: usize,
    /// The sequence number of the latest publication that all of them have.
    pub until: u64,
    /// The time at which a relay stopped to keep a copy the last time, or promised to keep one.
    pub lost: Option<Duration>,
    /// This relay numbers the publications.
    pub is_root: bool,
    /// Another relay has taken over by asking this one, and has them all.
    pub is_handed_over: bool,
}

/// The outcome of a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The identifier that the channel gave to it. `None` for a publication for one of each group.
    pub id: Option<EventId>,
    /// The subscribers of the channel, with those behind relaying nodes.
    pub subscribers: u64,
    /// The subscribers in whose queues it is. All behind a relaying node count if it is in the queue of that node.
    pub delivered: u64,
    /// The subscribers, or for one of each group the groups, that do not get it because of full queues.
    pub dropped: u64,
}

/// The progress of a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishProgress {
    /// All queues of the audience have it.
    Done(Receipt),
    /// A queue is full. The publisher is woken when it has room.
    Waiting {
        /// The time at which the publisher should try again at the latest.
        until: Duration,
    },
}
