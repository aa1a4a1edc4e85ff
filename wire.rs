// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What is on the wire and in hardware addresses: RFC 4391, and the RoCE profile of
//! Documentation/design.rst.
//!
//! ```text
//! hardware address (20)   0: flags   1-3: QPN   4-19: GID
//! in front of a datagram  0-39: global route header   40-41: ethertype   42-43: reserved
//! MGID                    ff 1S 40|60 1b P_Key(2) group(10)
//! private data (8)        0: reserved   1-3: QPN   4-7: bytes of the longest message (RFC 4755)
//! ```

/// In the flags of a hardware address: takes reliable connections.
pub(crate) const FLAG_RC: u8 = 0x80;

/// Bytes of a hardware address.
pub(crate) const ADDRESS_LEN: usize = 20;

/// Bytes of the encapsulation header (RFC 4391, section 6).
pub(crate) const ENCAP_LEN: usize = 4;

/// Bytes in front of a packet inside the host: a hardware address and the encapsulation header.
pub(crate) const HEADER_LEN: usize = ADDRESS_LEN + ENCAP_LEN;

/// Bytes in front of every received datagram, used or not.
pub(crate) const GRH_LEN: usize = 40;

/// Bytes in front of the IP packet in a receive buffer.
pub(crate) const FRONT_LEN: usize = GRH_LEN + ENCAP_LEN;

/// Largest datagram payload there is.
pub(crate) const MAX_IB_MTU: u32 = 4096;

/// Longest message of a connection: what Linux has, 64 KiB less 12.
pub(crate) const MAX_MESSAGE: u32 = 65524;

/// Service that Linux listens for, and that RFC 4755 says (section 3.5); the QPN completes them.
pub(crate) const SERVICE_LINUX: u64 = 0x1000_0000_0000_0000;
pub(crate) const SERVICE_RFC: u64 = 0x0100_0000_0000_0000;

/// Smallest MTU that IPv4 allows (RFC 791).
pub(crate) const MIN_MTU: u32 = 68;

pub(crate) const ETHERTYPE_IPV4: u16 = 0x0800;
pub(crate) const ETHERTYPE_ARP: u16 = 0x0806;
pub(crate) const ETHERTYPE_RARP: u16 = 0x8035;
pub(crate) const ETHERTYPE_IPV6: u16 = 0x86dd;
pub(crate) const ETHERTYPE_TIPC: u16 = 0x88ca;

/// Whether packets of this type are sent (RFC 4391, table 1, and TIPC as Linux does).
#[inline]
pub(crate) fn is_sent(ethertype: u16) -> bool {
    matches!(
        ethertype,
        ETHERTYPE_IPV4 | ETHERTYPE_ARP | ETHERTYPE_RARP | ETHERTYPE_IPV6 | ETHERTYPE_TIPC
    )
}

/// The IP MTU of a port whose datagrams carry `ib_mtu` bytes.
pub(crate) fn ip_mtu(ib_mtu: u32) -> u32 {
    ib_mtu.saturating_sub(ENCAP_LEN as u32)
}

/// The ethertype in an encapsulation header; the reserved half is ignored (R4391-6.b).
#[inline]
pub(crate) fn ethertype(encap: &[u8]) -> Option<u16> {
    match encap {
        [high, low, _, _, ..] => Some(u16::from_be_bytes([*high, *low])),
        _ => None,
    }
}

/// The encapsulation header of an ethertype.
#[inline]
pub(crate) fn encap(ethertype: u16) -> [u8; ENCAP_LEN] {
    let [high, low] = ethertype.to_be_bytes();
    [high, low, 0, 0]
}

/// A hardware address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct Address(pub(crate) [u8; ADDRESS_LEN]);

impl Address {
    /// Of an interface with this queue pair and GID, without flags.
    pub(crate) fn new(qpn: u32, gid: &[u8; 16]) -> Self {
        let [_, a, b, c] = qpn.to_be_bytes();
        let mut bytes = [0; ADDRESS_LEN];
        bytes[1..4].copy_from_slice(&[a, b, c]);
        bytes[4..].copy_from_slice(gid);
        Self(bytes)
    }

    /// The same with a flag.
    pub(crate) fn with_flag(mut self, flag: u8) -> Self {
        self.0[0] |= flag;
        self
    }

    /// Of a multicast group.
    pub(crate) fn group(mgid: &[u8; 16]) -> Self {
        Self::new(0xff_ffff, mgid)
    }

    /// From the front of `bytes`.
    #[inline]
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        bytes.get(..ADDRESS_LEN)?.try_into().ok().map(Self)
    }

    #[inline]
    pub(crate) fn gid(&self) -> [u8; 16] {
        let mut gid = [0; 16];
        gid.copy_from_slice(&self.0[4..]);
        gid
    }

    #[inline]
    pub(crate) fn qpn(&self) -> u32 {
        u32::from_be_bytes([0, self.0[1], self.0[2], self.0[3]])
    }

    /// The address that a [`key`] stands for.
    pub(crate) fn of_key(key: &[u32; 5]) -> Self {
        let mut bytes = [0; ADDRESS_LEN];
        for (to, word) in bytes.chunks_exact_mut(4).zip(key) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        Self(bytes)
    }
}

/// The GUID of a hardware address that differs from the present one in that only; `None` if it
/// differs in more, or has none.
pub(crate) fn chosen_guid(present: &Address, wanted: &Address) -> Option<u64> {
    let guid = u64::from_be_bytes(*wanted.0.last_chunk()?);
    (guid != 0 && wanted.0[..ADDRESS_LEN - 8] == present.0[..ADDRESS_LEN - 8]).then_some(guid)
}

/// A GID with another GUID.
pub(crate) fn with_guid(gid: &[u8; 16], guid: u64) -> [u8; 16] {
    let mut gid = *gid;
    gid[8..].copy_from_slice(&guid.to_be_bytes());
    gid
}

/// What tells destinations apart on a link with this P_Key: the flags do not (R4391-9.1.1.a), nor
/// does a group's P_Key, which is always the link's.
///
/// The address at the front of `bytes` in words of memory order, without them; `None` if it is cut
/// short.
#[inline]
pub(crate) fn key(bytes: &[u8], pkey: u16) -> Option<[u32; 5]> {
    const QPN: u32 = 0x00ff_ffff_u32.to_be();
    const FIRST_HALF: u32 = 0xffff_0000_u32.to_be();
    let bytes: &[u8; ADDRESS_LEN] = bytes.first_chunk()?;
    let mut words = [0; 5];
    for (word, part) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_ne_bytes([part[0], part[1], part[2], part[3]]);
    }
    words[0] &= QPN;
    if bytes[4] == 0xff {
        words[0] = QPN;
        words[2] = (words[2] & !FIRST_HALF) | (u32::from(full(pkey)) << 16).to_be();
    }
    Some(words)
}

/// A P_Key with the bit of full membership, as MGIDs carry it (R4391-4.1.a).
#[inline]
pub(crate) fn full(pkey: u16) -> u16 {
    pkey | 0x8000
}

/// Whether a P_Key names a partition; 0 stands for none.
pub(crate) fn is_valid_pkey(pkey: u16) -> bool {
    pkey & 0x7fff != 0
}

/// Whether members with these P_Keys belong to one partition.
pub(crate) fn same_partition(one: u16, other: u16) -> bool {
    full(one) == full(other)
}

/// The MGID of a link's broadcast group.
pub(crate) fn broadcast_mgid(scope: u8, pkey: u16) -> [u8; 16] {
    let [high, low] = full(pkey).to_be_bytes();
    [
        0xff,
        0x10 | (scope & 0x0f),
        0x40,
        0x1b,
        high,
        low,
        0,
        0,
        0,
        0,
        0,
        0,
        0xff,
        0xff,
        0xff,
        0xff,
    ]
}

/// The scope of a broadcast address that differs from another one in that at most.
pub(crate) fn scope_of(wanted: &Address, broadcast: &Address) -> Option<u8> {
    let (mgid, own) = (wanted.gid(), broadcast.gid());
    let scope = mgid[1] & 0x0f;
    let pkey = u16::from_be_bytes([own[4], own[5]]);
    // 0 and 15 are reserved (RFC 4291, section 2.7).
    let is_one = matches!(scope, 1..=14) && mgid == broadcast_mgid(scope, pkey);
    (is_one && wanted.qpn() == broadcast.qpn()).then_some(scope)
}

/// Whether a group is the broadcast group of some link.
pub(crate) fn is_broadcast_mgid(mgid: &[u8; 16]) -> bool {
    let pkey = u16::from_be_bytes([mgid[4], mgid[5]]);
    *mgid == broadcast_mgid(mgid[1], pkey)
}

/// The MGID of the group of all routers, on the link and of the IP version of another group.
pub(crate) fn routers_mgid(group: &[u8; 16]) -> [u8; 16] {
    let mut mgid = [0; 16];
    mgid[..6].copy_from_slice(&group[..6]);
    mgid[15] = 2;
    mgid
}

/// Whether a packet is for a group of more than the link's scope. `packet` is the encapsulation
/// header and the packet, or as much of it as is at hand.
pub(crate) fn is_wide(packet: &[u8]) -> bool {
    let ip = packet.get(ENCAP_LEN..).unwrap_or_default();
    match ethertype(packet) {
        // 224.0.0.0/24 is never forwarded (RFC 5771).
        Some(ETHERTYPE_IPV4) => ip
            .get(16..19)
            .is_some_and(|group| group[0] & 0xf0 == 0xe0 && *group != [224, 0, 0]),
        // RFC 4291, section 2.7.
        Some(ETHERTYPE_IPV6) => ip
            .get(24..26)
            .is_some_and(|group| group[0] == 0xff && group[1] & 0x0f > 2),
        _ => false,
    }
}

/// A group's address on the link with this broadcast address, whose P_Key it gets: the stack
/// remembers groups with the P_Key that the link had when they were joined. `None` if scope or
/// signature, but for the IP version, are others.
pub(crate) fn on_link(group: &Address, broadcast: &Address) -> Option<Address> {
    let signature = u16::from_be_bytes([group.0[6], group.0[7]]);
    if group.0[..6] != broadcast.0[..6] || !matches!(signature, 0x401b | 0x601b) {
        return None;
    }
    let mut address = *group;
    address.0[8..10].copy_from_slice(&broadcast.0[8..10]);
    Some(address)
}

/// The link-local GID that RoCE makes of an Ethernet address (modified EUI-64).
pub(crate) fn gid_of_mac(mac: &[u8; 6]) -> [u8; 16] {
    let [a, b, c, d, e, f] = *mac;
    [
        0xfe,
        0x80,
        0,
        0,
        0,
        0,
        0,
        0,
        a ^ 2,
        b,
        c,
        0xff,
        0xfe,
        d,
        e,
        f,
    ]
}

/// The Ethernet address in a link-local GID, if it was made from one.
pub(crate) fn mac_of_gid(gid: &[u8; 16]) -> Option<[u8; 6]> {
    match *gid {
        [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a, b, c, 0xff, 0xfe, d, e, f] => {
            Some([a ^ 2, b, c, d, e, f])
        }
        _ => None,
    }
}

/// What the ends of a connection tell each other in private data (RFC 4755, section 6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    /// The UD queue pair of who says it.
    pub(crate) qpn: u32,
    /// Bytes of the longest message that it takes, with the encapsulation header.
    pub(crate) message: u32,
}

impl Hello {
    pub(crate) const LEN: usize = 8;

    /// As sent.
    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(&(self.qpn & 0x00ff_ffff).to_be_bytes());
        bytes[4..].copy_from_slice(&self.message.to_be_bytes());
        bytes
    }

    /// Whether this can be said of a queue pair for datagrams: it has an ordinary number, and takes
    /// messages with something in them.
    pub(crate) fn makes_sense(&self) -> bool {
        self.qpn > 1 && self.qpn < 0xff_ffff && self.message > ENCAP_LEN as u32
    }

    /// From the front of `private`, the reserved byte ignored; `None` if it is cut short.
    pub(crate) fn read(private: &[u8]) -> Option<Self> {
        match *private {
            [_, a, b, c, d, e, f, g, ..] => Some(Self {
                qpn: u32::from_be_bytes([0, a, b, c]),
                message: u32::from_be_bytes([d, e, f, g]),
            }),
            _ => None,
        }
    }
}

/// The IP MTU of a connection between these ends; `None` if nothing fits.
pub(crate) fn connection_mtu(own: u32, peer: u32) -> Option<u32> {
    let mtu = own.min(peer).checked_sub(ENCAP_LEN as u32)?;
    (mtu != 0).then_some(mtu)
}

/// Whether a packet may be sent on a connection: IP, but no neighbour discovery (RFC 4755,
/// section 7). `packet` is the IP packet, or as much of it as is at hand.
pub(crate) fn may_ride(ethertype: u16, packet: &[u8]) -> bool {
    const ICMPV6: u8 = 58;
    match ethertype {
        ETHERTYPE_IPV4 => true,
        ETHERTYPE_IPV6 => {
            packet.get(6) != Some(&ICMPV6) || !matches!(packet.get(40), Some(133..=137))
        }
        _ => false,
    }
}

/// The Ethernet address of a group (RFC 2464, section 7).
pub(crate) fn mac_of_mgid(mgid: &[u8; 16]) -> [u8; 6] {
    [0x33, 0x33, mgid[12], mgid[13], mgid[14], mgid[15]]
}

#[cfg(CONFIG_IPOIB_RS_KUNIT_TEST)]
#[kernel::macros::kunit_tests(ipoib_rs_wire)]
mod tests {
    use super::*;
    use crate::net::mapping;

    /// "ff12:401b:8001::fff:102" in full, without colons.
    fn hex<const N: usize>(text: &str) -> [u8; N] {
        let mut bytes = [0; N];
        let mut digits = text.bytes().filter_map(|c| char::from(c).to_digit(16));
        for byte in &mut bytes {
            let high = digits.next().unwrap_or(0);
            *byte = (high << 4 | digits.next().unwrap_or(0)) as u8;
        }
        bytes
    }

    /// O10: the GUID is the administrator's, all else the port's.
    #[test]
    fn addresses_that_may_be_chosen() {
        let gid = hex("fe80:0000:0000:0000:0002:c903:00a1:b2c3");
        let present = Address::new(0x48, &gid).with_flag(FLAG_RC);
        let other = Address::new(0x48, &with_guid(&gid, 0x1234)).with_flag(FLAG_RC);
        assert_eq!(chosen_guid(&present, &other), Some(0x1234));
        assert_eq!(chosen_guid(&present, &present), Some(0x0002_c903_00a1_b2c3));
        for at in 0..ADDRESS_LEN - 8 {
            let mut wrong = other;
            wrong.0[at] ^= 1;
            assert_eq!(chosen_guid(&present, &wrong), None);
        }
        let none = Address::new(0x48, &with_guid(&gid, 0)).with_flag(FLAG_RC);
        assert_eq!(chosen_guid(&present, &none), None);
    }

    /// R4391-10.c
    #[test]
    fn what_routers_pass_on() {
        fn packet(protocol: u16, at: usize, group: &[u8]) -> [u8; 60] {
            let mut packet = [0; 60];
            packet[..ENCAP_LEN].copy_from_slice(&encap(protocol));
            packet[ENCAP_LEN + at..][..group.len()].copy_from_slice(group);
            packet
        }
        for (group, wide) in [
            ([224, 0, 0, 251], false),
            ([224, 0, 1, 1], true),
            ([239, 255, 1, 2], true),
            ([10, 0, 0, 1], false),
            ([255, 255, 255, 255], false),
        ] {
            assert_eq!(is_wide(&packet(ETHERTYPE_IPV4, 16, &group)), wide);
        }
        for (group, wide) in [
            ([0xff, 0x02], false),
            ([0xff, 0x01], false),
            ([0xff, 0x15], true),
            ([0xff, 0x0e], true),
            ([0xfd, 0x0e], false),
        ] {
            assert_eq!(is_wide(&packet(ETHERTYPE_IPV6, 24, &group)), wide);
        }
        assert!(!is_wide(&packet(ETHERTYPE_ARP, 16, &[239, 1, 1, 1])));
        assert!(!is_wide(&packet(ETHERTYPE_IPV4, 16, &[239, 1, 1, 1])[..22]));
        assert!(!is_wide(&[]));
        let groups = [
            (
                "ff15401b 80010000 00000000 0fff0102",
                "ff15401b 80010000 00000000 00000002",
            ),
            (
                "ff12601b ffff1234 56789abc def01234",
                "ff12601b ffff0000 00000000 00000002",
            ),
        ];
        for (group, routers) in groups {
            assert_eq!(routers_mgid(&hex::<16>(group)), hex::<16>(routers));
        }
    }

    #[test]
    fn groups_of_ipv4_as_the_stack_maps_them() {
        let table = [
            // R4391-4.a, -4.b, -4.c, -4.g
            (
                [224, 0, 0, 251],
                0x8001,
                2,
                "00ffffff ff12401b 80010000 00000000 000000fb",
            ),
            (
                [239, 255, 1, 2],
                0x8001,
                2,
                "00ffffff ff12401b 80010000 00000000 0fff0102",
            ),
            // R4391-4.f
            (
                [224, 0, 0, 1],
                0x8001,
                5,
                "00ffffff ff15401b 80010000 00000000 00000001",
            ),
        ];
        for (ip, pkey, scope, want) in table {
            let broadcast = Address::group(&broadcast_mgid(scope, pkey));
            let group = Address(mapping::ipv4(ip, &broadcast.0));
            assert_eq!(group.0, hex::<20>(want));
            assert_eq!(group.0[4], 0xff);
            assert_eq!(on_link(&group, &broadcast), Some(group));
            assert_eq!(keyed(&group, pkey), Some(group));
        }
    }

    #[test]
    fn groups_of_ipv6_as_the_stack_maps_them() {
        let all_nodes = hex::<16>("ff020000000000000000000000000001");
        let site = hex::<16>("ff050000000000000000000000000001");
        let solicited = hex::<16>("ff0200000000000000000001ff001234");
        let broadcast = Address::group(&broadcast_mgid(2, 0xffff));
        let map = |ip: &[u8; 16]| Address(mapping::ipv6(ip, &broadcast.0));
        assert_eq!(
            map(&solicited).gid(),
            hex::<16>("ff12601bffff00000000 0001ff001234")
        );
        // R4391-4.d: the low 80 bits only.
        assert_eq!(map(&all_nodes), map(&site));
        assert_eq!(
            map(&all_nodes).gid(),
            hex::<16>("ff12601bffff00000000000000000001")
        );
        assert!(on_link(&map(&solicited), &broadcast).is_some());
    }

    #[test]
    fn broadcast_groups() {
        assert_eq!(
            broadcast_mgid(5, 0x8001),
            hex::<16>("ff15401b80010000 00000000ffffffff")
        );
        assert!(is_broadcast_mgid(&broadcast_mgid(5, 0x8001)));
        let other = hex::<16>("ff15401b80010000 00000000fffffffe");
        assert!(!is_broadcast_mgid(&other));
        let of = |scope, pkey| Address::group(&broadcast_mgid(scope, pkey));
        for (wanted, scope) in [
            (of(2, 0x8001), Some(2)),
            (of(5, 0x8001), Some(5)),
            (of(0, 0x8001), None),
            (of(15, 0x8001), None),
            (of(5, 0x8002), None),
            (Address::group(&other), None),
            (Address::new(7, &broadcast_mgid(5, 0x8001)), None),
        ] {
            assert_eq!(scope_of(&wanted, &of(2, 0x8001)), scope);
        }
        // A limited member's link has the full member's group (R4391-4.1.a).
        assert_eq!(broadcast_mgid(2, 0x0001), broadcast_mgid(2, 0x8001));
        assert_eq!(
            broadcast_mgid(2, 0xffff),
            hex::<16>("ff12401bffff0000 00000000ffffffff")
        );
    }

    fn keyed(address: &Address, pkey: u16) -> Option<Address> {
        key(&address.0, pkey).map(|key| Address::of_key(&key))
    }

    #[test]
    fn a_foreign_group_is_not_on_the_link() {
        let broadcast = Address::group(&broadcast_mgid(2, 0xffff));
        let wide = Address::group(&broadcast_mgid(5, 0xffff));
        assert_eq!(on_link(&wide, &broadcast), None);
        let mut unsigned = broadcast;
        unsigned.0[6] = 0x41;
        assert_eq!(on_link(&unsigned, &broadcast), None);
    }

    /// B28: a group that was joined before the P_Key changed is one of the new link.
    #[test]
    fn a_group_gets_the_links_p_key() {
        let broadcast = Address::group(&broadcast_mgid(2, 0x8002));
        let old = Address::group(&broadcast_mgid(2, 0x8001));
        assert_eq!(on_link(&old, &broadcast), Some(broadcast));
        let mut all_hosts = old;
        all_hosts.0[16..].copy_from_slice(&[0, 0, 0, 1]);
        let mut moved = broadcast;
        moved.0[16..].copy_from_slice(&[0, 0, 0, 1]);
        assert_eq!(on_link(&all_hosts, &broadcast), Some(moved));
    }

    #[test]
    fn addresses() {
        let gid = hex::<16>("fe800000000000000202c9fffea1b2c3");
        let address = Address::new(0x00ab_cdef, &gid);
        assert_eq!(address.qpn(), 0x00ab_cdef);
        assert_eq!(address.gid(), gid);
        let mut flagged = address;
        flagged.0[0] = 0x3f;
        assert_eq!(keyed(&flagged, 0xffff), Some(address));
        assert_eq!(key(&address.0[..19], 0xffff), None);
        assert_eq!(Address::read(&address.0[..19]), None);
        assert_eq!(Address::read(&address.0), Some(address));
    }

    #[test]
    fn a_raw_group_gets_the_links_p_key() {
        let mut raw = Address::group(&broadcast_mgid(2, 0x8001));
        raw.0[..4].copy_from_slice(&[0x80, 1, 2, 3]);
        let group = Address::group(&broadcast_mgid(2, 0xffff));
        assert_eq!(keyed(&raw, 0xffff), Some(group));
    }

    #[test]
    fn encapsulation() {
        assert_eq!(encap(ETHERTYPE_IPV6), [0x86, 0xdd, 0, 0]);
        assert_eq!(ethertype(&[8, 0, 0xff, 0xff]), Some(ETHERTYPE_IPV4));
        assert_eq!(ethertype(&[8, 0, 0]), None);
        assert!(is_sent(ETHERTYPE_ARP));
        assert!(!is_sent(0x88b5));
    }

    #[test]
    fn mtus() {
        let table = [
            (256, 252),
            (512, 508),
            (1024, 1020),
            (2048, 2044),
            (4096, 4092),
        ];
        for (ib, ip) in table {
            assert_eq!(ip_mtu(ib), ip);
        }
        assert_eq!(ip_mtu(0), 0);
    }

    #[test]
    fn private_data() {
        let hello = Hello {
            qpn: 0x00ab_cdef,
            message: MAX_MESSAGE,
        };
        assert_eq!(hello.encode(), hex::<8>("00abcdef 0000fff4"));
        assert_eq!(Hello::read(&hello.encode()), Some(hello));
        // What is reserved, and what follows, says nothing.
        assert_eq!(
            Hello::read(&hex::<92>("ffabcdef 0000fff4 ffff")),
            Some(hello)
        );
        assert_eq!(Hello::read(&hex::<7>("00abcdef0000ff")), None);
        assert_eq!(Hello::read(&[]), None);
        let wide = Hello {
            qpn: 0xffff_ffff,
            message: 1,
        };
        assert_eq!(wide.encode(), hex::<8>("00ffffff 00000001"));
    }

    #[test]
    fn what_makes_no_sense() {
        let table = [
            (17, 65524, true),
            (2, 5, true),
            (0xff_fffe, u32::MAX, true),
            (0, 65524, false),
            (1, 65524, false),
            (0xff_ffff, 65524, false),
            (17, 4, false),
            (17, 0, false),
        ];
        for (qpn, message, want) in table {
            assert_eq!(Hello { qpn, message }.makes_sense(), want);
        }
        for (one, other, want) in [
            (0xffff, 0xffff, true),
            (0x7fff, 0xffff, true),
            (0x8001, 1, true),
            (0x8001, 0xffff, false),
            (0, 0xffff, false),
        ] {
            assert_eq!(same_partition(one, other), want);
        }
    }

    #[test]
    fn connection_mtus() {
        let table = [
            (65524, 65524, Some(65520)),
            (65524, 2048, Some(2044)),
            (16384, 65524, Some(16380)),
            (65524, u32::MAX, Some(65520)),
            (65524, 5, Some(1)),
            (65524, 4, None),
            (65524, 0, None),
            (0, 65524, None),
        ];
        for (own, peer, want) in table {
            assert_eq!(connection_mtu(own, peer), want);
        }
    }

    #[test]
    fn services() {
        assert_eq!(SERVICE_LINUX | 0x00ab_cdef, 0x1000_0000_00ab_cdef);
        assert_eq!(SERVICE_RFC | 0x00ab_cdef, 0x0100_0000_00ab_cdef);
    }

    #[test]
    fn neighbour_discovery_does_not_ride() {
        let mut packet = [0; 48];
        assert!(may_ride(ETHERTYPE_IPV4, &packet));
        assert!(!may_ride(ETHERTYPE_ARP, &packet));
        packet[6] = 58;
        for (kind, want) in [
            (128, true),
            (132, true),
            (133, false),
            (137, false),
            (138, true),
        ] {
            packet[40] = kind;
            assert_eq!(may_ride(ETHERTYPE_IPV6, &packet), want);
        }
        // Not ICMPv6 after all.
        packet[6] = 6;
        packet[40] = 135;
        assert!(may_ride(ETHERTYPE_IPV6, &packet));
        assert!(may_ride(ETHERTYPE_IPV6, &packet[..10]));
    }

    #[test]
    fn flags_say_what_an_address_takes() {
        let plain = Address::new(17, &hex::<16>("fe800000000000000202c9fffea1b2c3"));
        let flagged = plain.with_flag(FLAG_RC);
        assert_eq!(flagged.0[0], 0x80);
        assert_eq!(flagged.qpn(), 17);
        assert_eq!(keyed(&flagged, 0xffff), Some(plain));
    }

    #[test]
    fn ethernet_addresses() {
        let mac = [0x02, 0x02, 0xc9, 0xa1, 0xb2, 0xc3];
        let gid = gid_of_mac(&mac);
        assert_eq!(gid, hex::<16>("fe800000000000000002c9fffea1b2c3"));
        assert_eq!(mac_of_gid(&gid), Some(mac));
        assert_eq!(
            mac_of_gid(&hex::<16>("fe80000000000000021122334455 6677")),
            None
        );
        assert_eq!(
            mac_of_mgid(&broadcast_mgid(2, 0xffff)),
            [0x33, 0x33, 0xff, 0xff, 0xff, 0xff]
        );
    }
}
