# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Groups: datagrams reach members and nobody else, and memberships survive what happens below."""

import contextlib
import socket
import struct
import time

import pytest
import sockets
import traffic
from lab import ETHERNET_MTU, INTERFACE_MTU, wait_for

VM = ["--topology", "rxe", "--nodes", "3"]
GROUP4, GROUP6 = "239.1.2.3", "ff05::1:2:3"
PORT = 7300
MLD_REPORT = 143
IGMP = 2


@pytest.fixture
def c(nodes):
    return nodes[2]


class Member:
    """A socket that may join a group on the node's interface."""

    def __init__(self, node, group, port=PORT):
        self.node, self.group = node, group
        family = socket.AF_INET6 if ":" in group else socket.AF_INET
        self.sock = sockets.udp(node, port, family)
        index = sockets.index_of(node)
        if family == socket.AF_INET6:
            self.level, self.options = socket.IPPROTO_IPV6, (socket.IPV6_JOIN_GROUP, socket.IPV6_LEAVE_GROUP)
            self.request = socket.inet_pton(family, group) + struct.pack("=I", index)
        else:
            self.level, self.options = socket.IPPROTO_IP, (socket.IP_ADD_MEMBERSHIP, socket.IP_DROP_MEMBERSHIP)
            self.request = socket.inet_aton(group) + bytes(4) + struct.pack("=i", index)

    def join(self):
        self.sock.setsockopt(self.level, self.options[0], self.request)
        return self

    def leave(self):
        self.sock.setsockopt(self.level, self.options[1], self.request)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()


def sender(node, group, loop=True):
    """A socket that sends to groups through the node's interface."""
    index = sockets.index_of(node)
    if ":" in group:
        sock = sockets.udp(node, family=socket.AF_INET6)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 4)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, int(loop))
    else:
        sock = sockets.udp(node)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, bytes(8) + struct.pack("=i", index))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 4)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, int(loop))
    return sock


def send(sock, group, count, word=b"to the group"):
    sent = [b"%s %d" % (word, number) for number in range(count)]
    for data in sent:
        sock.sendto(data, (group, PORT))
    return sent


def heard(sock, count, **kwargs):
    """What `sockets.received` says, without probes of `joined` that come late."""
    return [data for data in sockets.received(sock, count, **kwargs) if data != b"probe"]


def joined(node, group, member):
    """Waits until the driver has joined or left: one datagram after the other gets through, or does not."""
    with sender(node, group) as sock:
        end = time.monotonic() + 20
        while True:
            sock.sendto(b"probe", (group, PORT))
            if sockets.received(member.sock, 1, limit=0.2):
                break
            assert time.monotonic() < end, f"{member.node} gets nothing sent to {group}"
    time.sleep(0.1)
    sockets.nothing_waits(member.sock)


@pytest.mark.parametrize("group", [GROUP4, GROUP6])
def test_members_only(nodes, a, b, c, scaled, group):
    """A node that is no member sends; the member gets everything, the others' interfaces nothing."""
    count = scaled(200, least=20)
    with Member(b, group) as member, Member(c, group) as other, sender(a, group) as sock:
        member.join()
        joined(a, group, member)
        at_b, at_c = sockets.Account(b), sockets.Account(c)
        sent = send(sock, group, count)
        assert heard(member.sock, count, settle=0.2) == sent
        assert sockets.received(other.sock, 1, limit=0.3) == []
        assert count <= at_b["rx_multicast_packets"] < count + 20
        # Reports and solicitations of the stacks go on.
        assert at_c["rx_delivered_packets"] < 20, at_c.grown("rx_")
        other.join()
        joined(a, group, other)
        sockets.nothing_waits(member.sock)
        sent = send(sock, group, count)
        for each in (member, other):
            assert heard(each.sock, count, settle=0.2) == sent


@pytest.mark.parametrize("group", [GROUP4, GROUP6])
def test_leaving(a, b, c, scaled, group):
    """Who leaves gets nothing more, whoever else stays; who joins again gets everything again."""
    count = scaled(40, least=10)
    with Member(b, group) as leaving, Member(c, group) as staying, sender(a, group) as sock:
        leaving.join()
        staying.join()
        joined(a, group, staying)
        for _ in range(scaled(6)):
            joined(a, group, leaving)
            leaving.leave()
            at_b = sockets.Account(b)

            def quiet():
                before = at_b["rx_multicast_packets"]
                send(sock, group, count, b"is anybody there")
                sockets.received(staying.sock, count)
                time.sleep(0.1)
                return at_b["rx_multicast_packets"] - before < count // 2

            wait_for("the group to be left", quiet, 10)
            sockets.nothing_waits(staying.sock)
            sockets.nothing_waits(leaving.sock)
            sent = send(sock, group, count)
            assert sockets.received(staying.sock, count, settle=0.1) == sent
            assert sockets.received(leaving.sock, 1, limit=0.2) == []
            leaving.join()


@pytest.mark.parametrize("group", [GROUP4, GROUP6])
def test_own_datagrams_do_not_come_back(a, b, scaled, group):
    """B33, B67: a member that sends hears itself as often as its own stack wants: never, or once."""
    count = scaled(100, least=10)
    with Member(a, group) as own, Member(b, group) as peer:
        own.join()
        peer.join()
        joined(a, group, peer)
        joined(b, group, own)
        for loop in (False, True):
            sockets.nothing_waits(own.sock)
            sockets.nothing_waits(peer.sock)
            account = sockets.Account(a)
            with sender(a, group, loop) as sock:
                sent = send(sock, group, count)
            assert heard(peer.sock, count, settle=0.2) == sent
            assert heard(own.sock, count if loop else 1, limit=2, settle=0.2) == (sent if loop else [])
            # rxe gives the sender a copy; the driver knows its own.
            wait_for("the copies", lambda: account["rx_own_echo"] >= count)
        assert traffic.ping(a, b.address4).lost == 0


def test_membership_reports(a, b, c):
    """IGMP and MLD work through the groups: reports of a member arrive at a node that listens for them."""
    with Member(c, "224.0.0.22").join() as listener4, Member(c, "ff02::16").join() as listener6, sockets.packet(c) as tap, \
            Member(b, GROUP4) as four, Member(b, GROUP6) as six:
        joined(b, "224.0.0.22", listener4)
        joined(b, "ff02::16", listener6)
        four.join()
        six.join()
        wanted = {"IGMP": socket.inet_aton(GROUP4), "MLD": socket.inet_pton(socket.AF_INET6, GROUP6)}

        def heard():
            for data in sockets.received(tap, 100, limit=0.3):
                ip = data[24:]
                if data[20:22] == b"\x08\0" and ip[9] == IGMP and wanted.get("IGMP", b"-" * 9) in ip[20:]:
                    del wanted["IGMP"]
                if data[20:22] == b"\x86\xdd" and ip[6] == 0 and ip[48:49] == bytes([MLD_REPORT]) and \
                        wanted.get("MLD", b"-" * 9) in ip[48:]:
                    del wanted["MLD"]
            return not wanted

        wait_for(f"reports about {GROUP4} and {GROUP6}", heard, 20)


@pytest.mark.parametrize("group", [GROUP4, GROUP6])
def test_groups_survive_down_and_up(a, b, scaled, group):
    """The membership of a socket outlives the interface's being down; the driver joins again."""
    with Member(b, group) as member, sender(a, group) as sock:
        member.join()
        joined(a, group, member)
        for _ in range(scaled(6)):
            b.ip("link", "set", b.interface, "down")
            b.ip("link", "set", b.interface, "up")
            wait_for("the carrier", b.carrier)
            joined(a, group, member)
            sent = send(sock, group, 20)
            assert sockets.received(member.sock, 20, settle=0.1) == sent
    b.ip("addr", "replace", f"{b.address6}/64", "dev", b.interface)


def test_groups_survive_an_ethernet_without_ipv6(a, b, scaled):
    """rxe.md 0.4: below 1280 the Ethernet's IPv6 goes, and all memberships with it; they are joined anew."""
    with Member(b, GROUP4) as member, sender(a, GROUP4) as sock:
        member.join()
        joined(a, GROUP4, member)
        for _ in range(scaled(4)):
            b.ip("link", "set", b.ethernet, "mtu", "1200")
            wait_for("the carrier to go", lambda: not b.carrier())
            b.ip("link", "set", b.ethernet, "mtu", ETHERNET_MTU)
            wait_for("the carrier to return", b.carrier)
            wait_for("the MTU to return", lambda: b.link()["mtu"] == INTERFACE_MTU)
            joined(a, GROUP4, member)
            sent = send(sock, GROUP4, 20)
            assert sockets.received(member.sock, 20, settle=0.1) == sent
    b.ip("addr", "replace", f"{b.address6}/64", "dev", b.interface)
    b.wait_ready()
    assert traffic.ping(a, b.address4).lost == 0
    assert traffic.ping(a, b.address6).lost == 0


def test_many_groups(a, b, scaled):
    """Hundreds of groups at once: each is joined, and all are left."""
    groups = [f"239.2.{number // 200}.{number % 200 + 1}" for number in range(scaled(200, least=40))]
    with contextlib.ExitStack() as stack:
        before = b.run("cat", "/proc/net/dev_mcast").stdout.count(b.interface)
        members = []
        index = struct.pack("=i", sockets.index_of(b))
        for at in range(0, len(groups), 20):  # a socket joins 20 groups at most
            members.append(stack.enter_context(Member(b, groups[at], PORT + at)))
            for group in groups[at : at + 20]:
                members[-1].request = socket.inet_aton(group) + bytes(4) + index
                members[-1].join()
        sock = stack.enter_context(sender(a, GROUP4))
        missing = set(groups)

        def complete():
            for at, member in enumerate(members):
                for group in groups[20 * at : 20 * at + 20]:
                    if group in missing:
                        sock.sendto(group.encode(), (group, PORT + 20 * at))
            for member in members:
                missing.difference_update(data.decode() for data in sockets.received(member.sock, 20, limit=0.1))
            return not missing

        wait_for("all groups to be joined", complete, 60)
    wait_for("all groups to be left",
             lambda: b.run("cat", "/proc/net/dev_mcast").stdout.count(b.interface) == before, 20)
    assert traffic.ping(a, b.address4).lost == 0
