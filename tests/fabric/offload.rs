// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What a HCA computes for IPv4 in datagrams: checksums, segments. Uses `core` only.
//!
//! A packet begins with the four bytes of the IPoIB encapsulation.

/// Bytes of the encapsulation: the type, two of nothing.
const ENCAPSULATION: usize = 4;
const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TCP: u8 = 6;
const UDP: u8 = 17;
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// Why a checksum was not filled in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// No whole TCP or UDP packet over IPv4.
    Protocol,
    /// The field does not hold the sum of the pseudo header.
    Seed,
}

/// One's complement sum of `bytes` as 16-bit numbers, of which `start` is the sum so far.
fn sum(bytes: &[u8], start: u16) -> u16 {
    // In the machine's order, which sums to the same with the bytes swapped.
    let mut total = u64::from(start.to_be());
    let (words, rest) = bytes.as_chunks::<4>();
    for word in words {
        total += u64::from(u32::from_ne_bytes(*word));
    }
    let mut last = [0; 4];
    for (to, from) in last.iter_mut().zip(rest) {
        *to = *from;
    }
    total += u64::from(u32::from_ne_bytes(last));
    total = (total & 0xffff_ffff) + (total >> 32);
    while total >> 16 != 0 {
        total = (total & 0xffff) + (total >> 16);
    }
    u16::from_be(total as u16)
}

fn get16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

fn put16(bytes: &mut [u8], at: usize, value: u16) {
    if let Some(field) = bytes.get_mut(at..at + 2) {
        field.copy_from_slice(&value.to_be_bytes());
    }
}

/// Where the parts of a packet are.
struct Layout {
    /// Bytes of the IPv4 header.
    ip: usize,
    protocol: u8,
    /// The transport header and what follows, from the start of the packet.
    transport: core::ops::Range<usize>,
    /// Where in the packet the transport checksum is.
    check: usize,
}

/// Understands a packet; None if it is no whole TCP or UDP packet over IPv4.
fn layout(packet: &[u8]) -> Option<Layout> {
    if packet.get(..2)? != TYPE_IPV4 {
        return None;
    }
    let header = packet.get(ENCAPSULATION..)?;
    let first = *header.first()?;
    let ip = usize::from(first & 0xf) * 4;
    let total = usize::from(get16(header, 2)?);
    // Neither more fragments nor an offset.
    if first >> 4 != 4 || ip < 20 || get16(header, 6)? & 0x3fff != 0 {
        return None;
    }
    let protocol = *header.get(9)?;
    let (least, check) = match protocol {
        TCP => (20, 16),
        UDP => (8, 6),
        _ => return None,
    };
    if total > header.len() || total < ip + least {
        return None;
    }
    let start = ENCAPSULATION + ip;
    Some(Layout {
        ip,
        protocol,
        transport: start..ENCAPSULATION + total,
        check: start + check,
    })
}

/// Sum of the pseudo header.
fn pseudo(packet: &[u8], layout: &Layout) -> u16 {
    let addresses = packet
        .get(ENCAPSULATION + 12..ENCAPSULATION + 20)
        .unwrap_or_default();
    let rest = [
        [0, layout.protocol],
        (layout.transport.len() as u16).to_be_bytes(),
    ];
    sum(rest.as_flattened(), sum(addresses, 0))
}

/// Computes the checksum of the IPv4 header.
fn fill_ip(packet: &mut [u8], ip: usize) {
    put16(packet, ENCAPSULATION + 10, 0);
    let header = packet
        .get(ENCAPSULATION..ENCAPSULATION + ip)
        .unwrap_or_default();
    let check = !sum(header, 0);
    put16(packet, ENCAPSULATION + 10, check);
}

/// Computes the transport checksum. Its field holds the sum of what is in front.
fn fill_transport(packet: &mut [u8], layout: &Layout) {
    let bytes = packet.get(layout.transport.clone()).unwrap_or_default();
    let check = match !sum(bytes, 0) {
        // Zero means "none" in UDP.
        0 if layout.protocol == UDP => 0xffff,
        check => check,
    };
    put16(packet, layout.check, check);
}

/// Fills in the checksums of a packet whose transport checksum holds the pseudo header's sum.
pub(crate) fn fill(packet: &mut [u8]) -> Result<(), Refused> {
    let layout = layout(packet).ok_or(Refused::Protocol)?;
    if get16(packet, layout.check) != Some(pseudo(packet, &layout)) {
        return Err(Refused::Seed);
    }
    fill_transport(packet, &layout);
    fill_ip(packet, layout.ip);
    Ok(())
}

/// Whether a packet has checksums, and they are right.
pub(crate) fn verify(packet: &[u8]) -> bool {
    let Some(layout) = layout(packet) else {
        return false;
    };
    if layout.protocol == UDP && get16(packet, layout.check) == Some(0) {
        return false;
    }
    let header = packet
        .get(ENCAPSULATION..ENCAPSULATION + layout.ip)
        .unwrap_or_default();
    let bytes = packet.get(layout.transport.clone()).unwrap_or_default();
    sum(header, 0) == 0xffff && sum(bytes, pseudo(packet, &layout)) == 0xffff
}

/// The segments of a large TCP packet.
pub(crate) struct Segments {
    len: usize,
    mss: usize,
    offset: usize,
    number: u16,
}

impl Segments {
    /// `header` is all that goes in front of `len` bytes of data. None if it makes no sense.
    pub(crate) fn new(header: &[u8], len: usize, mss: usize) -> Option<Self> {
        if header.get(..2)? != TYPE_IPV4 || mss == 0 || len == 0 {
            return None;
        }
        let first = *header.get(ENCAPSULATION)?;
        let ip = usize::from(first & 0xf) * 4;
        let tcp = usize::from(header.get(ENCAPSULATION + ip + 12)? >> 4) * 4;
        let whole = first >> 4 == 4
            && ip >= 20
            && tcp >= 20
            && *header.get(ENCAPSULATION + 9)? == TCP
            && header.len() == ENCAPSULATION + ip + tcp;
        whole.then_some(Self {
            len,
            mss,
            offset: 0,
            number: 0,
        })
    }
}

impl Iterator for Segments {
    type Item = Segment;

    fn next(&mut self) -> Option<Segment> {
        let left = self.len - self.offset;
        if left == 0 {
            return None;
        }
        let len = left.min(self.mss);
        let segment = Segment {
            len,
            offset: self.offset,
            number: self.number,
            last: len == left,
        };
        self.offset += len;
        self.number = self.number.wrapping_add(1);
        Some(segment)
    }
}

/// A part of a large packet's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub(crate) len: usize,
    offset: usize,
    number: u16,
    last: bool,
}

impl Segment {
    /// Makes the header, which is that of the large packet, that of this segment.
    pub(crate) fn patch(&self, packet: &mut [u8], header: usize) {
        let total = packet.len() - ENCAPSULATION;
        put16(packet, ENCAPSULATION + 2, total as u16);
        let id = get16(packet, ENCAPSULATION + 4).unwrap_or(0);
        put16(packet, ENCAPSULATION + 4, id.wrapping_add(self.number));
        let ip = usize::from(packet[ENCAPSULATION] & 0xf) * 4;
        let tcp = ENCAPSULATION + ip;
        if let Some(field) = packet
            .get_mut(tcp + 4..)
            .and_then(|rest| rest.first_chunk_mut())
        {
            let seq = u32::from_be_bytes(*field).wrapping_add(self.offset as u32);
            *field = seq.to_be_bytes();
        }
        if let Some(flags) = packet.get_mut(tcp + 13).filter(|_| header >= tcp + 20) {
            if !self.last {
                *flags &= !(FIN | PSH);
            }
            if self.number != 0 {
                *flags &= !CWR;
            }
        }
        if let Some(layout) = layout(packet) {
            let seed = pseudo(packet, &layout);
            put16(packet, layout.check, seed);
            fill_transport(packet, &layout);
            fill_ip(packet, layout.ip);
        }
    }
}

#[cfg(CONFIG_IBF_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ibf_offload)]
mod tests {
    use super::*;

    /// A UDP packet of a capture: 10.0.0.1:1000 to 10.0.0.2:2000, "hello".
    const UDP_PACKET: [u8; 37] = [
        0x08, 0x00, 0, 0, 0x45, 0, 0, 33, 0x12, 0x34, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0,
        2, 0x03, 0xe8, 0x07, 0xd0, 0, 13, 0, 0, b'h', b'e', b'l', b'l', b'o',
    ];

    /// The sum, slowly.
    fn reference(bytes: &[u8]) -> u16 {
        let mut total = 0u32;
        for pair in bytes.chunks(2) {
            let low = pair.get(1).copied().unwrap_or(0);
            total += u32::from(u16::from_be_bytes([pair[0], low]));
        }
        while total >> 16 != 0 {
            total = (total & 0xffff) + (total >> 16);
        }
        total as u16
    }

    #[test]
    fn sums() {
        let bytes: [u8; 13] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 250, 251, 252, 253];
        for len in 0..bytes.len() {
            assert_eq!(sum(&bytes[..len], 0), reference(&bytes[..len]));
        }
        assert_eq!(sum(&[0xff; 8], 0), 0xffff);
        assert_eq!(sum(&[0, 1], 0xfffe), 0xffff);
        assert_eq!(sum(&[0, 2], 0xfffe), 1);
    }

    fn seeded() -> [u8; 37] {
        let mut packet = UDP_PACKET;
        if let Some(layout) = layout(&packet) {
            let seed = pseudo(&packet, &layout);
            put16(&mut packet, layout.check, seed);
        }
        packet
    }

    #[test]
    fn fills_what_it_verifies() {
        let mut packet = seeded();
        assert!(!verify(&packet));
        assert_eq!(fill(&mut packet), Ok(()));
        assert!(verify(&packet));
        // Pseudo header: 10.0.0.1, 10.0.0.2, 17, 13.
        let pseudo = reference(&[10, 0, 0, 1, 10, 0, 0, 2, 0, 17, 0, 13]);
        let body = reference(&packet[24..]);
        assert_eq!(u32::from(pseudo) + u32::from(body), 0xffff);
        for at in 4..packet.len() {
            let mut bad = packet;
            bad[at] ^= 1;
            assert!(!verify(&bad));
        }
    }

    #[test]
    fn refuses_the_rest() {
        let mut packet = UDP_PACKET;
        assert_eq!(fill(&mut packet), Err(Refused::Seed));
        let mut fragment = seeded();
        fragment[10] = 0x20;
        assert_eq!(fill(&mut fragment), Err(Refused::Protocol));
        let mut ipv6 = seeded();
        ipv6[0] = 0x86;
        assert_eq!(fill(&mut ipv6), Err(Refused::Protocol));
        let mut long = seeded();
        long[7] += 1;
        assert_eq!(fill(&mut long), Err(Refused::Protocol));
        for len in 0..packet.len() {
            assert_eq!(fill(&mut packet[..len]), Err(Refused::Protocol));
            assert!(!verify(&packet[..len]));
        }
        let mut none = seeded();
        assert_eq!(fill(&mut none), Ok(()));
        none[30] = 0;
        none[31] = 0;
        assert!(!verify(&none));
    }

    /// Encapsulation, IPv4 and TCP header with CWR, PSH and FIN, sequence number near the end.
    const LARGE: [u8; 44] = [
        0x08, 0x00, 0, 0, 0x45, 0, 0, 0, 0xff, 0xff, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0,
        2, 0x03, 0xe8, 0x07, 0xd0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 0x50, 0x99, 1, 0, 0, 0, 0,
        0,
    ];

    #[test]
    fn segments() {
        let Some(plan) = Segments::new(&LARGE, 10, 4) else {
            return assert!(false);
        };
        let mut seen = 0;
        for (number, segment) in plan.enumerate() {
            let mut packet = [0; 48];
            let packet = &mut packet[..44 + segment.len];
            packet[..44].copy_from_slice(&LARGE);
            segment.patch(packet, 44);
            assert!(verify(packet));
            assert_eq!(get16(packet, 6), Some(40 + segment.len as u16));
            assert_eq!(
                get16(packet, 8),
                Some(0xffff_u16.wrapping_add(number as u16))
            );
            let seq = u32::MAX.wrapping_add(seen as u32);
            assert_eq!(packet[28..32], seq.to_be_bytes());
            let flags = match number {
                0 => 0x90,
                2 => 0x19,
                _ => 0x10,
            };
            assert_eq!(packet[37], flags);
            seen += segment.len;
        }
        assert_eq!(seen, 10);
    }

    #[test]
    fn large_nonsense() {
        assert!(Segments::new(&LARGE, 0, 4).is_none());
        assert!(Segments::new(&LARGE, 4, 0).is_none());
        for len in 0..LARGE.len() {
            assert!(Segments::new(&LARGE[..len], 10, 4).is_none());
        }
    }
}
