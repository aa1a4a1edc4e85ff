# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Three nodes on a bridge: every pair, everybody at once, one that leaves."""

import itertools

import pytest
import traffic
from lab import wait_for

VM = ["--topology", "rxe", "--nodes", "3"]


@pytest.mark.parametrize("family", [4, 6])
def test_every_pair(nodes, scaled, family):
    for node, peer in itertools.permutations(nodes, 2):
        target = peer.address4 if family == 4 else peer.address6
        done = traffic.ping(node, target, count=scaled(100))
        assert (done.lost, done.duplicates) == (0, 0), str(done)


def test_broadcast_reaches_everybody(nodes, scaled):
    """Every node answers, the sender too."""
    count = scaled(50, least=10)
    for node in nodes:
        node.sysctl("net.ipv4.icmp_echo_ignore_broadcasts", 0)
    for node in nodes:
        done = traffic.ping(node, "10.0.0.255", count=count, interval=0.02, responders=3, options=("-b",))
        assert done.replies == 3 * count, str(done)


def test_multicast_reaches_everybody(nodes, scaled):
    """Every node answers to ff02::1, the sender too."""
    count = scaled(50, least=10)
    done = traffic.ping(nodes[0], f"ff02::1%{nodes[0].interface}", count=count, interval=0.02, responders=3)
    assert done.replies == 3 * count, str(done)


def test_transfers_in_a_ring(nodes, scaled):
    size = scaled(16 << 20, least=1 << 20)
    transfers = [traffic.Transfer(node, nodes[(node.index + 1) % 3], size, port=7010 + node.index) for node in nodes]
    for transfer in transfers:
        transfer.verify()


def test_one_leaves(nodes, scaled):
    """The others go on while one node's RDMA device goes and comes back."""
    first, second, third = nodes
    transfer = traffic.Transfer(first, second, scaled(16 << 20, least=1 << 20), port=7020)
    third.delete_rdma()
    third.add_rdma()
    third.adopt_interface()
    transfer.verify()
    third.wait_ready()
    wait_for("the node that is back to reach others", lambda: traffic.ping(third, first.address4, count=1, wait=1).received)
    assert traffic.ping(third, first.address4).lost == 0
