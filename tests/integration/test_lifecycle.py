# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Interfaces, devices and the module come and go under traffic; nothing is lost on the way."""

import contextlib
import os
import signal

import pytest
import traffic
from lab import GONE, objects, rdma_devices, run, slab_kib, wait_for

VM = ["--topology", "rxe"]


@contextlib.contextmanager
def background(a, b):
    """Both nodes flood each other, whatever happens to the interfaces."""
    # Each shell has a group of its own, for it and its ping to die together.
    loop = "while :; do ping -q -i 0.002 -s {} -c 200 -W 1 {}; done"
    running = [node.start("sh", "-c", loop.format(size, target), start_new_session=True)
               for node, size, target in ((a, 4000, b.address4), (b, 100, a.address6))]
    try:
        yield
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
        for process in running:
            process.wait()


def reachable(node, target, timeout=40):
    """Waits until a target answers: stale neighbours need their time to be found out."""
    wait_for(f"{target} to answer {node}",
             lambda: traffic.ping(node, target, count=1, wait=1).received, timeout)


def test_up_and_down_under_traffic(a, b, scaled):
    before = objects()
    with background(a, b):
        for _ in range(scaled(50)):
            a.ip("link", "set", a.interface, "down")
            a.ip("link", "set", a.interface, "up")
            wait_for("the carrier", a.carrier)
    a.ip("addr", "replace", f"{a.address6}/64", "dev", a.interface)
    a.wait_ready()
    reachable(a, b.address4)
    reachable(b, a.address6)
    assert objects() == before


def test_load_and_unload_under_traffic(lab, a, b, scaled):
    lab.unload_all()
    without = objects()
    for _ in range(scaled(50)):
        lab.load()
        lab.adopt()
        with background(a, b):
            reachable(a, b.address4)
            lab.unload_all()
        assert objects() == without


def test_device_comes_and_goes_under_traffic(a, b, scaled):
    for _ in range(scaled(20)):
        with background(a, b):
            b.delete_rdma()
        assert b.link() is None
        b.add_rdma()
        b.adopt_interface()
        b.wait_ready()
        reachable(a, b.address4)


def test_new_queue_pair_on_one_side(lab, a, b):
    """One side starts anew with another QPN: it says so, and the other need not find out (B33)."""
    lab.unload_all()
    lab.restore()
    old = b.qpn()
    assert traffic.ping(a, b.address4).lost == 0
    b.delete_rdma()
    b.add_rdma()
    b.adopt_interface()
    b.wait_ready()
    assert b.qpn() != old and b.qpn() != a.qpn()
    # By itself a node would trust what it knows for up to 45 seconds.
    reachable(a, b.address4, timeout=10)
    reachable(a, b.address6, timeout=10)
    reachable(b, a.address4, timeout=10)


def test_ethernet_flap(a, b, scaled):
    """rxe.md 0.2: traffic into a dead Ethernet breaks the queue pair, which must heal by itself."""
    for _ in range(scaled(20)):
        with background(a, b):
            a.ip("link", "set", a.ethernet, "down")
            wait_for("the carrier to go", lambda: not a.carrier())
            a.ip("link", "set", a.ethernet, "up")
            wait_for("the carrier to return", a.carrier)
    reachable(a, b.address4)
    reachable(b, a.address4)


def test_ethernet_mtu_sets_the_limit(a, b):
    """The IP MTU follows the port's: 2048 - 4 over an Ethernet MTU of 2200, and back."""

    def ready():
        """The carrier goes for a moment, and the queues are the stack's again a while after it is back."""
        for node in (a, b):
            wait_for("the queues", lambda: node.carrier() and node.link()["qdisc"] != "noop")

    for node in (a, b):
        node.ip("link", "set", node.ethernet, "mtu", "2200")
    for node in (a, b):
        wait_for("the MTU to shrink", lambda: node.link()["mtu"] == 2044)
        assert node.link()["max_mtu"] == 2044
    ready()
    assert traffic.ping(a, b.address4, count=20, size=2044 - 28, options=("-M", "do")).lost == 0
    for node in (a, b):
        node.ip("link", "set", node.ethernet, "mtu", "4200")
    for node in (a, b):
        wait_for("the MTU to grow", lambda: node.link()["mtu"] == 4092)
    ready()
    assert traffic.ping(a, b.address4, count=20, size=4092 - 28, options=("-M", "do")).lost == 0


def readdress(node, address):
    """Gives the Ethernet another address while it is down."""
    node.ip("link", "set", node.ethernet, "down")
    node.ip("link", "set", node.ethernet, "address", address)
    node.ip("link", "set", node.ethernet, "up")


def test_new_ethernet_address(a, b):
    """The hardware address contains the GID, which follows the Ethernet's address."""
    readdress(a, "02:00:00:00:00:77")
    try:
        wait_for("the GID to change", lambda: a.gid().endswith("77"))
        wait_for("the interface's address to follow", lambda: a.link()["address"].endswith(a.gid()))
        wait_for("the carrier", a.carrier)
        reachable(b, a.address4)
        reachable(a, b.address4)
    finally:
        readdress(a, a.ethernet_mac)
        wait_for("the GID to return", lambda: a.gid().endswith("01"))


def link_local(mac):
    """What the Ethernet calls itself by this address, if its last byte alone is not 0."""
    return f"fe80::ff:fe00:{int(mac[-2:], 16):x}/64"


def test_new_ethernet_address_while_up(a, b, scaled):
    """The RDMA core enters a GID only where no old one is in use; a port that was left without one looks for it.

    Soft-RoCE crashes on a packet to an address that the Ethernet has and that is no GID, as the link-local
    one would be that does not follow without a down and up.
    """
    old, new = a.ethernet_mac, "02:00:00:00:00:78"
    try:
        for _ in range(scaled(4, least=1)):
            for before, address in ((old, new), (new, old)):
                with background(a, b):
                    reachable(a, b.address4)
                    a.ip("-6", "addr", "del", link_local(before), "dev", a.ethernet)
                    a.ip("link", "set", a.ethernet, "address", address)
                    a.ip("-6", "addr", "replace", link_local(address), "dev", a.ethernet, "nodad")
                    wait_for("the new GID", lambda: a.gid().endswith(address[-2:]))
                    wait_for("the interface's address to follow", lambda: a.link()["address"].endswith(a.gid()))
                    wait_for("the carrier", a.carrier)
                reachable(b, a.address4)
                reachable(a, b.address4)
    finally:
        readdress(a, old)
        a.ip("-6", "addr", "del", link_local(new), "dev", a.ethernet, check=False)
        wait_for("the GID to return", lambda: a.gid().endswith("01"))
        wait_for("the interface's address to return", lambda: a.link()["address"].endswith(a.gid()))


@pytest.mark.parametrize("what", ["namespace", "ethernet"])
def test_wire_is_deleted(lab, nodes, scaled, what):
    """Both RDMA devices go away at once, in two kernel threads, with the interfaces up."""
    for _ in range(scaled(10)):
        with background(*nodes):
            if what == "ethernet":
                nodes[0].ip("link", "del", nodes[0].ethernet)
            else:
                for node in nodes:
                    run("ip", "netns", "del", node.name)
        wait_for("the RDMA devices to go away", lambda: not rdma_devices(), GONE[lab.flavour])
        lab.remove_wire()
        lab.build_wire()
        lab.add_rdma()
        lab.adopt()
    assert traffic.ping(nodes[0], nodes[1].address4).lost == 0


def test_nothing_piles_up(lab, a, b, scaled):
    """Counts of RDMA objects are equal, and slab memory is flat, before and after many rounds."""

    def round_trip():
        a.ip("link", "set", a.interface, "down")
        a.ip("link", "set", a.interface, "up")
        wait_for("the carrier", a.carrier)
        reachable(a, b.address4)
        a.forget_neighbours()
        b.forget_neighbours()

    for _ in range(5):
        round_trip()
    counts, memory = objects(), slab_kib()
    rounds = scaled(100, least=10)
    for _ in range(rounds):
        round_trip()
    assert objects() == counts
    growth = slab_kib() - memory
    # KASAN keeps up to 1 MiB of what was freed for each CPU.
    slack = {"release": 512, "debug": 4096}[lab.flavour]
    assert growth < slack + 4 * rounds, f"{growth} KiB of slab more after {rounds} rounds"
    a.ip("addr", "replace", f"{a.address6}/64", "dev", a.interface)


def test_module_use_count(lab, nodes):
    """rmmod works with every interface up: no reference is held on the module itself."""
    row = next(line for line in run("lsmod").stdout.splitlines() if line.startswith(lab.module_name() + " "))
    assert row.split()[2] == "0"
    lab.unload_all()
    assert not lab.loaded()
