// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The verbs against a real RoCE device: a queue pair that sends to itself.
//!
//! The suite finds a device by a client of its own, and fails where there is none with an active
//! port: load one (Soft-RoCE will do) before the module.

use super::{
    ah::{
        self,
        Ah,
        Reaper, //
    },
    client::{
        self,
        Client,
        Registry, //
    },
    cq::{
        Completions,
        Napi,
        NapiCq,
        Poll,
        Status, //
    },
    device::{
        Device,
        Protocol, //
    },
    pd::Pd,
    qp::{
        Caps,
        Qp, //
    },
    queue::{
        self,
        Destination,
        RecvQueue,
        SendCompleter,
        SendQueue, //
    },
    resolve,
    Gid,
    PortNum,
    QKey, //
};
use crate::{
    net::{
        self,
        device::{
            self as netdev,
            Link,
            Locked,
            Neighbourhood,
            Registration,
            Setup,
            UnregisteredDevice, //
        },
        ethtool,
        rtnl::{
            Attributes,
            LinkKind,
            LinkOps,
            Rtnl, //
        },
        skb::{
            NewSkb,
            Skb, //
        },
    },
    wire, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Relaxed,
                Release, //
            },
            Atomic, //
        },
        new_mutex,
        Arc,
        Mutex, //
    },
    time::Delta, //
};

const QKEY: QKey = QKey(0x1234);
const FRONT: usize = 44;
const RING: u32 = 8;

/// What the handlers saw.
struct Loop {
    qp: Arc<Qp>,
    send: Arc<NapiCq<SendSide>>,
    recv: Arc<NapiCq<RecvSide>>,
    sent: Atomic<u32>,
    received: Atomic<u32>,
    wrong: Atomic<u32>,
    flushed: Atomic<u32>,
}

struct SendSide(SendCompleter);

impl Poll for SendSide {
    type Driver = Loop;

    fn poll(
        &mut self,
        dev: &netdev::Device<Loop>,
        _napi: Napi<'_>,
        cq: &mut Completions<'_>,
        budget: usize,
    ) -> usize {
        loop {
            let (batch, _) = cq.next(4);
            if batch.is_empty() {
                return 0;
            }
            for wc in batch {
                match (self.0.complete(wc.id(), budget), wc.status()) {
                    (Some(done), Status::Success) => dev.sent.add(done.packets, Relaxed),
                    (Some(done), Status::Flushed) => dev.flushed.add(done.packets, Relaxed),
                    _ => dev.wrong.add(1, Relaxed),
                }
            }
        }
    }
}

struct RecvSide {
    queue: RecvQueue<FRONT>,
    gid: Gid,
}

/// The byte at `at` of packet `number`.
fn pattern(number: u8, at: usize) -> u8 {
    number.wrapping_add((at % 251) as u8)
}

impl Poll for RecvSide {
    type Driver = Loop;

    fn poll(
        &mut self,
        dev: &netdev::Device<Loop>,
        _napi: Napi<'_>,
        cq: &mut Completions<'_>,
        budget: usize,
    ) -> usize {
        let mut done = 0;
        while done < budget {
            let (batch, _) = cq.next(budget - done);
            if batch.is_empty() {
                break;
            }
            done += batch.len();
            for wc in batch {
                let Some(slot) = self.queue.take(wc.id()) else {
                    dev.wrong.add(1, Relaxed);
                    continue;
                };
                if wc.status() != Status::Success {
                    dev.flushed.add(1, Relaxed);
                    continue;
                }
                let len = wc.byte_len().saturating_sub(FRONT);
                let front = slot.front();
                let number = front[40];
                let gids = super::cq::grh_gids(front);
                let right = wc.has_grh()
                    && gids == Some((self.gid, self.gid))
                    && wc.src_qp() == dev.qp.qpn().0
                    && slot
                        .body(len)
                        .iter()
                        .enumerate()
                        .all(|(at, &byte)| byte == pattern(number, at));
                if right {
                    dev.received.add(1, Relaxed);
                } else {
                    dev.wrong.add(1, Relaxed);
                }
            }
            // In ERR a receive would be flushed at once, again and again.
            if dev.flushed.load(Relaxed) == 0 && self.queue.post(&dev.qp).is_err() {
                dev.wrong.add(1, Relaxed);
            }
        }
        done
    }
}

impl ethtool::Ops for Loop {
    const COUNTERS: &'static [&'static str] = &[];

    fn info(_dev: &netdev::Device<Self>, _info: &mut ethtool::Info<'_>) {}

    fn rings(_dev: &netdev::Device<Self>) -> ethtool::Rings {
        ethtool::Rings {
            rx: RING,
            rx_max: RING,
            tx: RING,
            tx_max: RING,
        }
    }

    fn counters(_dev: &netdev::Device<Self>, _values: &mut [u64]) {}
}

impl netdev::Driver for Loop {
    type Control = ();
    type Tx = SendQueue;

    const ADDRESS_LEN: usize = 20;
    const HEADER_LEN: usize = 24;

    fn open(_locked: &mut Locked<'_, Self>) -> Result {
        Err(EOPNOTSUPP)
    }

    fn stop(_locked: &mut Locked<'_, Self>) {}

    fn start_xmit(_dev: &netdev::Device<Self>, _tx: &mut SendQueue, _skb: Skb) {}

    fn tx_timeout(_dev: &netdev::Device<Self>) {}

    fn groups_changed(
        _locked: &mut Locked<'_, Self>,
        _rtnl: &Rtnl,
        _groups: net::device::Groups<'_>,
    ) -> Result {
        Ok(())
    }

    fn change_mtu(_locked: &mut Locked<'_, Self>, mtu: u32) -> Result<u32> {
        Ok(mtu)
    }

    fn stats(_dev: &netdev::Device<Self>, _stats: &mut netdev::Stats) {}

    fn write_header(_header: &mut [u8], _ethertype: u16, _destination: &[u8]) {}
}

impl LinkKind for Loop {
    const ATTRIBUTES: usize = 0;

    fn fill(_dev: &netdev::Device<Self>, _attributes: &mut Attributes<'_>) -> Result {
        Ok(())
    }
}

/// A queue pair on a port, and all that belongs to it.
struct Rig {
    dev: Registration<Loop>,
    reaper: Arc<Reaper>,
    port: PortNum,
    gid: Gid,
    gid_index: u8,
}

impl Rig {
    fn new(device: &Arc<Device>, port: PortNum, link_ops: &Arc<LinkOps<Loop>>) -> Result<Self> {
        let mac = device
            .lower(port)
            .and_then(|lower| lower.mac())
            .ok_or(ENODEV)?;
        let gid = Gid(wire::gid_of_mac(&mac));
        let attr = device.query_port(port)?;
        let gid_index = device
            .find_roce_v2_gid(port, attr.gid_table_len, &gid)
            .ok_or(ENOENT)?;
        let pd = Pd::new(device.clone())?;
        let unregistered = UnregisteredDevice::<Loop>::new(c"ibtest%d")?;
        let (half, completer) = queue::send_queue(device, RING, 0)?;
        let send = NapiCq::new(&unregistered, device.clone(), RING, 0, SendSide(completer))?;
        let recv = NapiCq::new(
            &unregistered,
            device.clone(),
            RING,
            1,
            RecvSide {
                queue: RecvQueue::new(pd.clone(), RING)?,
                gid,
            },
        )?;
        let caps = Caps {
            send_wr: RING,
            recv_wr: RING,
            send_sge: 2,
            recv_sge: 2,
            segmentation: false,
        };
        let qp = Qp::new(pd.clone(), send.clone(), recv.clone(), caps)?;
        let sends = half.with(qp.clone())?;
        let reaper = Reaper::new(pd, sends.progress())?;
        let setup = Setup {
            address: &[0; 20],
            broadcast: &[0xff; 20],
            hardware_type: 32,
            mtu: 1000,
            min_mtu: 68,
            max_mtu: 1000,
            port: 0,
            scatter_gather: false,
            offloads: Default::default(),
            parent: device.parent(),
            watchdog: 10,
        };
        let dev = unregistered.register(
            &setup,
            &Neighbourhood::initial(),
            link_ops.clone(),
            Arc::pin_init(Link::new(), GFP_KERNEL)?,
            Ok(Loop {
                qp,
                send,
                recv,
                sent: Atomic::new(0),
                received: Atomic::new(0),
                wrong: Atomic::new(0),
                flushed: Atomic::new(0),
            }),
            (),
            sends,
        )?;
        Ok(Self {
            dev,
            reaper,
            port,
            gid,
            gid_index,
        })
    }

    fn start(&self, life: u32) -> Result {
        let dev = &*self.dev;
        let mut locked = dev.lock();
        if let Some((side, _)) = dev.send.quiet(&mut locked) {
            side.0.begin(life);
        }
        dev.tx_lock().begin(life);
        dev.qp.init(self.port, 0, QKEY)?;
        let (side, _) = dev.recv.quiet(&mut locked).ok_or(EBUSY)?;
        side.queue.begin(life);
        side.queue.post(&dev.qp)?;
        check!(side.queue.waiting() == RING as usize);
        dev.qp.ready()?;
        dev.send.enable(&mut locked);
        dev.recv.enable(&mut locked);
        // Enabled handlers belong to NAPI.
        check!(dev.recv.quiet(&mut locked).is_none());
        Ok(())
    }

    fn stop(&self, life: u32) -> Result<u32> {
        let dev = &*self.dev;
        let mut locked = dev.lock();
        dev.send.disable(&mut locked);
        dev.recv.disable(&mut locked);
        dev.qp.error()?;
        dev.qp.reset()?;
        self.reclaim(&mut locked, life)
    }

    fn reclaim(&self, locked: &mut Locked<'_, Loop>, life: u32) -> Result<u32> {
        let dev = &*self.dev;
        let mut lost = 0;
        if let Some((side, mut cq)) = dev.send.quiet(locked) {
            while cq.next(4).1 {}
            lost = side.0.begin(life);
        }
        if let Some((side, mut cq)) = dev.recv.quiet(locked) {
            while cq.next(4).1 {}
            side.queue.begin(life);
            check!(side.queue.waiting() == 0);
            side.queue.release();
        }
        Ok(lost)
    }

    fn attr(&self) -> Result<ah::Attr> {
        Ok(ah::Attr {
            gid: self.gid,
            global: true,
            sgid_index: self.gid_index,
            hop_limit: 64,
            dmac: wire::mac_of_gid(&self.gid.0).ok_or(EINVAL)?,
            ..ah::Attr::default()
        })
    }

    fn next_hop(&self, gid: &Gid) -> Result<resolve::NextHop> {
        let device = self.dev.qp.pd().device();
        resolve::next_hop(device, self.port, self.gid_index, gid)
    }

    /// Posts one packet of `len` bytes behind four that carry its number.
    fn send(&self, ah: &Ah, number: u8, len: usize) -> Result {
        let mut skb = NewSkb::alloc(len + 4).ok_or(ENOMEM)?;
        check!(skb.append(&[number, 0, 0, 0]));
        for at in 0..len {
            check!(skb.append(&[pattern(number, at)]));
        }
        let mut tx = self.dev.tx_lock();
        let to = Destination {
            ah,
            qpn: self.dev.qp.qpn(),
            qkey: QKEY,
        };
        tx.push(skb.finish(0, 0, net::skb::PacketType::Host), &to)
            .map_err(|_| ENOBUFS)?;
        tx.flush().map(|_| ())
    }
}

/// Waits until `done` holds.
fn eventually(done: impl Fn() -> bool) -> bool {
    within(3000, done)
}

/// Waits, up to so many hundredths of a second, until `done` holds.
fn within(hundredths: usize, done: impl Fn() -> bool) -> bool {
    for _ in 0..hundredths {
        if done() {
            return true;
        }
        kernel::time::delay::fsleep(Delta::from_millis(10));
    }
    false
}

type Test = fn(&Rig) -> Result;

/// Runs one test on each RoCE port; there is a client per run.
struct Probe {
    test: Test,
    link_ops: Arc<LinkOps<Loop>>,
    outcome: Arc<Outcome>,
}

#[pin_data]
struct Outcome {
    #[pin]
    result: Mutex<Option<Result>>,
}

impl Client for Probe {
    type Data = ();

    const NAME: &'static CStr = c"ipoib_rs_selftest";

    fn registry() -> &'static Registry<Self> {
        static REGISTRY: Registry<Probe> = Registry::new();
        &REGISTRY
    }

    fn add(&self, device: Arc<Device>) -> Result {
        for port in device.ports() {
            if device.protocol(port) != Protocol::RoCE || !device.query_port(port)?.active {
                continue;
            }
            let result = Rig::new(&device, port, &self.link_ops).and_then(|rig| (self.test)(&rig));
            let mut outcome = self.outcome.result.lock();
            if !matches!(*outcome, Some(Err(_))) {
                *outcome = Some(result);
            }
        }
        Err(EOPNOTSUPP)
    }
}

fn on_each_port(test: Test) -> Result {
    let outcome = Arc::pin_init(
        pin_init!(Outcome { result <- new_mutex!(None) }),
        GFP_KERNEL,
    )?;
    let link_ops = LinkOps::register(c"ipoib_rs_test")?;
    drop(client::Registration::new(Probe {
        test,
        link_ops,
        outcome: outcome.clone(),
    })?);
    let result = outcome.result.lock().take();
    result.unwrap_or(Err(ENODEV))
}

/// The Ethernet below may need a moment until it has a route.
fn until_delivered(rig: &Rig, ah: &Ah) -> Result {
    for life in 1..50 {
        rig.start(life)?;
        rig.send(ah, 0, 10)?;
        let told = || rig.dev.received.load(Acquire) != 0 || rig.dev.flushed.load(Acquire) != 0;
        if within(200, told) && rig.dev.received.load(Acquire) != 0 {
            rig.dev.received.store(0, Release);
            rig.dev.flushed.store(0, Release);
            rig.dev.sent.store(0, Release);
            return Ok(());
        }
        rig.stop(life)?;
        rig.dev.flushed.store(0, Release);
        kernel::time::delay::fsleep(Delta::from_millis(100));
    }
    Err(ETIMEDOUT)
}

#[kernel::macros::kunit_tests(ipoib_rs_verbs)]
mod tests {
    use super::*;

    /// Made and destroyed, never used.
    #[test]
    fn create_and_destroy() -> Result {
        on_each_port(|rig| {
            check!(rig.dev.qp.qpn().0 > 1);
            check!(rig.dev.qp.max_send_sge() >= 2);
            Ok(())
        })
    }

    /// Three times around the ring, every byte compared.
    #[test]
    fn post_poll_and_wrap() -> Result {
        on_each_port(|rig| {
            let ah = Ah::new(&rig.reaper, rig.port, &rig.attr()?)?;
            until_delivered(rig, &ah)?;
            let dev = &*rig.dev;
            for number in 0..24u8 {
                let len = if number % 3 == 0 {
                    900
                } else {
                    usize::from(number)
                };
                rig.send(&ah, number, len)?;
                let wanted = u32::from(number) + 1;
                check!(eventually(|| dev.received.load(Acquire) == wanted));
                check!(eventually(|| dev.sent.load(Acquire) >= wanted));
            }
            check!(dev.wrong.load(Acquire) == 0);
            check!(dev.flushed.load(Acquire) == 0);
            rig.stop(100)?;
            Ok(())
        })
    }

    /// Buffers come back from a queue pair that was reset, and it works again.
    #[test]
    fn reset_reclaims_everything() -> Result {
        on_each_port(|rig| {
            let ah = Ah::new(&rig.reaper, rig.port, &rig.attr()?)?;
            until_delivered(rig, &ah)?;
            for life in 100..110 {
                rig.stop(life)?;
                rig.start(life + 1)?;
                let before = rig.dev.received.load(Acquire);
                rig.send(&ah, 7, 100)?;
                check!(eventually(|| rig.dev.received.load(Acquire) == before + 1));
            }
            check!(rig.dev.wrong.load(Acquire) == 0);
            rig.stop(200)?;
            Ok(())
        })
    }

    /// A queue pair in ERR flushes what is posted, and says so.
    #[test]
    fn error_flushes() -> Result {
        on_each_port(|rig| {
            let ah = Ah::new(&rig.reaper, rig.port, &rig.attr()?)?;
            until_delivered(rig, &ah)?;
            rig.dev.qp.error()?;
            check!(eventually(|| rig.dev.flushed.load(Acquire) == RING));
            rig.stop(100)?;
            Ok(())
        })
    }

    /// The provider has the Ethernet address and the hop limit that it was given.
    #[test]
    fn address_handles_are_complete() -> Result {
        on_each_port(|rig| {
            let wanted = rig.attr()?;
            let ah = Ah::new(&rig.reaper, rig.port, &wanted)?;
            let got = ah.query()?;
            check!(ah.given() == Some(wanted));
            check!(got.gid == wanted.gid);
            check!(got.global && got.hop_limit == 64);
            check!(got.sgid_index == wanted.sgid_index);
            Ok(())
        })
    }

    /// A destination that nobody knows has no next hop, and the question ends.
    #[test]
    fn next_hop_of_a_gid() -> Result {
        on_each_port(|rig| {
            let ah = Ah::new(&rig.reaper, rig.port, &rig.attr()?)?;
            until_delivered(rig, &ah)?;
            rig.stop(100)?;
            let nowhere = Gid([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
            let asked = rig.next_hop(&nowhere);
            check!(asked.is_err());
            Ok(())
        })
    }

    /// A handle is destroyed only when the sends before its end are done.
    #[test]
    fn handles_wait_for_their_sends() -> Result {
        on_each_port(|rig| {
            let ah = Ah::new(&rig.reaper, rig.port, &rig.attr()?)?;
            drop(ah);
            check!(rig.reaper.reap() == 0);
            let ah = Ah::new(&rig.reaper, rig.port, &rig.attr()?)?;
            until_delivered(rig, &ah)?;
            rig.stop(100)?;
            // Chained, not posted: the ring has it until it is taken back.
            rig.dev.tx_lock().begin(101);
            let mut skb = NewSkb::alloc(4).ok_or(ENOMEM)?;
            check!(skb.append(&[0; 4]));
            let to = Destination {
                ah: &ah,
                qpn: rig.dev.qp.qpn(),
                qkey: QKEY,
            };
            check!(rig
                .dev
                .tx_lock()
                .push(skb.finish(0, 0, net::skb::PacketType::Host), &to)
                .is_ok());
            drop(ah);
            check!(rig.reaper.reap() == 1);
            check!(rig.reclaim(&mut rig.dev.lock(), 102)? == 1);
            rig.dev.tx_lock().begin(103);
            check!(rig.reaper.reap() == 0);
            Ok(())
        })
    }

    /// A hundred of everything, and RTNL in between.
    #[test]
    fn a_hundred_times() -> Result {
        on_each_port(|rig| {
            for _ in 0..100 {
                let ah = Ah::new(&rig.reaper, rig.port, &rig.attr()?)?;
                drop(Rtnl::lock());
                drop(ah);
            }
            check!(rig.reaper.reap() == 0);
            Ok(())
        })
    }
}
