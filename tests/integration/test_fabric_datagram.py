# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The stock driver on the test fabric: packets of every kind, and partitions that do not see each other.

What holds here of the stock driver may be asked of ours.
"""

import contextlib
import re

import pytest
import traffic
from fabric import DEBUG, control, counters
from lab import wait_for

VM = ["--topology", "fabric", "--nodes", "3", "--driver", "stock"]
MTU = 4092
IPV4_HEADERS = 28
IPV6_HEADERS = 48


@pytest.fixture(autouse=True)
def anomalies(lab):
    """No test may leave the fabric with something that hardware would not forgive."""
    yield
    lab.check_anomalies()


@pytest.mark.parametrize("size", [1, 1000, MTU - IPV4_HEADERS])
def test_pings(a, b, scaled, size):
    done = traffic.ping(a, b.address4, count=scaled(1000), size=size, options=("-M", "do"))
    assert (done.lost, done.duplicates) == (0, 0), str(done)


@pytest.mark.parametrize("size", [1, MTU - IPV6_HEADERS])
def test_pings_over_ipv6(a, b, scaled, size):
    done = traffic.ping(b, a.address6, count=scaled(1000), size=size, options=("-M", "do"))
    assert (done.lost, done.duplicates) == (0, 0), str(done)


def test_every_pair(nodes, scaled):
    for node in nodes:
        for peer in nodes:
            if peer is not node:
                for target in (peer.address4, peer.address6):
                    done = traffic.ping(node, target, count=scaled(20))
                    assert (done.lost, done.duplicates) == (0, 0), str(done)


@pytest.mark.parametrize("family", [4, 6])
def test_fragmented_ping(a, b, scaled, family):
    target = b.address4 if family == 4 else b.address6
    done = traffic.ping(a, target, count=scaled(100), size=30000, interval=None)
    assert done.lost == 0, str(done)


def test_larger_than_the_mtu_is_refused(a, b):
    done = a.run("ping", "-c", "1", "-W", "1", "-M", "do", "-s", MTU - IPV4_HEADERS + 1, b.address4, check=False)
    assert done.returncode and "message too long" in done.stdout.lower()


def test_broadcast(nodes, scaled):
    """Everybody answers, the sender too."""
    for node in nodes:
        node.sysctl("net.ipv4.icmp_echo_ignore_broadcasts", 0)
    count = scaled(50, least=10)
    done = traffic.ping(nodes[0], "10.0.0.255", count=count, interval=0.02, responders=3, options=("-b",))
    assert done.replies == 3 * count, str(done)


def test_multicast(nodes, scaled):
    count = scaled(50, least=10)
    done = traffic.ping(nodes[0], f"ff02::1%{nodes[0].interface}", count=count, interval=0.02, responders=3)
    assert done.replies == 3 * count, str(done)


def test_multicast_reaches_members_only(nodes):
    """A group that one of two others has joined: the switch sends it nowhere else."""
    sender, member, other = nodes
    group = "ff15::1234"
    member.ip("addr", "add", f"{group}/128", "dev", member.interface, "autojoin")

    def arrived(node):
        return int(node.port("counters/multicast_rcv_packets"))

    def send(count, interval):
        sender.run("ping", "-6", "-c", count, "-i", interval, "-W", "1", "-I", sender.interface, group, check=False)

    def some_come():
        """The first packets find the group, and the switch is told; those that are counted come after."""
        before = arrived(member)
        send(5, 0.2)
        return arrived(member) - before >= 5

    try:
        wait_for("the way to the member", some_come)
        before = {node: arrived(node) for node in (member, other)}
        send(50, 0.01)
        assert arrived(member) - before[member] >= 50
        assert arrived(other) - before[other] < 10
    finally:
        member.ip("addr", "del", f"{group}/128", "dev", member.interface)


@pytest.mark.parametrize("family", [4, 6])
def test_tcp_both_ways_at_once(a, b, scaled, family):
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
    with traffic.Iperf(b) as iperf:
        end = iperf.run(a, "-u", "-b", "2M", "-l", "1400", "-w", "4M", blocks=600)
    assert (end["sum"]["packets"], end["sum"]["lost_packets"]) == (600, 0), end["sum"]


@contextlib.contextmanager
def child(node, p_key, address):
    """An interface in another partition, with an address of the same network as all others."""
    name = f"{node.interface}.{p_key:04x}"
    node.ip("link", "add", "link", node.interface, "name", name,
            "type", "ipoib", "pkey", f"{p_key:#06x}", "mode", "datagram")
    try:
        node.ip("addr", "add", f"{address}/24", "dev", name)
        node.ip("link", "set", name, "up")
        wait_for(f"the carrier of {node}/{name}", lambda: node.carrier(name))
        yield name
    finally:
        node.ip("link", "del", name)


def test_partitions(nodes, scaled):
    """Children in one partition see each other, and nothing of another one."""
    a, b, c = nodes
    with (child(a, 0x8001, "10.1.0.1") as first, child(b, 0x8001, "10.1.0.2"),
          child(c, 0x8002, "10.1.0.3") as third):
        # The switch may not know their groups yet.
        wait_for("an answer", lambda: traffic.ping(a, "10.1.0.2", count=1, wait=1).received)
        done = traffic.ping(a, "10.1.0.2", count=scaled(200))
        assert (done.lost, done.duplicates) == (0, 0), str(done)
        assert traffic.ping(a, "10.1.0.3", count=2, wait=1).received == 0
        assert traffic.ping(c, "10.1.0.2", count=2, wait=1).received == 0
        # Even who knows the other's hardware address does not reach it.
        address = c.link(third)["address"]
        a.ip("neigh", "replace", "10.1.0.3", "lladdr", address, "dev", first)
        before = c.statistics(third)["rx"]["packets"]
        assert traffic.ping(a, "10.1.0.3", count=5, wait=1).received == 0
        assert c.statistics(third)["rx"]["packets"] == before


def test_nothing_was_dropped(nodes, scaled):
    """Under load without overload neither the interfaces nor the fabric lose anything."""
    a, b, _ = nodes

    def lost():
        return re.findall(r"lost_\w+=\d+", (DEBUG / "state").read_text())

    before, gone = [node.statistics() for node in (a, b)], lost()
    traffic.Transfer(a, b, scaled(8 << 20, least=1 << 20)).verify()
    for node, old in zip((a, b), before):
        new = node.statistics()
        for side in ("rx", "tx"):
            assert (new[side]["errors"], new[side]["dropped"]) == (old[side]["errors"], old[side]["dropped"])
    assert lost() == gone


@pytest.mark.parametrize("what", ["deferred", "interrupts"])
def test_other_ways_to_execute(nodes, scaled, what):
    """Sends that are executed later, completions from an interrupt."""
    try:
        for node in nodes:
            control(f"{what} {node.index} 1")
        for node, peer in zip(nodes, nodes[1:]):
            done = traffic.ping(node, peer.address4, count=scaled(200), size=2000)
            assert (done.lost, done.duplicates) == (0, 0), str(done)
        transfers = [traffic.Transfer(nodes[0], nodes[1], scaled(8 << 20, least=1 << 20), port=7011),
                     traffic.Transfer(nodes[1], nodes[0], scaled(8 << 20, least=1 << 20), port=7012)]
        for transfer in transfers:
            transfer.verify()
    finally:
        for node in nodes:
            control(f"{what} {node.index} 0")


def test_device_comes_and_goes_under_traffic(nodes, scaled):
    a, b, _ = nodes
    for _ in range(scaled(10)):
        flood = a.start("ping", "-q", "-f", "-W", "1", "-c", "20000", b.address4)
        b.delete_rdma()
        b.add_rdma()
        flood.kill()
        flood.wait()
        wait_for(f"{b.rdma} to be active", lambda: b.state() == "ACTIVE")
        b.adopt_interface()
        b.wait_ready()
        wait_for(f"{b} to answer", lambda: traffic.ping(a, b.address4, count=1, wait=1).received, 60)


def test_no_anomaly(lab, nodes):
    """All that was sent here was as hardware wants it."""
    assert set(counters("anomalies").values()) == {0}
