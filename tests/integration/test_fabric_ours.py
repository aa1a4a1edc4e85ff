# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Our driver on the test fabric: what the stock driver was asked before, and how it takes the fabric's changes."""

import re

import pytest
import sockets
import traffic
from fabric import ACTIVE, control
from lab import objects, wait_for
from test_fabric_datagram import *  # noqa: F403
# Some of what the full tier runs.
from test_fabric_offloads import (  # noqa: F401
    as_made, test_damaged_packet_is_refused, test_datagrams_of_all_lengths, test_offered, test_segments)
from test_partitions import same_p_keys, test_attributes, test_key_that_comes_and_goes  # noqa: F401

VM = ["--topology", "fabric", "--nodes", "3", "--fabric-param", "csum=1", "--fabric-param", "tso=1"]


@pytest.fixture
def sound(lab, nodes):
    """After the test the subnet is whole and everybody answers."""
    with same_p_keys(nodes):
        yield
    lab.restore()
    everybody_answers(nodes)


def reachable(node, target, timeout=30):
    wait_for(f"{target} to answer {node}", lambda: traffic.ping(node, target, count=1, wait=1).received, timeout)


def everybody_answers(nodes):
    for node in nodes:
        for peer in nodes:
            if peer is not node:
                reachable(node, peer.address4)
                reachable(node, peer.address6)


def test_carrier_waits_for_the_broadcast_group(lab, a, sound):
    """R4391-5.a: without a subnet administrator no membership, and without that no carrier."""
    lab.manager.kill()
    for state in ("down", "up"):
        control(f"link {a.index} {state}")
    wait_for("the carrier to go", lambda: not a.carrier())
    lab.manager.start()
    lab.wait_wire()
    wait_for("the carrier to return", a.carrier, 40)


@pytest.mark.parametrize("line", ["reregister 0", "trap 128"])
def test_light_events_keep_the_carrier(a, b, line, sound):
    """Memberships and paths are asked for anew; the interface stays up, no packet of a slow stream is lost for long."""
    changes = int(a.sysfs("carrier_changes"))
    assert traffic.ping(a, b.address4, count=5).lost == 0
    control(line)
    done = traffic.ping(a, b.address4, count=100, interval=0.05)
    assert done.lost <= 20, str(done)
    assert int(a.sysfs("carrier_changes")) == changes


def test_peer_moves_to_another_lid(lab, a, b, sound):
    """B19, B32: the manager gives a peer another LID; it is found there without help."""
    assert traffic.ping(a, b.address4, count=5).lost == 0
    old, new = b.lid(), 0x52
    lab.manager.kill()
    records = lab.manager.folder / "guid2lid"
    text = records.read_text()
    records.write_text(re.sub(rf"^({b.port_guid():#018x}) .*$", rf"\1 {new:#06x} {new:#06x}", text, flags=re.M))
    lab.manager.start()
    wait_for("the new LID", lambda: b.lid() == new != old, ACTIVE[lab.flavour])
    reachable(a, b.address4)
    reachable(b, a.address6)


def test_port_bounce_under_traffic(a, b, scaled, sound):
    for _ in range(scaled(20)):
        flood = a.start("ping", "-q", "-f", "-W", "1", "-c", "100000", b.address4)
        for state in ("down", "up"):
            control(f"link {b.index} {state}")
        wait_for("the port", lambda: b.state() == "ACTIVE")
        reachable(a, b.address4)
        flood.kill()
        flood.wait()


def test_silent_administrator(a, b, scaled, sound):
    """B15: path questions are not answered: what waits is bounded and counted, and nobody asks on and on."""
    control("filter add class=3 attr=0x35 method=0x81 drop")
    try:
        a.ip("link", "set", a.interface, "down")
        a.ip("link", "set", a.interface, "up")
        wait_for("the carrier", a.carrier)
        a.ip("neigh", "replace", b.address4, "lladdr", b.link()["address"], "nud", "permanent", "dev", a.interface)
        account = sockets.Account(a)
        with sockets.udp(a) as sock:
            for _ in range(scaled(2000, least=500)):
                sock.sendto(bytes(1000), (b.address4, 9))
        wait_for("the loss to be counted", lambda: account["tx_neigh_failed"] + account["tx_neigh_queue_full"] > 300, 60)
    finally:
        control("filter clear")
        a.ip("neigh", "del", b.address4, "dev", a.interface, check=False)
    reachable(a, b.address4, 40)


def test_load_and_unload_under_traffic(lab, a, b, scaled):
    lab.unload_all()
    without = objects()
    for _ in range(scaled(20)):
        lab.load()
        lab.adopt()
        flood = a.start("ping", "-q", "-f", "-W", "1", "-c", "100000", b.address4)
        reachable(a, b.address4)
        lab.unload_all()
        flood.kill()
        flood.wait()
        assert objects() == without
    lab.restore()
