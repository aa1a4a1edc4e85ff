// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Interfaces of the driver on a RoCE device that does what Soft-RoCE never does.
//!
//! Each test has an interface of its own beside the one that the loaded driver made for the same
//! port, and sends by the driver's own functions. The suite fails where there is no RoCE device with
//! an active port.

use super::*;
use crate::{
    ib::{
        client::{
            self,
            Client,
            Registry, //
        },
        fake, //
    },
    net::skb::{
        NewSkb,
        PacketType, //
    },
};
use kernel::time::Delta;

const RINGS: RingSizes = RingSizes {
    send: 128,
    recv: 128,
};

/// A GID that does not say where it is.
const ELSEWHERE: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

/// The ethertype of IPv4. No stack takes the packets of these tests: they have a bad header.
const PROTOCOL: u16 = 0x0800;

/// Waits, up to half a minute, until `done` holds.
fn eventually(mut done: impl FnMut() -> bool) -> bool {
    for _ in 0..3000 {
        if done() {
            return true;
        }
        kernel::time::delay::fsleep(Delta::from_millis(10));
    }
    false
}

/// An interface.
pub(crate) struct Rig {
    attached: Attached,
}

impl Rig {
    /// An interface that is up, and whose packets arrive.
    pub(crate) fn new(
        hca: &Arc<Hca>,
        number: PortNum,
        max_connections: usize,
        link_ops: &Arc<LinkOps<Port>>,
        watchers: &Arc<Watchers>,
    ) -> Result<Self> {
        let config = Config {
            rings: RINGS,
            max_connections,
            roce: true,
        };
        let attached = attach(hca, number, &config, link_ops, watchers)?;
        let rig = Self { attached };
        rig.interface().set_up(&Rtnl::lock(), true)?;
        check!(rig.works());
        Ok(rig)
    }

    pub(crate) fn interface(&self) -> &Registration<Port> {
        &self.attached.interface
    }

    /// The interface's own GID.
    pub(crate) fn gid(&self) -> Result<Gid> {
        Ok(self.interface().fabric.view()?.gid)
    }

    /// The hardware address.
    pub(crate) fn address(&self) -> Result<Address> {
        let dev = self.interface();
        let view = dev.fabric.view()?;
        Ok(own_address(&dev.transport, dev.cm.is_able(), &view))
    }

    /// The interface's own address, as of an interface that takes no connections.
    fn plain_address(&self) -> Result<Address> {
        let qpn = self.interface().transport.qp.qpn();
        Ok(Address::new(qpn.0, &self.gid()?.0))
    }

    /// A packet to the interface itself.
    pub(crate) fn packet(&self) -> Result<Skb> {
        Self::packet_to(&self.plain_address()?, 100)
    }

    /// A packet of so many bytes, as the stack hands it over.
    pub(crate) fn packet_to(to: &Address, len: usize) -> Result<Skb> {
        let mut header = [0; wire::HEADER_LEN];
        Port::write_header(&mut header, PROTOCOL, &to.0);
        let mut skb = NewSkb::alloc(wire::HEADER_LEN + len).ok_or(ENOMEM)?;
        check!(skb.append(&header));
        let mut left = len;
        while left != 0 {
            let part = left.min(256);
            check!(skb.append(&[0; 256][..part]));
            left -= part;
        }
        Ok(skb.finish(0, PROTOCOL, PacketType::Host))
    }

    /// Sends a packet to the interface itself.
    pub(crate) fn send(&self) -> Result {
        self.transmit(self.packet()?)
    }

    /// Sends a packet to another interface.
    fn send_to(&self, to: &Address) -> Result {
        self.transmit(Self::packet_to(to, 100)?)
    }

    /// Sends a packet as the stack does.
    pub(crate) fn transmit(&self, skb: Skb) -> Result {
        let dev = &**self.interface();
        let mut tx = dev.tx_lock();
        if !dev.queue_stopped() {
            Port::start_xmit(dev, &mut tx, skb);
        }
        Ok(())
    }

    /// Whether packets arrive. Those sent before the Ethernet below has its address are lost.
    pub(crate) fn works(&self) -> bool {
        let dev = &**self.interface();
        eventually(|| {
            let before = dev.stats.rx_own_echo.get();
            if !dev.carrier() || self.send().is_err() {
                return false;
            }
            kernel::time::delay::fsleep(Delta::from_millis(20));
            dev.stats.rx_own_echo.get() != before
        })
    }

    /// Whether nothing that was sent is still to complete.
    pub(crate) fn is_quiet(&self) -> bool {
        let progress = self.interface().transport.progress();
        progress.passed(progress.head())
    }

    /// Sends until the ring is full, with nobody to empty it.
    fn fill(&self) -> Result {
        let dev = &**self.interface();
        for _ in 0..2 * RINGS.send {
            if dev.queue_stopped() {
                break;
            }
            self.send()?;
        }
        // What is on its way does not help any more.
        kernel::time::delay::fsleep(Delta::from_millis(200));
        check!(dev.queue_stopped());
        Ok(())
    }

    /// Tells what there is to know when a test fails.
    pub(crate) fn describe(&self) {
        let dev = &**self.interface();
        let progress = self.interface().transport.progress();
        pr_info!(
            "{}: stopped {}, broken {}, outstanding {}, waiting {}, room in connections {}\n",
            dev.name(),
            dev.queue_stopped(),
            dev.is_broken(),
            progress.outstanding(),
            self.anyone_waits(),
            dev.cm.has_room()
        );
        let mut names = Counters::NAMES.iter();
        dev.stats.each(|value| {
            let name = names.next();
            if let (Some(name), 1..) = (name, value) {
                pr_info!("{}: {} {}\n", dev.name(), name, value);
            }
        });
    }

    /// Whether packets wait for a way.
    pub(crate) fn anyone_waits(&self) -> bool {
        self.interface().neighbours.anyone_waits()
    }

    /// No housekeeping until the interface is up again.
    pub(crate) fn stop_housekeeping(&self) {
        cancel_delayed_sync::<Worker, HOUSEKEEP>(&self.interface().worker);
    }

    /// The send queue's next completion raises no event.
    pub(crate) fn lose_event(&self) -> Result {
        let dev = &**self.interface();
        check!(eventually(|| self.is_quiet()));
        // Whose poll would do what the watchdog is to do.
        self.stop_housekeeping();
        dev.transport.lose_send_event();
        check!(eventually(|| {
            let lost = !fake::LOST_EVENT.waits();
            if !lost {
                let _ = self.send();
            }
            lost
        }));
        Ok(())
    }
}

type Test = fn(&Rig) -> Result;

/// Runs one test on the first RoCE port that is active; there is a client per run.
struct Probe {
    test: Test,
    link_ops: Arc<LinkOps<Port>>,
    watchers: Arc<Watchers>,
    outcome: Arc<Outcome>,
}

#[pin_data]
struct Outcome {
    #[pin]
    result: Mutex<Option<Result>>,
}

impl Client for Probe {
    type Data = ();

    const NAME: &'static CStr = c"ipoib_rs_port_selftest";

    fn registry() -> &'static Registry<Self> {
        static REGISTRY: Registry<Probe> = Registry::new();
        &REGISTRY
    }

    fn add(&self, hca: Arc<Hca>) -> Result {
        for port in hca.ports() {
            let mut outcome = self.outcome.result.lock();
            if outcome.is_none()
                && hca.protocol(port) == Protocol::RoCE
                && hca.query_port(port)?.active
            {
                *outcome = Some(
                    Rig::new(&hca, port, 4096, &self.link_ops, &self.watchers)
                        .and_then(|rig| (self.test)(&rig).inspect_err(|_| rig.describe())),
                );
            }
        }
        Err(EOPNOTSUPP)
    }
}

fn on_an_interface(test: Test) -> Result {
    let outcome = Arc::pin_init(
        pin_init!(Outcome { result <- new_mutex!(None) }),
        GFP_KERNEL,
    )?;
    drop(client::Registration::new(Probe {
        test,
        link_ops: LinkOps::register(c"ipoib_rs_test")?,
        watchers: Watchers::new()?,
        outcome: outcome.clone(),
    })?);
    fake::LOST_EVENT.cancel();
    fake::REFUSED_SENDS.cancel();
    fake::NEXT_HOP.cancel();
    let result = outcome.result.lock().take();
    result.unwrap_or(Err(ENODEV))
}

#[kernel::macros::kunit_tests(ipoib_rs_port)]
mod tests {
    use super::*;

    /// B11: the event of a completion is lost and the ring fills up. The watchdog looks at stopped
    /// queues with a carrier; what it calls repairs the interface, and every packet is accounted
    /// for.
    #[test]
    fn lost_event() -> Result {
        on_an_interface(|rig| {
            let dev = &**rig.interface();
            let (restarts, bad) = (dev.stats.qp_restarts.get(), dev.stats.bad_completions.get());
            rig.lose_event()?;
            let (sent, failed) = (dev.stats.tx_sent_packets.get(), dev.stats.tx_failed.get());
            rig.fill()?;
            check!(dev.carrier());
            check!(dev.stats.tx_timeouts.get() == 0);
            check!(dev.stats.tx_sent_packets.get() == sent);
            check!(dev.stats.qp_restarts.get() == restarts);

            Port::tx_timeout(dev);
            check!(eventually(|| dev.stats.qp_restarts.get() == restarts + 1));
            check!(eventually(|| !dev.queue_stopped()));
            check!(dev.carrier());
            // They were sent, although nobody had been told.
            check!(dev.stats.tx_failed.get() == failed);
            check!(dev.stats.tx_sent_packets.get() >= sent + u64::from(RINGS.send));
            check!(rig.works());
            check!(dev.stats.tx_timeouts.get() == 1);
            check!(dev.stats.qp_restarts.get() == restarts + 1);
            check!(dev.stats.bad_completions.get() == bad);
            Ok(())
        })
    }

    /// The events of a receive and of a send are lost: nothing is received and nothing given back until
    /// somebody looks.
    #[test]
    fn lost_events_are_made_up_for() -> Result {
        on_an_interface(|rig| {
            let dev = &**rig.interface();
            let echoes = || dev.stats.rx_own_echo.get();
            check!(rig.works());
            // Housekeeping, whose turn it may be, would make up for it.
            cancel_delayed_sync::<Worker, HOUSEKEEP>(&dev.worker);
            dev.transport.lose_recv_event();
            rig.send()?;
            check!(eventually(|| !fake::LOST_EVENT.waits()));
            let before = echoes();
            rig.send()?;
            kernel::time::delay::fsleep(Delta::from_millis(50));
            check!(echoes() == before);
            housekeep(dev);
            check!(eventually(|| echoes() != before));
            check!(rig.works());

            rig.lose_event()?;
            rig.send()?;
            kernel::time::delay::fsleep(Delta::from_millis(50));
            check!(!rig.is_quiet());
            housekeep(dev);
            check!(eventually(|| rig.is_quiet()));
            check!(rig.works());
            Ok(())
        })
    }

    /// What was received and not looked at when the queue pair is rebuilt is counted.
    #[test]
    fn unread_receives() -> Result {
        on_an_interface(|rig| {
            let dev = &**rig.interface();
            check!(rig.works());
            cancel_delayed_sync::<Worker, HOUSEKEEP>(&dev.worker);
            dev.transport.lose_recv_event();
            rig.send()?;
            check!(eventually(|| !fake::LOST_EVENT.waits()));
            let (seen, unread) = (dev.stats.rx_completions.get(), dev.stats.rx_unread.get());
            rig.send()?;
            check!(eventually(|| rig.is_quiet()));
            check!(dev.stats.rx_completions.get() == seen);
            let restarts = dev.stats.qp_restarts.get();
            dev.restart_soon();
            check!(eventually(|| dev.stats.qp_restarts.get() > restarts));
            check!(eventually(|| !dev.is_broken()));
            // The stack's own multicasts may be received again by now.
            check!(dev.stats.rx_unread.get() >= unread + 2);
            check!(rig.works());
            Ok(())
        })
    }

    /// B11: the interface goes down, and comes back, while the watchdog has it repaired.
    #[test]
    fn timeout_while_going_down() -> Result {
        on_an_interface(|rig| {
            let dev = &**rig.interface();
            for round in 0..6 {
                if round % 2 == 0 {
                    rig.lose_event()?;
                    rig.fill()?;
                }
                Port::tx_timeout(dev);
                rig.interface().set_up(&Rtnl::lock(), false)?;
                check!(!dev.carrier());
                Port::tx_timeout(dev);
                rig.interface().set_up(&Rtnl::lock(), true)?;
                check!(rig.works());
            }
            Ok(())
        })
    }

    /// Every address handle of an interface has the attributes that RoCE hardware needs: a global
    /// route header from the own GID, a hop limit, and the Ethernet address of the next hop, which
    /// is that of the GID, that of the group, or what the network stack says.
    #[test]
    fn handles_are_complete() -> Result {
        on_an_interface(|rig| {
            let dev = &**rig.interface();
            let own = rig.plain_address()?;
            let broadcast = Address::group(&wire::broadcast_mgid(
                dev.fabric.profile().scope,
                dev.pkey(),
            ));
            let hop = [2, 0, 0, 0, 0xbe, 0xef];
            fake::NEXT_HOP.set(Some(hop));
            let elsewhere = Address::new(99, &ELSEWHERE);
            let gid_index = dev.lock().control().view.gid_index;
            let ways: [(&Address, Option<[u8; 6]>); 3] = [
                (&own, wire::mac_of_gid(&own.gid())),
                (&broadcast, Some(wire::mac_of_mgid(&broadcast.gid()))),
                (&elsewhere, Some(hop)),
            ];
            for (to, mac) in ways {
                let key = Key::read(&to.0, dev.pkey()).ok_or(EINVAL)?;
                let path = find_path(dev, &key, gid_index)?;
                let attr = path.ah.given().ok_or(EINVAL)?;
                check!(attr.gid == Gid(to.gid()));
                check!(attr.global && attr.hop_limit == 64);
                check!(Some(attr.sgid_index) == gid_index);
                check!(Some(attr.dmac) == mac && attr.dmac != [0; 6]);
                check!(path.qpn.0 == to.qpn());
            }
            // What the interface made by itself.
            rig.send_to(&broadcast)?;
            check!(rig.works());
            let (mut handles, mut wrong) = (0, 0);
            check!(eventually(|| {
                (handles, wrong) = (0, 0);
                dev.neighbours.for_each(|_, neigh| {
                    if let Some(attr) = neigh.path().and_then(|path| path.ah.given()) {
                        handles += 1;
                        if !attr.global || attr.hop_limit != 64 || attr.dmac == [0; 6] {
                            wrong += 1;
                        }
                    }
                });
                handles >= 2
            }));
            check!(wrong == 0);
            Ok(())
        })
    }

    /// B15: nobody answers for a destination, however many packets there are for it. They wait,
    /// bounded, and all are counted; with an answer the way is found after a pause.
    #[test]
    fn nobody_answers() -> Result {
        const PACKETS: u64 = 300;
        on_an_interface(|rig| {
            let dev = &**rig.interface();
            let to = Address::new(99, &ELSEWHERE);
            let key = Key::read(&to.0, dev.pkey()).ok_or(EINVAL)?;
            let lost = || {
                let stats = &dev.stats;
                stats.tx_neigh_queue_full.get() + stats.tx_neigh_failed.get()
            };
            fake::NEXT_HOP.set(None);
            let (sent, restarts) = (dev.stats.tx_sent_packets.get(), dev.stats.qp_restarts.get());
            for _ in 0..PACKETS {
                rig.send_to(&to)?;
            }
            check!(eventually(|| lost() >= PACKETS));
            // Packets of the stack's own may wait for a moment.
            check!(eventually(|| !dev.neighbours.anyone_waits()));
            // A new interface's stack sends some packets to groups.
            check!(dev.stats.tx_sent_packets.get() - sent < PACKETS / 10);
            check!(dev.stats.qp_restarts.get() == restarts && !dev.queue_stopped());
            // Others are reached meanwhile.
            check!(rig.works());

            let hop = [2, 0, 0, 0, 0xbe, 0xef];
            fake::NEXT_HOP.set(Some(hop));
            let found = || {
                let guard = rcu::read_lock();
                let neigh = dev.neighbours.get(&key, &guard);
                let path = neigh.and_then(|neigh| neigh.path());
                path.and_then(|path| path.ah.given()).map(|attr| attr.dmac)
            };
            check!(eventually(|| {
                if found().is_none() {
                    let _ = rig.send_to(&to);
                }
                found() == Some(hop)
            }));
            Ok(())
        })
    }

    /// Datagrams that are too short for the headers are counted, and their slots are used again.
    #[test]
    fn runts_from_a_peer() -> Result {
        on_an_interface(|rig| {
            let dev = &**rig.interface();
            let own = rig.plain_address()?;
            let key = Key::read(&own.0, dev.pkey()).ok_or(EINVAL)?;
            let gid_index = dev.lock().control().view.gid_index;
            let path = find_path(dev, &key, gid_index)?;
            let mut expected = dev.stats.rx_bad_length.get();
            for round in 0..3 * RINGS.recv {
                let mut skb = NewSkb::alloc(4).ok_or(ENOMEM)?;
                check!(skb.append(&[0; 3][..1 + round as usize % 3]));
                let to = Destination {
                    ah: &path.ah,
                    qpn: path.qpn,
                    qkey: dev.qkey(),
                };
                let skb = skb.finish(0, PROTOCOL, PacketType::Host);
                dev.tx_lock().send(dev, skb, &to, false);
                expected += 1;
                check!(round % 32 != 0 || eventually(|| dev.stats.rx_bad_length.get() == expected));
            }
            check!(eventually(|| dev.stats.rx_bad_length.get() == expected));
            check!(rig.works());
            Ok(())
        })
    }

    /// The queue pair refuses a send: it is rebuilt at once, without the watchdog.
    #[test]
    fn refused_sends() -> Result {
        on_an_interface(|rig| {
            let dev = &**rig.interface();
            for _ in 0..4 {
                check!(eventually(|| rig.is_quiet()));
                let restarts = dev.stats.qp_restarts.get();
                let failed = dev.stats.tx_failed.get();
                dev.tx_lock().refuse_sends();
                rig.send()?;
                check!(!fake::REFUSED_SENDS.waits());
                check!(eventually(|| dev.stats.qp_restarts.get() > restarts));
                check!(eventually(|| !dev.queue_stopped()));
                check!(dev.stats.tx_failed.get() > failed);
                check!(dev.carrier());
                check!(rig.works());
            }
            Ok(())
        })
    }
}
