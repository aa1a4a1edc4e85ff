# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Everybody who can make a packet: queueing disciplines, clones, packet sockets, fragments, offloads."""

import contextlib
import hashlib
import mmap
import os
import pathlib
import random
import re
import socket
import struct
import subprocess
import threading

import pytest
import sockets
import traffic
from lab import wait_for

VM = ["--topology", "rxe", "--nodes", "3"]
TRACING = pathlib.Path("/sys/kernel/tracing")
MAX_FRAGS = 17
PAGE = mmap.PAGESIZE
SO_ZEROCOPY = 60
SO_EE_ORIGIN_ZEROCOPY = 5
MSG_ZEROCOPY = 0x4000000
UDP_CORK = 1
SO_SNDBUFFORCE = 32


@pytest.fixture
def c(nodes):
    return nodes[2]


@pytest.fixture
def qdisc(a):
    """Sets the root queueing discipline of a's interface; the default returns in the end."""
    yield lambda *words: a.run("tc", "qdisc", "replace", "dev", a.interface, "root", *words)
    a.run("tc", "qdisc", "del", "dev", a.interface, "root", check=False)


@contextlib.contextmanager
def traced(event, condition):
    """Lines of a trace point for which the condition holds."""
    folder = TRACING / "events" / event
    lines = []
    (TRACING / "trace").write_text("")
    (folder / "filter").write_text(condition)
    (folder / "enable").write_text("1")
    try:
        yield lines
    finally:
        (folder / "enable").write_text("0")
        (folder / "filter").write_text("0")
        text = (TRACING / "trace").read_text()
        lines += [line for line in text.splitlines() if not line.startswith("#")]


def errors(node):
    """What misdelivered or damaged packets would be counted as."""
    return [sockets.snmp(node, *which) for which in (
        ("Ip", "InHdrErrors"), ("Ip", "InAddrErrors"), ("Ip", "InUnknownProtos"), ("Tcp", "InErrs"),
        ("Tcp", "InCsumErrors"), ("Udp", "InCsumErrors"), ("Udp", "NoPorts"))]


DISCIPLINES = {
    "tbf": ("tbf", "rate", "300mbit", "burst", "12kb", "latency", "200ms"),
    "netem": ("netem", "delay", "2ms", "limit", "5000"),
    "fq": ("fq",),
    "sfq": ("sfq", "perturb", "1"),
}


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_queueing_discipline_with_gso(nodes, a, b, c, qdisc, scaled, discipline):
    """B58: segments are made after the link header was written, some by the discipline; none goes astray."""
    qdisc(*DISCIPLINES[discipline])
    before = [errors(node) for node in nodes]
    account = sockets.Account(a)
    size = scaled(4 << 20, least=1 << 18)
    with traced("net/net_dev_queue", f'name == "{a.interface}" && len > 5000') as large:
        sockets.exchange([sockets.Stream(a, b, 7101), sockets.Stream(a, c, 7102), sockets.Stream(b, a, 7103),
                          sockets.Stream(a, b, 7104, b.address6)], size)
    assert large, "no packet was larger than the MTU: nothing was left to segment"
    assert [errors(node) for node in nodes] == before
    lost = {name: value for name, value in account.grown("tx_").items()
            if re.match("tx_(errors|dropped|failed|no_|over|runt|bad|neigh)", name)}
    assert not lost


@contextlib.contextmanager
def spare_device(node, name="spare0"):
    node.ip("link", "add", name, "mtu", "5000", "type", "dummy")
    try:
        node.ip("link", "set", name, "addrgenmode", "none", "up")
        yield name
    finally:
        node.ip("link", "del", name)


@contextlib.contextmanager
def mirrored(node, source, target):
    """Everything that leaves `source` leaves `target` too, as a clone of the same bytes."""
    node.run("tc", "qdisc", "add", "dev", source, "clsact")
    try:
        node.run("tc", "filter", "add", "dev", source, "egress", "matchall", "action", "mirred", "egress",
                 "mirror", "dev", target)
        yield
    finally:
        node.run("tc", "qdisc", "del", "dev", source, "clsact")


def test_mirrored_clones_are_not_written(a, b, scaled):
    """B58: what the driver sends is shared with a clone on another device; both have the right bytes."""
    count = scaled(400, least=40)
    assert traffic.ping(a, b.address4).lost == 0
    payloads = [struct.pack("!I", number) + os.urandom(900) for number in range(count)]
    with spare_device(a) as spare, sockets.udp(b, 7110) as receiver, sockets.udp(a) as sender, \
            sockets.packet(a, spare) as tap, mirrored(a, a.interface, spare):
        for payload in payloads:
            sender.sendto(payload, (b.address4, 7110))
        arrived = sockets.received(receiver, count)
        copies = sockets.received(tap, count, limit=3, settle=0.2)
        sockets.exchange([sockets.Stream(a, b, 7111)], scaled(8 << 20, least=1 << 18))
    assert sorted(arrived) == sorted(payloads)
    head = sockets.frame(b.link()["address"], sockets.ETH_P_IP, b"\x45")
    assert sorted(data[52:] for data in copies if data.startswith(head) and len(data) == 52 + 904) == sorted(payloads)


def test_clones_from_another_device(a, b, c, scaled):
    """B58: frames made elsewhere arrive if they have our form, and are counted if they have not."""
    count = scaled(200, least=20)
    account = sockets.Account(a)
    with spare_device(a) as spare, sockets.udp(b, 7120) as at_b, sockets.udp(c, 7120) as at_c, \
            sockets.packet(a, spare) as sender, mirrored(a, spare, a.interface):
        peers = [(node, sock, node.link()["address"]) for node, sock in ((b, at_b), (c, at_c))]
        for number in range(count):
            for node, _, address in peers:
                body = sockets.udp_packet(a.address4, node.address4, 7120, b"%s %d" % (node.name.encode(), number))
                sender.send(sockets.frame(address, sockets.ETH_P_IP, body))
        for node, sock, _ in peers:
            expected = sorted(b"%s %d" % (node.name.encode(), number) for number in range(count))
            assert sorted(sockets.received(sock, count)) == expected
        lost = account["tx_dropped"]
        for _ in range(count):
            sender.send(bytes.fromhex("33330000000102000000000186dd") + bytes(60))
        wait_for("the foreign frames to be counted", lambda: account["tx_dropped"] - lost >= count, 10)
    assert traffic.ping(a, b.address4).lost == 0


def test_tcpdump_is_readable(a, b):
    """tcpdump knows where the IP packets of an interface begin, whether they come or go."""
    text = {}
    assert traffic.ping(a, b.address4).lost == 0
    running = {node: node.start("tcpdump", "-n", "-l", "-i", node.interface, "-c", 6, "icmp", stderr=subprocess.PIPE)
               for node in (a, b)}
    for process in running.values():
        for line in process.stderr:
            if "listening on" in line:
                break
    assert traffic.ping(a, b.address4, count=5, size=200).lost == 0
    for node, process in running.items():
        text[node] = process.communicate(timeout=60)[0]
    for node in (a, b):
        assert f"IP {a.address4} > {b.address4}: ICMP echo request" in text[node], text[node]
        assert f"IP {b.address4} > {a.address4}: ICMP echo reply" in text[node], text[node]
        assert "length 208" in text[node], text[node]


def test_header_on_the_tap(a, b):
    """H4: a packet that arrives has 20 zero bytes and the encapsulation in front, one that leaves its target."""

    def is_request(data):
        """An ICMP echo request to the other node: there may be ARP too."""
        return data[20:22] == b"\x08\0" and data[33] == socket.IPPROTO_ICMP and data[40:45] == socket.inet_aton(b.address4) + b"\x08"

    assert traffic.ping(a, b.address4).lost == 0
    with sockets.packet(a, protocol=sockets.ETH_P_ALL) as at_a, sockets.packet(b) as at_b:
        assert traffic.ping(a, b.address4, count=1).lost == 0
        leaves, arrives = ([data for data in sockets.received(tap, 100, limit=1) if is_request(data)] for tap in (at_a, at_b))
    assert leaves[0][:24] == sockets.frame(b.link()["address"], sockets.ETH_P_IP, b"")
    assert arrives[0][:24] == bytes(20) + b"\x08\0\0\0"
    assert leaves[0][24:] == arrives[0][24:]


def test_datagram_with_address(a, b, c):
    """A packet socket that leaves the header to the driver's callback: each packet to its own address."""
    index = sockets.index_of(a)
    with sockets.udp(b, 7130) as at_b, sockets.udp(c, 7130) as at_c, \
            sockets.packet(a, kind=socket.SOCK_DGRAM, protocol=sockets.ETH_P_IP) as sender:
        for number in range(20):
            for node in (b, c):
                body = sockets.udp_packet(a.address4, node.address4, 7130, b"%s %d" % (node.name.encode(), number))
                sockets.send_to(sender, index, sockets.ETH_P_IP, node.link()["address"], body)
        for node, sock in ((b, at_b), (c, at_c)):
            assert sockets.received(sock, 20) == [b"%s %d" % (node.name.encode(), number) for number in range(20)]
        with pytest.raises(OSError):
            sockets.send_to(sender, index, sockets.ETH_P_IP, "00:01:02:03:04:05", b"short address" * 4)
    assert traffic.ping(a, b.address4).lost == 0


def test_runts(a, b):
    """Raw frames of 0 to 30 bytes get an errno, or are counted, or leave; the queue goes on."""
    whole = sockets.frame(b.link()["address"], sockets.ETH_P_IP, bytes(6))
    account = sockets.Account(a)
    accepted = 0
    with sockets.packet(a) as sender:
        for length in range(len(whole) + 1):
            try:
                sender.send(whole[:length])
                accepted += 1
            except OSError:
                assert length < 24
    wait_for("every frame to be counted",
             lambda: account["tx_sent_packets"] + account["tx_dropped"] >= accepted, 10)
    assert account["tx_failed"] == 0
    assert traffic.ping(a, b.address4, count=20).lost == 0


def test_datagrams_of_fragments(a, b):
    """B59: 0 to 17 fragments of other pages, sent from the page cache, are gathered in order."""
    piece = 200
    data = random.Random(17).randbytes((MAX_FRAGS + 1) * PAGE)
    with open("/run/pages", "wb+", buffering=0) as file, sockets.udp(a) as sender, sockets.udp(b, 7140) as receiver:
        file.write(data)
        sender.connect((b.address4, 7140))
        assert traffic.ping(a, b.address4).lost == 0
        for count in range(MAX_FRAGS + 1):
            expected = b"".join(data[at * PAGE + at : at * PAGE + at + piece] for at in range(count)) or b"none"
            with traced("net/net_dev_start_xmit", f'name == "{a.interface}" && protocol == 0x800') as lines:
                if count:
                    sender.setsockopt(socket.IPPROTO_UDP, UDP_CORK, 1)
                    for at in range(count):
                        assert os.sendfile(sender.fileno(), file.fileno(), at * PAGE + at, piece) == piece
                    sender.setsockopt(socket.IPPROTO_UDP, UDP_CORK, 0)
                else:
                    sender.send(expected)
                arrived = sockets.received(receiver, 1)
            assert [hashlib.sha256(part).hexdigest() for part in arrived] == [hashlib.sha256(expected).hexdigest()], count
            # Otherwise the pieces were copied on the way and this test shows nothing.
            assert any(f" data_len={count * piece} " in line for line in lines), (count, lines)


def test_sendfile(a, b, scaled):
    """B59: pieces of the page cache at odd offsets and of odd lengths."""
    chance = random.Random(3)
    data = chance.randbytes(1 << 20)
    digest = hashlib.sha256()
    with open("/run/pages", "wb+", buffering=0) as file:
        file.write(data)
        stream = sockets.Stream(a, b, 7150)
        for _ in range(scaled(600, least=60)):
            at = chance.randrange(len(data) - 70000)
            size = chance.choice((1, 7, 100, 1000, 4096, 20000, 65537))
            while size:
                done = os.sendfile(stream.sock.fileno(), file.fileno(), at, size)
                digest.update(data[at : at + done])
                at += done
                size -= done
    assert stream.finish() == digest.hexdigest()


def completions(sock):
    """Numbers of the sends whose pages the kernel has given back."""
    found = set()
    with contextlib.suppress(BlockingIOError):
        while True:
            _, control, _, _ = sock.recvmsg(1, 512, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
            for _, _, data in control:
                _, origin, _, _, _, low, high = struct.unpack_from("=IBBBBII", data)
                if origin == SO_EE_ORIGIN_ZEROCOPY:
                    found |= set(range(low, high + 1))
    return found


def test_zero_copy(a, b, scaled):
    """B59: the sender's own pages, in 1 to 17 pieces a message; all of them are given back."""
    chance = random.Random(5)
    memory = mmap.mmap(-1, 64 * PAGE)
    memory.write(chance.randbytes(len(memory)))
    view = memoryview(memory)
    digest = hashlib.sha256()
    stream = sockets.Stream(a, b, 7160)
    stream.sock.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
    sent, done = 0, set()
    for round in range(scaled(400, least=40)):
        pieces = []
        for _ in range(round % MAX_FRAGS + 1):
            at = chance.randrange(len(memory) - 300)
            pieces.append(view[at : at + chance.choice((1, 33, 100, 240))])
        whole = b"".join(pieces)
        done |= completions(stream.sock)
        count = stream.sock.sendmsg(pieces, [], MSG_ZEROCOPY)
        sent += 1
        digest.update(whole[:count])

    def given_back():
        done.update(completions(stream.sock))
        return len(done) == sent
    wait_for("the pages to be given back", given_back, 30)
    assert stream.finish() == digest.hexdigest()


def test_full_ring(a, b, scaled):
    """Senders are faster than the device: the queue stops when the ring is full, goes on, and every packet is counted."""
    count = scaled(8000, least=1000) // 4 * 4
    limit = f"/sys/class/net/{a.interface}/queues/tx-0/byte_queue_limits/limit_min"
    assert traffic.ping(a, b.address4).lost == 0
    # Otherwise byte queue limits stop the queue first, or a short queue loses packets.
    a.run("sh", "-c", f"echo 100000000 > {limit}")
    a.run("tc", "qdisc", "replace", "dev", a.interface, "root", "pfifo", "limit", str(2 * count))
    account = sockets.Account(a)
    try:
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(sockets.udp(a)) for _ in range(4)]
            for sock in socks:
                sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 1 << 20)
            threads = [threading.Thread(target=lambda sock=sock: [
                sock.sendto(b"x", (b.address4, 9)) for _ in range(count // len(socks))]) for sock in socks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wait_for("every packet to be sent", lambda: account["tx_sent_packets"] >= count, 20)
    finally:
        a.run("sh", "-c", f"echo 0 > {limit}")
        a.run("tc", "qdisc", "del", "dev", a.interface, "root")
    grown = account.grown("tx_")
    assert grown["tx_ring_full"] and grown["tx_queue_0_stops"] == grown["tx_ring_full"], grown
    assert not {"tx_timeouts", "tx_failed", "tx_no_memory", "tx_dropped"} & set(grown), grown
    assert traffic.ping(a, b.address4, count=20).lost == 0


@pytest.mark.parametrize("known", ["link address known", "nothing known"])
def test_first_datagram_is_fragmented(a, b, scaled, known):
    """All 15 fragments of 60 000 bytes wait for the way to a neighbour, and leave."""
    with sockets.udp(a) as sender, sockets.udp(b, 7170) as receiver:
        for round in range(scaled(10)):
            a.ip("link", "set", a.interface, "down")
            a.ip("link", "set", a.interface, "up")
            wait_for("the carrier", lambda: a.carrier() and a.link()["qdisc"] != "noop")
            if known != "nothing known":
                a.ip("neigh", "replace", b.address4, "lladdr", b.link()["address"], "nud", "permanent", "dev", a.interface)
            account = sockets.Account(a)
            data = random.Random(round).randbytes(60000)
            sender.sendto(data, (b.address4, 7170))
            arrived = sockets.received(receiver, 1)
            assert [len(part) for part in arrived] == [len(data)], account.grown()
            assert arrived[0] == data
    a.ip("neigh", "flush", "dev", a.interface, "nud", "permanent")


def test_offloads_change_under_traffic(a, b, scaled):
    """B61: whatever is switched, the bytes arrive and no checksum is wrong. Nothing is offloaded on rxe."""
    text = a.run("ethtool", "-k", a.interface).stdout
    assert "rx-checksumming: off [fixed]" in text and "tcp-segmentation-offload: off" in text
    before = [errors(node) for node in (a, b)]
    with sockets.background([sockets.Stream(a, b, 7180), sockets.Stream(b, a, 7181)]):
        chance = random.Random(6)
        for _ in range(scaled(12, least=4)):
            for node in (a, b):
                words = [word for feature in ("rx", "tx", "sg", "gso", "gro", "tso")
                         for word in (feature, chance.choice(("on", "off")))]
                node.run("ethtool", "-K", node.interface, *words, check=False)
    for node in (a, b):
        node.run("ethtool", "-K", node.interface, "gso", "on", "gro", "on", "sg", "on", check=False)
    assert [errors(node) for node in (a, b)] == before
    assert re.search("^scatter-gather: on", a.run("ethtool", "-k", a.interface).stdout, re.M)


def test_corrupted_packets_are_dropped(a, b, qdisc, scaled):
    """B61: the receiver looks at every checksum itself. One bit of each packet is wrong."""
    count = scaled(400, least=100)
    assert traffic.ping(a, b.address4).lost == 0
    payloads = {struct.pack("!I", number) + bytes(1200) for number in range(count)}
    before = sockets.snmp(b, "Udp", "InCsumErrors")
    with sockets.udp(a) as sender, sockets.udp(b, 7190) as receiver:
        qdisc("netem", "corrupt", "100%", "limit", str(2 * count))
        for payload in payloads:
            sender.sendto(payload, (b.address4, 7190))
        # The checksum is looked at when the datagram is read. A bit of the link header that means
        # nothing may be the wrong one: then the packet is whole.
        assert set(sockets.received(receiver, count, limit=3)) <= payloads
    assert sockets.snmp(b, "Udp", "InCsumErrors") - before > count // 2
    a.run("tc", "qdisc", "del", "dev", a.interface, "root")
    assert traffic.ping(a, b.address4, count=20).lost == 0
