//! A queue of waiting requests that serves clients in turns.
//!
//! In: tickets of clients. Out: the next ticket. A client with a thousand requests gets no more turns than one with a
//! single request. The length is limited: in a full queue, the client with the most requests loses one to a client with
//! fewer.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use hermes_net::client_address::network;

/// The client of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// A user, by name.
    User(Arc<str>),
    /// An IPv4 address or an IPv6 network. The owner of an IPv6 network has unlimited addresses, and would otherwise
    /// get unlimited turns.
    Network(IpAddr),
}

impl Client {
    /// The client that a request counts for: its user on any device, or else its address.
    pub fn of(user: Option<&Arc<str>>, address: IpAddr) -> Self {
        user.map_or_else(|| Self::Network(network(address)), |user| Self::User(user.clone()))
    }
}

/// The number of a waiting request.
pub type Ticket = u64;

/// The queue.
#[derive(Debug)]
pub struct Queue {
    of: HashMap<Client, VecDeque<Ticket>>,
    /// Clients with waiting requests, in the order of their turns.
    turns: VecDeque<Client>,
    length: usize,
    most: usize,
}

/// The outcome for a new request.
#[derive(Debug, PartialEq, Eq)]
pub enum Enqueued {
    /// The request waits.
    Waits,
    /// The request waits instead of this one, which is removed from the queue.
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

    /// Adds a request. A refused one (`is_again`) precedes later requests of its client.
    pub fn push(&mut self, client: &Client, ticket: Ticket, is_again: bool) -> Enqueued {
        let mut pushed = Enqueued::Waits;
        if self.length >= self.most {
            let own = self.of.get(client).map_or(0, VecDeque::len);
            let longest = self.of.iter().max_by_key(|(_, waiting)| waiting.len());
            let Some((longest, _)) = longest.filter(|(_, waiting)| waiting.len() > own + 1) else {
                return Enqueued::Full;
            };
            let longest = longest.clone();
            if let Some(last) = self.of.get_mut(&longest).and_then(VecDeque::pop_back) {
                self.length -= 1;
                pushed = Enqueued::InPlaceOf(last);
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

    /// Removes the first request of the client whose turn it is.
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

    /// Removes a request that no longer waits.
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
            assert_eq!(queue.push(&client("many"), ticket, false), Enqueued::Waits);
        }
        assert_eq!(queue.push(&client("many"), 3, false), Enqueued::Full);
        assert_eq!(queue.push(&client("one"), 10, false), Enqueued::InPlaceOf(2));
        assert_eq!(queue.push(&client("one"), 11, false), Enqueued::Full, "neither has more than the other would");
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
