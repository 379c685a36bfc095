//! An IPC process of RINA on one worker: the engine, its UDP socket, and the tasks that wait for its flows.
//!
//! In: datagrams, calls of flows, time. Out: datagrams, requested flows, wake-ups. Never: a lock, or bytes of a flow in
//! a queue of its own: the engine has the buffers.
//!
//! Every call passes the engine's output to the socket before it returns, so a write leaves without a task switch. The
//! driver is the task that receives, waits for the socket to take more, and keeps the time.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hermes_net::udp::UdpSocket;
use hermes_outbound::outbound::Outbound;
use hermes_rina::{Config, Counters, Dif, Event, FlowError, FlowId, FlowRequest, Read, Reason};
use hermes_transport::runtime::yield_to_network;
use tokio::time::{Instant, Sleep};

/// Receive calls before other tasks run.
const ROUNDS: usize = 16;
/// Bytes of one read: a chunk of a tunnel.
const READ_BYTES: usize = 64 << 10;

/// An IPC process.
pub struct IpcProcess {
    outbound: Rc<Outbound>,
    socket: UdpSocket,
    started: Instant,
    dif: RefCell<Dif>,
    flows: RefCell<HashMap<FlowId, Waiting>>,
    /// Flows that neighbours have requested, for the listener.
    requested: RefCell<VecDeque<(FlowId, SocketAddr, FlowRequest)>>,
    listener: RefCell<Option<Waker>>,
    driver: RefCell<Option<Waker>>,
    output: RefCell<Output>,
    /// The time for which the driver has set its timer.
    wakes_at: Cell<Option<Duration>>,
    /// The counters as the metrics have them.
    reported: Cell<Counters>,
    /// A listener takes the flows that neighbours request. Its process ends with it; another one keeps its neighbours.
    has_listener: bool,
    /// Flows that neighbours request are refused.
    is_closed: Cell<bool>,
    /// The process has ended; its socket may belong to another one.
    is_stopped: Cell<bool>,
}

/// The tasks that wait for a flow, and how it ended.
#[derive(Default)]
struct Waiting {
    read: Option<Waker>,
    write: Option<Waker>,
    ended: Option<FlowEnd>,
    is_allocated: bool,
}

/// How a flow ended. `None`: both directions are complete.
pub(super) type FlowEnd = Option<Reason>;

/// Datagrams that the socket has not taken yet.
#[derive(Default)]
struct Output {
    bytes: BytesMut,
    peer: Option<SocketAddr>,
    segment: usize,
}

impl IpcProcess {
    /// Starts a process on a socket. A task of the worker drives it. Without a listener, flows that neighbours request
    /// are refused.
    ///
    /// # Errors
    /// The configuration is invalid, or the socket refuses its options.
    pub fn start(
        outbound: &Rc<Outbound>,
        socket: std::net::UdpSocket,
        config: Config,
        has_listener: bool,
    ) -> io::Result<Rc<Self>> {
        let mut seed = [0; 32];
        for part in seed.chunks_exact_mut(16) {
            part.copy_from_slice(&outbound.random().0.to_be_bytes());
        }
        let dif = Dif::new(config, &seed).map_err(io::Error::other)?;
        let this = Rc::new(Self {
            outbound: outbound.clone(),
            socket: UdpSocket::from_std(socket)?,
            started: Instant::now(),
            dif: RefCell::new(dif),
            flows: RefCell::default(),
            requested: RefCell::default(),
            listener: RefCell::default(),
            driver: RefCell::default(),
            output: RefCell::default(),
            wakes_at: Cell::default(),
            reported: Cell::default(),
            has_listener,
            is_closed: Cell::new(!has_listener),
            is_stopped: Cell::new(false),
        });
        outbound.spawn(drive(this.clone()));
        Ok(this)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Requests a flow to an application at a neighbour.
    ///
    /// # Errors
    /// A table is full, or a name is too long.
    pub(super) fn allocate(&self, peer: SocketAddr, request: FlowRequest) -> Result<FlowId, FlowError> {
        let flow = self.dif.borrow_mut().allocate(self.now(), peer, request)?;
        self.flows.borrow_mut().insert(flow, Waiting::default());
        self.flush();
        Ok(flow)
    }

    /// Waits until the peer has accepted a flow, or refused it.
    pub(super) fn poll_allocated(&self, cx: &Context<'_>, flow: FlowId) -> Poll<Result<(), FlowEnd>> {
        let mut flows = self.flows.borrow_mut();
        let Some(waiting) = flows.get_mut(&flow) else { return Poll::Ready(Err(None)) };
        if let Some(end) = waiting.ended {
            return Poll::Ready(Err(end));
        }
        if waiting.is_allocated {
            return Poll::Ready(Ok(()));
        }
        waiting.read = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Returns the next flow that a neighbour requests: the flow, the neighbour's address, and the names.
    pub(super) fn poll_requested(&self, cx: &Context<'_>) -> Poll<(FlowId, SocketAddr, FlowRequest)> {
        while let Some(next) = self.requested.borrow_mut().pop_front() {
            if self.flows.borrow().get(&next.0).is_some_and(|waiting| waiting.ended.is_none()) {
                return Poll::Ready(next);
            }
            // Its requester has withdrawn it.
            self.flows.borrow_mut().remove(&next.0);
        }
        *self.listener.borrow_mut() = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Waits until a requested flow no longer exists.
    pub(super) fn poll_gone(&self, cx: &Context<'_>, flow: FlowId) -> Poll<()> {
        match self.flows.borrow_mut().get_mut(&flow) {
            Some(waiting) if waiting.ended.is_none() => {
                waiting.read = Some(cx.waker().clone());
                Poll::Pending
            }
            _ => Poll::Ready(()),
        }
    }

    /// Accepts a requested flow. `false`: its requester no longer waits.
    pub(super) fn accept(&self, flow: FlowId) -> bool {
        let is_accepted = self.dif.borrow_mut().accept(self.now(), flow).is_ok();
        if is_accepted {
            self.flows.borrow_mut().entry(flow).or_default().is_allocated = true;
        }
        self.flush();
        is_accepted
    }

    /// Refuses a requested flow.
    pub(super) fn refuse(&self, flow: FlowId, reason: Reason) {
        self.flows.borrow_mut().remove(&flow);
        // A request that has expired needs no answer.
        let _ = self.dif.borrow_mut().refuse(self.now(), flow, reason);
        self.flush();
    }

    /// Returns the next bytes of a flow; `None` after the last one.
    pub(super) fn poll_read(&self, cx: &Context<'_>, flow: FlowId) -> Poll<io::Result<Option<Bytes>>> {
        let read = self.dif.borrow_mut().read(self.now(), flow, READ_BYTES);
        if let (Ok(Read::Blocked), Some(waiting)) = (&read, self.flows.borrow_mut().get_mut(&flow)) {
            waiting.read = Some(cx.waker().clone());
        }
        self.flush();
        match read {
            Ok(Read::Bytes(bytes)) => Poll::Ready(Ok(Some(bytes))),
            Ok(Read::End) => Poll::Ready(Ok(None)),
            Ok(Read::Blocked) => Poll::Pending,
            Err(_) => Poll::Ready(self.result(flow).map(|()| None)),
        }
    }

    /// Writes from the front of `chunk` until it is empty.
    pub(super) fn poll_write(&self, cx: &Context<'_>, flow: FlowId, chunk: &mut Bytes) -> Poll<io::Result<()>> {
        let written = self.dif.borrow_mut().write(self.now(), flow, chunk);
        if let (false, Some(waiting)) = (chunk.is_empty(), self.flows.borrow_mut().get_mut(&flow)) {
            waiting.write = Some(cx.waker().clone());
        }
        self.flush();
        if written.is_err() {
            self.result(flow)?;
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if chunk.is_empty() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// Ends the own direction of a flow.
    pub(super) fn finish(&self, flow: FlowId) -> io::Result<()> {
        let finished = self.dif.borrow_mut().finish(self.now(), flow);
        self.flush();
        if finished.is_err() { self.result(flow) } else { Ok(()) }
    }

    /// The error of a flow that no longer exists.
    fn result(&self, flow: FlowId) -> io::Result<()> {
        match self.flows.borrow().get(&flow).and_then(|waiting| waiting.ended) {
            Some(Some(reason)) => Err(io::Error::new(io::ErrorKind::ConnectionReset, reason.to_string())),
            Some(None) => Ok(()),
            None => Err(io::ErrorKind::ConnectionReset.into()),
        }
    }

    /// Forgets a flow, and aborts it unless both directions are complete.
    pub(super) fn release(&self, flow: FlowId, is_complete: bool) {
        let ended = self.flows.borrow_mut().remove(&flow).and_then(|waiting| waiting.ended);
        if ended.is_none() && !is_complete {
            let _ = self.dif.borrow_mut().reset(self.now(), flow, Reason::Aborted);
            self.flush();
        }
        // The driver may have waited for this flow only.
        self.wake_driver();
    }

    /// Refuses flows that neighbours request from now on, and those that nobody has taken. Other flows continue.
    pub fn close(&self) {
        self.is_closed.set(true);
        let waiting = std::mem::take(&mut *self.requested.borrow_mut());
        waiting.into_iter().for_each(|(flow, ..)| self.refuse(flow, Reason::Unreachable));
        self.wake_driver();
    }

    /// Ends all flows and all enrolments, and stops reading from the socket.
    pub fn stop(&self) {
        self.close();
        let peers = self.dif.borrow().neighbours();
        peers.into_iter().for_each(|peer| self.dif.borrow_mut().disconnect(self.now(), peer));
        self.flush();
        self.is_stopped.set(true);
        self.wake_driver();
    }

    /// Handles the events of the engine, and sends what it has to send.
    fn flush(&self) {
        self.handle_events();
        if let Err(error) = self.send() {
            // The datagram is lost, as on the way; the engine repeats it.
            self.outbound.shared.metrics.dropped("send-failed", 1);
            tracing::debug!(%error, "cannot send to a neighbour");
        }
        let next = self.dif.borrow().next_timeout();
        let is_blocked = self.output.borrow().peer.is_some();
        if is_blocked || next.is_some_and(|next| self.wakes_at.get().is_none_or(|at| next < at)) {
            self.wake_driver();
        }
    }

    fn wake_driver(&self) {
        if let Some(driver) = &*self.driver.borrow() {
            driver.wake_by_ref();
        }
    }

    fn handle_events(&self) {
        loop {
            let Some(event) = self.dif.borrow_mut().poll_event() else { return };
            let mut flows = self.flows.borrow_mut();
            match event {
                Event::FlowRequested { flow, .. } if self.is_closed.get() => {
                    drop(flows);
                    let _ = self.dif.borrow_mut().refuse(self.now(), flow, Reason::Unreachable);
                }
                Event::FlowRequested { flow, peer, request } => {
                    flows.insert(flow, Waiting::default());
                    self.requested.borrow_mut().push_back((flow, peer, request));
                    wake(&mut self.listener.borrow_mut());
                }
                Event::FlowAllocated { flow } => {
                    if let Some(waiting) = flows.get_mut(&flow) {
                        waiting.is_allocated = true;
                        wake(&mut waiting.read);
                    }
                }
                Event::Readable { flow } => {
                    if let Some(waiting) = flows.get_mut(&flow) {
                        wake(&mut waiting.read);
                    }
                }
                Event::Writable { flow } => {
                    if let Some(waiting) = flows.get_mut(&flow) {
                        wake(&mut waiting.write);
                    }
                }
                Event::AllocationFailed { flow, reason } => end(&mut flows, flow, Some(reason)),
                Event::Closed { flow, reason } => end(&mut flows, flow, reason),
                Event::Enrolled { peer, mtu } => tracing::debug!(%peer, mtu, "a neighbour is enrolled"),
                Event::NeighbourLost { peer, reason } => tracing::debug!(%peer, %reason, "a neighbour has left"),
            }
        }
    }

    /// Passes datagrams to the socket until it takes no more.
    fn send(&self) -> io::Result<()> {
        let mut output = self.output.borrow_mut();
        let output = &mut *output;
        loop {
            if let Some(peer) = output.peer {
                match self.socket.try_send(peer, &output.bytes, output.segment) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                    sent => {
                        (output.peer, output.segment) = (None, 0);
                        output.bytes.clear();
                        sent?;
                    }
                }
            }
            let segments = self.socket.max_segments();
            let Some(next) = self.dif.borrow_mut().poll_transmit(self.now(), &mut output.bytes, segments) else {
                return Ok(());
            };
            (output.peer, output.segment) = (Some(next.peer), next.segment_size.unwrap_or(next.len));
        }
    }

    /// Copies what the engine has counted to the metrics.
    fn report(&self) {
        let (now, before) = (*self.dif.borrow().counters(), self.reported.get());
        let metrics = &self.outbound.shared.metrics;
        for (name, now, before) in [
            ("rina-malformed", now.malformed, before.malformed),
            ("rina-unauthenticated", now.wrong_tag + now.wrong_dif, before.wrong_tag + before.wrong_dif),
        ] {
            if now > before {
                metrics.dropped(name, now - before);
            }
        }
        for (name, now, before) in [
            ("rina-neighbours", now.neighbour_limit, before.neighbour_limit),
            ("rina-flows", now.flow_limit + now.pending_limit, before.flow_limit + before.pending_limit),
            ("rina-receive-buffer", now.receive_limit, before.receive_limit),
        ] {
            (before..now).for_each(|_| metrics.limit(name));
        }
        self.reported.set(now);
    }

    /// Whether the process has nothing left to do: no listener, no other user, no flow.
    fn is_finished(this: &Rc<Self>) -> bool {
        let usage = this.dif.borrow().usage();
        let is_unused = Rc::strong_count(this) == 1 && usage.flows == 0;
        is_unused && (usage.neighbours == 0 || this.has_listener && this.is_closed.get())
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

fn end(flows: &mut HashMap<FlowId, Waiting>, flow: FlowId, reason: FlowEnd) {
    if let Some(waiting) = flows.get_mut(&flow) {
        waiting.ended = Some(reason);
        wake(&mut waiting.read);
        wake(&mut waiting.write);
    }
}

/// Receives, and keeps the time, until the process is finished.
async fn drive(this: Rc<IpcProcess>) {
    let mut sleep = Box::pin(tokio::time::sleep(Duration::ZERO));
    std::future::poll_fn(|cx| {
        if this.is_stopped.get() {
            return Poll::Ready(());
        }
        *this.driver.borrow_mut() = Some(cx.waker().clone());
        receive(&this, cx);
        if this.output.borrow().peer.is_some() {
            match this.socket.poll_send_ready(cx) {
                Poll::Ready(Ok(())) => this.flush(),
                // The datagrams are lost, as on the way; the engine repeats them.
                Poll::Ready(Err(_)) => *this.output.borrow_mut() = Output::default(),
                Poll::Pending => {}
            }
        }
        wait(&this, cx, sleep.as_mut());
        this.report();
        if IpcProcess::is_finished(&this) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Receives what has arrived.
fn receive(this: &IpcProcess, cx: &mut Context<'_>) {
    for _ in 0..ROUNDS {
        let now = this.now();
        let received = this.socket.poll_receive(cx, &mut this.outbound.udp_buffer.borrow_mut(), |peer, datagram| {
            this.dif.borrow_mut().handle_datagram(now, peer, datagram);
        });
        match received {
            Poll::Ready(Ok(_)) => this.flush(),
            // A neighbour's machine may have refused a datagram; its flows end by their timeouts.
            Poll::Ready(Err(error)) => tracing::debug!(%error, "an error of the socket of an IPC process"),
            Poll::Pending => return,
        }
    }
    yield_to_network(cx);
}

/// Handles timeouts that have passed, and sets the timer for the next one.
fn wait(this: &IpcProcess, cx: &mut Context<'_>, mut sleep: Pin<&mut Sleep>) {
    loop {
        let Some(next) = this.dif.borrow().next_timeout() else {
            this.wakes_at.set(None);
            return;
        };
        if this.wakes_at.get().is_none_or(|at| next < at) {
            this.wakes_at.set(Some(next));
            sleep.as_mut().reset(this.started + next);
        }
        if sleep.as_mut().poll(cx).is_pending() {
            return;
        }
        this.wakes_at.set(None);
        let now = this.now();
        this.dif.borrow_mut().handle_timeout(now);
        this.flush();
    }
}
