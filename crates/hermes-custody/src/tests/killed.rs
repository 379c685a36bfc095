//! Chains in computed time whose nodes are killed, alone or several at once; their journals are real files.
//!
//! In: a seed, which determines the kills, the outages, and the delays of disks and channels. Out: proof that every
//! response arrives byte for byte, that an order reaches its origin at most once, and that a tunnel has one server. A
//! tunnel fails only if a node at its ends was killed. No node keeps state. A failing seed is printed, and fails again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_wire::custody::{Direction, ExchangeId, Record};

use super::super::engine::{Appended, Durability, Engine, Entry, Limits, Output, RestoredStream, Side};
use super::super::journal_record::{Intent, JournalRecord};
use super::super::store::{Job, Opened, Reader, Safe, Store, StoredStream};
use super::super::stream_state::Progress;
use super::{account, byte_at, content, engine, name};

const NODES: usize = 4;
/// Request lengths, assigned to exchanges in turn.
const REQUESTS: [usize; 4] = [200, 40_000, 9_000, 30_000];
const RESPONSE: usize = 150_000;
const EXCHANGES: u8 = 4;
/// Bytes that each end of a tunnel sends in its turn.
const TURN: [usize; 2] = [3_000, 15_000];
const TICK: Duration = Duration::from_millis(1);
/// Custody time of each exchange.
const LIFE: Duration = Duration::from_secs(900);
/// Memory limits: plenty, or scarce.
const MEMORY: [u64; 2] = [64 << 20, 128 << 10];
/// The head that a node writes.
const OURS: &[u8] = b"node";
/// Total length of these heads in front of a body that crossed all nodes.
const HEADS: usize = OURS.len() * (NODES - 2);

/// A reproducible random number generator.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % bound
    }

    fn millis(&mut self, bound: u64) -> Duration {
        Duration::from_millis(self.below(bound))
    }
}

/// Reports of a journal.
#[derive(Default)]
struct Told {
    safe: Mutex<Vec<Safe>>,
    read: Mutex<Vec<Read>>,
}

type Read = (ExchangeId, Direction, u64, Bytes);

impl Reader for Told {
    fn are_safe(&self, safe: Vec<Safe>) {
        self.safe.lock().unwrap().extend(safe);
    }

    fn is_read(&self, id: ExchangeId, part: Direction, offset: u64, bytes: Option<Bytes>) {
        if let Some(bytes) = bytes {
            self.read.lock().unwrap().push((id, part, offset, bytes));
        }
    }

    fn is_stuck(&self, why: Option<&io::Error>) {
        panic!("{why:?}");
    }

    fn is_there(&self, _: u64) {}
}

/// State that is lost with a process.
struct Process {
    engine: Engine,
    journal: Opened,
    told: Arc<Told>,
    jobs: Vec<Job>,
    /// The time at which the disk writes `jobs`.
    writes_at: Duration,
    /// Requests whose origin is at this node: the bytes received, and the time of the origin's answer once it was
    /// asked.
    asked: BTreeMap<ExchangeId, (BytesMut, Option<Duration>)>,
    /// Orders whose origin is at this node: those with a durable intent, and those whose intent dates from before this
    /// process.
    intended: BTreeSet<ExchangeId>,
    unknown: BTreeSet<ExchangeId>,
    /// Response bytes of clients at this node.
    answered: BTreeMap<ExchangeId, BytesMut>,
    /// Bytes that the local client of a tunnel has sent.
    said: usize,
    /// The number of this process among all.
    number: u8,
}

impl Process {
    /// Lets the disk write its queue.
    fn write(&mut self) {
        let Self { engine, journal, told, jobs, intended, .. } = self;
        let reader: Weak<dyn Reader> = Arc::downgrade(&(told.clone() as Arc<dyn Reader>));
        journal.turn(std::mem::take(jobs), &reader);
        for safe in std::mem::take(&mut *told.safe.lock().unwrap()) {
            match safe {
                Safe::Upto { id, part, upto } => engine.is_safe(id, part, upto.offset, upto.is_whole),
                Safe::Over(id) => engine.is_forgotten(id),
                Safe::Intent(id) => _ = intended.insert(id),
            }
        }
        let read = std::mem::take(&mut *told.read.lock().unwrap());
        read.into_iter().for_each(|(id, part, offset, bytes)| engine.load(id, part, offset, bytes));
    }

    /// The local client reads available bytes; the client of a tunnel sends when it is its turn.
    fn read_as_client(&mut self, id: ExchangeId, whole: &mut BTreeSet<ExchangeId>) {
        let Self { engine, answered, said, .. } = self;
        let Some(came) = answered.get_mut(&id) else { return };
        while let Some((bytes, is_last)) = engine.read(id, Direction::Response, usize::MAX) {
            came.extend_from_slice(&bytes);
            let by = came.get(HEADS).copied().unwrap_or_default();
            assert!(is_next(came, &bytes, NODES - 2, speaker(id, by)), "{id} is not what was sent");
            if is_last {
                assert_eq!(came.len(), HEADS + RESPONSE, "{id} is not all of it");
                whole.insert(id);
            }
        }
        // The client's turn comes after the server's.
        let had = came.len().saturating_sub(HEADS) / TURN[1];
        if is_tunnel(id) && had * TURN[0] >= *said && *said < asked_of(id) {
            let bytes = content(id, asked_of(id)).slice(*said..*said + TURN[0]);
            let is_last = *said + TURN[0] == asked_of(id);
            if engine.append(id, Direction::Request, bytes, is_last) == Appended::Taken {
                *said += TURN[0];
            }
        }
    }

    /// A local origin answers in pieces, at `until` at the earliest if it is asked now. Returns whether it was asked
    /// now. A restored origin is asked again, and only the rest of its answer counts.
    fn answer(&mut self, id: ExchangeId, (now, until): (Duration, Duration)) -> bool {
        let Self { engine, jobs, asked, intended, unknown, number: by, .. } = self;
        let had = engine.have(id, Direction::Response).filter(|had| engine.is_for_here(id) && !had.is_whole);
        let Some(Progress { offset, .. }) = had else { return false };
        let (came, answers_at) = asked.entry(id).or_default();
        let length = HEADS + asked_of(id);
        while let Some((bytes, is_last)) = engine.read(id, Direction::Request, usize::MAX) {
            came.extend_from_slice(&bytes);
            let is_right = is_next(came, &bytes, NODES - 2, id) && is_last == (came.len() == length);
            assert!(is_right, "{id} was asked otherwise");
            let begins = came.len() == bytes.len();
            if (is_last && is_order(id)) || (begins && is_tunnel(id)) {
                let note = JournalRecord::Intent(Intent::Certain);
                engine.intend(id);
                jobs.push(Job::Keep { id, note, is_synced: false });
            }
        }
        if !came.is_empty() && unknown.contains(&id) {
            engine.fail(id, 502, "outcome unknown");
            return false;
        }
        let turns = came.len().saturating_sub(HEADS) / TURN[0];
        let is_whole = if is_tunnel(id) { turns > 0 } else { came.len() == length };
        let needs_intent = is_order(id) || is_tunnel(id);
        if !is_whole || (needs_intent && !intended.contains(&id)) {
            return false;
        }
        let is_asked = answers_at.is_none();
        if *answers_at.get_or_insert(until) <= now {
            let (whose, from) = (speaker(id, *by), offset as usize);
            let may = if is_tunnel(id) { turns * TURN[1] } else { RESPONSE };
            let end = may.min(from + 9000);
            if from < end {
                let bytes: Bytes = (from..end).map(|at| byte_at(whose, at)).collect();
                engine.append(id, Direction::Response, bytes, end == RESPONSE);
            }
        }
        is_asked
    }
}

struct Node {
    process: Option<Process>,
    /// The time of the restart.
    back_at: Duration,
}

/// An end of a link.
#[derive(Default)]
struct End {
    /// The present channel.
    channel: Option<u64>,
    /// Later changes: another channel, or none.
    changes: VecDeque<(Duration, Option<u64>)>,
    /// Arriving records, with their channel.
    arrivals: VecDeque<(Duration, u64, Record)>,
    busy_until: Duration,
}

struct Chain<'a> {
    directory: &'a Path,
    chance: Chance,
    room: Limits,
    now: Duration,
    nodes: Vec<Node>,
    /// Both ends of each link, the one nearer to the client first.
    links: Vec<[End; 2]>,
    channels: u64,
    /// Complete responses, and failures with their reasons.
    whole: BTreeSet<ExchangeId>,
    failed: BTreeMap<ExchangeId, String>,
    /// A node at an end of a tunnel was killed.
    cut: bool,
    processes: u8,
    /// Number of requests that reached the origin.
    asked: BTreeMap<ExchangeId, usize>,
}

/// Whether the exchange must not run twice.
fn is_order(id: ExchangeId) -> bool {
    id.0[0] % 4 == 2
}

fn is_tunnel(id: ExchangeId) -> bool {
    id.0[0] % 4 == 3
}

/// Length of the request.
fn asked_of(id: ExchangeId) -> usize {
    REQUESTS[usize::from(id.0[0]) % REQUESTS.len()]
}

/// The source of the response's content: each process that serves a tunnel sends other content.
fn speaker(id: ExchangeId, process: u8) -> ExchangeId {
    if is_tunnel(id) { ExchangeId([process; 16]) } else { id }
}

/// Whether `bytes` are the right end of `came`, which begins with this number of heads. Earlier bytes are not compared
/// again.
fn is_next(came: &[u8], bytes: &[u8], heads: usize, speaker: ExchangeId) -> bool {
    let heads = OURS.repeat(heads);
    let expected = |at: usize| match heads.get(at) {
        Some(byte) => *byte,
        None => byte_at(speaker, at - heads.len()),
    };
    bytes.iter().zip(came.len() - bytes.len()..).all(|(byte, at)| *byte == expected(at))
}

impl<'a> Chain<'a> {
    fn new(directory: &'a Path, seed: u64) -> Self {
        let mut chain = Self {
            directory,
            chance: Chance(seed),
            room: Limits {
                exchanges: 100,
                memory: MEMORY[(seed % 2) as usize],
                disk: 64 << 20,
                survives: Durability::Process,
            },
            now: Duration::ZERO,
            nodes: Vec::new(),
            links: (1..NODES).map(|_| Default::default()).collect(),
            channels: 0,
            whole: BTreeSet::new(),
            failed: BTreeMap::new(),
            cut: false,
            processes: 0,
            asked: BTreeMap::new(),
        };
        for number in 0..NODES {
            chain.nodes.push(Node { process: None, back_at: Duration::ZERO });
            chain.start(number);
        }
        chain
    }

    /// Starts a process of this node, which restores its journal.
    fn start(&mut self, number: usize) {
        let mut journal = Store::open(&self.directory.join(number.to_string())).unwrap();
        let mut engine = engine(self.room);
        let mut held = std::mem::take(&mut journal.held);
        // Sorting makes the order reproducible.
        held.sort_by_key(|(id, _)| *id);
        let (mut answered, mut unknown) = (BTreeMap::new(), BTreeSet::new());
        for (id, note) in std::mem::take(&mut journal.gone) {
            let JournalRecord::Gone { peer, status, reason, .. } = note else { continue };
            let record = Record::Gone { id, status, reason: reason.to_string() };
            engine.restore_end(id, peer, record, LIFE);
        }
        for (id, held) in held {
            let Some(to) = held.to else {
                engine.discard(id);
                continue;
            };
            let former = |StoredStream { head, pieces }| RestoredStream { head, pieces };
            let is_client = held.from == Side::Here;
            let is_server = held.is_tunnel && to == Side::Here;
            if held.intent.is_some() {
                unknown.insert(id);
            }
            let is_intended = held.intent.is_some();
            let time = (self.now, LIFE.saturating_sub(self.now), LIFE);
            engine.restore(id, (held.from, to), time, &held.account, held.is_tunnel, held.halves.map(former));
            if is_intended {
                engine.intend(id);
            }
            if is_server {
                engine.fail(id, 502, "the node at its far end was restarted");
            }
            if !is_client {
                continue;
            }
            // A client whose request was complete repeats it.
            if engine.have(id, Direction::Request).unwrap().is_whole && !is_order(id) && !is_tunnel(id) {
                assert!(engine.reopen(id), "what its client is to have is there");
                answered.insert(id, BytesMut::new());
            } else {
                engine.fail(id, 499, "its client is gone");
            }
        }
        let process = Process {
            engine,
            journal,
            told: Arc::default(),
            jobs: Vec::new(),
            writes_at: self.now,
            asked: BTreeMap::new(),
            intended: BTreeSet::new(),
            unknown,
            answered,
            said: 0,
            number: self.processes,
        };
        self.processes += 1;
        self.nodes[number].process = Some(process);
    }

    /// Kills the process of this node, with its memory and its ends of channels. Neighbours still receive the records
    /// in flight, and then see the channel close.
    fn kill(&mut self, number: usize, pause: Duration) {
        let node = &mut self.nodes[number];
        let Some(process) = node.process.take() else { return };
        if number == 0 {
            // A client whose request is incomplete in the journal does not return.
            for id in process.answered.keys().filter(|id| !self.whole.contains(id)) {
                self.failed.entry(*id).or_insert_with(|| "its client's node was killed".to_owned());
            }
        }
        node.back_at = self.now + pause;
        let has_tunnel = (0..EXCHANGES)
            .map(|number| ExchangeId([number; 16]))
            .any(|id| is_tunnel(id) && process.engine.have(id, Direction::Request).is_some());
        self.cut |= has_tunnel && (number == 0 || number == NODES - 1);
        drop(process);
        for (link, end) in [(number.checked_sub(1), 1), (Some(number), 0)] {
            let Some(link) = link.filter(|link| *link < NODES - 1) else { continue };
            self.links[link][end] = End::default();
            let at = self.now + self.chance.millis(60);
            let far = &mut self.links[link][1 - end];
            far.changes.clear();
            if far.channel.is_some() {
                far.changes.push_back((at, None));
            }
        }
    }

    fn begin(&mut self, number: u8) -> ExchangeId {
        let id = ExchangeId([number; 16]);
        let Some(process) = &mut self.nodes[0].process else { panic!("nobody is there to be asked") };
        process.engine.begin(self.now, id, Side::Peer(name(1)), LIFE, (&account(), &name(77)), is_tunnel(id)).unwrap();
        if !is_tunnel(id) {
            assert_eq!(process.engine.append(id, Direction::Request, content(id, asked_of(id)), true), Appended::Taken);
        }
        process.answered.insert(id, BytesMut::new());
        id
    }

    fn tick(&mut self) {
        self.now += TICK;
        for number in 0..NODES {
            if self.nodes[number].process.is_none() && self.nodes[number].back_at <= self.now {
                self.start(number);
                // Clients reconnect to the node.
                let Some(process) = &self.nodes[number].process else { continue };
                self.failed.retain(|id, _| number > 0 || !process.answered.contains_key(id));
            }
            self.act(number);
        }
        (0..self.links.len()).for_each(|link| self.carry(link));
    }

    fn carry(&mut self, link: usize) {
        let sides = [(link, name(link + 1)), (link + 1, name(link))];
        let both_up = sides.iter().all(|(node, _)| self.nodes[*node].process.is_some());
        let is_wanted = sides
            .iter()
            .any(|(node, peer)| self.nodes[*node].process.as_ref().is_some_and(|process| process.engine.wants(peer)));
        let [near, far] = &self.links[link];
        let is_joined = near.channel.is_some() && near.channel == far.channel;
        let changes = !near.changes.is_empty() || !far.changes.is_empty();
        if both_up && is_wanted && !is_joined && !changes && self.chance.below(20) == 0 {
            // Each end detects the new channel at its own time, and may use an older one until then.
            self.channels += 1;
            for end in 0..2 {
                let at = self.now + self.chance.millis(60);
                self.links[link][end].changes.push_back((at, Some(self.channels)));
            }
        }
        for (side, (node, peer)) in sides.iter().enumerate() {
            let Some(process) = &mut self.nodes[*node].process else { continue };
            let end = &mut self.links[link][side];
            while let Some((_, channel)) = end.changes.pop_front_if(|(at, _)| *at <= self.now) {
                end.channel = channel;
                if channel.is_some() {
                    process.engine.opened(peer);
                } else {
                    process.engine.closed(peer);
                }
            }
            let Some(channel) = end.channel else { continue };
            while let Some((_, by, record)) = end.arrivals.pop_front_if(|(at, by, _)| *at <= self.now && *by <= channel)
            {
                if by == channel {
                    process.engine.receive(self.now, peer, record, &account());
                }
            }
        }
        for (side, (node, peer)) in sides.iter().enumerate() {
            let Some(process) = &mut self.nodes[*node].process else { continue };
            while let Some(channel) = self.links[link][side].channel
                && self.links[link][side].busy_until <= self.now + TICK
                && let Some(record) = process.engine.next_record(self.now, peer, None)
            {
                let bytes = if let Record::Data { bytes, .. } = &record { bytes.len() } else { 0 };
                let end = &mut self.links[link][side];
                end.busy_until = end.busy_until.max(self.now) + Duration::from_nanos(800 * (bytes as u64 + 80));
                let at = end.busy_until + TICK;
                self.links[link][1 - side].arrivals.push_back((at, channel, record));
            }
        }
    }

    /// Carries out the outputs of a node, writes its journal and runs its local endpoints.
    fn act(&mut self, number: usize) {
        let Some(process) = &mut self.nodes[number].process else { return };
        if process.writes_at <= self.now {
            process.write();
            process.writes_at = self.now + self.chance.millis(30);
        }
        let Process { engine, jobs, asked, .. } = process;
        while let Some(output) = engine.output() {
            match output {
                // The exchange was begun anew, after its first bytes had been forgotten.
                Output::Begun { id, .. } => _ = asked.remove(&id),
                Output::Head { id, part: Direction::Request, .. } if number == NODES - 1 => {
                    engine.accept_local(id, &account(), is_tunnel(id));
                }
                Output::Head { id, part: Direction::Request, bytes } => {
                    let head = [OURS, &bytes[..1]].concat();
                    engine.lead(id, (Side::Peer(name(number + 1)), is_tunnel(id)), &account(), 1, head.into());
                }
                Output::Head { id, part, bytes } => engine.settle(id, part, 1, [OURS, &bytes[..1]].concat().into()),
                Output::Keep { id, entry, .. } => jobs.push(Job::Keep { id, note: note(entry), is_synced: false }),
                Output::Read { id, part, offset, length } => {
                    jobs.push(Job::Read { id, part, offset, length, back: None });
                }
                Output::Release { id, part, upto } => jobs.push(Job::Release { id, part, upto }),
                Output::Failed { id, status, reason } if number == 0 => {
                    self.failed.insert(id, format!("{status}: {reason}"));
                }
                _ => {}
            }
        }
        if self.now.as_millis().is_multiple_of(100) {
            engine.expire(self.now);
        }
        for id in (0..EXCHANGES).map(|number| ExchangeId([number; 16])) {
            if number == 0 {
                process.read_as_client(id, &mut self.whole);
            } else {
                let until = self.now + self.chance.millis(700);
                if process.answer(id, (self.now, until)) {
                    assert!(!self.whole.contains(&id), "{id} was asked once more when all of its answer was there");
                    *self.asked.entry(id).or_default() += 1;
                }
            }
        }
    }

    /// Runs until all exchanges have ended and no node keeps state. Returns the first violation.
    fn run(&mut self, kills: &[(Duration, usize, Duration)]) -> Result<(), String> {
        let mut kills = kills.to_vec();
        let mut begun = 0;
        while self.now < Duration::from_secs(60) {
            let now = self.now;
            for (_, node, pause) in kills.extract_if(.., |(at, ..)| *at <= now) {
                self.kill(node, pause);
            }
            if begun < EXCHANGES && self.nodes[0].process.is_some() && self.chance.below(50) == 0 {
                self.begin(begun);
                begun += 1;
            }
            self.tick();
            let is_idle = |node: &Node| node.process.as_ref().is_some_and(|process| process.engine.len() == 0);
            if begun == EXCHANGES && kills.is_empty() && self.nodes.iter().all(is_idle) {
                break;
            }
        }
        // Disks may lag behind.
        (0..100).for_each(|_| self.tick());
        for number in 0..EXCHANGES {
            let id = ExchangeId([number; 16]);
            let why = self.failed.get(&id).map_or("it is not there", |why| why);
            let asked = self.asked.get(&id).copied().unwrap_or_default();
            if is_order(id) && asked > 1 {
                return Err(format!("an order, {number}, was done {asked} times"));
            }
            if is_tunnel(id) && asked > 1 {
                return Err(format!("a tunnel was dialled {asked} times: {why}"));
            }
            let is_cut = is_tunnel(id) && self.cut && self.failed.contains_key(&id);
            let is_unknown = is_order(id) && asked == 1 && why.contains("outcome unknown");
            if !self.whole.contains(&id) && !why.contains("client") && !is_unknown && !is_cut {
                let states = self.nodes.iter().enumerate().map(|(number, node)| {
                    let engine = node.process.as_ref().map(|process| &process.engine);
                    format!("n{number}: {engine:?}\n")
                });
                return Err(format!("{number}: {why}\n{}", states.collect::<String>()));
            }
        }
        for (number, node) in self.nodes.iter().enumerate() {
            let kept = node.process.as_ref().map(|process| (process.engine.len(), process.engine.kept()));
            if kept != Some((0, (0, 0))) {
                return Err(format!("n{number} keeps {kept:?}: {:?}", node.process.as_ref().map(|one| &one.engine)));
            }
        }
        Ok(())
    }
}

fn note(entry: Entry) -> JournalRecord {
    match entry {
        Entry::Begin { from, account, life, .. } => {
            JournalRecord::Begin { from, account, deadline: 0, life: life.as_millis() as u64 }
        }
        Entry::Lead { to, account, is_tunnel } => JournalRecord::Lead { to, account, is_tunnel },
        Entry::Head { part, theirs, head } => JournalRecord::Head { part, theirs, bytes: head },
        Entry::Bytes { part, offset, bytes, is_last } => JournalRecord::Bytes { part, offset, is_last, bytes },
        Entry::Gone { peer, status, reason, .. } => {
            JournalRecord::Gone { peer, status, reason: Arc::from(reason), deadline: 0 }
        }
        Entry::Forget => JournalRecord::Forget,
    }
}

/// Kills of one or several nodes, together or in sequence, during requests and responses.
fn kills(chance: &mut Chance) -> Vec<(Duration, usize, Duration)> {
    let mut kills = Vec::new();
    for _ in 0..=chance.below(3) {
        let (at, whom, spread) = (chance.millis(2500), 1 + chance.below((1 << NODES) - 1), chance.below(80));
        let killed = (0..NODES).filter(|number| whom >> number & 1 == 1);
        kills.extend(killed.map(|number| (at + chance.millis(spread + 1), number, chance.millis(500))));
    }
    kills
}

/// Runs one seed. Returns the number of complete responses.
fn of_seed(seed: u64) -> Result<usize, String> {
    let directory = tempfile::tempdir().unwrap();
    let mut chance = Chance(seed ^ 0x5eed);
    let kills = kills(&mut chance);
    let mut chain = Chain::new(directory.path(), seed);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| chain.run(&kills)));
    let said = |panic: Box<dyn std::any::Any + Send>| format!("{:?}", panic.downcast_ref::<String>());
    outcome.map_err(said).and_then(|ran| ran).map_err(|why| format!("seed {seed}, {kills:?}: {why}"))?;
    drop(std::mem::take(&mut chain.nodes));
    for number in 0..NODES {
        let held = Store::open(&directory.path().join(number.to_string())).unwrap().held;
        if !held.is_empty() {
            return Err(format!("seed {seed}, {kills:?}: the journal of n{number} has {held:?}"));
        }
    }
    Ok(chain.whole.len())
}

/// The variable `HERMES_SEEDS=FROM..TO` selects other seeds.
#[test]
fn whoever_is_killed_and_with_whom_all_of_it_comes() {
    let seeds = std::env::var("HERMES_SEEDS").unwrap_or_else(|_| "0..30".to_owned());
    let (from, to) = seeds.split_once("..").unwrap();
    let (from, to): (u64, u64) = (from.parse().unwrap(), to.parse().unwrap());
    let (whole, bad): (Vec<_>, Vec<_>) = (from..to).map(of_seed).partition(Result::is_ok);
    let said: Vec<_> = bad.into_iter().filter_map(Result::err).collect();
    assert!(said.is_empty(), "{} of {}\n{}", said.len(), to - from, said.join("\n"));
    let whole: usize = whole.into_iter().flatten().sum();
    let most = usize::from(EXCHANGES) * (to - from) as usize;
    assert!(whole > most / 2, "{whole} of {most}: too many lost their client");
}
