//! A subscription across failures.
//!
//! In: the client of a channel. Out: its publications and holes, and each interruption. After one, the client subscribes again
//! and resumes after the latest event. Never: an end, unless the relay refuses for good.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::{Client, ClientError, Event, SubscribeOptions, Subscriber};

/// The pauses between attempts to subscribe again.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(250);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);

/// A result of [`Subscription::next`].
#[derive(Debug)]
pub enum Received {
    /// A publication or a hole.
    Event(Event),
    /// The subscription broke. The client subscribes again.
    Interrupted(ClientError),
}

/// A subscription across failures.
pub struct Subscription {
    client: Arc<Client>,
    /// `after` follows the latest event.
    options: SubscribeOptions,
    /// `None` between two attempts.
    current: Option<Subscriber>,
    /// The relay has accepted a subscription before, so that a failure may pass.
    has_begun: bool,
    retry_at: Instant,
    pause: Duration,
}

impl Subscription {
    /// A subscription that begins with the first call of [`Self::begin`] or [`Self::next`].
    pub fn new(client: Arc<Client>, options: SubscribeOptions) -> Self {
        let (retry_at, pause) = (Instant::now(), MIN_RETRY_DELAY);
        Self { client, options, current: None, has_begun: false, retry_at, pause }
    }

    /// Subscribes, if there is no subscription now.
    ///
    /// # Errors
    /// The relay refuses, or cannot be reached.
    pub async fn begin(&mut self) -> Result<(), ClientError> {
        if self.current.is_none() {
            let subscriber = self.client.subscribe(&self.options).await?;
            self.has_begun = true;
            self.options.after.get_or_insert_with(|| subscriber.position().to_owned());
            self.current = Some(subscriber);
        }
        Ok(())
    }

    /// Waits for the next publication, hole or interruption.
    ///
    /// # Errors
    /// The first subscription fails, or the relay refuses a later one for good.
    pub async fn next(&mut self) -> Result<Received, ClientError> {
        loop {
            let Some(subscriber) = &mut self.current else {
                tokio::time::sleep_until(self.retry_at).await;
                match self.begin().await {
                    Ok(()) => continue,
                    Err(error) if self.has_begun && error.is_transient() => return Ok(self.interrupted(error)),
                    Err(error) => return Err(error),
                }
            };
            match subscriber.next().await {
                Ok(Some(event)) => {
                    self.options.after = Some(event.id().to_owned());
                    self.pause = MIN_RETRY_DELAY;
                    return Ok(Received::Event(event));
                }
                // The relay has ended an orderly subscription, such as one whose channel moved.
                Ok(None) => self.schedule(),
                Err(error) if error.is_transient() => return Ok(self.interrupted(error)),
                Err(error) => return Err(error),
            }
        }
    }

    /// Subscribes again at once, over a new connection. The network may have changed.
    pub fn renew(&mut self) {
        self.current = None;
        self.retry_at = Instant::now();
    }

    fn interrupted(&mut self, error: ClientError) -> Received {
        self.schedule();
        Received::Interrupted(error)
    }

    fn schedule(&mut self) {
        self.current = None;
        self.retry_at = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(MAX_RETRY_DELAY);
    }
}
