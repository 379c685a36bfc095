//! Tests of bounded tables: which entries a newcomer displaces.

#![allow(clippy::unwrap_used)]

use std::net::IpAddr;

use hermes_model::facts::{Peer, Trust};

use super::*;

/// A holder whose state the test sets.
#[derive(Default)]
struct Client {
    used_at: u64,
    is_answered: bool,
    is_displaced: Cell<bool>,
}

impl Holder for Client {
    fn is_idle(&self, now: u64) -> bool {
        now >= self.used_at + 1000
    }

    fn is_answered(&self) -> bool {
        self.is_answered
    }

    fn used_at(&self) -> u64 {
        self.used_at
    }

    fn is_ending(&self) -> bool {
        self.is_displaced.get()
    }

    fn displace(&self) {
        self.is_displaced.set(true);
    }
}

fn stranger(number: u16) -> Owner {
    let [high, low] = number.to_be_bytes();
    Owner::stranger(IpAddr::from([192, 0, high, low]))
}

fn peer(number: u16) -> Owner {
    let trust = Trust::Certified(Arc::new(Peer { node: Some(number.to_string().into()), ..Peer::default() }));
    Owner::of_connection(&trust, IpAddr::from([192, 0, 2, 1]))
}

/// A table with its entries.
#[derive(Default)]
struct Table {
    shares: Arc<Shares>,
    entries: Entries,
    clients: Vec<Rc<Client>>,
}

impl Table {
    /// Adds an entry that the ledger has already granted to the owner.
    fn add(&mut self, owner: Owner, used_at: u64, is_answered: bool) -> Rc<Client> {
        let client = Rc::new(Client { used_at, is_answered, is_displaced: Cell::default() });
        let weak: Weak<Client> = Rc::downgrade(&client);
        let number = self.entries.begun.get();
        self.entries.begun.set(number + 1);
        let entry = Entry { number, shares: self.shares.clone(), owner, is_owed: false, holder: Some(weak) };
        self.entries.all.borrow_mut().insert(entry);
        self.clients.push(client.clone());
        client
    }

    /// Begins an entry of a client, as `make_room` does. Returns false if the table is full.
    fn begin(&mut self, owner: &Owner, now: u64, limit: usize) -> bool {
        let take = |table: &Self| table.shares.ledger().take(owner, limit, 0);
        let mut verdict = take(self);
        if verdict == Verdict::Full && self.entries.displace_idle(now, &self.shares, owner, limit) {
            verdict = take(self);
        }
        if verdict != Verdict::Full {
            self.add(owner.clone(), now, false);
        }
        verdict != Verdict::Full
    }

    fn displaced(&self) -> usize {
        displaced_in(self.clients.iter())
    }
}

#[test]
fn an_entry_whose_holder_is_about_to_end_makes_room() {
    let mut table = Table::default();
    let owner = stranger(1);
    assert!(table.begin(&owner, 0, 2) && table.begin(&owner, 0, 2));
    assert!(!table.begin(&owner, 0, 2), "both are busy");
    table.entries.owe(0);
    table.entries.owe(0);
    assert_eq!(table.shares.ledger().entries(&owner), 1);
    assert!(table.begin(&owner, 0, 2));
    assert!(!table.begin(&owner, 0, 2), "it made room for one");
}

#[test]
fn forged_sources_displace_one_another_and_not_idle_clients() {
    const LIMIT: usize = 100;
    let mut table = Table::default();
    let honest: Vec<_> = (0..80)
        .map(|number| {
            assert_eq!(table.shares.ledger().take(&stranger(number), LIMIT, 0), Verdict::Taken);
            table.add(stranger(number), 0, true)
        })
        .collect();
    for number in 1000..2000 {
        assert!(table.begin(&stranger(number), 5000, LIMIT), "newcomers are not refused");
    }
    let lost = honest.iter().filter(|client| client.is_displaced.get()).count();
    assert_eq!((lost, table.displaced()), (0, 980));
}

#[test]
fn newcomers_get_a_part_of_a_table_that_idle_clients_fill() {
    const LIMIT: usize = 80;
    let mut table = Table::default();
    for number in 0..80 {
        table.shares.ledger().take(&stranger(number), LIMIT, 0);
        table.add(stranger(number), 0, true);
    }
    for number in 1000..2000 {
        assert!(table.begin(&stranger(number), 5000, LIMIT));
    }
    let lost = table.clients[..80].iter().filter(|client| client.is_displaced.get()).count();
    assert!((1..=80 / UNANSWERED + 1).contains(&lost), "{lost}");
}

#[test]
fn an_owner_does_not_displace_its_own_entry_that_waits_for_an_answer() {
    let mut table = Table::default();
    for _ in 0..10 {
        assert!(table.begin(&stranger(1), 0, 10));
    }
    assert!(!table.begin(&stranger(1), 500, 10), "all may be about to be answered");
    table.entries.unyielding.borrow_mut().clear();
    assert!(table.begin(&stranger(1), 1000, 10));
    assert_eq!(table.displaced(), 1);
}

#[test]
fn searches_in_vain_for_strangers_leave_peers_theirs() {
    const LIMIT: usize = 100;
    let mut table = Table::default();
    // All entries are in use. Each stranger has two, so that none of them may displace an entry of another.
    for number in 0..100 {
        table.shares.ledger().take(&stranger(number / 2), LIMIT, 0);
        table.add(stranger(number / 2), 5000, true);
    }
    let in_vain = (0..50).filter(|number| !table.begin(&stranger(*number), 5500, LIMIT)).count();
    assert_eq!((in_vain, table.entries.unyielding.borrow().len()), (50, MAX_UNYIELDING));
    // Then one stranger becomes idle. A peer without entries searches, and finds the stranger's entry.
    table.clients.remove(0);
    let owner = table.entries.all.borrow_mut().remove(0).owner;
    table.add(owner, 0, true);
    assert!(table.entries.displace_idle(5500, &table.shares, &peer(0), LIMIT), "a peer's search");
    // Peers search in vain no more often than strangers.
    for number in 0..50 {
        assert!(!table.entries.displace_idle(5500, &table.shares, &peer(number), LIMIT));
    }
    assert_eq!(table.entries.unyielding.borrow().len(), 2 * MAX_UNYIELDING);
}

#[test]
fn all_debtors_pay_in_one_pass_over_the_entries() {
    const LIMIT: usize = 400;
    let mut table = Table::default();
    for number in 0..400 {
        table.shares.ledger().take(&stranger(number % 4), LIMIT, 0);
        table.add(stranger(number % 4), u64::from(number), true);
    }
    let newcomers = (100..140).filter(|last| table.shares.ledger().take(&stranger(*last), LIMIT, 0) != Verdict::Full);
    let granted = newcomers.count();
    assert!(table.shares.ledger().debtors().len() > 1 && granted > 20, "{granted}");
    table.shares.has_debtors.store(true, Ordering::Release);
    table.entries.pay(5000, &table.shares);
    assert!(table.shares.ledger().debtors().is_empty() && !table.shares.has_debtors.load(Ordering::Acquire));
    let paid: Vec<usize> = (0..4).map(|first| table.clients.iter().skip(first).step_by(4)).map(displaced_in).collect();
    assert!(paid.iter().sum::<usize>() >= granted && paid.iter().all(|paid| *paid > 0), "{paid:?}");
    // Each debtor lost its longest idle entry.
    for (first, paid) in paid.into_iter().enumerate() {
        assert_eq!(displaced_in(table.clients.iter().skip(first).step_by(4).take(paid)), paid);
    }
}

fn displaced_in<'a>(clients: impl Iterator<Item = &'a Rc<Client>>) -> usize {
    clients.filter(|client| client.is_displaced.get()).count()
}
