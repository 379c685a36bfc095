//! Publishes what another relay delivers at this one, with its identifiers.
//!
//! In: deliveries of another relay. Out: the same in the queues of this node's subscribers. Never: a publication more than
//! the queues have room for.

use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use hermes_relay::{FedPublication, Feed, PublishError, PublishProgress};
use hermes_transport::runtime::WorkerContext;
use tokio::time::Instant;

use crate::next_channel::NextDelivery;
use crate::receipts::count;
use crate::registry::RelayClock;

/// The pause after which a publication is tried again for which the relay had no memory.
const MEMORY_PAUSE: Duration = Duration::from_millis(100);

/// The feeding end of a channel.
pub(crate) struct Feeder {
    pub(crate) feed: Feed,
    pub(crate) clock: RelayClock,
    pub(crate) worker: Rc<WorkerContext>,
    pub(crate) route: Arc<str>,
}

impl Feeder {
    /// Passes a delivery on. A publication is returned: it waits for room.
    pub(crate) fn take(&self, delivery: NextDelivery) -> Option<FedPublication> {
        match delivery {
            NextDelivery::Publication(publication) => return Some(publication),
            NextDelivery::Gap { missed, until } => self.feed.gap(missed, until, self.clock.now()),
            NextDelivery::Nothing => {}
        }
        None
    }

    /// Publishes when the queues have room. Does nothing without a publication.
    pub(crate) async fn publish(&self, publication: Option<&FedPublication>) -> Result<(), PublishError> {
        let Some(publication) = publication else { return Ok(()) };
        let mut timer = std::pin::pin!(tokio::time::sleep(Duration::ZERO));
        std::future::poll_fn(|cx| {
            loop {
                let now = self.clock.now();
                match self.feed.poll_publish(publication, cx.waker(), now) {
                    Ok(PublishProgress::Done(receipt)) => {
                        count(&self.worker.shared.metrics, &self.route, &receipt);
                        return Poll::Ready(Ok(()));
                    }
                    Ok(PublishProgress::Waiting { until }) => {
                        timer.as_mut().reset(Instant::now() + until.saturating_sub(now));
                        ready!(timer.as_mut().poll(cx));
                    }
                    // The subscribers have not learned of a gap, so that it is published once there is memory.
                    Err(PublishError::Memory(_)) if publication.is_reliable || publication.id.is_none() => {
                        self.worker.shared.metrics.limit("relay-memory");
                        timer.as_mut().reset(Instant::now() + MEMORY_PAUSE);
                        ready!(timer.as_mut().poll(cx));
                    }
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
        })
        .await
    }
}
