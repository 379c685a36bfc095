//! Records the addresses and routes that the downstream peer of a CONNECT-IP flow signalled, for replay to a new
//! upstream.
//!
//! In: capsules of the downstream peer, and the upstream's answers to address requests. Out: the capsules for a new
//! upstream, with the request IDs of the downstream peer. The memory for them is bounded. Never: a packet.

use bytes::{Bytes, BytesMut};
use hermes_wire::capsule;
use hermes_wire::connect_ip::{self, Address, Prefix};

use super::super::{Batch, Other};
use crate::runtime::WorkerContext;

/// The maximum number of recorded address requests. It equals the limit of addresses in a session.
const MAX_ADDRESS_REQUESTS: usize = 64;
/// The maximum payload length of a recorded capsule other than ADDRESS_REQUEST.
const MAX_CAPSULE_BYTES: usize = 8 << 10;

/// The CONNECT-IP capsules of the downstream peer that are in force.
#[derive(Default)]
pub(super) struct AdvertisedState {
    /// Types and payloads of capsules, each of which replaces the previous one of its type (RFC 9484, section 4.7).
    whole: Vec<(u64, Bytes)>,
    /// Address requests, each of which adds to the previous ones.
    asked: Vec<AddressRequest>,
}

/// A request of the downstream peer for an address, with the upstream's answer.
struct AddressRequest {
    wanted: Address,
    answer: AddressAnswer,
}

/// The upstream's answer to an address request.
#[derive(PartialEq)]
enum AddressAnswer {
    Outstanding,
    Given(Prefix),
    Refused,
}

impl AddressRequest {
    /// Returns the request to replay. A request for any address becomes one for the address that was assigned.
    fn as_given(&self) -> Address {
        match self.answer {
            AddressAnswer::Given(prefix) if is_any(self.wanted.prefix) => Address { prefix, ..self.wanted },
            _ => self.wanted,
        }
    }

    /// True if a later request replaces this one: it has the same ID, or asks for the address that this one asked for
    /// or was assigned. A later request for any address replaces a refused one for any address of the same IP version.
    /// A repeated request has a new ID (RFC 9484, section 4.7.2).
    fn gives_way_to(&self, next: &Address) -> bool {
        let (wanted, has) = (self.wanted.prefix, self.as_given().prefix);
        let same_version = || wanted.address().is_ipv4() == next.prefix.address().is_ipv4();
        let is_any_again = || self.answer == AddressAnswer::Refused && is_any(wanted) && same_version();
        let is_again = if is_any(next.prefix) { is_any_again() } else { [wanted, has].contains(&next.prefix) };
        is_again || self.wanted.request == next.request
    }
}

fn is_any(prefix: Prefix) -> bool {
    prefix.address().is_unspecified()
}

/// The capsules that are replayed to an upstream.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Words {
    whole: Vec<(u64, Bytes)>,
    asked: Vec<Address>,
}

impl AdvertisedState {
    pub(super) fn note(&mut self, batch: &Batch, worker: &WorkerContext) {
        for other in &batch.capsules {
            if let Other::Whole { kind, payload } = other
                && !self.add(*kind, payload)
            {
                worker.shared.metrics.limit("replayed-capsules");
            }
        }
    }

    /// Records a capsule. Returns false if the capsule is too long, or if an earlier address request was removed for
    /// it.
    pub(super) fn add(&mut self, kind: u64, payload: &Bytes) -> bool {
        if kind == connect_ip::ADDRESS_REQUEST {
            // A malformed capsule is ignored here: the end of the tunnel rejects it and ends the flow.
            let wanted = connect_ip::parse_address_request(payload.clone()).unwrap_or_default();
            let forgotten = wanted.into_iter().filter(|wanted| !self.record_request(*wanted)).count();
            return forgotten == 0;
        }
        self.whole.retain(|(said, _)| *said != kind);
        let fits = payload.len() <= MAX_CAPSULE_BYTES;
        if fits {
            // Copied: a slice would keep its whole read buffer alive.
            self.whole.push((kind, Bytes::copy_from_slice(payload)));
        }
        fits
    }

    fn record_request(&mut self, wanted: Address) -> bool {
        self.asked.retain(|before| !before.gives_way_to(&wanted));
        let fits = self.asked.len() < MAX_ADDRESS_REQUESTS;
        if !fits {
            self.asked.remove(0);
        }
        self.asked.push(AddressRequest { wanted, answer: AddressAnswer::Outstanding });
        fits
    }

    /// Records the upstream's answers to address requests.
    pub(super) fn record_answers(&mut self, batch: &Batch) {
        for address in assigned(batch).flatten() {
            let asked = self.asked.iter_mut().find(|asked| asked.wanted.request == address.request);
            if let Some(asked) = asked {
                asked.answer =
                    if is_any(address.prefix) { AddressAnswer::Refused } else { AddressAnswer::Given(address.prefix) };
            }
        }
    }

    /// Returns the capsules to replay. Requests for any address ask for the assigned one, except those whose IDs are in
    /// `for_any`: they ask for any address again.
    pub(super) fn again(&self, for_any: &[u64]) -> Words {
        let said = |asked: &AddressRequest| {
            if for_any.contains(&asked.wanted.request) { asked.wanted } else { asked.as_given() }
        };
        Words { whole: self.whole.clone(), asked: self.asked.iter().map(said).collect() }
    }

    /// True if the request with this ID asked for any address, and the upstream assigned one.
    pub(super) fn has_any(&self, request: u64) -> bool {
        self.asked.iter().any(|asked| asked.wanted.request == request && asked.as_given() != asked.wanted)
    }

    /// True if [`Self::again`] replays this capsule.
    pub(super) fn holds(&self, other: &Other) -> bool {
        match other {
            Other::Whole { kind: connect_ip::ADDRESS_REQUEST, .. } => true,
            Other::Whole { kind, payload } => self.whole.iter().any(|said| (said.0, &said.1) == (*kind, payload)),
            Other::Piece { .. } => false,
        }
    }
}

impl Words {
    /// Returns the encoded capsules, for a stream.
    pub(super) fn bytes(&self) -> Bytes {
        let mut bytes = BytesMut::new();
        self.capsules().for_each(|(kind, payload)| capsule::put(&mut bytes, kind, &payload));
        bytes.freeze()
    }

    /// Returns the capsules as a batch, for a port.
    pub(super) fn batch(&self) -> Batch {
        let capsules = self.capsules().map(|(kind, payload)| Other::Whole { kind, payload }).collect();
        Batch { capsules, opened: true, ..Batch::default() }
    }

    fn capsules(&self) -> impl Iterator<Item = (u64, Bytes)> {
        let mut payload = BytesMut::new();
        connect_ip::put_addresses(&self.asked, &mut payload);
        let request = (!payload.is_empty()).then(|| (connect_ip::ADDRESS_REQUEST, payload.freeze()));
        self.whole.iter().cloned().chain(request)
    }

    /// Returns the capsules that `others` does not contain. Address requests are compared by ID, because a tunnel may
    /// use an ID only once.
    pub(super) fn beyond(&self, others: &Self) -> Self {
        let is_new = |address: &&Address| others.asked.iter().all(|other| other.request != address.request);
        Self {
            whole: self.whole.iter().filter(|said| !others.whole.contains(said)).cloned().collect(),
            asked: self.asked.iter().filter(is_new).copied().collect(),
        }
    }

    /// Returns the IDs of the address requests.
    pub(super) fn requests(&self) -> Vec<u64> {
        self.asked.iter().map(|address| address.request).collect()
    }
}

/// Returns the addresses of each well-formed ADDRESS_ASSIGN capsule in the batch.
pub(super) fn assigned(batch: &Batch) -> impl Iterator<Item = Vec<Address>> {
    batch.capsules.iter().filter_map(|other| match other {
        Other::Whole { kind: connect_ip::ADDRESS_ASSIGN, payload } => {
            connect_ip::parse_address_assign(payload.clone()).ok()
        }
        Other::Whole { .. } | Other::Piece { .. } => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(request: u64, address: [u8; 4]) -> Address {
        Address { request, prefix: Prefix::of(address.into()) }
    }

    fn payload(addresses: &[Address]) -> Bytes {
        let mut payload = BytesMut::new();
        connect_ip::put_addresses(addresses, &mut payload);
        payload.freeze()
    }

    fn asks(said: &mut AdvertisedState, request: u64, wanted: [u8; 4]) -> bool {
        said.add(connect_ip::ADDRESS_REQUEST, &payload(&[address(request, wanted)]))
    }

    fn answers(said: &mut AdvertisedState, given: &[Address]) {
        let capsules = [Other::Whole { kind: connect_ip::ADDRESS_ASSIGN, payload: payload(given) }].into();
        said.record_answers(&Batch { capsules, ..Batch::default() });
    }

    const ANY: [u8; 4] = [0; 4];

    #[test]
    fn who_asks_again_asks_once() {
        let mut said = AdvertisedState::default();
        for request in [1, 2, 500] {
            assert!(asks(&mut said, request, [10, 0, 0, 2]));
        }
        assert_eq!(said.again(&[]).asked, [address(500, [10, 0, 0, 2])]);
        // Each request for any address adds one, unless the previous one was refused.
        asks(&mut said, 501, ANY);
        asks(&mut said, 502, ANY);
        answers(&mut said, &[address(501, [10, 0, 0, 9]), address(502, ANY)]);
        asks(&mut said, 503, ANY);
        assert_eq!(said.again(&[]).requests(), [500, 501, 503]);
        // The first of them has an address by now.
        let given = [address(500, [10, 0, 0, 2]), address(501, [10, 0, 0, 9]), address(503, ANY)];
        assert_eq!(said.again(&[]).asked, given);
        assert_eq!(said.again(&[501]).asked[1], address(501, ANY));
        assert_eq!([500, 501, 503].map(|request| said.has_any(request)), [false, true, false]);
        let later = said.again(&[]);
        asks(&mut said, 504, [10, 0, 0, 3]);
        assert_eq!(said.again(&[]).beyond(&later).asked, [address(504, [10, 0, 0, 3])]);
        // The client requests the address that it has.
        asks(&mut said, 505, [10, 0, 0, 9]);
        assert_eq!(said.again(&[]).requests(), [500, 503, 504, 505]);
    }

    #[test]
    fn what_is_remembered_of_a_client_is_bounded() {
        let mut said = AdvertisedState::default();
        assert!(said.add(connect_ip::ROUTE_ADVERTISEMENT, &Bytes::from_static(&[1; 100])));
        assert!(!said.add(connect_ip::ROUTE_ADVERTISEMENT, &vec![0; MAX_CAPSULE_BYTES + 1].into()));
        assert!(said.whole.is_empty());
        for payload in [&[][..], &[4]] {
            assert!(said.add(connect_ip::ROUTE_ADVERTISEMENT, &Bytes::copy_from_slice(payload)));
        }
        assert_eq!(said.whole, [(connect_ip::ROUTE_ADVERTISEMENT, Bytes::from_static(&[4]))]);
        for request in 1..=1000_u16 {
            let [high, low] = request.to_be_bytes();
            assert_eq!(
                asks(&mut said, request.into(), [10, 0, high, low]),
                usize::from(request) <= MAX_ADDRESS_REQUESTS
            );
        }
        // The newest requests are remembered, and so are other capsules.
        assert_eq!(said.asked.len(), MAX_ADDRESS_REQUESTS);
        assert_eq!(said.again(&[]).requests().last(), Some(&1000));
        assert_eq!(said.whole.len(), 1);
    }
}
