// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What a device may do to its users and Soft-RoCE never does, for tests.
//!
//! The queues ask here, in test builds only, before they believe the device. A fault concerns one
//! object, which is told by its address, and happens once. No object of the device is touched, so
//! others that use it notice nothing.

use kernel::{
    prelude::*,
    sync::atomic::{
        ordering::{
            Acquire,
            Full,
            Relaxed,
            Release, //
        },
        Atomic, //
    }, //
};

/// A fault that waits for its moment.
pub(crate) struct Fault(Atomic<usize>);

impl Fault {
    const fn new() -> Self {
        Self(Atomic::new(0))
    }

    /// Sets the fault up for the object at `address`.
    pub(super) fn prepare(&self, address: usize) {
        self.0.store(address, Release);
    }

    /// Whether the fault happens now, to the object at `address`. Any context.
    pub(super) fn strikes(&self, address: usize) -> bool {
        self.0.cmpxchg(address, 0, Full).is_ok()
    }

    /// Whether the fault still waits for its moment.
    pub(crate) fn waits(&self) -> bool {
        self.0.load(Acquire) != 0
    }

    /// Calls the fault off.
    pub(crate) fn cancel(&self) {
        self.prepare(0);
    }
}

/// What the network stack answers to the question for a next hop.
pub(crate) struct Answer(Atomic<u64>);

impl Answer {
    const SILENCE: u64 = 1 << 48;
    const FOUND: u64 = 1 << 49;

    /// From now on nobody answers, or the next hop has the Ethernet address `mac`.
    pub(crate) fn set(&self, mac: Option<[u8; 6]>) {
        let value = match mac {
            None => Self::SILENCE,
            Some(mac) => mac.iter().fold(Self::FOUND >> 48, |value, &byte| {
                value << 8 | u64::from(byte)
            }),
        };
        self.0.store(value, Release);
    }

    /// From now on the stack itself is asked.
    pub(crate) fn cancel(&self) {
        self.0.store(0, Release);
    }

    /// The answer, if it is made up.
    pub(super) fn get(&self) -> Option<Result<[u8; 6]>> {
        match self.0.load(Acquire) {
            0 => None,
            Self::SILENCE => Some(Err(ETIMEDOUT)),
            value => {
                let [_, _, mac @ ..] = value.to_be_bytes();
                Some(Ok(mac))
            }
        }
    }
}

/// For all RoCE ports.
pub(crate) static NEXT_HOP: Answer = Answer(Atomic::new(0));

/// The event of a completion queue that is lost.
pub(crate) static LOST_EVENT: Fault = Fault::new();

/// A fault that there is while it is on.
pub(crate) struct Habit {
    on: Atomic<bool>,
    hits: Atomic<u32>,
}

impl Habit {
    const fn new() -> Self {
        Self {
            on: Atomic::new(false),
            hits: Atomic::new(0),
        }
    }

    pub(crate) fn set(&self, on: bool) {
        self.on.store(on, Release);
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Acquire)
    }

    /// Whether it happens to the object with this number, as to every second one. Any context.
    pub(super) fn strikes(&self, number: u32) -> bool {
        let strikes = self.is_on() && number % 2 == 1;
        if strikes {
            self.hits.add(1, Relaxed);
        }
        strikes
    }

    /// How often it happened.
    pub(crate) fn hits(&self) -> u32 {
        self.hits.load(Acquire)
    }
}

/// Queue pairs that do not say that they receive no more.
pub(crate) static LOST_LAST_RECEIVES: Habit = Habit::new();

/// No device has shared receive queues.
pub(crate) static NO_SRQ: Habit = Habit::new();

/// No device can connect.
pub(crate) static NO_CONNECTIONS: Habit = Habit::new();

/// Who ends connections does not wait for their sends.
pub(crate) static NO_DRAIN: Habit = Habit::new();

/// The queue pair that refuses sends.
pub(crate) static REFUSED_SENDS: Fault = Fault::new();
