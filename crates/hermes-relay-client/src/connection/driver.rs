//! A connection at work: one task that moves bytes between an application and relays.
//!
//! In: a session, the application's stream, subscriptions of own channels, and paths to the other end. Out: the volume of
//! both streams, or the reason why the connection failed. Never: a task that outlives the call.

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use http::Uri;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::frame::Frame;
use super::paths::{Outcome, Paths};
use super::receive_base::AllowedChannels;
use super::session::Session;
use super::{ConnectionError, Totals};
use crate::{Client, ClientError, Event, Received, Subscription};

/// The most bytes of one read from the application.
const READ_SIZE: usize = 64 << 10;
/// Received frames that wait for the session.
const MAX_WAITING_FRAMES: usize = 8;
/// When a publication breaks and the other end has been silent for this long, the network may have changed.
const RENEWAL_SILENCE: Duration = Duration::from_secs(3);
/// The wait for other subscriptions after one has begun.
const BEGIN_MOMENT: Duration = Duration::from_secs(1);
/// The wait for a caller that does not receive.
const DESERTION_TIMEOUT: Duration = Duration::from_secs(5);
/// The listeners beside the first one that are told that they are too late.
const MAX_LATE_LISTENERS: u32 = 8;

/// Subscriptions of own channels, each in a task of its own.
pub(super) struct Reception {
    frames: mpsc::Receiver<Frame>,
    /// Each ends with the reason for its failure.
    tasks: JoinSet<ClientError>,
    renewal: Arc<Notify>,
}

impl Reception {
    /// Begins these subscriptions. Returns the URLs of those that began, too. When the first one has, the others get a moment;
    /// those that fail or take longer are left out.
    pub(super) async fn begin(channels: Vec<(String, Subscription)>) -> Result<(Self, Vec<String>), ClientError> {
        let mut beginnings = JoinSet::new();
        for (url, mut subscription) in channels {
            beginnings.spawn(async move {
                let begun = subscription.begin().await;
                begun.map(|()| (url, subscription))
            });
        }
        let (sender, frames) = mpsc::channel(MAX_WAITING_FRAMES);
        let mut reception = Self { frames, tasks: JoinSet::new(), renewal: Arc::new(Notify::new()) };
        let (mut urls, mut failure) = (Vec::new(), None);
        let mut until = None;
        while !beginnings.is_empty() {
            let moment = tokio::time::sleep_until(until.unwrap_or_else(Instant::now));
            tokio::select! {
                Some(Ok(begun)) = beginnings.join_next() => match begun {
                    Ok((url, subscription)) => {
                        urls.push(url);
                        reception.tasks.spawn(receive(subscription, sender.clone(), reception.renewal.clone()));
                        until.get_or_insert_with(|| Instant::now() + BEGIN_MOMENT);
                    }
                    Err(error) => failure = Some(error),
                },
                () = moment, if until.is_some() => break,
            }
        }
        match failure {
            Some(error) if urls.is_empty() => Err(error),
            _ => Ok((reception, urls)),
        }
    }

    /// The next frame, or the reason why no other one comes.
    async fn next(&mut self) -> Result<Frame, ClientError> {
        loop {
            tokio::select! {
                Some(frame) = self.frames.recv() => return Ok(frame),
                Some(Ok(error)) = self.tasks.join_next() => {
                    if self.tasks.is_empty() {
                        return Err(error);
                    }
                }
                else => return Err(ClientError::Broken("no subscription is left".to_owned())),
            }
        }
    }
}

async fn receive(mut subscription: Subscription, frames: mpsc::Sender<Frame>, renewal: Arc<Notify>) -> ClientError {
    loop {
        let received = tokio::select! {
            received = subscription.next() => received,
            () = renewal.notified() => {
                subscription.renew();
                continue;
            }
        };
        match received {
            // A stranger may publish anything that is no frame. Gaps and interruptions: the other end sends again.
            Ok(Received::Event(Event::Publication { body, .. })) => {
                if let Some(frame) = Frame::decode(&body)
                    && frames.send(frame).await.is_err()
                {
                    return ClientError::Broken("the connection has ended".to_owned());
                }
            }
            Ok(_) => {}
            Err(error) => return error,
        }
    }
}

/// The next service to the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OutputStep {
    Nothing,
    Write,
    /// Bytes that were written may wait in a buffer.
    Flush,
    /// It gets the end of the stream.
    Shut,
}

/// Takes a step. Returns the number of bytes that were written.
async fn write_output(step: OutputStep, output: &mut (impl AsyncWrite + Unpin), pending: &[u8]) -> io::Result<usize> {
    match step {
        OutputStep::Nothing => std::future::pending().await,
        OutputStep::Write => match output.write(pending).await? {
            0 => Err(io::ErrorKind::WriteZero.into()),
            written => Ok(written),
        },
        OutputStep::Flush => output.flush().await.map(|()| 0),
        OutputStep::Shut => output.shutdown().await.map(|()| 0),
    }
}

/// A connection, and what it works with.
pub(super) struct Driver<Io> {
    session: Session,
    input: ReadHalf<Io>,
    output: WriteHalf<Io>,
    has_input_ended: bool,
    is_output_shut: bool,
    is_unflushed: bool,
    buffer: Vec<u8>,
    /// Bytes that the application is yet to take.
    pending: Bytes,
    paths: Paths,
    rules: Rules,
    late_listeners: u32,
    renewed_at: Instant,
    totals: Totals,
}

/// The rules of a connection.
pub(super) struct Rules {
    pub allowed: AllowedChannels,
    /// The client of the listener's channel.
    pub client: Arc<Client>,
    /// The local addresses of publications.
    pub sources: Vec<Option<IpAddr>>,
    pub is_redundant: bool,
    pub takes_early: bool,
    pub stop: CancellationToken,
}

impl Rules {
    /// Makes paths to the channels of the other end: from each local address, and to each channel.
    pub(super) fn reach(&self, paths: &mut Paths, channels: &[String]) -> Result<(), ConnectionError> {
        let mut allowed: Vec<_> = channels.iter().filter_map(|channel| self.allowed.url(channel)).collect();
        allowed.sort_unstable_by_key(Uri::to_string);
        allowed.dedup();
        if allowed.is_empty() {
            return Err(ConnectionError::NotAllowed(channels.first().cloned().unwrap_or_default()));
        }
        let (urls, sources) = (allowed.iter().cycle(), self.sources.iter().cycle());
        for (url, source) in urls.zip(sources).take(allowed.len().max(self.sources.len())) {
            paths.add(self.client.sibling(url.clone(), *source)?, false);
        }
        Ok(())
    }
}

impl<Io: AsyncRead + AsyncWrite + Send> Driver<Io> {
    pub(super) fn new(session: Session, io: Io, rules: Rules) -> Self {
        let (input, output) = tokio::io::split(io);
        Self {
            session,
            input,
            output,
            has_input_ended: false,
            is_output_shut: false,
            is_unflushed: false,
            buffer: vec![0; READ_SIZE],
            pending: Bytes::new(),
            paths: Paths::default(),
            rules,
            late_listeners: 0,
            renewed_at: Instant::now(),
            totals: Totals::default(),
        }
    }

    /// Calls the listener.
    pub(super) fn call(&mut self) -> Result<(), ConnectionError> {
        let sources: HashSet<_> = self.rules.sources.iter().copied().collect();
        for source in sources {
            self.paths.add(self.rules.client.sibling(self.rules.client.url().clone(), source)?, true);
        }
        Ok(())
    }

    /// Takes the frame with which the other end called.
    pub(super) fn answer(&mut self, opening: &Frame) -> Result<(), ConnectionError> {
        self.rules.reach(&mut self.paths, &opening.receive)?;
        Ok(self.session.receive(opening, Instant::now().into_std())?)
    }

    /// Carries both streams to their ends, when `reception` has begun. The first frame
    /// has the first bytes of the application.
    pub(super) async fn run(
        mut self,
        reception: impl Future<Output = Result<(Reception, Vec<String>), ConnectionError>>,
    ) -> Result<Totals, ConnectionError> {
        let carried = async {
            let (mut reception, urls) = self.read_during(reception).await??;
            self.session.begin(urls, Instant::now().into_std());
            self.carry(&mut reception).await
        };
        match carried.await {
            // The application has all of both streams. Only the last words of the other end are missing.
            Err(_) if self.session.is_complete() => Ok(self.totals),
            Ok(()) => {
                self.totals.repeated = self.session.outgoing().repeated;
                Ok(self.totals)
            }
            Err(error) => {
                if let Some(peer) = self.session.peer().filter(|_| !error.is_known_to_peer()) {
                    self.paths.reset(self.session.own(), peer.clone(), &error.to_string()).await;
                }
                Err(error)
            }
        }
    }

    /// Waits for `other`, and reads once from the application meanwhile.
    async fn read_during<T>(&mut self, other: impl Future<Output = T>) -> Result<T, ConnectionError> {
        let mut other = pin!(other);
        let room = self.session.outgoing().room().min(READ_SIZE);
        tokio::select! {
            biased;
            done = &mut other => return Ok(done),
            read = self.input.read(&mut self.buffer[..room]) => self.read(read.map_err(ConnectionError::Application)?),
        }
        Ok(other.await)
    }

    async fn carry(&mut self, reception: &mut Reception) -> Result<(), ConnectionError> {
        loop {
            let now = Instant::now();
            self.session.check(now.into_std())?;
            if self.session.has_lingered(now.into_std())
                || (self.session.is_over(now.into_std()) && self.paths.is_idle())
            {
                return Ok(());
            }
            self.publish(now);
            let step = self.next_output_step(now);
            let room = self.session.outgoing().room().min(READ_SIZE);
            let wake_at = self.wake_at();
            tokio::select! {
                frame = reception.next() => self.receive(&frame?)?,
                outcome = self.paths.outcome() => {
                    if self.settle(&outcome)? {
                        reception.renewal.notify_waiters();
                    }
                }
                read = self.input.read(&mut self.buffer[..room]), if room > 0 && !self.has_input_ended => {
                    self.read(read.map_err(ConnectionError::Application)?);
                }
                written = write_output(step, &mut self.output, &self.pending) => {
                    self.output_done(step, written.map_err(ConnectionError::Application)?);
                }
                () = tokio::time::sleep_until(wake_at) => {}
                () = self.rules.stop.cancelled() => return Err(ConnectionError::Stopped),
            }
        }
    }

    /// The service that the application needs now.
    fn next_output_step(&mut self, now: Instant) -> OutputStep {
        // A caller that does not know this end may have gone long ago, or have called another listener, too.
        if !self.session.is_known_to_peer() && !self.rules.takes_early {
            return OutputStep::Nothing;
        }
        if self.pending.is_empty() {
            self.pending = self.session.take(now.into_std()).unwrap_or_default();
        }
        match () {
            () if !self.pending.is_empty() => OutputStep::Write,
            () if self.is_unflushed => OutputStep::Flush,
            () if self.session.incoming().is_taken() && !self.is_output_shut => OutputStep::Shut,
            () => OutputStep::Nothing,
        }
    }

    fn output_done(&mut self, step: OutputStep, written: usize) {
        self.pending.advance(written);
        self.totals.received += written as u64;
        match step {
            OutputStep::Nothing => {}
            OutputStep::Write => self.is_unflushed = true,
            OutputStep::Flush => self.is_unflushed = false,
            OutputStep::Shut => {
                self.is_output_shut = true;
                self.session.delivered();
            }
        }
    }

    fn read(&mut self, read: usize) {
        self.totals.sent += read as u64;
        self.has_input_ended = read == 0;
        match read {
            0 => self.session.outgoing().end(),
            _ => self.session.outgoing().write(&self.buffer[..read]),
        }
    }

    /// Publishes what the session has, as far as paths are free.
    fn publish(&mut self, now: Instant) {
        while let Some(best) = self.paths.free() {
            let Some(frame) = self.session.next_frame(now.into_std()) else { return };
            let (offset, frame) = (frame.offset, Arc::new(frame));
            let is_chunk = offset.is_some() && frame.to.is_some();
            let others = match is_chunk {
                true if self.rules.is_redundant => self.paths.all_free(),
                true => self.paths.on_trial(),
                false => Vec::new(),
            };
            self.paths.publish(best, frame.clone());
            for other in others.into_iter().filter(|other| *other != best) {
                offset.into_iter().for_each(|offset| self.session.outgoing().copied(offset));
                self.paths.publish(other, frame.clone());
            }
        }
    }

    fn wake_at(&self) -> Instant {
        match self.paths.free() {
            Some(_) => Instant::from_std(self.session.deadline()),
            // Nothing can be sent before a path is free. The wait is short, so that a silent other end is noticed.
            None => self.paths.free_at().unwrap_or_else(|| Instant::now() + Duration::from_secs(1)),
        }
    }

    fn receive(&mut self, frame: &Frame) -> Result<(), ConnectionError> {
        if frame.to.as_ref() != Some(self.session.own()) {
            return Ok(());
        }
        let had_peer = self.session.peer().is_some();
        if had_peer && frame.from.is_some() && self.session.peer() != frame.from.as_ref() {
            self.send_away(frame);
            return Ok(());
        }
        self.session.receive(frame, Instant::now().into_std())?;
        if !had_peer && self.session.peer().is_some() {
            self.paths.retire();
            self.rules.reach(&mut self.paths, &frame.receive)?;
        }
        Ok(())
    }

    /// A second listener has accepted, too, since the answer of the first one came late. It gets a reset.
    fn send_away(&mut self, frame: &Frame) {
        let url = frame.receive.iter().find_map(|url| self.rules.allowed.url(url));
        if let (Some(from), Some(url), None) = (&frame.from, url, &frame.reset)
            && self.late_listeners < MAX_LATE_LISTENERS
        {
            self.late_listeners += 1;
            let frame =
                Frame::reset(self.session.own().clone(), from.clone(), "another listener has accepted this connection");
            // Its own reset needs no answer.
            if let Ok(client) = self.rules.client.sibling(url, self.rules.sources.first().copied().flatten()) {
                self.paths.publish_once(client, Arc::new(frame));
            }
        }
    }

    /// Takes the outcome of a publication. Returns whether the subscriptions should be renewed.
    fn settle(&mut self, outcome: &Outcome) -> Result<bool, ConnectionError> {
        let now = Instant::now();
        let frame = &outcome.frame;
        if frame.reset.is_some() {
            return Ok(false);
        }
        match &outcome.result {
            Ok(acceptance) if acceptance.delivered > 0 => {
                self.session.published(frame, outcome.took, now.into_std());
                return Ok(false);
            }
            // The outcome of a call may come after the listener's answer.
            Ok(_) if self.session.peer().is_none() => return Err(ConnectionError::NobodyListens),
            // A caller whose relay has restarted subscribes again.
            Ok(_)
                if !self.session.is_known_to_peer()
                    && self.paths.are_deserted()
                    && now >= Instant::from_std(self.session.began_at()) + DESERTION_TIMEOUT =>
            {
                return Err(ConnectionError::CallerIsGone);
            }
            Err(_) if outcome.is_too_large() && self.session.too_large(frame) => return Ok(false),
            Err(error) if outcome.is_too_large() || self.paths.are_dead() => return Err(error.clone().into()),
            _ => {}
        }
        if outcome.is_late() {
            self.session.outgoing().timed_out();
        }
        self.session.failed(frame, now.into_std());
        let is_silent = now >= Instant::from_std(self.session.heard_at()).max(self.renewed_at) + RENEWAL_SILENCE;
        let is_broken = matches!(outcome.result, Err(ClientError::Broken(_)));
        if is_silent && is_broken {
            self.renewed_at = now;
        }
        Ok(is_silent && is_broken)
    }
}
