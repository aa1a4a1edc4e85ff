// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The switch as a node: forwarding tables, its ports, where a directed-route SMP goes next
//! (IBA 14.2.2), and the agents behind port 0 (a base port: no link, no data).
//!
//! The tables are allocated once, nothing here allocates later.

use kernel::prelude::*;

use crate::mad::{
    attr,
    class,
    get16,
    method,
    put,
    Bits,
    Frame,
    Mad,
    Reaction,
    Status,
    MAX_HOPS, //
};
use crate::port::{
    cap,
    LinkCommand,
    Port,
    PortCaps,
    PortKind,
    DEFAULT_P_KEY,
    FIRST_MLID, //
};
use crate::sma::{
    node_info,
    p_key_block,
    set_p_key_block,
    NodeKind,
    TrapSender,
    P_KEY_BLOCK, //
};

/// A bit for each port, or for each slot of a subnet.
pub(crate) type Mask = u128;

/// The most external ports: port 0 has a bit in a mask too.
pub(crate) const MAX_PORTS: u8 = 72;

/// Entries of the linear forwarding table.
const LINEAR_ENTRIES: u16 = 0x1000;

/// Entries of the multicast forwarding table.
const MULTICAST_ENTRIES: u16 = 1024;

/// What an entry of the linear table says where there is no way.
const NO_PORT: u8 = 0xff;

/// Ports in an entry of a multicast forwarding block.
const POSITION_BITS: u32 = 16;

const SWITCH_CAPS: u32 = cap::TRAP | cap::SYSTEM_IMAGE_GUID;

mod field {
    use crate::mad::Bits;

    pub(super) const LINEAR_TOP: usize = 6;
    pub(super) const DEFAULT_PORTS: usize = 8;
    pub(super) const LIFE_TIME: Bits = Bits::new(11, 3, 5);
    pub(super) const PORT_STATE_CHANGE: Bits = Bits::new(11, 2, 1);
    pub(super) const MULTICAST_TOP: usize = 18;
}

/// How a switch is made.
#[derive(Clone, Copy)]
pub(crate) struct SwitchConfig {
    /// External ports.
    pub(crate) ports: u8,
    pub(crate) guid: u64,
    pub(crate) description: [u8; 64],
    pub(crate) caps: PortCaps,
}

/// Where a directed-route SMP goes from here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hop {
    /// Out through a port.
    Forward(u8),
    /// To the agent of the switch, whose answer leaves through the port it came in by.
    Here,
    /// Its path makes no sense.
    Nowhere,
}

/// What follows from an SMP to the switch.
pub(crate) struct Outcome {
    pub(crate) reaction: Reaction,
    /// What a port's link is told to do.
    pub(crate) command: (u8, LinkCommand),
}

/// The switch.
pub(crate) struct Switch {
    config: SwitchConfig,
    /// By number, port 0 first.
    ports: KVec<Port>,
    linear: KVec<u8>,
    multicast: KVec<Mask>,
    linear_top: u16,
    multicast_top: u16,
    default_ports: [u8; 3],
    life_time: u8,
    port_state_change: bool,
    p_keys: [u16; P_KEY_BLOCK],
    pub(crate) trap: TrapSender,
}

impl Switch {
    pub(crate) fn new(config: &SwitchConfig) -> Result<Self> {
        if config.ports == 0 || config.ports > MAX_PORTS {
            return Err(EINVAL);
        }
        let mut switch = Self {
            config: *config,
            ports: KVec::with_capacity(usize::from(config.ports) + 1, GFP_KERNEL)?,
            linear: KVec::from_elem(NO_PORT, usize::from(LINEAR_ENTRIES), GFP_KERNEL)?,
            multicast: KVec::from_elem(0, usize::from(MULTICAST_ENTRIES), GFP_KERNEL)?,
            linear_top: 0,
            multicast_top: 0,
            default_ports: [0; 3],
            life_time: 0,
            port_state_change: false,
            p_keys: [0; P_KEY_BLOCK],
            trap: TrapSender::new(config.guid << 32),
        };
        for number in 0..=config.ports {
            switch.ports.push(Self::port(config, number), GFP_KERNEL)?;
        }
        switch.power_on();
        Ok(switch)
    }

    fn port(config: &SwitchConfig, number: u8) -> Port {
        match number {
            0 => Port::new(PortKind::SwitchManagement, config.caps, SWITCH_CAPS, 1),
            _ => Port::new(PortKind::SwitchExternal, config.caps, 0, 0),
        }
    }

    /// Forgets all that a manager ever set. Links are the caller's.
    pub(crate) fn power_on(&mut self) {
        for (number, port) in (0..).zip(self.ports.iter_mut()) {
            *port = Self::port(&self.config, number);
        }
        self.linear.fill(NO_PORT);
        self.multicast.fill(0);
        self.linear_top = 0;
        self.multicast_top = 0;
        self.default_ports = [0; 3];
        self.life_time = 0;
        self.port_state_change = false;
        self.p_keys = [0; P_KEY_BLOCK];
        self.p_keys[0] = DEFAULT_P_KEY;
    }

    /// Port 0, which is always there.
    pub(crate) fn management(&self) -> Option<&Port> {
        self.ports.first()
    }

    #[inline]
    pub(crate) fn lid(&self) -> u16 {
        self.ports.first().map_or(0, Port::lid)
    }

    #[inline]
    pub(crate) fn external(&self, number: u8) -> Option<&Port> {
        self.ports.get(usize::from(number)).filter(|_| number != 0)
    }

    #[inline]
    pub(crate) fn external_mut(&mut self, number: u8) -> Option<&mut Port> {
        if number == 0 {
            return None;
        }
        self.ports.get_mut(usize::from(number))
    }

    /// A link came or went by itself: the manager is told (trap 128), and again until it has
    /// heard it.
    pub(crate) fn note_link_change(&mut self) {
        self.port_state_change = true;
        self.raise_trap();
    }

    pub(crate) fn raise_trap(&mut self) {
        self.trap.raise(1, 2, 128, &[0, 0]);
    }

    /// The trap that is due now.
    pub(crate) fn take_trap(&mut self, now: u64) -> Option<Frame> {
        self.trap.take(now, self.ports.first()?)
    }

    // Data.

    /// The port that leads to a LID.
    #[inline]
    pub(crate) fn unicast(&self, lid: u16) -> Option<u8> {
        if lid > self.linear_top {
            return None;
        }
        match self.linear.get(usize::from(lid)) {
            Some(&port) if port <= self.config.ports => Some(port),
            _ => None,
        }
    }

    /// The ports that lead to members of a group, as a mask by number.
    #[inline]
    pub(crate) fn multicast(&self, mlid: u16) -> Mask {
        mlid.checked_sub(FIRST_MLID)
            .and_then(|index| self.multicast.get(usize::from(index)))
            .copied()
            .unwrap_or(0)
    }

    // Directed routes.

    /// Takes a directed-route SMP one hop further; its pointer and return path are updated. One
    /// that has arrived gets the pointer its answer leaves with.
    pub(crate) fn direct(&self, mad: &mut Mad, ingress: u8) -> Hop {
        let (count, pointer) = (mad.hop_count(), mad.hop_pointer());
        if count > MAX_HOPS
            || pointer == 0
            || pointer > count
            || mad.directed_lids() != (u16::MAX, u16::MAX)
        {
            return Hop::Nowhere;
        }
        if mad.is_returning() {
            // A pointer of 1 would be for a manager that sits in the switch.
            if pointer == 1 {
                return Hop::Nowhere;
            }
            mad.set_hop_pointer(pointer - 1);
            return self.way_out(mad.return_port(pointer - 1));
        }
        mad.set_return_port(pointer, ingress);
        if pointer == count {
            return Hop::Here;
        }
        mad.set_hop_pointer(pointer + 1);
        self.way_out(mad.initial_port(pointer + 1))
    }

    fn way_out(&self, port: u8) -> Hop {
        if (1..=self.config.ports).contains(&port) {
            Hop::Forward(port)
        } else {
            Hop::Nowhere
        }
    }

    // Agents.

    /// Shows the performance agent a MAD, which is answered in place.
    pub(crate) fn process_gmp(&mut self, mad: &mut Mad) -> Reaction {
        if mad.class() != class::PERF {
            return Reaction::Pass;
        }
        crate::pma::process(mad, |port| {
            self.ports
                .get_mut(usize::from(port))
                .map(|port| &mut port.counters)
        })
    }

    /// Shows the subnet management agent an SMP that came in by a port; it is answered in place.
    pub(crate) fn process_smp(&mut self, mad: &mut Mad, ingress: u8) -> Outcome {
        let mut command = (0, LinkCommand::None);
        let set = match mad.method() {
            method::GET => false,
            method::SET => true,
            method => {
                if method == method::TRAP_REPRESS {
                    self.trap.repress(mad.tid());
                }
                return Outcome {
                    reaction: Reaction::Consumed,
                    command,
                };
            }
        };
        let status = if mad.base_version() != 1 || mad.class_version() != 1 {
            Status::BadVersion
        } else {
            match self.attribute(mad, set, ingress, &mut command) {
                Ok(data) => {
                    mad.set_data(&data);
                    Status::Ok
                }
                Err(status) => status,
            }
        };
        mad.respond(status);
        Outcome {
            reaction: Reaction::Reply,
            command,
        }
    }

    /// Sets an attribute if told to, and returns what it is then.
    fn attribute(
        &mut self,
        mad: &Mad,
        set: bool,
        ingress: u8,
        command: &mut (u8, LinkCommand),
    ) -> Result<[u8; 64], Status> {
        let modifier = mad.modifier();
        let data = mad.data();
        match mad.attribute() {
            attr::NODE_DESCRIPTION if !set => Ok(self.config.description),
            attr::NODE_INFO if !set => {
                let kind = NodeKind {
                    code: 2,
                    ports: self.config.ports,
                    p_keys: P_KEY_BLOCK as u16,
                };
                Ok(node_info(&kind, [self.config.guid; 3], ingress))
            }
            attr::SWITCH_INFO if modifier == 0 => {
                if set {
                    self.set_info(data)?;
                }
                Ok(self.info())
            }
            attr::GUID_INFO if modifier == 0 && !set => {
                let mut data = [0; 64];
                put(&mut data, 0, &self.config.guid.to_be_bytes());
                Ok(data)
            }
            attr::PORT_INFO => {
                // The highest bit asks for extended speeds.
                let number = u8::try_from(modifier & 0x7fff_ffff).map_err(|_| Status::BadField)?;
                let port = self.numbered(number)?;
                if set {
                    (_, command.1) = port.set_info(data)?;
                    command.0 = number;
                }
                Ok(port.info(ingress))
            }
            // Packets are not checked against P_Keys: only port 0 has any.
            attr::P_KEY_TABLE if modifier >> 16 == 0 => {
                let block = modifier as usize;
                if set {
                    set_p_key_block(&mut self.p_keys, block, data).ok_or(Status::BadField)?;
                }
                p_key_block(&self.p_keys, block).ok_or(Status::BadField)
            }
            attr::SL_TO_VL => Ok(self.numbered(modifier as u8)?.sl_to_vl(set, data)),
            attr::VL_ARBITRATION => self
                .numbered(modifier as u8)?
                .vl_arbitration(modifier, set, data),
            attr::LINEAR_FORWARDING => {
                let block = self
                    .linear
                    .chunks_mut(64)
                    .nth(modifier as usize)
                    .ok_or(Status::BadField)?;
                if set {
                    block.copy_from_slice(data);
                }
                let mut data = [NO_PORT; 64];
                data.copy_from_slice(block);
                Ok(data)
            }
            attr::MULTICAST_FORWARDING => self.multicast_block(modifier, set, data),
            attr::SWITCH_INFO | attr::P_KEY_TABLE => Err(Status::BadField),
            attr::GUID_INFO if !set => Err(Status::BadField),
            _ => Err(Status::BadAttribute),
        }
    }

    fn numbered(&mut self, number: u8) -> Result<&mut Port, Status> {
        self.ports
            .get_mut(usize::from(number))
            .ok_or(Status::BadField)
    }

    fn info(&self) -> [u8; 64] {
        let mut data = [0; 64];
        put(&mut data, 0, &LINEAR_ENTRIES.to_be_bytes());
        put(&mut data, 4, &MULTICAST_ENTRIES.to_be_bytes());
        put(&mut data, field::LINEAR_TOP, &self.linear_top.to_be_bytes());
        put(&mut data, field::DEFAULT_PORTS, &self.default_ports);
        field::LIFE_TIME.put(&mut data, self.life_time);
        field::PORT_STATE_CHANGE.put(&mut data, self.port_state_change.into());
        put(
            &mut data,
            field::MULTICAST_TOP,
            &self.multicast_top.to_be_bytes(),
        );
        data
    }

    fn set_info(&mut self, data: &[u8; 64]) -> Result<(), Status> {
        let linear_top = get16(data, field::LINEAR_TOP);
        if linear_top >= LINEAR_ENTRIES {
            return Err(Status::BadField);
        }
        self.linear_top = linear_top;
        for (index, port) in self.default_ports.iter_mut().enumerate() {
            *port = Bits::new(field::DEFAULT_PORTS + index, 0, 8).get(data);
        }
        self.life_time = field::LIFE_TIME.get(data);
        self.multicast_top = get16(data, field::MULTICAST_TOP);
        // Writing it clears it, and the manager need not be told any more.
        if field::PORT_STATE_CHANGE.get(data) != 0 {
            self.port_state_change = false;
            self.trap.withdraw();
        }
        Ok(())
    }

    /// A block is 32 groups, and of each the 16 ports at a position.
    fn multicast_block(
        &mut self,
        modifier: u32,
        set: bool,
        data: &[u8; 64],
    ) -> Result<[u8; 64], Status> {
        let shift = (modifier >> 28) * POSITION_BITS;
        if modifier & 0x0fff_fe00 != 0 || shift > u32::from(self.config.ports) {
            return Err(Status::BadField);
        }
        let groups = self
            .multicast
            .chunks_mut(32)
            .nth((modifier & 0x1ff) as usize)
            .ok_or(Status::BadField)?;
        let mask = Mask::from(u16::MAX) << shift;
        let mut now = [0; 64];
        for (index, group) in groups.iter_mut().enumerate() {
            if set {
                *group = *group & !mask | Mask::from(get16(data, 2 * index)) << shift;
            }
            let part = (*group >> shift) as u16;
            put(&mut now, 2 * index, &part.to_be_bytes());
        }
        Ok(now)
    }
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_switch)]
mod tests {
    use super::*;

    fn switch() -> Switch {
        switch_of(20)
    }

    fn switch_of(ports: u8) -> Switch {
        Switch::new(&SwitchConfig {
            ports,
            guid: 0x0200_0000_0000_00ff,
            description: [b's'; 64],
            caps: PortCaps::DEFAULT,
        })
        .unwrap()
    }

    fn ask(switch: &mut Switch, method: u8, attribute: u16, modifier: u32, data: &[u8]) -> Mad {
        let mut mad = Mad::request(class::SUBN, method, attribute, modifier);
        let mut full = [0; 64];
        full[..data.len()].copy_from_slice(data);
        mad.set_data(&full);
        let outcome = switch.process_smp(&mut mad, 3);
        assert_eq!(outcome.reaction, Reaction::Reply);
        mad
    }

    fn get(switch: &mut Switch, attribute: u16, modifier: u32) -> Mad {
        ask(switch, method::GET, attribute, modifier, &[])
    }

    #[test]
    fn who_it_is() {
        let mut switch = switch();
        let mad = get(&mut switch, attr::NODE_INFO, 0);
        assert_eq!(mad.data()[..4], [1, 1, 2, 20]);
        assert_eq!(mad.data()[12..20], mad.data()[20..28]);
        assert_eq!(mad.data()[36], 3);
        assert_eq!(
            get(&mut switch, attr::PORT_INFO, 0).data()[32..34],
            [0x74, 0x52]
        );
        assert_eq!(get(&mut switch, attr::PORT_INFO, 7).data()[28], 3);
    }

    #[test]
    fn linear_table() {
        let mut switch = switch();
        assert_eq!(
            get(&mut switch, attr::LINEAR_FORWARDING, 63).data(),
            &[0xff; 64]
        );
        let mut block = [0xff; 64];
        block[..4].copy_from_slice(&[0xff, 2, 21, 0]);
        ask(&mut switch, method::SET, attr::LINEAR_FORWARDING, 1, &block);
        assert_eq!(switch.unicast(65), None);
        let mut info = [0; 64];
        info[6..8].copy_from_slice(&[0, 67]);
        ask(&mut switch, method::SET, attr::SWITCH_INFO, 0, &info);
        assert_eq!(switch.unicast(65), Some(2));
        // A port that is not there, the switch itself, beyond the top.
        assert_eq!(switch.unicast(66), None);
        assert_eq!(switch.unicast(67), Some(0));
        assert_eq!(switch.unicast(68), None);
        assert_eq!(switch.unicast(0xffff), None);
        switch.power_on();
        assert_eq!(switch.unicast(65), None);
    }

    #[test]
    fn multicast_table() {
        let mut switch = switch();
        let mut block = [0; 64];
        block[2..4].copy_from_slice(&[0x80, 0x02]);
        ask(
            &mut switch,
            method::SET,
            attr::MULTICAST_FORWARDING,
            0,
            &block,
        );
        block[2..4].copy_from_slice(&[0, 0x11]);
        let mad = ask(
            &mut switch,
            method::SET,
            attr::MULTICAST_FORWARDING,
            1 << 28,
            &block,
        );
        assert_eq!(mad.data()[2..4], [0, 0x11]);
        assert_eq!(switch.multicast(0xc001), 0x0011_8002);
        assert_eq!(switch.multicast(0xc000), 0);
        assert_eq!(switch.multicast(0xc3ff), 0);
        assert_eq!(switch.multicast(0xc400), 0);
        assert_eq!(switch.multicast(1), 0);
    }

    #[test]
    fn the_last_ports_have_multicast_too() {
        let mut switch = switch_of(MAX_PORTS);
        let mut block = [0; 64];
        block[..2].copy_from_slice(&[0x01, 0x05]);
        let position = u32::from(MAX_PORTS) / POSITION_BITS;
        ask(
            &mut switch,
            method::SET,
            attr::MULTICAST_FORWARDING,
            position << 28,
            &block,
        );
        let first = position * POSITION_BITS;
        assert_eq!(switch.multicast(0xc000), 0x105 << first);
        assert_eq!(first + 8, u32::from(MAX_PORTS));
    }

    #[test]
    fn port_state_change_is_cleared_by_writing_it() {
        let mut switch = switch();
        switch.note_link_change();
        let mad = get(&mut switch, attr::SWITCH_INFO, 0);
        assert_eq!(mad.data()[11] & 4, 4);
        let mad = ask(&mut switch, method::SET, attr::SWITCH_INFO, 0, &[0; 64]);
        assert_eq!(mad.data()[11] & 4, 4);
        let mut info = [0; 64];
        info[11] = 0x90 | 4;
        assert!(switch.take_trap(0).is_none());
        let port = &mut switch.ports[0];
        (port.lid, port.sm_lid) = (9, 1);
        assert!(switch.take_trap(0).is_some());
        let mad = ask(&mut switch, method::SET, attr::SWITCH_INFO, 0, &info);
        assert_eq!(mad.data()[11], 0x90);
        assert!(switch.take_trap(u64::MAX).is_none());
    }

    #[test]
    fn refusals() {
        let mut switch = switch();
        let mut top = [0; 64];
        top[6] = 0x10;
        let table: [(u8, u16, u32, &[u8], u16); 12] = [
            (method::GET, attr::PORT_INFO, 21, &[], 0x1c),
            (method::GET, attr::PORT_INFO, 0x100, &[], 0x1c),
            (method::GET, attr::LINEAR_FORWARDING, 64, &[], 0x1c),
            (method::SET, attr::LINEAR_FORWARDING, 0xffff_ffff, &[], 0x1c),
            (method::GET, attr::MULTICAST_FORWARDING, 32, &[], 0x1c),
            (method::GET, attr::MULTICAST_FORWARDING, 2 << 28, &[], 0x1c),
            (
                method::SET,
                attr::MULTICAST_FORWARDING,
                0x0100_0000,
                &[],
                0x1c,
            ),
            (method::GET, attr::P_KEY_TABLE, 1 << 16, &[], 0x1c),
            (method::GET, attr::P_KEY_TABLE, 1, &[], 0x1c),
            (method::SET, attr::SWITCH_INFO, 0, &top, 0x1c),
            (method::SET, attr::NODE_INFO, 0, &[], 0x0c),
            (method::GET, attr::SM_INFO, 0, &[], 0x0c),
        ];
        for (method, attribute, modifier, data, status) in table {
            let mad = ask(&mut switch, method, attribute, modifier, data);
            assert_eq!(mad.status(), status);
        }
        let mut mad = Mad::request(class::SUBN, method::TRAP, attr::NOTICE, 0);
        assert_eq!(switch.process_smp(&mut mad, 1).reaction, Reaction::Consumed);
    }

    fn directed(pointer: u8, count: u8, path: &[u8]) -> Mad {
        let mut mad = Mad::request(class::SUBN_DIRECTED, method::GET, attr::NODE_INFO, 0);
        mad.0[6] = pointer;
        mad.0[7] = count;
        mad.0[32..36].fill(0xff);
        mad.0[129..129 + path.len()].copy_from_slice(path);
        mad
    }

    #[test]
    fn way_out_and_back() {
        let switch = switch();
        let mut mad = directed(1, 2, &[1, 5]);
        assert_eq!(switch.direct(&mut mad, 9), Hop::Forward(5));
        assert_eq!((mad.hop_pointer(), mad.return_port(1)), (2, 9));
        mad.set_returning();
        assert_eq!(switch.direct(&mut mad, 5), Hop::Forward(9));
        assert_eq!(mad.hop_pointer(), 1);
    }

    #[test]
    fn end_of_the_way() {
        let switch = switch();
        let mut mad = directed(1, 1, &[1]);
        assert_eq!(switch.direct(&mut mad, 9), Hop::Here);
        assert_eq!((mad.hop_pointer(), mad.return_port(1)), (1, 9));
    }

    #[test]
    fn ways_that_make_no_sense() {
        let switch = switch();
        let table = [
            directed(0, 0, &[]),
            directed(0, 1, &[1]),
            directed(3, 2, &[1, 1]),
            directed(1, 2, &[1, 0]),
            directed(1, 2, &[1, 21]),
            directed(1, 64, &[1, 1]),
            directed(255, 255, &[]),
        ];
        for mut mad in table {
            assert_eq!(switch.direct(&mut mad, 1), Hop::Nowhere);
        }
        for pointer in [0, 1, 3] {
            let mut mad = directed(pointer, 2, &[1, 1]);
            mad.set_returning();
            assert_eq!(switch.direct(&mut mad, 1), Hop::Nowhere);
        }
        let mut mad = directed(1, 1, &[1]);
        mad.0[33] = 1;
        assert_eq!(switch.direct(&mut mad, 1), Hop::Nowhere);
    }
}
