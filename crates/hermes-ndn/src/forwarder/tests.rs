//! Tests of the forwarder in computed time.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::certificates::{MAX_KEYS_OF_IDENTITY, OVERHEAD};
use super::*;
use crate::packet::{DataBuilder, MAX_CONVENTION_COMPONENTS};
use crate::signature::Signer;
use crate::trust::tests::{Identity, trusting};

const MS: Duration = Duration::from_millis(1);
/// 2026-06-01T00:00:00Z.
const UTC: Duration = Duration::from_secs(1_780_272_000);
const PERIOD: (&str, &str) = ("20260101T000000", "20261231T235959");

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn interest(text: &str, nonce: u8) -> Interest {
    Interest { nonce: Some([nonce; 4]), ..Interest::new(name(text)) }
}

fn data(text: &str) -> Data {
    let builder = DataBuilder { name: name(text), ..DataBuilder::default() };
    Data::decode(builder.sign(b"content", &Signer::digest()).unwrap()).unwrap()
}

fn forwarder(limits: ForwarderLimits) -> Forwarder {
    Forwarder::new(limits, TrustSchema::new(Vec::new(), true), 1)
}

fn outputs(forwarder: &mut Forwarder) -> Vec<Output> {
    std::iter::from_fn(|| forwarder.next_output()).collect()
}

fn delivered(consumer: ConsumerId, data: &Data) -> Output {
    Output::Deliver(consumer, Delivery::Data(Rc::new(data.clone()), false))
}

#[test]
fn consumers_that_ask_for_the_same_share_an_interest_and_the_next_gets_stored_data() {
    let mut forwarder = forwarder(ForwarderLimits::default());
    forwarder.take_interest(1, interest("/a", 1), MS).unwrap();
    forwarder.take_interest(2, interest("/a", 2), MS).unwrap();
    assert_eq!(outputs(&mut forwarder), [Output::Send(Box::new(interest("/a", 1)))]);
    // A repetition is sent, since the first may be lost.
    forwarder.take_interest(2, interest("/a", 3), MS).unwrap();
    assert_eq!(outputs(&mut forwarder), [Output::Send(Box::new(interest("/a", 3)))]);
    // It was repeated for the other consumer, too, but for the next time.
    forwarder.take_interest(1, interest("/a", 4), MS).unwrap();
    assert_eq!(outputs(&mut forwarder), []);
    forwarder.take_interest(1, interest("/a", 5), MS).unwrap();
    assert_eq!(outputs(&mut forwarder), [Output::Send(Box::new(interest("/a", 5)))]);
    let packet = data("/a");
    assert_eq!(forwarder.take_data(packet.clone(), false, MS, UTC), DataOutcome::Delivered);
    assert_eq!(outputs(&mut forwarder), [delivered(1, &packet), delivered(2, &packet)]);
    assert_eq!(forwarder.take_data(packet.clone(), false, MS, UTC), DataOutcome::Unsolicited);
    forwarder.take_interest(3, interest("/a", 4), MS).unwrap();
    assert_eq!(outputs(&mut forwarder), [delivered(3, &packet)]);
}

#[test]
fn prefixes_and_digests_are_answered_and_forgotten_in_time() {
    let mut forwarder = forwarder(ForwarderLimits { store_bytes: 0, ..ForwarderLimits::default() });
    let packet = data("/a/v=1/seg=0");
    let by_digest = packet.name.child(&Component::new(types::IMPLICIT_DIGEST, &packet.digest()));
    let by_prefix = Interest { can_be_prefix: true, must_be_fresh: true, ..interest("/a", 1) };
    forwarder.take_interest(1, by_prefix.clone(), MS).unwrap();
    forwarder.take_interest(2, Interest { nonce: Some([2; 4]), ..Interest::new(by_digest) }, MS).unwrap();
    outputs(&mut forwarder);
    forwarder.take_data(packet.clone(), false, MS, UTC);
    assert_eq!(outputs(&mut forwarder), [delivered(1, &packet), delivered(2, &packet)]);
    forwarder.take_interest(1, by_prefix, MS).unwrap();
    assert_eq!(forwarder.pending(), 1);
    assert_eq!(forwarder.take_data(packet, false, MS * 4001, UTC), DataOutcome::Unsolicited);
    assert_eq!((forwarder.pending(), forwarder.prefixes, forwarder.digests, forwarder.ends.len()), (0, 0, 0, 0));
}

#[test]
fn a_digest_in_the_name_of_a_packet_is_not_that_of_the_packet() {
    let mut forwarder = forwarder(ForwarderLimits::default());
    let claimed = name("/a").child(&Component::new(types::IMPLICIT_DIGEST, &[0; 32]));
    for can_be_prefix in [false, true] {
        forwarder.take_interest(1, Interest { can_be_prefix, ..Interest::new(claimed.clone()) }, MS).unwrap();
    }
    outputs(&mut forwarder);
    assert_eq!(forwarder.take_data(data(&claimed.to_string()), false, MS, UTC), DataOutcome::Unsolicited);
    assert_eq!(outputs(&mut forwarder), []);
}

#[test]
fn a_flood_of_interests_finds_a_bound_and_ends() {
    let mut forwarder = forwarder(ForwarderLimits { pending: 100, ..ForwarderLimits::default() });
    let refused =
        (0..1000).filter(|number| forwarder.take_interest(1, interest(&format!("/{number}"), 1), MS).is_err());
    assert_eq!(refused.count(), 900);
    assert_eq!(forwarder.pending(), 100);
    forwarder.take_interest(1, interest("/later", 1), MS * 4002).unwrap();
    assert_eq!(forwarder.pending(), 1);
    // Many who ask for one name.
    let refused =
        (2..3000).filter(|consumer| forwarder.take_interest(*consumer, interest("/later", 1), MS * 4002).is_err());
    assert_eq!(refused.count(), 2998 - (MAX_WAITING - 1));
}

#[test]
fn returned_interests_reach_all_who_wait() {
    let mut forwarder = forwarder(ForwarderLimits::default());
    for consumer in [1, 2] {
        forwarder.take_interest(consumer, interest("/a", 1), MS).unwrap();
    }
    outputs(&mut forwarder);
    forwarder.take_nack(&interest("/a", 1), NackReason::NoRoute, MS);
    let nack = |consumer| Output::Deliver(consumer, Delivery::Nack(name("/a"), NackReason::NoRoute));
    assert_eq!(outputs(&mut forwarder), [nack(1), nack(2)]);
    assert_eq!(forwarder.pending(), 0);
}

#[test]
fn a_packet_that_is_not_trusted_reaches_nobody_and_is_not_stored() {
    let anchor = Identity::new("/org");
    let mut forwarder = Forwarder::new(ForwarderLimits::default(), trusting(&anchor, "/org"), 1);
    forwarder.take_interest(1, interest("/org/a", 1), MS).unwrap();
    outputs(&mut forwarder);
    assert_eq!(forwarder.take_data(data("/org/a"), false, MS, UTC), DataOutcome::Untrusted);
    let out = outputs(&mut forwarder);
    assert!(matches!(out[..], [Output::Deliver(1, Delivery::Untrusted(..))]), "{out:?}");
    forwarder.take_interest(2, interest("/org/a", 2), MS).unwrap();
    assert_eq!(outputs(&mut forwarder), [Output::Send(Box::new(interest("/org/a", 2)))]);
}

/// The one Interest among the outputs, for the certificate of this key.
fn assert_requests_certificate(forwarder: &mut Forwarder, key: &Name) {
    let out = outputs(forwarder);
    assert!(matches!(&out[..], [Output::Send(interest)] if interest.name == *key && interest.can_be_prefix), "{out:?}");
}

#[test]
fn certificates_up_to_the_anchor_are_requested_once() {
    let [anchor, site, page] = ["/org", "/org/site", "/org/site/page"].map(Identity::new);
    let mut forwarder = Forwarder::new(ForwarderLimits::default(), trusting(&anchor, "/org"), 1);
    let packets = ["/org/site/page/1", "/org/site/page/2"].map(|text| page.sign(text));
    for packet in &packets {
        forwarder.take_interest(1, Interest::new(packet.name.clone()), MS).unwrap();
    }
    outputs(&mut forwarder);
    assert_eq!(forwarder.take_data(packets[0].clone(), false, MS, UTC), DataOutcome::Unverified);
    assert_requests_certificate(&mut forwarder, &page.key);
    assert_eq!(forwarder.take_data(packets[1].clone(), false, MS, UTC), DataOutcome::Unverified);
    assert_eq!(outputs(&mut forwarder), []);
    let of_page = site.certify(&page, PERIOD.0, PERIOD.1);
    assert_eq!(forwarder.take_data(of_page.clone(), false, MS, UTC), DataOutcome::Certificate);
    assert_requests_certificate(&mut forwarder, &site.key);
    // It comes once more.
    forwarder.take_data(of_page, false, MS, UTC);
    assert_eq!(outputs(&mut forwarder), []);
    forwarder.take_data(anchor.certify(&site, PERIOD.0, PERIOD.1), false, MS, UTC);
    assert_eq!(outputs(&mut forwarder), packets.each_ref().map(|packet| delivered(1, packet)));
    assert_eq!((forwarder.held_bytes, forwarder.wanted.len()), (0, 0));
    // The next needs none.
    let packet = page.sign("/org/site/page/3");
    forwarder.take_interest(1, Interest::new(packet.name.clone()), MS).unwrap();
    outputs(&mut forwarder);
    assert_eq!(forwarder.take_data(packet, false, MS, UTC), DataOutcome::Delivered);
}

#[test]
fn without_a_valid_certificate_everything_that_waits_is_refused() {
    let [anchor, site] = ["/org", "/org/site"].map(Identity::new);
    let packet = site.sign("/org/site/1");
    let begin = || {
        let mut forwarder = Forwarder::new(ForwarderLimits::default(), trusting(&anchor, "/org"), 1);
        forwarder.take_interest(1, Interest::new(packet.name.clone()), MS).unwrap();
        outputs(&mut forwarder);
        assert_eq!(forwarder.take_data(packet.clone(), false, MS, UTC), DataOutcome::Unverified);
        assert_requests_certificate(&mut forwarder, &site.key);
        forwarder
    };
    let refused = |mut forwarder: Forwarder| {
        let mut out = outputs(&mut forwarder);
        out.retain(|output| matches!(output, Output::Deliver(..)));
        assert_eq!((forwarder.held_bytes, forwarder.wanted.len()), (0, 0));
        match out.pop() {
            Some(Output::Deliver(1, Delivery::Untrusted(_, distrust))) if out.is_empty() => distrust,
            other => panic!("{other:?}"),
        }
    };
    // It has expired.
    let mut forwarder = begin();
    forwarder.take_data(anchor.certify(&site, "20250101T000000", "20260101T000000"), false, MS, UTC);
    forwarder.handle_timeout(MS * 4001);
    assert!(matches!(refused(forwarder), Distrust::OutsideValidity(..)));
    // Nobody sends it.
    let mut forwarder = begin();
    let mut repeats = 0;
    for now in (0..10).map(|step| MS * 500 * step) {
        forwarder.handle_timeout(now);
        if forwarder.wanted.contains_key(&site.key) {
            repeats += outputs(&mut forwarder).len();
        }
    }
    assert_eq!(repeats, 3);
    assert_eq!(refused(forwarder), Distrust::Missing(site.key.clone()));
    // Two keys vouch for each other, one of them outside its identity.
    let other = Identity::new("/org");
    let mut forwarder = begin();
    forwarder.take_data(other.certify(&site, PERIOD.0, PERIOD.1), false, MS, UTC);
    forwarder.take_data(site.certify(&other, PERIOD.0, PERIOD.1), false, MS, UTC);
    forwarder.handle_timeout(MS * 20_001);
    assert!(matches!(refused(forwarder), Distrust::Missing(_) | Distrust::NoAnchor(_)));
    // A valid one follows.
    let mut forwarder = begin();
    forwarder.take_data(site.certify(&site, PERIOD.0, PERIOD.1), false, MS, UTC);
    forwarder.take_data(anchor.certify(&site, PERIOD.0, PERIOD.1), false, MS, UTC);
    assert_eq!(outputs(&mut forwarder), [delivered(1, &packet)]);
}

#[test]
fn two_keys_that_vouch_for_each_other_end_in_time() {
    let keys = ["/org/KEY/1", "/org/site/KEY/1", "/org/site/KEY/2"];
    let [anchor, one, two] = keys.map(Identity::with_key);
    let packet = one.sign("/org/site/1");
    let mut forwarder = Forwarder::new(ForwarderLimits::default(), trusting(&anchor, "/org"), 1);
    forwarder.take_interest(1, Interest::new(packet.name.clone()), MS).unwrap();
    forwarder.take_data(packet, false, MS, UTC);
    forwarder.take_data(two.certify(&one, PERIOD.0, PERIOD.1), false, MS, UTC);
    forwarder.take_data(one.certify(&two, PERIOD.0, PERIOD.1), false, MS, UTC);
    outputs(&mut forwarder);
    assert_eq!(forwarder.wanted.len(), 2);
    assert_eq!(forwarder.next_timeout(), Some(MS * 20_001));
    forwarder.handle_timeout(MS * 20_001);
    let out = outputs(&mut forwarder);
    assert!(matches!(out[..], [Output::Deliver(1, Delivery::Untrusted(_, Distrust::Missing(_)))]), "{out:?}");
    assert_eq!((forwarder.held_bytes, forwarder.wanted.len(), forwarder.take_refused()), (0, 0, 1));
}

#[test]
fn a_chain_of_certificates_has_a_bound() {
    let anchor = Identity::new("/org");
    let names = (1..9).map(|depth| format!("/org{}", "/a".repeat(depth)));
    let identities: Vec<Identity> = names.map(|text| Identity::new(&text)).collect();
    let packet = identities[7].sign("/org/a/a/a/a/a/a/a/a/1");
    let mut forwarder = Forwarder::new(ForwarderLimits::default(), trusting(&anchor, "/org"), 1);
    forwarder.take_interest(1, Interest::new(packet.name.clone()), MS).unwrap();
    forwarder.take_data(packet, false, MS, UTC);
    for pair in identities.windows(2).rev() {
        forwarder.take_data(pair[0].certify(&pair[1], PERIOD.0, PERIOD.1), false, MS, UTC);
    }
    let last = outputs(&mut forwarder).pop();
    assert!(
        matches!(&last, Some(Output::Deliver(1, Delivery::Untrusted(_, Distrust::ChainTooLong(_, 5))))),
        "{last:?}"
    );
    assert_eq!((forwarder.held_bytes, forwarder.wanted.len()), (0, 0));
}

#[test]
fn packets_that_wait_for_certificates_are_bounded() {
    let [anchor, site] = ["/org", "/org/site"].map(Identity::new);
    let packet = site.sign("/org/site/1");
    let limits =
        ForwarderLimits { unverified_bytes: packet.packet.len() + OVERHEAD + 10, ..ForwarderLimits::default() };
    let mut forwarder = Forwarder::new(limits, trusting(&anchor, "/org"), 1);
    for (text, taken) in [("/org/site/1", DataOutcome::Unverified), ("/org/site/2", DataOutcome::NoRoom)] {
        forwarder.take_interest(1, interest(text, 1), MS).unwrap();
        assert_eq!(forwarder.take_data(site.sign(text), false, MS, UTC), taken);
    }
}

proptest! {
    /// After any sequence of steps, no state is left once all Interests and certificates have timed out.
    #[test]
    fn nothing_stays_behind(steps in proptest::collection::vec((0u8..4, 0u8..6, 0u64..3), 0..200)) {
        let [anchor, site] = ["/org", "/org/site"].map(Identity::new);
        let mut forwarder = Forwarder::new(ForwarderLimits::default(), trusting(&anchor, "/org"), 1);
        let mut now = Duration::ZERO;
        for (step, which, consumer) in steps {
            now += MS * 100;
            let text = format!("/org/site/{which}");
            match step {
                0 => {
                    let (can_be_prefix, must_be_fresh) = (which % 2 == 0, which % 3 == 0);
                    let interest = Interest { can_be_prefix, must_be_fresh, ..interest(&text, which) };
                    let _ = forwarder.take_interest(consumer, interest, now);
                }
                1 => drop(forwarder.take_data(site.sign(&text), false, now, UTC)),
                2 if which == 0 => drop(forwarder.take_data(anchor.certify(&site, PERIOD.0, PERIOD.1), false, now, UTC)),
                2 => forwarder.take_nack(&interest(&text, which), NackReason::Congestion, now),
                _ => forwarder.handle_timeout(now),
            }
        }
        forwarder.handle_timeout(now + MS * 20_000);
        forwarder.expire(now + MS * 20_000);
        outputs(&mut forwarder);
        prop_assert_eq!((forwarder.pending(), forwarder.ends.len()), (0, 0));
        prop_assert_eq!((forwarder.prefixes, forwarder.digests), (0, 0));
        prop_assert_eq!((forwarder.held_bytes, forwarder.wanted.len(), forwarder.next_timeout()), (0, 0, None));
    }
}

#[test]
fn stored_packets_go_with_their_certificate_and_refusals_are_not_stored() {
    let [anchor, site] = ["/org", "/org/site"].map(Identity::new);
    let mut forwarder = Forwarder::new(ForwarderLimits::default(), trusting(&anchor, "/org"), 1);
    let packet = site.sign("/org/site/1");
    let ask = |forwarder: &mut Forwarder, now| {
        forwarder.take_interest(1, Interest::new(packet.name.clone()), now).unwrap();
        outputs(forwarder)
    };
    ask(&mut forwarder, MS);
    forwarder.take_data(packet.clone(), false, MS, UTC);
    outputs(&mut forwarder);
    // It expires two seconds after `UTC`.
    forwarder.take_data(anchor.certify(&site, PERIOD.0, "20260601T000001"), false, MS, UTC);
    assert_eq!(outputs(&mut forwarder), [delivered(1, &packet)]);
    assert_eq!(ask(&mut forwarder, MS * 2000), [delivered(1, &packet)]);
    assert!(matches!(ask(&mut forwarder, MS * 2001)[..], [Output::Send(_)]));
    let mut forwarder = self::forwarder(ForwarderLimits::default());
    let builder = DataBuilder { name: name("/a"), content_type: APPLICATION_NACK, ..DataBuilder::default() };
    let refusal = Data::decode(builder.sign(b"", &Signer::digest()).unwrap()).unwrap();
    for _ in 0..2 {
        forwarder.take_interest(1, interest("/a", 1), MS).unwrap();
        assert!(matches!(outputs(&mut forwarder)[..], [Output::Send(_)]));
        assert_eq!(forwarder.take_data(refusal.clone(), false, MS, UTC), DataOutcome::Delivered);
        outputs(&mut forwarder);
    }
}

#[test]
fn a_certificate_outlasts_congestion_and_ends_without_a_route() {
    let [anchor, site] = ["/org", "/org/site"].map(Identity::new);
    let mut forwarder = Forwarder::new(ForwarderLimits::default(), trusting(&anchor, "/org"), 1);
    forwarder.take_interest(1, interest("/org/site/1", 1), MS).unwrap();
    forwarder.take_data(site.sign("/org/site/1"), false, MS, UTC);
    outputs(&mut forwarder);
    let request = Interest { can_be_prefix: true, must_be_fresh: true, ..Interest::new(site.key.clone()) };
    forwarder.take_nack(&request, NackReason::Congestion, MS);
    assert_eq!((outputs(&mut forwarder), forwarder.wanted.len()), (Vec::new(), 1));
    forwarder.take_nack(&request, NackReason::NoRoute, MS);
    let out = outputs(&mut forwarder);
    assert!(matches!(out[..], [Output::Deliver(1, Delivery::Untrusted(_, Distrust::Missing(_)))]), "{out:?}");
}

#[test]
fn content_of_a_longer_name_is_no_answer_to_a_shorter_one() {
    let mut forwarder = forwarder(ForwarderLimits::default());
    let by_prefix = |text: &str| Interest { can_be_prefix: true, ..interest(text, 1) };
    let longer = Data { freshness: None, ..data("/org/private/v=1/seg=0") };
    forwarder.take_interest(1, by_prefix("/org/private"), MS).unwrap();
    forwarder.take_interest(2, by_prefix("/org"), MS).unwrap();
    outputs(&mut forwarder);
    forwarder.take_data(longer.clone(), false, MS, UTC);
    assert_eq!(outputs(&mut forwarder), [delivered(1, &longer)]);
    // Nor from the store, where it answers its own name.
    forwarder.take_interest(3, by_prefix("/org"), MS * 5000).unwrap();
    assert!(matches!(outputs(&mut forwarder)[..], [Output::Send(_)]));
    forwarder.take_interest(3, by_prefix("/org/private"), MS * 5000).unwrap();
    assert_eq!(outputs(&mut forwarder), [delivered(3, &longer)]);
}

#[test]
fn a_name_of_thousands_of_components_costs_little() {
    let long: Name = (0..4000).map(|_| Component::new(types::VERSION, b"")).collect();
    let mut forwarder = forwarder(ForwarderLimits::default());
    forwarder.take_interest(1, Interest { can_be_prefix: true, ..interest("/a", 1) }, MS).unwrap();
    let builder = DataBuilder { name: long, ..DataBuilder::default() };
    let packet = Data::decode(builder.sign(b"", &Signer::digest()).unwrap()).unwrap();
    assert_eq!(packet.content_prefixes().count(), MAX_CONVENTION_COMPONENTS + 1);
    assert_eq!(forwarder.take_data(packet, false, MS, UTC), DataOutcome::Unsolicited);
}

#[test]
fn who_leaves_makes_room_at_once() {
    let mut forwarder = forwarder(ForwarderLimits { pending: 2, pending_bytes: 1000, ..ForwarderLimits::default() });
    for consumer in 0..10 {
        for text in ["/a", "/b"] {
            forwarder.take_interest(consumer, interest(text, 1), MS).unwrap();
        }
        assert!(forwarder.take_interest(consumer, interest("/c", 1), MS).is_err());
        forwarder.leave(consumer);
        assert_eq!((forwarder.pending(), forwarder.ends.len(), forwarder.asked.len()), (0, 0, 0));
    }
    let long = format!("/{}", "x".repeat(996));
    forwarder.take_interest(1, interest(&long, 1), MS).unwrap();
    assert!(forwarder.take_interest(1, interest("/a", 1), MS).is_err());
    // One of two leaves: the other still gets the answer.
    forwarder.leave(1);
    for consumer in [2, 3] {
        forwarder.take_interest(consumer, interest("/a", 1), MS).unwrap();
    }
    forwarder.leave(2);
    outputs(&mut forwarder);
    let packet = data("/a");
    forwarder.take_data(packet.clone(), false, MS, UTC);
    assert_eq!(outputs(&mut forwarder), [delivered(3, &packet)]);
    // A face that has closed answers nothing more.
    forwarder.take_interest(3, interest("/b", 1), MS).unwrap();
    forwarder.close_face();
    outputs(&mut forwarder);
    forwarder.take_interest(3, interest("/b", 2), MS).unwrap();
    assert_eq!(outputs(&mut forwarder), [Output::Send(Box::new(interest("/b", 2)))]);
}

#[test]
fn one_identity_leaves_room_for_the_keys_of_others() {
    let [anchor, site] = ["/org", "/org/site"].map(Identity::new);
    let mut forwarder = Forwarder::new(ForwarderLimits::default(), trusting(&anchor, "/org"), 1);
    let mut take = |packet: Data| {
        forwarder.take_interest(1, Interest::new(packet.name.clone()), MS).unwrap();
        forwarder.take_data(packet, false, MS, UTC)
    };
    let evil = (0..10).map(|number| Identity::with_key(&format!("/org/evil/KEY/{number}")));
    let taken: Vec<_> = evil.enumerate().map(|(number, one)| take(one.sign(&format!("/org/evil/{number}")))).collect();
    assert_eq!(taken.iter().filter(|taken| **taken == DataOutcome::Unverified).count(), MAX_KEYS_OF_IDENTITY);
    assert_eq!(take(site.sign("/org/site/1")), DataOutcome::Unverified);
    // The same packet again waits once.
    assert_eq!(take(site.sign("/org/site/1")), DataOutcome::NoRoom);
}
