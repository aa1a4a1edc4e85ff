// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Connections with a raw peer: one that speaks to the communication manager itself, and says and
//! does what no driver would.
//!
//! Each test has an interface of its own on the first RoCE device and the peer on the second one.

use super::*;
use crate::{
    ib::{
        fake,
        selftest_rc::{
            self as raw,
            eventually,
            Node,
            Policy,
            Server, //
        }, //
    },
    net::{
        device::Driver as _,
        rtnl::{
            LinkOps,
            Rtnl, //
        },
    },
    port::{
        self,
        selftest::Rig,
        Watchers, //
    },
};
use kernel::time::delay::fsleep;

/// The number that the peer calls its queue pair for datagrams. There is none.
const QPN: u32 = 0x12_3456;

/// What a sane peer says.
fn hello(qpn: u32, message: u32) -> [u8; Hello::LEN] {
    Hello { qpn, message }.encode()
}

/// An interface, and a raw peer.
struct Pair {
    rig: Rig,
    node: Arc<Node>,
}

impl Pair {
    fn dev(&self) -> &Device<Port> {
        self.rig.interface()
    }

    fn set_mode(&self, connected: bool) -> Result {
        port::set_mode(&Rtnl::lock(), &mut self.dev().lock(), connected)
    }

    /// The peer as a neighbour.
    fn address(&self, qpn: u32) -> Address {
        Address::new(qpn, &self.node.gid.0).with_flag(wire::FLAG_RC)
    }

    fn key(&self, qpn: u32) -> Result<Key> {
        Key::read(&self.address(qpn).0, self.dev().pkey()).ok_or(EINVAL)
    }

    /// Sends packets of `len` bytes to the peer that calls itself `qpn`.
    fn send(&self, qpn: u32, count: usize, len: usize) -> Result {
        for _ in 0..count {
            self.rig
                .transmit(Rig::packet_to(&self.address(qpn), len)?)?;
        }
        Ok(())
    }

    /// The peer listens for one of the services of `qpn`.
    fn serve(&self, service: u64, qpn: u32, policy: Policy) -> Result<(Arc<Server>, Listener)> {
        let server = Server::new(&self.node, policy)?;
        let service = service | u64::from(qpn);
        let listener = Listener::new(&self.node.reaper, self.node.port, service, server.clone())?;
        Ok((server, listener))
    }

    /// The peer asks us for a connection, and says `private`.
    fn ask(&self, private: &[u8]) -> Result<Arc<raw::Conn>> {
        let service = wire::SERVICE_LINUX | u64::from(self.dev().transport.qp.qpn().0);
        let mtu = self.dev().lock().control().ib_mtu();
        self.node.request(&self.rig.gid()?, mtu, service, private)
    }

    fn received(&self) -> u32 {
        self.node.dev.received.load(Relaxed)
    }

    /// Connections and what is left of them.
    fn conns(&self) -> (usize, usize, usize) {
        let mut locked = self.dev().lock();
        let table = &locked.control().cm;
        (table.active.len(), table.passive.len(), table.graves.len())
    }

    fn nothing_is_left(&self) -> bool {
        self.conns() == (0, 0, 0) && self.dev().cm.senders.len() == 0
    }
}

type Test = fn(&Pair) -> Result;

/// Runs a test with an interface on the first device, which cannot connect.
fn with_a_rig(test: fn(&Rig) -> Result) -> Result {
    let ports = raw::ports()?;
    let (hca, port) = ports.first().ok_or(ENODEV)?;
    let ops = LinkOps::register(c"ipoib_rs_test")?;
    let watchers = Watchers::new()?;
    fake::NO_CONNECTIONS.set(true);
    let rig = Rig::new(hca, *port, 16, &ops, &watchers);
    fake::NO_CONNECTIONS.set(false);
    let rig = rig?;
    check!(!rig.interface().cm.is_able());
    test(&rig)
}

fn with_a_peer(max_connections: usize, test: Test) -> Result {
    with_a_peer_of(max_connections, true, test)
}

/// Runs a test between the first two devices, and looks that nothing is left. Ours has shared
/// receive queues or not.
fn with_a_peer_of(max_connections: usize, srq: bool, test: Test) -> Result {
    let ports = raw::ports()?;
    let [(first, first_port), (second, second_port), ..] = &*ports else {
        return Err(ENODEV);
    };
    let peer_ops = LinkOps::register(c"ipoib_rs_test_peer")?;
    let ops = LinkOps::register(c"ipoib_rs_test")?;
    let watchers = Watchers::new()?;
    let node = Node::new(second, *second_port, &peer_ops)?;
    node.dev.raw.store(true, Relaxed);
    fake::NO_SRQ.set(!srq);
    let rig = Rig::new(first, *first_port, max_connections, &ops, &watchers);
    fake::NO_SRQ.set(false);
    let rig = rig?;
    check!(rig.interface().cm.shares() == srq);
    let pair = Pair { rig, node };
    let result = pair.set_mode(true).and_then(|()| test(&pair));
    if result.is_err() {
        pair.rig.describe();
    }
    let dev = pair.dev();
    let gone = pair
        .set_mode(false)
        .and_then(|()| pair.node.clear())
        .and_then(|()| pair.rig.interface().set_up(&Rtnl::lock(), false))
        .is_ok()
        && eventually(|| pair.nothing_is_left());
    fake::LOST_LAST_RECEIVES.set(false);
    result?;
    check!(gone);
    check!(dev.stats.bad_completions.get() == 0);
    Ok(())
}

#[kernel::macros::kunit_tests(ipoib_rs_cm)]
mod tests {
    use super::*;

    /// R4755-7.a, D1: what the peer sends back on the connection that we opened is received, whatever
    /// it is. And R4755-3.5, D2: the peer listens for the other service.
    #[test]
    fn data_comes_back() -> Result {
        with_a_peer(16, data_is_received)
    }

    #[test]
    fn data_comes_back_without_srq() -> Result {
        with_a_peer_of(16, false, data_is_received)
    }

    fn data_is_received(pair: &Pair) -> Result {
        let dev = pair.dev();
        for (service, qpn) in [
            (wire::SERVICE_LINUX, QPN),
            (wire::SERVICE_RFC, QPN + 1), //
        ] {
            let policy = Policy::Say(hello(qpn, wire::MAX_MESSAGE));
            let (server, listener) = pair.serve(service, qpn, policy)?;
            let before = pair.received();
            let opened = dev.stats.conn_opened.get();
            pair.send(qpn, 3, 3000)?;
            check!(eventually(|| pair.received() == before + 3));
            check!(eventually(|| dev.stats.conn_opened.get() == opened + 1));
            check!(server.requests.load(Relaxed) == 1);
            let theirs = server.conn(0)?;
            check!(eventually(|| theirs.has(raw::ESTABLISHED)));
            // The QPN that we said is ours.
            check!(theirs.said.load(Relaxed) == dev.transport.qp.qpn().0);

            let mut message = KVVec::from_elem(0u8, wire::MAX_MESSAGE as usize, GFP_KERNEL)?;
            message[0] = 8;
            let lens = [5, 4, 60, 256, 257, 4096, 4097, 30_000, 65_524];
            for len in lens.into_iter().cycle().take(36) {
                let before = dev.stats.rx_conn_packets.get();
                theirs.send_bytes(&message[..len])?;
                check!(eventually(|| dev.stats.rx_conn_packets.get() == before + 1));
                check!(eventually(|| theirs.is_quiet()));
            }
            // Too short to be anything.
            for len in [1, 2, 3] {
                let before = dev.stats.rx_bad_length.get();
                theirs.send_bytes(&message[..len])?;
                check!(eventually(|| dev.stats.rx_bad_length.get() == before + 1));
                check!(eventually(|| theirs.is_quiet()));
            }
            pair.send(qpn, 1, 3000)?;
            check!(eventually(|| pair.received() == before + 4));

            // It hangs up, and is connected to again.
            fsleep(Delta::from_millis(1100));
            server.close();
            check!(eventually(|| pair.nothing_is_left()));
            pair.send(qpn, 1, 3000)?;
            check!(eventually(|| pair.received() == before + 5));
            check!(eventually(|| dev.stats.conn_opened.get() == opened + 2));
            check!(server.requests.load(Relaxed) == 2);
            listener.stop();
            server.close();
            check!(eventually(|| pair.nothing_is_left()));
        }
        check!(dev.stats.rx_failed.get() == 0);
        Ok(())
    }

    /// D5: who rejects everything gets datagrams, and is not asked for each packet.
    #[test]
    fn rejects_everything() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let (server, listener) = pair.serve(wire::SERVICE_LINUX, QPN, Policy::Reject)?;
            let sent = dev.stats.tx_sent_packets.get();
            pair.send(QPN, 50, 1000)?;
            check!(eventually(|| dev.stats.conn_failed.get() == 1));
            check!(eventually(|| dev.stats.tx_sent_packets.get() >= sent + 50));
            let start = jiffies();
            for _ in 0..40 {
                pair.send(QPN, 5, 1000)?;
                fsleep(Delta::from_millis(50));
            }
            check!(eventually(|| dev.stats.tx_sent_packets.get() >= sent + 250));
            let asked = server.requests.load(Relaxed);
            // The pauses are 1, 2, 4 and so many seconds; the first began a little earlier.
            let pauses = [1, 3, 7, 15, 31].into_iter();
            let over = pauses.filter(|&end| elapsed(start) + HZ / 2 >= end * HZ);
            check!(asked >= 2 && asked as usize <= 1 + over.count());
            check!(dev.stats.tx_neigh_queue_full.get() == 0);
            check!(dev.stats.conn_opened.get() == 0);
            // Longer ones have no way.
            let too_big = dev.stats.tx_too_big.get();
            pair.send(QPN, 1, 9000)?;
            check!(eventually(|| dev.stats.tx_too_big.get() == too_big + 1));
            listener.stop();
            Ok(())
        })
    }

    /// Nobody answers: what waits is bounded, and goes by datagrams in the end.
    #[test]
    fn never_answers() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let (server, listener) = pair.serve(wire::SERVICE_LINUX, QPN, Policy::Silence)?;
            let sent = dev.stats.tx_sent_packets.get();
            pair.send(QPN, 100, 1000)?;
            let dropped = 100 - MAX_WAITING as u64;
            check!(dev.stats.tx_neigh_queue_full.get() == dropped);
            check!(eventually(|| server.requests.load(Relaxed) == 1));
            check!(eventually(|| dev.stats.conn_failed.get() == 1));
            check!(eventually(
                || dev.stats.tx_sent_packets.get() >= sent + MAX_WAITING as u64
            ));
            check!(dev.stats.tx_neigh_queue_full.get() == dropped);
            check!(dev.stats.tx_neigh_failed.get() == 0);
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// A peer that rejects what it has accepted ends the connection. Nothing is asked for again at once,
    /// whatever reason it gives; packets go by datagrams, and none keeps the transmit queue stopped.
    #[test]
    fn acceptance_is_taken_back() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let reasons = [Reason::MTU, Reason::STALE, Reason::NO_SERVICE];
            let told = || dev.stats.conn_failed.get() + dev.stats.conn_broken.get();
            let ended = || {
                let stats = &dev.stats;
                stats.tx_sent_packets.get()
                    + stats.tx_failed.get()
                    + stats.tx_neigh_queue_full.get()
            };
            let mut taken_back = 0;
            for (number, reason) in reasons.into_iter().cycle().take(12).enumerate() {
                let qpn = QPN + number as u32;
                let policy = Policy::Revoke(hello(qpn, wire::MAX_MESSAGE), reason);
                let (server, listener) = pair.serve(wire::SERVICE_LINUX, qpn, policy)?;
                let (before, start) = (told(), jiffies());
                pair.send(qpn, 3, 1000)?;
                check!(eventually(|| server.requests.load(Relaxed) == 1));
                let heard = || told() != before && pair.nothing_is_left();
                if !eventually(heard) {
                    // The core forgets a rejection that overtakes the acceptance: it does not know the
                    // peer's identifier yet.
                    check!(told() == before);
                    server.close();
                    listener.stop();
                    check!(eventually(|| pair.nothing_is_left()));
                    continue;
                }
                taken_back += 1;
                // More than may wait for the way: it has to be known.
                let sent = dev.stats.tx_sent_packets.get();
                pair.send(qpn, 1, 1000)?;
                check!(eventually(|| dev.stats.tx_sent_packets.get() > sent));
                check!(eventually(|| !pair.rig.anyone_waits()));
                let before = ended();
                for _ in 0..100 {
                    // The stack keeps what comes meanwhile.
                    check!(eventually(|| !dev.queue_stopped()));
                    pair.send(qpn, 1, 1000)?;
                }
                check!(eventually(|| ended() >= before + 100));
                // An emulated machine may take longer for them than the pause is: then the peer is
                // asked again, and takes back what it says again.
                check!(server.requests.load(Relaxed) == 1 || elapsed(start) > PAUSE);
                check!(eventually(|| dev.cm.has_room() && !dev.queue_stopped()));
                server.close();
                listener.stop();
            }
            check!(taken_back >= 4);
            Ok(())
        })
    }

    /// When half of the shared receives are lost connections get a new queue.
    #[test]
    fn worn_receive_queue() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let connected = || -> Result<Arc<raw::Conn>> {
                let theirs = pair.ask(&hello(QPN, wire::MAX_MESSAGE))?;
                check!(eventually(|| theirs.has(raw::REPLIED)));
                let before = dev.stats.rx_conn_packets.get();
                theirs.send_bytes(&[8; 20_000])?;
                check!(eventually(|| dev.stats.rx_conn_packets.get() == before + 1));
                Ok(theirs)
            };
            for by_housekeeper in [true, false] {
                let theirs = connected()?;
                {
                    let mut locked = dev.lock();
                    let (recv, _) = quiet(&mut locked)?;
                    recv.queue.as_mut().ok_or(EINVAL)?.lose_all();
                    dev.cm.recv.enable(&mut locked);
                }
                if by_housekeeper {
                    housekeep(dev);
                    check!(eventually(|| theirs.has(raw::ASKED)));
                } else {
                    pair.rig.interface().set_up(&Rtnl::lock(), false)?;
                    pair.rig.interface().set_up(&Rtnl::lock(), true)?;
                    check!(pair.rig.works());
                }
                theirs.close();
                check!(eventually(|| pair.nothing_is_left()));
                connected()?.close();
                check!(eventually(|| pair.nothing_is_left()));
            }
            Ok(())
        })
    }

    /// D7: an answer that makes no sense is rejected, and the peer told who we are.
    #[test]
    fn senseless_answers() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let answers = [
                [0; 8],
                [0xff; 8],
                hello(QPN + 99, wire::MAX_MESSAGE),
                hello(QPN + 3, 4),
                hello(QPN + 4, 0),
            ];
            for (number, answer) in answers.into_iter().enumerate() {
                let qpn = QPN + number as u32;
                let (server, listener) =
                    pair.serve(wire::SERVICE_LINUX, qpn, Policy::Say(answer))?;
                let before = dev.stats.conn_bad_message.get();
                let sent = dev.stats.tx_sent_packets.get();
                pair.send(qpn, 2, 1000)?;
                check!(eventually(|| dev.stats.conn_bad_message.get() == before + 1));
                let theirs = server.conn(0)?;
                check!(eventually(|| theirs.has(raw::REJECTED)));
                check!(theirs.reason.load(Relaxed) == Reason::CONSUMER.0);
                check!(theirs.said.load(Relaxed) == dev.transport.qp.qpn().0);
                check!(eventually(|| dev.stats.tx_sent_packets.get() >= sent + 2));
                server.close();
                listener.stop();
            }
            check!(dev.stats.conn_opened.get() == 0);
            Ok(())
        })
    }

    /// R4755-5.1.b, D3: the connection's MTU is that of the end that takes less.
    #[test]
    fn a_smaller_peer() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let policy = Policy::Say(hello(QPN, 1500));
            let (server, listener) = pair.serve(wire::SERVICE_LINUX, QPN, policy)?;
            let before = pair.received();
            pair.send(QPN, 1, 1496)?;
            check!(eventually(|| pair.received() == before + 1));
            pair.send(QPN, 1, 1497)?;
            check!(dev.stats.tx_too_big.get() == 1);
            pair.send(QPN, 1, 1496)?;
            check!(eventually(|| pair.received() == before + 2));
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// A peer that takes shorter packets than we do is asked for such a connection at once; one that
    /// takes none gets datagrams.
    #[test]
    fn shorter_packets() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let own = dev.lock().control().ib_mtu();
            check!(own >= 1024);
            for (number, limit) in [own, own / 4, 256, 0].into_iter().enumerate() {
                let qpn = QPN + number as u32;
                let policy = Policy::Limit(limit, hello(qpn, wire::MAX_MESSAGE));
                let (server, listener) = pair.serve(wire::SERVICE_LINUX, qpn, policy)?;
                let before = pair.received();
                let (opened, failed) = (dev.stats.conn_opened.get(), dev.stats.conn_failed.get());
                let sent = dev.stats.tx_sent_packets.get();
                pair.send(qpn, 3, 1000)?;
                if limit == 0 {
                    check!(eventually(|| dev.stats.conn_failed.get() == failed + 1));
                    check!(eventually(|| dev.stats.tx_sent_packets.get() >= sent + 3));
                    check!(server.requests.load(Relaxed) == own.ilog2() - 256u32.ilog2() + 1);
                } else {
                    check!(eventually(|| pair.received() == before + 3));
                    check!(server.requests.load(Relaxed) == own.ilog2() - limit.ilog2() + 1);
                    check!(eventually(|| dev.stats.conn_opened.get() == opened + 1));
                    check!(dev.stats.conn_failed.get() == failed);
                    pair.send(qpn, 1, 60_000)?;
                    check!(eventually(|| pair.received() == before + 4));
                    // Closed before it has heard that we are ready it would reject.
                    let theirs = server.conn(0)?;
                    check!(eventually(|| theirs.has(raw::ESTABLISHED)));
                }
                server.close();
                listener.stop();
                check!(eventually(|| pair.conns() == (0, 0, 0)));
            }
            Ok(())
        })
    }

    /// B41: a device that cannot connect. The interface works, and takes no other mode than that of
    /// datagrams; its address does not say what is not so.
    #[test]
    fn no_connections() -> Result {
        with_a_rig(|rig| {
            let dev = rig.interface();
            let mtu = dev.mtu();
            for connected in [true, false, true] {
                let status = port::set_mode(&Rtnl::lock(), &mut dev.lock(), connected);
                check!(status == if connected { Err(EINVAL) } else { Ok(()) });
                check!(!dev.cm.is_connected() && dev.mtu() == mtu);
            }
            let own = rig.address()?;
            check!(own.0[0] & wire::FLAG_RC == 0);
            check!(dev.lock().control().cm.listeners.is_empty());
            // A neighbour says that it takes connections: it gets datagrams.
            let echoes = dev.stats.rx_own_echo.get();
            rig.transmit(Rig::packet_to(&own.with_flag(wire::FLAG_RC), 1000)?)?;
            check!(eventually(|| dev.stats.rx_own_echo.get() > echoes));
            // Down and up with the same.
            dev.set_up(&Rtnl::lock(), false)?;
            dev.set_up(&Rtnl::lock(), true)?;
            check!(rig.works());
            Ok(())
        })
    }

    /// Requests that make no sense are rejected and counted, and the peer told who we are. What is
    /// reserved says nothing (R4755-6).
    #[test]
    fn senseless_requests() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let own = dev.transport.qp.qpn().0;
            let bad: [&[u8]; 7] = [
                &[],
                &[0xff; 2],
                &[0, 0, 0, 17, 0, 0, 0],
                &hello(0, wire::MAX_MESSAGE),
                &hello(1, wire::MAX_MESSAGE),
                &hello(0xff_ffff, wire::MAX_MESSAGE),
                &hello(QPN, 4),
            ];
            for (number, private) in bad.iter().enumerate() {
                let theirs = pair.ask(private)?;
                check!(eventually(|| theirs.has(raw::REJECTED)));
                check!(theirs.reason.load(Relaxed) == Reason::CONSUMER.0);
                check!(theirs.said.load(Relaxed) == own);
                let count = number as u64 + 1;
                check!(eventually(|| dev.stats.conn_rejected.get() == count));
                check!(dev.stats.conn_bad_message.get() == count);
                theirs.close();
            }
            check!(dev.stats.conn_accepted.get() == 0);
            check!(pair.conns().1 == 0);
            let mut odd = [0xff; 92];
            odd[1..8].copy_from_slice(&hello(QPN, 2048)[1..]);
            for private in [&hello(QPN, u32::MAX)[..], &hello(QPN, 5), &odd] {
                let theirs = pair.ask(private)?;
                check!(eventually(|| theirs.has(raw::REPLIED)));
                check!(theirs.said.load(Relaxed) == own);
                let before = dev.stats.rx_conn_packets.get();
                theirs.send_bytes(&[8, 0, 0xff, 0xff, 1])?;
                check!(eventually(|| dev.stats.rx_conn_packets.get() == before + 1));
            }
            check!(eventually(|| dev.stats.conn_accepted.get() == 3));
            check!(dev.stats.conn_bad_message.get() == bad.len() as u64);
            Ok(())
        })
    }

    /// D8: requests that cross. The peer's is accepted though ours has no answer yet; should it
    /// reject ours, as RFC 4755 has one of the two, we ask again later.
    #[test]
    fn crossing_requests() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let (server, listener) = pair.serve(wire::SERVICE_LINUX, QPN, Policy::Silence)?;
            let sent = dev.stats.tx_sent_packets.get();
            pair.send(QPN, 2, 1000)?;
            check!(eventually(|| server.requests.load(Relaxed) == 1));
            let theirs = pair.ask(&hello(QPN, wire::MAX_MESSAGE))?;
            check!(eventually(|| theirs.has(raw::REPLIED)));
            check!(eventually(|| pair.conns() == (1, 1, 0)));
            let before = dev.stats.rx_conn_packets.get();
            theirs.send_bytes(&[8, 0, 0, 0, 0])?;
            check!(eventually(|| dev.stats.rx_conn_packets.get() == before + 1));
            // The end of the identifier rejects.
            server.close();
            listener.stop();
            check!(eventually(|| dev.stats.conn_failed.get() == 1));
            check!(eventually(|| dev.stats.tx_sent_packets.get() >= sent + 2));
            check!(pair.conns().1 == 1);
            let policy = Policy::Say(hello(QPN, wire::MAX_MESSAGE));
            let (server, listener) = pair.serve(wire::SERVICE_LINUX, QPN, policy)?;
            fsleep(Delta::from_millis(1100));
            let arrived = pair.received();
            pair.send(QPN, 1, 9000)?;
            check!(eventually(|| pair.received() == arrived + 1));
            theirs.send_bytes(&[8, 0, 0, 0, 0])?;
            check!(eventually(|| dev.stats.rx_conn_packets.get() == before + 2));
            check!(eventually(|| dev.stats.conn_opened.get() == 1));
            check!(dev.stats.conn_accepted.get() == 1);
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// Nobody answers for an interface that is down; nothing is kept of who asked.
    #[test]
    fn dead_interface() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let ask = || pair.ask(&hello(QPN, wire::MAX_MESSAGE));
            for round in 1..=3 {
                pair.rig.interface().set_up(&Rtnl::lock(), false)?;
                let theirs = ask()?;
                check!(eventually(|| theirs.has(raw::REJECTED)));
                check!(theirs.reason.load(Relaxed) == Reason::NO_SERVICE.0);
                check!(eventually(|| pair.nothing_is_left()));
                theirs.close();
                pair.rig.interface().set_up(&Rtnl::lock(), true)?;
                check!(pair.rig.works());
                let theirs = ask()?;
                check!(eventually(|| theirs.has(raw::REPLIED)));
                check!(eventually(|| dev.stats.conn_accepted.get() == round));
                theirs.close();
                check!(eventually(|| pair.conns().1 == 0));
            }
            check!(dev.stats.conn_rejected.get() == 0);
            Ok(())
        })
    }

    /// Connections that nobody uses are closed, those in use are not: ours after a minute, those of
    /// peers after ten.
    #[test]
    fn idle_connections() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let policy = Policy::Say(hello(QPN, wire::MAX_MESSAGE));
            let (server, listener) = pair.serve(wire::SERVICE_LINUX, QPN, policy)?;
            let before = pair.received();
            pair.send(QPN, 1, 100)?;
            check!(eventually(|| pair.received() == before + 1));
            let theirs = pair.ask(&hello(QPN + 1, wire::MAX_MESSAGE))?;
            check!(eventually(|| theirs.has(raw::REPLIED)));
            check!(eventually(|| pair.conns() == (1, 1, 0)));
            let idle_for = |active: usize, passive: usize| -> Result {
                let guard = rcu::read_lock();
                let peer = dev.cm.peers.get(&pair.key(QPN)?, &guard).ok_or(ENOENT)?;
                peer.used.store(jiffies().wrapping_sub(active), Relaxed);
                dev.cm.origins.for_each(|_, origin| {
                    origin.used.store(jiffies().wrapping_sub(passive), Relaxed);
                });
                Ok(())
            };
            idle_for(ACTIVE_IDLE - 10 * HZ, PASSIVE_IDLE - 10 * HZ)?;
            housekeep(dev);
            check!(pair.conns() == (1, 1, 0));
            idle_for(ACTIVE_IDLE + 1, 0)?;
            housekeep(dev);
            check!(eventually(|| pair.conns() == (0, 1, 0)));
            check!(dev.cm.peers.len() == 0);
            // Used, and not idle any more.
            pair.send(QPN, 1, 100)?;
            check!(eventually(|| pair.received() == before + 2));
            // Which would close it before anything arrives.
            pair.rig.stop_housekeeping();
            idle_for(0, PASSIVE_IDLE + 1)?;
            theirs.send_bytes(&[8, 0, 0, 0, 0])?;
            check!(eventually(|| dev.stats.rx_conn_packets.get() == 1));
            housekeep(dev);
            check!(pair.conns() == (1, 1, 0));
            idle_for(0, PASSIVE_IDLE + 1)?;
            housekeep(dev);
            check!(eventually(|| pair.conns() == (1, 0, 0)));
            check!(eventually(|| theirs.has(raw::ASKED)));
            check!(dev.stats.tx_neigh_failed.get() == 0);
            server.close();
            listener.stop();
            Ok(())
        })
    }

    /// Connections that peers open are limited; one of a peer replaces what it had (B21).
    #[test]
    fn too_many_connections() -> Result {
        with_a_peer(2, |pair| {
            let dev = pair.dev();
            let ask = |qpn| pair.ask(&hello(qpn, wire::MAX_MESSAGE));
            let (one, two) = (ask(QPN)?, ask(QPN + 1)?);
            check!(eventually(|| one.has(raw::REPLIED) && two.has(raw::REPLIED)));
            for number in 1..=3 {
                let more = ask(QPN + 2)?;
                check!(eventually(|| more.has(raw::REJECTED)));
                check!(more.reason.load(Relaxed) == Reason::NO_QP.0);
                check!(dev.stats.conn_over_limit.get() == number);
                check!(dev.stats.conn_rejected.get() == number);
                more.close();
            }
            check!(eventually(|| pair.conns().1 == 2));
            // It has forgotten that it has one.
            let again = ask(QPN)?;
            check!(eventually(|| again.has(raw::REPLIED)));
            check!(eventually(|| one.has(raw::ASKED)));
            check!(eventually(|| pair.conns().1 == 2));
            let before = dev.stats.rx_conn_packets.get();
            again.send_bytes(&[8, 0, 0, 0, 0])?;
            two.send_bytes(&[8, 0, 0, 0, 0])?;
            check!(eventually(|| dev.stats.rx_conn_packets.get() == before + 2));
            // There is room again once one has gone.
            two.close();
            check!(eventually(|| pair.conns().1 == 1));
            let more = ask(QPN + 2)?;
            check!(eventually(|| more.has(raw::REPLIED)));
            Ok(())
        })
    }

    /// B44: the interface goes down in bounded time and everything is destroyed, though half of the
    /// queue pairs never say that they receive no more.
    #[test]
    fn down_with_all() -> Result {
        with_a_peer(16, |pair| all_go_down(pair, 3))
    }

    #[test]
    fn down_with_all_without_srq() -> Result {
        with_a_peer_of(16, false, |pair| all_go_down(pair, 2))
    }

    fn all_go_down(pair: &Pair, rounds: u32) -> Result {
        let dev = pair.dev();
        let policy = Policy::Say(hello(QPN, wire::MAX_MESSAGE));
        let (server, listener) = pair.serve(wire::SERVICE_LINUX, QPN, policy)?;
        for _ in 0..rounds {
            let mut peers = KVec::new();
            for number in 0..10 {
                let theirs = pair.ask(&hello(QPN + number, wire::MAX_MESSAGE))?;
                peers.push(theirs, GFP_KERNEL)?;
            }
            check!(eventually(|| peers
                .iter()
                .all(|peer| peer.has(raw::REPLIED))));
            let before = pair.received();
            pair.send(QPN, 1, 5000)?;
            check!(eventually(|| pair.received() == before + 1));
            check!(eventually(|| pair.conns() == (1, 10, 0)));
            let hits = fake::LOST_LAST_RECEIVES.hits();
            fake::LOST_LAST_RECEIVES.set(true);
            pair.send(QPN, 20, 60_000)?;
            for peer in &peers {
                peer.send_bytes(&[8; 20_000])?;
            }
            let rtnl = Rtnl::lock();
            let start = jiffies();
            let gone = pair.rig.interface().set_up(&rtnl, false);
            let took = elapsed(start);
            drop(rtnl);
            gone?;
            check!(took < 5 * HZ);
            check!(eventually(|| pair.nothing_is_left()));
            // Without a shared queue nobody says so.
            check!(!dev.cm.shares() || fake::LOST_LAST_RECEIVES.hits() > hits);
            fake::LOST_LAST_RECEIVES.set(false);
            drop(peers);
            server.close();
            pair.node.clear()?;
            pair.rig.interface().set_up(&Rtnl::lock(), true)?;
            check!(pair.rig.works());
        }
        listener.stop();
        check!(dev.stats.bad_completions.get() == 0);
        Ok(())
    }

    /// What the device still reads stays until the queue pair is destroyed (KASAN looks on), and is
    /// counted.
    #[test]
    fn down_without_waiting() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let ended = || dev.stats.tx_sent_packets.get() + dev.stats.tx_failed.get();
            let policy = Policy::Say(hello(QPN, wire::MAX_MESSAGE));
            let (server, listener) = pair.serve(wire::SERVICE_LINUX, QPN, policy)?;
            for _ in 0..4 {
                let before = pair.received();
                pair.send(QPN, 1, 5000)?;
                check!(eventually(|| pair.received() == before + 1));
                check!(eventually(|| pair.rig.is_quiet()));
                let (given, gone) = (dev.stats.tx_conn_packets.get(), ended());
                fake::NO_DRAIN.set(true);
                let sent = pair.send(QPN, 20, 60_000);
                let down = pair.rig.interface().set_up(&Rtnl::lock(), false);
                fake::NO_DRAIN.set(false);
                sent.and(down)?;
                check!(eventually(|| pair.nothing_is_left()));
                let given = dev.stats.tx_conn_packets.get() - given;
                check!(given != 0);
                check!(eventually(|| ended() - gone >= given));
                server.close();
                pair.rig.interface().set_up(&Rtnl::lock(), true)?;
                check!(pair.rig.works());
            }
            listener.stop();
            Ok(())
        })
    }

    /// Packets of a burst are posted with one doorbell, whatever ends it.
    #[test]
    fn bursts() -> Result {
        /// To whom, how many bytes, whether more follow; and how many doorbells have rung then.
        type Step = (u32, usize, bool, u64);
        const OTHER: u32 = QPN + 1;
        const BURSTS: [(&[Step], u32); 4] = [
            (
                &[
                    (QPN, 2000, true, 0),
                    (QPN, 100, true, 0),
                    (QPN, 9000, true, 0),
                    (QPN, 2000, false, 1),
                ],
                4,
            ),
            // A chain has an end of its own.
            (
                &[
                    (QPN, 2000, true, 0),
                    (QPN, 2000, true, 0),
                    (QPN, 2000, true, 0),
                    (QPN, 2000, true, 1),
                ],
                4,
            ),
            // To somebody else in between.
            (
                &[
                    (QPN, 2000, true, 0),
                    (QPN, 2000, true, 0),
                    (OTHER, 2000, true, 1),
                    (QPN, 2000, false, 3),
                ],
                4,
            ),
            // The last one is too long, and dropped.
            (
                &[
                    (QPN, 2000, true, 0),
                    (QPN, 2000, true, 0),
                    (QPN, 65_521, false, 1),
                ],
                2,
            ),
        ];
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let mut served = KVec::new();
            for qpn in [QPN, OTHER] {
                let policy = Policy::Say(hello(qpn, wire::MAX_MESSAGE));
                served.push(pair.serve(wire::SERVICE_LINUX, qpn, policy)?, GFP_KERNEL)?;
                let before = pair.received();
                pair.send(qpn, 1, 100)?;
                check!(eventually(|| pair.received() == before + 1));
            }
            let packet = |qpn, len| -> Result<Skb> {
                let mut skb = Rig::packet_to(&pair.address(qpn), len)?;
                check!(skb.pull(wire::ADDRESS_LEN));
                Ok(skb)
            };
            let posts = || dev.stats.tx_conn_posts.get();
            for (steps, arrive) in BURSTS {
                let mut packets = SkbQueue::new();
                for (qpn, len, ..) in steps {
                    packets.push(packet(*qpn, *len)?);
                }
                let before = (pair.received(), posts());
                {
                    // Nobody else sends meanwhile.
                    let mut tx = dev.tx_lock();
                    for (qpn, _, more, rung) in steps {
                        let skb = packets.pop().ok_or(EINVAL)?;
                        let sent = dev.cm.send(dev, &mut tx, &pair.key(*qpn)?, skb, *more);
                        check!(matches!(sent, Sent::Taken));
                        check!(posts() == before.1 + rung);
                    }
                }
                check!(eventually(|| pair.received() == before.0 + arrive));
            }
            // A datagram after it, by way of the stack's own call.
            let (first, second) = (packet(QPN, 2000)?, pair.rig.packet()?);
            let before = (pair.received(), posts());
            {
                let mut tx = dev.tx_lock();
                dev.cm.send(dev, &mut tx, &pair.key(QPN)?, first, true);
                check!(posts() == before.1);
                Port::start_xmit(dev, &mut tx, second);
                check!(posts() == before.1 + 1);
            }
            check!(eventually(|| pair.received() == before.0 + 1));
            // The end of the mode: what is chained is posted, and nothing is waited for in vain.
            let chained = [packet(QPN, 2000)?, packet(QPN, 2000)?];
            let restarts = dev.stats.qp_restarts.get();
            for skb in chained {
                let mut tx = dev.tx_lock();
                dev.cm.send(dev, &mut tx, &pair.key(QPN)?, skb, true);
            }
            pair.set_mode(false)?;
            check!(eventually(|| pair.nothing_is_left()));
            check!(dev.stats.qp_restarts.get() == restarts);
            for (server, listener) in served {
                server.close();
                listener.stop();
            }
            Ok(())
        })
    }

    /// B10: datagrams fill more than half of their ring and a connection all of its own. The queue is
    /// stopped, and woken again; when no event says that there is room it is the watchdog who helps.
    #[test]
    fn both_rings_are_full() -> Result {
        with_a_peer(16, |pair| {
            let dev = pair.dev();
            let policy = Policy::Say(hello(QPN, wire::MAX_MESSAGE));
            let (server, listener) = pair.serve(wire::SERVICE_LINUX, QPN, policy)?;
            let before = pair.received();
            pair.send(QPN, 1, 100)?;
            check!(eventually(|| pair.received() == before + 1));
            check!(eventually(|| pair.rig.is_quiet()));
            for lost in [false, true] {
                if lost {
                    pair.rig.lose_event()?;
                }
                let full = dev.stats.tx_ring_full.get();
                // Made before, so that sending is faster than the device.
                let mut packets = SkbQueue::new();
                for _ in 0..80 {
                    packets.push(pair.rig.packet()?);
                }
                for _ in 0..4 * RING {
                    packets.push(Rig::packet_to(&pair.address(QPN), 3000)?);
                }
                while let Some(skb) = packets.pop() {
                    pair.rig.transmit(skb)?;
                    if dev.stats.tx_ring_full.get() != full {
                        break;
                    }
                }
                check!(dev.stats.tx_ring_full.get() != full);
                if lost {
                    check!(dev.queue_stopped());
                    check!(!dev.cm.has_room());
                    dev.restart_soon();
                }
                check!(eventually(|| !dev.queue_stopped() && dev.cm.has_room()));
                check!(pair.rig.works());
            }
            server.close();
            listener.stop();
            Ok(())
        })
    }
}
