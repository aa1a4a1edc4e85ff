# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Every fault of the test fabric, in either mode, whatever goes on: traffic comes back by itself.

A cell is a fault, a mode and a load. It passes only if the fault struck, and if after its end single
packets and packets to a group arrive again within the fault's limit, in guest time, without anybody's
help. The full tier runs all cells; with loop counts scaled down there is one for each fault.
`tools/reliability` makes Documentation/reliability.rst of what the cells leave in $RESULTS.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import socket
import struct
import threading
import time

import connected
import pytest
import sockets
from fabric import DEBUG, control
from lab import RESULTS, LabError, objects, wait_for

VM = ["--topology", "fabric", "--nodes", "3"]
SHORT = float(os.environ.get("IPOIB_SCALE", "1")) < 1
LOADS = ("idle", "stream", "multicast")
CELLS = list(itertools.product(connected.MODES, LOADS))
GROUP, PORT = "239.1.2.3", 7700
# Seconds until traffic is back.
LINK, VERB, MANAGER, WATCHDOG = 10, 10, 30, 30
REPORT = RESULTS / "reliability.jsonl"


@dataclasses.dataclass
class Fault:
    """`begin` and `end` are lines for the fabric, with {a}, {b} for the nodes' slots; `poke` makes chances for it."""

    begin: tuple
    end: tuple
    limit: int
    # What it is called where the fabric counts, and whose it is; or "filter", "carrier", "manager", "lid".
    hit: str
    node: str = "a"
    poke: str = ""
    modes: tuple = connected.MODES


def verb(name, node="a", rule="n=20", poke="", limit=VERB, modes=connected.MODES):
    return Fault((f"fault {{{node}}} {name} {rule}",), (f"fault {{{node}}} {name} off",), limit, name, node, poke, modes)


def mads(rule, poke="", limit=MANAGER, modes=connected.MODES):
    return Fault((f"filter add {rule}",), ("filter clear",), limit, "filter", "a", poke, modes)


def link(begin, end=()):
    return Fault(begin, end, LINK, "carrier", "b")


ONLY = ("connected",)
FAULTS = {
    "a cable is pulled out": link(("link {b} down",), ("link {b} up",)),
    "a cable bounces": link(("bounce {b}",)),
    "the switch forgets all": link(("reset_switch",)),
    "packets are lost": verb("drop", rule="n=all ppm=300000"),
    "packets come twice": verb("dup", rule="n=all ppm=300000", modes=("datagram",)),
    "packets come late": verb("delay", rule="value=20000 n=all ppm=300000"),
    "packets are damaged": verb("corrupt", rule="n=all ppm=300000"),
    "posting a send fails": verb("fail_post_send"),
    "posting a receive fails": verb("fail_post_recv", "b"),
    "posting a shared receive fails": verb("fail_post_srq", "b", modes=ONLY),
    "a send fails": verb("send_status", rule="value=2 n=3"),
    "a receive fails": verb("recv_status", "b", rule="n=3"),
    "a receiver is not ready": verb("rnr", "b", rule="n=3", modes=ONLY),
    # Not the handle of ib_sa's, which it makes after events only, and does without if it fails.
    "making an address handle fails": verb("create_ah", rule="n=3", poke="updown"),
    "making a queue pair fails": verb("create_qp", rule="n=2", poke="mode", modes=ONLY),
    "a queue pair does not become ready": verb("modify_qp_rtr", rule="n=2", poke="mode", modes=ONLY),
    "joining fails": verb("attach_mcast", rule="n=2", poke="updown"),
    "asking the port fails": verb("query_port", rule="n=2", poke="reregister"),
    "completions are not told of": verb("lose_cq_event", rule="n=3", limit=WATCHDOG),
    "sends get stuck": verb("stall_send", rule="n=all", limit=WATCHDOG),
    "paths are not answered": mads("class=3 attr=0x35 method=0x81 drop", "forget"),
    "joins are not answered": mads("class=3 attr=0x38 method=0x81 drop", "reregister"),
    "answers are late": mads("class=3 method=0x81 delay=300000", "reregister"),
    "requests for connections are lost": mads("class=7 attr=0x10 drop", "mode", modes=ONLY),
    "replies for connections are lost": mads("class=7 attr=0x13 drop", "mode", modes=ONLY),
    "ends of connections are lost": mads("class=7 attr=0x15 drop", "mode", modes=ONLY),
    "the manager dies": Fault((), (), MANAGER, "manager"),
    "a port has another LID": Fault(("set_lid {b} 77",), ("trap 128",), MANAGER, "lid", "b"),
    "clients are to register again": Fault(("reregister {a}",), (), MANAGER, "reregister", "a"),
}


def id_of(name, mode, load):
    return f"{name}-{mode}-{load}".replace(" ", "_")


def cells():
    """All, or one for each fault, each time another combination."""
    for number, (name, fault) in enumerate(FAULTS.items()):
        rows = [cell for cell in CELLS if cell[0] in fault.modes]
        for mode, load in [rows[number % len(rows)]] if SHORT else rows:
            yield pytest.param(name, mode, load, id=id_of(name, mode, load))


class Group:
    """Numbered packets to a group, that an ear at the other node waits for."""

    def __init__(self, sender, receiver):
        self.out, self.ear = sockets.udp(sender), sockets.udp(receiver, port=PORT)
        index = struct.pack("=4s4si", socket.inet_aton(GROUP), bytes(4), sockets.index_of(receiver))
        self.ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, index)
        index = struct.pack("=4s4si", bytes(4), bytes(4), sockets.index_of(sender))
        self.out.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, index)
        self.number = 0
        self.over = threading.Event()

    def send(self):
        """False if the stack refused it."""
        self.number += 1
        try:
            self.out.sendto(struct.pack("=Q", self.number) + bytes(1000), (GROUP, PORT))
        except OSError:
            return False
        return True

    def arrives(self):
        """Whether what is sent now arrives soon."""
        sockets.nothing_waits(self.ear)
        self.send()
        wanted = self.number
        return any(struct.unpack("=Q", data[:8])[0] >= wanted for data in sockets.received(self.ear, 1, limit=0.2))

    @contextlib.contextmanager
    def flood(self):
        def run():
            while not self.over.wait(0.002):
                self.send()

        self.over.clear()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()

    def close(self):
        self.out.close()
        self.ear.close()


@contextlib.contextmanager
def load_of(kind, a, b, group):
    if kind == "idle":
        yield
    elif kind == "multicast":
        with group.flood():
            yield
    else:
        with sockets.background([sockets.Stream(a, b, 7710)]):
            yield


def poke(fault, lab, a, b, mode):
    """Gives the fault a chance, if the load does not."""
    match fault.poke:
        case "forget":
            a.forget_neighbours()
            control(f"reregister {a.index}")
        case "mode":
            connected.set_mode(a, "datagram")
            connected.set_mode(a, mode)
        case "updown":
            a.ip("link", "set", a.interface, "down")
            a.ip("link", "set", a.interface, "up")
        case "reregister":
            control(f"reregister {a.index}")
    connected.answers(a, b.address4, wait=0.2)


def filter_hits():
    return sum(int(number) for number in re.findall(r"hits=(\d+)", (DEBUG / "filters").read_text()))


def struck(fault, node, before):
    """Whether the fault has done something."""
    match fault.hit:
        case "filter":
            return filter_hits() > 0
        case "carrier":
            return int(node.sysfs("carrier_changes")) > before
        case "lid":
            return node.lid() == 77
        case "manager" | "reregister":
            return True
        case name:
            return connected.hits(node, name) > before


def count(fault, node):
    match fault.hit:
        case "carrier":
            return int(node.sysfs("carrier_changes"))
        case "filter" | "lid" | "manager" | "reregister":
            return 0
        case name:
            return connected.hits(node, name)


@pytest.fixture(scope="module")
def ends(lab):
    """Both modes have been in use before what there is gets counted."""
    lab.restore()
    a, b, _ = lab.nodes
    REPORT.unlink(missing_ok=True)
    connected.connect(a, b, mtu=connected.MTU)
    connected.comes_back(a, b.address4)
    connected.datagrams(a, b)
    yield a, b
    connected.datagrams(*lab.nodes)


@pytest.mark.parametrize("name, mode, load", cells())
def test_cell(lab, nodes, ends, name, mode, load):
    fault = FAULTS[name]
    a, b = ends
    group = Group(a, b)
    size = 30000 if mode == "connected" else 1000
    node = {"a": a, "b": b}[fault.node]
    slots = {"a": a.index, "b": b.index}
    result = {"id": id_of(name, mode, load), "fault": name, "mode": mode, "load": load,
              "modes": fault.modes, "limit": fault.limit, "ok": False}
    try:
        for end in (a, b):
            connected.set_mode(end, mode)
        connected.comes_back(a, b.address4, size)
        wait_for("the group", group.arrives, 30)
        before = count(fault, node)
        with load_of(load, a, b, group):
            for line in fault.begin:
                control(line.format(**slots))
            if fault.hit == "manager":
                lab.manager.kill()
                control(f"reregister {a.index}")
            wait_for(f"the fault: {name}", lambda: struck(fault, node, before) or poke(fault, lab, a, b, mode), 30)
            connected.answers(a, b.address4, size, wait=0.5)
            for line in fault.end:
                control(line.format(**slots))
            if fault.hit == "manager":
                lab.manager.start()
            start = time.monotonic()
            if fault.hit == "carrier" or fault.hit == "manager":
                # What the subnet's manager takes is not the driver's.
                lab.wait_wire()
                start = time.monotonic()
            wait_for(f"{b} to answer after {name}", lambda: connected.answers(a, b.address4, size, wait=0.2), fault.limit)
            if load != "multicast":
                wait_for(f"the group after {name}", group.arrives, fault.limit)
            result["seconds"] = round(time.monotonic() - start, 2)
        if load == "multicast":
            wait_for(f"the group after {name}", group.arrives, fault.limit)
        if result["seconds"] > fault.limit:
            raise LabError(f"{name}: it took {result['seconds']} s")
        result["ok"] = True
    finally:
        with REPORT.open("a") as file:
            file.write(json.dumps(result) + "\n")
        control("filter clear")
        for line in (DEBUG / "faults").read_text().splitlines():
            words = line.split()
            if words[-1] != "off":
                control(f"fault {words[0].removeprefix('ibf')} {words[1]} off")
        group.close()
    lab.check_anomalies()


def test_nothing_is_left(lab, ends):
    """No object of all those connections and address handles piles up."""
    connected.datagrams(*lab.nodes)
    a, _ = ends

    def few():
        return all(int(connected.state(node)["qp"]) == 3 and int(connected.state(node)["ah"]) < 64 for node in lab.nodes)

    wait_for("the objects to go", few, 30)
    assert all(row.get("qp", 0) < 8 for row in objects().values())
