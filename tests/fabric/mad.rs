// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Management datagrams: the 256 bytes of IBA 13.4, and the directed-route SMP of 14.2.1.
//!
//! ```text
//! every MAD    0 base version  1 class  2 class version  3 method  4 status(2)  8 TID(8)  16 attribute(2)  20 modifier(4)
//! SMP          24 M_Key(8)  64 data(64)
//! directed     4 direction bit of the status  6 hop pointer  7 hop count  32 DrSLID(2)  34 DrDLID(2)
//!              128 initial path(64)  192 return path(64)
//! performance  64 data(192)
//! ```

/// Bytes of a MAD.
pub(crate) const LEN: usize = 256;

/// Classes.
pub(crate) mod class {
    pub(crate) const SUBN: u8 = 0x01;
    pub(crate) const SUBN_DIRECTED: u8 = 0x81;
    pub(crate) const PERF: u8 = 0x04;
}

/// Methods.
pub(crate) mod method {
    pub(crate) const GET: u8 = 0x01;
    pub(crate) const SET: u8 = 0x02;
    pub(crate) const TRAP: u8 = 0x05;
    pub(crate) const TRAP_REPRESS: u8 = 0x07;
    pub(crate) const GET_RESP: u8 = 0x81;
}

/// Attributes.
pub(crate) mod attr {
    pub(crate) const CLASS_PORT_INFO: u16 = 0x0001;
    pub(crate) const NOTICE: u16 = 0x0002;
    pub(crate) const NODE_DESCRIPTION: u16 = 0x0010;
    pub(crate) const NODE_INFO: u16 = 0x0011;
    pub(crate) const SWITCH_INFO: u16 = 0x0012;
    pub(crate) const GUID_INFO: u16 = 0x0014;
    pub(crate) const PORT_INFO: u16 = 0x0015;
    pub(crate) const P_KEY_TABLE: u16 = 0x0016;
    pub(crate) const SL_TO_VL: u16 = 0x0017;
    pub(crate) const VL_ARBITRATION: u16 = 0x0018;
    pub(crate) const LINEAR_FORWARDING: u16 = 0x0019;
    pub(crate) const MULTICAST_FORWARDING: u16 = 0x001b;
    pub(crate) const SM_INFO: u16 = 0x0020;

    pub(crate) const PORT_COUNTERS: u16 = 0x0012;
    pub(crate) const PORT_COUNTERS_EXT: u16 = 0x001d;
}

/// The status of a response (IBA 13.4.7).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub(crate) enum Status {
    Ok = 0x0000,
    BadVersion = 0x0004,
    /// The attribute, or the method on this attribute, is not supported.
    BadAttribute = 0x000c,
    /// A field of the attribute or its modifier is invalid.
    BadField = 0x001c,
}

/// What an agent made of a MAD that it was shown (`ib_device_ops.process_mad`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reaction {
    /// Not for this agent: others may look at it.
    Pass,
    /// Answered: the response is to be sent.
    Reply,
    /// Done with, there is no response.
    Consumed,
}

/// The direction bit in the status of a directed-route SMP: set on the way back.
const DIRECTION: u16 = 0x8000;

/// The LID of a packet that is routed by its path.
pub(crate) const PERMISSIVE_LID: u16 = 0xffff;

/// The most hops that a directed path can have.
pub(crate) const MAX_HOPS: u8 = 63;

const DATA: usize = 64;
const INITIAL_PATH: usize = 128;
const RETURN_PATH: usize = 192;

/// A management datagram.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Mad(pub(crate) [u8; LEN]);

impl Mad {
    pub(crate) const fn zeroed() -> Self {
        Self([0; LEN])
    }

    /// A request with an empty body.
    pub(crate) fn request(class: u8, method: u8, attribute: u16, modifier: u32) -> Self {
        let mut mad = Self::zeroed();
        mad.0[0] = 1;
        mad.0[1] = class;
        mad.0[2] = 1;
        mad.0[3] = method;
        mad.put16(16, attribute);
        mad.put32(20, modifier);
        mad
    }

    fn get16(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.0[at], self.0[at + 1]])
    }

    fn put16(&mut self, at: usize, value: u16) {
        self.0[at..at + 2].copy_from_slice(&value.to_be_bytes());
    }

    fn put32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }

    pub(crate) fn base_version(&self) -> u8 {
        self.0[0]
    }

    pub(crate) fn class(&self) -> u8 {
        self.0[1]
    }

    pub(crate) fn class_version(&self) -> u8 {
        self.0[2]
    }

    pub(crate) fn method(&self) -> u8 {
        self.0[3]
    }

    pub(crate) fn set_method(&mut self, method: u8) {
        self.0[3] = method;
    }

    pub(crate) fn is_directed(&self) -> bool {
        self.class() == class::SUBN_DIRECTED
    }

    /// The whole status field, the direction bit of a directed SMP included.
    pub(crate) fn status(&self) -> u16 {
        self.get16(4)
    }

    /// Sets the status of a response; the direction bit stays.
    pub(crate) fn set_status(&mut self, status: Status) {
        self.set_status_code(status as u16);
    }

    /// Sets any status, known or not; the direction bit stays.
    pub(crate) fn set_status_code(&mut self, code: u16) {
        if self.is_directed() {
            self.put16(4, self.status() & DIRECTION | code & !DIRECTION);
        } else {
            self.put16(4, code);
        }
    }

    pub(crate) fn tid(&self) -> [u8; 8] {
        let mut tid = [0; 8];
        tid.copy_from_slice(&self.0[8..16]);
        tid
    }

    pub(crate) fn set_tid(&mut self, tid: u64) {
        self.0[8..16].copy_from_slice(&tid.to_be_bytes());
    }

    pub(crate) fn attribute(&self) -> u16 {
        self.get16(16)
    }

    pub(crate) fn modifier(&self) -> u32 {
        u32::from_be_bytes([self.0[20], self.0[21], self.0[22], self.0[23]])
    }

    /// The attribute in an SMP.
    pub(crate) fn data(&self) -> &[u8; 64] {
        // A constant range inside the array: the conversion cannot fail, and is not compiled in.
        match self.0[DATA..DATA + 64].first_chunk() {
            Some(data) => data,
            None => &[0; 64],
        }
    }

    pub(crate) fn set_data(&mut self, data: &[u8; 64]) {
        self.0[DATA..DATA + 64].copy_from_slice(data);
    }

    /// What follows the header of a performance MAD.
    pub(crate) fn perf_data(&mut self) -> &mut [u8] {
        &mut self.0[DATA..]
    }

    /// Turns a request into its response.
    pub(crate) fn respond(&mut self, status: Status) {
        self.set_method(method::GET_RESP);
        self.put16(4, 0);
        if self.is_directed() {
            self.set_returning();
        }
        self.set_status(status);
    }

    // The directed route.

    pub(crate) fn is_returning(&self) -> bool {
        self.status() & DIRECTION != 0
    }

    pub(crate) fn set_returning(&mut self) {
        self.put16(4, self.status() | DIRECTION);
    }

    pub(crate) fn hop_pointer(&self) -> u8 {
        self.0[6]
    }

    pub(crate) fn set_hop_pointer(&mut self, hop: u8) {
        self.0[6] = hop;
    }

    pub(crate) fn hop_count(&self) -> u8 {
        self.0[7]
    }

    /// (DrSLID, DrDLID): permissive unless a part of the way is routed by LID.
    pub(crate) fn directed_lids(&self) -> (u16, u16) {
        (self.get16(32), self.get16(34))
    }

    /// The port to leave a node through at a hop on the way out.
    pub(crate) fn initial_port(&self, hop: u8) -> u8 {
        self.0[INITIAL_PATH + usize::from(hop & MAX_HOPS)]
    }

    /// The port to leave a node through at a hop on the way back.
    pub(crate) fn return_port(&self, hop: u8) -> u8 {
        self.0[RETURN_PATH + usize::from(hop & MAX_HOPS)]
    }

    pub(crate) fn set_return_port(&mut self, hop: u8, port: u8) {
        self.0[RETURN_PATH + usize::from(hop & MAX_HOPS)] = port;
    }
}

/// A MAD on the wire, with what of its headers matters to the receiver.
#[derive(Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) slid: u16,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_qp: u32,
    pub(crate) dest_qp: u32,
    pub(crate) mad: Mad,
}

impl Frame {
    /// Sends the frame back to where it came from.
    pub(crate) fn turn_round(&mut self) {
        core::mem::swap(&mut self.slid, &mut self.dlid);
        core::mem::swap(&mut self.src_qp, &mut self.dest_qp);
    }
}

/// A bit field of an attribute: the byte it is in, its lowest bit there and its width.
#[derive(Clone, Copy)]
pub(crate) struct Bits {
    pub(crate) byte: usize,
    pub(crate) low: u32,
    pub(crate) width: u32,
}

impl Bits {
    pub(crate) const fn new(byte: usize, low: u32, width: u32) -> Self {
        Self { byte, low, width }
    }

    const fn mask(self) -> u8 {
        ((1u16 << self.width) - 1) as u8
    }

    pub(crate) fn get(self, data: &[u8]) -> u8 {
        data.get(self.byte)
            .map_or(0, |byte| byte >> self.low & self.mask())
    }

    pub(crate) fn put(self, data: &mut [u8], value: u8) {
        if let Some(byte) = data.get_mut(self.byte) {
            *byte &= !(self.mask() << self.low);
            *byte |= (value & self.mask()) << self.low;
        }
    }
}

pub(crate) fn get16(data: &[u8], at: usize) -> u16 {
    match data.get(at..at + 2) {
        Some([high, low]) => u16::from_be_bytes([*high, *low]),
        _ => 0,
    }
}

pub(crate) fn get64(data: &[u8], at: usize) -> u64 {
    data.get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// Writes bytes into an attribute; what lies outside of it is left out.
pub(crate) fn put(data: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(room) = data.get_mut(at..at + bytes.len()) {
        room.copy_from_slice(bytes);
    }
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_mad)]
mod tests {
    use super::*;

    #[test]
    fn header() {
        let mut mad = Mad::request(class::SUBN, method::GET, attr::PORT_INFO, 0x0102_0304);
        assert_eq!(mad.0[..4], [1, 1, 1, 1]);
        assert_eq!(mad.0[16..24], [0, 0x15, 0, 0, 1, 2, 3, 4]);
        assert_eq!((mad.attribute(), mad.modifier()), (0x15, 0x0102_0304));
        mad.set_tid(0x1122_3344_5566_7788);
        assert_eq!(mad.tid(), [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
        mad.respond(Status::BadField);
        assert_eq!(mad.method(), method::GET_RESP);
        assert_eq!(mad.status(), 0x001c);
    }

    #[test]
    fn direction_and_status_share_a_field() {
        let mut mad = Mad::request(class::SUBN_DIRECTED, method::GET, attr::NODE_INFO, 0);
        mad.respond(Status::BadAttribute);
        assert_eq!(mad.status(), 0x800c);
        assert!(mad.is_returning());
        mad.set_status(Status::Ok);
        assert_eq!(mad.status(), 0x8000);
    }

    #[test]
    fn paths() {
        let mut mad = Mad::zeroed();
        mad.0[128 + 2] = 7;
        mad.set_return_port(3, 9);
        assert_eq!(mad.initial_port(2), 7);
        assert_eq!((mad.return_port(3), mad.0[192 + 3]), (9, 9));
        // A hop out of range stays inside the array.
        assert_eq!(mad.initial_port(255), mad.0[128 + 63]);
    }

    #[test]
    fn bit_fields() {
        let mut data = [0xff; 4];
        let field = Bits::new(1, 3, 2);
        field.put(&mut data, 0);
        assert_eq!(data, [0xff, 0xe7, 0xff, 0xff]);
        field.put(&mut data, 0xfe);
        assert_eq!((data[1], field.get(&data)), (0xf7, 2));
        assert_eq!(Bits::new(4, 0, 8).get(&data), 0);
    }
}
