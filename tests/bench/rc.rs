// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! One end of a stream over a connection.
//!
//! As [`crate::end`], with a connected queue pair and a shared receive queue. The pages of a received
//! message stay in the queue, so nothing is allocated while the stream runs. The listening end is
//! asked for the connection by the streaming one, and accepts one.

use crate::{
    end::{
        Counter,
        Plan, //
    },
    ib::{
        ah,
        cm::{
            self,
            Accept,
            Acceptor,
            ConnId,
            Connect,
            Handler,
            Id,
            Listener,
            Offer,
            Reason, //
        },
        cq::{
            Completions,
            Napi,
            NapiCq,
            Poll,
            Status, //
        },
        device::Device,
        pd::Pd,
        qp::{
            self,
            Caps,
            Qp,
            Rtr, //
        },
        queue::{
            send_queue,
            Connected,
            Peer,
            SendCompleter,
            SendProgress,
            SendQueue, //
        },
        srq::{
            Shape,
            SharedQueue, //
        },
        Gid,
        PortNum, //
    },
    net::{
        device::{
            self as netdev,
            Groups,
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
            PacketType,
            Skb, //
        },
    },
    within,
    PATIENCE, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        new_mutex,
        Arc,
        Mutex, //
    },
};

/// Longest message: what the driver's connections carry.
pub(crate) const MAX_SIZE: usize = 65_524;

/// The GID that a RoCE device always has: the link-local one of its Ethernet.
const GID_INDEX: u8 = 0;

const SERVICE: u64 = 0x0100_0000_00be_0c00;
const PSN: u32 = 1;
const LIFE: u32 = 1;

/// Receives for each message on its way.
const RECV_FACTOR: u32 = 2;

/// What a peer waits that has found no receive: 10 ms.
const RTR: Rtr = Rtr {
    min_rnr_timer: 20,
    rq_psn: None,
    mtu: None,
};

/// What all contexts share.
pub(crate) struct Shared {
    send: Arc<NapiCq<SendSide>>,
    recv: Arc<NapiCq<RecvSide>>,
    size: usize,
    sent: Counter,
    received: Counter,
    posts: Counter,
    /// Completions that were not a success or not what was expected, and refused posts.
    failures: Atomic<u64>,
}

impl Shared {
    fn fail(&self) {
        self.failures.add(1, Relaxed);
    }
}

/// The transmit lock's part.
pub(crate) struct Tx {
    queue: SendQueue<Connected>,
    /// Packets that are not posted.
    idle: KVec<Skb>,
    running: bool,
}

impl Tx {
    /// Posts idle packets. Nothing once something failed.
    fn pump(&mut self, shared: &Shared) {
        if !self.running || shared.failures.load(Relaxed) != 0 {
            return;
        }
        while let Some(skb) = self.idle.pop() {
            if let Err((skb, _)) = self.queue.push(skb, &Peer) {
                let _ = self.idle.push_within_capacity(skb);
                shared.fail();
                break;
            }
            if self.queue.chain_is_full() {
                Self::flush(&mut self.queue, shared);
            }
        }
        Self::flush(&mut self.queue, shared);
    }

    fn flush(queue: &mut SendQueue<Connected>, shared: &Shared) {
        match queue.flush() {
            Ok(0) => {}
            Ok(_) => shared.posts.add(1),
            Err(_) => shared.fail(),
        }
    }
}

/// Handles completed sends.
pub(crate) struct SendSide(SendCompleter<Connected>);

impl Poll for SendSide {
    type Driver = Shared;

    fn poll(
        &mut self,
        dev: &netdev::Device<Shared>,
        _napi: Napi<'_>,
        cq: &mut Completions<'_>,
        _budget: usize,
    ) -> usize {
        let mut tx = dev.tx_lock();
        loop {
            let (batch, more) = cq.next(usize::MAX);
            for wc in batch {
                let done = self.0.complete_with(wc.id(), |skb| {
                    // There is room for all.
                    let _ = tx.idle.push_within_capacity(skb);
                });
                match (done, wc.status()) {
                    (Some(done), Status::Success) => dev.sent.add(done.packets.into()),
                    _ => dev.fail(),
                }
            }
            if !more {
                break;
            }
        }
        tx.pump(dev);
        0
    }
}

/// Handles received messages.
pub(crate) struct RecvSide(SharedQueue);

impl Poll for RecvSide {
    type Driver = Shared;

    fn poll(
        &mut self,
        dev: &netdev::Device<Shared>,
        _napi: Napi<'_>,
        cq: &mut Completions<'_>,
        budget: usize,
    ) -> usize {
        let mut done = 0;
        while done < budget {
            let (batch, more) = cq.next(budget - done);
            done += batch.len();
            for wc in batch {
                let right = self.0.take(wc.id()).is_some()
                    && wc.status() == Status::Success
                    && wc.byte_len() == dev.size;
                if !right {
                    dev.fail();
                }
            }
            dev.received.add(batch.len() as u64);
            if dev.failures.load(Relaxed) == 0 && self.0.post() != Ok(0) {
                dev.fail();
            }
            if !more {
                break;
            }
        }
        done
    }
}

/// Events of queue pairs say nothing that completions do not.
struct Deaf;

impl qp::Watcher for Deaf {
    fn event(&self, _event: qp::Event) {}
}

/// The connection of an end.
#[pin_data]
struct Line {
    qp: Arc<Qp>,
    up: Atomic<bool>,
    broken: Atomic<bool>,
    #[pin]
    id: Mutex<Option<ConnId>>,
}

impl Line {
    fn tried(&self, result: Result) {
        match result {
            Ok(()) => self.up.store(true, Relaxed),
            Err(error) => {
                pr_err!("connecting failed: {:?}\n", error);
                self.broken.store(true, Relaxed);
            }
        }
    }
}

impl Handler for Line {
    fn event(&self, id: &Id, event: cm::Event<'_>) {
        match event {
            cm::Event::Replied(_) => {
                let up = self
                    .qp
                    .to_rtr(id, RTR)
                    .and_then(|()| self.qp.to_rts(id))
                    .and_then(|()| id.ready(&[]));
                self.tried(up);
            }
            cm::Event::Established => self.up.store(true, Relaxed),
            cm::Event::DisconnectAsked => {
                let _ = id.answer_disconnect();
            }
            cm::Event::Rejected { .. } | cm::Event::RequestFailed | cm::Event::ReplyFailed => {
                self.broken.store(true, Relaxed);
            }
            cm::Event::Disconnected | cm::Event::TimewaitOver => {}
        }
    }
}

/// Accepts the first request.
struct Door {
    line: Arc<Line>,
    reaper: Arc<cm::Reaper>,
}

impl Door {
    fn accept(&self, offer: Offer<'_>) -> Result {
        let id = offer.keep(&self.reaper, self.line.clone())?;
        let rtr = Rtr {
            rq_psn: Some(PSN),
            ..RTR
        };
        let qp = &self.line.qp;
        qp.to_rtr(&id, rtr)?;
        qp.to_rts(&id)?;
        id.accept(&Accept {
            qpn: qp.qpn(),
            psn: PSN,
            private: &[],
            rnr_retries: qp::MAX_RETRIES,
            srq: true,
        })?;
        *self.line.id.lock() = Some(id);
        Ok(())
    }
}

impl Acceptor for Door {
    fn request(&self, offer: Offer<'_>) {
        if self.line.id.lock().is_some() {
            let _ = offer.reject(Reason::NO_QP, &[]);
        } else if let Err(error) = self.accept(offer) {
            pr_err!("accepting failed: {:?}\n", error);
        }
    }
}

/// One end of the stream.
pub(crate) struct End {
    // Dropped before the device: the queue pair keeps the NAPI contexts.
    line: Arc<Line>,
    // Dropped before what follows, which it uses.
    dev: Registration<Shared>,
    reaper: Arc<cm::Reaper>,
    progress: SendProgress,
    port: PortNum,
    gid: Gid,
    mac: [u8; 6],
    mtu: u32,
}

impl End {
    /// Makes an end on a port, which receives and does not send yet.
    pub(crate) fn new(
        device: &Arc<Device>,
        port: PortNum,
        link_ops: &Arc<LinkOps<Shared>>,
        plan: &Plan,
    ) -> Result<Self> {
        let mtu = device.query_port(port)?.mtu;
        let gid = device.gid(port, GID_INDEX.into())?;
        let mac = device
            .lower(port)
            .and_then(|lower| lower.mac())
            .ok_or(ENODEV)?;
        let pd = Pd::new(device.clone())?;
        let unregistered = UnregisteredDevice::<Shared>::new(c"rawverbs%d")?;
        let receives = plan.window.saturating_mul(RECV_FACTOR);
        let shape = Shape::within(device, receives, plan.size)?;
        let mut queue = SharedQueue::new(pd.clone(), shape, 0, LIFE)?;
        if queue.fill()? != 0 {
            return Err(ENOMEM);
        }
        let srq = queue.srq().clone();
        let (half, mut completer) = send_queue::<Connected>(device, plan.window, 0)?;
        completer.begin(LIFE);
        let send = NapiCq::new(
            &unregistered,
            device.clone(),
            plan.window,
            0,
            SendSide(completer),
        )?;
        let slots = receives.saturating_mul(2);
        let recv = NapiCq::new(&unregistered, device.clone(), slots, 1, RecvSide(queue))?;
        let caps = Caps {
            send_wr: plan.window,
            recv_wr: 0,
            send_sge: device
                .max_send_sge()
                .min(crate::net::skb::MAX_FRAGS as u32 + 1),
            recv_sge: 0,
            segmentation: false,
        };
        let watcher = Arc::new(Deaf, GFP_KERNEL)?;
        let qp = Qp::new_connected(pd, send.clone(), recv.clone(), srq, caps, watcher)?;
        let mut queue = half.with(qp.clone())?;
        queue.begin(LIFE);
        let progress = queue.progress();
        qp.to_init(port, 0)?;
        let setup = Setup {
            address: &[0; 20],
            broadcast: &[0xff; 20],
            hardware_type: 32,
            mtu: 68,
            min_mtu: 68,
            max_mtu: 68,
            port: 0,
            scatter_gather: false,
            offloads: Default::default(),
            parent: device.parent(),
            watchdog: 10,
        };
        let shared = Shared {
            send,
            recv,
            size: plan.size,
            sent: Counter::new(),
            received: Counter::new(),
            posts: Counter::new(),
            failures: Atomic::new(0),
        };
        let tx = Tx {
            queue,
            idle: packets(plan)?,
            running: false,
        };
        let dev = unregistered.register(
            &setup,
            &Neighbourhood::initial(),
            link_ops.clone(),
            Arc::pin_init(Link::new(), GFP_KERNEL)?,
            Ok(shared),
            (),
            tx,
        )?;
        let line = Arc::pin_init(
            pin_init!(Line {
                qp,
                up: Atomic::new(false),
                broken: Atomic::new(false),
                id <- new_mutex!(None),
            }),
            GFP_KERNEL,
        )?;
        {
            let mut locked = dev.lock();
            dev.send.enable(&mut locked);
            dev.recv.enable(&mut locked);
        }
        Ok(Self {
            dev,
            line,
            reaper: cm::Reaper::new(device.clone())?,
            progress,
            port,
            gid,
            mac,
            mtu,
        })
    }

    /// Connects to `other`.
    pub(crate) fn connect(&self, other: &End) -> Result {
        let door = Arc::new(
            Door {
                line: other.line.clone(),
                reaper: other.reaper.clone(),
            },
            GFP_KERNEL,
        )?;
        let listener = Listener::new(&other.reaper, other.port, SERVICE, door)?;
        let id = ConnId::new(&self.reaper, self.line.clone())?;
        let asked = id.connect(&Connect {
            path: cm::Path {
                to: ah::Attr {
                    gid: other.gid,
                    global: true,
                    sgid_index: GID_INDEX,
                    hop_limit: 64,
                    dmac: other.mac,
                    ..ah::Attr::default()
                },
                pkey: 0xffff,
                mtu: self.mtu.min(other.mtu),
                life_time: 14,
                ..cm::Path::default()
            },
            service: SERVICE,
            qpn: self.line.qp.qpn(),
            psn: PSN,
            ..Connect::new(self.port)
        });
        *self.line.id.lock() = Some(id);
        let up = |line: &Line| line.up.load(Relaxed) || line.broken.load(Relaxed);
        let both = asked.is_ok() && within(PATIENCE, || up(&self.line) && up(&other.line));
        listener.stop();
        asked?;
        let broken = [self, other].map(|end| end.line.broken.load(Relaxed));
        match both && broken == [false; 2] {
            true => Ok(()),
            false => Err(ECONNREFUSED),
        }
    }

    /// Sends from now on.
    pub(crate) fn begin(&self) {
        let mut tx = self.dev.tx_lock();
        tx.running = true;
        tx.pump(&self.dev);
    }

    /// Sends no more, and waits until everything posted has completed; false if it does not.
    pub(crate) fn finish(&self) -> bool {
        self.dev.tx_lock().running = false;
        let last = self.progress.head();
        within(PATIENCE, || self.progress.passed(last))
    }

    /// Messages sent.
    pub(crate) fn sent(&self) -> u64 {
        self.dev.sent.get()
    }

    /// Messages received.
    pub(crate) fn received(&self) -> u64 {
        self.dev.received.get()
    }

    /// Chains posted.
    pub(crate) fn posts(&self) -> u64 {
        self.dev.posts.get()
    }

    /// Anything but a success.
    pub(crate) fn failures(&self) -> u64 {
        self.dev.failures.load(Relaxed)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.line.qp.error();
        let last = self.progress.head();
        let _ = within(1, || self.progress.passed(last));
        drop(self.line.id.lock().take());
        self.reaper.reap();
        let mut locked = self.dev.lock();
        self.dev.send.disable(&mut locked);
        self.dev.recv.disable(&mut locked);
    }
}

/// The packets of a window.
fn packets(plan: &Plan) -> Result<KVec<Skb>> {
    let mut packets = KVec::with_capacity(plan.window as usize, GFP_KERNEL)?;
    for number in 0..plan.window {
        let mut skb = NewSkb::alloc(plan.size).ok_or(ENOMEM)?;
        let pattern = [number as u8; 64];
        let mut left = plan.size;
        while left > 0 {
            let piece = left.min(pattern.len());
            if !skb.append(&pattern[..piece]) {
                return Err(ENOMEM);
            }
            left -= piece;
        }
        packets.push(skb.finish(0, 0, PacketType::Host), GFP_KERNEL)?;
    }
    Ok(packets)
}

impl ethtool::Ops for Shared {
    const COUNTERS: &'static [&'static str] = &[];

    fn info(_dev: &netdev::Device<Self>, _info: &mut ethtool::Info<'_>) {}

    fn rings(_dev: &netdev::Device<Self>) -> ethtool::Rings {
        ethtool::Rings {
            rx: 0,
            rx_max: 0,
            tx: 0,
            tx_max: 0,
        }
    }

    fn counters(_dev: &netdev::Device<Self>, _values: &mut [u64]) {}
}

impl netdev::Driver for Shared {
    type Control = ();
    type Tx = Tx;

    const ADDRESS_LEN: usize = 20;
    const HEADER_LEN: usize = 24;

    fn open(_locked: &mut Locked<'_, Self>) -> Result {
        Err(EOPNOTSUPP)
    }

    fn stop(_locked: &mut Locked<'_, Self>) {}

    fn start_xmit(_dev: &netdev::Device<Self>, _tx: &mut Tx, _skb: Skb) {}

    fn tx_timeout(_dev: &netdev::Device<Self>) {}

    fn groups_changed(_locked: &mut Locked<'_, Self>, _rtnl: &Rtnl, _groups: Groups<'_>) -> Result {
        Ok(())
    }

    fn change_mtu(_locked: &mut Locked<'_, Self>, mtu: u32) -> Result<u32> {
        Ok(mtu)
    }

    fn stats(_dev: &netdev::Device<Self>, _stats: &mut netdev::Stats) {}

    fn write_header(_header: &mut [u8], _ethertype: u16, _destination: &[u8]) {}
}

impl LinkKind for Shared {
    const ATTRIBUTES: usize = 0;

    fn fill(_dev: &netdev::Device<Self>, _attributes: &mut Attributes<'_>) -> Result {
        Ok(())
    }
}
