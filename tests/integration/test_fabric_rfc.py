# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""What RFC 4391 demands, read off the fabric: requests to the administrator, addresses and bytes of what is sent."""

import itertools
import json
import socket
import time

import pytest
import sockets
import traffic
from fabric import control
from lab import wait_for
from test_fabric_answers import (BROADCAST, COUNT, MEMBER_PKEY_AT, MGID_AT, RECORD, STATE_AT, c, gid, joins, mgid, recorded, rules,  # noqa: F401
                                 saquery)
from test_fabric_filter import MC_MEMBER, SA, restart
from test_multicast import PORT, Member, sender

VM = ["--topology", "fabric", "--nodes", "3"]
MASK_AT, QKEY_AT, TCLASS_AT, SL_AT = RECORD - 8, RECORD + 32, RECORD + 39, RECORD + 44
DELETE = 0x15
# Groups that nobody has been in yet.
fresh = itertools.count(1)
ETH_P_RARP = 0x8035
ICMPV6, SOLICITATION, ADVERTISEMENT = 58, 135, 136


@pytest.fixture(autouse=True)
def sound(lab, nodes):
    yield
    control("filter clear")
    control("record 0")
    lab.check_anomalies()


def of(node, rows):
    return [row for row in rows if row["from"] == node.rdma]


def leaves(node):
    return f"class={SA} method={DELETE:#x} attr={MC_MEMBER:#x} src={node.index}"


def members():
    """What the administrator says of all memberships."""
    return saquery("-m")


def test_link(a):
    """R4391-4.1.e, R4391-4.1.a, R4391-9.1.1.c: scope 2, the full member's P_Key, our port's GID."""
    row = a.link()
    assert bytes.fromhex(row["broadcast"].replace(":", "")) == b"\0\xff\xff\xff" + bytes.fromhex(BROADCAST)
    assert row["address"].endswith(a.gid())
    assert gid(a)[:8].hex() == "fe80000000000000" and int.from_bytes(gid(a)[8:], "big") == a.port_guid()


def test_join_of_the_link(b):
    """R4391-5.a, R4391-5.c, R4391-4.1.a, R4391-4.1.e: as full member, with a component mask that cannot make the group, with
    the full member's P_Key and scope 2; then all others."""
    own = f"{joins(b)} match={MGID_AT}:{BROADCAST}"
    others = f"{joins(b)} match={MGID_AT}:{mgid('224.0.0.1')}"
    with rules(f"{own} match={MASK_AT}:0000000000010083 count=3 drop", f"{own} match={STATE_AT}:01 {COUNT}",
               f"{others} {COUNT}", f"{own} match={MEMBER_PKEY_AT}:ffff {COUNT}") as hits:
        restart(b)

        def lost():
            """What has struck by the time that the first request got lost; it is repeated soon."""
            return found if (found := hits())[0] else None

        assert wait_for("the request that gets lost", lost)[2] == 0
        wait_for("the carrier", b.carrier)
        wait_for("the other groups", lambda: hits()[2] >= 1)
        assert hits()[1] >= 1 and hits()[3] >= 1
    b.ip("addr", "replace", f"{b.address6}/64", "dev", b.interface)
    b.wait_ready()


@pytest.mark.parametrize("state", [1, 8])
def test_joins_of_groups(a, b, state):
    """R4391-10.f, -10.g, -10.h, R4391-4.f: what a new group must be, is what the broadcast group is."""
    group = f"239.5.5.{state}"
    made = f"{joins(a)} match={MGID_AT}:{mgid(group)}"
    # Q_Key, MTU, traffic class, P_Key and rate, each wanted exactly so; life time not named; SL, flow label, hops 0.
    record = f"match={QKEY_AT}:00000b1b00008500ffff870000000000"
    with rules(f"{made} match={MASK_AT}:00000000000173f7 {COUNT}", f"{made} {record} {COUNT}",
               f"{made} match={STATE_AT}:0{state} {COUNT}", f"{leaves(a)} match={MGID_AT}:{mgid(group)} {COUNT}") as hits:
        with Member(a, group) as member, sender(a, group) as sock:
            if state == 1:
                member.join()
            else:
                sock.sendto(b"hello", (group, PORT))
            wait_for("the request", lambda: all(hits()[:3]))
            wait_for("the group", lambda: mgid(group) in saquery("-g"), every=0.3)
        if state == 1:
            wait_for("it to be left", lambda: hits()[3])
            wait_for("the end of the group", lambda: mgid(group) not in saquery("-g"), every=0.3)


def test_leaving(a):
    """R4391-10.i: what IP leaves is left."""
    with rules(f"{leaves(a)} match={MGID_AT}:{mgid('239.5.6.7')} {COUNT}") as hits:
        with Member(a, "239.5.6.7").join():
            wait_for("the group", lambda: mgid("239.5.6.7") in saquery("-g"), every=0.3)
            assert hits() == [0]
        wait_for("it to be left", lambda: hits()[0])


def test_joined_before_sent(a):
    """R4391-10.a, R4391-10.d: nothing is sent before the administrator's answer, and one answer serves for all."""
    group = f"239.5.7.{next(fresh)}"
    account = sockets.Account(a)
    with rules(f"class={SA} method=0x81 attr={MC_MEMBER:#x} dst={a.index} match={MGID_AT}:{mgid(group)} delay=700000",
               f"{joins(a)} {COUNT}", f"{joins(a)} match={MGID_AT}:{mgid(group)} {COUNT}") as hits, \
            recorded() as sent, sender(a, group) as sock:
        def mine():
            return [row for row in of(a, sent()) if row.get("dgid") == mgid(group)]

        start = time.monotonic()
        for _ in range(20):
            sock.sendto(b"probe", (group, PORT))
        while time.monotonic() - start < 0.4:
            assert not mine()
        wait_for("all to be sent", lambda: len(mine()) == 20)
        for _ in range(50):
            sock.sendto(b"probe", (group, PORT))
        wait_for("all to be sent", lambda: len(mine()) == 70)
        # Once, and for what other groups there are.
        asked = account["sa_joins_asked"]
        assert asked >= 1
        wait_for("requests for other groups", lambda: hits()[1] - hits()[2] >= asked - 1, 5)
        assert {row["dest_qp"] for row in mine()} == {str(0xFFFFFF)}
        assert len({row["dlid"] for row in mine()}) == 1 and int(mine()[0]["dlid"], 16) >= 0xC000


def test_unicast(a, b):
    """R4391-2, R4391-9.1.1.b, R4391-9.1.2.b, R4391-6.a: to the QPN of the address, with the link's Q_Key, four bytes more."""
    assert traffic.ping(a, b.address4).lost == 0
    with recorded() as sent:
        assert traffic.ping(a, b.address4, count=5, size=100).lost == 0
        rows = [row for row in of(a, sent()) if row["len"] == str(4 + 20 + 8 + 100)]
        everything = sent()
    assert len(rows) == 5
    assert {(row["dest_qp"], row["qkey"], row["pkey"], row["dlid"]) for row in rows} == \
        {(str(b.qpn()), "0x00000b1b", "0xffff", f"{b.lid():#06x}")}
    assert {row["qkey"] for row in everything} == {"0x00000b1b"}


def test_2044_by_default(a, b):
    """R4391-7.b: and nothing longer than the group's MTU is ever posted (R4391-7.c)."""
    with recorded() as sent:
        assert traffic.ping(a, b.address4, size=2016, options=("-M", "do")).lost == 0
        assert traffic.ping(a, b.address4, size=20000).lost == 0
        # The fragments of IPv4 carry a multiple of eight bytes.
        assert max(int(row["len"]) for row in sent()) == 4 + 20 + 4072


def test_limited_broadcast(a):
    """R4391-4.e: 255.255.255.255 and the subnet's broadcast address are the broadcast group."""
    with recorded() as sent, sockets.udp(a) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, a.interface.encode())
        for target in ("255.255.255.255", "10.0.0.255"):
            sock.sendto(bytes(1234), (target, 9))
        wait_for("both", lambda: len([row for row in of(a, sent())
                                      if row["len"] == str(4 + 28 + 1234) and row.get("dgid") == BROADCAST]) == 2)


def test_mapping_on_the_wire(a):
    """R4391-4.a, -4.b, -4.c, -4.d, -4.f: the groups that datagrams are sent to; ff02:: and ff05:: of one tail are one."""
    six = "ff12601bffff" + "0000" * 2 + "000100020003"
    wanted = {"239.255.1.2": "ff12401bffff0000000000000fff0102", "ff05::1:2:3": six, "ff02::1:2:3": six}
    for group, where in wanted.items():
        with recorded() as sent, sender(a, group) as sock:
            sock.sendto(bytes(777), (group, PORT))
            wait_for(f"a datagram to {where}", lambda: any(row.get("dgid") == where for row in of(a, sent())))


def test_bytes(a, b):
    """R4391-6.a, R4391-6.b, R4391-6.c: the encapsulation header in front of IPv4, IPv6, ARP and RARP; what is reserved is 0
    when sent."""
    a.forget_neighbours()
    kinds = set()
    with sockets.packet(b) as tap, sockets.packet(a, protocol=0) as sock:
        sock.send(sockets.frame(b.link()["address"], ETH_P_RARP, bytes(60)))
        for target in (b.address4, b.address6):
            assert traffic.ping(a, target, count=2).lost == 0
        for data in sockets.received(tap, 1000, limit=0.5):
            assert data[22:24] == b"\0\0"
            kinds.add(data[20:22])
    assert kinds >= {b"\x08\0", b"\x86\xdd", b"\x08\x06", b"\x80\x35"}


def test_neighbour_discovery(a, b):
    """R4391-9.3: the option has length 3, and two bytes of zeros before the address."""
    a.forget_neighbours()
    b.forget_neighbours()
    found = {}
    with sockets.packet(b) as tap:
        assert traffic.ping(a, b.address6, count=1).lost == 0

        def heard():
            for data in sockets.received(tap, 100, limit=0.2):
                ip = data[24:]
                if data[20:22] == b"\x86\xdd" and ip[6] == ICMPV6 and ip[40] in (SOLICITATION, ADVERTISEMENT):
                    found.setdefault(ip[40], ip[64:])
            return SOLICITATION in found

        wait_for("a solicitation", heard)
    raw = bytes.fromhex(a.link()["address"].replace(":", ""))
    other = bytes.fromhex(b.link()["address"].replace(":", ""))
    assert found[SOLICITATION][:4] == b"\1\3\0\0" and found[SOLICITATION][4:24] in (raw, other)


def test_flags_in_addresses(a, b):
    """R4391-9.1.1.a: flags that mean nothing to us are ignored: the same neighbour is reached."""
    address = b.link()["address"]
    try:
        for flags in ("3f", "00", "ff"):
            a.ip("neigh", "replace", b.address4, "lladdr", flags + address[2:], "nud", "permanent", "dev", a.interface)
            assert traffic.ping(a, b.address4).lost == 0
    finally:
        a.ip("neigh", "del", b.address4, "dev", a.interface)


def test_identifiers(a):
    """R4391-8.a, R4391-8.b: the link-local address is made of the GUID."""
    rows = json.loads(a.ip("-j", "-6", "addr", "show", "dev", a.interface).stdout)
    found = [socket.inet_pton(socket.AF_INET6, info["local"]) for row in rows for info in row.get("addr_info", [])]
    guid = bytearray(gid(a)[8:])
    guid[0] |= 2
    assert bytes.fromhex("fe80000000000000") + bytes(guid) in found


def test_stable_identifiers(a):
    """R8064-3: an identifier that says nothing of the GUID can be had instead."""
    guid = bytearray(gid(a)[8:])
    guid[0] |= 2

    def link_locals():
        rows = json.loads(a.ip("-j", "-6", "addr", "show", "dev", a.interface, "scope", "link").stdout)
        return [socket.inet_pton(socket.AF_INET6, info["local"]) for row in rows for info in row.get("addr_info", [])]

    key = f"net.ipv6.conf.{a.interface}.addr_gen_mode"
    try:
        a.sysctl(key, 3)
        restart(a)
        wait_for("an address", link_locals)
        assert not any(found.endswith(guid) for found in link_locals())
    finally:
        a.sysctl(key, 0)
        restart(a)
        a.ip("addr", "replace", f"{a.address6}/64", "dev", a.interface)
        a.wait_ready()


def test_privileged(a):
    """R4391-13.a: nobody else may set up or down, or make members."""
    user = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
    for words in (("link", "set", a.interface, "down"), ("link", "set", a.interface, "mtu", "1000"),
                  ("maddr", "add", "00:ff:ff:ff:ff:12:40:1b:ff:ff:00:00:00:00:00:00:0f:01:01:01", "dev", a.interface)):
        assert a.run(*user, "ip", *words, check=False).returncode
    assert a.carrier() and a.link()["mtu"] == 4092


@pytest.mark.parametrize("kind", ["host", "multicast", "broadcast"])
def test_packet_types(a, b, kind):
    """B32: taps and IGMP are told what a packet was sent to; groups are counted."""
    group = "239.5.9.9"
    target, type_ = {"host": (b.address4, socket.PACKET_HOST), "multicast": (group, socket.PACKET_MULTICAST),
                     "broadcast": ("10.0.0.255", socket.PACKET_BROADCAST)}[kind]
    before = b.statistics()["rx"]["multicast"]
    data = kind.encode() * 20
    with Member(b, group).join() as member, sender(a, group) as sock, sockets.packet(b) as tap:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)

        def type_of():
            sock.sendto(data, (target, PORT))
            tap.settimeout(0.3)
            try:
                while True:
                    got, address = tap.recvfrom(4096)
                    if data in got:
                        return (address[2],)
            except TimeoutError:
                return ()

        assert wait_for("the packet", type_of, 15) == (type_,)
        assert member
    assert (b.statistics()["rx"]["multicast"] > before) or kind != "multicast"


def test_no_leftovers(a, b, c):  # noqa: F811
    """After all of this everybody still reaches everybody."""
    for node in (a, b, c):
        for peer in (a, b, c):
            if node is not peer:
                wait_for("an answer", lambda: traffic.ping(node, peer.address4, count=1, wait=1).received)


def test_terms_of_the_link(a):
    """R4391-5.b, R4391-4.1.d: traffic class, SL, flow label and hop limit are those of the administrator's last answer."""
    def sent_so(*terms):
        control("record 1")
        with sockets.udp(a) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, a.interface.encode())
            sock.sendto(b"hello", ("255.255.255.255", 9))
        rows = [row for row in of(a, sent()) if row.get("dgid") == BROADCAST]
        return rows and all(tuple(row[name] for name in ("tclass", "sl", "flow", "hop_limit")) == terms for row in rows)

    with recorded() as sent:
        for patches, terms in (({TCLASS_AT: "55", SL_AT: "3abcde40"}, ("85", "3", "0xabcde", "64")), ({}, ("0", "0", "0x0", "0"))):
            with rules(*(f"class={SA} method=0x81 attr={MC_MEMBER:#x} dst={a.index} match={MGID_AT}:{BROADCAST} patch={at}:{patch}"
                         for at, patch in patches.items())):
                control(f"reregister {a.index}")
                wait_for(f"the terms {terms}", lambda: sent_so(*terms))
