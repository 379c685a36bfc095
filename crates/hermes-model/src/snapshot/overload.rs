//! Overload: signals of it, and the steps that the node takes.

use std::time::Duration;

/// A step against overload. The later ones cost more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Buffers shrink to half, and idle connections close.
    Shrink,
    /// Sessions of low importance are refused.
    Shed,
    /// All but sessions of high importance are refused.
    Refuse,
    /// No connection is accepted: new ones wait in the kernel.
    Stop,
}

impl Step {
    /// All steps, in the order of their cost.
    pub const ALL: [Step; 4] = [Step::Shrink, Step::Shed, Step::Refuse, Step::Stop];

    /// The step's key in the document, and its label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Step::Shrink => "shrink",
            Step::Shed => "shed",
            Step::Refuse => "refuse",
            Step::Stop => "stop",
        }
    }
}

/// The signals of overload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overload {
    /// Bytes of memory. Without a limit: those that the control group or the machine has.
    pub memory: Signal<u64>,
    /// Open file descriptors. Without a limit: those that the process may open.
    pub descriptors: Signal<u64>,
    /// Time that ready work of a worker waits.
    pub delay: Signal<Duration>,
}

/// A signal: its limit, and the percentage of the limit at which each step begins, in the order of [`Step::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal<T> {
    /// The value that counts as 100 percent. `None`: that of the system.
    pub limit: Option<T>,
    /// The percentage of the limit at which each step begins.
    pub steps: [u16; 4],
}

/// How late a route's sessions are refused under overload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Importance {
    /// Among the first.
    Low,
    /// After those of low importance. Requests of an urgency below the default (RFC 9218) count as low.
    #[default]
    Normal,
    /// Never.
    High,
}
