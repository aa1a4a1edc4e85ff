# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Everything that can be taken away is taken away, in any order, two things at a time, under traffic."""

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import random
import socket
import struct
import threading
import time

import pytest
import sockets
import traffic
from conftest import SCALE
from lab import GONE, links, log, objects, rdma_devices, run, wait_for

VM = ["--topology", "rxe"]
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 1
WATCHED = "rtnl0"


def flap_for_ever(slowest, stop):
    """Takes the kernel's network lock again and again, and notes how long that took at most."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    up = True
    while not stop.is_set():
        since = time.monotonic()
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", WATCHED.encode(), IFF_UP if up else 0))
        slowest.value = max(slowest.value, time.monotonic() - since)
        up = not up
        time.sleep(0.005)


@pytest.fixture
def rtnl(lab):
    """The network lock is never held for long: a second on the release kernel."""
    run("ip", "link", "add", WATCHED, "type", "dummy")
    context = multiprocessing.get_context("fork")
    slowest, stop = context.Value("d", 0.0), context.Event()
    process = context.Process(target=flap_for_ever, args=(slowest, stop), daemon=True)
    process.start()
    yield slowest
    stop.set()
    process.join(30)
    process.kill()
    run("ip", "link", "del", WATCHED)
    limit = 1 if lab.flavour == "release" else 10
    assert slowest.value < limit, f"somebody held the network lock for {slowest.value:.2f} s"


@contextlib.contextmanager
def flood(nodes):
    """Datagrams both ways, to a known address, to everybody and to nobody, whatever happens to the interfaces."""
    over = threading.Event()

    def send(node, peer):
        with sockets.udp(node) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sock.setblocking(False)
            for number in itertools.count():
                if over.is_set():
                    return
                with contextlib.suppress(OSError):
                    sock.sendto(bytes(number * 37 % 9000), (peer.address4, 9))
                    if number % 50 == 0:
                        sock.sendto(b"all", ("10.0.0.255", 9))
                        sock.sendto(b"none", ("10.0.0.99", 9))
                if number % 10 == 0:
                    time.sleep(0.005)

    threads = [threading.Thread(target=send, args=pair, daemon=True) for pair in itertools.permutations(nodes, 2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def quietly(*argv):
    """Something else may have taken it away already."""
    run(*argv, check=False, timeout=120)


class Removals:
    """Ways to take things away. Each may find it gone."""

    def __init__(self, lab):
        self.lab = lab

    def module(self):
        quietly("rmmod", self.lab.module_name())

    def rdma(self, node):
        quietly("ip", "netns", "exec", node.name, "rdma", "link", "del", node.rdma)

    def ethernet(self, node):
        quietly("ip", "-n", node.name, "link", "del", node.ethernet)

    def namespace(self, node):
        quietly("ip", "netns", "del", node.name)

    def down(self, node):
        quietly("ip", "-n", node.name, "link", "set", node.interface, "down")

    def moved(self, node):
        """To the initial namespace, as the interface of a namespace that goes does too."""
        quietly("ip", "-n", node.name, "link", "set", node.interface, "netns", "1", "name", f"moved{node.index}")
        quietly("ip", "link", "set", f"moved{node.index}", "up")

    def flapped(self, node):
        for _ in range(5):
            self.down(node)
            quietly("ip", "-n", node.name, "link", "set", node.interface, "up")


def at_once(*actions):
    """Runs actions in parallel; they must end."""
    errors = []

    def attempt(action, words):
        try:
            action(*words)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=attempt, args=(action, words)) for action, *words in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def interfaces(lab):
    return [(space, name) for space in (None, *(node.name for node in lab.nodes))
            for name, row in (links(space) if space is None or exists(space) else {}).items()
            if row.get("link_type") == "infiniband"]


def exists(space):
    return space in run("ip", "netns", "list").stdout.split()


def everything_gone(lab):
    """No interface, no RDMA object of ours, no module; and it can be loaded again, onto a new wire."""
    lab.unload_all()
    assert interfaces(lab) == []
    # A device goes after its Ethernet, by itself. Of those that stay the RDMA core has an object of its own: a queue pair
    # for management datagrams.
    doomed = {node.rdma for node in lab.nodes if not (exists(node.name) and node.ethernet in links(node.name))}
    wait_for("the RDMA devices to follow their Ethernet", lambda: not doomed & set(rdma_devices()), GONE[lab.flavour])
    for counts in objects().values():
        assert counts["qp"] <= 1 and counts["cm_id"] == 0, objects()
    lab.remove_wire()
    wait_for("the RDMA devices to go away", lambda: not rdma_devices(), GONE[lab.flavour])
    lab.build_wire()
    lab.add_rdma()
    lab.load()
    lab.adopt()
    a, b = lab.nodes
    assert traffic.ping(a, b.address4).lost == 0
    assert traffic.ping(b, a.address6).lost == 0


PAIRS = [
    ("module", "rdma"), ("module", "ethernet"), ("module", "namespace"), ("module", "moved"), ("module", "flapped"),
    ("rdma", "ethernet"), ("rdma", "namespace"), ("rdma", "moved"), ("rdma", "flapped"), ("ethernet", "namespace"),
    ("ethernet", "moved"), ("namespace", "moved"),
]


def test_two_at_once(lab, nodes, rtnl, scaled):
    """Issue 3, life cycle: two ways to go, at the same moment, under traffic; then more of them, one by one.

    A sample of the pairs, by IPOIB_SEED; all of them with --full.
    """
    removals = Removals(lab)
    chance = random.Random(int(os.environ.get("IPOIB_SEED", "1")))
    for pair in chance.sample(PAIRS, min(len(PAIRS), scaled(8))) if SCALE < 1 else PAIRS:
        rest = [name for name in ("flapped", "moved", "rdma", "ethernet", "namespace") if name not in pair]
        chance.shuffle(rest)
        log(f"{' and '.join(pair)} at once, then {' and '.join(rest[:2])}")
        with flood(nodes):
            at_once(*((getattr(removals, name), *(() if name == "module" else (nodes[index],)))
                      for index, name in enumerate(pair)))
            for name in rest[:2]:
                at_once(*((getattr(removals, name), node) for node in nodes))
        everything_gone(lab)


@pytest.mark.parametrize("what", ["rdma", "ethernet", "namespace"])
def test_both_ends_at_once(lab, nodes, rtnl, what):
    """rxe.md 6: both ends go in parallel, in two kernel threads."""
    removals = Removals(lab)
    with flood(nodes):
        at_once(*((getattr(removals, what), node) for node in nodes))
    everything_gone(lab)


def test_down_and_unload(lab, nodes, rtnl, scaled):
    """B54: the interfaces go up and down, join and leave groups, while the module goes."""
    removals = Removals(lab)
    for _ in range(scaled(4)):
        with flood(nodes):
            at_once((removals.flapped, nodes[0]), (removals.flapped, nodes[1]), (removals.module,))
        lab.unload_all()
        assert interfaces(lab) == []
        lab.load()
        lab.adopt()
    a, b = nodes
    assert traffic.ping(a, b.address4).lost == 0


def test_unload_with_many_neighbours(lab, nodes, rtnl, scaled):
    """B07: nothing of the module's code runs after it is gone, however many entries it had."""
    for _ in range(scaled(4)):
        a, b = lab.nodes
        gid = b.gid()
        with sockets.packet(a) as sender:
            for number in range(scaled(2000, least=500)):
                address = f"00:30:{number >> 8:02x}:{number & 255:02x}:{gid}"
                sender.send(sockets.frame(address, sockets.ETH_P_IP, bytes(40)))
        lab.unload_all()
        assert interfaces(lab) == []
        lab.load()
        lab.adopt()
    assert traffic.ping(a, b.address4).lost == 0


def test_neighbours_come_and_go(lab, nodes, rtnl, scaled):
    """B04: entries are made by senders, and taken away by failed sends, lost carriers, other addresses and a peer
    that goes, in either mode, all at once; then the module goes. Lockdep watches."""
    a, b = nodes
    over = threading.Event()

    def many():
        for number in itertools.count():
            if over.is_set():
                return
            with contextlib.suppress(OSError), sockets.packet(a) as sender:
                for low in range(100):
                    address = f"00:40:{number & 255:02x}:{low:02x}:{b.gid()}"
                    sender.send(sockets.frame(address, sockets.ETH_P_IP, bytes(40)))
            time.sleep(0.01)

    def wire():
        while not over.is_set():
            for state in ("down", "up"):
                quietly("ip", "-n", b.name, "link", "set", b.ethernet, state)
                time.sleep(0.1)

    def modes():
        for mode in itertools.cycle(("connected", "datagram")):
            if over.is_set():
                return
            quietly("ip", "netns", "exec", a.name, "sh", "-c", f"echo {mode} > /sys/class/net/{a.interface}/mode")
            time.sleep(0.05)

    def addresses():
        for number in itertools.count():
            if over.is_set():
                return
            quietly("ip", "-n", a.name, "link", "set", a.ethernet, "address", f"02:00:00:00:02:{number & 255:02x}")
            time.sleep(0.2)

    with flood(nodes):
        threads = [threading.Thread(target=each, daemon=True) for each in (many, wire, modes, addresses)]
        for thread in threads:
            thread.start()
        time.sleep(scaled(20))
        over.set()
        for thread in threads:
            thread.join()
        Removals(lab).module()
    everything_gone(lab)


def test_moves_between_namespaces(lab, nodes, rtnl, scaled):
    """An interface moves to another namespace and back under traffic, and works in either."""
    a, b = nodes
    run("ip", "netns", "add", "elsewhere")
    try:
        with flood(nodes):
            for _ in range(scaled(4)):
                a.ip("link", "set", a.interface, "netns", "elsewhere")
                run("ip", "-n", "elsewhere", "addr", "add", f"{a.address4}/24", "dev", a.interface)
                run("ip", "-n", "elsewhere", "link", "set", a.interface, "up")
                wait_for("the peer to answer", lambda: run(
                    "ip", "netns", "exec", "elsewhere", "ping", "-c", "1", "-W", "1", b.address4, check=False).returncode == 0)
                run("ip", "-n", "elsewhere", "link", "set", a.interface, "netns", a.name)
                a.adopt_interface()
                wait_for("the peer to answer", lambda: traffic.ping(a, b.address4, count=1, wait=1).received)
    finally:
        run("ip", "netns", "del", "elsewhere")
