// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! `ethtool`, its `-i`, `-g` and `-S`.

use crate::{
    net::{
        device::{
            Device,
            Driver as _,
            Locked,
            Stats, //
        },
        ethtool::{
            Info,
            Ops,
            Rings, //
        },
    },
    port::Port,
    stats::{
        Counters,
        Questions, //
    }, //
};

/// The eight that the C driver shows, in its order; ours follow.
const CLASSIC: [&str; 8] = [
    "rx_packets",
    "tx_packets",
    "rx_bytes",
    "tx_bytes",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
    "multicast",
];

/// Those of the queues, of which there is one either way: they add up to the interface's own.
const QUEUES: [&str; 7] = [
    "tx_queue_0_packets",
    "tx_queue_0_bytes",
    "tx_queue_0_drops",
    "tx_queue_0_stops",
    "rx_queue_0_packets",
    "rx_queue_0_bytes",
    "rx_queue_0_drops",
];

const COUNT: usize = CLASSIC.len() + QUEUES.len() + Counters::NAMES.len() + Questions::NAMES.len();

const NAMES: [&str; COUNT] = {
    let mut names = [""; COUNT];
    let mut at = 0;
    while at < COUNT {
        names[at] = if at < CLASSIC.len() {
            CLASSIC[at]
        } else if at < CLASSIC.len() + QUEUES.len() {
            QUEUES[at - CLASSIC.len()]
        } else if at < CLASSIC.len() + QUEUES.len() + Counters::NAMES.len() {
            Counters::NAMES[at - CLASSIC.len() - QUEUES.len()]
        } else {
            Questions::NAMES[at - CLASSIC.len() - QUEUES.len() - Counters::NAMES.len()]
        };
        at += 1;
    }
    names
};

impl Ops for Port {
    const COUNTERS: &'static [&'static str] = &NAMES;

    fn info(dev: &Device<Self>, info: &mut Info<'_>) {
        info.driver(b"ipoib_rs");
        let mut firmware = [0; 32];
        let len = dev.hca.firmware(&mut firmware);
        info.firmware(&firmware[..len]);
        info.bus(dev.hca.parent().name().unwrap_or(dev.hca.name()).to_bytes());
    }

    fn speed(locked: &mut Locked<'_, Self>) -> Option<u32> {
        Some(locked.control().mbps()).filter(|&mbps| mbps != 0)
    }

    fn rings(dev: &Device<Self>) -> Rings {
        let sizes = dev.transport.sizes();
        Rings {
            rx: sizes.recv,
            rx_max: crate::RECV_RING.1,
            tx: sizes.send,
            tx_max: crate::SEND_RING.1,
        }
    }

    fn counters(dev: &Device<Self>, values: &mut [u64]) {
        let mut stats = Stats::default();
        Port::stats(dev, &mut stats);
        let classic: [u64; CLASSIC.len()] = [
            stats.rx_packets,
            stats.tx_packets,
            stats.rx_bytes,
            stats.tx_bytes,
            stats.tx_errors,
            stats.rx_dropped,
            stats.tx_dropped,
            stats.multicast,
        ];
        let queues: [u64; QUEUES.len()] = [
            stats.tx_packets,
            stats.tx_bytes,
            stats.tx_dropped,
            dev.stats.tx_ring_full.get(),
            stats.rx_packets,
            stats.rx_bytes,
            stats.rx_dropped,
        ];
        let mut out = values.iter_mut();
        for (from, to) in classic.into_iter().chain(queues).zip(out.by_ref()) {
            *to = from;
        }
        let mut next = |value| {
            if let Some(to) = out.next() {
                *to = value;
            }
        };
        dev.stats.each(&mut next);
        dev.questions.each(&mut next);
    }
}
