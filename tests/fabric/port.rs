// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The state of a port as the subnet manager sees it (PortInfo, IBA 14.2.5.6), and what follows
//! from a change of it.
//!
//! A link is two ports and a cable: what a change does to the other end is up to the caller, who
//! gets a [`LinkCommand`]. Numbers are the codes of IBA: MTU 5 is 4096 bytes, width 2 is 4X.

use crate::mad::{
    get16,
    get64,
    put,
    Status, //
};
use crate::pma::Counters;

/// The first multicast LID.
pub(crate) const FIRST_MLID: u16 = 0xc000;

/// What a link-local GID starts with.
pub(crate) const DEFAULT_GID_PREFIX: u64 = 0xfe80_0000_0000_0000;

/// The P_Key of the default partition, with full membership.
pub(crate) const DEFAULT_P_KEY: u16 = 0xffff;

/// Bits of the capability mask.
pub(crate) mod cap {
    pub(crate) const TRAP: u32 = 1 << 3;
    pub(crate) const SYSTEM_IMAGE_GUID: u32 = 1 << 11;
    pub(crate) const COMMUNICATION: u32 = 1 << 16;
    pub(crate) const NOTICE: u32 = 1 << 22;
    pub(crate) const CLIENT_REREGISTER: u32 = 1 << 25;
}

/// The logical state of a port.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
#[repr(u8)]
pub(crate) enum PortState {
    Down = 1,
    Init = 2,
    Armed = 3,
    Active = 4,
}

/// The state of the physical link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum PhysState {
    Polling = 2,
    Disabled = 3,
    LinkUp = 5,
}

/// What happened to an HCA, in the order of dispatch: who listens reads the tables first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Event {
    GidChange,
    PkeyChange,
    LidChange,
    SmChange,
    ClientReregister,
    PortErr,
    PortActive,
}

impl Event {
    pub(crate) const NAMES: [&'static str; 7] = [
        "gid_change",
        "pkey_change",
        "lid_change",
        "sm_change",
        "reregister",
        "port_err",
        "port_active",
    ];
}

const EVENTS: [Event; 7] = [
    Event::GidChange,
    Event::PkeyChange,
    Event::LidChange,
    Event::SmChange,
    Event::ClientReregister,
    Event::PortErr,
    Event::PortActive,
];

/// A set of events; an iterator takes them out in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Events(u8);

impl Events {
    pub(crate) const NONE: Self = Self(0);

    pub(crate) fn of(events: &[Event]) -> Self {
        let mut set = Self::NONE;
        for event in events {
            set.add(*event);
        }
        set
    }

    pub(crate) fn add(&mut self, event: Event) {
        self.0 |= 1 << event as u8;
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.0 |= other.0;
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let found = EVENTS
            .into_iter()
            .find(|event| self.0 & (1 << *event as u8) != 0)?;
        self.0 &= !(1 << found as u8);
        Some(found)
    }
}

/// What a Set(PortInfo) wants of the link as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LinkCommand {
    None,
    /// Take the link down and train it again.
    Retrain,
    /// Take it down until told to poll.
    Disable,
    /// Come up if the other end does.
    Poll,
}

/// What a port is part of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PortKind {
    Ca,
    SwitchExternal,
    /// Port 0: no link, always active.
    SwitchManagement,
}

/// What hardware can do, fixed when a port is made.
#[derive(Clone, Copy)]
pub(crate) struct PortCaps {
    pub(crate) mtu: u8,
    pub(crate) widths: u8,
    pub(crate) speeds: u8,
}

impl PortCaps {
    /// 4096 bytes, up to 4X, up to QDR: 40 Gb/s.
    pub(crate) const DEFAULT: Self = Self {
        mtu: 5,
        widths: 0x03,
        speeds: 0x07,
    };
}

mod field {
    use crate::mad::Bits;

    pub(super) const M_KEY: usize = 0;
    pub(super) const GID_PREFIX: usize = 8;
    pub(super) const LID: usize = 16;
    pub(super) const SM_LID: usize = 18;
    pub(super) const CAP_MASK: usize = 20;
    pub(super) const M_KEY_LEASE: usize = 26;
    pub(super) const LOCAL_PORT: usize = 28;
    pub(super) const WIDTH_ENABLED: usize = 29;
    pub(super) const WIDTH_SUPPORTED: usize = 30;
    pub(super) const WIDTH_ACTIVE: usize = 31;
    pub(super) const SPEED_SUPPORTED: Bits = Bits::new(32, 4, 4);
    pub(super) const STATE: Bits = Bits::new(32, 0, 4);
    pub(super) const PHYS_STATE: Bits = Bits::new(33, 4, 4);
    pub(super) const DOWN_DEFAULT: Bits = Bits::new(33, 0, 4);
    pub(super) const M_KEY_PROTECT: Bits = Bits::new(34, 6, 2);
    pub(super) const LMC: Bits = Bits::new(34, 0, 3);
    pub(super) const SPEED_ACTIVE: Bits = Bits::new(35, 4, 4);
    pub(super) const SPEED_ENABLED: Bits = Bits::new(35, 0, 4);
    pub(super) const NEIGHBOR_MTU: Bits = Bits::new(36, 4, 4);
    pub(super) const SM_SL: Bits = Bits::new(36, 0, 4);
    pub(super) const VL_CAP: Bits = Bits::new(37, 4, 4);
    pub(super) const VL_HIGH_LIMIT: usize = 38;
    pub(super) const MTU_CAP: Bits = Bits::new(41, 0, 4);
    pub(super) const STALL_AND_LIFE: usize = 42;
    pub(super) const OPERATIONAL_VLS: Bits = Bits::new(43, 4, 4);
    pub(super) const ENFORCEMENT: Bits = Bits::new(43, 0, 4);
    pub(super) const VIOLATIONS: usize = 44;
    pub(super) const GUID_CAP: usize = 50;
    pub(super) const REREGISTER: Bits = Bits::new(51, 7, 1);
    pub(super) const SUBNET_TIMEOUT: Bits = Bits::new(51, 0, 5);
    pub(super) const RESPONSE_TIME: usize = 52;
    pub(super) const ERROR_THRESHOLDS: usize = 53;
}

/// VL0 alone.
const VL_CAP: u8 = 1;

/// 4.096 us * 2^16, about 0.27 s: an emulated machine is slow.
const RESPONSE_TIME: u8 = 16;

/// Link width and speed that a power-on port has before it ever trained.
const LOWEST: u8 = 1;

/// A port.
pub(crate) struct Port {
    kind: PortKind,
    caps: PortCaps,
    pub(crate) state: PortState,
    pub(crate) phys: PhysState,
    pub(crate) lid: u16,
    pub(crate) lmc: u8,
    pub(crate) sm_lid: u16,
    pub(crate) sm_sl: u8,
    pub(crate) gid_prefix: u64,
    pub(crate) cap_mask: u32,
    neighbor_mtu: u8,
    operational_vls: u8,
    width_enabled: u8,
    width_active: u8,
    speed_enabled: u8,
    speed_active: u8,
    subnet_timeout: u8,
    down_default: u8,
    m_key: u64,
    m_key_lease: u16,
    m_key_protect: u8,
    vl_high_limit: u8,
    stall_and_life: u8,
    enforcement: u8,
    error_thresholds: u8,
    /// Of M_Key, P_Key and Q_Key.
    violations: [u16; 3],
    guid_cap: u8,
    sl_to_vl: [u8; 8],
    vl_arbitration: [[u8; 64]; 4],
    pub(crate) counters: Counters,
}

impl Port {
    pub(crate) fn new(kind: PortKind, caps: PortCaps, cap_mask: u32, guid_cap: u8) -> Self {
        let (state, phys, width, speed) = match kind {
            PortKind::SwitchManagement => (
                PortState::Active,
                PhysState::LinkUp,
                highest(caps.widths),
                highest(caps.speeds),
            ),
            _ => (PortState::Down, PhysState::Polling, LOWEST, LOWEST),
        };
        Self {
            kind,
            caps,
            state,
            phys,
            lid: 0,
            lmc: 0,
            sm_lid: 0,
            sm_sl: 0,
            gid_prefix: if kind == PortKind::SwitchExternal {
                0
            } else {
                DEFAULT_GID_PREFIX
            },
            cap_mask,
            neighbor_mtu: caps.mtu,
            operational_vls: VL_CAP,
            width_enabled: caps.widths,
            width_active: width,
            speed_enabled: caps.speeds,
            speed_active: speed,
            subnet_timeout: 0,
            down_default: PhysState::Polling as u8,
            m_key: 0,
            m_key_lease: 0,
            m_key_protect: 0,
            vl_high_limit: 0,
            stall_and_life: 0,
            enforcement: 0,
            error_thresholds: 0x88,
            violations: [0; 3],
            guid_cap,
            sl_to_vl: [0; 8],
            vl_arbitration: [[0; 64]; 4],
            counters: Counters::default(),
        }
    }

    pub(crate) fn state(&self) -> PortState {
        self.state
    }

    pub(crate) fn phys_state(&self) -> PhysState {
        self.phys
    }

    pub(crate) fn lid(&self) -> u16 {
        self.lid
    }

    pub(crate) fn lmc(&self) -> u8 {
        self.lmc
    }

    pub(crate) fn sm_lid(&self) -> u16 {
        self.sm_lid
    }

    pub(crate) fn sm_sl(&self) -> u8 {
        self.sm_sl
    }

    pub(crate) fn cap_mask(&self) -> u32 {
        self.cap_mask
    }

    pub(crate) fn max_mtu(&self) -> u8 {
        self.caps.mtu
    }

    /// The MTU of the link.
    pub(crate) fn active_mtu(&self) -> u8 {
        self.neighbor_mtu
    }

    pub(crate) fn width(&self) -> u8 {
        self.width_active
    }

    pub(crate) fn speed(&self) -> u8 {
        self.speed_active
    }

    pub(crate) fn subnet_timeout(&self) -> u8 {
        self.subnet_timeout
    }

    pub(crate) fn p_key_violations(&self) -> u16 {
        self.violations[1]
    }

    pub(crate) fn q_key_violations(&self) -> u16 {
        self.violations[2]
    }

    pub(crate) fn count_bad_p_key(&mut self) {
        self.violations[1] = self.violations[1].saturating_add(1);
    }

    pub(crate) fn count_bad_q_key(&mut self) {
        self.violations[2] = self.violations[2].saturating_add(1);
    }

    /// Whether a LID is one of the 2^LMC of this port.
    #[inline]
    pub(crate) fn owns(&self, lid: u16) -> bool {
        self.lid != 0 && lid >> self.lmc == self.lid >> self.lmc
    }

    /// Whether subnet management packets pass.
    #[inline]
    pub(crate) fn carries_smps(&self) -> bool {
        self.state != PortState::Down
    }

    /// Whether data may enter the link here, or a node behind it.
    #[inline]
    pub(crate) fn sends_data(&self) -> bool {
        self.state == PortState::Active
    }

    /// Takes in data: an armed port turns active by it (IBA 7.2.7).
    #[inline]
    pub(crate) fn takes_data(&mut self) -> Result<Events, ()> {
        match self.state {
            PortState::Active => Ok(Events::NONE),
            PortState::Armed => {
                self.state = PortState::Active;
                Ok(Events::of(&[Event::PortActive]))
            }
            _ => Err(()),
        }
    }

    // The link.

    /// Whether this end would come up with a cable in it.
    pub(crate) fn polls(&self) -> bool {
        self.phys != PhysState::Disabled
    }

    /// Loses the link.
    pub(crate) fn link_down(&mut self, phys: PhysState) -> Events {
        let mut events = Events::NONE;
        if self.state == PortState::Active {
            events.add(Event::PortErr);
        }
        if self.state != PortState::Down {
            self.counters.link_downed = self.counters.link_downed.saturating_add(1);
        }
        self.state = PortState::Down;
        self.phys = phys;
        events
    }

    /// The link came up, with what the other end can do. A manager that finds another MTU or
    /// number of lanes than it wants takes the link down again, so both start at their best.
    pub(crate) fn link_up(&mut self, peer_widths: u8, peer_speeds: u8) {
        self.state = PortState::Init;
        self.phys = PhysState::LinkUp;
        self.neighbor_mtu = self.caps.mtu;
        self.operational_vls = VL_CAP;
        self.width_active = highest(self.width_enabled & peer_widths);
        self.speed_active = highest(self.speed_enabled & peer_speeds);
    }

    pub(crate) fn enabled(&self) -> (u8, u8) {
        (self.width_enabled, self.speed_enabled)
    }

    // Tables that are kept and shown: with one lane there is nothing to choose.

    pub(crate) fn sl_to_vl(&mut self, set: bool, data: &[u8; 64]) -> [u8; 64] {
        if set {
            self.sl_to_vl.copy_from_slice(&data[..8]);
        }
        let mut data = [0; 64];
        put(&mut data, 0, &self.sl_to_vl);
        data
    }

    /// The upper half of the modifier counts parts from 1.
    pub(crate) fn vl_arbitration(
        &mut self,
        modifier: u32,
        set: bool,
        data: &[u8; 64],
    ) -> Result<[u8; 64], Status> {
        let part = ((modifier >> 16) as usize)
            .checked_sub(1)
            .and_then(|part| self.vl_arbitration.get_mut(part))
            .ok_or(Status::BadField)?;
        if set {
            *part = *data;
        }
        Ok(*part)
    }

    // PortInfo.

    /// The attribute, asked for through port `asked_through` of the node.
    pub(crate) fn info(&self, asked_through: u8) -> [u8; 64] {
        let mut data = [0; 64];
        put(&mut data, field::M_KEY, &self.m_key.to_be_bytes());
        put(&mut data, field::GID_PREFIX, &self.gid_prefix.to_be_bytes());
        put(&mut data, field::LID, &self.lid.to_be_bytes());
        put(&mut data, field::SM_LID, &self.sm_lid.to_be_bytes());
        put(&mut data, field::CAP_MASK, &self.cap_mask.to_be_bytes());
        put(
            &mut data,
            field::M_KEY_LEASE,
            &self.m_key_lease.to_be_bytes(),
        );
        data[field::LOCAL_PORT] = asked_through;
        data[field::WIDTH_ENABLED] = self.width_enabled;
        data[field::WIDTH_SUPPORTED] = self.caps.widths;
        data[field::WIDTH_ACTIVE] = self.width_active;
        field::SPEED_SUPPORTED.put(&mut data, self.caps.speeds);
        field::STATE.put(&mut data, self.state as u8);
        field::PHYS_STATE.put(&mut data, self.phys as u8);
        field::DOWN_DEFAULT.put(&mut data, self.down_default);
        field::M_KEY_PROTECT.put(&mut data, self.m_key_protect);
        field::LMC.put(&mut data, self.lmc);
        field::SPEED_ACTIVE.put(&mut data, self.speed_active);
        field::SPEED_ENABLED.put(&mut data, self.speed_enabled);
        field::NEIGHBOR_MTU.put(&mut data, self.neighbor_mtu);
        field::SM_SL.put(&mut data, self.sm_sl);
        field::VL_CAP.put(&mut data, VL_CAP);
        data[field::VL_HIGH_LIMIT] = self.vl_high_limit;
        field::MTU_CAP.put(&mut data, self.caps.mtu);
        data[field::STALL_AND_LIFE] = self.stall_and_life;
        field::OPERATIONAL_VLS.put(&mut data, self.operational_vls);
        field::ENFORCEMENT.put(&mut data, self.enforcement);
        for (index, count) in self.violations.iter().enumerate() {
            put(
                &mut data,
                field::VIOLATIONS + 2 * index,
                &count.to_be_bytes(),
            );
        }
        data[field::GUID_CAP] = self.guid_cap;
        field::SUBNET_TIMEOUT.put(&mut data, self.subnet_timeout);
        data[field::RESPONSE_TIME] = RESPONSE_TIME;
        data[field::ERROR_THRESHOLDS] = self.error_thresholds;
        data
    }

    /// Takes over a Set, all of it or nothing.
    pub(crate) fn set_info(&mut self, data: &[u8; 64]) -> Result<(Events, LinkCommand), Status> {
        let width = enabled(
            data[field::WIDTH_ENABLED],
            0xff,
            self.width_enabled,
            self.caps.widths,
        )?;
        let speed = enabled(
            field::SPEED_ENABLED.get(data),
            0x0f,
            self.speed_enabled,
            self.caps.speeds,
        )?;
        let down_default = match field::DOWN_DEFAULT.get(data) {
            0 => self.down_default,
            wanted @ 1..=2 => wanted,
            _ => return Err(Status::BadField),
        };
        let mut state = self.state;
        let mut command = LinkCommand::None;
        let mut mtu = self.neighbor_mtu;
        let mut vls = self.operational_vls;
        if self.kind != PortKind::SwitchManagement {
            state = self.next_state(field::STATE.get(data))?;
            command = match (field::PHYS_STATE.get(data), state) {
                // Sleeping is polling that a peer may end: there is no power to save here.
                (1 | 2, _) => LinkCommand::Poll,
                (3, _) => LinkCommand::Disable,
                (0, PortState::Down) if self.state != PortState::Down => LinkCommand::Retrain,
                (0, _) => LinkCommand::None,
                _ => return Err(Status::BadField),
            };
            mtu = match field::NEIGHBOR_MTU.get(data) {
                wanted if (1..=self.caps.mtu).contains(&wanted) => wanted,
                _ => return Err(Status::BadField),
            };
            vls = match field::OPERATIONAL_VLS.get(data) {
                0 => vls,
                wanted if wanted <= VL_CAP => wanted,
                _ => return Err(Status::BadField),
            };
        }
        let mut events = if self.kind == PortKind::SwitchExternal {
            Events::NONE
        } else {
            self.set_addresses(data)?
        };
        if self.kind == PortKind::Ca && field::REREGISTER.get(data) != 0 {
            events.add(Event::ClientReregister);
        }
        if state == PortState::Active && self.state != PortState::Active {
            events.add(Event::PortActive);
        }
        if command == LinkCommand::None {
            self.state = state;
        }
        self.neighbor_mtu = mtu;
        self.operational_vls = vls;
        self.width_enabled = width;
        self.speed_enabled = speed;
        self.down_default = down_default;
        self.vl_high_limit = data[field::VL_HIGH_LIMIT];
        self.stall_and_life = data[field::STALL_AND_LIFE];
        self.enforcement = field::ENFORCEMENT.get(data);
        self.error_thresholds = data[field::ERROR_THRESHOLDS];
        for (index, count) in self.violations.iter_mut().enumerate() {
            if get16(data, field::VIOLATIONS + 2 * index) == 0 {
                *count = 0;
            }
        }
        Ok((events, command))
    }

    /// The state that a Set leads to. Only a port that is up can be told to go anywhere but down.
    fn next_state(&self, wanted: u8) -> Result<PortState, Status> {
        let wanted = match wanted {
            0 => return Ok(self.state),
            1 => PortState::Down,
            2 => PortState::Init,
            3 => PortState::Armed,
            4 => PortState::Active,
            _ => return Err(Status::BadField),
        };
        match (self.state, wanted) {
            (_, PortState::Down)
            | (PortState::Init, PortState::Armed)
            | (PortState::Armed, PortState::Active) => Ok(wanted),
            (now, wanted) if now == wanted => Ok(wanted),
            _ => Err(Status::BadField),
        }
    }

    /// Takes over what belongs to the end of a route: nothing of it exists in a switch's
    /// external port.
    fn set_addresses(&mut self, data: &[u8; 64]) -> Result<Events, Status> {
        let lid = get16(data, field::LID);
        let lmc = match self.kind {
            PortKind::Ca => field::LMC.get(data),
            _ => 0,
        };
        let sm_lid = get16(data, field::SM_LID);
        let last = lid | ((1u16 << lmc) - 1);
        if lid == 0 || last >= FIRST_MLID || lid & ((1u16 << lmc) - 1) != 0 || sm_lid >= FIRST_MLID
        {
            return Err(Status::BadField);
        }
        let mut events = Events::NONE;
        let prefix = get64(data, field::GID_PREFIX);
        if prefix != self.gid_prefix {
            events.add(Event::GidChange);
        }
        if (lid, lmc) != (self.lid, self.lmc) {
            events.add(Event::LidChange);
        }
        let sm_sl = field::SM_SL.get(data);
        if (sm_lid, sm_sl) != (self.sm_lid, self.sm_sl) {
            events.add(Event::SmChange);
        }
        self.gid_prefix = prefix;
        (self.lid, self.lmc) = (lid, lmc);
        (self.sm_lid, self.sm_sl) = (sm_lid, sm_sl);
        self.subnet_timeout = field::SUBNET_TIMEOUT.get(data);
        self.m_key = get64(data, field::M_KEY);
        self.m_key_lease = get16(data, field::M_KEY_LEASE);
        self.m_key_protect = field::M_KEY_PROTECT.get(data);
        Ok(events)
    }
}

/// What a Set makes of the enabled widths or speeds: `all` stands for all supported.
fn enabled(wanted: u8, all: u8, now: u8, supported: u8) -> Result<u8, Status> {
    match wanted {
        0 => Ok(now),
        wanted if wanted == all => Ok(supported),
        wanted if wanted & !supported == 0 => Ok(wanted),
        _ => Err(Status::BadField),
    }
}

/// The highest bit alone; the lowest of all where both ends have nothing in common.
fn highest(set: u8) -> u8 {
    match set.checked_ilog2() {
        Some(bit) => 1 << bit,
        None => LOWEST,
    }
}

/// Whether packets with P_Key `theirs` may be received by a holder of `ours` (IBA 10.9.3).
#[inline]
pub(crate) fn p_keys_match(ours: u16, theirs: u16) -> bool {
    (ours ^ theirs) & 0x7fff == 0 && ours & 0x7fff != 0 && (ours | theirs) & 0x8000 != 0
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_port)]
mod tests {
    use super::*;

    fn port() -> Port {
        let mut port = Port::new(PortKind::Ca, PortCaps::DEFAULT, cap::TRAP, 8);
        port.link_up(3, 7);
        port
    }

    /// A Set that repeats what is there, with a LID, and asks for no change of state.
    fn set(port: &Port) -> [u8; 64] {
        let mut data = port.info(1);
        data[17] = 5;
        data[19] = 1;
        field::STATE.put(&mut data, 0);
        field::PHYS_STATE.put(&mut data, 0);
        data
    }

    fn with_state(port: &Port, state: u8) -> [u8; 64] {
        let mut data = set(port);
        field::STATE.put(&mut data, state);
        data
    }

    #[test]
    fn a_fresh_link() {
        let port = port();
        let data = port.info(1);
        assert_eq!(data[8..16], [0xfe, 0x80, 0, 0, 0, 0, 0, 0]);
        assert_eq!(data[28..37], [1, 3, 3, 2, 0x72, 0x52, 0, 0x47, 0x50]);
        assert_eq!((port.active_mtu(), port.width(), port.speed()), (5, 2, 4));
    }

    #[test]
    fn slower_peer() {
        let mut port = port();
        port.link_up(1, 1);
        assert_eq!((port.width(), port.speed()), (1, 1));
    }

    #[test]
    fn life_of_a_port() {
        let mut port = port();
        let (events, _) = port.set_info(&set(&port)).unwrap();
        assert_eq!(events, Events::of(&[Event::LidChange, Event::SmChange]));
        assert_eq!((port.lid(), port.sm_lid()), (5, 1));
        // Out of order.
        assert_eq!(port.set_info(&with_state(&port, 4)), Err(Status::BadField));
        for (state, events) in [(3, &[][..]), (3, &[]), (4, &[Event::PortActive]), (4, &[])] {
            let done = port.set_info(&with_state(&port, state));
            assert_eq!(done, Ok((Events::of(events), LinkCommand::None)));
        }
        assert_eq!(port.state(), PortState::Active);
        assert_eq!(port.set_info(&with_state(&port, 3)), Err(Status::BadField));
        assert_eq!(
            port.set_info(&with_state(&port, 1)),
            Ok((Events::NONE, LinkCommand::Retrain))
        );
        assert_eq!(
            port.link_down(PhysState::Polling),
            Events::of(&[Event::PortErr])
        );
        assert_eq!(port.counters.link_downed, 1);
        assert_eq!(port.set_info(&with_state(&port, 3)), Err(Status::BadField));
    }

    #[test]
    fn armed_port_turns_active_by_data() {
        let mut port = port();
        assert_eq!(port.takes_data(), Err(()));
        port.set_info(&with_state(&port, 3)).unwrap();
        assert_eq!(port.takes_data(), Ok(Events::of(&[Event::PortActive])));
        assert_eq!(port.takes_data(), Ok(Events::NONE));
    }

    #[test]
    fn each_change_has_its_event() {
        let mut port = port();
        port.set_info(&set(&port)).unwrap();
        let table: [(usize, u8, &[Event]); 6] = [
            (8, 0xfd, &[Event::GidChange]),
            (17, 6, &[Event::LidChange]),
            (19, 2, &[Event::SmChange]),
            (36, 0x51, &[Event::SmChange]),
            (51, 0x80 | 18, &[Event::ClientReregister]),
            (51, 18, &[]),
        ];
        for (at, value, events) in table {
            let mut data = set(&port);
            put(&mut data, 16, &port.lid().to_be_bytes());
            put(&mut data, 18, &port.sm_lid().to_be_bytes());
            data[at] = value;
            assert_eq!(
                port.set_info(&data),
                Ok((Events::of(events), LinkCommand::None))
            );
        }
        // The bit itself is not kept.
        assert_eq!(port.info(1)[51], 18);
    }

    #[test]
    fn nonsense_is_refused_and_changes_nothing() {
        let mut port = port();
        port.set_info(&set(&port)).unwrap();
        let before = port.info(1);
        let table: [(usize, u8); 12] = [
            (17, 0),
            (16, 0xc0),
            (18, 0xc0),
            (29, 4),
            (32, 5),
            (33, 0x40),
            (33, 0x03),
            (34, 0x01),
            (35, 0x08),
            (36, 0x00),
            (36, 0x60),
            (43, 0x20),
        ];
        for (at, value) in table {
            let mut data = set(&port);
            data[8] = 0x12;
            data[at] = value;
            assert_eq!(port.set_info(&data), Err(Status::BadField));
            assert_eq!(port.info(1), before);
        }
    }

    #[test]
    fn events_come_in_order() {
        let mut events = Events::of(&[Event::PortActive, Event::GidChange, Event::LidChange]);
        assert_eq!(events.next(), Some(Event::GidChange));
        assert_eq!(events.next(), Some(Event::LidChange));
        assert_eq!(events.next(), Some(Event::PortActive));
        assert_eq!(events.next(), None);
        assert!(events.is_empty());
    }

    #[test]
    fn p_keys() {
        assert!(p_keys_match(0xffff, 0x7fff));
        assert!(!p_keys_match(0x7fff, 0x7fff));
        assert!(!p_keys_match(0x8001, 0x8002));
        assert!(!p_keys_match(0x8000, 0x8000));
    }
}
