# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""What the HCA computes: checksums and segmentation of IPv4, rows N7, D5 and D7. Holds of the stock driver too."""

import hashlib
import itertools
import re
import socket
import struct

import pytest
import sockets
import traffic
from fabric import ACTIVE, control
from lab import INTERFACE_MTU, wait_for

VM = ["--topology", "fabric", "--nodes", "3", "--fabric-param", "csum=1", "--fabric-param", "tso=1"]
TX, RX, TSO = "tx-checksum-ipv4", "rx-checksumming", "tx-tcp-segmentation"
SOL_PACKET, PACKET_VNET_HDR = 263, 15
NEEDS_CSUM, GSO_TCPV4 = 1, 1
FIN_PSH_ACK, ACK = 0x19, 0x10


def features(node):
    """`ethtool -k`: name to (on, fixed)."""
    text = node.run("ethtool", "-k", node.interface).stdout
    return {name: (state == "on", bool(fixed))
            for name, state, fixed in re.findall(r"^\s*([\w-]+): (on|off)( \[fixed\])?", text, re.M)}


def switch(node, **wanted):
    words = [word for name, on in wanted.items() for word in (name, "on" if on else "off")]
    node.run("ethtool", "-K", node.interface, *words)


@pytest.fixture
def as_made(nodes):
    """Every HCA has all offloads and they are on, before and after."""
    yield nodes
    for node in nodes:
        node.ip("link", "set", node.interface, "mtu", INTERFACE_MTU)
        switch(node, tx=True, rx=True, tso=True, gro=True)


@pytest.fixture
def remake(lab, nodes):
    """Replaces a node's HCA by one with other properties; the last test's are the first one's again."""
    changed = []

    def make(node, **properties):
        node.delete_rdma()
        control(" ".join([f"add {node.index}", *(f"{name}={value}" for name, value in properties.items())]))
        changed.append(node)
        wait_for(f"{node.rdma} to be active", lambda: node.state() == "ACTIVE", 4 * ACTIVE[lab.flavour])
        node.adopt_interface()
        node.wait_ready()

    yield make
    for node in set(changed):
        make(node)


@pytest.fixture(autouse=True)
def anomalies(lab):
    """No test may leave the fabric with something that hardware would not forgive."""
    yield
    lab.check_anomalies()


class Uses:
    """How often an interface used its offloads since; None for a driver that does not count them."""

    def __init__(self, node):
        self.account = sockets.Account(node)

    def all(self):
        grown = self.account.all()
        return [grown.get(name) for name in ("tx_checksum_packets", "tx_large_packets", "rx_checksum_packets")]

    def agree(self, checksum, large, verified):
        for used, expected in zip(self.all(), (checksum, large, verified)):
            assert used is None or bool(used) == expected, self.all()


def exchange(a, b, size):
    """Bytes over TCP in both directions at once, their arrival proved by a hash."""
    transfers = [traffic.Transfer(a, b, size, port=7021), traffic.Transfer(b, a, size + 1, port=7022)]
    for transfer in transfers:
        transfer.verify()


def test_offered(nodes):
    """Both checksums and segmentation, all of it for IPv4 only, all of it to be switched."""
    for node in nodes:
        found = features(node)
        for name in (TX, RX, TSO):
            assert found[name] == (True, False), (name, found[name])
        for name in ("tx-checksum-ipv6", "tx-tcp6-segmentation"):
            assert found[name] == (False, True), (name, found[name])
        assert found["scatter-gather"][0]


def test_absent(a, b, as_made, remake, scaled):
    """An HCA without them: nothing is offered, and the others' packets are understood."""
    remake(b, csum=0, tso=0)
    found = features(b)
    assert [found[name] for name in (TX, RX, TSO)] == [(False, True)] * 3
    ours, theirs = Uses(a), Uses(b)
    exchange(a, b, scaled(4 << 20, least=1 << 20))
    ours.agree(True, True, True)
    theirs.agree(False, False, False)


def test_checksums_without_segmentation(a, b, as_made, remake, scaled):
    remake(b, tso=0)
    found = features(b)
    assert [found[name] for name in (TX, RX, TSO)] == [(True, False), (True, False), (False, True)]
    theirs = Uses(b)
    exchange(a, b, scaled(4 << 20, least=1 << 20))
    theirs.agree(True, False, True)


@pytest.mark.parametrize("tx, tso, rx", [row for row in itertools.product((False, True), repeat=3) if row[0] or not row[1]])
def test_switched(a, b, as_made, scaled, tx, tso, rx):
    """ethtool -K: each is used when it is on, not when it is off, and every byte arrives."""
    switch(a, tx=tx, tso=tso, rx=rx)
    found = features(a)
    assert [found[name][0] for name in (TX, TSO, RX)] == [tx, tso, rx]
    uses = Uses(a)
    exchange(a, b, scaled(4 << 20, least=1 << 20))
    uses.agree(tx, tso, rx)


def test_datagrams_of_all_lengths(a, b, as_made, scaled):
    """Odd and even, one byte and a full packet, and fragments, whose checksums the stack computes."""
    lengths = [*range(1, 20), 255, 256, 257, 1999, 2000, INTERFACE_MTU - 29, INTERFACE_MTU - 28,
               INTERFACE_MTU - 27, 9001, 20000, 65507]
    wrong = sockets.snmp(b, "Udp", "InCsumErrors")
    sockets.verify_datagrams(a, b, 7030, lengths)
    assert sockets.snmp(b, "Udp", "InCsumErrors") == wrong


def test_damaged_packet_is_refused(a, b, as_made):
    """D7: the HCA does not vouch for it, so the stack looks itself."""
    whole = sockets.udp_packet(a.address4, b.address4, 7031, b"whole")
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    target = b.link()["address"]
    wrong = sockets.snmp(b, "Udp", "InCsumErrors")
    with sockets.udp(b, 7031) as receiver, sockets.packet(a, protocol=0) as sender:
        for packet in (damaged, whole):
            sender.send(sockets.frame(target, sockets.ETH_P_IP, packet))
        assert sockets.received(receiver, 1) == [b"whole"]
    assert sockets.snmp(b, "Udp", "InCsumErrors") == wrong + 1


def large_packet(a, b, port, data, options):
    """IPv4 and TCP headers and more data than any packet carries; the checksum field holds the pseudo header's sum."""
    tcp = 20 + len(options)
    length = tcp + len(data)
    addresses = socket.inet_aton(a.address4) + socket.inet_aton(b.address4)
    seed = ~sockets.checksum(addresses + struct.pack("!BBH", 0, 6, length)) & 0xffff
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 7, 0, 64, 6, 0) + addresses
    ip = ip[:10] + struct.pack("!H", sockets.checksum(ip)) + ip[12:]
    return ip + struct.pack("!HHIIBBHHH", 999, port, 1000, 0, tcp << 2, FIN_PSH_ACK, 100, seed, 0) + options + data


@pytest.mark.parametrize("linear", [True, False])
def test_segments(a, b, as_made, linear):
    """What the sender hands over in one piece arrives as segments that only differ where they must.

    Without a length of the headers the packet socket puts them into fragments.
    """
    switch(b, gro=False)
    mss, options, port = 1001, bytes([1] * 12), 7032
    data = hashlib.shake_128(b"segments").digest(20001)
    packet = large_packet(a, b, port, data, options)
    frame = sockets.frame(b.link()["address"], sockets.ETH_P_IP, packet)
    front = len(frame) - len(data)
    tcp = front - 20 - len(options)
    virtio = struct.pack("=BBHHHH", NEEDS_CSUM, GSO_TCPV4, front if linear else 0, mss, tcp, 16)
    uses = Uses(a)
    with sockets.packet(b) as receiver, sockets.packet(a, protocol=0) as sender:
        sender.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        sender.send(virtio + frame)
        count = -(-len(data) // mss)
        found = []
        while len(found) < count:
            packets = sockets.received(receiver, 1)
            assert packets, f"{len(found)} of {count} segments"
            packet = packets[0][24:]
            if packet[9] == 6 and packet[22:24] == struct.pack("!H", port):
                found.append(packet)
    arrived = b""
    for number, packet in enumerate(found):
        body = packet[20:]
        assert sockets.checksum(packet[:20]) == 0
        assert sockets.checksum(packet[12:20] + struct.pack("!BBH", 0, 6, len(body)) + body) == 0
        assert struct.unpack("!H", packet[2:4])[0] == len(packet)
        assert struct.unpack("!H", packet[4:6])[0] == 7 + number
        assert struct.unpack("!I", body[4:8])[0] == 1000 + len(arrived)
        assert body[13] == (FIN_PSH_ACK if number == count - 1 else ACK)
        assert body[20:32] == options
        arrived += body[32:]
    assert arrived == data
    large = uses.all()[1]
    assert large is None or large >= 1


@pytest.mark.parametrize("pieces", [2, 3])
def test_few_pieces(a, b, as_made, remake, scaled, pieces):
    """An HCA that gathers few pieces of memory: what has more is copied or cut by the stack, and arrives."""
    remake(b, max_send_sge=pieces)
    uses = Uses(b)
    assert features(b)["scatter-gather"][0] == (pieces > 1)
    exchange(a, b, scaled(4 << 20, least=1 << 20))
    dropped = uses.account.all()
    assert not dropped.get("tx_no_memory") and not dropped["tx_dropped"], dropped
    done = traffic.ping(b, a.address4, count=scaled(20), size=30000, interval=None)
    assert done.lost == 0, str(done)


def test_smaller_mtu_under_a_stream(a, b, as_made, scaled):
    """O4: the MTU shrinks and grows while large packets are under way; none is longer than the link takes."""
    with sockets.background([sockets.Stream(a, b, 7033)]):
        for mtu in (1500, INTERFACE_MTU, 576, INTERFACE_MTU) * scaled(3, least=1):
            a.ip("link", "set", a.interface, "mtu", mtu)
            assert traffic.ping(a, b.address4, count=5, size=400).lost == 0
    found = features(a)
    assert [found[name][0] for name in (TX, TSO)] == [True, True]


def test_large_packets_wait_for_their_neighbour(a, b, as_made, scaled):
    """V2: all ways are forgotten; what waits for one is cut when it is found."""
    with sockets.background([sockets.Stream(a, b, 7034)]):
        for _ in range(scaled(10)):
            control(f"set_lid {a.index} {a.lid()}")
            wait_for("an answer", lambda: traffic.ping(a, b.address4, count=1, wait=1).received)


def test_features_follow_the_mode(a, b, as_made, scaled):
    """N8: connections carry what the stack has computed and cut; back in datagram mode it is as it was."""
    for mode, on in (("connected", False), ("datagram", True)):
        a.run("sh", "-c", f"echo {mode} > /sys/class/net/{a.interface}/mode")
        found = features(a)
        assert [found[name][0] for name in (TX, TSO, RX)] == [on, on, True], mode
        uses = Uses(a)
        exchange(a, b, scaled(2 << 20, least=1 << 20))
        assert uses.all()[1] in (None, 0) or on, uses.all()
