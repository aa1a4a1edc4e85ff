// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The whole: the subnet, the HCAs in its slots, and the worker that carries MADs.
//!
//! Locks: [`Fabric::devices`] is taken first, in process context, by whoever adds or removes
//! HCAs. [`Fabric::net`], the MAD queue, the filters and the delayed datagrams are leaves: with
//! one of them held nothing else is locked.

use crate::{
    cq::Kicks,
    filter::{
        FilterTable,
        Verdict, //
    },
    glue::{
        self,
        Device,
        Forgotten,
        OwnedQueue, //
    },
    hca::{
        Hca,
        HcaConfig,
        Qps, //
    },
    mad::{
        Frame,
        PERMISSIVE_LID, //
    },
    null::{
        self,
        Figures, //
    },
    probe::{
        self,
        Misuse,
        Order,
        Seen, //
    },
    qp::{
        Kind,
        Qp, //
    },
    subnet::{
        words,
        Attach,
        Destination,
        Loss,
        Passage,
        Subnet,
        MAX_HCAS, //
    },
    switch::SwitchConfig,
    ud::{
        Address,
        Header,
        Lost,
        Payload,
        GRH, //
    },
};
use core::fmt::Write;
use kernel::{
    interrupt::{
        local_interrupt_disable,
        LocalInterruptDisabled, //
    },
    new_mutex, new_spinlock_irq,
    prelude::*,
    str::CString,
    sync::{
        atomic::{
            ordering::{
                Full,
                Relaxed, //
            },
            Atomic, //
        },
        Arc,
        Mutex,
        SpinLockGuard,
        SpinLockIrq,
        SpinLockIrqGuard, //
    },
    workqueue::{
        impl_has_delayed_work,
        impl_has_work,
        new_delayed_work,
        new_work,
        DelayedWork,
        Work,
        WorkItem, //
    },
};

/// MADs that may wait for the worker.
const MADS: usize = 4096;
/// Datagrams and MADs that may be delayed at a time.
const DELAYED: usize = 1024;

/// Well-known Q_Key of QP 1.
const GSI_QKEY: u32 = 0x8001_0000;

/// Datagrams that are remembered.
const RECORDS: usize = 256;

/// What left a HCA: a datagram, without its payload.
#[derive(Clone, Copy)]
pub(crate) struct Sent {
    pub(crate) from: usize,
    pub(crate) src_qp: u32,
    pub(crate) dest_qp: u32,
    pub(crate) qkey: u32,
    pub(crate) pkey: u16,
    pub(crate) len: usize,
    pub(crate) address: Address,
}

impl Sent {
    fn show(&self, out: &mut dyn Write) -> core::fmt::Result {
        let Self { address: to, .. } = self;
        write!(
            out,
            "ibf{} src_qp={} dest_qp={} qkey={:#010x} pkey={:#06x} len={} dlid={:#06x} sl={} rate={}",
            self.from,
            self.src_qp,
            self.dest_qp,
            self.qkey,
            self.pkey,
            self.len,
            to.dlid,
            to.sl,
            to.static_rate
        )?;
        if let Some(route) = &to.route {
            write!(
                out,
                " sgid_index={} hop_limit={} tclass={} flow={:#x} dgid=",
                route.sgid_index, route.hop_limit, route.traffic_class, route.flow_label
            )?;
            for byte in route.dgid {
                write!(out, "{byte:02x}")?;
            }
        }
        writeln!(out)
    }
}

/// Ways that are remembered at a time.
const WAYS: usize = 256;

/// What took a way since the ports on it were told.
pub(crate) struct Traffic {
    packets: Atomic<u64>,
    words: Atomic<u64>,
}

impl Traffic {
    /// Counts a packet of `bytes`.
    #[inline(always)]
    pub(crate) fn add(&self, bytes: usize) {
        self.packets.add(1, Relaxed);
        self.words.add(words(bytes), Relaxed);
    }
}

/// A way that datagrams take without looking at the subnet.
struct Way {
    passage: Passage,
    traffic: Arc<Traffic>,
}

/// The subnet and who is in it.
pub(crate) struct Net {
    pub(crate) subnet: Subnet,
    ways: KVec<Way>,
    places: [Option<KBox<Place>>; MAX_HCAS],
    /// The last datagrams sent, if that is wanted.
    recording: bool,
    sent: Fifo<Sent>,
}

/// The way to the net.
#[derive(Clone, Copy)]
pub(crate) struct NetLock<'a>(&'a Fabric);

impl<'a> NetLock<'a> {
    /// To look, and to change it.
    pub(crate) fn lock(self) -> SpinLockIrqGuard<'a, Net> {
        let mut net = self.0.net.lock();
        self.look(&mut net);
        net
    }

    /// All is counted that was sent until now, and ways are to be found anew.
    fn look(self, net: &mut Net) {
        self.0.looks.store(self.looks().wrapping_add(1), Relaxed);
        net.settle();
    }

    /// How often somebody has looked who may have changed something.
    #[inline(always)]
    pub(crate) fn looks(self) -> u64 {
        self.0.looks.load(Relaxed)
    }

    /// As [`Self::lock`], with interrupts off already.
    pub(crate) fn lock_with<'b>(self, irq: &'b LocalInterruptDisabled) -> SpinLockGuard<'b, Net>
    where
        'a: 'b,
    {
        let mut net = self.0.net.lock_with(irq);
        self.look(&mut net);
        net
    }

    /// For packets: nothing that another packet's way depends on may be changed.
    #[inline]
    pub(crate) fn busy<'b>(self, irq: &'b LocalInterruptDisabled) -> SpinLockGuard<'b, Net>
    where
        'a: 'b,
    {
        self.0.net.lock_with(irq)
    }
}

/// A HCA and its queue pairs.
struct Place {
    hca: Arc<Hca>,
    qps: Qps,
}

impl Net {
    /// Tells the ports of what has passed them.
    fn settle(&mut self) {
        for Way { passage, traffic } in &self.ways {
            let packets = traffic.packets.xchg(0, Relaxed);
            if packets != 0 {
                let words = traffic.words.xchg(0, Relaxed);
                self.subnet.pass(*passage, packets, words);
            }
        }
    }

    /// Where datagrams that take a passage are to be counted.
    pub(crate) fn traffic(&mut self, passage: Passage) -> Option<Arc<Traffic>> {
        if let Some(way) = self.ways.iter().find(|way| way.passage == passage) {
            return Some(way.traffic.clone());
        }
        if self.ways.len() == WAYS {
            self.settle();
            self.ways.clear();
        }
        let traffic = Arc::new(
            Traffic {
                packets: Atomic::new(0),
                words: Atomic::new(0),
            },
            GFP_ATOMIC,
        )
        .ok()?;
        let way = Way {
            passage,
            traffic: traffic.clone(),
        };
        self.ways.push(way, GFP_ATOMIC).ok()?;
        Some(traffic)
    }

    /// Remembers datagrams from now on, or no more; the old ones are forgotten.
    pub(crate) fn record(&mut self, on: bool) {
        self.recording = on;
        while self.sent.pop().is_some() {}
    }

    #[inline]
    pub(crate) fn is_recording(&self) -> bool {
        self.recording
    }

    #[cold]
    pub(crate) fn note(&mut self, sent: Sent) {
        if let Err(sent) = self.sent.push(sent) {
            self.sent.pop();
            let _ = self.sent.push(sent);
        }
    }

    /// What was remembered, the oldest first.
    pub(crate) fn each_sent(&self) -> impl Iterator<Item = &Sent> {
        self.sent.iter()
    }

    #[inline]
    pub(crate) fn hca(&self, slot: usize) -> Option<Arc<Hca>> {
        Some(self.places.get(slot)?.as_ref()?.hca.clone())
    }

    #[inline]
    pub(crate) fn qps(&self, slot: usize) -> Option<&Qps> {
        Some(&self.places.get(slot)?.as_ref()?.qps)
    }

    pub(crate) fn qps_mut(&mut self, slot: usize) -> Option<&mut Qps> {
        Some(&mut self.places.get_mut(slot)?.as_mut()?.qps)
    }
}

/// A MAD on its way.
#[derive(Clone)]
pub(crate) struct MadPacket {
    pub(crate) from: usize,
    pub(crate) kind: Kind,
    pub(crate) qkey: u32,
    pub(crate) pkey: u16,
    pub(crate) solicited: bool,
    pub(crate) grh: Option<[u8; GRH]>,
    pub(crate) frame: Frame,
}

impl MadPacket {
    /// What a node's agent sends by itself.
    fn smp(from: usize, frame: Frame) -> Self {
        Self {
            from,
            kind: Kind::Smi,
            qkey: 0,
            pkey: 0xffff,
            solicited: false,
            grh: None,
            frame,
        }
    }
}

/// First in, first out, with fixed room.
struct Fifo<T> {
    slots: KVVec<Option<T>>,
    head: usize,
    len: usize,
}

impl<T> Fifo<T> {
    fn new(room: usize) -> Result<Self> {
        let mut slots = KVVec::with_capacity(room, GFP_KERNEL)?;
        for _ in 0..room {
            slots.push(None, GFP_KERNEL)?;
        }
        Ok(Self {
            slots,
            head: 0,
            len: 0,
        })
    }

    fn push(&mut self, value: T) -> Result<(), T> {
        if self.len == self.slots.len() {
            return Err(value);
        }
        let at = (self.head + self.len) % self.slots.len();
        match self.slots.get_mut(at) {
            Some(slot) => *slot = Some(value),
            None => return Err(value),
        }
        self.len += 1;
        Ok(())
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        let room = self.slots.len().max(1);
        (0..self.len).filter_map(move |at| self.slots.get((self.head + at) % room)?.as_ref())
    }

    fn pop(&mut self) -> Option<T> {
        let value = self.slots.get_mut(self.head)?.take()?;
        self.head = (self.head + 1) % self.slots.len();
        self.len -= 1;
        Some(value)
    }
}

/// Something that is to arrive later.
enum Late {
    Mad(usize, KBox<MadPacket>),
    Data(usize, KBox<Header>, KVec<u8>),
    /// Somebody who waits.
    Call(Arc<Qp>),
    /// A datagram from a slot to a slot that waits for the sender's next one.
    Held(usize, usize, KBox<Header>, KVec<u8>),
}

/// A count of something that must not happen.
pub(crate) struct Anomaly(Atomic<u64>);

impl Anomaly {
    const fn new() -> Self {
        Self(Atomic::new(0))
    }

    #[cold]
    pub(crate) fn hit(&self) {
        self.0.add(1, Relaxed);
    }

    /// Forgets what a test has provoked; false if that is not all there is.
    pub(crate) fn forgive(&self, count: u64) -> bool {
        self.0.cmpxchg(count, 0, Full).is_ok()
    }
}

/// Mistakes of the fabric's users, and its own. Each fails a test run.
pub(crate) struct Anomalies {
    pub(crate) cq_overflow: Anomaly,
    pub(crate) bad_lkey: Anomaly,
    pub(crate) over_post: Anomaly,
    pub(crate) wrong_state: Anomaly,
    pub(crate) bad_transition: Anomaly,
    pub(crate) too_many_sges: Anomaly,
    pub(crate) short_buffer: Anomaly,
    pub(crate) lso_without_flag: Anomaly,
    pub(crate) csum_without_cap: Anomaly,
    pub(crate) bad_csum_request: Anomaly,
    pub(crate) bad_lso: Anomaly,
    pub(crate) attached_at_destroy: Anomaly,
    pub(crate) leaked_object: Anomaly,
    pub(crate) mad_overflow: Anomaly,
    pub(crate) executor_full: Anomaly,
}

impl Anomalies {
    const fn new() -> Self {
        Self {
            cq_overflow: Anomaly::new(),
            bad_lkey: Anomaly::new(),
            over_post: Anomaly::new(),
            wrong_state: Anomaly::new(),
            bad_transition: Anomaly::new(),
            too_many_sges: Anomaly::new(),
            short_buffer: Anomaly::new(),
            lso_without_flag: Anomaly::new(),
            csum_without_cap: Anomaly::new(),
            bad_csum_request: Anomaly::new(),
            bad_lso: Anomaly::new(),
            attached_at_destroy: Anomaly::new(),
            leaked_object: Anomaly::new(),
            mad_overflow: Anomaly::new(),
            executor_full: Anomaly::new(),
        }
    }

    pub(crate) fn each(&self) -> [(&'static str, &Anomaly); 15] {
        [
            ("cq_overflow", &self.cq_overflow),
            ("bad_lkey", &self.bad_lkey),
            ("over_post", &self.over_post),
            ("wrong_state", &self.wrong_state),
            ("bad_transition", &self.bad_transition),
            ("too_many_sges", &self.too_many_sges),
            ("short_buffer", &self.short_buffer),
            ("lso_without_flag", &self.lso_without_flag),
            ("csum_without_cap", &self.csum_without_cap),
            ("bad_csum_request", &self.bad_csum_request),
            ("bad_lso", &self.bad_lso),
            ("attached_at_destroy", &self.attached_at_destroy),
            ("leaked_object", &self.leaked_object),
            ("mad_overflow", &self.mad_overflow),
            ("executor_full", &self.executor_full),
        ]
    }
}

/// The fabric.
#[pin_data]
pub(crate) struct Fabric {
    default: HcaConfig,
    any_csum: Atomic<bool>,
    pub(crate) anomalies: Anomalies,
    queue: OwnedQueue,
    /// Of what queue pairs tell their consumers.
    events: OwnedQueue,
    #[pin]
    devices: Mutex<[Option<Device>; MAX_HCAS]>,
    #[pin]
    measured: Mutex<Option<Figures>>,
    #[pin]
    seen: Mutex<Option<Seen>>,
    #[pin]
    forgotten: Mutex<KVec<Forgotten>>,
    #[pin]
    net: SpinLockIrq<Net>,
    looks: Atomic<u64>,
    #[pin]
    mads: SpinLockIrq<Fifo<KBox<MadPacket>>>,
    #[pin]
    late: SpinLockIrq<KVec<(u64, Late)>>,
    #[pin]
    filters: SpinLockIrq<FilterTable>,
    #[pin]
    work: Work<Fabric, 1>,
    #[pin]
    timer: DelayedWork<Fabric, 2>,
}

impl_has_work! {
    impl HasWork<Fabric, 1> for Fabric { self.work }
}

impl_has_delayed_work! {
    impl HasDelayedWork<Fabric, 2> for Fabric { self.timer }
}

impl WorkItem<1> for Fabric {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.carry();
    }
}

impl WorkItem<2> for Fabric {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.poke();
    }
}

impl Fabric {
    pub(crate) fn new(switch: &SwitchConfig, default: HcaConfig) -> Result<Arc<Self>> {
        let net = Net {
            subnet: Subnet::new(switch)?,
            ways: KVec::with_capacity(WAYS, GFP_KERNEL)?,
            places: [const { None }; MAX_HCAS],
            recording: false,
            sent: Fifo::new(RECORDS)?,
        };
        let mads = Fifo::new(MADS)?;
        let late = KVec::with_capacity(DELAYED, GFP_KERNEL)?;
        let queue = OwnedQueue::new_ordered(c"ibf_mad")?;
        let events = OwnedQueue::new_ordered(c"ibf_events")?;
        Arc::pin_init(
            pin_init!(Self {
                default,
                any_csum: Atomic::new(false),
                anomalies: Anomalies::new(),
                queue,
                events,
                devices <- new_mutex!([const { None }; MAX_HCAS], "ibf_devices"),
                measured <- new_mutex!(None, "ibf_measured"),
                seen <- new_mutex!(None, "ibf_seen"),
                forgotten <- new_mutex!(KVec::new(), "ibf_forgotten"),
                net <- new_spinlock_irq!(net, "ibf_net"),
                looks: Atomic::new(0),
                mads <- new_spinlock_irq!(mads, "ibf_mads"),
                late <- new_spinlock_irq!(late, "ibf_late"),
                filters <- new_spinlock_irq!(FilterTable::new(), "ibf_filters"),
                work <- new_work!("ibf_carry"),
                timer <- new_delayed_work!("ibf_timer"),
            }),
            GFP_KERNEL,
        )
    }

    #[inline]
    pub(crate) fn net(&self) -> NetLock<'_> {
        NetLock(self)
    }

    /// One line per remembered datagram.
    pub(crate) fn show_sent(&self, out: &mut dyn Write) -> core::fmt::Result {
        // Written without the lock.
        let mut copy = KVec::new();
        for at in 0..RECORDS {
            let sent = self.net().lock().each_sent().nth(at).copied();
            let Some(sent) = sent else { break };
            if copy.push(sent, GFP_KERNEL).is_err() {
                break;
            }
        }
        for sent in &copy {
            sent.show(out)?;
        }
        Ok(())
    }

    pub(crate) fn events(&self) -> &OwnedQueue {
        &self.events
    }

    pub(crate) fn filters(&self) -> &SpinLockIrq<FilterTable> {
        &self.filters
    }

    pub(crate) fn default_config(&self) -> HcaConfig {
        self.default
    }

    /// Whether any HCA looks at checksums.
    #[inline]
    pub(crate) fn any_csum(&self) -> bool {
        self.any_csum.load(Relaxed)
    }

    // HCAs.

    /// Adds a HCA and plugs it into the switch.
    pub(crate) fn add(self: &Arc<Self>, slot: usize, config: HcaConfig) -> Result {
        let mut devices = self.devices.lock();
        let place = devices.get_mut(slot).ok_or(EINVAL)?;
        if place.is_some() {
            return Err(EEXIST);
        }
        let hca = Hca::new(self.clone(), slot as u8, config)?;
        let name = CString::try_from_fmt(fmt!("ibf{slot}"))?;
        let room = Subnet::room(&hca.ca_config())?;
        let entry = KBox::new(
            Place {
                hca: hca.clone(),
                qps: Qps::new(),
            },
            GFP_KERNEL,
        )?;
        if config.csum {
            // Before somebody looks, which ends what relies on the contrary.
            self.any_csum.store(true, Relaxed);
        }
        {
            let mut net = self.net().lock();
            net.subnet.add_ca(slot, room)?;
            if let Some(free) = net.places.get_mut(slot) {
                *free = Some(entry);
            }
        }
        match Device::register(hca, &name) {
            Ok(device) => *place = Some(device),
            Err(error) => {
                self.take_out(slot);
                return Err(error);
            }
        }
        let plugged = self
            .net()
            .lock()
            .subnet
            .connect(slot, Attach::Switch(slot as u8 + 1));
        if plugged.is_err() {
            drop(place.take());
            self.take_out(slot);
        }
        self.after();
        plugged
    }

    /// Removes a HCA under its users' feet.
    pub(crate) fn remove(self: &Arc<Self>, slot: usize) -> Result {
        let mut devices = self.devices.lock();
        let device = devices.get_mut(slot).ok_or(EINVAL)?.take();
        drop(device.ok_or(ENODEV)?);
        self.take_out(slot);
        Ok(())
    }

    pub(crate) fn remove_all(self: &Arc<Self>) {
        for slot in 0..MAX_HCAS {
            // There may be none.
            let _ = self.remove(slot);
        }
        self.queue.flush();
        glue::cancel_delayed::<Self, 2>(self);
        self.queue.flush();
        glue::cancel_delayed::<Self, 2>(self);
        let late = core::mem::take(&mut *self.late.lock());
        drop(late);
        // Each holds its HCA, and that the fabric.
        let forgotten = core::mem::take(&mut *self.forgotten.lock());
        drop(forgotten);
    }

    /// Takes an unregistered HCA out of the subnet.
    fn take_out(self: &Arc<Self>, slot: usize) {
        let (room, entry) = {
            let mut net = self.net().lock();
            net.subnet.disconnect(slot);
            let room = net.subnet.remove_ca(slot);
            (room, net.places.get_mut(slot).and_then(Option::take))
        };
        drop(room);
        self.after();
        // MADs for it are lost from now on, and nobody sends any more.
        self.queue.flush();
        if let Some(hca) = entry.map(|entry| entry.hca.clone()) {
            hca.settle();
            for (what, count) in hca.objects.each() {
                if count != 0 {
                    self.anomalies.leaked_object.hit();
                    pr_err!("ibf{slot}: {count} of {what} left\n");
                }
            }
        }
    }

    pub(crate) fn hca(&self, slot: usize) -> Result<Arc<Hca>> {
        self.net().lock().hca(slot).ok_or(ENODEV)
    }

    fn hcas(&self) -> impl Iterator<Item = Arc<Hca>> + '_ {
        (0..MAX_HCAS).filter_map(|slot| self.net().lock().hca(slot))
    }

    /// Has the null client send `count` datagrams of `bytes` from one HCA to another.
    pub(crate) fn measure(&self, from: usize, to: usize, bytes: usize, count: u32) -> Result {
        let devices = self.devices.lock();
        let find = |slot| devices.get(slot).and_then(Option::as_ref).ok_or(ENODEV);
        let figures = null::measure(find(from)?, find(to)?, self.lid(to)?, bytes, count)?;
        *self.measured.lock() = Some(figures);
        Ok(())
    }

    pub(crate) fn measured(&self) -> &Mutex<Option<Figures>> {
        &self.measured
    }

    /// Has the null client send from one HCA to another, and keeps what it saw.
    pub(crate) fn exchange(&self, from: usize, to: usize, order: &Order) -> Result {
        let devices = self.devices.lock();
        let find = |slot| devices.get(slot).and_then(Option::as_ref).ok_or(ENODEV);
        let seen = probe::exchange(find(from)?, find(to)?, self.lid(to)?, order)?;
        *self.seen.lock() = Some(seen);
        Ok(())
    }

    /// Has the null client do what is forbidden, and keeps what it saw.
    pub(crate) fn misuse(&self, from: usize, to: usize, what: Misuse) -> Result {
        let devices = self.devices.lock();
        let find = |slot| devices.get(slot).and_then(Option::as_ref).ok_or(ENODEV);
        let keep = |forgotten| Ok(self.forgotten.lock().push(forgotten, GFP_KERNEL)?);
        let seen = probe::misuse(find(from)?, find(to)?, self.lid(to)?, what, keep)?;
        *self.seen.lock() = Some(seen);
        Ok(())
    }

    fn lid(&self, slot: usize) -> Result<u16> {
        let net = self.net().lock();
        Ok(net.subnet.ca(slot).ok_or(ENODEV)?.port.lid())
    }

    pub(crate) fn seen(&self) -> &Mutex<Option<Seen>> {
        &self.seen
    }

    // What follows from changes.

    /// Has the worker look for something to do. Any context.
    pub(crate) fn poke(self: &Arc<Self>) {
        // Refused if queued already, which is as good.
        let _ = self.queue.enqueue::<_, 1>(self.clone());
    }

    /// Tells clients what has happened, and has the worker send traps. Any context, no lock held.
    pub(crate) fn after(self: &Arc<Self>) {
        self.dispatch();
        if self.net().lock().subnet.next_deadline().is_some() {
            self.poke();
        }
    }

    fn dispatch(&self) {
        loop {
            let (events, hca) = {
                let mut net = self.net().lock();
                let Some((slot, events)) = net.subnet.take_events() else {
                    return;
                };
                (events, net.hca(slot))
            };
            if let Some(hca) = hca {
                let gate = hca.gate().lock();
                for event in events {
                    hca.tell(event);
                    gate.dispatch(event);
                }
            }
        }
    }

    // MADs.

    /// Leaves a MAD to the worker. Any context.
    pub(crate) fn send_mad(self: &Arc<Self>, packet: MadPacket) -> Result {
        let packet = KBox::new(packet, GFP_ATOMIC)?;
        let pushed = self.mads.lock().push(packet);
        if pushed.is_err() {
            self.anomalies.mad_overflow.hit();
            return Err(ENOMEM);
        }
        self.poke();
        Ok(())
    }

    /// The worker.
    fn carry(self: &Arc<Self>) {
        loop {
            let packet = self.mads.lock().pop();
            match packet {
                Some(packet) => self.route(packet),
                None => break,
            }
        }
        loop {
            let trap = self.net().lock().subnet.next_trap(glue::now());
            match trap {
                Some((slot, frame)) => {
                    if let Ok(packet) = KBox::new(MadPacket::smp(slot, frame), GFP_KERNEL) {
                        self.filter(None, slot, packet);
                    }
                }
                None => break,
            }
        }
        self.deliver_late();
        for hca in self.hcas() {
            hca.wire_ready();
        }
        self.dispatch();
        self.set_timer();
    }

    /// Finds out where a MAD goes.
    fn route(self: &Arc<Self>, mut packet: KBox<MadPacket>) {
        let from = packet.from;
        let (to, source) = {
            let mut net = self.net().lock();
            match packet.kind {
                Kind::Smi => {
                    let method = packet.frame.mad.method();
                    let to = net.subnet.forward_smp(from, &mut packet.frame);
                    // The switch has turned it round.
                    let answered = packet.frame.mad.method() != method;
                    (to, if answered { None } else { Some(from) })
                }
                Kind::Gsi | Kind::Ud | Kind::Rc => {
                    let bytes = packet.frame.mad.0.len();
                    match net.subnet.unicast(from, packet.frame.dlid, bytes) {
                        Ok(Destination::Ca(to)) => (Ok(to), Some(from)),
                        Ok(Destination::Switch) => {
                            packet.qkey = GSI_QKEY;
                            packet.grh = None;
                            (net.subnet.switch_gmp(&mut packet.frame), None)
                        }
                        Err(loss) => (Err(loss), Some(from)),
                    }
                }
            }
        };
        match to {
            Ok(to) => self.filter(source, to, packet),
            Err(loss) => self.lose_mad(from, loss),
        }
    }

    fn lose_mad(&self, from: usize, loss: Loss) {
        if let Ok(hca) = self.hca(from) {
            hca.lose(Lost::from(loss));
        }
    }

    /// Lets the filters have a MAD before it arrives.
    fn filter(&self, from: Option<usize>, to: usize, mut packet: KBox<MadPacket>) {
        let verdict = self.filters.lock().apply(from, to, &mut packet.frame.mad);
        match verdict {
            Verdict::Pass => self.arrive(to, &packet),
            Verdict::Drop => {}
            Verdict::Duplicate => {
                self.arrive(to, &packet);
                self.arrive(to, &packet);
            }
            Verdict::Delay(micros) => {
                // Counted as lost if there is no room.
                if self.later(Late::Mad(to, packet), micros).is_err() {
                    self.anomalies.mad_overflow.hit();
                }
            }
        }
    }

    /// A MAD has come.
    fn arrive(&self, to: usize, packet: &MadPacket) {
        let (hca, lmc) = {
            let net = self.net().lock();
            let (Some(hca), Some(ca)) = (net.hca(to), net.subnet.ca(to)) else {
                return;
            };
            (hca, ca.port.lmc())
        };
        let frame = &packet.frame;
        let header = Header {
            slid: frame.slid,
            dlid: frame.dlid,
            path_bits: match frame.dlid {
                PERMISSIVE_LID => 0,
                dlid => path_bits(dlid, lmc),
            },
            sl: frame.sl,
            src_qp: frame.src_qp,
            dest_qp: frame.dest_qp,
            qkey: packet.qkey,
            pkey: packet.pkey,
            solicited: packet.solicited,
            csum_ok: false,
            imm: None,
            grh: packet.grh,
        };
        deliver(&hca, &header, &frame.mad.0);
    }

    // Delays.

    fn later(&self, what: Late, micros: u32) -> Result {
        self.later_at(what, glue::now().saturating_add(u64::from(micros) * 1000))
    }

    fn later_at(&self, what: Late, due: u64) -> Result {
        let mut late = self.late.lock();
        if late.len() >= DELAYED {
            return Err(ENOMEM);
        }
        late.push((due, what), GFP_ATOMIC)?;
        Ok(())
    }

    /// Has a datagram arrive later. Any context.
    pub(crate) fn delay_data(
        self: &Arc<Self>,
        to: usize,
        header: &Header,
        bytes: &[u8],
        micros: u32,
    ) -> Result {
        let (header, copy) = copied(header, bytes)?;
        self.later(Late::Data(to, header, copy), micros)?;
        self.poke();
        Ok(())
    }

    /// Calls a queue pair back, see [`Qp::expired`], at a time. Any context.
    pub(crate) fn call_back(self: &Arc<Self>, qp: &Arc<Qp>, due: u64) -> Result {
        self.later_at(Late::Call(qp.clone()), due)?;
        self.poke();
        Ok(())
    }

    /// As [`Self::delay_data`], unless [`Self::release`] comes first.
    pub(crate) fn hold_data(
        self: &Arc<Self>,
        from: usize,
        to: usize,
        header: &Header,
        bytes: &[u8],
        micros: u32,
    ) -> Result {
        let (header, copy) = copied(header, bytes)?;
        self.later(Late::Held(from, to, header, copy), micros)?;
        self.poke();
        Ok(())
    }

    /// Has what an HCA sent and was held arrive now. Any context.
    pub(crate) fn release(self: &Arc<Self>, slot: usize) {
        for (due, what) in self.late.lock().iter_mut() {
            if matches!(what, Late::Held(from, ..) if *from == slot) {
                *due = 0;
            }
        }
        self.poke();
    }

    fn deliver_late(&self) {
        loop {
            let now = glue::now();
            let due = {
                let mut late = self.late.lock();
                let first = late
                    .iter()
                    .enumerate()
                    .filter(|(_, (due, _))| *due <= now)
                    .min_by_key(|(_, (due, _))| *due)
                    .map(|(at, _)| at);
                first.and_then(|at| late.remove(at).ok())
            };
            match due {
                None => return,
                Some((_, Late::Mad(to, packet))) => self.arrive(to, &packet),
                Some((_, Late::Call(qp))) => qp.expired(),
                Some((_, Late::Data(to, header, bytes) | Late::Held(_, to, header, bytes))) => {
                    if let Ok(hca) = self.hca(to) {
                        deliver(&hca, &header, &bytes);
                    }
                }
            }
        }
    }

    /// Comes back when there is something to do. Called by the worker only, which is why the
    /// timer's own item does not run meanwhile.
    fn set_timer(self: &Arc<Self>) {
        let traps = self.net().lock().subnet.next_deadline();
        let late = self.late.lock().iter().map(|(due, _)| *due).min();
        let wire = self.hcas().filter_map(|hca| hca.wire_deadline()).min();
        glue::cancel_delayed::<Self, 2>(self);
        let Some(due) = [traps, late, wire].into_iter().flatten().min() else {
            return;
        };
        let millis = due.saturating_sub(glue::now()).div_ceil(1_000_000);
        let millis = u32::try_from(millis).unwrap_or(u32::MAX);
        let delay = kernel::time::msecs_to_jiffies(millis);
        // Refused if it is set already, which it is not.
        let _ = self.queue.enqueue_delayed::<_, 2>(self.clone(), delay);
    }

    // What is to be seen.

    /// Counts of what must not happen.
    pub(crate) fn show_anomalies(&self, out: &mut dyn Write) -> core::fmt::Result {
        for (name, anomaly) in self.anomalies.each() {
            writeln!(out, "{name} {}", anomaly.0.load(Relaxed))?;
        }
        Ok(())
    }
}

/// The bits of a LID by which a port with `lmc` tells paths apart.
#[inline]
pub(crate) fn path_bits(lid: u16, lmc: u8) -> u8 {
    lid as u8 & ((1u8 << (lmc & 7)) - 1)
}

/// A datagram of one's own.
fn copied(header: &Header, bytes: &[u8]) -> Result<(KBox<Header>, KVec<u8>)> {
    let mut copy = KVec::with_capacity(bytes.len(), GFP_ATOMIC)?;
    copy.extend_from_slice(bytes, GFP_ATOMIC)?;
    Ok((KBox::new(*header, GFP_ATOMIC)?, copy))
}

/// A datagram arrives without a sender that waits for it.
fn deliver(hca: &Arc<Hca>, header: &Header, bytes: &[u8]) {
    let mut kicks = Kicks::new();
    let irq = local_interrupt_disable();
    hca.arrive(&irq, header, &Payload::Bytes(bytes), None, &mut kicks);
    drop(irq);
    kicks.run();
}
