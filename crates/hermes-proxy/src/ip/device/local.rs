//! The queues of a device on one worker: their readers, and the exchange of packets between processes that share the
//! device.
//!
//! In: packets of the kernel, and packets that the predecessor or the successor process forwards. Out: each to the
//! session that owns its destination, in this process or in one of those two. Never: the ownership of addresses; the
//! device decides that.

use std::cell::{OnceCell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hermes_net::tun::{IdleQueue, Queue, ReceiveBuffer};
use hermes_wire::ip::{self, IcmpError};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::Device;
use hermes_transport::oneshot::Oneshot;
use hermes_transport::runtime::{Shared, WorkerContext, yield_to_network};

/// The limit of reads before other tasks of the worker run.
const ROUNDS: usize = 4;

/// A worker's share of a device.
pub(crate) struct Share {
    pub(crate) device: Arc<Device>,
    pub(crate) queue: IdleQueue,
    /// Further queues to read.
    pub(crate) more: Vec<IdleQueue>,
    /// The queue to sessions of the predecessor process.
    pub(crate) before: Option<IdleQueue>,
}

impl Share {
    fn start(self, worker: &WorkerContext) -> std::io::Result<LocalDevice> {
        Ok(LocalDevice {
            device: self.device,
            queue: self.queue.start()?,
            more: self.more.into_iter().map(IdleQueue::start).collect::<Result<_, _>>()?,
            shared: worker.shared.clone(),
            before: RefCell::new(self.before.map(IdleQueue::start).transpose()?.map(Rc::new)),
            after: RefCell::default(),
            alone: Oneshot::default(),
            reading: OnceCell::new(),
        })
    }
}

/// The devices of one worker.
#[derive(Default)]
pub(crate) struct Devices {
    here: RefCell<HashMap<Arc<str>, Rc<LocalDevice>>>,
    /// Notified when a device is added.
    came: Notify,
}

impl Devices {
    /// Starts to read queues.
    pub(crate) fn begin(self: &Rc<Self>, worker: &Rc<WorkerContext>, shares: Vec<Share>) {
        for share in shares {
            let device = share.device.clone();
            match share.start(worker).map(Rc::new) {
                Ok(local) => {
                    if local.before.borrow().is_some() {
                        let elder = PredecessorGuard::of(&worker.shared);
                        device.awaits();
                        worker.spawn(local.clone().outlive(worker.clone(), elder));
                    }
                    let reading =
                        worker.spawn(read(self.clone(), device.clone(), Rc::downgrade(&local), worker.clone()));
                    // The cell was empty.
                    let _ = local.reading.set(reading);
                    self.here.borrow_mut().insert(device.name.clone(), local);
                    self.came.notify_waiters();
                    let devices = self.clone();
                    worker.spawn(async move {
                        device.unheld().await;
                        devices.forget(&device);
                    });
                }
                Err(error) => tracing::error!(device = %device.name, %error, "a device cannot be read here"),
            }
        }
    }

    /// Stops reading, because the successor process reads from now on. It forwards packets without a session there
    /// through these queues, and gets those without a session here back.
    pub(crate) fn stop_reading(&self, worker: &Rc<WorkerContext>, passages: Vec<(Arc<str>, IdleQueue)>) {
        // Devices that no document names are not handed over, and remain read for their last sessions.
        for local in self.here.borrow().values().filter(|local| !local.device.net.is_ours()) {
            local.end_reading();
            let (device, shared) = (local.device.clone(), worker.shared.clone());
            worker.spawn(async move {
                device.deleted(&shared).await;
                device.finish_sessions();
            });
        }
        for (name, passage) in passages {
            let Some(local) = self.get(&name) else { continue };
            match passage.start() {
                Ok(passage) => {
                    let passage = Rc::new(passage);
                    local.after.replace(Some(passage.clone()));
                    let (here, mut delivery) = (worker.clone(), Delivery::default());
                    worker.spawn(async move {
                        let passed_on =
                            poll_fn(|cx| local.poll_deliver(cx, &here, &passage, &local.elsewhere(), &mut delivery));
                        drop(passed_on.await);
                        // The successor has exited, and no process reads the device for the remaining sessions: they
                        // start again elsewhere.
                        local.after.take();
                        local.alone.set(());
                        local.device.finish_sessions();
                    });
                }
                Err(error) => tracing::error!(device = %name, %error, "sessions here get no packets any more"),
            }
        }
    }

    /// Removes this device, but not a new one of the same name.
    fn forget(&self, device: &Arc<Device>) {
        self.here.borrow_mut().retain(|_, local| !Arc::ptr_eq(&local.device, device));
    }

    /// The device of this name.
    pub(crate) fn get(&self, name: &str) -> Option<Rc<LocalDevice>> {
        self.here.borrow().get(name).cloned()
    }

    /// The device of this name. Waits for a device that was deleted and is not yet created again. `None` after the
    /// deadline.
    pub(crate) async fn get_by(&self, name: &str, by: Instant) -> Option<Rc<LocalDevice>> {
        let come = async {
            loop {
                let came = self.came.notified();
                if let Some(local) = self.get(name) {
                    return local;
                }
                came.await;
            }
        };
        tokio::time::timeout_at(by, come).await.ok()
    }
}

/// A guard: while it lives, the predecessor gets packets through this process.
struct PredecessorGuard(Arc<Shared>);

impl PredecessorGuard {
    fn of(shared: &Arc<Shared>) -> Self {
        shared.predecessors.fetch_add(1, Ordering::Relaxed);
        Self(shared.clone())
    }
}

impl Drop for PredecessorGuard {
    fn drop(&mut self) {
        self.0.predecessors.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The other process with sessions of a device: the predecessor while it lives, else the successor.
pub(super) enum Elsewhere {
    Nowhere,
    Before(Rc<Queue>),
    After(Rc<Queue>),
}

impl Elsewhere {
    pub(super) fn is_before(&self) -> bool {
        matches!(self, Elsewhere::Before(_))
    }

    pub(super) fn queue(&self) -> Option<&Queue> {
        match self {
            Elsewhere::Nowhere => None,
            Elsewhere::Before(queue) | Elsewhere::After(queue) => Some(queue),
        }
    }
}

/// A device on one worker.
pub(crate) struct LocalDevice {
    pub(crate) device: Arc<Device>,
    pub(crate) queue: Queue,
    /// Further queues to read, of a predecessor with more workers.
    more: Vec<Queue>,
    /// The node's shared metrics, which also count packets after the worker has ended.
    pub(in crate::ip) shared: Arc<Shared>,
    /// The queue to sessions of the predecessor, while it lives.
    before: RefCell<Option<Rc<Queue>>>,
    /// The queue to sessions of the successor, on the worker that reads packets from there.
    after: RefCell<Option<Rc<Queue>>>,
    /// Set when the successor has exited, to tell the predecessor.
    alone: Oneshot<()>,
    /// The task that reads the queues, while the device has references.
    reading: OnceCell<AbortHandle>,
}

impl Drop for LocalDevice {
    fn drop(&mut self) {
        self.end_reading();
    }
}

/// Reads this worker's queue once the process owns it, until the device is deleted or its last reference dropped.
/// Sessions of a deleted device end; when they return they find its replacement.
async fn read(devices: Rc<Devices>, device: Arc<Device>, local: Weak<LocalDevice>, worker: Rc<WorkerContext>) {
    let mut reads = device.reads.subscribe();
    // The sender lives as long as the device.
    drop(reads.wait_for(|reads| *reads).await);
    let mut delivery = Delivery::default();
    let read = poll_fn(|cx| {
        let Some(local) = local.upgrade() else { return Poll::Ready(Ok(())) };
        let elsewhere = local.elsewhere();
        let queues = [&local.queue].into_iter().chain(&local.more);
        let read = queues.map(|queue| local.poll_deliver(cx, &worker, queue, &elsewhere, &mut delivery));
        // All queues are polled, so that each registers the waker.
        read.fold(Poll::Pending, |so_far, next| if so_far.is_ready() { so_far } else { next.map(Err) })
    });
    tokio::select! {
        read = read => match read {
            Ok(()) => return,
            // A busy reader may see the error before the network watcher reports the deletion.
            Err(_) if !device.net.is_there() => {}
            Err(error) => {
                tracing::warn!(device = %device.name, %error, "a device can be read no more");
                return;
            }
        },
        () = device.deleted(&worker.shared) => {}
    }
    devices.forget(&device);
    device.finish_sessions();
    // The readers on all workers see this.
    if device.reads.send_replace(false) {
        tracing::warn!(device = %device.name, "device deleted by another program; ending its sessions");
        worker.shared.something_lost.notify_one();
    }
}

/// The buffers of a reader.
#[derive(Default)]
struct Delivery {
    buffer: ReceiveBuffer,
    packets: VecDeque<Bytes>,
    run: Vec<Bytes>,
}

impl LocalDevice {
    fn end_reading(&self) {
        self.reading.get().inspect(|reading| reading.abort());
    }

    /// Waits for the end of the predecessor. Packets that it sends back were for a session that ended there meanwhile,
    /// and now belong to a session of this process or of the successor.
    async fn outlive(self: Rc<Self>, worker: Rc<WorkerContext>, _elder: PredecessorGuard) {
        let Some(before) = self.before.borrow().clone() else { return };
        // The reference keeps the queues open, so that a document can name the device again.
        let _hold = self.device.hold();
        let mut delivery = Delivery::default();
        let came_back = poll_fn(|cx| self.poll_deliver(cx, &worker, &before, &self.later(), &mut delivery));
        tokio::select! {
            _ = came_back => {}
            () = self.alone.wait() => {}
        }
        self.before.take();
        // The predecessor may exit before it has handed over the device. Only the handover tells which prefixes it had,
        // and that this process owns the device.
        let mut reads = self.device.reads.subscribe();
        tokio::select! {
            _ = reads.wait_for(|reads| *reads) => {}
            () = self.device.deleted(&worker.shared) => {}
        }
        self.device.outlived();
    }

    /// Passes a packet to the predecessor process, which may have its connection. False: no predecessor, or its queue
    /// is full.
    pub(crate) fn pass_to_predecessor(&self, packet: &Bytes) -> bool {
        let before = self.before.borrow();
        let sent = before.as_ref().map(|before| before.try_send(std::slice::from_ref(packet)));
        sent.is_some_and(|sent| sent.is_ok_and(|moved| moved.taken() == 1))
    }

    fn elsewhere(&self) -> Elsewhere {
        let before = self.before.borrow().clone();
        before.map_or_else(|| self.later(), Elsewhere::Before)
    }

    /// The process for packets that the predecessor has no session for.
    fn later(&self) -> Elsewhere {
        self.after.borrow().clone().map_or(Elsewhere::Nowhere, Elsewhere::After)
    }

    /// Delivers packets to the sessions that own their destinations, here or in another process.
    pub(in crate::ip) fn deliver(&self, worker: &WorkerContext, packets: &mut VecDeque<Bytes>, run: &mut Vec<Bytes>) {
        self.device.deliver(worker, &self.elsewhere(), packets, run);
    }

    /// Delivers the packets of a queue. Ready when its other end has closed.
    fn poll_deliver(
        &self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
        queue: &Queue,
        elsewhere: &Elsewhere,
        Delivery { buffer, packets, run }: &mut Delivery,
    ) -> Poll<std::io::Error> {
        for _ in 0..ROUNDS {
            match ready!(queue.poll_receive(cx, buffer, |packet| packets.push_back(packet))) {
                Ok(moved) if moved.refused > 0 => {
                    worker.shared.metrics.dropped("device-refused", moved.refused as u64);
                }
                Ok(_) => {}
                Err(error) => return Poll::Ready(error),
            }
            self.device.deliver(worker, elsewhere, packets, run);
        }
        yield_to_network(cx);
        Poll::Pending
    }

    /// Drops a packet of the device that no session carries, and reports "no route" to its sender.
    pub(crate) fn refuse(&self, worker: &WorkerContext, packet: &[u8], reason: &'static str) {
        worker.shared.metrics.dropped(reason, 1);
        let error = ip::parse(packet)
            .ok()
            .and_then(|header| ip::icmp_error(packet, &header, IcmpError::NoRoute, header.destination));
        if let Some(error) = error.filter(|_| worker.may_send_icmp_error()) {
            // The report may be lost, like any ICMP error.
            let _ = self.queue.try_send(&[error.into()]);
        }
    }
}
