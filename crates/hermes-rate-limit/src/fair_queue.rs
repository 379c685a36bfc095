//! Who waits: requests of many clients, served in turns.
//!
//! In: tickets of clients. Out: the next one, so that a client with a thousand requests waits no less for each than one
//! with a single request. Bounded: where it is full, who waits with most gives way to who waits with fewer.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use hermes_net::client::network;

/// Whose request it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// A user, by name.
    User(Arc<str>),
    /// An address of IPv4, or a network of IPv6: who has one of those has as many addresses as turns are to be had.
    Network(IpAddr),
}

impl Client {
    /// Who is treated as one: a user, however many devices she has; else a place.
    pub fn of(user: Option<&Arc<str>>, address: IpAddr) -> Self {
        user.map_or_else(|| Self::Network(network(address)), |user| Self::User(user.clone()))
    }
}

/// A request that waits.
pub type Ticket = u64;

/// Requests that wait.
#[derive(Debug)]
pub struct Queue {
    of: HashMap<Client, VecDeque<Ticket>>,
    /// Clients that wait, whose turn is next first.
    turns: VecDeque<Client>,
    length: usize,
    most: usize,
}

/// Whether a request may wait.
#[derive(Debug, PartialEq, Eq)]
pub enum Pushed {
    /// It waits.
    Waits,
    /// Another one does so no more.
    InPlaceOf(Ticket),
    /// The queue is full, and no other client has more requests in it.
    Full,
}

impl Queue {
    /// Creates a queue for at most `most` requests.
    pub fn new(most: usize) -> Self {
        Self { of: HashMap::new(), turns: VecDeque::new(), length: 0, most }
    }

    /// Changes the number of requests that may wait.
    pub fn bound(&mut self, most: usize) {
        self.most = most;
    }

    /// True if no request waits.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// One that was refused goes before what its client asked for later.
    pub fn push(&mut self, client: &Client, ticket: Ticket, is_again: bool) -> Pushed {
        let mut pushed = Pushed::Waits;
        if self.length >= self.most {
            let own = self.of.get(client).map_or(0, VecDeque::len);
            let longest = self.of.iter().max_by_key(|(_, waiting)| waiting.len());
            let Some((longest, _)) = longest.filter(|(_, waiting)| waiting.len() > own + 1) else {
                return Pushed::Full;
            };
            let longest = longest.clone();
            if let Some(last) = self.of.get_mut(&longest).and_then(VecDeque::pop_back) {
                self.length -= 1;
                pushed = Pushed::InPlaceOf(last);
            }
        }
        let waiting = self.of.entry(client.clone()).or_default();
        if waiting.is_empty() {
            self.turns.push_back(client.clone());
        }
        if is_again {
            waiting.push_front(ticket)
        } else {
            waiting.push_back(ticket)
        }
        self.length += 1;
        pushed
    }

    /// The first of the client whose turn it is.
    pub fn pop(&mut self) -> Option<Ticket> {
        let client = self.turns.pop_front()?;
        let waiting = self.of.get_mut(&client)?;
        let ticket = waiting.pop_front();
        self.length -= usize::from(ticket.is_some());
        if waiting.is_empty() {
            self.of.remove(&client);
        } else {
            self.turns.push_back(client);
        }
        ticket
    }

    /// It does not wait any more.
    pub fn leave(&mut self, client: &Client, ticket: Ticket) {
        let Some(waiting) = self.of.get_mut(client) else { return };
        let before = waiting.len();
        waiting.retain(|other| *other != ticket);
        self.length -= before - waiting.len();
        if waiting.is_empty() {
            self.of.remove(client);
            self.turns.retain(|other| other != client);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn client(name: &str) -> Client {
        Client::User(name.into())
    }

    #[test]
    fn clients_take_turns_and_what_was_refused_goes_first() {
        let mut queue = Queue::new(100);
        for ticket in 0..5 {
            queue.push(&client("many"), ticket, false);
        }
        queue.push(&client("one"), 10, false);
        queue.push(&client("many"), 20, true);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [20, 10, 0, 1, 2, 3, 4]);
        assert!(queue.is_empty());
    }

    #[test]
    fn where_it_is_full_who_has_most_gives_way() {
        let mut queue = Queue::new(3);
        for ticket in 0..3 {
            assert_eq!(queue.push(&client("many"), ticket, false), Pushed::Waits);
        }
        assert_eq!(queue.push(&client("many"), 3, false), Pushed::Full);
        assert_eq!(queue.push(&client("one"), 10, false), Pushed::InPlaceOf(2));
        assert_eq!(queue.push(&client("one"), 11, false), Pushed::Full, "neither has more than the other would");
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [0, 10, 1]);
    }

    #[test]
    fn a_network_of_ipv6_is_one_client() {
        let at = |address: &str| Client::of(None, address.parse().unwrap());
        assert_eq!(at("2001:db8::1"), at("2001:db8::ffff:1"));
        assert_ne!(at("2001:db8::1"), at("2001:db8:0:1::1"));
        assert_ne!(at("192.0.2.1"), at("192.0.2.2"));
        assert_eq!(at("192.0.2.1"), at("::ffff:192.0.2.1"));
        let alice: Arc<str> = "alice".into();
        assert_eq!(Client::of(Some(&alice), "::1".parse().unwrap()), client("alice"));
    }

    #[test]
    fn who_leaves_is_forgotten() {
        let mut queue = Queue::new(3);
        queue.push(&client("a"), 1, false);
        queue.push(&client("b"), 2, false);
        queue.leave(&client("a"), 1);
        queue.leave(&client("a"), 1);
        assert_eq!((queue.pop(), queue.pop()), (Some(2), None));
        assert!(queue.is_empty() && queue.of.is_empty() && queue.turns.is_empty());
    }
}
