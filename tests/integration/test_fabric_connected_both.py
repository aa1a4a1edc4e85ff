# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Connected mode between our driver and the stock one, both ways. Even nodes are ours.

What two stock ends are asked here too says what may be asked at all.
"""

import itertools

import connected
import pytest
import traffic
from connected import MODES, MTU, STEPS, connect, connections, set_mode
from fabric import control
from lab import run, wait_for
from test_fabric_connected import datagrams_again, other_hca  # noqa: F401 - fixtures

VM = ["--topology", "fabric", "--nodes", "4", "--driver", "both"]
# The subnet's manager lives on node 0, which stays.
WAYS = [(2, 1), (1, 2)]
PAIRS = {"stock-stock": (1, 3), "ours-stock": (0, 1), "stock-ours": (1, 0), "ours-ours": (0, 2)}


@pytest.fixture(params=PAIRS)
def pair(request, nodes):
    return [nodes[index] for index in PAIRS[request.param]]


@pytest.mark.parametrize("modes", list(itertools.product(MODES, repeat=2)), ids=lambda modes: "".join(m[0] for m in modes))
def test_every_combination(a, b, scaled, modes):
    """Whoever connects, whoever starts: pings of every size, and bytes both ways at once."""
    for node, mode in zip((a, b), modes):
        set_mode(node, mode)
    for one, other in ((a, b), (b, a)):
        # Until there is a connection the stock driver keeps three packets.
        connected.comes_back(one, other.address4, 1)
        for target in (other.address4, other.address6):
            for size in (1, 4000, 30000):
                done = traffic.ping(one, target, count=scaled(20), size=size, interval=0.01)
                assert (done.lost, done.duplicates) == (0, 0), (one, str(done))
    connected.verified(a, b, scaled(8 << 20, least=1 << 20))


def test_mtu_steps(pair, scaled):
    """What arrives is what was sent, in packets of every length."""
    a, b = pair
    connect(a, b)
    for mtu in STEPS:
        for node in (a, b):
            connected.set_mtu(node, mtu)
        for one, other in ((a, b), (b, a)):
            # Until there are connections the far end's ICMP holds back two replies.
            connected.comes_back(one, other.address4, mtu - 28)
            done = traffic.ping(one, other.address4, count=3, size=mtu - 28, interval=0.01, options=("-M", "do"))
            assert (done.lost, done.duplicates) == (0, 0), (mtu, one, str(done))
        connected.verified(a, b, scaled(8 << 20, least=1 << 20))


def test_it_is_a_connection(pair):
    a, b = pair
    connect(a, b, mtu=MTU)
    connected.sound(a, b, size=MTU - 28)
    before = connections(a), connections(b)
    assert set(connected.numbers(a)) & set(connected.peers(b))
    connected.sound(a, b, size=MTU - 28, count=30)
    assert (connections(a), connections(b)) == before


def test_iperf(a, b):
    connect(a, b, mtu=MTU)
    with traffic.Iperf(b) as iperf:
        end = iperf.run(a, "--bidir", seconds=3)
    for key in ("sum_received", "sum_received_bidir_reverse"):
        assert traffic.mbit(end[key]) > 0.1, end


@pytest.mark.parametrize("mode", ["deferred", "interrupts"])
def test_other_ways_to_execute(nodes, scaled, mode):
    for node in nodes:
        control(f"{mode} {node.index} 1")
    connect(*nodes, mtu=MTU)
    connected.verified(nodes[0], nodes[1], scaled(8 << 20, least=1 << 20))
    connected.sound(nodes[1], nodes[2])


@pytest.mark.parametrize("i, j", [(1, 3), (1, 0)], ids=["stock-stock", "stock-ours"])
def test_set_ups(nodes, scaled, i, j):
    connect(nodes[i], nodes[j], mtu=MTU)
    with connected.Churn(nodes[i], nodes[j]) as churn:
        churn.arrives(0)
        churn.by_breaking(scaled(1000, least=5))
    connected.sound(nodes[i], nodes[j])


@pytest.mark.parametrize("i, j", [(1, 0), (0, 2)], ids=["stock-ours", "ours-ours"])
def test_silence_and_no_buffer(nodes, i, j):
    connect(nodes[i], nodes[j], mtu=MTU)
    connected.not_ready(nodes[i], nodes[j])
    connected.silence(nodes[i], nodes[j])


@pytest.mark.parametrize("i, j", WAYS)
def test_peer_goes_without_a_word(nodes, i, j):
    """It vanishes while no disconnect request gets through, and comes back with other numbers."""
    one, other = nodes[i], nodes[j]
    connect(one, other, mtu=MTU)
    connected.sound(one, other)
    control("filter add class=7 attr=0x15 drop")
    other.delete_rdma()
    connected.answers(one, other.address4, 30000)
    control("filter clear")
    other.add_rdma()
    wait_for(f"{other.rdma} to be active", lambda: other.state() == "ACTIVE", 60)
    other.adopt_interface()
    other.wait_ready(60)
    connect(other, mtu=MTU)
    connected.comes_back(one, other.address4, timeout=60)
    connected.sound(one, other)


def test_ours_reloads(lab, a, b):
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    lab.unload()
    lab.load()
    for node in lab.nodes[::2]:
        node.adopt_interface()
        node.wait_ready(60)
    connect(a, mtu=MTU)
    connected.comes_back(b, a.address4, timeout=60)
    connected.sound(a, b)


def test_stock_reloads(lab, a, b):
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    run("rmmod", "ib_ipoib")
    run("modprobe", "ib_ipoib")
    for node in lab.nodes[1::2]:
        node.adopt_interface()
        node.wait_ready(60)
    connect(b, mtu=MTU)
    connected.comes_back(a, b.address4, timeout=60)
    connected.sound(a, b)


@pytest.mark.parametrize("which", [1, 2])
def test_peer_moves_to_another_lid(lab, nodes, which):
    a, b = nodes[1], nodes[2]
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    connected.move(lab, nodes[which], 0x72 + which)
    connected.comes_back(a, b.address4, timeout=60)
    connected.comes_back(b, a.address4, timeout=60)
    connected.sound(a, b)


@pytest.mark.parametrize("i, j", WAYS)
def test_peer_that_takes_little(nodes, scaled, i, j):
    one, other = nodes[i], nodes[j]
    control("filter add class=7 attr=0x13 patch=64:00000804")
    connect(one, other, mtu=MTU)
    connected.answers(one, other.address4)
    connected.answers(one, other.address4, 30000)
    wait_for("the route to learn", lambda: "mtu 2048" in one.ip("route", "get", other.address4).stdout, 10)
    connected.verified(one, other, scaled(4 << 20, least=1 << 20))
    for node in (one, other):
        node.ip("route", "flush", "cache")


@pytest.mark.parametrize("which, options, mtu", [
    (1, "srq=0", MTU), (1, "max_srq_sge=4", 16368), (1, "max_send_sge=4", MTU),
    (2, "max_srq_sge=4", 16368), (2, "max_send_sge=4", MTU)])
def test_lesser_peer(nodes, scaled, other_hca, which, options, mtu):  # noqa: F811 - a fixture
    node, peer = nodes[which], nodes[which - 1]
    other_hca(node, options)
    connect(node, peer)
    for end in (node, peer):
        connected.set_mtu(end, mtu)
    connected.sound(node, peer, size=mtu - 28)
    connected.verified(node, peer, scaled(4 << 20, least=1 << 20))
