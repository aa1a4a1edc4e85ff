# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Nonsense gets an errno or a counted drop, and afterwards everything still works."""

import pathlib
import sys

import pytest
import traffic
from lab import run, wait_for

VM = ["--topology", "rxe"]
PACKETS = pathlib.Path(__file__).with_name("packets.py")
HEADER = 24


@pytest.mark.parametrize("param", [
    "send_queue_size=0", "send_queue_size=-1", "send_queue_size=abc", "send_queue_size=99999999999",
    "send_queue_size=", "recv_queue_size=0", "recv_queue_size=-5", "recv_queue_size=1e3", "roce=maybe",
    "max_connections=-1", "max_connections=65537", "max_connections=many",
])
def test_parameter_is_refused(no_driver, param):
    done = no_driver.load("roce=1", param, check=False)
    assert done.returncode and not no_driver.loaded()
    assert any(text in done.stdout for text in ("Invalid", "out of range")), done.stdout


@pytest.mark.parametrize("name, given, used", [
    ("send_queue_size", 1000, 1024), ("send_queue_size", 1, 128), ("send_queue_size", 100000, 8192),
    ("recv_queue_size", 3, 4), ("recv_queue_size", 1, 2), ("recv_queue_size", 100000, 8192),
])
def test_queue_size_is_rounded(no_driver, log, name, given, used):
    """M2, M3: a power of two within limits; one line says so; the value reads back."""
    no_driver.load("roce=1", f"{name}={given}")
    assert pathlib.Path(f"/sys/module/ipoib_rs/parameters/{name}").read_text().strip() == str(used)
    assert len(log.lines(name, str(used))) == 1
    no_driver.adopt()
    first, second = no_driver.nodes
    # One request at a time. A ring of two may still meet something else at the same moment.
    done = traffic.ping(first, second.address4, count=100, interval=None, wait=2)
    assert done.lost <= 10, str(done)


def test_right_sizes_say_nothing(no_driver, log):
    no_driver.load("roce=1", "send_queue_size=512", "recv_queue_size=512")
    assert not log.lines("queue_size")


def test_unknown_parameter_is_ignored(no_driver):
    no_driver.load("roce=1", "nonsense=1")
    no_driver.adopt()


@pytest.mark.parametrize("mtu", [0, 67, 4093, 65520, 65521, 4294967295])
def test_mtu_is_refused(a, mtu):
    assert a.ip("link", "set", a.interface, "mtu", mtu, check=False).returncode
    assert a.link()["mtu"] == 4092


def test_mtu_limits(a, b):
    for node in (a, b):
        for mtu in (68, 1500, 4092):
            node.ip("link", "set", node.interface, "mtu", mtu)
            assert node.link()["mtu"] == mtu
        # An MTU below 1280 took IPv6 away, and its addresses with it.
        node.ip("addr", "add", f"{node.address6}/64", "dev", node.interface)
        node.wait_ready()
    assert traffic.ping(a, b.address4, size=4064, options=("-M", "do")).lost == 0


def test_small_mtu_fragments(a, b):
    for node in (a, b):
        node.ip("link", "set", node.interface, "mtu", "576")
    assert traffic.ping(a, b.address4, count=20, size=5000).lost == 0
    for node in (a, b):
        node.ip("link", "set", node.interface, "mtu", "4092")
        node.ip("addr", "add", f"{node.address6}/64", "dev", node.interface)


def test_up_while_the_ethernet_is_down(a, b):
    a.ip("link", "set", a.interface, "down")
    a.ip("link", "set", a.ethernet, "down")
    a.ip("link", "set", a.interface, "up")
    assert not a.carrier()
    a.run("ping", "-c", "2", "-i", "0.2", "-W", "1", b.address4, check=False)
    a.ip("link", "set", a.ethernet, "up")
    wait_for("the carrier", a.carrier)
    a.ip("addr", "replace", f"{a.address6}/64", "dev", a.interface)
    a.wait_ready()
    wait_for("the peer to answer", lambda: traffic.ping(a, b.address4, count=1, wait=1).received)


def test_foreign_hardware_address_is_refused(a):
    """O10: flags, QPN and prefix are the driver's."""
    address = a.link()["address"]
    a.ip("link", "set", a.interface, "address", "00:00:00:99:" + address[12:], check=False)
    assert a.link()["address"] == address


def test_datagram_without_address(a, b):
    """H2: nothing to build a header from."""
    assert a.run(sys.executable, PACKETS, "datagram", a.interface).stdout.strip() == "EINVAL"
    assert traffic.ping(a, b.address4).lost == 0


@pytest.mark.parametrize("target", ["peer", "broadcast", "nobody", "zero", "ones"])
def test_raw_frames(a, b, target):
    """H3, H5: every length from nothing to too much, to every kind of address."""
    address = {
        "peer": b.link()["address"],
        "broadcast": b.link()["broadcast"],
        "nobody": "00:00:12:34:fe:80:00:00:00:00:00:00:00:00:de:ad:be:ef:00:01",
        "zero": ":".join(["00"] * 20),
        "ones": ":".join(["ff"] * 20),
    }[target]
    lengths = (1, 19, 20, 23, HEADER, HEADER + 1, HEADER + 4091, HEADER + 4092, HEADER + 4093, 9000, 65000)
    outcomes = a.run(sys.executable, PACKETS, "frames", a.interface, address, *lengths).stdout.split()
    for length, outcome in zip(lengths, outcomes, strict=True):
        if length < HEADER:
            assert outcome in ("ok", "EINVAL"), (length, outcome)
        else:
            assert outcome == ("ok" if length <= HEADER + 4092 else "EMSGSIZE"), (length, outcome)
    done = traffic.ping(a, b.address4, count=20)
    assert done.lost == 0, str(done)


def test_flood_of_nonsense(a, b, scaled):
    """Many frames to a QPN that does not exist leave no trace in the queue."""
    nobody = b.link()["address"].split(":")
    nobody[1:4] = ["ab", "cd", "ef"]
    lengths = [2000] * scaled(10000)
    outcomes = a.run(sys.executable, PACKETS, "frames", a.interface, ":".join(nobody), *lengths).stdout.split()
    assert len(outcomes) == len(lengths) and set(outcomes) <= {"ok", "ENOBUFS"}
    assert traffic.ping(a, b.address4, count=20).lost == 0


def test_second_driver_is_tolerated(nodes, a, b):
    """The stock driver may be loaded beside ours: it leaves RoCE alone."""
    done = run("modprobe", "ib_ipoib", check=False)
    assert traffic.ping(a, b.address4).lost == 0
    if done.returncode == 0:
        run("rmmod", "ib_ipoib")
