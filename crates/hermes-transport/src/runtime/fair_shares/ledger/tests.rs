//! Tests of the ledger: which owner may have one more entry, and which owner loses entries.

#![allow(clippy::unwrap_used)]

use hermes_model::authority::Authority;
use hermes_model::facts::{Kind, Peer};
use http::uri::PathAndQuery;
use http::{HeaderMap, Method};

use super::*;

fn stranger(last: u8) -> Owner {
    Owner::stranger(IpAddr::from([192, 0, 2, last]))
}

fn peer(name: &str) -> Owner {
    Owner { is_peer: true, client: Client::Node(Arc::from(name)) }
}

/// Takes entries until the table is full, and returns their number.
fn fill(ledger: &mut Ledger, owner: &Owner, limit: usize, reserve: usize) -> usize {
    (0..2 * limit).take_while(|_| ledger.take(owner, limit, reserve) != Verdict::Full).count()
}

/// Ends all entries that an owner owes.
fn settle(ledger: &mut Ledger, owner: &Owner) {
    while ledger.claim(owner, 1) > 0 {
        ledger.is_paid(owner);
    }
}

#[test]
fn one_owner_may_have_all_of_it_and_gives_up_half_for_another() {
    let (flooder, other) = (stranger(1), stranger(2));
    let mut ledger = Ledger::default();
    assert_eq!(fill(&mut ledger, &flooder, 100, 0), 100);
    for taken in 1..=50 {
        assert_ne!(ledger.take(&other, 100, 0), Verdict::Full, "{taken}");
        settle(&mut ledger, &flooder);
        assert_eq!((ledger.total, ledger.unclaimed), (100, 0));
    }
    assert_eq!((ledger.entries(&flooder), ledger.entries(&other)), (50, 50));
    assert_eq!(ledger.take(&other, 100, 0), Verdict::Full, "it has as much as the largest");
    assert_eq!(ledger.take(&flooder, 100, 0), Verdict::Full);
    assert_ne!(ledger.take(&stranger(3), 100, 0), Verdict::Full);
}

#[test]
fn entries_that_are_owed_are_bounded_and_chosen_once() {
    let flooder = stranger(1);
    let mut ledger = Ledger::default();
    fill(&mut ledger, &flooder, 80, 0);
    let admitted = (2..200).filter(|last| ledger.take(&stranger(*last), 80, 0) != Verdict::Full).count();
    assert_eq!(admitted, 80 / MAX_UNCLAIMED + 1, "the rest comes when something is closed");
    assert_eq!(ledger.debtors(), std::slice::from_ref(&flooder));
    assert_eq!(ledger.claim(&flooder, 4) + ledger.claim(&flooder, 1000), admitted);
    assert!(ledger.debtors().is_empty() && ledger.claim(&flooder, 1000) == 0);
    (0..admitted).for_each(|_| ledger.is_paid(&flooder));
    assert_eq!((ledger.unclaimed, ledger.entries(&flooder)), (0, 80 - admitted));
    assert_ne!(ledger.take(&stranger(201), 80, 0), Verdict::Full);
}

/// The table displaces idle entries of the same client, and none of them has been closed yet.
#[test]
fn a_client_that_reconnects_faster_than_entries_close_leaves_room_for_others() {
    let flooder = stranger(1);
    let mut ledger = Ledger::default();
    let limit = fill(&mut ledger, &flooder, 256, 0);
    let mut displaced = 0;
    for _ in 0..1000 {
        if ledger.take(&flooder, limit, 0) == Verdict::Full && ledger.may_displace(&flooder, limit) {
            ledger.displace(&flooder);
            displaced += 1;
        }
    }
    assert_eq!((displaced, ledger.owed), (32, 32));
    assert!(ledger.may_displace(&stranger(2), limit));
    let free: Vec<_> = (0..64).map(|_| ledger.take_free(&flooder, limit, 0)).collect();
    assert_eq!((free.iter().filter(|verdict| **verdict == Verdict::Taken).count(), ledger.total), (0, limit));
    let admitted = (2..100).filter(|last| {
        let may = ledger.may_displace(&stranger(*last), limit);
        may && ledger.take(&stranger(*last), limit, 0) == Verdict::Displacing && ledger.claim(&flooder, limit) > 0
    });
    assert!((16..=32).contains(&admitted.count()), "{ledger:?}");
    assert!(ledger.total + ledger.owed <= limit + limit / MAX_OWED + 1, "{ledger:?}");
    (0..ledger.owed).for_each(|_| ledger.is_paid(&flooder));
    assert_eq!(ledger.owed, 0);
    assert!(ledger.may_displace(&flooder, limit));
}

#[test]
fn a_part_is_for_peers_and_nothing_of_theirs_goes_to_strangers() {
    let mut ledger = Ledger::default();
    assert_eq!(fill(&mut ledger, &stranger(1), 80, 10), 70);
    for entries in 1..=10 {
        assert_eq!(ledger.take(&peer("a"), 80, 10), Verdict::Taken, "{entries}");
    }
    // Beyond the reserve, the peer shares the table with the stranger.
    for _ in 0..200 {
        ledger.take(&peer("a"), 80, 10);
        settle(&mut ledger, &stranger(1));
    }
    assert_eq!((ledger.entries(&peer("a")), ledger.entries(&stranger(1))), (40, 40));
    assert_eq!(ledger.take(&peer("b"), 80, 10), Verdict::Displacing);
    settle(&mut ledger, &peer("a"));
    settle(&mut ledger, &stranger(1));
    let before = ledger.entries(&peer("a"));
    for last in 2..60 {
        ledger.take(&stranger(last), 80, 10);
        settle(&mut ledger, &stranger(1));
    }
    assert_eq!((ledger.entries(&peer("a")), ledger.entries(&peer("b"))), (before, 1));
    assert_eq!(ledger.entries(&stranger(2)), 1, "strangers share what is theirs");
}

#[test]
fn an_entry_that_ends_by_itself_pays_for_one_that_nobody_chose() {
    let flooder = stranger(1);
    let mut ledger = Ledger::default();
    fill(&mut ledger, &flooder, 8, 0);
    assert_eq!(ledger.take(&stranger(2), 8, 0), Verdict::Displacing);
    ledger.give_back(&flooder);
    assert_eq!((ledger.unclaimed, ledger.entries(&flooder), ledger.claim(&flooder, 8)), (0, 7, 0));
    ledger.give_back(&flooder);
    assert_eq!(ledger.entries(&flooder), 6);
}

#[test]
fn nothing_is_left_of_an_owner_that_has_nothing() {
    let mut ledger = Ledger::default();
    let taken: Vec<_> = (0..50).filter(|last| ledger.take(&stranger(last % 9), 20, 0) != Verdict::Full).collect();
    taken.iter().for_each(|last| ledger.give_back(&stranger(last % 9)));
    assert!(ledger.owners.is_empty() && ledger.ranks.is_empty(), "{ledger:?}");
    assert_eq!((ledger.total, ledger.peers, ledger.owed, ledger.unclaimed), (0, 0, 0, 0));
}

#[test]
fn sessions_without_a_user_belong_to_the_certified_node_that_they_came_by() {
    let node = || Trust::Certified(Arc::new(Peer { node: Some(Arc::from("edge")), ..Peer::default() }));
    let facts = |trust, user: Option<&str>| Facts {
        listener: Arc::from("in"),
        kind: Kind::Tcp,
        source: (IpAddr::from([192, 0, 2, 1]), 1).into(),
        trust,
        user: user.map(Arc::from),
        method: Method::CONNECT,
        authority: Authority::parse("db:1", None).unwrap(),
        path: PathAndQuery::from_static("/"),
        headers: HeaderMap::new(),
        network: None,
        announced_network: None,
        protocol: None,
    };
    let own = Owner::of_session(&facts(node(), None));
    assert_eq!((own.is_peer, own.to_string().as_str()), (true, "node edge"));
    let other = Owner::of_session(&facts(Trust::Address, None));
    assert_eq!((other.is_peer, other), (false, stranger(1)), "an address proves nothing for each of its clients");
    for trust in [node(), Trust::Anonymous] {
        let user = Owner::of_session(&facts(trust, Some("alice")));
        assert_eq!((user.is_peer, user.to_string().as_str()), (false, "user alice"), "it comes by several nodes");
    }
    // Strangers cannot end the node's tunnels, whatever they hold.
    let mut ledger = Ledger::default();
    fill(&mut ledger, &own, 20, 0);
    assert_eq!(ledger.take(&stranger(2), 20, 0), Verdict::Full);
    assert_eq!(ledger.take(&peer("other"), 20, 0), Verdict::Displacing);
}
