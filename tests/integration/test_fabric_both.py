# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Our driver and the stock one on one fabric: every pair understands each other. Even nodes are ours."""

import itertools
import os
import re
import socket

import pytest
import sockets
import traffic
from fabric import ACTIVE
from lab import MODULES, run, wait_for
from test_multicast import PORT, Member, sender
from test_rdma_cm import ask

VM = ["--topology", "fabric", "--nodes", "4", "--driver", "both"]
PAIRS = list(itertools.permutations(range(4), 2))


@pytest.fixture(autouse=True)
def anomalies(lab):
    yield
    lab.check_anomalies()


def test_who_is_who(nodes):
    for node in nodes:
        said = node.run("ethtool", "-i", node.interface).stdout
        assert ("driver: ipoib_rs" in said) == (node.index % 2 == 0), said


def test_what_ethtool_says(nodes):
    """E1, E5: both say the same."""
    def settings(node):
        text = node.run("ethtool", node.interface).stdout
        return [line for line in text.splitlines() if re.search("Speed|Duplex|Port|PHYAD|Auto|detected", line)]

    for node in nodes:
        wait_for("the carrier", node.carrier)
        said = node.run("ethtool", "-i", node.interface).stdout
        assert f"bus-info: {os.path.basename(os.readlink(f'/sys/class/infiniband/{node.rdma}/device'))}\n" in said
        assert settings(node) == settings(nodes[1]) and any("Mb/s" in line for line in settings(node)), settings(node)
        assert int(node.sysfs("speed")) > 0


@pytest.mark.parametrize("size", [1, 4064])
def test_pings(nodes, scaled, size):
    for i, j in PAIRS:
        done = traffic.ping(nodes[i], nodes[j].address4, count=scaled(50), size=size, options=("-M", "do"))
        assert (done.lost, done.duplicates) == (0, 0), (i, j, str(done))
        done = traffic.ping(nodes[i], nodes[j].address6, count=scaled(50), size=min(size, 4044))
        assert (done.lost, done.duplicates) == (0, 0), (i, j, str(done))


def test_requests_of_the_connection_manager(nodes):
    for i, j in PAIRS:
        for address in (nodes[j].address4, nodes[j].address6):
            assert ask(nodes[i], nodes[j], address)


def test_neighbours_are_found_anew(nodes, scaled):
    """ARP and ND both ways, by every pair."""
    for _ in range(scaled(5)):
        for node in nodes:
            node.forget_neighbours()
        for i, j in PAIRS:
            for target in (nodes[j].address4, nodes[j].address6):
                assert traffic.ping(nodes[i], target, count=1, wait=10).received, (i, j)


def test_broadcast(nodes, scaled):
    for node in nodes:
        node.sysctl("net.ipv4.icmp_echo_ignore_broadcasts", 0)
    count = scaled(50, least=10)
    for node in nodes[:2]:
        done = traffic.ping(node, "10.0.0.255", count=count, interval=0.02, responders=4, options=("-b",))
        assert done.replies == 4 * count, str(done)


def test_multicast(nodes, scaled):
    count = scaled(50, least=10)
    for node in nodes[:2]:
        done = traffic.ping(node, f"ff02::1%{node.interface}", count=count, interval=0.02, responders=4)
        assert done.replies == 4 * count, str(done)


@pytest.mark.parametrize("i, j", [(0, 1), (1, 0), (0, 2), (2, 3)])
def test_verified_transfer(nodes, scaled, i, j):
    traffic.Transfer(nodes[i], nodes[j], scaled(16 << 20, least=1 << 20)).verify()
    traffic.Transfer(nodes[i], nodes[j], scaled(16 << 20, least=1 << 20), address=nodes[j].address6).verify()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_verified_datagrams(nodes, scaled, family):
    """Every byte, by every pair, of short and long ones and of fragments."""
    for i, j in PAIRS:
        sockets.verify_datagrams(nodes[i], nodes[j], 7040, [1, 2, 255, 4000, 20001, 60001] * scaled(4, least=1), family)


@pytest.mark.parametrize("which", [1, 2])
def test_one_comes_back(nodes, scaled, which):
    """R4391-9.4: an HCA (not the subnet manager's) is unplugged and comes back with another queue pair: peers of either kind find it."""
    node = nodes[which]
    for _ in range(scaled(4)):
        node.delete_rdma()
        node.add_rdma()
        wait_for(f"{node.rdma} to be active", lambda: node.state() == "ACTIVE")
        node.adopt_interface()
        node.wait_ready()
        for peer in nodes:
            if peer is not node:
                peer.forget_neighbours()
                wait_for(f"{node} to answer {peer}",
                         lambda: traffic.ping(peer, node.address4, count=1, wait=1).received, 30)


def everybody_answers(nodes):
    """By every pair, with nobody remembering anybody."""
    for node in nodes:
        node.forget_neighbours()
    for i, j in PAIRS:
        for target in (nodes[j].address4, nodes[j].address6):
            wait_for(f"{target} to answer {nodes[i]}",
                     lambda: traffic.ping(nodes[i], target, count=1, wait=1).received, 30)


@pytest.mark.parametrize("group", ["239.4.4.4", "ff05::4:4"])
def test_groups_of_both(nodes, scaled, group):
    """R4391-4.a, R4391-4.b, R4391-10.f: members of either kind get what either kind sends, others do not."""
    count = scaled(50, least=10)
    ours, stock = nodes[2], nodes[3]
    with Member(ours, group).join() as first, Member(stock, group).join() as second, \
            Member(nodes[1], group) as other:
        for node in nodes[:2]:
            with sender(node, group) as sock:
                for member in (first, second):
                    def arrives():
                        sock.sendto(b"probe", (group, PORT))
                        return sockets.received(member.sock, 1, limit=0.2)

                    wait_for(f"{member.node} to get what {node} sends", arrives, 20)
                for member in (first, second):
                    sockets.received(member.sock, 1000, limit=0.5)
                sent = [b"%d" % number for number in range(count)]
                for data in sent:
                    sock.sendto(data, (group, PORT))
                for member in (first, second):
                    assert sockets.received(member.sock, count, settle=0.1) == sent, (node, member.node)
        assert sockets.received(other.sock, 1, limit=0.2) == []


@pytest.mark.parametrize("i, j", [(0, 1), (1, 0)])
def test_iperf(nodes, i, j):
    """TCP both ways at once, and UDP at a rate that loses nothing."""
    with traffic.Iperf(nodes[j]) as iperf:
        end = iperf.run(nodes[i], "--bidir", seconds=3)
        for key in ("sum_received", "sum_received_bidir_reverse"):
            assert traffic.mbit(end[key]) > 0.1, end
        end = iperf.run(nodes[i], "-u", "-b", "2M", "-l", "1400", "-w", "4M", blocks=400)
        assert (end["sum"]["packets"], end["sum"]["lost_packets"]) == (400, 0), end["sum"]


@pytest.mark.parametrize("kind", ["rs", "stock"])
def test_one_driver_is_reloaded(lab, nodes, scaled, kind):
    """All interfaces of one kind get new queue pairs; the other kind finds them by itself."""
    affected = nodes[0::2] if kind == "rs" else nodes[1::2]
    for _ in range(scaled(2, least=1)):
        run("rmmod", MODULES[kind], timeout=60)
        if kind == "rs":
            lab.load()
        else:
            run("modprobe", MODULES["stock"])
        for node in affected:
            node.adopt_interface()
        for node in affected:
            node.wait_ready()
        everybody_answers(nodes)


def test_either_moves_to_another_lid(lab, nodes):
    """B19, R4391-9.1.2.a: the manager gives one of each kind another LID; both kinds find both there."""
    moved = {nodes[1]: 0x61, nodes[2]: 0x62}
    for i, j in PAIRS:
        assert traffic.ping(nodes[i], nodes[j].address4).received
    lab.manager.kill()
    records = lab.manager.folder / "guid2lid"
    text = records.read_text()
    for node, lid in moved.items():
        text = re.sub(rf"^({node.port_guid():#018x}) .*$", rf"\1 {lid:#06x} {lid:#06x}", text, flags=re.M)
    records.write_text(text)
    lab.manager.start()
    for node, lid in moved.items():
        wait_for(f"the new LID of {node}", lambda: node.lid() == lid, ACTIVE[lab.flavour])
    lab.wait_wire()
    for i, j in PAIRS:
        for target in (nodes[j].address4, nodes[j].address6):
            wait_for(f"{target} to answer {nodes[i]}",
                     lambda: traffic.ping(nodes[i], target, count=1, wait=1).received, 90)
    traffic.Transfer(nodes[1], nodes[2], 1 << 20).verify()
    traffic.Transfer(nodes[2], nodes[1], 1 << 20).verify()
