# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The stock driver in connected mode on the test fabric. What holds here of it may be asked of ours."""

import time

import connected
import pytest
import traffic
from connected import MTU, STEPS, connect, connections, datagrams, set_mode
from fabric import DEBUG, control, counters
from lab import wait_for

VM = ["--topology", "fabric", "--nodes", "3", "--driver", "stock"]


@pytest.fixture(autouse=True)
def datagrams_again(request, lab):
    """The next test finds datagram mode, no fault, and HCAs as they were; the fabric has nothing to forgive."""
    yield
    lab.check_anomalies()
    control("filter clear")
    for node in lab.nodes:
        for line in (DEBUG / "faults").read_text().splitlines():
            if line.startswith(f"{node.rdma} ") and not line.endswith(" off"):
                control(f"fault {node.index} {line.split()[1]} off")
        control(f"deferred {node.index} 0")
        control(f"interrupts {node.index} 0")
        control(f"rnr {node.index} 2000")
    datagrams(*lab.nodes)


@pytest.fixture
def other_hca(lab):
    """Puts another HCA in a node's place for a test."""
    changed = []

    def change(node, *options):
        changed.append(node)
        connected.replace_hca(node, *options)

    yield change
    for node in changed:
        connected.replace_hca(node)


@pytest.mark.parametrize("size", [1, 4064, 4065, MTU - 28])
def test_pings(a, b, scaled, size):
    connect(a, b, mtu=MTU)
    done = traffic.ping(a, b.address4, count=scaled(200), size=size, options=("-M", "do"))
    assert (done.lost, done.duplicates) == (0, 0), str(done)


def test_every_pair(nodes, scaled):
    connect(*nodes, mtu=MTU)
    for node in nodes:
        for peer in nodes:
            if peer is not node:
                for target in (peer.address4, peer.address6):
                    # One first: until there are connections the far end's ICMP holds back two replies, and drops others.
                    for count in (1, scaled(10)):
                        done = traffic.ping(node, target, count=count, size=40000, interval=0.01)
                        assert (done.lost, done.duplicates) == (0, 0), str(done)


def test_it_is_a_connection(a, b):
    """Queue pairs of the other kind are used, and stay as long as nothing happens to them."""
    connect(a, b, mtu=MTU)
    connected.sound(a, b, size=MTU - 28)
    for node, peer in ((a, b), (b, a)):
        assert set(connected.numbers(node)) & set(connected.peers(peer)), (connected.numbers(node), connected.peers(peer))
    before = connections(a), connections(b)
    connected.sound(a, b, size=MTU - 28, count=50)
    assert (connections(a), connections(b)) == before


@pytest.mark.parametrize("mode", ["inline", "deferred", "interrupts"])
def test_mtu_steps(nodes, scaled, mode):
    """What arrives is what was sent, in packets of every length, however sends are executed."""
    a, b, _ = nodes
    if mode != "inline":
        for node in nodes:
            control(f"{mode} {node.index} 1")
    connect(a, b)
    for mtu in STEPS:
        for node in (a, b):
            connected.set_mtu(node, mtu)
        connected.verified(a, b, scaled(8 << 20, least=1 << 20))


def test_iperf(a, b):
    connect(a, b, mtu=MTU)
    with traffic.Iperf(b) as iperf:
        end = iperf.run(a, "--bidir", seconds=5)
    for key in ("sum_received", "sum_received_bidir_reverse"):
        assert traffic.mbit(end[key]) > 0.1, end


@pytest.mark.parametrize("modes", [("datagram", "connected"), ("connected", "datagram")])
def test_mixed_modes(a, b, scaled, modes):
    for node, mode in zip((a, b), modes):
        set_mode(node, mode)
    connected.verified(a, b, scaled(8 << 20, least=1 << 20))


@pytest.mark.parametrize("deferred", [0, 1])
def test_set_ups(nodes, scaled, deferred, record_property):
    """Connections break and are made anew, with the memory of none left behind."""
    a, b, _ = nodes
    for node in nodes:
        control(f"deferred {node.index} {deferred}")
    connect(a, b, mtu=MTU)
    with connected.Churn(a, b) as churn:
        churn.arrives(0)
        before = connected.queue_pairs(a)
        count = scaled(10000, least=20)
        start = time.monotonic()
        churn.by_breaking(count)
        record_property("set_ups_per_second", round(count / (time.monotonic() - start), 1))
    # What is dead may wait for the communication manager, but does not pile up.
    wait_for("the dead to go", lambda: connected.queue_pairs(a) - before <= 8, 60)
    connected.sound(a, b)


def test_receiver_that_is_not_ready(a, b):
    connect(a, b, mtu=MTU)
    connected.not_ready(a, b)


def test_strict_receiver_under_load(a, b, scaled):
    """Without any grace the receive queue is all that stands between a burst and a broken connection."""
    connect(a, b, mtu=MTU)
    for node in (a, b):
        control(f"rnr {node.index} strict")
    connected.verified(a, b, scaled(8 << 20, least=1 << 20))
    connected.comes_back(a, b.address4)


def test_silence(a, b):
    connect(a, b, mtu=MTU)
    connected.silence(a, b)


def test_broken_queue_pair(a, b):
    """The receiving end breaks by itself: its sender finds out, and connects again."""
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    made = connections(a)
    numbers = connected.numbers(b)
    assert len(numbers) >= 2
    for number in numbers:
        control(f"qp_error {b.index} {number}")
    connected.comes_back(a, b.address4)
    connected.comes_back(b, a.address4)
    assert connections(a) > made
    connected.sound(a, b)


@pytest.mark.parametrize("options, mtu", [(("srq=0",), MTU), (("max_srq_sge=4",), 4 * 4096 - 16), (("max_send_sge=4",), MTU)],
                         ids=["no_srq", "4_receive_sges", "4_send_sges"])
def test_lesser_peer(a, b, scaled, other_hca, options, mtu):
    """A peer whose HCA can do less."""
    other_hca(b, *options)
    connect(a, b)
    assert b.link()["max_mtu"] >= mtu or b.link()["mtu"] == mtu, b.link()
    for node in (a, b):
        connected.set_mtu(node, mtu)
    # Until there are connections each end's ICMP holds back two replies of this size, and drops others.
    connected.comes_back(a, b.address4)
    connected.sound(a, b, size=mtu - 28)
    connected.verified(a, b, scaled(8 << 20, least=1 << 20))


def test_device_goes_while_connected(a, b, scaled):
    """An HCA is pulled out and plugged in while connections are in use."""
    for _ in range(scaled(5)):
        connect(a, b, mtu=MTU)
        flood = a.start("ping", "-q", "-f", "-W", "1", "-s", "20000", "-c", "20000", b.address4)
        connected.comes_back(a, b.address4)
        connected.replace_hca(b)
        flood.kill()
        flood.wait()
        connect(b, mtu=MTU)
        connected.comes_back(a, b.address4, timeout=60)


def test_peer_vanishes(a, b):
    """Without any word: its last messages are lost."""
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    control("filter add class=7 attr=0x15 drop")
    b.delete_rdma()
    connected.answers(a, b.address4, 30000)
    b.add_rdma()
    control("filter clear")
    wait_for(f"{b.rdma} to be active", lambda: b.state() == "ACTIVE", 60)
    b.adopt_interface()
    b.wait_ready(60)
    connect(b, mtu=MTU)
    connected.comes_back(a, b.address4, timeout=60)
    connected.sound(a, b)


def test_port_bounce(a, b, scaled):
    connect(a, b, mtu=MTU)
    connected.sound(a, b)
    for _ in range(scaled(5)):
        for up in ("down", "up"):
            control(f"link {b.index} {up}")
        wait_for("the port", lambda: b.state() == "ACTIVE", 60)
        connected.comes_back(a, b.address4, timeout=60)


def test_no_anomaly(nodes):
    assert set(counters("anomalies").values()) == {0}
