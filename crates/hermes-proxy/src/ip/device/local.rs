//! The queues of a device on one worker: who reads them, and what goes to and fro between processes that have it.
//!
//! In: packets of the kernel, and those that the process before us, or the one after us, passes on. Out: each to the
//! session that holds its destination, here or in one of those two. Never: whose an address is; that is the device's.

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
use crate::signal::Signal;
use crate::worker::{Shared, Worker, go_on_later};

/// Reads of one turn before other tasks get theirs.
const ROUNDS: usize = 4;

/// What a worker has of a device.
pub(crate) struct Share {
    pub(crate) device: Arc<Device>,
    pub(crate) queue: IdleQueue,
    /// More of them to be read.
    pub(crate) more: Vec<IdleQueue>,
    /// To the sessions of the process before us.
    pub(crate) before: Option<IdleQueue>,
}

impl Share {
    fn start(self, worker: &Worker) -> std::io::Result<LocalDevice> {
        Ok(LocalDevice {
            device: self.device,
            queue: self.queue.start()?,
            more: self.more.into_iter().map(IdleQueue::start).collect::<Result<_, _>>()?,
            shared: worker.shared.clone(),
            before: RefCell::new(self.before.map(IdleQueue::start).transpose()?.map(Rc::new)),
            after: RefCell::default(),
            alone: Signal::default(),
            reading: OnceCell::new(),
        })
    }
}

/// The devices of one worker.
#[derive(Default)]
pub(crate) struct Devices {
    here: RefCell<HashMap<Arc<str>, Rc<LocalDevice>>>,
    /// There is another one.
    came: Notify,
}

impl Devices {
    /// Begins to read queues.
    pub(crate) fn begin(&self, worker: &Rc<Worker>, shares: Vec<Share>) {
        for share in shares {
            let device = share.device.clone();
            match share.start(worker).map(Rc::new) {
                Ok(local) => {
                    if local.before.borrow().is_some() {
                        let elder = Elder::of(&worker.shared);
                        device.awaits();
                        worker.spawn(local.clone().outlive(worker.clone(), elder));
                    }
                    let reading = worker.spawn(read(device.clone(), Rc::downgrade(&local), worker.clone()));
                    // It was empty.
                    let _ = local.reading.set(reading);
                    self.here.borrow_mut().insert(device.name.clone(), local);
                    self.came.notify_waiters();
                    let here = worker.clone();
                    worker.spawn(async move {
                        device.unheld().await;
                        here.devices.forget(&device);
                    });
                }
                Err(error) => tracing::error!(device = %device.name, %error, "a device cannot be read here"),
            }
        }
    }

    /// Another process reads the queues from now on; what it has no session for comes by these, and what nobody here
    /// has one for any more goes back by them.
    pub(crate) fn part(&self, worker: &Rc<Worker>, passages: Vec<(Arc<str>, IdleQueue)>) {
        // Others are devices that no document names: they are not handed over, and are read for the sessions that are left.
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
                        // It is gone, and nobody reads the device for who is left: they begin anew elsewhere.
                        local.after.take();
                        local.alone.set(());
                        local.device.finish_sessions();
                    });
                }
                Err(error) => tracing::error!(device = %name, %error, "sessions here get no packets any more"),
            }
        }
    }

    /// There may be another one of its name already.
    fn forget(&self, device: &Arc<Device>) {
        self.here.borrow_mut().retain(|_, local| !Arc::ptr_eq(&local.device, device));
    }

    /// The device of this name.
    pub(crate) fn get(&self, name: &str) -> Option<Rc<LocalDevice>> {
        self.here.borrow().get(name).cloned()
    }

    /// The device of this name, also where somebody has just deleted it and it is not made again yet. `None`: it was not
    /// by then.
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

/// The process before us gets its packets by us as long as this lives.
struct Elder(Arc<Shared>);

impl Elder {
    fn of(shared: &Arc<Shared>) -> Self {
        shared.elders.fetch_add(1, Ordering::Relaxed);
        Self(shared.clone())
    }
}

impl Drop for Elder {
    fn drop(&mut self) {
        self.0.elders.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where else sessions of a device are: in the process before us, as long as that lives, else in the one after us.
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
    /// More of them to be read, of a process that had more workers.
    more: Vec<Queue>,
    /// For what nobody else is left to count.
    pub(in crate::ip) shared: Arc<Shared>,
    /// To the sessions of the process before us, while that lives.
    before: RefCell<Option<Rc<Queue>>>,
    /// To those of the process after us, on the worker that reads what comes from there.
    after: RefCell<Option<Rc<Queue>>>,
    /// Of those two the later one is gone, and the earlier one is to hear of it.
    alone: Signal<()>,
    /// What reads the queues, as long as somebody has the device.
    reading: OnceCell<AbortHandle>,
}

impl Drop for LocalDevice {
    fn drop(&mut self) {
        self.end_reading();
    }
}

/// Reads the queue of this worker, once it is ours to read, until the device is gone or nobody here has it.
/// Sessions of a device that somebody deleted end: those that come again find the one that is made in its place.
async fn read(device: Arc<Device>, local: Weak<LocalDevice>, worker: Rc<Worker>) {
    let mut reads = device.reads.subscribe();
    // The device has the other end.
    drop(reads.wait_for(|reads| *reads).await);
    let mut delivery = Delivery::default();
    let read = poll_fn(|cx| {
        let Some(local) = local.upgrade() else { return Poll::Ready(Ok(())) };
        let elsewhere = local.elsewhere();
        let queues = [&local.queue].into_iter().chain(&local.more);
        let read = queues.map(|queue| local.poll_deliver(cx, &worker, queue, &elsewhere, &mut delivery));
        // All of them are asked, so that each wakes us.
        read.fold(Poll::Pending, |so_far, next| if so_far.is_ready() { so_far } else { next.map(Err) })
    });
    tokio::select! {
        read = read => match read {
            Ok(()) => return,
            // A busy reader may be told before the network's watcher is.
            Err(_) if !device.net.is_there() => {}
            Err(error) => {
                tracing::warn!(device = %device.name, %error, "a device can be read no more");
                return;
            }
        },
        () = device.deleted(&worker.shared) => {}
    }
    worker.devices.forget(&device);
    device.finish_sessions();
    // Each worker's reader learns of it.
    if device.reads.send_replace(false) {
        tracing::warn!(device = %device.name, "somebody has deleted a device: its sessions here end");
        worker.shared.device_lost.notify_one();
    }
}

/// What whoever reads a device needs to have.
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

    /// Waits for the end of the process before us. What comes from it was for a session that ended there while it was
    /// on its way, and is for one of ours now, or of those after us.
    async fn outlive(self: Rc<Self>, worker: Rc<Worker>, _elder: Elder) {
        let Some(before) = self.before.borrow().clone() else { return };
        // A document that names it again finds it: its queues are open as long as this waits.
        let _hold = self.device.hold();
        let mut delivery = Delivery::default();
        let came_back = poll_fn(|cx| self.poll_deliver(cx, &worker, &before, &self.later(), &mut delivery));
        tokio::select! {
            _ = came_back => {}
            () = self.alone.wait() => {}
        }
        self.before.take();
        // It may have ended before it parted: only then it is known what it had, and that the device is ours.
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

    /// For what the process before us has no session for.
    fn later(&self) -> Elsewhere {
        self.after.borrow().clone().map_or(Elsewhere::Nowhere, Elsewhere::After)
    }

    /// Posts packets to the sessions that hold their destinations, here or in another process.
    pub(in crate::ip) fn deliver(&self, worker: &Worker, packets: &mut VecDeque<Bytes>, run: &mut Vec<Bytes>) {
        self.device.deliver(worker, &self.elsewhere(), packets, run);
    }

    /// Delivers what comes by a queue. Ready when its other end is gone.
    fn poll_deliver(
        &self,
        cx: &mut Context<'_>,
        worker: &Worker,
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
        go_on_later(cx);
        Poll::Pending
    }

    /// Drops a packet of the device that nobody can carry, and tells its sender that no way leads there.
    pub(crate) fn refuse(&self, worker: &Worker, packet: &[u8], reason: &'static str) {
        worker.shared.metrics.dropped(reason, 1);
        let error = ip::parse(packet)
            .ok()
            .and_then(|header| ip::icmp_error(packet, &header, IcmpError::NoRoute, header.destination));
        if let Some(error) = error.filter(|_| worker.takes_answer()) {
            // As any answer it may be lost.
            let _ = self.queue.try_send(&[error.into()]);
        }
    }
}
