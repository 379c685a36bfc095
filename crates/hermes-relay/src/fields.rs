//! The fields of requests, responses and parts that a relay reads and writes.
//!
//! In: nothing. Out: names. Their meaning to clients is in docs/reference/node-document.md.

use http::header::HeaderName;

/// Asks for a subscription (`true`).
pub const SUBSCRIBE: HeaderName = HeaderName::from_static("hermes-subscribe");
/// The name that the Braid draft (draft-toomim-httpbis-braid-http) gives to [`SUBSCRIBE`].
pub const BRAID_SUBSCRIBE: HeaderName = HeaderName::from_static("subscribe");
/// The number of a subscription, by which it is refreshed.
pub const SUBSCRIPTION: HeaderName = HeaderName::from_static("hermes-subscription");
/// The timeout of a subscription in seconds.
pub const TIMEOUT: HeaderName = HeaderName::from_static("hermes-timeout");
/// The longest timeout that the relay allows, in seconds.
pub const MAX_TIMEOUT: HeaderName = HeaderName::from_static("hermes-max-timeout");
/// Further channels of a subscription: paths, with commas.
pub const CHANNELS: HeaderName = HeaderName::from_static("hermes-channels");
/// The group of a subscriber.
pub const GROUP: HeaderName = HeaderName::from_static("hermes-group");
/// The position after which a subscription resumes.
pub const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// The rule for full queues: `reliable` or `realtime`.
pub const RELAY: HeaderName = HeaderName::from_static("hermes-relay");
/// The audience of a publication: `all`, or `one` of each group.
pub const DELIVER: HeaderName = HeaderName::from_static("hermes-deliver");
/// Asks for the URI of a new channel (`true`).
pub const NEW: HeaderName = HeaderName::from_static("hermes-new");
/// The number of subscribers of a channel.
pub const SUBSCRIBERS: HeaderName = HeaderName::from_static("hermes-subscribers");
/// The time between heartbeats of a subscription in seconds.
pub const HEARTBEAT: HeaderName = HeaderName::from_static("hermes-heartbeat");
/// The number of subscribers in whose queues a publication is.
pub const DELIVERED: HeaderName = HeaderName::from_static("hermes-delivered");
/// The peer that is to be the root of a channel, as long as it has none; and the root.
pub const ROOT: HeaderName = HeaderName::from_static("hermes-root");
/// The peer to which the root of a channel is to move.
pub const MOVE: HeaderName = HeaderName::from_static("hermes-move");
/// The number of other relays that have a reliable publication.
pub const COPIES: HeaderName = HeaderName::from_static("hermes-copies");
/// The identifier of a publication, or a position.
pub const EVENT_ID: HeaderName = HeaderName::from_static("hermes-event-id");
/// The ends of the epochs of a channel, for a relay: positions with commas. The last one is that of the channel.
pub const EPOCHS: HeaderName = HeaderName::from_static("hermes-epochs");
/// The channel of a publication, if the subscription has several.
pub const CHANNEL: HeaderName = HeaderName::from_static("hermes-channel");
/// Tells a relay that the publisher has broken off (`true`). The publication keeps its place in the channel.
pub const ABORTED: HeaderName = HeaderName::from_static("hermes-aborted");
/// The number of publications that the subscriber does not get, or `unknown`.
pub const MISSED: HeaderName = HeaderName::from_static("hermes-missed");
