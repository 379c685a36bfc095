//! Leases that owners take, return and lose, and searches for free addresses.

use std::cell::Cell;

use super::*;

impl AddressLeases {
    /// Whether the prefix overlaps no lease or reservation.
    fn is_free(&self, prefix: IpNet) -> bool {
        let mut holdings = self.lock();
        holdings.forget(Instant::now());
        holdings.table.overlapping(prefix).next().is_none()
    }
}

#[test]
fn no_part_of_what_is_given_is_given_to_another_until_its_last_session_is_over() {
    let given = AddressLeases::default();
    let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
    let net = |text: &str| text.parse::<IpNet>().unwrap();
    let (network, one) = (net("10.20.0.16/28"), net("10.20.0.17/32"));
    // A session that moves has its prefix on two devices for a while.
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
    let given = AddressLeases::default();
    let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
    let one: IpNet = "10.20.0.17/32".parse().unwrap();
    let part = |is_broken| {
        if is_broken {
            given.breaks(one);
        }
        given.give_back(one);
    };
    assert!(given.take(one, &alice) && given.take(one, &alice));
    // The first session breaks off. The second one still has the prefix, which is free once that session ends in order.
    part(true);
    part(false);
    assert!(given.take(one, &bob));
    part(true);
    assert!(!given.is_free(one) && !given.take(one, &alice) && given.take(one, &bob));
    part(true);
    let free_resting = |pool: &str| {
        given.find_free(&"gw0".into(), &[pool.parse().unwrap()], &alice, 0, |address| Some(address.into()))
    };
    assert_eq!(free_resting("10.20.1.0/24"), None);
    // The first of the two reservations no longer counts.
    assert_eq!(free_resting("10.20.0.0/24"), Some(one));
    assert!(given.take(one, &alice));
    part(true);
    given.lock().forget(Instant::now() + RELEASE_HOLD);
    assert!(given.is_free(one) && given.lock().resting.is_empty());
}

/// Reservations of another process last at most the usual time, and override no lease.
#[test]
fn what_rests_goes_on_resting_in_another_process() {
    let (old, new) = (AddressLeases::default(), AddressLeases::default());
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
    new.lock().forget(Instant::now() + RELEASE_HOLD);
    assert!(new.take(nine, &bob));
    let holdings = new.lock();
    assert_eq!(holdings.shares.values().map(|share| (share.prefixes, share.resting.len())).max(), Some((2, 0)));
}

#[test]
fn no_more_rest_than_there_may_be() {
    let given = AddressLeases::default();
    for number in 0..2 * MAX_RESTING as u32 {
        let one = IpNet::from(IpAddr::from(Ipv4Addr::from(0x0a00_0000 + number)));
        assert!(given.take(one, &Owner::User(format!("user {}", number / 100).into())));
        given.breaks(one);
        given.give_back(one);
    }
    let holdings = given.lock();
    assert_eq!((holdings.resting.len(), holdings.table.iter().count()), (MAX_RESTING, MAX_RESTING));
    assert_eq!(holdings.shares.values().map(|share| share.resting.len()).sum::<usize>(), MAX_RESTING);
}

#[test]
fn an_owner_has_so_many_and_leaves_the_rest_to_others() {
    let given = AddressLeases::default();
    let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
    let net = |last: usize| IpNet::from(IpAddr::from([10, 20, (last >> 8) as u8, last as u8]));
    assert!((0..MAX_OWNED).all(|last| given.take(net(last), &alice)));
    assert!(given.is_full(&alice) && !given.take(net(MAX_OWNED), &alice));
    // A further session may share a prefix that the owner has, and other owners have limits of their own.
    assert!(given.take(net(0), &alice) && given.take(net(MAX_OWNED), &bob));
    given.give_back(net(0));
    assert!(given.is_full(&alice));
    given.give_back(net(0));
    assert!(!given.is_full(&alice) && given.take(net(MAX_OWNED + 1), &alice));
    // Reservations count for their owner, and end before a request is refused.
    given.breaks(net(1));
    given.give_back(net(1));
    assert!(!given.is_full(&alice) && !given.take(net(1), &bob));
    assert!(given.take(net(MAX_OWNED + 2), &alice) && given.take(net(1), &bob));
    assert!(!given.take(net(MAX_OWNED + 3), &alice));
}

/// A client must not be able to make the node scan a pool of 65,534 addresses under its lock at will.
#[test]
fn what_was_found_taken_is_not_looked_at_again_until_it_is_given_back() {
    let (given, alice, looked_at) = (AddressLeases::default(), Owner::User("alice".into()), Cell::new(0));
    let pools: [IpNet; 2] = ["10.20.0.0/28", "10.30.0.0/30"].map(|pool| pool.parse().unwrap());
    let find = |now| {
        looked_at.set(0);
        let taken = |address| {
            looked_at.set(looked_at.get() + 1);
            given.around(address)
        };
        (given.find_free(&"gw0".into(), &pools, &alice, now, taken), looked_at.get())
    };
    for _ in 0..16 {
        let (found, looked_at) = find(0);
        assert!(looked_at <= 1 && given.take(found.unwrap(), &alice), "{found:?} {looked_at}");
    }
    assert_eq!(find(0), (None, 0));
    assert_eq!(find(SEARCH_INTERVAL - 1), (None, 0));
    // Addresses are returned in order, or reserved.
    let one = |text: &str| text.parse::<IpNet>().unwrap();
    for (net, is_broken) in [("10.20.0.5/32", false), ("10.20.0.9/32", true), ("10.30.0.2/32", false)] {
        if is_broken {
            given.breaks(one(net));
        }
        given.give_back(one(net));
        let (found, looked_at) = find(1);
        assert!(found == Some(one(net)) && looked_at <= 1, "{found:?} {looked_at}");
        assert!(given.take(one(net), &alice));
    }
    // If several addresses are reserved, each still belongs to its owner.
    for net in ["10.20.0.5/32", "10.20.0.9/32"].map(one) {
        given.breaks(net);
        given.give_back(net);
    }
    for net in ["10.20.0.5/32", "10.20.0.9/32"].map(one) {
        assert_eq!(find(2).0, Some(net));
        assert!(given.take(net, &alice));
    }
    // After the interval, all addresses are examined again, because others than sessions take and release addresses.
    assert_eq!(find(SEARCH_INTERVAL), (None, 16));
}

#[test]
fn what_one_prefix_holds_is_passed_by_at_once() {
    let (given, alice) = (AddressLeases::default(), Owner::User("alice".into()));
    let pool: IpNet = "fd00:5::/64".parse().unwrap();
    assert!(given.take("fd00:5::/112".parse().unwrap(), &alice));
    let find = |now| given.find_free(&"gw0".into(), &[pool], &alice, now, |address| given.around(address));
    assert_eq!(find(0), Some("fd00:5::1:0/128".parse().unwrap()));
    // All addresses are free.
    assert_eq!(find(0), Some("fd00:5::1:1/128".parse().unwrap()));
    // A pool at the end of the address space.
    let last: IpNet = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe/127".parse().unwrap();
    let addresses =
        [0, 0, 0].map(|now| given.find_free(&"gw0".into(), &[last], &alice, now, |address| given.around(address)));
    assert_eq!(addresses.map(|found| found.is_some()), [true, true, false]);
}

#[test]
fn what_was_given_in_the_place_of_another_is_found_as_long_as_it_is_its_owners() {
    let given = AddressLeases::default();
    let [alice, bob] = ["alice", "bob"].map(|name| Owner::User(name.into()));
    let net = |text: &str| text.parse::<IpNet>().unwrap();
    let wish = (net("10.20.0.2/32"), Some(net("10.0.0.2/32")));
    let one = net("10.20.0.77/32");
    assert!(given.take(one, &alice));
    given.give_instead(one, wish);
    assert_eq!((given.instead(&alice, wish), given.instead(&bob, wish)), (Some(one), None));
    assert_eq!(given.instead(&alice, (wish.0, Some(net("10.0.0.1/32")))), None);
    // The prefix is reserved, and found again. Once another owner takes it, it is not.
    given.breaks(one);
    given.give_back(one);
    assert_eq!((given.instead(&alice, wish), given.take(one, &bob)), (Some(one), false));
    given.lock().forget(Instant::now() + RELEASE_HOLD);
    assert_eq!((given.instead(&alice, wish), given.take(one, &bob)), (None, true));
    given.give_back(one);
    // An assignment of the previous process.
    given.keep_instead(one, &alice, wish);
    assert_eq!((given.instead(&alice, wish), given.is_free(one)), (Some(one), false));
    assert!(given.take(one, &alice));
    given.give_back(one);
    assert_eq!((given.instead(&alice, wish), given.is_free(one)), (None, true));
    assert!(given.lock().shares.is_empty());
}

/// A user that opens and breaks sessions without end, each with as many addresses as it may have, exhausts only its own
/// reservations.
#[test]
fn what_rests_is_nobody_elses_while_another_address_is_free() {
    let given = AddressLeases::default();
    let [alice, bob, carol] = ["alice", "bob", "carol"].map(|name| Owner::User(name.into()));
    let pool: IpNet = "10.20.0.0/24".parse().unwrap();
    let find =
        |owner: &Owner, now| given.find_free(&"gw0".into(), &[pool], owner, now, |address| given.around(address));
    let hers = find(&alice, 0).unwrap();
    assert!(given.take(hers, &alice));
    given.breaks(hers);
    given.give_back(hers);
    let take = |owner: &Owner, now| {
        let found = find(owner, now).filter(|found| *found != hers && given.take(*found, owner));
        found.unwrap_or_else(|| panic!("at {now}: what alice had, or nothing"))
    };
    for now in 0..3000 {
        let session: Vec<_> = (0..64).map(|_| take(&bob, now)).collect();
        session.iter().for_each(|net| given.breaks(*net));
        session.iter().for_each(|net| given.give_back(*net));
    }
    // Other owners hold all other addresses, so that bob's reservations end before alice's.
    let others: Vec<_> = (0..MAX_OWNED).map(|_| take(&carol, 3000)).collect();
    assert_eq!(others.len(), MAX_OWNED);
    assert!(!given.is_free(hers));
}

/// The ranking of owners stays correct through all changes of prefixes: the owner with the most reservations is found
/// without a scan of all owners.
#[test]
fn the_owner_with_most_resting_prefixes_is_known() {
    let given = AddressLeases::default();
    let owner = |number: u32| Owner::User(format!("user-{number}").into());
    let net = |number: u32| IpNet::from(IpAddr::from(Ipv4Addr::from(0x0a14_0000 + number)));
    for number in 0..600 {
        // The user with the number n has n + 1 of these prefixes, up to 24.
        let user = (0..24).find(|user| number % 300 < (user + 1) * (user + 2) / 2).unwrap();
        if given.take(net(number % 300), &owner(user)) {
            given.breaks(net(number % 300));
            given.give_back(net(number % 300));
        }
    }
    let mut holdings = given.lock();
    assert!(holdings.take(net(299), &owner(23)), "it comes again");
    assert_eq!((holdings.resting.len(), holdings.ranks.len()), (299, 24));
    let looks = Cell::new(0);
    let mut freed = || {
        let fits = |_: IpNet| looks.replace(looks.get() + 1) < usize::MAX;
        holdings.free_of_most_resting(fits).unwrap()
    };
    let first: Vec<IpNet> = (0..3).map(|_| freed()).collect();
    assert_eq!(looks.get(), 3);
    // Two owners with 23 have lost one each, and one of them another.
    assert!(first.iter().all(|net| holdings.table.get(*net).is_none()) && holdings.resting.len() == 296);
    let counts = |holdings: &Holdings| holdings.ranks.iter().map(|(count, _)| *count).rev().take(3).collect::<Vec<_>>();
    assert_eq!(counts(&holdings), [22, 22, 21]);
    let other = holdings.free_of_most_resting(|fits| fits == net(0)).unwrap();
    assert_eq!((other, holdings.ranks.len()), (net(0), 23));
    holdings.forget(Instant::now() + RELEASE_HOLD);
    assert!(holdings.ranks.is_empty() && holdings.resting.is_empty());
}
