// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Datagrams: what is checked, added and left out between a send queue and a receive queue.
//!
//! Data goes straight from the memory of the send to that of the receive. MADs never do: they
//! are copied and left to the fabric's worker, because they are posted under locks of their
//! sender's agents.

use crate::{
    cq::{
        Kicks,
        Status, //
    },
    fabric::{
        path_bits,
        MadPacket,
        Net,
        Sent,
        Traffic, //
    },
    fault::Fault,
    glue::{
        Cursor,
        Sge, //
    },
    hca::{
        Did,
        Hca, //
    },
    mad::{
        Frame,
        Mad,
        PERMISSIVE_LID, //
    },
    offload,
    port::{
        p_keys_match,
        FIRST_MLID, //
    },
    qp::{
        Kind,
        Opcode,
        Qp,
        SEND_IP_CSUM,
        SEND_SOLICITED, //
    },
    subnet::{
        Destination,
        Loss,
        MAX_HCAS, //
    },
    switch::Mask,
};
use kernel::{
    interrupt::LocalInterruptDisabled,
    prelude::*,
    sync::Arc, //
};

/// Bytes of a global route header.
pub(crate) const GRH: usize = 40;

/// The largest packet that is put together before it goes.
pub(crate) const SCRATCH: usize = 4096;

/// The number of the queue pair that a group's datagrams are for.
pub(crate) const MULTICAST_QPN: u32 = 0xff_ffff;

/// Bytes that every datagram has between its payload and the wire: BTH, DETH, ICRC.
const TRANSPORT: usize = 12 + 8 + 4;

/// The part of an address that leads out of the subnet, or to a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Route {
    pub(crate) dgid: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// What an address handle holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    pub(crate) dlid: u16,
    pub(crate) path_bits: u8,
    pub(crate) sl: u8,
    pub(crate) static_rate: u8,
    pub(crate) route: Option<Route>,
}

impl Address {
    pub(crate) const NONE: Self = Self {
        dlid: 0,
        path_bits: 0,
        sl: 0,
        static_rate: 0,
        route: None,
    };
}

/// What goes in front of a datagram.
#[derive(Clone, Copy)]
pub(crate) struct Header {
    pub(crate) slid: u16,
    pub(crate) dlid: u16,
    pub(crate) path_bits: u8,
    pub(crate) sl: u8,
    pub(crate) src_qp: u32,
    pub(crate) dest_qp: u32,
    pub(crate) qkey: u32,
    pub(crate) pkey: u16,
    pub(crate) solicited: bool,
    /// Whether the checksums were seen to be right.
    pub(crate) csum_ok: bool,
    pub(crate) imm: Option<u32>,
    pub(crate) grh: Option<[u8; GRH]>,
}

impl Header {
    /// The group that it is for.
    pub(crate) fn group(&self) -> Option<[u8; 16]> {
        if self.dest_qp != MULTICAST_QPN {
            return None;
        }
        self.grh.as_ref()?.last_chunk().copied()
    }
}

/// What a datagram carries.
#[derive(Clone, Copy)]
pub(crate) enum Payload<'a> {
    /// What the sender posted, and how long it is.
    Posted(&'a [Sge], usize),
    Bytes(&'a [u8]),
}

impl Payload<'_> {
    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Posted(_, len) => *len,
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    #[inline]
    pub(crate) fn copy_to(&self, to: &mut Cursor<'_>) {
        match self {
            Self::Posted(sges, len) => to.copy_from(&mut Cursor::new(sges), *len),
            Self::Bytes(bytes) => to.write(bytes),
        }
    }

    fn copy_out(&self) -> Result<KVec<u8>> {
        let mut bytes = KVec::from_elem(0, self.len(), GFP_ATOMIC)?;
        match self {
            Self::Posted(sges, _) => {
                Cursor::new(sges).read(&mut bytes);
            }
            Self::Bytes(from) => bytes.copy_from_slice(from),
        }
        Ok(bytes)
    }
}

/// Why a datagram did not arrive. The sender does not know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lost {
    /// No such queue pair, or none attached to the group.
    NoQp,
    /// The queue pair does not receive.
    State,
    /// The queue pair is for another kind of datagram.
    Kind,
    QKey,
    PKey,
    NoBuffer,
    /// A group's datagram without GRH.
    NoGrh,
    /// A link is down, or there is no way.
    Link,
    NoRoute,
    /// A fault.
    Fault,
    NoMemory,
}

impl Lost {
    pub(crate) const NAMES: [&'static str; 11] = [
        "no_qp",
        "state",
        "kind",
        "qkey",
        "pkey",
        "no_buffer",
        "no_grh",
        "link",
        "no_route",
        "fault",
        "no_memory",
    ];
}

impl From<Loss> for Lost {
    fn from(loss: Loss) -> Self {
        match loss {
            Loss::NoSource | Loss::Link => Self::Link,
            Loss::NoRoute | Loss::WrongLid | Loss::BadPath | Loss::NoAgent => Self::NoRoute,
        }
    }
}

/// What is asked for. Goes by value, as all that a datagram is on its way: what nobody has a
/// reference to stays out of memory.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) opcode: Opcode,
    pub(crate) flags: u32,
    pub(crate) imm: u32,
    pub(crate) address: &'a Address,
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
    pub(crate) pkey_index: u16,
    pub(crate) mss: u16,
}

/// Where the last datagram of a send queue went. It holds as long as nobody has looked at the
/// subnet meanwhile: who looks may change it, or has changed what else it relies on.
pub(crate) struct Flow {
    looks: u64,
    qpn: u32,
    /// In bytes.
    mtu: u32,
    slid: u16,
    dlid: u16,
    from_bits: u8,
    to_bits: u8,
    pkey: u16,
    /// Whether there is nothing to be done but to deliver: no checksums, no faults at either end,
    /// nothing that is deferred.
    plain: bool,
    traffic: Arc<Traffic>,
    receiver: Arc<Qp>,
}

impl Flow {
    /// Whether it is the way of a datagram of a queue pair. The P_Key is: who changes its index
    /// looks at the subnet.
    #[inline(always)]
    fn leads(&self, qp: &Qp, address: &Address, qpn: u32) -> bool {
        self.looks == qp.hca().fabric().net().looks()
            && self.qpn == qpn
            && self.dlid == address.dlid
            && self.from_bits == address.path_bits
            && address.route.is_none()
    }

    /// As [`Self::leads`], and all there is to do is to deliver.
    #[inline(always)]
    pub(crate) fn is_plain(&self, qp: &Qp, address: &Address, qpn: u32) -> bool {
        self.plain && self.leads(qp, address, qpn)
    }

    #[inline(always)]
    pub(crate) fn mtu(&self) -> usize {
        self.mtu as usize
    }

    #[inline(always)]
    pub(crate) fn receiver(&self) -> &Arc<Qp> {
        &self.receiver
    }

    /// Counts a datagram of `len` bytes.
    #[inline(always)]
    pub(crate) fn count(&self, len: usize) {
        self.traffic.add(len);
    }

    #[inline(always)]
    pub(crate) fn header(
        &self,
        from: &Qp,
        address: &Address,
        qkey: u32,
        solicited: bool,
        imm: Option<u32>,
    ) -> Header {
        Header {
            slid: self.slid,
            dlid: self.dlid,
            path_bits: self.to_bits,
            sl: address.sl,
            src_qp: from.number(),
            dest_qp: self.qpn,
            qkey,
            pkey: self.pkey,
            solicited,
            csum_ok: false,
            imm,
            grh: None,
        }
    }
}

/// A datagram being sent.
#[derive(Clone, Copy)]
struct Outgoing<'a> {
    hca: &'a Arc<Hca>,
    irq: &'a LocalInterruptDisabled,
    request: Request<'a>,
    src_qp: &'a Qp,
    qkey: u32,
    pkey_index: u16,
}

/// Executes a send.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub(crate) fn send(
    qp: &Arc<Qp>,
    irq: &LocalInterruptDisabled,
    request: Request<'_>,
    qkey: u32,
    pkey_index: u16,
    sges: &[Sge],
    header: &[u8],
    scratch: &mut [u8],
    flow: &mut Option<Flow>,
    kicks: &mut Kicks,
) -> Status {
    let hca = qp.hca();
    let mut len = 0;
    for sge in sges {
        if sge.lkey() != qp.lkey() {
            hca.fabric().anomalies.bad_lkey.hit();
            return Status::LOC_PROT_ERR;
        }
        len += sge.len();
    }
    let out = Outgoing {
        hca,
        irq,
        request,
        src_qp: qp,
        // The top bit asks for the queue pair's own.
        qkey: if request.qkey >> 31 != 0 {
            qkey
        } else {
            request.qkey
        },
        pkey_index,
    };
    let plain = qp.kind() == Kind::Ud
        && matches!(request.opcode, Opcode::Send | Opcode::SendImm)
        && request.flags & SEND_IP_CSUM == 0
        && !hca.fabric().any_csum();
    if !plain {
        return out.other(sges, header, len, scratch, flow, kicks);
    }
    match out.transmit(Payload::Posted(sges, len), false, flow, kicks) {
        Ok(()) => Status::SUCCESS,
        Err(status) => status,
    }
}

impl Outgoing<'_> {
    /// Sends what is not a datagram as it is.
    #[inline(never)]
    fn other(
        self,
        sges: &[Sge],
        header: &[u8],
        len: usize,
        scratch: &mut [u8],
        flow: &mut Option<Flow>,
        kicks: &mut Kicks,
    ) -> Status {
        match (self.src_qp.kind(), self.request.opcode) {
            (Kind::Smi | Kind::Gsi, Opcode::Send) => self.mad(sges, len),
            (Kind::Ud, Opcode::Lso) => self.large(sges, header, len, scratch, flow, kicks),
            (Kind::Ud, Opcode::Send | Opcode::SendImm) => {
                let fill = self.request.flags & SEND_IP_CSUM != 0;
                if fill && !self.hca.config().csum {
                    self.hca.fabric().anomalies.csum_without_cap.hit();
                    return Status::LOC_QP_OP_ERR;
                }
                self.checked(sges, len, fill, scratch, flow, kicks)
            }
            _ => Status::LOC_QP_OP_ERR,
        }
    }

    /// Sends a packet whose checksums are computed or looked at.
    #[inline(never)]
    fn checked(
        self,
        sges: &[Sge],
        len: usize,
        fill: bool,
        scratch: &mut [u8],
        flow: &mut Option<Flow>,
        kicks: &mut Kicks,
    ) -> Status {
        let Some(packet) = scratch.get_mut(..len) else {
            return Status::LOC_LEN_ERR;
        };
        Cursor::new(sges).read(packet);
        let ok = if fill {
            match offload::fill(packet) {
                Ok(()) => {
                    self.hca.did(Did::Checksum);
                    true
                }
                Err(_) => {
                    self.hca.fabric().anomalies.bad_csum_request.hit();
                    false
                }
            }
        } else {
            offload::verify(packet)
        };
        self.one(Payload::Bytes(packet), ok, flow, kicks)
    }

    /// Cuts a large TCP packet into segments.
    #[inline(never)]
    fn large(
        self,
        sges: &[Sge],
        header: &[u8],
        len: usize,
        scratch: &mut [u8],
        flow: &mut Option<Flow>,
        kicks: &mut Kicks,
    ) -> Status {
        let mss = usize::from(self.request.mss);
        let Some(plan) = offload::Segments::new(header, len, mss) else {
            self.hca.fabric().anomalies.bad_lso.hit();
            return Status::LOC_LEN_ERR;
        };
        self.hca.did(Did::LargeSend);
        let mut from = Cursor::new(sges);
        for segment in plan {
            let Some(packet) = scratch.get_mut(..header.len() + segment.len) else {
                return Status::LOC_LEN_ERR;
            };
            let (front, back) = packet.split_at_mut(header.len());
            front.copy_from_slice(header);
            from.read(back);
            segment.patch(packet, header.len());
            self.hca.did(Did::Segment);
            let status = self.one(Payload::Bytes(packet), true, flow, kicks);
            if status != Status::SUCCESS {
                return status;
            }
        }
        Status::SUCCESS
    }

    /// Sends one datagram that was put together.
    #[inline(never)]
    fn one(
        self,
        payload: Payload<'_>,
        csum_ok: bool,
        flow: &mut Option<Flow>,
        kicks: &mut Kicks,
    ) -> Status {
        match self.transmit(payload, csum_ok, flow, kicks) {
            Ok(()) => Status::SUCCESS,
            Err(status) => status,
        }
    }

    #[inline(always)]
    fn transmit(
        self,
        payload: Payload<'_>,
        csum_ok: bool,
        flow: &mut Option<Flow>,
        kicks: &mut Kicks,
    ) -> Result<(), Status> {
        let (hca, irq, request) = (self.hca, self.irq, self.request);
        let address = request.address;
        let len = payload.len();
        if let Some(known) = flow {
            if !hca.faulty() && len <= known.mtu() && known.leads(self.src_qp, address, request.qpn)
            {
                let solicited = request.flags & SEND_SOLICITED != 0;
                let imm = (request.opcode == Opcode::SendImm).then_some(request.imm);
                let header = Header {
                    csum_ok,
                    ..known.header(self.src_qp, address, self.qkey, solicited, imm)
                };
                known.count(len);
                let receiver = known.receiver();
                if let Err(why) = receiver.receive(irq, &header, &payload, true, kicks) {
                    receiver.hca().lose(why);
                }
                return Ok(());
            }
        }
        self.transmit_any(payload, csum_ok, flow, kicks)
    }

    /// The header of a datagram of `len` bytes, and how many bytes it makes on the wire. Not the
    /// header but the outcome if it does not even leave.
    #[inline(always)]
    fn depart(
        &self,
        net: &mut Net,
        len: usize,
        csum_ok: bool,
    ) -> Result<(Header, usize), Result<(), Status>> {
        let (hca, request) = (self.hca, self.request);
        let address = request.address;
        let ca = net.subnet.ca(hca.index()).ok_or(Ok(()))?;
        if len > 128usize << (ca.port.active_mtu() & 7) {
            return Err(Err(Status::LOC_LEN_ERR));
        }
        let pkey = ca.p_key(self.pkey_index);
        if pkey & 0x7fff == 0 {
            hca.lose(Lost::PKey);
            return Err(Ok(()));
        }
        let mut bytes = len;
        let mut route_header = None;
        if let Some(route) = &address.route {
            let sgid = ca.gid(usize::from(route.sgid_index));
            route_header = Some(grh(route, &sgid, len));
            bytes += GRH;
        }
        let header = Header {
            slid: ca.port.lid().wrapping_add(u16::from(address.path_bits)),
            dlid: address.dlid,
            path_bits: 0,
            sl: address.sl,
            src_qp: self.src_qp.number(),
            dest_qp: request.qpn,
            qkey: self.qkey,
            pkey,
            solicited: request.flags & SEND_SOLICITED != 0,
            csum_ok,
            imm: (request.opcode == Opcode::SendImm).then_some(request.imm),
            grh: route_header,
        };
        if net.is_recording() {
            net.note(Sent {
                from: hca.index(),
                src_qp: header.src_qp,
                dest_qp: header.dest_qp,
                qkey: header.qkey,
                pkey,
                len,
                address: *address,
            });
        }
        Ok((header, bytes))
    }

    /// Inverts what the value of the fault names, and returns the address with that.
    #[cold]
    fn misaddress(&mut self, part: u32) -> Address {
        let mut address = *self.request.address;
        match part {
            16 => self.request.qpn ^= 0xff,
            17 => self.qkey ^= 0xff,
            18 => address.sl ^= 0x0f,
            19 => address.static_rate ^= 0xff,
            _ => {
                let route = address.route.as_mut();
                if let Some(byte) = route.and_then(|route| route.dgid.get_mut(part as usize)) {
                    *byte = !*byte;
                }
            }
        }
        address
    }

    /// Sends to a group, or where none was sent before, or with faults on the way.
    #[inline(never)]
    fn transmit_any(
        self,
        payload: Payload<'_>,
        csum_ok: bool,
        flow: &mut Option<Flow>,
        kicks: &mut Kicks,
    ) -> Result<(), Status> {
        let hca = self.hca;
        let address;
        let mut out = self;
        if hca.faulty() && self.src_qp.kind() == Kind::Ud {
            if let Some(part) = hca.fault(Fault::Misaddress) {
                address = out.misaddress(part);
                out.request.address = &address;
            }
        }
        let dlid = self.request.address.dlid;
        let multicast = dlid >= FIRST_MLID && dlid != PERMISSIVE_LID;
        let mut guard = hca.fabric().net().busy(self.irq);
        let net = &mut *guard;
        let (mut header, bytes) = match out.depart(net, payload.len(), csum_ok) {
            Ok(departed) => departed,
            Err(outcome) => return outcome,
        };
        let mut target = None;
        let mut reached = 0;
        let outcome = if multicast {
            net.subnet
                .multicast(hca.index(), dlid, bytes)
                .map(|mask| reached = mask)
        } else {
            match net.subnet.unicast(hca.index(), dlid, bytes) {
                Ok(Destination::Ca(slot)) => {
                    target = Some(slot);
                    if let Some(ca) = net.subnet.ca(slot) {
                        header.path_bits = path_bits(dlid, ca.port.lmc());
                    }
                    if let Some(found) = self.find_flow(net, &header, slot) {
                        *flow = Some(found);
                    }
                    Ok(())
                }
                Ok(Destination::Switch) => Err(Loss::NoRoute),
                Err(loss) => Err(loss),
            }
        };
        let eventful = net.subnet.has_events();
        drop(guard);
        if eventful {
            hca.fabric().poke();
        }
        if let Err(loss) = outcome {
            hca.lose(loss.into());
        } else if multicast && header.grh.is_none() {
            hca.lose(Lost::NoGrh);
        } else if hca.faulty() {
            return self.with_faults(&header, &payload, target, reached, kicks);
        } else if let Some(slot) = target {
            self.to_one(&header, &payload, slot, kicks);
        } else {
            self.to_groups(&header, &payload, reached, kicks);
        }
        Ok(())
    }

    /// What the next datagram to the same queue pair need not look up, if there is one.
    fn find_flow(&self, net: &mut Net, header: &Header, slot: usize) -> Option<Flow> {
        let hca = self.hca;
        if net.is_recording() || header.grh.is_some() {
            return None;
        }
        let passage = net.subnet.passage(hca.index(), header.dlid)?;
        let (from, to) = (net.subnet.ca(hca.index())?, net.subnet.ca(slot)?);
        let receiver = net.qps(slot)?.find(header.dest_qp)?;
        if receiver.kind() != Kind::Ud
            || !p_keys_match(to.p_key(receiver.pkey_index()), header.pkey)
        {
            return None;
        }
        let receiver = receiver.clone();
        let mtu = 128u32 << (from.port.active_mtu() & 7);
        let odd = [hca, receiver.hca()].into_iter().any(|end| end.faulty())
            || hca.deferred()
            || hca.fabric().any_csum();
        Some(Flow {
            // Of now: whoever looks waits until we are done.
            looks: hca.fabric().net().looks(),
            slid: header.slid,
            dlid: header.dlid,
            from_bits: self.request.address.path_bits,
            to_bits: header.path_bits,
            qpn: header.dest_qp,
            pkey: header.pkey,
            mtu,
            plain: !odd,
            traffic: net.traffic(passage)?,
            receiver,
        })
    }

    fn to_one(self, header: &Header, payload: &Payload<'_>, slot: usize, kicks: &mut Kicks) {
        let target = self.hca.fabric().net().busy(self.irq).hca(slot);
        if let Some(target) = target {
            target.arrive(self.irq, header, payload, None, kicks);
        }
    }

    /// Delivers to the members of a group in this and in other HCAs.
    #[inline(never)]
    fn to_groups(self, header: &Header, payload: &Payload<'_>, reached: Mask, kicks: &mut Kicks) {
        let skip = self.src_qp.block_loopback.then_some(self.src_qp);
        self.hca.arrive(self.irq, header, payload, skip, kicks);
        let mut left = reached;
        while left != 0 {
            let slot = left.trailing_zeros() as usize;
            left &= left - 1;
            self.to_one(header, payload, slot, kicks);
        }
    }

    /// Delivers, with what can go wrong on the wire.
    #[cold]
    fn with_faults(
        &self,
        header: &Header,
        payload: &Payload<'_>,
        target: Option<usize>,
        reached: Mask,
        kicks: &mut Kicks,
    ) -> Result<(), Status> {
        let hca = self.hca;
        if hca.fault(Fault::Drop).is_some() {
            hca.lose(Lost::Fault);
            return Ok(());
        }
        let Ok(mut copy) = payload.copy_out() else {
            hca.lose(Lost::NoMemory);
            return Ok(());
        };
        let mut header = *header;
        if let Some(at) = hca.fault(Fault::Corrupt) {
            if let Some(byte) = copy.get_mut(at as usize) {
                *byte = !*byte;
            }
            header.csum_ok = false;
        }
        let mut targets = reached;
        if let Some(target) = target {
            targets = 1 << target;
        } else {
            targets |= 1 << hca.index();
        }
        if let Some(longest) = hca.fault(Fault::Reorder) {
            hca.hold(true);
            for slot in (0..MAX_HCAS).filter(|slot| targets & (1 << slot) != 0) {
                let fabric = hca.fabric();
                if fabric
                    .hold_data(hca.index(), slot, &header, &copy, longest)
                    .is_err()
                {
                    hca.lose(Lost::NoMemory);
                }
            }
            return Ok(());
        }
        let times = 1 + u32::from(hca.fault(Fault::Duplicate).is_some());
        if let Some(delay) = hca.fault(Fault::Delay) {
            for slot in (0..MAX_HCAS).filter(|slot| targets & (1 << slot) != 0) {
                for _ in 0..times {
                    if hca
                        .fabric()
                        .delay_data(slot, &header, &copy, delay)
                        .is_err()
                    {
                        hca.lose(Lost::NoMemory);
                    }
                }
            }
            return Ok(());
        }
        for _ in 0..times {
            let payload = Payload::Bytes(&copy);
            match target {
                Some(slot) => self.to_one(&header, &payload, slot, kicks),
                None => self.to_groups(&header, &payload, reached, kicks),
            }
        }
        if hca.hold(false) {
            hca.fabric().release(hca.index());
        }
        Ok(())
    }

    /// Leaves a MAD to the worker.
    #[inline(never)]
    fn mad(self, sges: &[Sge], len: usize) -> Status {
        let (hca, request) = (self.hca, self.request);
        if len > size_of::<Mad>() {
            return Status::LOC_LEN_ERR;
        }
        let mut mad = Mad::zeroed();
        Cursor::new(sges).read(&mut mad.0);
        let kind = self.src_qp.kind();
        let address = request.address;
        let mut packet = MadPacket {
            from: hca.index(),
            kind,
            qkey: self.qkey,
            pkey: 0xffff,
            solicited: request.flags & SEND_SOLICITED != 0,
            grh: None,
            frame: Frame {
                slid: PERMISSIVE_LID,
                dlid: address.dlid,
                sl: address.sl,
                src_qp: self.src_qp.number(),
                dest_qp: request.qpn,
                mad,
            },
        };
        {
            let net = hca.fabric().net().lock_with(self.irq);
            if let Some(ca) = net.subnet.ca(hca.index()) {
                if address.dlid != PERMISSIVE_LID {
                    packet.frame.slid = ca.port.lid().wrapping_add(u16::from(address.path_bits));
                }
                if kind == Kind::Gsi {
                    packet.pkey = ca.p_key(request.pkey_index);
                }
                if let Some(route) = &address.route {
                    let sgid = ca.gid(usize::from(route.sgid_index));
                    packet.grh = Some(grh(route, &sgid, len));
                }
            }
        }
        if hca.fabric().send_mad(packet).is_err() {
            hca.lose(Lost::NoMemory);
        }
        Status::SUCCESS
    }
}

/// The global route header of a datagram of `len` bytes.
fn grh(route: &Route, sgid: &[u8; 16], len: usize) -> [u8; GRH] {
    let mut grh = [0; GRH];
    let first = 6 << 28 | u32::from(route.traffic_class) << 20 | route.flow_label & 0xf_ffff;
    let padded = (len + TRANSPORT).next_multiple_of(4);
    grh[..4].copy_from_slice(&first.to_be_bytes());
    grh[4..6].copy_from_slice(&(padded as u16).to_be_bytes());
    grh[6] = 0x1b;
    grh[7] = route.hop_limit;
    grh[8..24].copy_from_slice(sgid);
    grh[24..].copy_from_slice(&route.dgid);
    grh
}
