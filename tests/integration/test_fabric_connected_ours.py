# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Our driver in connected mode on the test fabric: what the stock driver was asked before, and what may happen to a peer."""

import time

import connected
import pytest
import sockets
import traffic
from connected import MTU, connect, connections
from fabric import control, fault
from lab import objects, wait_for
from test_fabric_connected import *  # noqa: F403

VM = ["--topology", "fabric", "--nodes", "3"]


@pytest.mark.parametrize("deferred", [0, 1])
def test_set_ups(lab, nodes, scaled, deferred, record_property):
    """Connections end with the mode and are made anew, with the memory of none left behind."""
    a, b, _ = nodes
    for node in nodes:
        control(f"deferred {node.index} {deferred}")
    connect(a, b, mtu=MTU)
    with connected.Churn(a, b) as churn:
        churn.arrives(0)
        before = connected.queue_pairs(a)
        count = scaled({"release": 10000, "debug": 500}[lab.flavour], least=20)
        start = time.monotonic()
        churn.by_mode(count)
        record_property("set_ups_per_second", round(count / (time.monotonic() - start), 1))
    wait_for("the dead to go", lambda: connected.queue_pairs(a) - before <= 2, 60)
    connected.sound(a, b)


def part(a, b):
    """Ends the connections of two nodes, and waits until nothing is left of them. Gives what there is then."""
    connected.datagrams(a, b)
    # Those of the port's managers, and that of datagrams.
    wait_for("the connections to go", lambda: connected.queue_pairs(a) == connected.queue_pairs(b) == 3)
    return {node.rdma: objects()[node.rdma] for node in (a, b)}


@pytest.mark.parametrize("which", [0, 1], ids=["active", "passive"])
@pytest.mark.parametrize("name", ["create_qp", "create_srq", "create_cq", "modify_qp_init", "modify_qp_rtr", "modify_qp_rts"])
def test_verb_fails_while_connecting(nodes, name, which):
    """B09: datagrams meanwhile, another try a little later, and nothing of the first is left."""
    _, a, b = nodes  # the first has the manager, and keeps its HCA
    node = (a, b)[which]
    if name in ("create_srq", "create_cq"):
        # Made once, for the first connection.
        connected.replace_hca(node)
    with fault(node.index, name, "n=1") as struck:
        connect(a, b, mtu=MTU)
        assert connected.answers(a, b.address4, 100, wait=5)
        wait_for("the fault", lambda: struck() or connected.answers(a, b.address4, 30000))
        assert struck() == 1
        connected.comes_back(a, b.address4)
    connected.sound(a, b)
    left = part(a, b)
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    assert part(a, b) == left


def test_end_that_fails(a, b):
    """A queue pair that does not go to the error state is destroyed all the same."""
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    left = part(a, b)
    for node in (a, b):
        connect(a, b, mtu=MTU)
        connected.sound(a, b)
        with fault(node.index, "modify_qp_err", "n=2") as struck:
            assert part(a, b) == left
            assert struck()
    connect(a, b, mtu=MTU)
    connected.sound(a, b)


def test_receive_event_is_lost(a, b):
    """B10: nobody says that something has come. The housekeeper looks. (Where nobody says that sends are done the kernel's
    watchdog has to: that complains in the log, and is what cm/selftest.rs has.)"""
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    with sockets.background([sockets.Stream(a, b, 7603)]), fault(b.index, "lose_cq_event", "n=1") as struck:
        wait_for("the fault", struck)
    connected.comes_back(a, b.address4)
    connected.sound(a, b)


def test_hca_without_shared_queues(a, b, scaled, other_hca):
    """Each connection has a receive queue of its own then, which goes with it."""
    other_hca(b, "srq=0")
    connect(a, b, mtu=MTU)
    connected.comes_back(a, b.address4)
    connected.sound(a, b, size=MTU - 28)
    before = objects()[b.rdma]
    assert not before.get("srq") and connected.ends(b)
    for _ in range(scaled(20, least=3)):
        connected.datagrams(a, b)
        wait_for("the connections to go", lambda: not connected.ends(a) and not connected.ends(b))
        connect(a, b, mtu=MTU)
        connected.comes_back(a, b.address4)
        connected.sound(a, b, size=MTU - 28, count=3)
    connected.verified(a, b, scaled(4 << 20, least=1 << 20))
    wait_for("the objects to be as before", lambda: objects()[b.rdma] == before)


def test_peer_moves_to_another_lid(lab, a, b):
    """B19, B32: connections end with the old LID, and are made anew."""
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    connected.move(lab, b, 0x62)
    connected.comes_back(a, b.address4, timeout=60)
    connected.comes_back(b, a.address4, timeout=60)
    connected.sound(a, b)


def test_manager_is_lost_in_mid_traffic(lab, a, b):
    """B26: what is connected goes on."""
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    made = connections(a)
    with sockets.background([sockets.Stream(a, b, 7601), sockets.Stream(b, a, 7602)]):
        lab.manager.kill()
        connected.sound(a, b, count=50)
        lab.manager.start()
        lab.wait_wire()
    connected.sound(a, b)
    assert connections(a) - made <= 2


@pytest.mark.parametrize("mtu", [2048, 9000])
def test_peer_that_takes_little(a, b, scaled, mtu):
    """R4755: a connection carries no more than the peer's answer says, whatever the interface's MTU."""
    control(f"filter add class=7 attr=0x13 patch=64:{mtu + 4:08x}")
    connect(a, b, mtu=MTU)
    for one, other in ((a, b), (b, a)):
        one.ip("route", "flush", "cache")
        connected.comes_back(one, other.address4, 56)
        # Lost on its way, or the answer is.
        connected.answers(one, other.address4, 30000)
        connected.answers(one, other.address4, 30000)
        wait_for("the route to learn", lambda: f"mtu {mtu}" in one.ip("route", "get", other.address4).stdout, 10)  # noqa: B023
    assert traffic.ping(a, b.address4, count=10, size=30000, interval=0.02).lost == 0
    connected.verified(a, b, scaled(8 << 20, least=1 << 20))
    a.ip("route", "flush", "cache")
    b.ip("route", "flush", "cache")


def test_peer_reloads(lab, a, b, scaled):
    """Both ends forget all; nothing is left of the old connections."""
    for _ in range(scaled(5)):
        connect(a, b, mtu=MTU)
        connected.sound(a, b)
        lab.unload()
        for node in lab.nodes:
            assert connected.queue_pairs(node) == 2, connected.state(node)
        lab.load()
        lab.adopt()


