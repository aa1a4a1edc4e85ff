# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Ways to other nodes: found once, followed when they change, bounded, accounted for."""

import contextlib
import multiprocessing
import os
import pathlib
import random
import struct
import threading
import time

import pytest
import sockets
import traffic
from lab import LabError, objects, slab_kib, wait_for

VM = ["--topology", "rxe", "--nodes", "3"]
WAITING = 64  # packets for one neighbour
NEIGHBOURS = 16384  # entries
UNUSED = 60  # seconds after which an entry that nobody uses may go
BATCH = pathlib.Path("/run/batch")


@pytest.fixture
def c(nodes):
    return nodes[2]


@pytest.fixture
def soon(lab):
    """Seconds within which a change is followed; the debug kernel takes longer for everything."""
    return 1 if lab.flavour == "release" else 4


def forget_everything(node):
    """Down and up takes all ways out of the driver, and all neighbours out of the stack."""
    node.ip("link", "set", node.interface, "down")
    node.ip("link", "set", node.interface, "up")
    wait_for("the carrier", lambda: node.carrier() and node.link()["qdisc"] != "noop")


def neighbour(node, address, link_address):
    node.ip("neigh", "replace", address, "lladdr", link_address, "nud", "permanent", "dev", node.interface)


class Senders:
    """Processes, pinned to the CPUs in turn, that send datagrams at the same moment."""

    def __init__(self, node, target, count, each):
        self.target, self.each = target, each
        self.pipes, self.processes = [], []
        context = multiprocessing.get_context("fork")
        for number in range(count):
            ours, theirs = context.Pipe()
            sock = sockets.udp(node)
            process = context.Process(target=self.serve, args=(theirs, sock, number), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def serve(self, pipe, sock, number):
        os.sched_setaffinity(0, {number % os.cpu_count()})
        sock.connect(self.target)
        while True:
            round, moment = pipe.recv()
            data = [struct.pack("!III", round, number, index) for index in range(self.each)]
            while time.monotonic() < moment:
                pass
            for part in data:
                sock.send(part)
            pipe.send("done")

    def fire(self, round):
        """All send now; returns what was sent."""
        moment = time.monotonic() + 0.02
        for pipe in self.pipes:
            pipe.send((round, moment))
        for pipe in self.pipes:
            assert pipe.recv() == "done"
        return {struct.pack("!III", round, number, index)
                for number in range(len(self.pipes)) for index in range(self.each)}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()


def test_four_senders_to_a_new_neighbour(a, b, scaled):
    """B02: whoever comes first makes the entry; what the others send waits in it too, and nothing is lost."""
    address = b.link()["address"]
    with sockets.udp(b, 7200) as receiver, Senders(a, (b.address4, 7200), 4, WAITING // 4) as senders:
        for round in range(scaled(40, least=5)):
            forget_everything(a)
            neighbour(a, b.address4, address)
            account = sockets.Account(a)
            sent = senders.fire(round)
            arrived = sockets.received(receiver, len(sent))
            assert len(arrived) == len(sent) and set(arrived) == sent, (round, len(arrived), account.grown())


def test_more_than_may_wait(a, b, scaled):
    """At least 64 packets wait for a neighbour; each of the others is counted."""
    address = b.link()["address"]
    # Not more in all than the receive ring takes at once: what comes beyond, nobody can count.
    with sockets.udp(b, 7210) as receiver, Senders(a, (b.address4, 7210), 4, 60) as senders:
        for round in range(scaled(20)):
            forget_everything(a)
            neighbour(a, b.address4, address)
            account = sockets.Account(a)
            sent = senders.fire(round)
            lost = account["tx_neigh_queue_full"]
            arrived = sockets.received(receiver, len(sent) - lost, settle=0.2)
            assert set(arrived) <= sent and len(arrived) == len(set(arrived))
            assert len(arrived) >= WAITING
            assert len(arrived) + lost == len(sent), account.grown()


def test_order_of_what_waited(a, b, scaled):
    """What waited leaves in order, and before what is sent later."""
    address = b.link()["address"]
    with sockets.udp(b, 7220) as receiver, sockets.udp(a) as sender:
        for _ in range(scaled(20)):
            forget_everything(a)
            neighbour(a, b.address4, address)
            sent = [struct.pack("!I", number) + bytes(100) for number in range(WAITING - 4)]
            for data in sent:
                sender.sendto(data, (b.address4, 7220))
            assert sockets.received(receiver, len(sent)) == sent


class Flow:
    """Datagrams to an address every few milliseconds, and who receives them when."""

    def __init__(self, sender, target, receivers, port):
        self.over = threading.Event()
        self.last = {}
        self.target = (target, port)
        self.sock = sockets.udp(sender)
        self.threads = [threading.Thread(target=self.send, daemon=True)]
        for node in receivers:
            self.threads.append(threading.Thread(target=self.receive, args=(node, sockets.udp(node, port)), daemon=True))
        for thread in self.threads:
            thread.start()

    def send(self):
        while not self.over.wait(0.004):
            with contextlib.suppress(OSError):  # nobody may be there for a moment
                self.sock.sendto(b"x" * 500, self.target)

    def receive(self, node, sock):
        sock.settimeout(0.2)
        while not self.over.is_set():
            with contextlib.suppress(TimeoutError):
                sock.recv(1000)
                self.last[node] = time.monotonic()
        sock.close()

    def reaches(self, node, since, limit):
        """Seconds from `since` until a datagram arrived at a node."""
        wait_for(f"datagrams at {node}", lambda: self.last.get(node, 0) > since, limit, every=0.005)
        return time.monotonic() - since

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()
        self.sock.close()


def test_address_moves_there_and_back(a, b, c, scaled, soon):
    """B17: an address moves A-B-A with gratuitous ARP under traffic; it is followed within a second."""
    moving = "10.9.0.2"
    a.ip("addr", "add", "10.9.0.1/24", "dev", a.interface)
    b.ip("addr", "add", f"{moving}/24", "dev", b.interface)
    try:
        assert traffic.ping(a, moving).lost == 0
        with Flow(a, moving, (b, c), 7230) as flow:
            flow.reaches(b, time.monotonic(), 10)
            for round in range(scaled(16, least=4)):
                here, there = (b, c) if round % 2 == 0 else (c, b)
                here.ip("addr", "del", f"{moving}/24", "dev", here.interface)
                there.ip("addr", "add", f"{moving}/24", "dev", there.interface)
                since = time.monotonic()
                sockets.announce(there, moving)
                flow.reaches(there, since, soon)
                assert traffic.ping(a, moving, count=2).lost == 0
    finally:
        for node in (a, b, c):
            node.ip("addr", "flush", "dev", node.interface, "to", "10.9.0.0/24")


def test_replaced_link_address(a, b, c, scaled, soon):
    """B17: the same by `ip neigh replace`, with nothing but the link address changing."""
    moving = "10.9.0.2"
    a.ip("addr", "add", "10.9.0.1/24", "dev", a.interface)
    for node in (b, c):
        node.ip("addr", "add", f"{moving}/32", "dev", node.interface)
    try:
        with Flow(a, moving, (b, c), 7240) as flow:
            for round in range(scaled(30, least=6)):
                there, other = (b, c) if round % 2 else (c, b)
                neighbour(a, moving, there.link()["address"])
                flow.reaches(there, time.monotonic(), soon)
                time.sleep(0.05)
                assert flow.last.get(other, 0) < flow.last[there]
    finally:
        a.ip("neigh", "flush", "dev", a.interface, "nud", "permanent")
        for node in (a, b, c):
            node.ip("addr", "flush", "dev", node.interface, "to", "10.9.0.0/24")


def test_peer_returns_with_another_queue_pair(lab, nodes, a, b, scaled, soon):
    """A peer whose RDMA device was made anew has another QPN; told of it, traffic follows at once."""
    for _ in range(scaled(4)):
        # A queue pair of a device that had one before gets the next number, that of a new device the first.
        lab.unload_all()
        lab.restore()
        with Flow(a, b.address4, (b,), 7250) as flow:
            old = b.link()["address"]
            b.delete_rdma()
            b.add_rdma()
            b.adopt_interface()
            b.wait_ready()
            assert b.link()["address"] != old
            since = time.monotonic()
            sockets.announce(b, b.address4)
            flow.reaches(b, since, soon)
            assert traffic.ping(a, b.address4, count=2).lost == 0
            assert traffic.ping(b, a.address4, count=2).lost == 0


def made_up(peer, number):
    """A link address where nobody is: at the peer's port, or, for a few, at a port that does not exist."""
    qpn = 0x100000 + number
    gid = peer.gid() if number % 125 else f"fe:80:00:00:00:00:00:00:00:02:c9:ff:fe:00:{number >> 8:02x}:{number & 255:02x}"
    return f"00:{qpn >> 16:02x}:{qpn >> 8 & 255:02x}:{qpn & 255:02x}:{gid}"


def thousand_neighbours(node, peer, count):
    addresses = [f"10.1.{number >> 8}.{number & 255}" for number in range(1, count + 1)]
    BATCH.write_text("".join(
        f"neigh replace {address} lladdr {made_up(peer, number)} nud permanent dev {node.interface}\n"
        for number, address in enumerate(addresses)))
    node.ip("-batch", BATCH)
    return addresses


def test_thousand_neighbours(a, b, c, scaled):
    """1000 addresses at once: real traffic loses nothing, every packet is accounted for, down frees everything."""
    count, rounds = 1000, scaled(10, least=2)
    a.ip("addr", "add", "10.1.255.1/16", "dev", a.interface)
    counts, memory = None, None
    try:
        with sockets.udp(a) as sender:
            for round in range(rounds + 2):
                addresses = thousand_neighbours(a, b, count)
                random.Random(round).shuffle(addresses)
                assert traffic.ping(a, c.address4).lost == 0
                account = sockets.Account(a)
                ping = threading.Thread(target=lambda: results.append(traffic.ping(a, c.address4, count=200, interval=0.005)))
                results = []
                ping.start()
                for address in addresses:
                    sender.sendto(b"nobody", (address, 9))
                ping.join()
                assert results[0].lost == 0, str(results[0])
                with contextlib.suppress(LabError):
                    wait_for("all packets to leave",
                             lambda: account["tx_sent_packets"] + account["tx_dropped"] >= count + 200, 20)
                grown = account.grown("tx_")
                assert grown["tx_sent_packets"] >= count + 200, grown
                assert not {name for name in grown
                            if name.startswith(("tx_err", "tx_drop", "tx_fail", "tx_no", "tx_neigh"))}, grown
                forget_everything(a)
                if round == 1:
                    counts, memory = objects(), slab_kib()
        assert objects() == counts
        growth = slab_kib() - memory
        assert growth < 1024, f"{growth} KiB of slab more after {rounds} rounds"
    finally:
        a.ip("addr", "flush", "dev", a.interface, "to", "10.1.0.0/16")
    a.ip("addr", "replace", f"{a.address6}/64", "dev", a.interface)


def test_entries_are_bounded(a, b, c):
    """More destinations than a port keeps: the others are counted, and those there are go on.

    Who takes longer to write to them all than the minute after which the unused go never has so many.
    """
    forget_everything(a)
    for peer in (b, c):
        assert traffic.ping(a, peer.address4).lost == 0
    account = sockets.Account(a)
    count = NEIGHBOURS + 1000
    gid = b.gid()
    since = time.monotonic()
    with sockets.packet(a) as sender:
        for number in range(count):
            qpn = 0x200000 + number
            address = f"00:{qpn >> 16:02x}:{qpn >> 8 & 255:02x}:{qpn & 255:02x}:{gid}"
            sender.send(sockets.frame(address, sockets.ETH_P_IP, bytes(40)))
    wait_for("all frames to be accounted for",
             lambda: account["tx_sent_packets"] + account["tx_dropped"] >= count, 60)
    quick = time.monotonic() - since < UNUSED
    assert (1000 - 1 if quick else 0) <= account["tx_neigh_overflow"] <= 1000 + 20, account.grown()
    for peer in (b, c):
        assert traffic.ping(a, peer.address4, count=20).lost == 0
    forget_everything(a)
    for peer in (b, c):
        assert traffic.ping(a, peer.address4, count=20).lost == 0
    assert account["tx_failed"] == 0
    a.ip("addr", "replace", f"{a.address6}/64", "dev", a.interface)


NOWHERE = "00:00:00:99:fe:80:00:00:00:00:00:00:de:ad:be:ef:00:00:00:{:02x}"


def test_unreachable_neighbour(a, b, scaled):
    """Packets to a port that nobody finds wait, bounded, and every one of them is counted as dropped."""
    address, count = "10.0.0.200", 300
    forget_everything(a)
    with sockets.udp(a) as sender:
        for number in range(scaled(4)):
            neighbour(a, address, NOWHERE.format(number))
            account, before = sockets.Account(a), a.statistics()["tx"]["dropped"]
            for _ in range(count):
                sender.sendto(bytes(1000), (address, 9))
            first = account["tx_dropped"]
            assert first >= count - 128, "more waits than may"
            wait_for("the packets to be given up", lambda: account["tx_dropped"] >= count, 10)
            assert account["tx_neigh_queue_full"] + account["tx_neigh_failed"] == account["tx_dropped"]
            # The kernel has drops of its own in that sum, such as of who sent while the interface was down.
            assert a.statistics()["tx"]["dropped"] - before == account["tx_dropped"]
    a.ip("neigh", "flush", "dev", a.interface, "nud", "permanent")
    assert traffic.ping(a, b.address4).lost == 0


def test_unreachable_neighbours_hold_up_nobody(a, b, c, soon):
    """While many ways are looked for in vain, others are found, and the port's events are followed."""
    count = 40
    forget_everything(a)
    for number in range(count):
        neighbour(a, f"10.0.0.{100 + number}", NOWHERE.format(number))
    account = sockets.Account(a)
    with sockets.udp(a) as sender:
        for number in range(count):
            sender.sendto(bytes(100), (f"10.0.0.{100 + number}", 9))
    since = time.monotonic()
    neighbour(a, "10.0.0.3", c.link()["address"])
    assert traffic.ping(a, c.address4, count=1, wait=30).lost == 0
    took = time.monotonic() - since
    since = time.monotonic()
    a.ip("link", "set", a.ethernet, "down")
    wait_for("the carrier to go", lambda: not a.carrier(), 60)
    followed = time.monotonic() - since
    a.ip("link", "set", a.ethernet, "up")
    wait_for("the carrier to return", a.carrier, 60)
    a.ip("neigh", "flush", "dev", a.interface, "nud", "permanent")
    assert took < 2 * soon and followed < 2 * soon, \
        f"a new neighbour took {took:.1f} s, a carrier {followed:.1f} s: {account.grown('tx_')}"


def test_removal_does_not_wait_for_the_unreachable(a, b, soon):
    """An interface goes away although ways are still looked for: that takes as long as without."""
    def removed():
        since = time.monotonic()
        a.delete_rdma()
        took = time.monotonic() - since
        a.add_rdma()
        a.adopt_interface()
        a.wait_ready()
        return took

    without = removed()
    forget_everything(a)
    for number in range(40):
        neighbour(a, f"10.0.0.{100 + number}", NOWHERE.format(number))
    with sockets.udp(a) as sender:
        for number in range(40):
            sender.sendto(bytes(100), (f"10.0.0.{100 + number}", 9))
    took = removed()
    assert took < without + soon, f"removal took {took:.1f} s, {without:.1f} s before"
