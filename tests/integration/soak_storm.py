# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Churn for IPOIB_SOAK seconds: random trouble under traffic, everything has to work in between."""

import contextlib
import os
import random
import time

import faults
import traffic
from lab import ETHERNET_MTU, objects, rdma_devices, run, wait_for
from test_lifecycle import background, link_local, reachable, readdress
from test_multicast import Member
from test_senders import DISCIPLINES

VM = ["--topology", "rxe", "--nodes", "3"]
SEED = int(os.environ.get("IPOIB_SEED", "1"))


def flap(node, name):
    node.ip("link", "set", name, "down")
    node.ip("link", "set", name, "up")


def replug(node):
    node.delete_rdma()
    node.add_rdma()
    node.adopt_interface()


def resize(node):
    node.ip("link", "set", node.interface, "mtu", random.choice(("1280", "1500", "4092")))


def resize_ethernet(node):
    """The port's MTU follows, and below 1280 the Ethernet's IPv6 forgets its groups."""
    for mtu in (random.choice(("1200", "2200")), ETHERNET_MTU):
        node.ip("link", "set", node.ethernet, "mtu", mtu)


def readdress_twice(node):
    """Another GID, and back."""
    for address in ("02:00:00:00:01:%02x" % random.randrange(256), node.ethernet_mac):
        readdress(node, address)


def readdress_while_up(node):
    """Another GID and back, with the Ethernet up; its link-local address, which would not follow, is away meanwhile."""
    own = link_local(node.ethernet_mac)
    node.ip("-6", "addr", "del", own, "dev", node.ethernet, check=False)
    for address in ("02:00:00:00:02:%02x" % random.randrange(256), node.ethernet_mac):
        node.ip("link", "set", node.ethernet, "address", address)
        time.sleep(random.random() / 5)
    node.ip("-6", "addr", "replace", own, "dev", node.ethernet, "nodad")


def emigrate(node):
    """To the initial namespace and back."""
    node.ip("link", "set", node.interface, "netns", "1", "name", f"away{node.index}")
    run("ip", "link", "set", f"away{node.index}", "up")
    node.adopt_interface()


def discipline(node):
    words = random.choice(list(DISCIPLINES.values()))
    node.run("tc", "qdisc", "replace", "dev", node.interface, "root", *words)


def offload(node):
    words = [word for feature in ("sg", "gso", "gro") for word in (feature, random.choice(("on", "off")))]
    node.run("ethtool", "-K", node.interface, *words)


def gather(node):
    """Many memberships come and go."""
    with contextlib.ExitStack() as stack:
        for number in range(20):
            for group in (f"239.3.{random.randrange(256)}.{number}", f"ff05::3:{random.randrange(65536):x}"):
                with contextlib.suppress(OSError):
                    stack.enter_context(Member(node, group)).join()


def test_storm(lab, nodes):
    end = time.monotonic() + int(os.environ["IPOIB_SOAK"])
    random.seed(SEED)
    before = objects()
    trouble = (
        lambda node: flap(node, node.interface),
        lambda node: flap(node, node.ethernet),
        replug,
        resize,
        resize_ethernet,
        readdress_twice,
        readdress_while_up,
        emigrate,
        discipline,
        offload,
        gather,
        lambda node: node.forget_neighbours(),
    )

    def reload():
        lab.unload_all()
        lab.load()
        lab.adopt()

    def rewire():
        """All Ethernets go at once, with the RDMA devices and the interfaces on them."""
        lab.remove_wire()
        wait_for("the RDMA devices to go away", lambda: not rdma_devices(), 60)
        lab.build_wire()
        lab.add_rdma()
        lab.adopt()

    def starve():
        """Memory is short for a while, on the debug kernel."""
        with faults.Random(lab, random.choice(faults.KINDS), 5, 1000):
            time.sleep(1)

    rounds = 0
    while time.monotonic() < end:
        with background(nodes[0], nodes[1]):
            for _ in range(10):
                random.choice(trouble)(random.choice(nodes))
        random.choice((reload, rewire, starve))()
        for node in nodes:
            node.run("tc", "qdisc", "del", "dev", node.interface, "root", check=False)
            node.run("ethtool", "-K", node.interface, "sg", "on", "gso", "on", "gro", "on")
            node.ip("link", "set", node.interface, "mtu", "4092", "up")
            node.ip("addr", "replace", f"{node.address6}/64", "dev", node.interface)
            wait_for("the carrier", node.carrier)
        for node in nodes:
            reachable(node, nodes[(node.index + 1) % 3].address4)
        traffic.Transfer(nodes[0], nodes[2], 1 << 20).verify()
        rounds += 1
        print(f"round {rounds} (seed {SEED})", flush=True)
    lab.unload_all()
    lab.restore()
    assert objects() == before
