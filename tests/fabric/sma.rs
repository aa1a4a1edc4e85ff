// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The subnet management agent of a channel adapter with one port (IBA 14.2.5), and what it
//! shares with the switch's: tables, and traps that are repeated until the manager represses them.
//!
//! M_Keys are stored and shown, but protect nothing.

use crate::mad::{
    attr,
    class,
    get16,
    get64,
    method,
    put,
    Frame,
    Mad,
    Reaction,
    Status, //
};
use crate::port::{
    cap,
    Event,
    Events,
    LinkCommand,
    Port,
    PortCaps,
    PortKind,
    DEFAULT_P_KEY, //
};

/// Entries of a CA's P_Key table.
pub(crate) const P_KEYS: usize = 64;

/// P_Keys in one attribute.
pub(crate) const P_KEY_BLOCK: usize = 32;

/// Entries of a CA's GUID table: one block.
pub(crate) const GUIDS: usize = 8;

/// An OUI nobody has: locally administered.
const VENDOR: [u8; 3] = [0x02, 0x1b, 0xf0];

const DEVICE: u16 = 1;

/// How long an unanswered trap waits before it is sent again.
const TRAP_INTERVAL: u64 = 1_000_000_000;

/// What a CA can do. Without the bit for extended speeds nobody asks for them.
const CA_CAPS: u32 =
    cap::TRAP | cap::SYSTEM_IMAGE_GUID | cap::COMMUNICATION | cap::NOTICE | cap::CLIENT_REREGISTER;

/// What NodeInfo says beside the addresses.
pub(crate) struct NodeKind {
    pub(crate) code: u8,
    pub(crate) ports: u8,
    pub(crate) p_keys: u16,
}

/// The attribute NodeInfo as seen through port `asked_through`.
pub(crate) fn node_info(
    kind: &NodeKind,
    [system, node, port]: [u64; 3],
    asked_through: u8,
) -> [u8; 64] {
    let mut data = [0; 64];
    put(&mut data, 0, &[1, 1, kind.code, kind.ports]);
    put(&mut data, 4, &system.to_be_bytes());
    put(&mut data, 12, &node.to_be_bytes());
    put(&mut data, 20, &port.to_be_bytes());
    put(&mut data, 28, &kind.p_keys.to_be_bytes());
    put(&mut data, 30, &DEVICE.to_be_bytes());
    data[36] = asked_through;
    put(&mut data, 37, &VENDOR);
    data
}

/// A block of a P_Key table, None beyond its end.
pub(crate) fn p_key_block(table: &[u16], block: usize) -> Option<[u8; 64]> {
    let keys = table.chunks(P_KEY_BLOCK).nth(block)?;
    let mut data = [0; 64];
    for (index, key) in keys.iter().enumerate() {
        put(&mut data, 2 * index, &key.to_be_bytes());
    }
    Some(data)
}

/// Overwrites a block of a P_Key table. Tells whether that changed it.
pub(crate) fn set_p_key_block(table: &mut [u16], block: usize, data: &[u8; 64]) -> Option<bool> {
    let keys = table.chunks_mut(P_KEY_BLOCK).nth(block)?;
    let mut changed = false;
    for (index, key) in keys.iter_mut().enumerate() {
        let new = get16(data, 2 * index);
        changed |= *key != new;
        *key = new;
    }
    Some(changed)
}

/// A node that may have something to tell the manager. One trap at a time: a newer one takes the
/// place of an older.
pub(crate) struct TrapSender {
    notice: Option<[u8; 64]>,
    tid: u64,
    due: u64,
}

impl TrapSender {
    /// Transaction ids start at `tid`.
    pub(crate) const fn new(tid: u64) -> Self {
        Self {
            notice: None,
            tid,
            due: 0,
        }
    }

    /// Has a trap to send. `details` follow the issuer's LID, which is filled in when it is sent.
    pub(crate) fn raise(&mut self, kind: u8, producer: u8, number: u16, details: &[u8]) {
        let mut data = [0; 64];
        // Generic notice.
        put(&mut data, 0, &[0x80 | kind, 0, 0, producer]);
        put(&mut data, 4, &number.to_be_bytes());
        put(&mut data, 10, details);
        self.notice = Some(data);
        self.tid = self.tid.wrapping_add(1);
        self.due = 0;
    }

    /// The manager has heard of it.
    pub(crate) fn repress(&mut self, tid: [u8; 8]) {
        if self.notice.is_some() && u64::from_be_bytes(tid) == self.tid {
            self.notice = None;
        }
    }

    /// There is nothing to tell any more.
    pub(crate) fn withdraw(&mut self) {
        self.notice = None;
    }

    fn ready(&self, port: &Port) -> bool {
        self.notice.is_some() && port.lid() != 0 && port.sm_lid() != 0
    }

    /// When the next trap is to be sent.
    pub(crate) fn deadline(&self, port: &Port) -> Option<u64> {
        self.ready(port).then_some(self.due)
    }

    /// The trap to send now, which is from then on due again an interval later.
    pub(crate) fn take(&mut self, now: u64, port: &Port) -> Option<Frame> {
        if !self.ready(port) || now < self.due {
            return None;
        }
        let mut data = self.notice?;
        self.due = now.saturating_add(TRAP_INTERVAL);
        put(&mut data, 6, &port.lid().to_be_bytes());
        let lid_at = if get16(&data, 4) == 144 { 12 } else { 10 };
        put(&mut data, lid_at, &port.lid().to_be_bytes());
        let mut mad = Mad::request(class::SUBN, method::TRAP, attr::NOTICE, 0);
        mad.set_tid(self.tid);
        mad.set_data(&data);
        Some(Frame {
            slid: port.lid(),
            dlid: port.sm_lid(),
            sl: port.sm_sl(),
            src_qp: 0,
            dest_qp: 0,
            mad,
        })
    }
}

/// What makes one CA differ from another.
#[derive(Clone, Copy)]
pub(crate) struct CaConfig {
    pub(crate) node_guid: u64,
    pub(crate) port_guid: u64,
    pub(crate) system_guid: u64,
    pub(crate) description: [u8; 64],
    pub(crate) caps: PortCaps,
}

/// What follows from a MAD.
pub(crate) struct Outcome {
    pub(crate) reaction: Reaction,
    pub(crate) events: Events,
    pub(crate) command: LinkCommand,
}

impl Outcome {
    pub(crate) fn only(reaction: Reaction) -> Self {
        Self {
            reaction,
            events: Events::NONE,
            command: LinkCommand::None,
        }
    }
}

/// A channel adapter with one port.
pub(crate) struct Ca {
    config: CaConfig,
    pub(crate) port: Port,
    p_keys: [u16; P_KEYS],
    guids: [u64; GUIDS],
    pub(crate) trap: TrapSender,
}

impl Ca {
    pub(crate) fn new(config: &CaConfig) -> Self {
        let mut p_keys = [0; P_KEYS];
        p_keys[0] = DEFAULT_P_KEY;
        let mut guids = [0; GUIDS];
        guids[0] = config.port_guid;
        Self {
            config: *config,
            port: Port::new(PortKind::Ca, config.caps, CA_CAPS, GUIDS as u8),
            p_keys,
            guids,
            trap: TrapSender::new(config.port_guid << 32),
        }
    }

    #[inline]
    pub(crate) fn p_key(&self, index: u16) -> u16 {
        self.p_keys.get(usize::from(index)).copied().unwrap_or(0)
    }

    pub(crate) fn p_keys(&self) -> &[u16; P_KEYS] {
        &self.p_keys
    }

    /// A GID in network order. Entries without a GUID have the prefix alone, as in hardware: ib_core
    /// takes the subnet's prefix from the last one.
    pub(crate) fn gid(&self, index: usize) -> [u8; 16] {
        let guid = self.guids.get(index).copied().unwrap_or(0);
        let mut gid = [0; 16];
        gid[..8].copy_from_slice(&self.port.gid_prefix.to_be_bytes());
        gid[8..].copy_from_slice(&guid.to_be_bytes());
        gid
    }

    pub(crate) fn set_description(&mut self, description: &[u8; 64]) {
        self.config.description = *description;
    }

    // Changes that no manager asked for. Each returns what clients are to be told.

    pub(crate) fn set_lid(&mut self, lid: u16) -> Events {
        self.port.lid = lid;
        Events::of(&[Event::LidChange])
    }

    pub(crate) fn set_sm_lid(&mut self, lid: u16) -> Events {
        self.port.sm_lid = lid;
        Events::of(&[Event::SmChange])
    }

    /// None if the table has no such entry.
    pub(crate) fn set_p_key(&mut self, index: usize, key: u16) -> Option<Events> {
        *self.p_keys.get_mut(index)? = key;
        Some(Events::of(&[Event::PkeyChange]))
    }

    /// None if the table has no such entry. Entry 0 is the port's own GUID, and may change too.
    pub(crate) fn set_guid(&mut self, index: usize, guid: u64) -> Option<Events> {
        *self.guids.get_mut(index)? = guid;
        Some(Events::of(&[Event::GidChange]))
    }

    /// Changes capability bits. The manager hears of it.
    pub(crate) fn set_caps(&mut self, set: u32, clear: u32) {
        let new = (self.port.cap_mask | set) & !clear;
        if new != self.port.cap_mask {
            self.port.cap_mask = new;
            self.raise_trap();
        }
    }

    /// Trap 144: something about this port changed. Here that is its capability mask.
    pub(crate) fn raise_trap(&mut self) {
        let [a, b, c, d] = self.port.cap_mask.to_be_bytes();
        self.trap.raise(4, 1, 144, &[0, 0, 0, 0, 0, 0, a, b, c, d]);
    }

    /// Shows the agents of this CA a MAD, which is answered in place.
    pub(crate) fn process(&mut self, mad: &mut Mad) -> Outcome {
        match mad.class() {
            class::SUBN | class::SUBN_DIRECTED => self.process_smp(mad),
            class::PERF => Outcome::only(crate::pma::process(mad, |port| {
                (port == 1).then_some(&mut self.port.counters)
            })),
            _ => Outcome::only(Reaction::Pass),
        }
    }

    fn process_smp(&mut self, mad: &mut Mad) -> Outcome {
        let set = match mad.method() {
            method::GET => false,
            method::SET => true,
            method::TRAP_REPRESS => {
                self.trap.repress(mad.tid());
                return Outcome::only(Reaction::Consumed);
            }
            _ => return Outcome::only(Reaction::Pass),
        };
        if mad.attribute() == attr::SM_INFO {
            return Outcome::only(Reaction::Pass);
        }
        let mut outcome = Outcome::only(Reaction::Reply);
        let status = if mad.base_version() != 1 || mad.class_version() != 1 {
            Status::BadVersion
        } else {
            match self.attribute(mad, set, &mut outcome) {
                Ok(data) => {
                    mad.set_data(&data);
                    Status::Ok
                }
                Err(status) => status,
            }
        };
        mad.respond(status);
        outcome
    }

    /// Sets an attribute if told to, and returns what it is then.
    fn attribute(
        &mut self,
        mad: &Mad,
        set: bool,
        outcome: &mut Outcome,
    ) -> Result<[u8; 64], Status> {
        let modifier = mad.modifier();
        let data = mad.data();
        match mad.attribute() {
            attr::NODE_DESCRIPTION if !set => Ok(self.config.description),
            attr::NODE_INFO if !set => {
                let kind = NodeKind {
                    code: 1,
                    ports: 1,
                    p_keys: P_KEYS as u16,
                };
                let config = &self.config;
                let guids = [config.system_guid, config.node_guid, config.port_guid];
                Ok(node_info(&kind, guids, 1))
            }
            // The highest bit asks for extended speeds.
            attr::PORT_INFO if modifier & 0x7fff_ffff <= 1 => {
                if set {
                    (outcome.events, outcome.command) = self.port.set_info(data)?;
                }
                Ok(self.port.info(1))
            }
            attr::GUID_INFO if modifier == 0 => {
                if set {
                    self.set_guids(data, &mut outcome.events);
                }
                let mut data = [0; 64];
                for (index, guid) in self.guids.iter().enumerate() {
                    put(&mut data, 8 * index, &guid.to_be_bytes());
                }
                Ok(data)
            }
            attr::P_KEY_TABLE if modifier >> 16 <= 1 => {
                let block = (modifier & 0xffff) as usize;
                if set && set_p_key_block(&mut self.p_keys, block, data).ok_or(Status::BadField)? {
                    outcome.events.add(Event::PkeyChange);
                }
                p_key_block(&self.p_keys, block).ok_or(Status::BadField)
            }
            attr::SL_TO_VL => Ok(self.port.sl_to_vl(set, data)),
            attr::VL_ARBITRATION => self.port.vl_arbitration(modifier, set, data),
            attr::PORT_INFO | attr::GUID_INFO | attr::P_KEY_TABLE => Err(Status::BadField),
            _ => Err(Status::BadAttribute),
        }
    }

    /// All but the first, which the hardware came with.
    fn set_guids(&mut self, data: &[u8; 64], events: &mut Events) {
        for (index, guid) in self.guids.iter_mut().enumerate().skip(1) {
            let new = get64(data, 8 * index);
            if *guid != new {
                *guid = new;
                events.add(Event::GidChange);
            }
        }
    }
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_sma)]
mod tests {
    use super::*;

    /// The capability of a port that a manager sits at.
    const SM: u32 = 1 << 1;

    fn ca() -> Ca {
        Ca::new(&CaConfig {
            node_guid: 0x0200_0000_0000_0001,
            port_guid: 0x0200_0000_0000_0002,
            system_guid: 0x0200_0000_0000_0003,
            description: [b'x'; 64],
            caps: PortCaps::DEFAULT,
        })
    }

    fn ask(ca: &mut Ca, class: u8, method: u8, attribute: u16, modifier: u32) -> Mad {
        let mut mad = Mad::request(class, method, attribute, modifier);
        assert_eq!(ca.process(&mut mad).reaction, Reaction::Reply);
        assert_eq!(mad.method(), method::GET_RESP);
        mad
    }

    fn get(ca: &mut Ca, attribute: u16, modifier: u32) -> Mad {
        ask(ca, class::SUBN, method::GET, attribute, modifier)
    }

    #[test]
    fn who_it_is() {
        let mut ca = ca();
        let mad = get(&mut ca, attr::NODE_INFO, 0);
        assert_eq!(mad.status(), 0);
        assert_eq!(mad.data()[..5], [1, 1, 1, 1, 2]);
        assert_eq!(get64(mad.data(), 12), 0x0200_0000_0000_0001);
        assert_eq!((get16(mad.data(), 28), mad.data()[36]), (64, 1));
        assert_eq!(get(&mut ca, attr::NODE_DESCRIPTION, 0).data()[63], b'x');
        let gid = ca.gid(0);
        assert_eq!((gid[0], gid[15]), (0xfe, 2));
        assert_eq!((ca.gid(1)[0], ca.gid(1)[15]), (0xfe, 0));
        assert_eq!(ca.gid(GUIDS), ca.gid(1));
    }

    #[test]
    fn directed_answers_carry_the_direction() {
        let mad = ask(
            &mut ca(),
            class::SUBN_DIRECTED,
            method::GET,
            attr::PORT_INFO,
            1,
        );
        assert_eq!(mad.status(), 0x8000);
    }

    #[test]
    fn refusals() {
        let table = [
            (method::GET, attr::SWITCH_INFO, 0, 0x0c),
            (method::SET, attr::NODE_INFO, 0, 0x0c),
            (method::SET, attr::NODE_DESCRIPTION, 0, 0x0c),
            (method::GET, attr::PORT_INFO, 2, 0x1c),
            (method::GET, attr::P_KEY_TABLE, 2, 0x1c),
            (method::SET, attr::P_KEY_TABLE, 0xffff, 0x1c),
            (method::GET, attr::GUID_INFO, 1, 0x1c),
            (method::GET, attr::VL_ARBITRATION, 5 << 16, 0x1c),
            (method::GET, 0xffff, 0, 0x0c),
            // A LID of zero.
            (method::SET, attr::PORT_INFO, 1, 0x1c),
        ];
        for (method, attribute, modifier, status) in table {
            let mad = ask(&mut ca(), class::SUBN, method, attribute, modifier);
            assert_eq!(mad.status(), status);
        }
        let mut mad = Mad::request(class::SUBN, method::GET, attr::NODE_INFO, 0);
        mad.0[2] = 2;
        assert_eq!(ca().process(&mut mad).reaction, Reaction::Reply);
        assert_eq!(mad.status(), 4);
    }

    #[test]
    fn what_is_not_for_the_agent() {
        let table = [
            (class::SUBN, method::GET, attr::SM_INFO, Reaction::Pass),
            (
                class::SUBN,
                method::GET_RESP,
                attr::PORT_INFO,
                Reaction::Pass,
            ),
            (class::SUBN, method::TRAP, attr::NOTICE, Reaction::Pass),
            (
                class::SUBN,
                method::TRAP_REPRESS,
                attr::NOTICE,
                Reaction::Consumed,
            ),
            (0x03, method::GET, attr::NODE_INFO, Reaction::Pass),
        ];
        for (class, method, attribute, reaction) in table {
            let mut mad = Mad::request(class, method, attribute, 0);
            let before = mad.0;
            assert_eq!(ca().process(&mut mad).reaction, reaction);
            assert_eq!(mad.0, before);
        }
    }

    #[test]
    fn p_key_table() {
        let mut ca = ca();
        let mad = get(&mut ca, attr::P_KEY_TABLE, 0);
        assert_eq!(mad.data()[..4], [0xff, 0xff, 0, 0]);
        let mut set = Mad::request(class::SUBN, method::SET, attr::P_KEY_TABLE, 1);
        let mut data = [0; 64];
        put(&mut data, 62, &[0x80, 1]);
        set.set_data(&data);
        for events in [&[Event::PkeyChange][..], &[]] {
            let mut mad = set;
            assert_eq!(ca.process(&mut mad).events, Events::of(events));
            assert_eq!(mad.data(), &data);
        }
        assert_eq!((ca.p_key(63), ca.p_key(64)), (0x8001, 0));
    }

    #[test]
    fn guid_table() {
        let mut ca = ca();
        let mut mad = Mad::request(class::SUBN, method::SET, attr::GUID_INFO, 0);
        mad.set_data(&[7; 64]);
        let outcome = ca.process(&mut mad);
        assert_eq!(outcome.events, Events::of(&[Event::GidChange]));
        assert_eq!(get64(mad.data(), 0), 0x0200_0000_0000_0002);
        assert_eq!(ca.gid(7)[8..], [7; 8]);
    }

    #[test]
    fn traps_repeat_until_repressed() {
        let mut ca = ca();
        ca.set_caps(SM, 0);
        assert_eq!(ca.trap.deadline(&ca.port), None);
        ca.set_lid(4);
        ca.set_sm_lid(1);
        assert_eq!(ca.trap.deadline(&ca.port), Some(0));
        let first = ca.trap.take(10, &ca.port).unwrap();
        assert_eq!((first.slid, first.dlid), (4, 1));
        assert_eq!(
            first.mad.data()[..16],
            [0x84, 0, 0, 1, 0, 144, 0, 4, 0, 0, 0, 0, 0, 4, 0, 0]
        );
        assert_eq!(first.mad.data()[16..20], ca.port.cap_mask.to_be_bytes());
        assert!(ca.trap.take(11, &ca.port).is_none());
        let second = ca.trap.take(10 + TRAP_INTERVAL, &ca.port).unwrap();
        assert_eq!(second.mad.tid(), first.mad.tid());
        let mut mad = Mad::request(class::SUBN, method::TRAP_REPRESS, attr::NOTICE, 0);
        assert_eq!(ca.process(&mut mad).reaction, Reaction::Consumed);
        assert!(ca.trap.deadline(&ca.port).is_some());
        mad.0[8..16].copy_from_slice(&first.mad.tid());
        ca.process(&mut mad);
        assert_eq!(ca.trap.deadline(&ca.port), None);
        // No change, no trap.
        ca.set_caps(SM, 0);
        assert_eq!(ca.trap.deadline(&ca.port), None);
    }
}
