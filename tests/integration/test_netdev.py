# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""What everybody can see of the interface: rows N1 to N19 and E1 of the stock driver's contract.

First the laboratory itself, without a driver: when these fail, the driver is not to blame.
"""

import errno
import fcntl
import os
import pathlib
import re
import socket
import struct
import subprocess
import sys

import pytest
import sockets
import traffic
from lab import ETHERNET_MTU, INTERFACE_MTU, LabError, links, rdma_devices, run, wait_for

VM = ["--topology", "rxe"]
PACKETS = pathlib.Path(__file__).with_name("packets.py")
SIOCSIFMTU = 0x8922
BROADCAST = "00:ff:ff:ff:ff:12:40:1b:ff:ff:00:00:00:00:00:00:ff:ff:ff:ff"


def test_rdma_devices(no_driver):
    assert rdma_devices() == [node.rdma for node in no_driver.nodes]
    assert run("rdma", "link").stdout.count("state ACTIVE") == len(no_driver.nodes)


def test_gid_is_the_link_local_address(no_driver):
    assert no_driver.nodes[0].gid() == "fe:80:00:00:00:00:00:00:00:00:00:ff:fe:00:00:01"


def test_ethernet_carries_full_frames(no_driver):
    a, b = no_driver.nodes
    assert a.link(a.ethernet)["mtu"] == ETHERNET_MTU
    target = f"fe80::ff:fe00:{b.index + 1}%{a.ethernet}"
    assert traffic.ping(a, target, count=20, size=ETHERNET_MTU - 48, options=("-M", "do")).lost == 0


def test_verified_transfer(no_driver):
    a, b = no_driver.nodes
    for node in (a, b):
        node.ip("addr", "replace", f"192.168.9.{node.index + 1}/24", "dev", node.ethernet)
    traffic.Transfer(a, b, 1 << 20, address="192.168.9.2").verify()
    with traffic.Iperf(b) as iperf:
        end = iperf.run(a, blocks=32, address="192.168.9.2")
    # The server counts what came before the client said that it is done.
    assert end["sum_sent"]["bytes"] >= 32 << 17 and end["sum_received"]["bytes"] > 0, end
    for node in (a, b):
        node.ip("addr", "flush", "dev", node.ethernet, "to", "192.168.9.0/24")


def test_stock_driver_ignores_roce(no_driver):
    """M8: ib_ipoib binds InfiniBand ports only, so the field is ours."""
    run("modprobe", "ib_ipoib")
    assert not any(node.find_interface() for node in no_driver.nodes)


def test_name_at_birth(no_driver):
    """N1."""
    no_driver.load()
    for node in no_driver.nodes:
        _, name = wait_for("the interface", node.find_interface)
        assert re.fullmatch(r"ib\d+", name)


def test_type_and_lengths(a):
    """N2."""
    assert a.link()["link_type"] == "infiniband"
    assert a.sysfs("type") == "32"
    assert a.sysfs("addr_len") == "20"


def test_hardware_address(a):
    """N3: flags, QPN, GID. The flags say that connections are taken."""
    address = a.link()["address"]
    assert address.startswith("80:") and address.endswith(a.gid())
    assert a.qpn() > 1


def test_queue_pair_number_survives_down_and_up(a):
    """N3."""
    before = a.link()["address"]
    a.ip("link", "set", a.interface, "down")
    assert a.link()["address"] == before
    a.ip("link", "set", a.interface, "up")
    a.wait_ready()
    assert a.link()["address"] == before


def test_broadcast_address(a):
    """N4."""
    assert a.link()["broadcast"] == BROADCAST


def test_flags(a):
    """N5."""
    flags = a.link()["flags"]
    assert {"BROADCAST", "MULTICAST", "UP", "LOWER_UP"} <= set(flags)
    assert not {"NOARP", "LOOPBACK", "POINTOPOINT"} & set(flags)


@pytest.mark.parametrize("feature", ["scatter-gather", "highdma", "vlan-challenged", "generic-receive-offload"])
def test_feature(a, feature):
    """N6."""
    text = a.run("ethtool", "-k", a.interface).stdout
    assert re.search(rf"^\s*{feature}: on", text, re.M), text


def test_queue_length(a):
    """N9."""
    assert a.link()["txqlen"] == 1000


def test_mtu(a):
    """N10, N11: an IB MTU of 4096 less the 4-byte header."""
    link = a.link()
    assert (link["mtu"], link["min_mtu"], link["max_mtu"]) == (4092, 68, 4092)


def error_of_mtu(node, mtu):
    """Asks for an MTU; the errno of a refusal."""
    with sockets.make(node, socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock, SIOCSIFMTU, struct.pack("16si12x", node.interface.encode(), mtu))
        except OSError as error:
            return error.errno
    return 0


@pytest.mark.parametrize("ethernet_mtu, most", [(2200, 2044), (ETHERNET_MTU, INTERFACE_MTU)])
def test_mtu_limits(a, b, ethernet_mtu, most):
    """B63: what fits into the port's IB MTU is taken and can be used to the last byte, the rest is EINVAL."""
    for node in (a, b):
        node.ip("link", "set", node.ethernet, "mtu", ethernet_mtu)
    for node in (a, b):
        wait_for("the MTU to follow", lambda: node.link()["mtu"] == node.link()["max_mtu"] == most)
        wait_for("the carrier", node.carrier)
    before = most
    for mtu in (67, 68, 71, 72, 2044, 2045, 4091, 4092, 4093, 65520, -1, 0):
        if not 68 <= mtu <= most:
            assert error_of_mtu(a, mtu) == errno.EINVAL, mtu
            assert a.link()["mtu"] == before
            continue
        assert error_of_mtu(a, mtu) == 0, mtu
        assert a.link()["mtu"] == mtu
        done = traffic.ping(a, b.address4, count=2, size=mtu - 28, options=("-M", "do"))
        assert done.lost == 0, (mtu, str(done))
        before = mtu


def test_mtu_of_the_administrator(a):
    """B63: a choice is remembered while the port cannot have it, and holds again when it can."""
    assert error_of_mtu(a, 4000) == 0
    a.ip("link", "set", a.ethernet, "mtu", 2200)
    wait_for("the MTU to shrink", lambda: a.link()["mtu"] == 2044)
    a.ip("link", "set", a.ethernet, "mtu", ETHERNET_MTU)
    wait_for("the MTU to return", lambda: a.link()["mtu"] == 4000)


def test_lock_rules(a, b, scaled):
    """B57: whatever an administrator changes, the stack finds the locks held that it wants, and says nothing."""
    for _ in range(scaled(6, least=1)):
        for words in (("mtu", 2000), ("mtu", INTERFACE_MTU), ("promisc", "on"), ("promisc", "off"),
                      ("allmulticast", "on"), ("allmulticast", "off"), ("txqueuelen", 500), ("txqueuelen", 1000),
                      ("multicast", "off"), ("multicast", "on"), ("down",), ("mtu", 1500), ("up",), ("mtu", INTERFACE_MTU)):
            a.ip("link", "set", a.interface, *words)
        for feature in ("gso", "gro"):
            for state in ("off", "on"):
                a.run("ethtool", "-K", a.interface, feature, state)
        for options in (("-i",), ("-S",), ("-g",), ("-k",), ()):
            a.run("ethtool", *options, a.interface)
    a.ip("addr", "replace", f"{a.address6}/64", "dev", a.interface)
    a.wait_ready()
    assert traffic.ping(a, b.address4, size=4000).lost == 0


def test_port_number(a):
    """N12."""
    assert a.sysfs("dev_port") == "0"
    assert a.sysfs("dev_id") == "0x0"


def test_carrier_and_operstate(a):
    """N15, N16."""
    assert a.sysfs("carrier") == "1" and a.link()["operstate"] == "UP"
    a.ip("link", "set", a.interface, "down")
    assert a.link()["operstate"] == "DOWN" and not a.carrier()


def test_link_kind(a):
    """N18."""
    assert a.link()["linkinfo"]["info_kind"] == "ipoib"


def test_namespace_refund(a):
    """N19: an interface in a namespace that goes away returns to the initial one."""
    address = a.link()["address"]
    run("ip", "netns", "add", "shelter")
    a.ip("link", "set", a.interface, "netns", "shelter")
    assert a.interface in links("shelter")
    run("ip", "netns", "del", "shelter")
    wait_for("the interface to come back",
             lambda: any(row.get("address") == address for row in links().values()))


def test_ethtool_driver(a):
    """E1."""
    text = a.run("ethtool", "-i", a.interface).stdout
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    assert fields["driver"] == "ipoib_rs"
    assert fields["version"] == os.uname().release
    # It belongs to nothing.
    assert fields["bus-info"] == a.rdma


def test_ethtool_link(a):
    """E6."""
    assert "Link detected: yes" in a.run("ethtool", a.interface).stdout


def settings(node):
    """`ethtool`, by name."""
    return dict(re.findall(r"^\s+([A-Z][\w -]*): (.*)$", node.run("ethtool", node.interface).stdout, re.M))


def test_speed(a):
    """E5: that of the port, as long as there is a carrier."""
    speed = int(a.run("cat", f"/sys/class/net/{a.ethernet}/speed").stdout)
    assert speed > 0 and a.sysfs("speed") == str(speed)
    found = settings(a)
    assert (found["Speed"], found["Duplex"], found["Port"]) == (f"{speed}Mb/s", "Full", "Other"), found
    a.ip("link", "set", a.interface, "down")
    try:
        found = settings(a)
        assert (found["Speed"][:7], found["Duplex"][:7], found["Link detected"]) == ("Unknown", "Unknown", "no"), found
    finally:
        a.ip("link", "set", a.interface, "up")
    a.wait_ready()


def test_time_stamps(a):
    """Packets that go are stamped in software."""
    text = a.run("ethtool", "-T", a.interface).stdout
    assert "software-transmit" in text and "hardware-transmit" not in text, text


def test_ring_sizes(a):
    """`ethtool -g` shows the sizes that the module was loaded with, and the largest there are."""
    text = a.run("ethtool", "-g", a.interface).stdout
    largest, present = text.split("Current hardware settings")
    sizes = [{name: int(value) for name, value in re.findall(r"^(RX|TX):\s+(\d+)$", part, re.M)} for part in (largest, present)]
    parameters = {name: int(pathlib.Path(f"/sys/module/ipoib_rs/parameters/{file}_queue_size").read_text())
                  for name, file in (("RX", "recv"), ("TX", "send"))}
    assert sizes == [{"RX": 8192, "TX": 8192}, parameters], text


def test_received_header(a, b):
    """H4: 20 zero bytes, the protocol, two zero bytes."""
    capture = b.start(sys.executable, PACKETS, "arp", b.interface)
    assert capture.stdout.readline().strip() == "ready"
    a.forget_neighbours()
    a.run("ping", "-c", "1", "-W", "5", b.address4)
    frame = bytes.fromhex(capture.communicate(timeout=30)[0])
    assert frame[:20] == bytes(20)
    assert frame[20:24] == b"\x08\x06\0\0"
    # ARP over InfiniBand: hardware type 32, 20-byte addresses (RFC 4391 section 9).
    assert frame[24:32] == b"\x00\x20\x08\x00\x14\x04\x00\x01"
    assert frame[32:52].hex(":") == a.link()["address"]


def test_statistics(a, b):
    """Every packet is counted once, on both sides."""
    a.run("ping", "-c", "1", "-W", "5", b.address4)
    sent, arrived = a.statistics(), b.statistics()
    a.run("ping", "-q", "-c", "100", "-i", "0.002", "-s", "1000", b.address4)

    def grown():
        return {f"{node} {side}": {key: value - old[side][key] for key, value in now[side].items()}
                for node, now, old in ((a, a.statistics(), sent), (b, b.statistics(), arrived)) for side in ("rx", "tx")}

    # ping ends when it has the last reply, which may be before all of it is counted.
    wait_for("all packets to be counted", lambda: all(counts["packets"] >= 100 for counts in grown().values()))
    for side, counts in grown().items():
        assert 100 <= counts["packets"] <= 110, side
        assert 100 * 1028 <= counts["bytes"] <= 115 * 1052 + 2000, side
        assert counts["errors"] == counts["dropped"] == 0, side


def test_counters_of_queues(a, b):
    """`ethtool -S` has each ring's counters, and says what `ip -s link` says."""
    a.run("ping", "-q", "-c", "100", "-i", "0.002", "-s", "1000", b.address4)

    def while_nothing_came():
        before = a.statistics()
        rows = sockets.counters(a)
        return (rows, before) if a.statistics() == before else None

    rows, shown = wait_for("a moment without traffic", while_nothing_came)
    assert rows["tx_queue_0_packets"] >= 100 and rows["rx_queue_0_packets"] >= 100
    for side in ("rx", "tx"):
        queues = len(a.run("sh", "-c", f"ls -d /sys/class/net/{a.interface}/queues/{side}-*").stdout.split())
        for name, total in (("packets", "packets"), ("bytes", "bytes"), ("drops", "dropped")):
            counts = [rows[f"{side}_queue_{queue}_{name}"] for queue in range(queues)]
            assert sum(counts) == shown[side][total], (side, name, counts, shown)
    for side, name in (("rx", "packets"), ("rx", "bytes"), ("tx", "packets"), ("tx", "bytes"), ("tx", "errors"),
                       ("rx", "dropped"), ("tx", "dropped")):
        assert rows[f"{side}_{name}"] == shown[side][name]
    assert rows["multicast"] == shown["rx"]["multicast"]


def test_load_without_devices(no_driver):
    """roce=1 without a RoCE device: loads, makes nothing, unloads."""
    for node in no_driver.nodes:
        node.delete_rdma()
    no_driver.load("roce=1")
    assert not any(row.get("link_type") == "infiniband"
                   for space in (None, *(node.name for node in no_driver.nodes)) for row in links(space).values())
    no_driver.unload_all()


def test_no_roce_by_default(no_driver, log):
    """Section 6 of the design: nobody with a RoCE NIC wants surprise interfaces."""
    no_driver.load("roce=0")
    assert all(node.find_interface() is None for node in no_driver.nodes)
    assert 1 <= len(log.lines("roce=1")) <= len(no_driver.nodes)
    no_driver.unload_all()


def test_named_devices_only(no_driver):
    """`hcas` names the RDMA devices that get an interface. One may appear later, so names of none are no error."""
    first, second = no_driver.nodes
    no_driver.load("roce=1", f"hcas=nobody,{second.rdma}")
    wait_for("the interface", second.find_interface)
    assert first.find_interface() is None
    second.delete_rdma()
    second.add_rdma()
    first.delete_rdma()
    first.add_rdma()
    wait_for("the interface of a new device", second.find_interface)
    assert first.find_interface() is None
    no_driver.unload_all()
    no_driver.load("roce=1", "hcas=nobody")
    assert all(node.find_interface() is None for node in no_driver.nodes)
    no_driver.unload_all()


def test_devices_after_the_module(no_driver):
    """RDMA devices that appear later get their interface too."""
    for node in no_driver.nodes:
        node.delete_rdma()
    no_driver.load()
    for node in no_driver.nodes:
        node.add_rdma()
    no_driver.adopt()


def test_module_information(lab):
    text = run("modinfo", lab.module_file).stdout
    for needle in ("Dual BSD/GPL", "rtnl-link-ipoib", "roce:", "send_queue_size:", "recv_queue_size:"):
        assert needle in text
