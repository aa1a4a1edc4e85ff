// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Performance management: the counters of a port, and the agent that reads and resets them
//! (IBA 16.1). PortCounters and PortCountersExt show the same counters in different widths.

use crate::mad::{
    attr,
    get16,
    method,
    put,
    Mad,
    Reaction,
    Status, //
};

/// PortCountersExt with all its fields.
const EXTENDED_WIDTH: u16 = 1 << 9;

/// 4.096 us * 2^18: about 1 s.
const RESPONSE_TIME: u32 = 18;

/// The counters of a port. Data is counted in words of four bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counters {
    pub(crate) xmit_data: u64,
    pub(crate) rcv_data: u64,
    pub(crate) xmit_packets: u64,
    pub(crate) rcv_packets: u64,
    pub(crate) unicast_xmit: u64,
    pub(crate) unicast_rcv: u64,
    pub(crate) multicast_xmit: u64,
    pub(crate) multicast_rcv: u64,
    pub(crate) xmit_discards: u64,
    pub(crate) rcv_errors: u64,
    pub(crate) link_downed: u64,
    pub(crate) vl15_dropped: u64,
}

impl Counters {
    /// Counts packets of `words` words together that leave through the port.
    #[inline]
    pub(crate) fn sent(&mut self, packets: u64, words: u64, multicast: bool) {
        self.xmit_data = self.xmit_data.wrapping_add(words);
        self.xmit_packets = self.xmit_packets.wrapping_add(packets);
        let kind = if multicast {
            &mut self.multicast_xmit
        } else {
            &mut self.unicast_xmit
        };
        *kind = kind.wrapping_add(packets);
    }

    /// Counts packets of `words` words together that enter through the port.
    #[inline]
    pub(crate) fn received(&mut self, packets: u64, words: u64, multicast: bool) {
        self.rcv_data = self.rcv_data.wrapping_add(words);
        self.rcv_packets = self.rcv_packets.wrapping_add(packets);
        let kind = if multicast {
            &mut self.multicast_rcv
        } else {
            &mut self.unicast_rcv
        };
        *kind = kind.wrapping_add(packets);
    }

    /// A counter of PortCounters: select bit, offset and bytes of the field.
    fn fields(&mut self) -> [(u16, usize, usize, &mut u64); 8] {
        [
            (1 << 2, 7, 1, &mut self.link_downed),
            (1 << 3, 8, 2, &mut self.rcv_errors),
            (1 << 6, 14, 2, &mut self.xmit_discards),
            (1 << 11, 22, 2, &mut self.vl15_dropped),
            (1 << 12, 24, 4, &mut self.xmit_data),
            (1 << 13, 28, 4, &mut self.rcv_data),
            (1 << 14, 32, 4, &mut self.xmit_packets),
            (1 << 15, 36, 4, &mut self.rcv_packets),
        ]
    }

    /// A counter of PortCountersExt: select bit and offset of the field.
    fn extended_fields(&mut self) -> [(u16, usize, &mut u64); 8] {
        [
            (1 << 0, 8, &mut self.xmit_data),
            (1 << 1, 16, &mut self.rcv_data),
            (1 << 2, 24, &mut self.xmit_packets),
            (1 << 3, 32, &mut self.rcv_packets),
            (1 << 4, 40, &mut self.unicast_xmit),
            (1 << 5, 48, &mut self.unicast_rcv),
            (1 << 6, 56, &mut self.multicast_xmit),
            (1 << 7, 64, &mut self.multicast_rcv),
        ]
    }

    fn read(&mut self, data: &mut [u8]) {
        for (_, at, bytes, value) in self.fields() {
            // What does not fit the field sticks at its end.
            let most = u64::MAX >> (64 - 8 * bytes as u32);
            put(data, at, &(*value).min(most).to_be_bytes()[8 - bytes..]);
        }
    }

    fn write(&mut self, data: &[u8]) {
        let select = get16(data, 2);
        for (bit, at, bytes, value) in self.fields() {
            if select & bit != 0 {
                *value = data
                    .get(at..at + bytes)
                    .unwrap_or(&[])
                    .iter()
                    .fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            }
        }
    }

    fn read_extended(&mut self, data: &mut [u8]) {
        for (_, at, value) in self.extended_fields() {
            put(data, at, &value.to_be_bytes());
        }
    }

    fn write_extended(&mut self, data: &[u8]) {
        let select = get16(data, 2);
        for (bit, at, value) in self.extended_fields() {
            if select & bit != 0 {
                *value = crate::mad::get64(data, at);
            }
        }
    }
}

/// Answers a MAD of the performance class in place; `counters` finds those of a port by number.
pub(crate) fn process<'a>(
    mad: &mut Mad,
    counters: impl FnOnce(u8) -> Option<&'a mut Counters>,
) -> Reaction {
    let set = match mad.method() {
        method::GET => false,
        method::SET => true,
        _ => return Reaction::Pass,
    };
    if mad.base_version() != 1 || mad.class_version() != 1 {
        mad.respond(Status::BadVersion);
        return Reaction::Reply;
    }
    let status = match mad.attribute() {
        attr::CLASS_PORT_INFO if !set => {
            class_port_info(mad.perf_data());
            Status::Ok
        }
        attr::PORT_COUNTERS | attr::PORT_COUNTERS_EXT => {
            let extended = mad.attribute() == attr::PORT_COUNTERS_EXT;
            let data = mad.perf_data();
            match counters(data[1]) {
                Some(found) => {
                    match (extended, set) {
                        (false, true) => found.write(data),
                        (true, true) => found.write_extended(data),
                        _ => (),
                    }
                    // The rest of the attribute is counters that stay zero.
                    data[4..].fill(0);
                    if extended {
                        found.read_extended(data);
                    } else {
                        found.read(data);
                    }
                    Status::Ok
                }
                None => Status::BadField,
            }
        }
        _ => Status::BadAttribute,
    };
    mad.respond(status);
    Reaction::Reply
}

fn class_port_info(data: &mut [u8]) {
    data.fill(0);
    data[0] = 1;
    data[1] = 1;
    put(data, 2, &EXTENDED_WIDTH.to_be_bytes());
    put(data, 4, &RESPONSE_TIME.to_be_bytes());
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_pma)]
mod tests {
    use super::*;
    use crate::mad::{
        class,
        get64, //
    };

    fn ask(counters: &mut Counters, method: u8, attribute: u16, port: u8, select: u16) -> Mad {
        let mut mad = Mad::request(class::PERF, method, attribute, 0);
        mad.perf_data()[1] = port;
        put(mad.perf_data(), 2, &select.to_be_bytes());
        let reaction = process(&mut mad, |asked| (asked == 1).then_some(counters));
        assert_eq!(reaction, Reaction::Reply);
        assert_eq!(mad.method(), method::GET_RESP);
        mad
    }

    #[test]
    fn counters_in_both_widths() {
        let mut counters = Counters {
            link_downed: 300,
            ..Counters::default()
        };
        counters.sent(1, 0x1_2345_6789, false);
        counters.received(1, 7, true);
        let mut mad = ask(&mut counters, method::GET, attr::PORT_COUNTERS, 1, 0);
        let data = mad.perf_data();
        assert_eq!(data[7], 0xff);
        assert_eq!(data[24..32], [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 7]);
        let mut mad = ask(&mut counters, method::GET, attr::PORT_COUNTERS_EXT, 1, 0);
        let data = mad.perf_data();
        assert_eq!(get64(data, 8), 0x1_2345_6789);
        assert_eq!((get64(data, 40), get64(data, 64)), (1, 1));
    }

    #[test]
    fn reset_of_some() {
        let mut counters = Counters::default();
        counters.sent(1, 5, false);
        counters.received(1, 6, false);
        ask(&mut counters, method::SET, attr::PORT_COUNTERS, 1, 1 << 12);
        assert_eq!((counters.xmit_data, counters.rcv_data), (0, 6));
        ask(
            &mut counters,
            method::SET,
            attr::PORT_COUNTERS_EXT,
            1,
            1 << 1,
        );
        assert_eq!((counters.xmit_packets, counters.rcv_data), (1, 0));
    }

    #[test]
    fn refusals() {
        let mut counters = Counters::default();
        let mad = ask(&mut counters, method::GET, attr::PORT_COUNTERS, 2, 0);
        assert_eq!(mad.status(), Status::BadField as u16);
        let mad = ask(&mut counters, method::GET, 0x0010, 1, 0);
        assert_eq!(mad.status(), Status::BadAttribute as u16);
        let mut mad = Mad::request(class::PERF, method::GET_RESP, attr::PORT_COUNTERS, 0);
        assert_eq!(process(&mut mad, |_| None), Reaction::Pass);
    }

    #[test]
    fn class_port_info_tells_of_wide_counters() {
        let mut counters = Counters::default();
        let mut mad = ask(&mut counters, method::GET, attr::CLASS_PORT_INFO, 0, 0);
        assert_eq!(mad.perf_data()[..8], [1, 1, 2, 0, 0, 0, 0, 18]);
    }
}
