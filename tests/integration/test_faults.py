# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Memory runs out at every possible moment: what fails fails cleanly, and everything works again by itself."""

import contextlib
import ctypes
import errno
import os
import socket
import time

import faults
import pytest
import sockets
import traffic
from lab import LabError, objects, wait_for
from lab import log as say

VM = ["--topology", "rxe"]
SYS_FINIT_MODULE = 313


@pytest.fixture(autouse=True)
def no_faults(log):
    """Whatever a test left behind: before and afterwards nothing fails."""
    faults.reset()
    yield
    faults.reset()


def works_again(a, b):
    """Without help: no module is loaded anew, no interface set up."""
    for node, peer in ((a, b), (b, a)):
        wait_for(f"{peer} to answer {node}",
                 lambda: traffic.ping(node, peer.address4, count=1, wait=1).received, 90)
    assert traffic.ping(a, b.address4, count=50, size=2000, interval=0.02).lost == 0


@contextlib.contextmanager
def hoard(sender, receiver, count):
    """Packets that nobody reads keep the pages of the receive ring: it has to have others."""
    with sockets.udp(receiver, 7510) as sink, sockets.udp(sender) as sock:
        sink.setsockopt(socket.SOL_SOCKET, sockets.SO_RCVBUFFORCE, 64 << 20)

        def more():
            with contextlib.suppress(OSError):
                for _ in range(count):
                    sock.sendto(bytes(3000), (receiver.address4, 7510))

        yield more


@pytest.mark.parametrize("kind", faults.KINDS)
def test_under_traffic(lab, a, b, scaled, kind):
    """Buffers, entries and address handles are not to be had now and then; streams go on, nothing is stuck."""
    before = objects()
    times = scaled(2000, least=100)
    streams = [sockets.Stream(a, b, 7500), sockets.Stream(b, a, 7501)]
    with sockets.background(streams), hoard(a, b, 60) as more, faults.Random(lab, kind, 10, times) as faulty:
        end = time.monotonic() + scaled(20, least=10)
        while time.monotonic() < end and faulty.hits() != times:
            more()
            for node in (a, b):
                # Entries may come back faster than they go.
                node.ip("neigh", "flush", "dev", node.interface, check=False)
                with sockets.udp(node) as sock, contextlib.suppress(OSError):
                    for number in range(20):
                        sock.sendto(bytes(3000), (f"10.0.0.{20 + number}", 9))
            time.sleep(0.2)
        hits = faulty.hits()
    print(f"{hits} allocations failed")
    assert hits is None or hits > 0, "nothing failed"
    works_again(a, b)
    assert objects() == before


def test_up_with_each_allocation_failing(lab, a, b, scaled):
    """`ip link set up` fails with ENOMEM or works, whichever of its allocations fails."""
    before = objects()
    refused = failed = number = 0
    with sockets.make(a, socket.AF_INET, socket.SOCK_DGRAM) as sock, \
            faults.Nth(faults.code_of_module, lab.module_name()) as nth:
        happened = True
        while happened:
            number += 1 + number // max(4, scaled(20))
            faults.set_up(sock, a, False)
            try:
                happened = nth.fail(number, lambda: faults.set_up(sock, a, True))
            except OSError as error:
                assert error.errno in faults.NO_MEMORY, error
                refused += 1
            failed += happened
    print(f"{failed} of at most {number} allocations failed, {refused} attempts were refused")
    assert failed
    a.ip("link", "set", a.interface, "up")
    works_again(a, b)
    assert objects() == before


@pytest.mark.parametrize("kind", faults.KINDS)
def test_up_and_down(lab, a, b, scaled, kind):
    """Up and down while the driver's allocations fail at random, in whatever context."""
    before = objects()
    with sockets.make(a, socket.AF_INET, socket.SOCK_DGRAM) as sock, hoard(b, a, 60) as more, \
            faults.Random(lab, kind, 5, 100000) as faulty:
        for _ in range(scaled(40, least=10)):
            more()
            for up in (False, True):
                try:
                    faults.set_up(sock, a, up)
                except OSError as error:
                    assert up and error.errno in faults.NO_MEMORY, error
            with contextlib.suppress(LabError):
                wait_for("the carrier", a.carrier, 0.5, may_fail=True)
        hits = faulty.hits()
    print(f"{hits} allocations failed")
    assert hits is None or hits > 0, "nothing failed"
    a.ip("link", "set", a.interface, "up")
    works_again(a, b)
    assert objects() == before


def load_module(path, parameters):
    """insmod as a single system call."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        if libc.syscall(SYS_FINIT_MODULE, file.fileno(), parameters.encode(), 0):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


# Where the failing allocations are made, and whether what fails is one port's interface only. Not below
# what the kernel does for every module: that would say so in the log. The last is a notifier: the network
# stack takes back a device that it had registered already.
#
# The whole of a module's start has the HCA's queues in it, for which Soft-RoCE asks vmalloc(), which says loudly what it
# does not get. There it is vmalloc() that is spared, and of a reference tracker the kernel tells once.
PLACES = [("do_init_module", False, "__vmalloc_node_range_noprof"), ("register_netdevice", True, faults.LOUD),
          ("inetdev_event", True, faults.LOUD)]


@pytest.mark.parametrize("place, of_a_port, spared", PLACES, ids=[place for place, *_ in PLACES])
def test_load_with_allocations_failing(lab, nodes, log, scaled, place, of_a_port, spared):
    """Failed-init paths: the module loads, or does not and says ENOMEM; one port's failure is that port's only."""
    lab.unload_all()
    without = objects()
    parameters = " ".join(lab.params)
    refused = loaded = number = 0
    if spared != faults.LOUD:
        say("provoked unreliable refcount tracker")
    with faults.Nth(faults.code_of_function, place, spared) as nth:
        happened = True
        while happened:
            number += 1 + number // max(3, scaled(10))
            try:
                happened = nth.fail(number, lambda: load_module(lab.module_file, parameters))
                loaded += 1
            except OSError as error:
                assert error.errno == errno.ENOMEM and not of_a_port, (number, error)
                assert not lab.loaded()
                refused += 1
            if lab.loaded():
                assert not of_a_port or any(node.find_interface() for node in nodes), number
                lab.unload_all()
            assert objects() == without, number
    ports = len(log.lines("attaching failed"))
    print(f"at most {number} allocations; {refused} loads refused, {loaded} worked, {ports} times a port failed")
    assert not faults.injecting() or (ports if of_a_port else refused)
    lab.load()
    lab.adopt()
    works_again(*nodes[:2])


def test_up_without_memory(lab, a, b):
    """`ip link set up` fails with ENOMEM or works, for a few allocations."""
    before = objects()
    with sockets.make(a, socket.AF_INET, socket.SOCK_DGRAM) as sock, \
            faults.Nth(faults.code_of_module, lab.module_name()) as nth:
        for number in (1, 2, 8, 32):
            faults.set_up(sock, a, False)
            try:
                assert nth.fail(number, lambda: faults.set_up(sock, a, True)) or number > 2
            except OSError as error:
                assert error.errno in faults.NO_MEMORY, error
    a.ip("link", "set", a.interface, "up")
    a.ip("addr", "replace", f"{a.address6}/64", "dev", a.interface)
    a.wait_ready()
    works = traffic.ping(a, b.address4, count=5, wait=5)
    assert works.received, str(works)
    assert objects() == before
