//! Publish and subscribe over HTTP: the state of a relay, without its connections.
//!
//! In: subscriptions and publications, each with the time. Out: the publications for each subscriber, in order, and how
//! many subscribers a publication reached. Never: a socket, a task, or a clock.
//!
//! A [`Relay`] has channels, which are URIs. Each subscriber has a bounded queue of its own, so that a slow one delays no
//! other. A publication that is *realtime* is dropped for a subscriber whose queue is full; one that is *reliable* waits
//! until all queues have room. The source is HTTP-RS, "HTTP as the narrow waist of the future Internet", sections 5 and 6.

mod arriving;
mod backfill_range;
mod channel;
pub mod event_id;
mod feed;
pub mod fields;
pub mod framing;
mod history_log;
mod limits;
mod lineage;
mod publication;
mod publishing;
mod queue;
mod relay;
mod request;
mod reserved;

pub use arriving::{ArrivingContent, ContentError, ContentReader, ContentWriter, NextPart};
pub use backfill_range::{BackfillRange, BackfillStep, MissedRange};
pub use channel::{HandOver, Losses};
pub use event_id::EventId;
pub use feed::Feed;
pub use limits::RelayLimits;
pub use lineage::MAX_EPOCHS;
pub use publication::{Content, FedPublication, NewPublication, Publication};
pub use publishing::{Audience, Copies, PublishProgress, Receipt};
pub use queue::{Delivery, End};
pub use relay::{Relay, RelayCounters, Subscription};
pub use request::{PublishError, SubscribeError, SubscribeRequest, SubscriptionId};
pub use reserved::Reserved;
