# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Packets of every size and kind between two nodes, none lost, none changed."""

import os
import re
import socket

import pytest
import sockets
import traffic
from lab import wait_for
from test_multicast import sender as group_sender
from test_senders import traced

VM = ["--topology", "rxe"]
MTU = 4092
IPV4_HEADERS = 28
IPV6_HEADERS = 48


@pytest.mark.parametrize("size", [1, 1000, MTU - IPV4_HEADERS])
def test_thousand_pings(a, b, scaled, size):
    done = traffic.ping(a, b.address4, count=scaled(1000), size=size, options=("-M", "do"))
    assert (done.lost, done.duplicates) == (0, 0), str(done)


@pytest.mark.parametrize("size", [1, MTU - IPV6_HEADERS])
def test_thousand_pings_over_ipv6(a, b, scaled, size):
    done = traffic.ping(b, a.address6, count=scaled(1000), size=size, options=("-M", "do"))
    assert (done.lost, done.duplicates) == (0, 0), str(done)


def test_larger_than_the_mtu_is_refused(a, b):
    done = a.run("ping", "-c", "1", "-W", "1", "-M", "do", "-s", MTU - IPV4_HEADERS + 1, b.address4, check=False)
    assert done.returncode and "message too long" in done.stdout.lower()


@pytest.mark.parametrize("family", [4, 6])
def test_fragmented_ping(a, b, scaled, family):
    target = b.address4 if family == 4 else b.address6
    # One at a time: the kernel's own socket has room for four replies of this size.
    done = traffic.ping(a, target, count=scaled(100), size=30000, interval=None)
    assert done.lost == 0, str(done)


def test_neighbour_discovery(a, b):
    """Address detection is over by now; neighbours are found from nothing, both ways."""
    for node, peer in ((a, b), (b, a)):
        a.forget_neighbours()
        b.forget_neighbours()
        for target in (peer.address4, peer.address6):
            assert traffic.ping(node, target).lost == 0
    rows = a.ip("neigh", "show", "dev", a.interface).stdout
    assert rows.count(b.link()["address"]) >= 2, rows


def test_equal_queue_pair_numbers_and_lids(a, b):
    """B33: neither LID nor QPN tells two ends of a RoCE wire apart."""
    assert a.qpn() == b.qpn() and a.lid() == b.lid() == 0
    test_neighbour_discovery(a, b)


def test_traffic_crosses_the_wire(a, b, scaled):
    """B70: the ends are in two namespaces, and every packet between them goes over the Ethernet below."""
    count = scaled(200, least=20)
    before = [node.statistics(node.ethernet) for node in (a, b)]
    assert traffic.ping(a, b.address4, count=count, size=1000).lost == 0
    for node, old in zip((a, b), before):
        new = node.statistics(node.ethernet)
        for side in ("rx", "tx"):
            assert new[side]["packets"] - old[side]["packets"] >= count, (node, side)
            assert new[side]["bytes"] - old[side]["bytes"] >= count * 1000, (node, side)


def test_broadcast(a, b, scaled):
    b.sysctl("net.ipv4.icmp_echo_ignore_broadcasts", 0)
    count = scaled(100, least=10)
    done = traffic.ping(a, "10.0.0.255", count=count, options=("-b",))
    assert done.replies == count, str(done)


def test_multicast(a, b, scaled):
    """Both nodes answer to ff02::1, the sender too."""
    count = scaled(100, least=10)
    done = traffic.ping(a, f"ff02::1%{a.interface}", count=count, responders=2)
    assert done.replies == 2 * count, str(done)


def test_packet_types(a, b):
    """A packet is for the host, for everybody or for a group, as its destination says; copied or not."""
    kinds = {"one": socket.PACKET_HOST, "everybody": socket.PACKET_BROADCAST,
             "some": socket.PACKET_MULTICAST, "six": socket.PACKET_MULTICAST}
    sizes = (40, 3000)
    assert traffic.ping(a, b.address4).lost == 0
    with sockets.packet(b) as tap, sockets.udp(a) as unicast, group_sender(a, "224.0.0.1") as group4, \
            group_sender(a, "ff02::1") as group6:
        unicast.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for size in sizes:
            for sock, target, word in ((unicast, b.address4, "one"), (unicast, "10.0.0.255", "everybody"),
                                       (group4, "224.0.0.1", "some"), (group6, "ff02::1", "six")):
                sock.sendto(f"{size} for {word}".encode().rjust(size, b"\0"), (target, 7035))
        found = {}

        def complete():
            tap.settimeout(5)
            try:
                data, origin = tap.recvfrom(65536)
            except TimeoutError:
                return False
            if origin[2] != socket.PACKET_OUTGOING and (match := re.search(rb"\0(\d+) for (\w+)$", data)):
                found[int(match[1]), match[2].decode()] = origin[2]
            return len(found) == len(sizes) * len(kinds)

        wait_for("all kinds of packets", complete, 20)
    assert found == {(size, word): kind for size in sizes for word, kind in kinds.items()}


# What a socket buffer needs besides its bytes, at least: the structure and the shared one at its end.
OVERHEAD = 232 + 320


@pytest.mark.parametrize("size", [1, 150, 1000, MTU - IPV4_HEADERS])
def test_memory_and_queue_of_received_packets(a, b, size):
    """The stack is told how much memory a packet takes, and which queue it came by."""
    count, page = 20, 4096
    assert traffic.ping(a, b.address4).lost == 0
    with sockets.udp(b, 7036) as receiver, sockets.udp(a) as sender, \
            traced("net/napi_gro_receive_entry", f'name == "{b.interface}"') as lines:
        for _ in range(count):
            sender.sendto(bytes(size), (b.address4, 7036))
        assert len(sockets.received(receiver, count)) == count
    packets = [{name: int(value) for name, value in re.findall(r" (\w+)=(\d+)\b", line)} for line in lines]
    packets = [packet for packet in packets if packet["len"] == size + IPV4_HEADERS]
    assert len(packets) >= count, lines
    for packet in packets:
        assert packet["queue_mapping"] == 1, packet  # the first queue; 0 says that it is not known
        assert packet["truesize"] >= packet["len"] + OVERHEAD, packet
        assert packet["truesize"] <= packet["len"] + OVERHEAD + page, packet
        assert packet["truesize"] >= page or not packet["data_len"], packet


def test_packet_steering(a, b, scaled):
    """RPS spreads what the interface receives over the CPUs, by flow, and loses nothing."""
    flows, each = 32, scaled(20)
    masks = f"/sys/class/net/{b.interface}/queues/rx-0/rps_cpus"

    def steered():
        rows = b.run("cat", "/proc/net/softnet_stat").stdout.splitlines()
        return sum(int(row.split()[9], 16) for row in rows)

    old = b.run("cat", masks).stdout.strip()
    b.run("sh", "-c", f"echo {(1 << os.cpu_count()) - 1:x} > {masks}")
    try:
        assert traffic.ping(a, b.address4).lost == 0
        before = steered()
        with sockets.udp(b, 7037) as receiver:
            for flow in range(flows):
                with sockets.udp(a) as sender:
                    for number in range(each):
                        sender.sendto(b"%d %d" % (flow, number), (b.address4, 7037))
            arrived = sockets.received(receiver, flows * each)
        assert set(arrived) == {b"%d %d" % (flow, number) for flow in range(flows) for number in range(each)}
        assert steered() > before
    finally:
        b.run("sh", "-c", f"echo {old} > {masks}")


@pytest.mark.parametrize("family", [4, 6])
def test_tcp_both_ways_at_once(a, b, scaled, family):
    """The bytes that arrive are the bytes that were sent.

    B66: rxe holds the CQ's lock when it says that something completed. A handler that polled or armed
    the queue would hang here, and lockdep would say why.
    """
    size = scaled(32 << 20, least=1 << 20)
    addresses = (b.address4, a.address4) if family == 4 else (b.address6, a.address6)
    transfers = [
        traffic.Transfer(a, b, size, port=7001, address=addresses[0]),
        traffic.Transfer(b, a, size, port=7002, address=addresses[1]),
    ]
    for transfer in transfers:
        transfer.verify()


def test_iperf_tcp(a, b):
    with traffic.Iperf(b) as iperf:
        end = iperf.run(a, "--bidir", seconds=5)
    for key in ("sum_received", "sum_received_bidir_reverse"):
        assert traffic.mbit(end[key]) > 0.1, end


def test_iperf_udp(a, b):
    """A rate well below what the wire carries: nothing may be lost."""
    with traffic.Iperf(b) as iperf:
        end = iperf.run(a, "-u", "-b", "2M", "-l", "1400", "-w", "4M", blocks=600)
    assert (end["sum"]["packets"], end["sum"]["lost_packets"]) == (600, 0), end["sum"]


def test_nothing_was_dropped(a, b, scaled):
    """Under load without overload the interface itself counts no error and no drop."""
    before = [node.statistics() for node in (a, b)]
    traffic.Transfer(a, b, scaled(8 << 20, least=1 << 20)).verify()
    for node, old in zip((a, b), before):
        new = node.statistics()
        for side in ("rx", "tx"):
            assert (new[side]["errors"], new[side]["dropped"]) == (old[side]["errors"], old[side]["dropped"])
