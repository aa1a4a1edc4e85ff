// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Datagram transport: the UD queue pair, its rings and their NAPI contexts.
//!
//! | context | owns |
//! |---|---|
//! | `start_xmit`, transmit lock | [`Tx`]: the posting end of the send ring |
//! | NAPI of the send queue | [`SendPoll`]: the completing end |
//! | NAPI of the receive queue | [`RecvPoll`]: the receive ring |
//! | instance lock | [`Transport::start`] and [`Transport::stop`] |
//!
//! A queue pair may die at any time without an event: its requests then complete as flushed. The
//! NAPI contexts ask for a rebuild, which [`crate::port`] does.

use crate::{
    cm::{
        PeerCache,
        RecvPoll as ConnectedRecvPoll, //
    },
    ib::{
        cq::{
            grh_gids,
            Completions,
            Napi,
            NapiCq,
            Poll,
            Status,
            Wc, //
        },
        pd::Pd,
        qp::{
            self,
            Caps,
            Qp, //
        },
        queue::{
            send_queue,
            Completed,
            Destination,
            Received,
            RecvQueue,
            Refused,
            SendCompleter,
            SendProgress,
            SendQueue, //
        },
        srq::Srq,
        Gid,
        PortNum,
        QKey, //
    },
    neigh,
    net::{
        device::{
            Device,
            Locked,
            UnregisteredDevice, //
        },
        skb::{
            PacketType,
            Skb, //
        },
    },
    port::Port,
    wire, //
};
use kernel::{
    prelude::*,
    sync::{
        barrier::{
            smp_mb,
            Full, //
        },
        Arc, //
    },
    time::Delta, //
};

/// Completions of sends after which a poll yields.
const SEND_BUDGET: usize = 256;

/// Packets up to this length are copied, and their page stays in the ring.
const COPY_BREAK: usize = 256;

/// Linear room of a packet whose bytes are in a page: headers are pulled into it.
const HEAD_ROOM: usize = 168;

/// How long a stop waits for sends to complete, in steps of a millisecond.
const DRAIN_STEPS: usize = 200;

/// How long a dead queue pair may take to flush its sends, in the same steps.
const FLUSH_STEPS: usize = 50;

/// Sizes of the rings, powers of two.
#[derive(Clone, Copy)]
pub(crate) struct RingSizes {
    pub(crate) send: u32,
    pub(crate) recv: u32,
}

/// The transmit lock's part.
pub(crate) struct Tx {
    queue: SendQueue,
    /// Where the last packets went.
    pub(crate) last: neigh::Cache,
    /// Where the last packet in connected mode went.
    pub(crate) last_peer: PeerCache,
    /// Whose connection has packets that are not posted yet.
    pub(crate) chained_to: Option<neigh::Key>,
}

impl Tx {
    /// Sends a packet whose link header is gone but for the encapsulation.
    ///
    /// The packet is posted now or, while `more` follow, with the next one.
    #[inline(always)]
    pub(crate) fn send(
        &mut self,
        dev: &Device<Port>,
        mut skb: Skb,
        to: &Destination<'_>,
        more: bool,
    ) {
        let bytes = skb.len() as u32;
        let offloaded = match skb.wants_offload() {
            false => None,
            true if skb.is_large() => Some(&dev.stats.tx_large_packets),
            true => Some(&dev.stats.tx_checksum_packets),
        };
        skb.tx_timestamp();
        match self.queue.push(skb, to) {
            Ok(()) => {
                if let Some(counter) = offloaded {
                    counter.add_single(1);
                }
            }
            Err((skb, Refused::Full)) => {
                drop(skb);
                dev.stats.tx_no_room.add(1);
                self.stop_if_full(dev);
                self.flush(dev);
                return;
            }
            Err((skb, why)) => {
                drop(skb);
                match why {
                    Refused::Malformed => dev.stats.tx_bad_offload.add(1),
                    _ => dev.stats.tx_no_memory.add(1),
                }
                if !more {
                    self.flush(dev);
                }
                return;
            }
        }
        self.stop_if_full(dev);
        if dev.sent(bytes, more) || self.queue.chain_is_full() {
            self.post(dev);
        }
    }

    /// Posts what is chained.
    #[inline(never)]
    pub(crate) fn flush(&mut self, dev: &Device<Port>) {
        self.post(dev);
    }

    #[inline(always)]
    fn post(&mut self, dev: &Device<Port>) {
        match self.queue.flush() {
            Ok(0) => {}
            Ok(_) => dev.stats.tx_posts.add_single(1),
            Err(error) => Self::refused(dev, error),
        }
    }

    #[cold]
    fn refused(dev: &Device<Port>, error: Error) {
        crate::net::warn_ratelimited!("{}: posting failed: {:?}\n", dev.name(), error);
        dev.stop_queue();
        dev.restart_soon();
    }

    /// The queue pair refuses what is posted next.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    pub(crate) fn refuse_sends(&self) {
        self.queue.refuse_sends();
    }

    /// Free entries of the ring.
    pub(crate) fn room(&mut self) -> u32 {
        self.queue.room()
    }

    /// Stops the queue when the ring is full.
    #[inline(always)]
    fn stop_if_full(&mut self, dev: &Device<Port>) {
        if self.queue.is_full() {
            self.stop(dev);
        }
    }

    /// Stops the queue, unless a completion came in between.
    #[inline(never)]
    fn stop(&mut self, dev: &Device<Port>) {
        dev.stop_queue();
        dev.stats.tx_ring_full.add_single(1);
        // Pairs with the barrier in `SendPoll::poll`: either it sees the queue stopped, or we see
        // the room that it made.
        smp_mb(Full);
        if self.queue.room() != 0 && dev.cm.has_room() {
            dev.start_queue();
        }
    }
}

/// The queue pair is dead: packets wait in the stack until it was rebuilt.
#[cold]
fn dead(dev: &Device<Port>, direction: &str, status: Status) {
    dev.stop_queue();
    dev.broken(direction, status);
}

/// Handles completed sends.
pub(crate) struct SendPoll {
    completer: SendCompleter,
    ring: u32,
}

impl SendPoll {
    /// Handles a completion that is none of a datagram sent. What it took back is counted; it is
    /// yet to be reported.
    #[inline(never)]
    fn odd(&mut self, dev: &Device<Port>, wc: &Wc, budget: usize) -> Completed {
        let Some(done) = self.settle(dev, wc, budget) else {
            return Self::other(dev, wc, budget);
        };
        dead(dev, "send", wc.status());
        done
    }

    /// Takes back and counts what a completion says is done; `None` if that is no datagram.
    fn settle(&mut self, dev: &Device<Port>, wc: &Wc, budget: usize) -> Option<Completed> {
        let done = self.completer.complete(wc.id(), budget)?;
        let (failed, bytes) = match wc.status() {
            Status::Success => (0, 0),
            _ => (1, done.last_bytes),
        };
        dev.stats.tx_failed.add(failed.into());
        // Requests before the one that is named were not signalled, which means that they were
        // sent; if they had failed they would have been named.
        Self::sent(
            dev,
            done.packets.wrapping_sub(failed),
            done.bytes.wrapping_sub(bytes),
        );
        Some(done)
    }

    #[inline]
    fn sent(dev: &Device<Port>, packets: u32, bytes: u32) {
        dev.stats.tx_sent_packets.add_single(packets.into());
        dev.stats.tx_sent_bytes.add_single(bytes.into());
    }

    /// The same for a completion that is no datagram's.
    fn other(dev: &Device<Port>, wc: &Wc, budget: usize) -> Completed {
        if wc.queue() == 0 {
            dev.stats.bad_completions.add(1);
            return Completed::default();
        }
        let Some(done) = dev.cm.complete(wc, budget) else {
            dev.stats.conn_stale.add(1);
            return Completed::default();
        };
        if wc.status() == Status::Success {
            dev.stats.tx_sent_packets.add_single(done.packets.into());
            dev.stats.tx_sent_bytes.add_single(done.bytes.into());
        } else {
            // Those of a connection that ends are flushed one by one.
            dev.stats.tx_failed.add(done.packets.into());
        }
        done
    }
}

impl Poll for SendPoll {
    type Driver = Port;

    #[inline(always)]
    fn poll(
        &mut self,
        dev: &Device<Port>,
        _napi: Napi<'_>,
        cq: &mut Completions<'_>,
        budget: usize,
    ) -> usize {
        let mut polled = 0;
        let (mut packets, mut bytes) = (0u32, 0u32);
        let (mut odd_packets, mut odd_bytes) = (0u32, 0u32);
        let drained = loop {
            let (batch, more) = cq.next(usize::MAX);
            for wc in batch {
                if wc.status() == Status::Success {
                    if let Some(done) = self.completer.complete(wc.id(), budget) {
                        packets = packets.wrapping_add(done.packets);
                        bytes = bytes.wrapping_add(done.bytes);
                        continue;
                    }
                }
                let done = self.odd(dev, wc, budget);
                odd_packets = odd_packets.wrapping_add(done.packets);
                odd_bytes = odd_bytes.wrapping_add(done.bytes);
            }
            polled += batch.len();
            if !more || polled >= SEND_BUDGET {
                break !more;
            }
        };
        if polled != 0 {
            dev.stats.tx_completions.add_single(polled as u64);
            Self::sent(dev, packets, bytes);
            dev.completed(
                packets.wrapping_add(odd_packets),
                bytes.wrapping_add(odd_bytes),
            );
            // Pairs with the barrier in `Tx::stop_if_full`.
            smp_mb(Full);
            if dev.queue_stopped()
                && self.completer.room() >= self.ring / 2
                && dev.may_send()
                && dev.cm.has_room()
            {
                dev.wake_queue();
            }
            dev.room_in_ring();
        }
        if drained {
            0
        } else {
            budget
        }
    }
}

/// Counts a datagram that has no room for the headers, or is longer than one can be.
#[cold]
fn bad_length(dev: &Device<Port>, wc: &Wc) {
    if dev.stats.rx_bad_length.get() == 0 {
        pr_warn!(
            "{}: dropped a datagram that is too short or too long ({} bytes); more are counted only\n",
            dev.name(),
            wc.byte_len()
        );
    }
    dev.stats.rx_bad_length.add(1);
}

/// Who we are, to tell own packets that come back and what a packet was sent to.
#[derive(Clone, Copy, Default)]
struct Identity {
    gid: Gid,
    qpn: u32,
    broadcast: Gid,
}

/// Handles received datagrams.
pub(crate) struct RecvPoll {
    queue: RecvQueue<{ wire::FRONT_LEN }>,
    identity: Identity,
}

impl RecvPoll {
    /// Passes a datagram on; false if it was none that the stack gets.
    #[inline]
    fn deliver(
        dev: &Device<Port>,
        napi: Napi<'_>,
        identity: &Identity,
        wc: &Wc,
        mut slot: Received<'_, { wire::FRONT_LEN }>,
    ) -> bool {
        let Some(len) = wc
            .byte_len()
            .checked_sub(wire::FRONT_LEN)
            .filter(|&len| len <= wire::MAX_IB_MTU as usize)
        else {
            bad_length(dev, wc);
            return false;
        };
        let front = slot.front();
        let (grh, encap) = front.split_at(wire::GRH_LEN);
        let mut kind = PacketType::Host;
        if wc.has_grh() {
            if let Some((source, destination)) = grh_gids(grh) {
                if wc.src_qp() == identity.qpn && source == identity.gid {
                    dev.stats.rx_own_echo.add_single(1);
                    return false;
                }
                if destination.is_multicast() {
                    kind = match destination == identity.broadcast {
                        true => PacketType::Broadcast,
                        false => PacketType::Multicast,
                    };
                }
            }
        }
        // In front of a received packet taps find a hardware address of zeros.
        let mut header = [0; wire::HEADER_LEN];
        header[wire::ADDRESS_LEN..].copy_from_slice(encap);
        let Some(protocol) = wire::ethertype(encap) else {
            bad_length(dev, wc);
            return false;
        };

        let copy = len <= COPY_BREAK;
        let room = if copy { len } else { HEAD_ROOM };
        let Some(mut skb) = napi.alloc_skb(wire::HEADER_LEN + room) else {
            dev.stats.rx_no_memory.add(1);
            return false;
        };
        let mut whole = skb.put_header(&header);
        if copy {
            whole = whole && skb.append(slot.body(len));
        } else if let Some(page) = slot.take_page(len) {
            skb.add_page(page, len);
        } else {
            whole = false;
        }
        if !whole {
            dev.stats.rx_no_memory.add(1);
            return false;
        }
        if wc.is_verified() && dev.wants_verified() {
            skb.set_verified();
            dev.stats.rx_checksum_packets.add_single(1);
        }
        if kind == PacketType::Multicast {
            dev.stats.rx_multicast_packets.add_single(1);
        }
        dev.stats.rx_delivered_packets.add_single(1);
        dev.stats.rx_delivered_bytes.add_single(len as u64);
        napi.receive(skb.finish_behind(wire::HEADER_LEN, protocol, kind));
        true
    }
}

impl Poll for RecvPoll {
    type Driver = Port;

    #[inline(always)]
    fn poll(
        &mut self,
        dev: &Device<Port>,
        napi: Napi<'_>,
        cq: &mut Completions<'_>,
        budget: usize,
    ) -> usize {
        let mut done = 0;
        while done < budget {
            let (batch, more) = cq.next(budget - done);
            done += batch.len();
            dev.stats.rx_completions.add_single(batch.len() as u64);
            for wc in batch {
                let Some(slot) = self.queue.take(wc.id()) else {
                    dev.stats.bad_completions.add(1);
                    // Those that are posted complete in order: if this is one, nothing is right.
                    if self.queue.is_of_this_life(wc.id()) {
                        dev.restart_soon();
                    }
                    continue;
                };
                match wc.status() {
                    Status::Success => {
                        Self::deliver(dev, napi, &self.identity, wc, slot);
                    }
                    status => {
                        if status != Status::Flushed {
                            dev.stats.rx_failed.add(1);
                        }
                        dead(dev, "receive", status);
                    }
                }
            }
            if !dev.is_broken() {
                refill(&mut self.queue, dev);
            }
            if !more {
                break;
            }
        }
        done
    }
}

/// Posts idle receive slots; what fails is tried again at the next poll, or by a rebuild if no slot
/// is posted.
fn refill(queue: &mut RecvQueue<{ wire::FRONT_LEN }>, dev: &Device<Port>) {
    match queue.post(&dev.transport.qp) {
        Ok(0) => return,
        Ok(_) => {}
        Err(_) => dev.restart_soon(),
    }
    dev.stats.rx_refill_failed.add(1);
    if queue.waiting() == 0 {
        // No completion will come to try again.
        dev.restart_soon();
    }
}

/// Empties a queue, of which no more completions are expected, and gives each to `visit`.
fn discard(cq: &mut Completions<'_>, mut visit: impl FnMut(&Wc)) {
    for _ in 0..1 << 16 {
        let (batch, _) = cq.next(usize::MAX);
        if batch.is_empty() {
            break;
        }
        batch.iter().for_each(&mut visit);
    }
}

/// The transport of an interface, shared by all contexts.
pub(crate) struct Transport {
    pub(crate) qp: Arc<Qp>,
    send: Arc<NapiCq<SendPoll>>,
    recv: Arc<NapiCq<RecvPoll>>,
    progress: SendProgress,
    sizes: RingSizes,
    vector: u32,
    port: PortNum,
}

impl Transport {
    /// Makes the transport of `dev`, stopped. `index` spreads interfaces over completion vectors.
    pub(crate) fn new(
        dev: &UnregisteredDevice<Port>,
        pd: &Arc<Pd>,
        port: PortNum,
        sizes: RingSizes,
        index: u32,
    ) -> Result<(Self, Tx)> {
        let hca = pd.device();
        let (half, completer) = send_queue(hca, sizes.send, 0)?;
        let vector = index.wrapping_mul(2);
        let send = NapiCq::new(
            dev,
            hca.clone(),
            sizes.send,
            vector,
            SendPoll {
                completer,
                ring: sizes.send,
            },
        )?;
        let recv = NapiCq::new(
            dev,
            hca.clone(),
            sizes.recv,
            vector.wrapping_add(1),
            RecvPoll {
                queue: RecvQueue::new(pd.clone(), sizes.recv)?,
                identity: Identity::default(),
            },
        )?;
        let qp = Qp::new(
            pd.clone(),
            send.clone(),
            recv.clone(),
            Caps {
                send_wr: sizes.send,
                recv_wr: sizes.recv,
                send_sge: hca
                    .max_send_sge()
                    .min(crate::net::skb::MAX_FRAGS as u32 + 1),
                recv_sge: 2,
                segmentation: hca.has_checksums() && hca.has_segmentation(),
            },
        )?;
        let queue = half.with(qp.clone())?;
        Ok((
            Self {
                qp,
                send,
                recv,
                progress: queue.progress(),
                sizes,
                vector,
                port,
            },
            Tx {
                queue,
                last: neigh::Cache::new()?,
                last_peer: PeerCache::new(),
                chained_to: None,
            },
        ))
    }

    /// Makes a connected queue pair. All share a send completion queue of `completions`, which is
    /// polled together with that of datagrams.
    pub(crate) fn connected_qp(
        &self,
        completions: u32,
        recv: Arc<NapiCq<ConnectedRecvPoll>>,
        srq: Arc<Srq>,
        caps: Caps,
        watcher: Arc<dyn qp::Watcher>,
    ) -> Result<Arc<Qp>> {
        let pd = self.qp.pd().clone();
        self.send.extend(completions, self.vector)?;
        Qp::new_connected(pd, self.send.clone(), recv, srq, caps, watcher)
    }

    pub(crate) fn sizes(&self) -> RingSizes {
        self.sizes
    }

    /// Follows the send ring.
    pub(crate) fn progress(&self) -> SendProgress {
        self.progress.clone()
    }

    /// Looks for what has come, or has been sent, without an event.
    pub(crate) fn look(&self) {
        self.send.look();
        self.recv.look();
    }

    /// The next event of the send queue is lost.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    pub(crate) fn lose_send_event(&self) {
        self.send.lose_event();
    }

    /// The next event of the receive queue is lost.
    #[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
    pub(crate) fn lose_recv_event(&self) {
        self.recv.lose_event();
    }

    /// RESET → running, in the partition at `pkey_index` as `own`. The transmit queue stays stopped.
    ///
    /// # Errors
    ///
    /// Of the verbs, or `ENOMEM`: [`Self::stop`] must follow.
    pub(crate) fn start(
        &self,
        locked: &mut Locked<'_, Port>,
        life: u32,
        (own, broadcast): (Gid, Gid),
        pkey_index: u16,
        qkey: QKey,
    ) -> Result {
        let dev = locked.dev();
        if let Some((handler, _)) = self.send.quiet(locked) {
            dev.stats
                .tx_failed
                .add(handler.completer.begin(life).into());
        }
        dev.tx_lock().queue.begin(life);
        self.qp
            .init(self.port, pkey_index, qkey)
            .and_then(|()| self.fill(locked, life, own, broadcast))
            .and_then(|()| self.qp.ready())?;
        self.send.enable(locked);
        self.recv.enable(locked);
        Ok(())
    }

    fn fill(&self, locked: &mut Locked<'_, Port>, life: u32, gid: Gid, broadcast: Gid) -> Result {
        let qpn = self.qp.qpn().0;
        let (handler, _) = self.recv.quiet(locked).ok_or(EBUSY)?;
        handler.identity = Identity {
            gid,
            qpn,
            broadcast,
        };
        handler.queue.begin(life);
        handler.queue.fill(&self.qp)?;
        if handler.queue.waiting() == 0 {
            return Err(ENOMEM);
        }
        Ok(())
    }

    /// Any state → RESET: lets sends complete for a moment, then takes back all buffers.
    ///
    /// # Errors
    ///
    /// Of the verbs: the queue pair may still use its buffers, and has them.
    pub(crate) fn stop(&self, locked: &mut Locked<'_, Port>, life: u32) -> Result {
        let dev = locked.dev();
        locked.disable_queue();
        dev.tx_lock().flush(dev);
        let last = self.progress.head();
        for _ in 0..DRAIN_STEPS {
            if dev.is_broken() || self.progress.passed(last) {
                break;
            }
            kernel::time::delay::fsleep(Delta::from_millis(1));
        }
        self.send.disable(locked);
        self.recv.disable(locked);
        // A completion may have woken the queue meanwhile; from here on there are none.
        locked.disable_queue();
        // ERR first, if that can be: the device finishes what it has begun, and flushes the rest. What
        // RESET finds in the send queue Soft-RoCE mistakes for a request of the next life.
        if self.qp.error().is_ok() {
            for _ in 0..FLUSH_STEPS {
                self.settle_quietly(locked);
                if self.progress.passed(self.progress.head()) {
                    break;
                }
                kernel::time::delay::fsleep(Delta::from_millis(1));
            }
        }
        self.qp.reset().inspect_err(|error| {
            crate::net::warn_seldom!("{}: resetting the QP failed: {:?}\n", dev.name(), error);
        })?;
        self.reclaim(locked, life);
        locked.reset_queue();
        Ok(())
    }

    /// Takes back what completed to the send queue while it is disabled.
    fn settle_quietly(&self, locked: &mut Locked<'_, Port>) {
        let dev = locked.dev();
        if let Some((handler, mut cq)) = self.send.quiet(locked) {
            discard(&mut cq, |wc| {
                handler.settle(dev, wc, 0);
            });
        }
    }

    fn reclaim(&self, locked: &mut Locked<'_, Port>, life: u32) {
        let dev = locked.dev();
        self.settle_quietly(locked);
        if let Some((handler, _)) = self.send.quiet(locked) {
            let lost = handler.completer.begin(life);
            dev.stats.tx_failed.add(lost.into());
        }
        if let Some((handler, mut cq)) = self.recv.quiet(locked) {
            discard(&mut cq, |wc| match wc.status() {
                Status::Success => dev.stats.rx_unread.add(1),
                Status::Flushed => {}
                _ => dev.stats.rx_failed.add(1),
            });
            handler.queue.begin(life);
            handler.queue.release();
        }
    }
}
