// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! All of the subnet: channel adapters in slots, the switch, and the cables between them.
//!
//! One object under one lock of the caller's, so that both ends of a cable always agree. Nothing
//! here sleeps, allocates after [`Subnet::new`] or calls out: what clients are to be told waits in
//! the slots until [`Subnet::take_events`], what nodes tell the manager until
//! [`Subnet::next_trap`].

use kernel::prelude::*;

use crate::mad::{
    Frame,
    Mad,
    Reaction, //
};
use crate::port::{
    Events,
    LinkCommand,
    PhysState,
    Port, //
};
use crate::sma::{
    Ca,
    CaConfig, //
};
use crate::switch::{
    Hop,
    Mask,
    Switch,
    SwitchConfig,
    MAX_PORTS, //
};

/// Slots for channel adapters.
pub(crate) const MAX_HCAS: usize = 68;

/// What a cable leads to, seen from a CA.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attach {
    Nothing,
    /// A port of the switch.
    Switch(u8),
    /// Another CA, back to back.
    Ca(usize),
}

/// Why a packet was lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Loss {
    /// There is no such CA.
    NoSource,
    /// A link on the way is down, or not yet active.
    Link,
    /// No entry of the forwarding table leads to the LID.
    NoRoute,
    /// It arrived at a port that has another LID.
    WrongLid,
    /// An SMP whose path makes no sense.
    BadPath,
    /// Nobody there answers it.
    NoAgent,
}

/// Where a unicast packet arrives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Destination {
    Ca(usize),
    /// Port 0 of the switch, where only MADs make sense.
    Switch,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Ca(usize),
    Switch(u8),
}

struct Slot {
    ca: Ca,
    attach: Attach,
    /// Whether the cable is in: a link that is taken down by hand has it half pulled out.
    plugged: bool,
    events: Events,
}

/// Headers of a packet without GRH, and its checks, in words.
const HEADER_WORDS: u64 = 9;

/// What a packet of `bytes` counts as data.
#[inline(always)]
pub(crate) fn words(bytes: usize) -> u64 {
    (bytes as u64).wrapping_add(3) / 4 + HEADER_WORDS
}

/// The ports that a packet from one CA to another passes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Passage {
    from: usize,
    ingress: u8,
    egress: u8,
    to: usize,
}

/// The subnet.
pub(crate) struct Subnet {
    slots: [Option<KBox<Slot>>; MAX_HCAS],
    switch: Switch,
    /// The slot at the other end of each switch port's cable.
    cabled: [Option<u8>; MAX_PORTS as usize + 1],
    /// Slots with events, as a mask.
    eventful: Mask,
}

impl Subnet {
    pub(crate) fn new(config: &SwitchConfig) -> Result<Self> {
        Ok(Self {
            slots: [const { None }; MAX_HCAS],
            switch: Switch::new(config)?,
            cabled: [None; MAX_PORTS as usize + 1],
            eventful: 0,
        })
    }

    // Nodes and cables.

    /// Room for a CA, allocated before the lock is taken: see [`Subnet::add_ca`].
    pub(crate) fn room(config: &CaConfig) -> Result<Room> {
        Ok(Room(KBox::new(
            Slot {
                ca: Ca::new(config),
                attach: Attach::Nothing,
                plugged: true,
                events: Events::NONE,
            },
            GFP_KERNEL,
        )?))
    }

    /// Puts a CA into a slot, without a cable.
    pub(crate) fn add_ca(&mut self, slot: usize, room: Room) -> Result {
        let place = self.slots.get_mut(slot).ok_or(EINVAL)?;
        if place.is_some() {
            return Err(EEXIST);
        }
        *place = Some(room.0);
        Ok(())
    }

    /// Takes a CA out, its cable first. What is returned is to be dropped without the lock.
    pub(crate) fn remove_ca(&mut self, slot: usize) -> Option<Room> {
        self.disconnect(slot);
        self.eventful &= !(Mask::from(1u8).checked_shl(slot as u32).unwrap_or(0));
        self.slots.get_mut(slot)?.take().map(Room)
    }

    /// Cables a CA, which must have no cable yet.
    pub(crate) fn connect(&mut self, slot: usize, attach: Attach) -> Result {
        if self.slot(slot).ok_or(ENODEV)?.attach != Attach::Nothing {
            return Err(EBUSY);
        }
        match attach {
            Attach::Nothing => return Ok(()),
            Attach::Switch(port) => {
                if self.switch.external(port).is_none() {
                    return Err(EINVAL);
                }
                let place = self.cabled.get_mut(usize::from(port)).ok_or(EINVAL)?;
                if place.is_some() {
                    return Err(EBUSY);
                }
                *place = u8::try_from(slot).ok();
            }
            Attach::Ca(other) => {
                let peer = self.slot_mut(other).ok_or(ENODEV)?;
                if other == slot {
                    return Err(EINVAL);
                }
                if peer.attach != Attach::Nothing {
                    return Err(EBUSY);
                }
                peer.attach = Attach::Ca(slot);
            }
        }
        if let Some(slot) = self.slot_mut(slot) {
            slot.attach = attach;
        }
        self.train(slot);
        Ok(())
    }

    /// Takes the cable of a CA away.
    pub(crate) fn disconnect(&mut self, slot: usize) {
        self.drop_link(slot);
        match self.attach(slot) {
            Attach::Nothing => (),
            Attach::Switch(port) => {
                if let Some(place) = self.cabled.get_mut(usize::from(port)) {
                    *place = None;
                }
            }
            Attach::Ca(other) => {
                if let Some(peer) = self.slot_mut(other) {
                    peer.attach = Attach::Nothing;
                }
            }
        }
        if let Some(slot) = self.slot_mut(slot) {
            slot.attach = Attach::Nothing;
        }
    }

    /// Pulls out the cable of a CA, or puts it in again. None if there is no such CA.
    pub(crate) fn set_link(&mut self, slot: usize, up: bool) -> Option<()> {
        self.slot_mut(slot)?.plugged = up;
        if up {
            self.train(slot);
        } else {
            self.drop_link(slot);
        }
        Some(())
    }

    /// The link goes down and trains again at once.
    pub(crate) fn bounce(&mut self, slot: usize) -> Option<()> {
        self.slot(slot)?;
        self.drop_link(slot);
        self.train(slot);
        Some(())
    }

    /// The switch loses power for a moment, and with it all that a manager told it.
    pub(crate) fn reset_switch(&mut self) {
        for slot in 0..MAX_HCAS {
            if matches!(self.attach(slot), Attach::Switch(_)) {
                self.drop_link(slot);
            }
        }
        self.switch.power_on();
        for slot in 0..MAX_HCAS {
            self.train(slot);
        }
    }

    pub(crate) fn attach(&self, slot: usize) -> Attach {
        self.slot(slot).map_or(Attach::Nothing, |slot| slot.attach)
    }

    #[inline]
    pub(crate) fn ca(&self, slot: usize) -> Option<&Ca> {
        self.slot(slot).map(|slot| &slot.ca)
    }

    #[inline]
    pub(crate) fn ca_mut(&mut self, slot: usize) -> Option<&mut Ca> {
        self.slot_mut(slot).map(|slot| &mut slot.ca)
    }

    pub(crate) fn raise_switch_trap(&mut self) {
        self.switch.raise_trap();
    }

    #[inline]
    fn slot(&self, slot: usize) -> Option<&Slot> {
        self.slots.get(slot)?.as_deref()
    }

    #[inline]
    fn slot_mut(&mut self, slot: usize) -> Option<&mut Slot> {
        self.slots.get_mut(slot)?.as_deref_mut()
    }

    // Links.

    fn port(&self, end: End) -> Option<&Port> {
        match end {
            End::Ca(slot) => self.ca(slot).map(|ca| &ca.port),
            End::Switch(port) => self.switch.external(port),
        }
    }

    fn port_mut(&mut self, end: End) -> Option<&mut Port> {
        match end {
            End::Ca(slot) => self.ca_mut(slot).map(|ca| &mut ca.port),
            End::Switch(port) => self.switch.external_mut(port),
        }
    }

    fn peer(&self, end: End) -> Option<End> {
        match end {
            End::Ca(slot) => match self.attach(slot) {
                Attach::Nothing => None,
                Attach::Switch(port) => Some(End::Switch(port)),
                Attach::Ca(other) => Some(End::Ca(other)),
            },
            End::Switch(port) => self.neighbor(port).map(End::Ca),
        }
    }

    /// The CA at a port of the switch.
    #[inline]
    fn neighbor(&self, port: u8) -> Option<usize> {
        self.cabled
            .get(usize::from(port))
            .copied()
            .flatten()
            .map(usize::from)
    }

    fn plugged(&self, end: End) -> bool {
        match end {
            End::Ca(slot) => self.slot(slot).is_some_and(|slot| slot.plugged),
            End::Switch(_) => true,
        }
    }

    /// One end loses its link and is in a physical state from then on.
    fn end_down(&mut self, end: End, phys: PhysState) {
        let Some(port) = self.port_mut(end) else {
            return;
        };
        let was_up = port.carries_smps();
        let events = port.link_down(phys);
        match end {
            End::Ca(slot) => self.add_events(slot, events),
            End::Switch(_) if was_up => self.switch.note_link_change(),
            End::Switch(_) => (),
        }
    }

    /// Both ends of a CA's link lose it. Ports that are disabled stay so.
    fn drop_link(&mut self, slot: usize) {
        let end = End::Ca(slot);
        for end in [Some(end), self.peer(end)].into_iter().flatten() {
            if self.port(end).is_some_and(Port::polls) {
                self.end_down(end, PhysState::Polling);
            }
        }
    }

    /// Brings up the link of a CA if nothing is in its way.
    fn train(&mut self, slot: usize) {
        let near = End::Ca(slot);
        let Some(far) = self.peer(near) else {
            return;
        };
        let ready = |end| {
            self.plugged(end)
                && self
                    .port(end)
                    .is_some_and(|port| port.polls() && !port.carries_smps())
        };
        if !ready(near) || !ready(far) {
            return;
        }
        for (end, peer) in [(near, far), (far, near)] {
            let Some((widths, speeds)) = self.port(peer).map(Port::enabled) else {
                continue;
            };
            if let Some(port) = self.port_mut(end) {
                port.link_up(widths, speeds);
            }
            if matches!(end, End::Switch(_)) {
                self.switch.note_link_change();
            }
        }
    }

    /// Does to a link what a Set(PortInfo) at one end of it asks for.
    fn command(&mut self, end: End, command: LinkCommand) {
        let phys = match command {
            LinkCommand::None => return,
            LinkCommand::Disable => PhysState::Disabled,
            LinkCommand::Retrain | LinkCommand::Poll => PhysState::Polling,
        };
        self.end_down(end, phys);
        let peer = self.peer(end);
        if let Some(peer) = peer {
            if self.port(peer).is_some_and(Port::polls) {
                self.end_down(peer, PhysState::Polling);
            }
        }
        // Every cable has a CA at one end.
        for end in [Some(end), peer].into_iter().flatten() {
            if let End::Ca(slot) = end {
                self.train(slot);
                return;
            }
        }
    }

    // Events.

    /// Has clients of a CA told of something.
    #[inline]
    pub(crate) fn add_events(&mut self, slot: usize, events: Events) {
        if events.is_empty() {
            return;
        }
        if let Some(found) = self.slot_mut(slot) {
            found.events.merge(events);
            self.eventful |= Mask::from(1u8).checked_shl(slot as u32).unwrap_or(0);
        }
    }

    /// Whether clients are to be told of something.
    #[inline]
    pub(crate) fn has_events(&self) -> bool {
        self.eventful != 0
    }

    /// A slot with all its events, which are then told.
    pub(crate) fn take_events(&mut self) -> Option<(usize, Events)> {
        if self.eventful == 0 {
            return None;
        }
        let slot = self.eventful.trailing_zeros() as usize;
        self.eventful &= self.eventful.wrapping_sub(1);
        let found = self.slot_mut(slot)?;
        Some((slot, core::mem::take(&mut found.events)))
    }

    // Data.

    /// Sends a packet of `bytes` from a CA to a LID. What a CA sends to itself never leaves it.
    #[inline]
    pub(crate) fn unicast(
        &mut self,
        from: usize,
        lid: u16,
        bytes: usize,
    ) -> Result<Destination, Loss> {
        let words = words(bytes);
        let source = self.slot_mut(from).ok_or(Loss::NoSource)?;
        let port = &mut source.ca.port;
        if !port.sends_data() {
            port.counters.xmit_discards = port.counters.xmit_discards.wrapping_add(1);
            return Err(Loss::Link);
        }
        if port.owns(lid) {
            return Ok(Destination::Ca(from));
        }
        port.counters.sent(1, words, false);
        let to = match source.attach {
            Attach::Nothing => return Err(Loss::Link),
            Attach::Ca(other) => other,
            Attach::Switch(ingress) => {
                self.enter_switch(ingress, words, false)?;
                let egress = match self.switch.unicast(lid) {
                    None => return Err(Loss::NoRoute),
                    Some(0) => return Ok(Destination::Switch),
                    Some(port) => port,
                };
                self.leave_switch(egress, words, false)?
            }
        };
        self.arrive(to, words, false)?;
        match self.ca(to) {
            Some(ca) if ca.port.owns(lid) => Ok(Destination::Ca(to)),
            _ => Err(Loss::WrongLid),
        }
    }

    /// The way from a CA to the one with a LID, if all ports on it are active.
    pub(crate) fn passage(&self, from: usize, lid: u16) -> Option<Passage> {
        let source = self.slot(from)?;
        let Attach::Switch(ingress) = source.attach else {
            return None;
        };
        let egress = self.switch.unicast(lid)?;
        let to = self.neighbor(egress)?;
        let target = &self.ca(to)?.port;
        let ports = [
            &source.ca.port,
            self.switch.external(ingress)?,
            self.switch.external(egress)?,
            target,
        ];
        let active = ports.iter().all(|port| port.sends_data());
        (active && target.owns(lid) && !source.ca.port.owns(lid)).then_some(Passage {
            from,
            ingress,
            egress,
            to,
        })
    }

    /// Counts packets, of so many words together, that took a way as it was found.
    pub(crate) fn pass(&mut self, passage: Passage, packets: u64, words: u64) {
        if let Some(ca) = self.ca_mut(passage.from) {
            ca.port.counters.sent(packets, words, false);
        }
        if let Some(port) = self.switch.external_mut(passage.ingress) {
            port.counters.received(packets, words, false);
        }
        if let Some(port) = self.switch.external_mut(passage.egress) {
            port.counters.sent(packets, words, false);
        }
        if let Some(ca) = self.ca_mut(passage.to) {
            ca.port.counters.received(packets, words, false);
        }
    }

    /// Sends a packet of `bytes` from a CA to a group. Returns the other CAs that it reaches as a
    /// mask of slots; receivers in the same CA are the caller's.
    #[inline]
    pub(crate) fn multicast(&mut self, from: usize, mlid: u16, bytes: usize) -> Result<Mask, Loss> {
        let words = words(bytes);
        let source = self.slot_mut(from).ok_or(Loss::NoSource)?;
        let port = &mut source.ca.port;
        if !port.sends_data() {
            port.counters.xmit_discards = port.counters.xmit_discards.wrapping_add(1);
            return Err(Loss::Link);
        }
        port.counters.sent(1, words, true);
        let ingress = match source.attach {
            Attach::Nothing => return Err(Loss::Link),
            Attach::Ca(other) => {
                self.arrive(other, words, true)?;
                return Ok(1 << other);
            }
            Attach::Switch(port) => port,
        };
        self.enter_switch(ingress, words, true)?;
        let mut ports = self.switch.multicast(mlid) & !(1 << ingress) & !1;
        let mut reached = 0;
        while ports != 0 {
            let port = ports.trailing_zeros() as u8;
            ports &= ports - 1;
            if let Ok(to) = self.leave_switch(port, words, true) {
                if self.arrive(to, words, true).is_ok() {
                    reached |= 1 << to;
                }
            }
        }
        Ok(reached)
    }

    #[inline]
    fn enter_switch(&mut self, port: u8, words: u64, multicast: bool) -> Result<(), Loss> {
        let port = self.switch.external_mut(port).ok_or(Loss::Link)?;
        port.takes_data().map_err(|()| Loss::Link)?;
        port.counters.received(1, words, multicast);
        Ok(())
    }

    /// The CA at the end of the link that a packet leaves the switch by.
    #[inline]
    fn leave_switch(&mut self, number: u8, words: u64, multicast: bool) -> Result<usize, Loss> {
        let port = self.switch.external_mut(number).ok_or(Loss::NoRoute)?;
        if !port.sends_data() {
            port.counters.xmit_discards = port.counters.xmit_discards.wrapping_add(1);
            return Err(Loss::Link);
        }
        port.counters.sent(1, words, multicast);
        self.neighbor(number).ok_or(Loss::Link)
    }

    #[inline]
    fn arrive(&mut self, to: usize, words: u64, multicast: bool) -> Result<(), Loss> {
        let port = &mut self.ca_mut(to).ok_or(Loss::Link)?.port;
        let events = port.takes_data().map_err(|()| Loss::Link)?;
        port.counters.received(1, words, multicast);
        self.add_events(to, events);
        Ok(())
    }

    // Management.

    /// Shows the agents of a CA a MAD, which is answered in place.
    pub(crate) fn process_mad(&mut self, slot: usize, mad: &mut Mad) -> Reaction {
        let Some(ca) = self.ca_mut(slot) else {
            return Reaction::Pass;
        };
        let outcome = ca.process(mad);
        self.add_events(slot, outcome.events);
        self.command(End::Ca(slot), outcome.command);
        outcome.reaction
    }

    /// Sends an SMP from QP 0 of a CA. Returns the slot of the CA that the frame arrives at; it is
    /// the sender again, with the answer in the frame, if the switch was asked.
    pub(crate) fn forward_smp(&mut self, from: usize, frame: &mut Frame) -> Result<usize, Loss> {
        let ca = self.ca(from).ok_or(Loss::NoSource)?;
        let directed = frame.mad.is_directed();
        if !directed && ca.port.owns(frame.dlid) {
            return Ok(from);
        }
        if !ca.port.carries_smps() {
            return Err(Loss::Link);
        }
        match self.attach(from) {
            Attach::Nothing => Err(Loss::Link),
            Attach::Ca(other) => self.smp_arrives(other, frame),
            Attach::Switch(ingress) if directed => self.direct(ingress, frame),
            Attach::Switch(ingress) => {
                let own = frame.dlid != 0 && frame.dlid == self.switch.lid();
                if !own && self.switch.unicast(frame.dlid) != Some(0) {
                    return self.smp_by_lid(frame);
                }
                self.ask_switch(ingress, frame)?;
                frame.turn_round();
                self.smp_by_lid(frame)
            }
        }
    }

    fn direct(&mut self, ingress: u8, frame: &mut Frame) -> Result<usize, Loss> {
        let egress = match self.switch.direct(&mut frame.mad, ingress) {
            Hop::Nowhere => return Err(Loss::BadPath),
            Hop::Forward(port) => port,
            Hop::Here => {
                self.ask_switch(ingress, frame)?;
                frame.turn_round();
                ingress
            }
        };
        self.smp_leaves(egress, frame)
    }

    /// An SMP reaches the switch's own agent, whose answer takes its place.
    fn ask_switch(&mut self, ingress: u8, frame: &mut Frame) -> Result<(), Loss> {
        let outcome = self.switch.process_smp(&mut frame.mad, ingress);
        let (port, command) = outcome.command;
        self.command(End::Switch(port), command);
        match outcome.reaction {
            Reaction::Reply => Ok(()),
            _ => Err(Loss::NoAgent),
        }
    }

    /// An SMP leaves the switch towards its LID.
    fn smp_by_lid(&mut self, frame: &Frame) -> Result<usize, Loss> {
        match self.switch.unicast(frame.dlid) {
            None | Some(0) => Err(Loss::NoRoute),
            Some(egress) => self.smp_leaves(egress, frame),
        }
    }

    fn smp_leaves(&mut self, egress: u8, frame: &Frame) -> Result<usize, Loss> {
        let port = self.switch.external_mut(egress).ok_or(Loss::NoRoute)?;
        if !port.carries_smps() {
            port.counters.vl15_dropped = port.counters.vl15_dropped.wrapping_add(1);
            return Err(Loss::Link);
        }
        let to = self.neighbor(egress).ok_or(Loss::Link)?;
        self.smp_arrives(to, frame)
    }

    fn smp_arrives(&self, to: usize, frame: &Frame) -> Result<usize, Loss> {
        let port = &self.ca(to).ok_or(Loss::Link)?.port;
        if !port.carries_smps() {
            Err(Loss::Link)
        } else if frame.mad.is_directed() || port.owns(frame.dlid) {
            Ok(to)
        } else {
            Err(Loss::WrongLid)
        }
    }

    /// A MAD on QP 1 arrives at the switch (see [`Destination::Switch`]). An answer takes its
    /// place, and the slot that it arrives at is returned.
    pub(crate) fn switch_gmp(&mut self, frame: &mut Frame) -> Result<usize, Loss> {
        if self.switch.process_gmp(&mut frame.mad) != Reaction::Reply {
            return Err(Loss::NoAgent);
        }
        frame.turn_round();
        let words = words(frame.mad.0.len());
        let egress = match self.switch.unicast(frame.dlid) {
            None | Some(0) => return Err(Loss::NoRoute),
            Some(port) => port,
        };
        let to = self.leave_switch(egress, words, false)?;
        self.arrive(to, words, false)?;
        match self.ca(to) {
            Some(ca) if ca.port.owns(frame.dlid) => Ok(to),
            _ => Err(Loss::WrongLid),
        }
    }

    // Traps.

    /// When [`Subnet::next_trap`] has something to do, at the earliest.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        let switch = self
            .switch
            .management()
            .and_then(|port| self.switch.trap.deadline(port));
        let cas = self
            .slots
            .iter()
            .flatten()
            .filter_map(|slot| slot.ca.trap.deadline(&slot.ca.port))
            .min();
        match (switch, cas) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// A trap that is due, and the slot that it arrives at. None when all are sent; those that
    /// get lost on their way are due again later.
    pub(crate) fn next_trap(&mut self, now: u64) -> Option<(usize, Frame)> {
        for slot in 0..MAX_HCAS {
            let frame = self
                .slot_mut(slot)
                .and_then(|slot| slot.ca.trap.take(now, &slot.ca.port));
            if let Some(mut frame) = frame {
                if let Ok(to) = self.forward_smp(slot, &mut frame) {
                    return Some((to, frame));
                }
            }
        }
        let frame = self.switch.take_trap(now)?;
        let to = self.smp_by_lid(&frame).ok()?;
        Some((to, frame))
    }
}

/// A CA outside of a subnet.
pub(crate) struct Room(KBox<Slot>);

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_subnet)]
mod tests {
    use super::*;
    use crate::mad::{
        attr,
        class,
        method, //
    };
    use crate::port::{
        Event,
        PortCaps,
        PortState, //
    };

    fn ca_config(slot: usize) -> CaConfig {
        CaConfig {
            node_guid: 0x100 + slot as u64,
            port_guid: 0x200 + slot as u64,
            system_guid: 0x300 + slot as u64,
            description: [0; 64],
            caps: PortCaps::DEFAULT,
        }
    }

    /// CAs in slots 0, 1, … at ports 1, 2, … of the switch.
    fn subnet(count: usize) -> Subnet {
        let mut subnet = Subnet::new(&SwitchConfig {
            ports: 8,
            guid: 0xff,
            description: [0; 64],
            caps: PortCaps::DEFAULT,
        })
        .unwrap();
        for slot in 0..count {
            let room = Subnet::room(&ca_config(slot)).unwrap();
            subnet.add_ca(slot, room).unwrap();
            subnet
                .connect(slot, Attach::Switch(slot as u8 + 1))
                .unwrap();
        }
        subnet
    }

    fn directed(method: u8, attribute: u16, modifier: u32, path: &[u8]) -> Frame {
        let mut mad = Mad::request(class::SUBN_DIRECTED, method, attribute, modifier);
        mad.0[6] = 1;
        mad.0[7] = path.len() as u8;
        mad.0[32..36].fill(0xff);
        mad.0[129..129 + path.len()].copy_from_slice(path);
        Frame {
            slid: 0xffff,
            dlid: 0xffff,
            sl: 0,
            src_qp: 0,
            dest_qp: 0,
            mad,
        }
    }

    fn by_lid(method: u8, attribute: u16, slid: u16, dlid: u16) -> Frame {
        let mut frame = directed(method, attribute, 0, &[]);
        frame.mad = Mad::request(class::SUBN, method, attribute, 0);
        (frame.slid, frame.dlid) = (slid, dlid);
        frame
    }

    /// Asks the switch through slot 0.
    fn switch_ask(
        subnet: &mut Subnet,
        method: u8,
        attribute: u16,
        modifier: u32,
        data: &[u8; 64],
    ) -> Mad {
        let mut frame = directed(method, attribute, modifier, &[1]);
        frame.mad.set_data(data);
        assert_eq!(subnet.forward_smp(0, &mut frame), Ok(0));
        assert_eq!(
            (frame.mad.method(), frame.mad.hop_pointer()),
            (method::GET_RESP, 1)
        );
        assert_eq!(frame.mad.status(), 0x8000);
        frame.mad
    }

    fn set_state(subnet: &mut Subnet, end: End, state: u8) {
        let port = match end {
            End::Ca(_) => 1,
            End::Switch(port) => port,
        };
        let mut data = subnet.port(end).unwrap().info(port);
        data[32] = data[32] & 0xf0 | state;
        data[33] &= 0x0f;
        match end {
            End::Ca(slot) => {
                let mut mad = Mad::request(class::SUBN, method::SET, attr::PORT_INFO, 1);
                mad.set_data(&data);
                assert_eq!(subnet.process_mad(slot, &mut mad), Reaction::Reply);
                assert_eq!(mad.status(), 0);
            }
            End::Switch(port) => {
                switch_ask(subnet, method::SET, attr::PORT_INFO, port.into(), &data);
            }
        }
    }

    /// What a manager in slot 0 does: LIDs 1, 2, … for the CAs and 9 for the switch, ways, states.
    fn manage(subnet: &mut Subnet, count: usize) {
        let mut block = [0xff; 64];
        for slot in 0..count {
            block[slot + 1] = slot as u8 + 1;
            subnet.ca_mut(slot).unwrap().set_lid(slot as u16 + 1);
            subnet.ca_mut(slot).unwrap().set_sm_lid(1);
        }
        block[9] = 0;
        switch_ask(subnet, method::SET, attr::LINEAR_FORWARDING, 0, &block);
        let mut info = [0; 64];
        info[7] = 9;
        switch_ask(subnet, method::SET, attr::SWITCH_INFO, 0, &info);
        let mut data = subnet.switch.management().unwrap().info(0);
        data[17] = 9;
        data[19] = 1;
        switch_ask(subnet, method::SET, attr::PORT_INFO, 0, &data);
        for state in [3, 4] {
            for slot in 0..count {
                set_state(subnet, End::Ca(slot), state);
                set_state(subnet, End::Switch(slot as u8 + 1), state);
            }
        }
        while subnet.take_events().is_some() {}
    }

    fn managed(count: usize) -> Subnet {
        let mut subnet = subnet(count);
        manage(&mut subnet, count);
        subnet
    }

    fn state(subnet: &Subnet, slot: usize) -> PortState {
        subnet.ca(slot).unwrap().port.state()
    }

    #[test]
    fn cables() {
        let mut subnet = subnet(2);
        assert_eq!(state(&subnet, 1), PortState::Init);
        assert_eq!(subnet.connect(1, Attach::Switch(5)), Err(EBUSY));
        subnet.disconnect(1);
        assert_eq!(state(&subnet, 1), PortState::Down);
        assert_eq!(subnet.connect(1, Attach::Switch(1)), Err(EBUSY));
        assert_eq!(subnet.connect(1, Attach::Switch(9)), Err(EINVAL));
        assert_eq!(subnet.connect(1, Attach::Switch(0)), Err(EINVAL));
        assert_eq!(subnet.connect(1, Attach::Ca(0)), Err(EBUSY));
        assert_eq!(subnet.connect(1, Attach::Ca(1)), Err(EINVAL));
        assert_eq!(subnet.connect(2, Attach::Switch(3)), Err(ENODEV));
        assert_eq!(subnet.connect(1, Attach::Switch(5)), Ok(()));
        assert_eq!(state(&subnet, 1), PortState::Init);
        let room = Subnet::room(&ca_config(1)).unwrap();
        assert_eq!(subnet.add_ca(1, room), Err(EEXIST));
        assert!(subnet.remove_ca(1).is_some());
        assert!(subnet.remove_ca(1).is_none());
        assert!(subnet.remove_ca(99).is_none());
        assert!(!subnet.switch.external(5).unwrap().carries_smps());
    }

    #[test]
    fn an_smp_to_another_ca_and_back() {
        let mut subnet = subnet(2);
        let mut frame = directed(method::GET, attr::NODE_INFO, 0, &[1, 2]);
        assert_eq!(subnet.forward_smp(0, &mut frame), Ok(1));
        assert_eq!((frame.mad.hop_pointer(), frame.mad.return_port(1)), (2, 1));
        assert_eq!(subnet.process_mad(1, &mut frame.mad), Reaction::Reply);
        assert_eq!(subnet.forward_smp(1, &mut frame), Ok(0));
        assert_eq!(frame.mad.hop_pointer(), 1);
        assert_eq!(frame.mad.data()[12..20], 0x101u64.to_be_bytes());
        let mut frame = directed(method::GET, attr::NODE_INFO, 0, &[1, 3]);
        assert_eq!(subnet.forward_smp(0, &mut frame), Err(Loss::Link));
        let mut frame = directed(method::GET, attr::NODE_INFO, 0, &[1, 0]);
        assert_eq!(subnet.forward_smp(0, &mut frame), Err(Loss::BadPath));
    }

    #[test]
    fn smps_by_lid() {
        let mut subnet = managed(2);
        let mut frame = by_lid(method::GET, attr::NODE_INFO, 1, 2);
        assert_eq!(subnet.forward_smp(0, &mut frame), Ok(1));
        let mut frame = by_lid(method::GET, attr::NODE_INFO, 2, 9);
        assert_eq!(subnet.forward_smp(1, &mut frame), Ok(1));
        assert_eq!((frame.slid, frame.dlid, frame.mad.data()[36]), (9, 2, 2));
        let mut frame = by_lid(method::GET, attr::NODE_INFO, 1, 1);
        assert_eq!(subnet.forward_smp(0, &mut frame), Ok(0));
        for (dlid, loss) in [
            (3, Loss::NoRoute),
            (0, Loss::NoRoute),
            (0xffff, Loss::NoRoute),
        ] {
            let mut frame = by_lid(method::GET, attr::NODE_INFO, 1, dlid);
            assert_eq!(subnet.forward_smp(0, &mut frame), Err(loss));
        }
        subnet.ca_mut(1).unwrap().set_lid(7);
        let mut frame = by_lid(method::GET, attr::NODE_INFO, 1, 2);
        assert_eq!(subnet.forward_smp(0, &mut frame), Err(Loss::WrongLid));
    }

    #[test]
    fn data_needs_active_ports() {
        let mut subnet = subnet(2);
        assert_eq!(subnet.unicast(0, 2, 100), Err(Loss::Link));
        manage(&mut subnet, 2);
        assert_eq!(subnet.unicast(0, 2, 100), Ok(Destination::Ca(1)));
        assert_eq!(subnet.unicast(0, 1, 100), Ok(Destination::Ca(0)));
        assert_eq!(subnet.unicast(0, 9, 100), Ok(Destination::Switch));
        assert_eq!(subnet.unicast(0, 5, 100), Err(Loss::NoRoute));
        assert_eq!(subnet.unicast(5, 1, 100), Err(Loss::NoSource));
        assert_eq!(subnet.ca(1).unwrap().port.counters.rcv_data, 9 + 25);
        subnet.set_link(1, false).unwrap();
        assert_eq!(
            subnet.take_events(),
            Some((1, Events::of(&[Event::PortErr])))
        );
        assert_eq!(subnet.unicast(0, 2, 100), Err(Loss::Link));
        subnet.set_link(1, true).unwrap();
        assert_eq!(state(&subnet, 1), PortState::Init);
        assert_eq!(subnet.unicast(0, 2, 100), Err(Loss::Link));
        assert_eq!(subnet.take_events(), None);
        assert_eq!(subnet.switch.external(2).unwrap().counters.xmit_discards, 2);
    }

    #[test]
    fn a_passage_is_as_the_way() {
        let mut subnet = subnet(2);
        assert_eq!(subnet.passage(0, 2), None);
        manage(&mut subnet, 2);
        let Some(passage) = subnet.passage(0, 2) else {
            return assert!(false);
        };
        // To oneself, the switch, nowhere, from nowhere.
        for (from, lid) in [(0, 1), (0, 9), (0, 5), (5, 1)] {
            assert_eq!(subnet.passage(from, lid), None);
        }
        let counted = |subnet: &Subnet| {
            let ca = |slot| {
                let counters = &subnet.ca(slot).unwrap().port.counters;
                [counters.xmit_data, counters.rcv_data]
            };
            let port = |number| {
                let counters = &subnet.switch.external(number).unwrap().counters;
                [counters.xmit_data, counters.rcv_data]
            };
            [ca(0), port(1), port(2), ca(1)]
        };
        let before = counted(&subnet);
        assert_eq!(subnet.unicast(0, 2, 100), Ok(Destination::Ca(1)));
        let between = counted(&subnet);
        subnet.pass(passage, 1, words(100));
        for ((old, mid), new) in before.iter().zip(&between).zip(&counted(&subnet)) {
            for side in 0..2 {
                assert_eq!(new[side] - mid[side], mid[side] - old[side]);
            }
        }
        subnet.set_link(1, false).unwrap();
        assert_eq!(subnet.passage(0, 2), None);
        subnet.set_link(1, true).unwrap();
        for state in [3, 4] {
            set_state(&mut subnet, End::Switch(2), state);
        }
        // Not as long as the last port is only armed.
        set_state(&mut subnet, End::Ca(1), 3);
        assert_eq!(subnet.passage(0, 2), None);
        set_state(&mut subnet, End::Ca(1), 4);
        assert_eq!(subnet.passage(0, 2), Some(passage));
    }

    #[test]
    fn armed_receiver_turns_active() {
        let mut subnet = managed(2);
        subnet.bounce(1).unwrap();
        for state in [3, 4] {
            set_state(&mut subnet, End::Switch(2), state);
        }
        set_state(&mut subnet, End::Ca(1), 3);
        while subnet.take_events().is_some() {}
        assert_eq!(subnet.unicast(0, 2, 0), Ok(Destination::Ca(1)));
        assert!(subnet.has_events());
        assert_eq!(
            subnet.take_events(),
            Some((1, Events::of(&[Event::PortActive])))
        );
    }

    #[test]
    fn groups() {
        let mut subnet = managed(4);
        let mut block = [0; 64];
        // Group 0 at ports 0, 1, 2, 4 and 7.
        block[1] = 0x97;
        switch_ask(
            &mut subnet,
            method::SET,
            attr::MULTICAST_FORWARDING,
            0,
            &block,
        );
        assert_eq!(subnet.multicast(0, 0xc000, 60), Ok(0b1010));
        assert_eq!(subnet.multicast(2, 0xc000, 60), Ok(0b1011));
        assert_eq!(subnet.multicast(0, 0xc001, 60), Ok(0));
        subnet.set_link(1, false).unwrap();
        assert_eq!(subnet.multicast(0, 0xc000, 60), Ok(0b1000));
        assert_eq!(subnet.ca(3).unwrap().port.counters.multicast_rcv, 3);
    }

    #[test]
    fn states_set_at_either_end_take_the_link_down() {
        for end in [End::Ca(1), End::Switch(2)] {
            let mut subnet = managed(2);
            set_state(&mut subnet, end, 1);
            assert_eq!(state(&subnet, 1), PortState::Init);
            assert_eq!(
                subnet.port(End::Switch(2)).unwrap().state(),
                PortState::Init
            );
            assert_eq!(
                subnet.take_events(),
                Some((1, Events::of(&[Event::PortErr])))
            );
        }
    }

    #[test]
    fn disabled_until_told_to_poll() {
        let mut subnet = managed(2);
        let mut data = subnet.port(End::Switch(2)).unwrap().info(2);
        data[32] &= 0xf0;
        data[33] = 0x30;
        switch_ask(&mut subnet, method::SET, attr::PORT_INFO, 2, &data);
        assert_eq!(state(&subnet, 1), PortState::Down);
        subnet.bounce(1).unwrap();
        assert_eq!(state(&subnet, 1), PortState::Down);
        assert_eq!(
            subnet.port(End::Switch(2)).unwrap().phys_state(),
            PhysState::Disabled
        );
        data[33] = 0x20;
        switch_ask(&mut subnet, method::SET, attr::PORT_INFO, 2, &data);
        assert_eq!(state(&subnet, 1), PortState::Init);
    }

    #[test]
    fn the_switch_tells_of_links() {
        let mut subnet = managed(2);
        let (to, first) = subnet.next_trap(5).unwrap();
        assert_eq!(
            (to, first.slid, first.dlid, first.mad.data()[5]),
            (0, 9, 1, 128)
        );
        assert_eq!(first.mad.data()[10..12], [0, 9]);
        assert!(subnet.next_trap(6).is_none());
        assert!(subnet.next_deadline().is_some_and(|due| due > 6));
        let mut repress = by_lid(method::TRAP_REPRESS, attr::NOTICE, 1, 9);
        repress.mad.0[8..16].copy_from_slice(&first.mad.tid());
        assert_eq!(subnet.forward_smp(0, &mut repress), Err(Loss::NoAgent));
        assert_eq!(subnet.next_deadline(), None);
        subnet.bounce(1).unwrap();
        assert_eq!(subnet.next_deadline(), Some(0));
        let (_, second) = subnet.next_trap(7).unwrap();
        assert!(second.mad.tid() != first.mad.tid());
    }

    #[test]
    fn a_ca_tells_of_a_manager_in_it() {
        let mut subnet = managed(2);
        subnet.next_trap(1);
        subnet.ca_mut(1).unwrap().set_caps(1 << 1, 0);
        let (to, frame) = subnet.next_trap(2).unwrap();
        assert_eq!((to, frame.slid, frame.mad.data()[5]), (0, 2, 144));
        // One in the manager's own CA never leaves it.
        subnet.ca_mut(0).unwrap().set_caps(1 << 1, 0);
        assert_eq!(subnet.next_trap(2).unwrap().0, 0);
    }

    #[test]
    fn performance_of_the_switch() {
        let mut subnet = managed(2);
        subnet.unicast(0, 2, 40).unwrap();
        let mut frame = by_lid(method::GET, attr::PORT_COUNTERS, 1, 9);
        frame.mad = Mad::request(class::PERF, method::GET, attr::PORT_COUNTERS, 0);
        frame.mad.perf_data()[1] = 2;
        (frame.src_qp, frame.dest_qp) = (7, 1);
        assert_eq!(subnet.switch_gmp(&mut frame), Ok(0));
        assert_eq!((frame.src_qp, frame.dest_qp, frame.dlid), (1, 7, 1));
        assert_eq!(frame.mad.perf_data()[32..36], [0, 0, 0, 1]);
        let mut frame = by_lid(method::GET, attr::PORT_COUNTERS, 1, 9);
        frame.mad = Mad::request(0x03, method::GET, 0x35, 0);
        assert_eq!(subnet.switch_gmp(&mut frame), Err(Loss::NoAgent));
    }

    #[test]
    fn back_to_back() {
        let mut subnet = subnet(0);
        for slot in 0..2 {
            let room = Subnet::room(&ca_config(slot)).unwrap();
            subnet.add_ca(slot, room).unwrap();
        }
        subnet.connect(0, Attach::Ca(1)).unwrap();
        assert_eq!(
            (state(&subnet, 0), state(&subnet, 1)),
            (PortState::Init, PortState::Init)
        );
        let mut frame = directed(method::GET, attr::NODE_INFO, 0, &[1]);
        assert_eq!(subnet.forward_smp(0, &mut frame), Ok(1));
        for slot in 0..2 {
            subnet.ca_mut(slot).unwrap().set_lid(slot as u16 + 1);
            set_state(&mut subnet, End::Ca(slot), 3);
            set_state(&mut subnet, End::Ca(slot), 4);
        }
        assert_eq!(subnet.unicast(0, 2, 1), Ok(Destination::Ca(1)));
        assert_eq!(subnet.unicast(0, 3, 1), Err(Loss::WrongLid));
        assert_eq!(subnet.multicast(1, 0xc000, 1), Ok(1));
        subnet.remove_ca(0);
        assert_eq!(subnet.attach(1), Attach::Nothing);
        assert_eq!(state(&subnet, 1), PortState::Down);
    }

    #[test]
    fn a_switch_that_lost_its_power() {
        let mut subnet = managed(2);
        subnet.reset_switch();
        assert_eq!(subnet.switch.lid(), 0);
        for slot in 0..2 {
            assert_eq!(state(&subnet, slot), PortState::Init);
            assert_eq!(
                subnet.take_events(),
                Some((slot, Events::of(&[Event::PortErr])))
            );
        }
        manage(&mut subnet, 2);
        assert_eq!(subnet.unicast(0, 2, 1), Ok(Destination::Ca(1)));
    }

    /// Frames of nonsense from everywhere: nothing panics, and what arrives arrives somewhere.
    #[test]
    fn nonsense() {
        let mut subnet = managed(4);
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for _ in 0..5000 {
            let mut frame = directed(method::SET, attr::NODE_INFO, 0, &[]);
            for chunk in frame.mad.0.chunks_mut(8) {
                chunk.copy_from_slice(&next().to_be_bytes());
            }
            let choice = next();
            frame.mad.0[..4].copy_from_slice(&[1, 1, 1, 1 + (choice & 1) as u8]);
            if choice & 2 != 0 {
                frame.mad.0[1] = class::SUBN_DIRECTED;
                frame.mad.0[4] &= 0x80;
                frame.mad.0[6] &= 3;
                frame.mad.0[7] &= 3;
                frame.mad.0[32..36].fill(0xff);
                for byte in &mut frame.mad.0[128..] {
                    *byte &= 0x0f;
                }
            }
            frame.mad.0[16] = 0;
            frame.mad.0[17] = 0x10 + (choice >> 8 & 0x0f) as u8;
            frame.mad.0[20] &= (choice >> 16 & 0x80) as u8;
            frame.mad.0[21..24].copy_from_slice(&[0, 0, (choice >> 24 & 0x0f) as u8]);
            frame.dlid = (choice >> 32 & 0x0f) as u16;
            let from = (choice >> 40 & 7) as usize;
            let mut copy = frame;
            if let Ok(to) = subnet.forward_smp(from, &mut copy) {
                assert!(subnet.ca(to).is_some());
            }
            subnet.process_mad(from, &mut frame.mad);
            frame.mad.0[1] = class::PERF;
            let _ = subnet.switch_gmp(&mut frame);
            let _ = subnet.next_trap(choice);
            while subnet.take_events().is_some() {}
        }
    }
}
