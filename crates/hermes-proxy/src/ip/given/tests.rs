//! Addresses that owners take, give back and lose; searches for a free one.

use std::cell::Cell;

use super::*;

#[test]
fn no_part_of_what_is_given_is_given_to_another_until_its_last_session_is_over() {
    let given = Given::default();
    let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
    let net = |text: &str| text.parse::<IpNet>().unwrap();
    let (network, one) = (net("10.20.0.16/28"), net("10.20.0.17/32"));
    // A session that moves has it on two devices for a while.
    assert!(given.take(network, &alice) && given.take(network, &alice) && given.take(one, &alice));
    given.give_back(one);
    for part in [one, network, net("10.20.0.0/24")] {
        assert!(!given.take(part, &bob) && !given.is_free(part), "{part}");
    }
    assert!(given.take(net("10.20.0.1/32"), &bob));
    given.give_back(network);
    assert!(!given.take(one, &bob));
    given.give_back(network);
    assert!(given.is_free(one) && given.take(one, &bob));
}

#[test]
fn what_was_lost_by_a_broken_session_waits_for_its_owner() {
    let given = Given::default();
    let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
    let one: IpNet = "10.20.0.17/32".parse().unwrap();
    let part = |is_broken| {
        if is_broken {
            given.breaks(one);
        }
        given.give_back(one);
    };
    assert!(given.take(one, &alice) && given.take(one, &alice));
    // One of two is broken off: it is hers in any case, and free when the other ends in order.
    part(true);
    part(false);
    assert!(given.take(one, &bob));
    part(true);
    assert!(!given.is_free(one) && !given.take(one, &alice) && given.take(one, &bob));
    part(true);
    let free_resting = |pool: &str| given.find_free(&"gw0".into(), &[pool.parse().unwrap()], 0, |_| false);
    assert_eq!(free_resting("10.20.1.0/24"), None);
    // Of the two times that it rested the first is no longer true.
    assert_eq!(free_resting("10.20.0.0/24"), Some(one));
    assert!(given.take(one, &alice));
    part(true);
    given.lock().forget(Instant::now() + REST);
    assert!(given.is_free(one) && given.lock().resting.is_empty());
}

/// What another process says stays no longer than it may, and takes nothing from anybody.
#[test]
fn what_rests_goes_on_resting_in_another_process() {
    let (old, new) = (Given::default(), Given::default());
    let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
    let [one, other, third] = ["10.20.0.1/32", "10.20.0.2/32", "10.20.0.3/32"].map(|net| net.parse::<IpNet>().unwrap());
    for net in [one, other] {
        assert!(old.take(net, &alice));
        old.breaks(net);
        old.give_back(net);
    }
    assert!(old.take(third, &alice) && new.take(other, &bob));
    let text = old.resting() + "9999999999 10.20.0.9/32 user eve\nnonsense\n";
    new.go_on_resting(&text);
    assert!(!new.take(one, &bob) && new.take(one, &alice) && new.is_free(third) && !new.take(other, &alice), "{text}");
    let nine = "10.20.0.9/32".parse().unwrap();
    assert!(!new.take(nine, &bob));
    new.lock().forget(Instant::now() + REST);
    assert!(new.take(nine, &bob));
    let holdings = new.lock();
    assert_eq!(holdings.shares.values().map(|share| (share.prefixes, share.resting)).max(), Some((2, 0)));
}

#[test]
fn no_more_rest_than_there_may_be() {
    let given = Given::default();
    for number in 0..2 * MOST_RESTING as u32 {
        let one = IpNet::from(IpAddr::from(Ipv4Addr::from(0x0a00_0000 + number)));
        assert!(given.take(one, &Owner::User(format!("user {}", number / 100).into())));
        given.breaks(one);
        given.give_back(one);
    }
    let holdings = given.lock();
    assert_eq!((holdings.resting.len(), holdings.table.iter().count()), (MOST_RESTING, MOST_RESTING));
    assert_eq!(holdings.shares.values().map(|share| share.resting).sum::<usize>(), MOST_RESTING);
}

#[test]
fn an_owner_has_so_many_and_leaves_the_rest_to_others() {
    let given = Given::default();
    let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
    let net = |last: usize| IpNet::from(IpAddr::from([10, 20, (last >> 8) as u8, last as u8]));
    assert!((0..MOST_OWNED).all(|last| given.take(net(last), &alice)));
    assert!(given.is_full(&alice) && !given.take(net(MOST_OWNED), &alice));
    // A further session with what it has; and others.
    assert!(given.take(net(0), &alice) && given.take(net(MOST_OWNED), &bob));
    given.give_back(net(0));
    assert!(given.is_full(&alice));
    given.give_back(net(0));
    assert!(!given.is_full(&alice) && given.take(net(MOST_OWNED + 1), &alice));
    // What waits for her is hers yet, and goes before she is refused another.
    given.breaks(net(1));
    given.give_back(net(1));
    assert!(!given.is_full(&alice) && !given.take(net(1), &bob));
    assert!(given.take(net(MOST_OWNED + 2), &alice) && given.take(net(1), &bob));
    assert!(!given.take(net(MOST_OWNED + 3), &alice));
}

/// A pool of 65,534 addresses under the node's lock is nothing that a client may have looked through at will.
#[test]
fn what_was_found_taken_is_not_looked_at_again_until_it_is_given_back() {
    let (given, alice, looked_at) = (Given::default(), Owner::User("alice".into()), Cell::new(0));
    let pools: [IpNet; 2] = ["10.20.0.0/28", "10.30.0.0/30"].map(|pool| pool.parse().unwrap());
    let find = |now| {
        looked_at.set(0);
        let is_free = |net| {
            looked_at.set(looked_at.get() + 1);
            given.is_free(net)
        };
        (given.find_free(&"gw0".into(), &pools, now, is_free), looked_at.get())
    };
    for _ in 0..16 {
        let (found, looked_at) = find(0);
        assert!(looked_at <= 3 && given.take(found.unwrap(), &alice), "{found:?} {looked_at}");
    }
    // The last one was found free.
    assert_eq!(find(0), (None, 1));
    assert_eq!(find(LOOK_AGAIN - 1), (None, 0));
    // Back in order, or to rest.
    let one = |text: &str| text.parse::<IpNet>().unwrap();
    for (net, is_broken) in [("10.20.0.5/32", false), ("10.20.0.9/32", true), ("10.30.0.2/32", false)] {
        if is_broken {
            given.breaks(one(net));
        }
        given.give_back(one(net));
        let (found, looked_at) = find(1);
        assert!(found == Some(one(net)) && looked_at < 12, "{found:?} {looked_at}");
        assert!(given.take(one(net), &alice));
    }
    // Of several that rest each is somebody's.
    for net in ["10.20.0.5/32", "10.20.0.9/32"].map(one) {
        given.breaks(net);
        given.give_back(net);
    }
    for net in ["10.20.0.5/32", "10.20.0.9/32"].map(one) {
        assert_eq!(find(2).0, Some(net));
        assert!(given.take(net, &alice));
    }
    // What others than sessions have taken, and left.
    assert_eq!(find(LOOK_AGAIN), (None, 16));
}
