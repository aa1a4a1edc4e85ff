# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Connected mode: rows S1, R1, R3, O5 of the stock driver's contract, RFC 4755, and cases B13, B21, B37, B38, B39, B41, B43.

What no driver would say or do is tested in the module itself, against a raw peer (cm/selftest.rs).
"""

import errno
import itertools
import pathlib
import re
import signal
import socket
import struct
import time

import pytest
import sockets
import traffic
from conftest import SCALE
from lab import INTERFACE_MTU, objects, slab_kib, wait_for

VM = ["--topology", "rxe", "--nodes", "3"]
CONNECTED_MTU = 65520
MODES = ("datagram", "connected")


def mtu_of(node):
    return int(node.sysfs("mtu"))


def set_mode(node, mode):
    node.write_sysfs("mode", mode + "\n")


def count_of(lab, short, full):
    """Rounds on a kernel: together both do what the issue asks for."""
    return (full if SCALE == 1 else short)[lab.flavour]


def mode_by_netlink(node):
    return node.link()["linkinfo"]["info_data"]["mode"]


@pytest.fixture(autouse=True)
def datagram_again(request, lab):
    """The next test finds datagram mode and its MTU."""
    yield
    if "no_driver" in request.fixturenames:
        return
    for node in lab.nodes:
        if node.link():
            set_mode(node, "datagram")
            if mtu_of(node) != INTERFACE_MTU:
                node.ip("link", "set", node.interface, "mtu", INTERFACE_MTU)


def connect(*nodes):
    for node in nodes:
        set_mode(node, "connected")


def opened(node):
    return sockets.counters(node)["conn_opened"]


def settled_objects():
    """Counts of RDMA objects, once they have been the same for two seconds."""
    last, since = None, 0

    def same():
        nonlocal last, since
        row = objects()
        if row != last:
            last, since = row, time.monotonic()
        return time.monotonic() - since > 2

    wait_for("the objects of connections to go", same, timeout=30, every=0.1)
    return last


def test_a_new_interface_sends_datagrams(a):
    assert a.sysfs("mode") == "datagram" and mode_by_netlink(a) == "datagram"


def test_address_says_that_connections_are_taken(nodes):
    """R4755-3.1: in either mode."""
    for mode in MODES:
        for node in nodes:
            set_mode(node, mode)
            assert node.link()["address"].startswith("80:")


@pytest.mark.parametrize("end", ["", "\n"], ids=["bare", "line"])
def test_mode_in_sysfs(a, end):
    """S1, and the same without the end of the line."""
    for mode in ("connected", "datagram", "datagram", "connected"):
        a.write_sysfs("mode", mode + end)
        assert a.sysfs("mode") == mode and mode_by_netlink(a) == mode


def test_mode_from_a_shell(a):
    """S1 as users write it."""
    for mode in ("connected", "datagram"):
        a.run("sh", "-c", f"echo {mode} > /sys/class/net/{a.interface}/mode")
        assert a.sysfs("mode") == mode


def test_mode_by_netlink(a):
    """R1, R3."""
    for mode in ("connected", "datagram"):
        a.ip("link", "set", a.interface, "type", "ipoib", "mode", mode)
        assert a.sysfs("mode") == mode and mode_by_netlink(a) == mode


@pytest.mark.parametrize("mode", MODES)
def test_bad_mode_is_refused(a, mode):
    """B41, and nothing changes."""
    set_mode(a, mode)
    mtu = mtu_of(a)
    for text in ("\n", "Connected", "connected ", " connected", "connected\n\n", "connectedx", "conn", "1", "datagram\0",
                 "uc", "connected\ndatagram\n", "x" * 4095):
        with pytest.raises(OSError) as refused:
            a.write_sysfs("mode", text)
        assert refused.value.errno == errno.EINVAL, text
        assert a.sysfs("mode") == mode and mtu_of(a) == mtu, text
    a.write_sysfs("mode", "")  # no call of the driver
    done = a.ip("link", "set", a.interface, "type", "ipoib", "mode", "nonsense", check=False)
    assert done.returncode and a.sysfs("mode") == mode and mtu_of(a) == mtu


def wish_for_mode(node, data):
    return sockets.wish_for_link(node, {2: data})


@pytest.mark.parametrize("mode", MODES)
def test_bad_mode_is_refused_by_netlink(a, mode):
    set_mode(a, mode)
    mtu = mtu_of(a)
    for number in (2, 3, 255, 256, 65535):
        assert wish_for_mode(a, struct.pack("=H", number)) == (errno.EINVAL, "mode is datagram or connected")
    for data in (b"", b"\1"):
        assert wish_for_mode(a, data)[0], data
    assert a.sysfs("mode") == mode and mtu_of(a) == mtu
    assert wish_for_mode(a, struct.pack("=H", 1 - MODES.index(mode))) == (0, None)
    assert a.sysfs("mode") != mode


def test_bad_mtu_is_refused(a):
    """O5."""
    connect(a)
    for mtu in (0, 67, 65521, 100000, 4294967295):
        assert a.ip("link", "set", a.interface, "mtu", mtu, check=False).returncode, mtu
        assert mtu_of(a) == CONNECTED_MTU, mtu


def test_mtu_of_each_mode(a):
    """C3: the largest by default, and what the administrator chose in that mode when it comes back."""
    assert (a.link()["mtu"], a.link()["max_mtu"]) == (INTERFACE_MTU, INTERFACE_MTU)
    set_mode(a, "connected")
    assert (a.link()["mtu"], a.link()["max_mtu"]) == (CONNECTED_MTU, CONNECTED_MTU)
    a.ip("link", "set", a.interface, "mtu", 9000)
    set_mode(a, "datagram")
    assert a.link()["mtu"] == INTERFACE_MTU
    a.ip("link", "set", a.interface, "mtu", 2000)
    set_mode(a, "connected")
    assert a.link()["mtu"] == 9000
    set_mode(a, "datagram")
    assert a.link()["mtu"] == 2000
    set_mode(a, "connected")
    a.ip("link", "set", a.interface, "mtu", CONNECTED_MTU)


def test_mode_survives_down_and_up(a, b):
    connect(a, b)
    a.ip("link", "set", a.interface, "down")
    assert (a.sysfs("mode"), a.link()["mtu"]) == ("connected", CONNECTED_MTU)
    a.repair()
    a.ip("link", "set", a.interface, "mtu", CONNECTED_MTU)
    a.wait_ready()
    assert traffic.ping(a, b.address4, size=60000, interval=0.1).lost == 0


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("modes", [("datagram", *MODES), ("connected",) * 3], ids=["mixed", "connected"])
def test_every_pair(nodes, modes, family):
    """A node that connects and one that does not talk, whoever starts; what is too long is cut by the stack."""
    for node, mode in zip(nodes, modes):
        set_mode(node, mode)
    for node, peer in itertools.permutations(nodes, 2):
        target = peer.address4 if family == 4 else peer.address6
        for size in (56, 30000):
            done = traffic.ping(node, target, count=3, size=size, interval=0.05)
            assert (done.lost, done.duplicates) == (0, 0), str(done)


def test_one_connection_each_way(a, b):
    """One for each neighbour, on demand; ARP and discovery by datagrams do not ask for one."""
    connect(a, b)
    before = opened(a), opened(b)
    a.forget_neighbours()
    b.forget_neighbours()
    assert traffic.ping(a, b.address4, count=20, size=20000, interval=0.02).lost == 0
    assert traffic.ping(a, b.address6, count=20, size=20000, interval=0.02).lost == 0
    assert opened(a) - before[0] <= 1 and opened(b) - before[1] <= 1
    account = sockets.Account(a)
    assert traffic.ping(a, b.address4, size=CONNECTED_MTU - 28, interval=0.1).lost == 0
    assert not account.grown("tx_too_big") and not account.grown("rx_bad")


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("modes", list(itertools.product(MODES, repeat=2)), ids=lambda modes: "".join(m[0] for m in modes))
def test_transfers(a, b, scaled, modes, family):
    """What arrives is what was sent, both ways at once, with packets as long as the MTU."""
    set_mode(a, modes[0])
    set_mode(b, modes[1])
    size = scaled(32 << 20, least=1 << 20)
    there = sockets.Stream(a, b, 7100, b.address4 if family == 4 else b.address6)
    back = sockets.Stream(b, a, 7101, a.address4 if family == 4 else a.address6)
    sockets.exchange([there, back], size)


def test_a_broadcast_is_as_long_as_a_datagram(a, b):
    """B39: longer ones are dropped and counted, however long the interface's MTU is."""
    connect(a, b)
    with sockets.udp(a) as sock:
        sock.setsockopt(sockets.socket.SOL_SOCKET, sockets.socket.SO_BROADCAST, 1)
        # No fragments: each is one packet.
        sock.setsockopt(sockets.socket.IPPROTO_IP, 10, 3)
        account = sockets.Account(a)
        with sockets.udp(b, port=7200) as ear:
            for size in (100, INTERFACE_MTU - 28, INTERFACE_MTU - 27, 9000, 60000):
                sock.sendto(bytes(size), ("10.0.0.255", 7200))
            assert [len(data) for data in sockets.received(ear, 2, settle=0.5)] == [100, INTERFACE_MTU - 28]
        assert account["tx_too_big"] == 3


def test_a_group_gets_what_a_datagram_holds(a, b):
    """B39: as for broadcasts. No packet to a group is cut, since to the stack the MTU is the interface's."""
    connect(a, b)
    group, fits = "239.1.2.3", INTERFACE_MTU - 28
    with sockets.udp(b, port=7201) as ear, sockets.udp(a) as sock:
        ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP,
                       socket.inet_aton(group) + struct.pack("=Ii", 0, sockets.index_of(b)))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(a.address4))
        wait_for("the group", lambda: sock.sendto(b"?", (group, 7201)) and sockets.received(ear, 1, limit=0.2))
        sockets.received(ear, 100, limit=0.5)
        account, icmp = sockets.Account(a), sockets.snmp(a, "Icmp", "OutDestUnreachs")
        for size in (fits - 3, fits, fits + 1, 60000):
            sock.sendto(bytes(size), (group, 7201))
        assert [len(data) for data in sockets.received(ear, 2, settle=0.5)] == [fits - 3, fits]
        assert account["tx_too_big"] == 2
        assert sockets.snmp(a, "Icmp", "OutDestUnreachs") - icmp <= 2


def forget_flag(node, peer):
    """Has `node` believe that `peer` takes datagrams only."""
    address = peer.link()["address"]
    for target in (peer.address4, peer.address6):
        node.ip("neigh", "replace", target, "lladdr", "00" + address[2:], "dev", node.interface, "nud", "permanent")


@pytest.fixture
def plain_peer(a, b):
    connect(a, b)
    forget_flag(a, b)
    yield b
    for target in (b.address4, b.address6):
        a.ip("neigh", "del", target, "dev", a.interface, check=False)
        a.ip("route", "flush", "cache")
        a.ip("-6", "route", "flush", "cache")


@pytest.mark.parametrize("family", [4, 6])
def test_path_mtu_to_a_datagram_peer(a, plain_peer, family):
    """B38: the first packet is lost, the stack knows better then."""
    target = plain_peer.address4 if family == 4 else plain_peer.address6
    before = opened(a)
    a.run("ping", "-n", "-c", 1, "-W", 1, "-s", 8000, "-M", "do", target, check=False)
    wait_for("the route to learn", lambda: f"mtu {INTERFACE_MTU}" in a.ip("route", "get", target).stdout, timeout=5)
    done = traffic.ping(a, target, count=5, size=8000, interval=0.1)
    assert done.lost == 0, str(done)
    assert opened(a) == before
    sockets.exchange([sockets.Stream(a, plain_peer, 7110, target)], 1 << 20)


def test_a_forwarded_packet_is_answered(nodes):
    """B37: the router's answer names the MTU of the datagrams that the next hop takes; IPv6 likewise."""
    router, far, near = nodes
    connect(*nodes)
    forget_flag(router, far)
    try:
        router.sysctl("net.ipv6.conf.all.forwarding", 1)
        far.ip("addr", "add", "fd01::1/128", "dev", "lo", "nodad")
        router.ip("route", "add", "fd01::1/128", "via", far.address6)
        near.ip("route", "add", "fd01::1/128", "via", router.address6)
        done = near.run("ping", "-n", "-c", 3, "-i", 0.2, "-W", 2, "-s", 20000, "-M", "do", "fd01::1", check=False)
        assert re.search(rf"Packet too big.*mtu[ =]{INTERFACE_MTU}|mtu[ =:]+{INTERFACE_MTU}", done.stdout), done.stdout
        assert traffic.ping(near, "fd01::1", size=20000, interval=0.1).lost == 0
        router.sysctl("net.ipv4.ip_forward", 1)
        router.sysctl("net.ipv4.conf.all.send_redirects", 0)
        router.sysctl(f"net.ipv4.conf.{router.interface}.send_redirects", 0)
        far.ip("addr", "add", "10.9.0.1/32", "dev", "lo")
        router.ip("route", "add", "10.9.0.1/32", "via", far.address4)
        near.ip("route", "add", "10.9.0.1/32", "via", router.address4)
        # With a record of the route: options lie where the driver had its own notes.
        done = near.run("ping", "-n", "-c", 3, "-i", 0.2, "-W", 2, "-R", "-s", 20000, "-M", "do", "10.9.0.1", check=False)
        assert re.search(rf"Frag needed .*mtu = {INTERFACE_MTU}|mtu[ =]{INTERFACE_MTU}", done.stdout), done.stdout
        assert traffic.ping(near, "10.9.0.1", size=20000, interval=0.1).lost == 0
    finally:
        far.ip("addr", "del", "10.9.0.1/32", "dev", "lo", check=False)
        router.ip("route", "del", "10.9.0.1/32", check=False)
        near.ip("route", "del", "10.9.0.1/32", check=False)
        far.ip("addr", "del", "fd01::1/128", "dev", "lo", check=False)
        router.ip("route", "del", "fd01::1/128", check=False)
        near.ip("route", "del", "fd01::1/128", check=False)
        router.sysctl("net.ipv6.conf.all.forwarding", 0)
        router.sysctl("net.ipv4.ip_forward", 0)
        for target in (far.address4, far.address6):
            router.ip("neigh", "del", target, "dev", router.interface, check=False)


def answers(node, target, timeout=20):
    """Waits until a long packet is answered."""
    wait_for(f"{target} to answer {node}",
             lambda: node.run("ping", "-n", "-c", 1, "-W", 1, "-s", 30000, target, check=False).returncode == 0, timeout)


def test_a_peer_that_is_no_more(lab, nodes):
    """B21: it dies in mid-stream, comes back with the same numbers, and is connected to again. Others notice nothing."""
    a, b, c = nodes
    connect(a, b, c)
    answers(a, b.address4)
    answers(a, c.address4)
    before = None
    for _ in range(count_of(lab, {"release": 1, "debug": 1}, {"release": 100, "debug": 10})):
        with sockets.inside(b):
            listener = socket.create_server((b.address4, 7121))
        with (sockets.background([sockets.Stream(a, c, 7120)]), listener,
              sockets.make(a, socket.AF_INET, socket.SOCK_STREAM) as sock):
            sock.connect((b.address4, 7121))
            sock.settimeout(2)
            far, _ = listener.accept()
            with far:
                sock.sendall(bytes(1 << 18))
                assert far.recv(1 << 16)
                # Some of it is on its way.
                b.delete_rdma()
                assert b.link() is None
            b.add_rdma()
            b.adopt_interface()
            b.wait_ready()
            connect(b)
            answers(a, b.address4)
        # Of what it had open nothing is left at its peers.
        set_mode(a, "datagram")
        set_mode(b, "datagram")
        set_mode(c, "datagram")
        now = {name: row for name, row in settled_objects().items() if name != b.rdma}
        assert before in (None, now)
        before = now
        connect(a, b, c)


def test_wire_goes_and_comes_back(a, b):
    """Connections that broke are made anew."""
    connect(a, b)
    assert traffic.ping(a, b.address4, size=30000, interval=0.1).lost == 0
    b.ip("link", "set", b.ethernet, "down")
    a.run("ping", "-n", "-c", 3, "-W", 1, b.address4, check=False)
    b.repair()
    b.wait_ready()
    a.wait_ready()
    answers(a, b.address4)


def test_set_ups_under_traffic(lab, nodes):
    """B13: of two packets on a new connection none is left behind, however near to its start it came; while the peer
    talks to another one. Nothing of those connections is left."""
    a, b, c = nodes
    connect(b, c)
    answers(b, c.address4)
    answers(c, b.address4)
    # Each is a connection and two changes of the mode: 210 in the short tier, 10,200 in the full one.
    count = count_of(lab, {"release": 60, "debug": 10}, {"release": 3000, "debug": 400})
    # Of the test before there may be connections that still go.
    before, idle, levels = opened(a), settled_objects()[a.rdma]["qp"], []
    replies = traffic.echo_replies(b)
    talk = b.start("ping", "-q", "-i", "0.05", "-s", "20000", "-W", "10", c.address4)
    with sockets.udp(a) as sock, sockets.udp(b, port=7210) as ear:
        for number in range(count):
            set_mode(a, "connected")
            for half in range(2):
                sock.sendto(struct.pack("!HH", number, half) + bytes(5000), (b.address4, 7210))
            found = [struct.unpack_from("!HH", data) for data in sockets.received(ear, 2, limit=10)]
            assert found == [(number, half) for half in range(2)], number
            set_mode(a, "datagram")
            # Back at once the mode would find the old connection.
            wait_for("the connection to go", lambda: objects()[a.rdma]["qp"] == idle, every=0.01)
            if number in (count // 10, count - 1):
                levels.append((settled_objects(), slab_kib()))
    talk.send_signal(signal.SIGINT)
    # The last reply may come when ping is gone.
    sent = int(re.search(r"(\d+) packets transmitted", talk.communicate(timeout=30)[0])[1])
    wait_for("all replies", lambda: traffic.echo_replies(b) - replies >= sent)
    assert opened(a) - before == count
    assert levels[0][0] == levels[1][0] and levels[1][1] - levels[0][1] < 8192


def test_switches_under_traffic(a, b, scaled):
    """Nothing is lost to TCP, and nothing is left behind."""
    connect(a, b)
    assert traffic.ping(a, b.address4, size=30000, interval=0.1).lost == 0
    set_mode(a, "datagram")
    set_mode(b, "datagram")
    before, slabs = settled_objects(), slab_kib()
    streams = [sockets.Stream(a, b, 7300), sockets.Stream(b, a, 7301)]
    with sockets.background(streams):
        for number in range(scaled(200, least=10)):
            set_mode((a, b)[number & 1], MODES[number >> 1 & 1])
    set_mode(a, "datagram")
    set_mode(b, "datagram")
    assert settled_objects() == before
    assert slab_kib() - slabs < 8192
    for node in (a, b):
        assert not sockets.Account(node).before["bad_completions"]


def test_down_and_up_under_traffic(a, b, scaled):
    connect(a, b)
    assert traffic.ping(a, b.address4, size=30000, interval=0.1).lost == 0
    for node in (a, b):
        set_mode(node, "datagram")
    before = settled_objects()
    for _ in range(scaled(20, least=3)):
        connect(a, b)
        with traffic.Iperf(b) as iperf:
            client = iperf.client(a, seconds=1)
            a.ip("link", "set", a.interface, "down")
            a.repair()
            a.wait_ready()
            client.kill()
            client.wait()
    for node in (a, b):
        set_mode(node, "datagram")
    assert settled_objects() == before


def test_slow_receivers(no_driver, log):
    """B43: a receive queue that is too short for what comes. Connections may break; they come back, and nobody
    complains loudly."""
    if SCALE != 1:
        pytest.skip("in the full tier only")
    no_driver.load("roce=1", "recv_queue_size=16")
    no_driver.adopt()
    a, b, c = no_driver.nodes
    connect(a, b, c)
    answers(a, b.address4)
    answers(c, b.address4)
    with sockets.udp(b, port=7220) as ear, sockets.udp(a) as first, sockets.udp(c) as second:
        ear.setsockopt(socket.SOL_SOCKET, sockets.SO_RCVBUFFORCE, 4096)  # and nobody reads
        end = time.monotonic() + (2 if no_driver.flavour == "release" else 5)
        while time.monotonic() < end:
            for sock in (first, second):
                sock.setblocking(False)
                for _ in range(8):
                    try:
                        sock.sendto(bytes(60000), (b.address4, 7220))
                    except BlockingIOError:
                        break
    for node in (a, c):
        answers(node, b.address4, timeout=3)
        assert traffic.ping(node, b.address4, count=10, size=30000, interval=0.05).lost == 0
    assert len(log.lines("ipoib_rs")) < 20, log.text()
    for node in (a, b, c):
        rows = sockets.counters(node)
        assert not rows["bad_completions"] and not rows["qp_restarts"], rows


def test_unload_while_connected(no_driver):
    """Nothing of a connection keeps the module, or the device, from going."""
    for _ in range(2):
        no_driver.load()
        no_driver.adopt()
        first, second, third = no_driver.nodes
        connect(first, second, third)
        assert traffic.ping(first, second.address4, size=30000, interval=0.1).lost == 0
        transfer = [node.start("ping", "-q", "-f", "-s", 20000, second.address4) for node in (first, third)]
        no_driver.unload()
        for process in transfer:
            process.kill()
            process.wait()
        assert not any(row.get("cq", 0) > 1 or row.get("srq") for row in objects().values())
    assert not pathlib.Path("/sys/module/ipoib_rs").exists()


def test_unload_while_the_port_is_down(no_driver, log):
    """Connections that could not be ended meanwhile are at last, with one line about it."""
    no_driver.load()
    no_driver.adopt()
    first, second, third = no_driver.nodes
    connect(first, second, third)
    for peer in (second, third):
        assert traffic.ping(first, peer.address4, size=30000, interval=0.1).lost == 0
    first.ip("link", "set", first.ethernet, "down")
    wait_for("the carrier to go", lambda: not first.carrier())
    no_driver.unload()
    assert len(log.lines("ipoib_rs", "end while their port is down")) == 1
    assert not any(row.get("cq", 0) > 1 or row.get("srq") for row in objects().values())
    # What was said meanwhile breaks connecting by this device for good.
    first.ip("link", "set", first.ethernet, "up")
    first.delete_rdma()
    no_driver.restore_wire()
    no_driver.load()
    no_driver.adopt()
    connect(first, second)
    before = opened(first)
    assert traffic.ping(first, second.address4, size=30000, interval=0.1).lost == 0
    assert opened(first) == before + 1
