# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Eight nodes on a bridge, each with each other."""

import itertools
import struct

import pytest
import sockets
import traffic
from conftest import SCALE
from lab import objects, wait_for

VM = ["--topology", "rxe", "--nodes", "8"]


@pytest.mark.parametrize("family", [4, 6])
def test_everybody_pings_everybody(nodes, family):
    """All 56 ways are found from nothing, and no reply gets lost."""
    for node in nodes:
        node.forget_neighbours()
    for node in nodes:
        targets = [peer.address4 if family == 4 else peer.address6 for peer in nodes if peer is not node]
        before = traffic.echo_replies(node)
        commands = "".join(f"ping -q -n -c 5 -i 0.02 -W 10 {target} & " for target in targets)
        node.run("sh", "-c", commands + "wait")
        # The kernel's count: ping itself does not wait for the last replies.
        wait_for("all replies", lambda: traffic.echo_replies(node) - before == 5 * len(targets), 20)


def test_datagrams_to_everybody(nodes, scaled):
    """Each node sends to each other in turn; every datagram arrives once, at the right node."""
    count = scaled(40, least=5)
    receivers = {node: sockets.udp(node, 7400) for node in nodes}
    for node in nodes:
        with sockets.udp(node) as sender:
            for number in range(count):
                for peer in nodes:
                    if peer is not node:
                        sender.sendto(struct.pack("!III", node.index, peer.index, number) + bytes(600),
                                      (peer.address4, 7400))
    for peer, sock in receivers.items():
        with sock:
            expected = {struct.pack("!III", node.index, peer.index, number)
                        for node in nodes if node is not peer for number in range(count)}
            arrived = sockets.received(sock, len(expected), limit=20, settle=0.1)
            assert len(arrived) == len(expected) and {data[:12] for data in arrived} == expected


def test_streams_between_everybody(nodes, scaled):
    """56 TCP connections at a time, their bytes proved by hash."""
    streams = [sockets.Stream(node, peer, 7410 + node.index, peer.address4 if (node.index + peer.index) % 2 else peer.address6)
               for node, peer in itertools.permutations(nodes, 2)]
    sockets.exchange(streams, scaled(1 << 20, least=1 << 17))


def test_connections_between_everybody(nodes, scaled):
    """In connected mode: one connection each way between any two, in which long packets arrive, and streams are proved
    by hash; nothing of them is left in the end."""
    if SCALE != 1:
        pytest.skip("in the full tier only")
    before = objects()
    opened = {node: sockets.counters(node)["conn_opened"] for node in nodes}
    for node in nodes:
        node.write_sysfs("mode", "connected")
    for node in nodes:
        earlier = traffic.echo_replies(node)
        targets = [peer.address4 for peer in nodes if peer is not node]
        node.run("sh", "-c", "".join(f"ping -q -n -c 3 -i 0.05 -W 10 -s 20000 {target} & " for target in targets) + "wait")
        wait_for("all replies", lambda: traffic.echo_replies(node) - earlier == 3 * len(targets), 20)
    streams = [sockets.Stream(node, peer, 7430 + node.index) for node, peer in itertools.permutations(nodes, 2)]
    sockets.exchange(streams, scaled(1 << 20, least=1 << 17))
    for node in nodes:
        rows = sockets.counters(node)
        made = rows["conn_opened"] - opened[node]
        assert len(nodes) - 1 <= made <= len(nodes) - 1 + rows["conn_broken"], rows
        node.write_sysfs("mode", "datagram")
    wait_for("the connections to go", lambda: {name: row["qp"] for name, row in objects().items()}
             == {name: row["qp"] for name, row in before.items()}, 20)


def test_nothing_was_lost(nodes):
    """After all this no interface has counted an error."""
    for node in nodes:
        rows = sockets.counters(node)
        assert not {name: value for name, value in rows.items() if value and name in (
            "tx_errors", "rx_dropped", "tx_failed", "rx_failed", "rx_bad_length", "rx_no_memory", "qp_restarts",
            "bad_completions", "join_failed", "tx_neigh_failed", "tx_neigh_queue_full", "tx_neigh_overflow")}
    assert traffic.ping(nodes[0], nodes[7].address4).lost == 0
