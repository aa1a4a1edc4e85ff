# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""P_Key children and the life of a P_Key: rows R1-R7, S2-S6, S9, L1-L3, N4, V1-V8, G11, cases B19, B27-B29, B47, B51.

The tests without `ours` in their name hold of the stock driver too.
"""

import contextlib
import errno
import re
import struct
import threading
import time

import pytest
import sockets
import traffic
from fabric import ACTIVE, DEBUG, control
from lab import LabError, links, objects, run, wait_for
from test_fabric_answers import RECORD, gid, saquery
from test_fabric_datagram import anomalies, child, test_partitions  # noqa: F401
from test_fabric_filter import MC_MEMBER, SA
from test_fabric_rfc import DELETE
from umad import SET, Umad, mad, status

VM = ["--topology", "fabric", "--nodes", "3", "--fabric-param", "csum=1", "--fabric-param", "tso=1"]
# Seconds: a sweep of the manager, a join with its back-off.
PATIENCE = 40


@pytest.fixture
def ours(lab):
    if lab.driver == "stock":
        pytest.skip("the stock driver differs on purpose")


@contextlib.contextmanager
def same_p_keys(nodes):
    """The P_Key tables are the same afterwards."""
    tables = {node: node.p_keys() for node in nodes}
    yield
    for node, table in tables.items():
        for index in sorted({*table, *node.p_keys()}):
            if node.p_keys().get(index) != table.get(index):
                control(f"set_pkey {node.index} {index} {table.get(index, 0):#x}")


@pytest.fixture
def sound(lab, nodes):
    """After the test the P_Key tables are those of the manager, and everybody answers."""
    with same_p_keys(nodes):
        yield
    lab.restore()
    for peer in nodes[1:]:
        reachable(nodes[0], peer.address4)


def reachable(node, target, timeout=PATIENCE):
    wait_for(f"{target} to answer {node}", lambda: traffic.ping(node, target, count=1, wait=1).received, timeout)


def unreachable(node, target):
    assert traffic.ping(node, target, count=2, wait=1).received == 0


def entry(node, key):
    """Where a node's table has a P_Key, of whatever membership."""
    return next(index for index, found in node.p_keys().items() if found & 0x7fff == key & 0x7fff)


def refused(node, *words):
    done = node.ip("link", "add", *words, check=False)
    assert done.returncode, done.stdout
    return done.stdout


def info(node, name=None):
    return node.link(name)["linkinfo"]["info_data"]


def number(value):
    """As `ip -j` prints it: a number, or hexadecimal digits."""
    return value if isinstance(value, int) else int(value, 16)


def p_key_of(data):
    return number(data.get("pkey", data.get("key")))


def p_key(node, name=None):
    return p_key_of(info(node, name))


def write(node, *writes):
    """The errors of writing to files of an interface, 0 where there is none."""
    found = []
    for name, text in writes:
        try:
            node.write_sysfs(name, text)
        except OSError as error:
            found.append(error.errno)
        else:
            found.append(0)
    return found


def read(node, interface, name):
    return node.run("cat", f"/sys/class/net/{interface}/{name}", check=False)


@contextlib.contextmanager
def questions(*attributes):
    """Gives a function that counts questions to the administrator: 0x35 for paths, 0x38 joins."""
    for attribute in attributes:
        control(f"filter add class=3 attr={attribute:#x} method={2 if attribute == 0x38 else 1} delay=1")
    try:
        yield lambda: [int(hits) for hits in re.findall(r"hits=(\d+)", (DEBUG / "filters").read_text())]
    finally:
        control("filter clear")


# Making and deleting.


def test_attributes(a):
    """R1, R2, L3, N12: what a child is, and that its name is free again at once."""
    before = objects()
    for key, words in ((0x8001, ("pkey", "0x8001")), (0x8002, ("pkey", "0x2", "umcast", "1")), (0xffff, ())):
        a.ip("link", "add", "link", a.interface, "name", "kid", "type", "ipoib", *words)
        row, parent = a.link("kid"), a.link()
        data = info(a, "kid")
        a.ip("link", "del", "kid")
        assert not a.link("kid")
        assert row["link"] == parent["ifindex"] and row["linkinfo"]["info_kind"] == "ipoib"
        assert (p_key_of(data), data["mode"], number(data["umcast"])) == (key, "datagram", int("umcast" in words))
        assert row["address"][12:] == parent["address"][12:] and row["address"] != parent["address"]
        assert row["broadcast"][24:29] == f"{key >> 8:02x}:{key & 0xff:02x}"
    wait_for("the objects to go", lambda: objects() == before)


def test_refusals(a):
    """R2, B47: parents and keys that there are not; each has its message."""
    a.ip("link", "add", "link", a.interface, "name", "kid", "type", "ipoib", "pkey", "0x8001")
    try:
        refused(a, "name", "x", "type", "ipoib", "pkey", "0x8001")
        refused(a, "link", "lo", "name", "x", "type", "ipoib", "pkey", "0x8001")
        refused(a, "link", "kid", "name", "x", "type", "ipoib", "pkey", "0x8002")
        for key in ("0", "0x8000"):
            refused(a, "link", a.interface, "name", "x", "type", "ipoib", "pkey", key)
        refused(a, "link", a.interface, "name", "kid", "type", "ipoib", "pkey", "0x8002")
        assert not a.link("x")
        # A port's own interface stays.
        a.ip("link", "del", a.interface)
        assert a.carrier()
    finally:
        a.ip("link", "del", "kid")


def test_mode_refused_at_birth_ours(a, b, ours):
    """R3: a child that cannot have its mode is not left behind, and nothing else of the wish comes true."""
    p_key, mode, umcast = 1, 2, 3
    before = objects()
    for _ in range(3):
        assert sockets.wish_for_link(a, {p_key: b"\1\x80", mode: b"\2\0", umcast: b"\1\0"}, "kid") == (
            errno.EINVAL, "mode is datagram or connected")
        assert not a.link("kid")
    assert sockets.wish_for_link(a, {mode: b"\2\0", umcast: b"\1\0"})[0] == errno.EINVAL
    assert a.sysfs("umcast") == "0"
    wait_for("the objects to go", lambda: objects() == before)
    assert sockets.wish_for_link(a, {p_key: b"\1\x80"}, "kid") == (0, None)
    a.ip("link", "del", "kid")
    reachable(a, b.address4)


def test_many_queues(a):
    """B49: however many queues are asked for there is one."""
    a.ip("link", "add", "link", a.interface, "name", "kid", "numtxqueues", "8", "numrxqueues", "8",
         "type", "ipoib", "pkey", "0x8001")
    try:
        queues = a.run("ls", "/sys/class/net/kid/queues").stdout.split()
        assert sorted(queues) == ["rx-0", "tx-0"], queues
    finally:
        a.ip("link", "del", "kid")


def test_files(a):
    """S2-S6: children by files, named after their key."""
    assert a.sysfs("pkey") == "0xffff" and a.sysfs("umcast") == "0"
    name = f"{a.interface}.8001"
    assert write(a, ("create_child", "0x8001"), *[("create_child", key) for key in ("0x8001", "0xffff")]) == [
        0, errno.ENOTUNIQ, errno.ENOTUNIQ]
    try:
        wait_for("the child", lambda: a.link(name) or links().get(name))
        if a.link(name):
            assert read(a, name, "pkey").stdout == "0x8001\n"
            assert read(a, name, "mode").stdout == "datagram\n"
            assert read(a, name, "parent").stdout == f"{a.interface}\n"
    finally:
        assert write(a, ("delete_child", "0x8001")) == [0]
    wait_for("the child to go", lambda: not a.link(name) and name not in links())
    bad = [("create_child", text) for text in ("0", "0x8000", "-1", "0x10000", "junk")]
    assert write(a, *bad, ("delete_child", "0x8001")) == [errno.EINVAL] * len(bad) + [errno.ENODEV]


def test_files_ours(a, ours):
    """S9, N19: keys are compared as keys; a child is born beside its parent; one that was deleted is out of the way."""
    assert write(a, *[("create_child", "1\n"), ("delete_child", "0x8001")] * 3, ("create_child", "1\n"),
                 ("create_child", "0x8001")) == [0] * 7 + [errno.ENOTUNIQ]
    assert read(a, f"{a.interface}.0001", "pkey").stdout == "0x8001\n"
    assert write(a, *[("delete_child", "0x1")] * 2) == [0, errno.ENODEV]
    wait_for("the child to go", lambda: not a.link(f"{a.interface}.0001"))
    a.ip("link", "add", "link", a.interface, "name", "kid", "type", "ipoib", "pkey", "0x8001")
    try:
        assert write(a, ("delete_child", "0x8001"), ("umcast", "junk")) == [errno.ENODEV, errno.EINVAL]
    finally:
        a.ip("link", "del", "kid")


def test_child_in_another_namespace(a, b):
    """B47, B51: born elsewhere; when its namespace goes it comes back to the first one."""
    run("ip", "netns", "add", "away")
    try:
        a.ip("link", "add", "link", a.interface, "name", "astray", "netns", "away", "type", "ipoib", "pkey", "0x8001")
        run("ip", "-n", "away", "addr", "add", "10.1.0.1/24", "dev", "astray")
        run("ip", "-n", "away", "link", "set", "astray", "up")
        with child(b, 0x8001, "10.1.0.2"):
            reachable(b, "10.1.0.1")
    finally:
        run("ip", "netns", "del", "away")
    wait_for("the child to come home", lambda: "astray" in links())
    run("ip", "link", "del", "astray")


def test_children_follow_their_parent(a, b):
    """L2: down and up with it."""
    with child(a, 0x8001, "10.1.0.1") as name, child(b, 0x8001, "10.1.0.2"):
        a.ip("link", "set", a.interface, "down")
        wait_for("the child to go down", lambda: "UP" not in a.link(name)["flags"])
        a.ip("link", "set", a.interface, "up")
        wait_for("the child's carrier", lambda: a.carrier(name))
        reachable(a, "10.1.0.2")
    wait_for("the carrier", a.carrier)


def test_device_goes_with_children(lab, a, b, nodes):
    """L2: an HCA takes the children along."""
    with contextlib.suppress(LabError), child(b, 0x8001, "10.1.0.2"):
        b.delete_rdma()
        assert not b.link() and not b.link(f"{b.interface}.8001")
    b.add_rdma()
    wait_for(f"{b.rdma} to be active", lambda: b.state() == "ACTIVE", 4 * ACTIVE[lab.flavour])
    b.adopt_interface()
    b.wait_ready()


def test_child_deleted_while_device_goes_ours(lab, b, ours, scaled):
    """L2, S9: neither waits for the other."""
    over = threading.Event()

    def children():
        while not over.is_set():
            with contextlib.suppress(OSError, LabError):
                b.write_sysfs("create_child", "0x8001")
                b.ip("link", "set", f"{b.interface}.8001", "up", check=False)
                b.write_sysfs("delete_child", "0x8001")

    for number in range(scaled(10)):
        over.clear()
        thread = threading.Thread(target=children, daemon=True)
        thread.start()
        time.sleep(0.2 + 0.03 * (number % 7))
        b.delete_rdma()
        over.set()
        thread.join(60)
        assert not thread.is_alive()
        assert not b.link() and not b.link(f"{b.interface}.8001")
        b.add_rdma()
        wait_for(f"{b.rdma} to be active", lambda: b.state() == "ACTIVE", 4 * ACTIVE[lab.flavour])
        b.adopt_interface()
        b.wait_ready()


# The life of a P_Key.


def test_no_p_key(a, b, sound):
    """B27: without a P_Key there is no carrier, no join and no error; with one everything is back."""
    control(f"set_pkey {b.index} 0 0")
    wait_for("the carrier to go", lambda: not b.carrier())
    with questions(0x38) as asked:
        b.ip("link", "set", b.interface, "down")
        b.ip("link", "set", b.interface, "up")
        unreachable(a, b.address4)
        assert not b.carrier()
        assert asked() == [0]
    control(f"set_pkey {b.index} 0 0xffff")
    wait_for("the carrier", b.carrier, PATIENCE)
    reachable(a, b.address4)


def test_p_key_of_the_port_changes_ours(nodes, sound, ours):
    """B28, V8: everything moves to the new partition, IPv6 groups too, which the stack joined with the old key."""
    # The administrator's node keeps its key: it answers with it.
    c, a, b = nodes
    for node in (a, b):
        control(f"set_pkey {node.index} 0 0x8001")
    for node in (a, b):
        wait_for(f"the key of {node}", lambda: p_key(node) == 0x8001)
        assert node.sysfs("pkey") == "0x8001"
        assert node.link()["broadcast"][24:29] == "80:01"
        wait_for(f"the carrier of {node}", node.carrier, PATIENCE)
    for node in (a, b):
        node.forget_neighbours()
    reachable(a, b.address4)
    reachable(a, b.address6)
    reachable(b, a.address6)
    c.forget_neighbours()
    unreachable(c, a.address4)


def test_key_that_comes_and_goes(a, b, sound):
    """B29, O2: a child waits for its key, without an error, and loses its carrier with it."""
    with child(a, 0x8001, "10.1.0.1") as name, child(b, 0x8001, "10.1.0.2"):
        reachable(b, "10.1.0.1")
        index = entry(a, 0x8001)
        control(f"set_pkey {a.index} {index} 0")
        wait_for("the child's carrier to go", lambda: not a.carrier(name))
        assert a.carrier()
        unreachable(b, "10.1.0.1")
        a.ip("link", "set", name, "down")
        a.ip("link", "set", name, "up")
        assert not a.carrier(name)
        # Elsewhere in the table.
        control(f"set_pkey {a.index} {index + 7} 0x8001")
        wait_for("the child's carrier", lambda: a.carrier(name), PATIENCE)
        reachable(b, "10.1.0.1")
        reachable(a, b.address4)


def test_limited_membership(nodes, sound):
    """R4391-4.1.a: limited members have the full members' group, and see full members only."""
    a, b, c = nodes
    for node in (a, b):
        control(f"set_pkey {node.index} {entry(node, 0x8001)} 0x0001")
    with (child(a, 0x8001, "10.1.0.1") as name, child(b, 0x8001, "10.1.0.2") as other, child(c, 0x8001, "10.1.0.3")):
        for node, interface in ((a, name), (b, other)):
            assert p_key(node, interface) == 0x8001
        for target in ("10.1.0.1", "10.1.0.2"):
            reachable(c, target)
        reachable(a, "10.1.0.3")
        unreachable(a, "10.1.0.2")


def test_controlled_q_key(lab, a, b, sound):
    """R4391-4.1.b, R4391-13.b: a Q_Key with the top bit; and a partition that is not there when its child is made."""
    names = []
    for node, address in ((a, "10.3.0.1"), (b, "10.3.0.2")):
        node.ip("link", "add", "link", node.interface, "name", "late", "type", "ipoib", "pkey", "0x8003")
        node.ip("addr", "add", f"{address}/24", "dev", "late")
        node.ip("link", "set", "late", "up")
        names.append((node, "late"))
    text = lab.manager.partitions.read_text()
    try:
        assert not any(node.carrier(name) for node, name in names)
        lab.manager.partitions.write_text(
            text + "three=0x3,ipoib,mtu=5,rate=7,Q_Key=0x80000b1b,defmember=full : ALL=full;\n")
        lab.manager.sweep()
        for node, name in names:
            wait_for(f"the carrier of {node}/{name}", lambda: node.carrier(name), PATIENCE)
        reachable(a, "10.3.0.2")
        assert traffic.ping(a, "10.3.0.2", count=20).lost == 0
    finally:
        for node, name in names:
            node.ip("link", "del", name)
        lab.manager.partitions.write_text(text)


def test_smaller_mtu_of_the_group_ours(lab, a, sound, ours):
    """R4391-5.b: the group prescribes less than the port can: no carrier with more, and once known it stays over down and
    up."""
    text = lab.manager.partitions.read_text()
    name = "narrow"
    a.ip("link", "add", "link", a.interface, "name", name, "type", "ipoib", "pkey", "0x8004")
    try:
        lab.manager.partitions.write_text(text + "four=0x4,ipoib,mtu=4,rate=7,defmember=full : ALL=full;\n")
        lab.manager.sweep()

        def told(*states):
            """The MTU with and without carrier of all that is told meanwhile."""
            monitor = a.start("ip", "-o", "monitor", "link", "dev", name)
            try:
                time.sleep(0.5)
                for state in states:
                    a.ip("link", "set", name, state)
                wait_for("the carrier", lambda: a.carrier(name), PATIENCE)
                time.sleep(1)
            finally:
                monitor.terminate()
            output = monitor.communicate()[0]
            return [("LOWER_UP" in flags, int(mtu)) for flags, mtu in re.findall(r"<(\S+)> mtu (\d+)", output)]

        first = told("up")
        assert (True, 2044) in first and (True, 4092) not in first, first
        again = told("down", "up")
        assert {mtu for _, mtu in again} == {2044}, again
        assert (True, 2044) in again, again
    finally:
        a.ip("link", "del", name)
        lab.manager.partitions.write_text(text)


@contextlib.contextmanager
def membership(node, group, key):
    """A group of the administrator's, with a node's port as its first member."""

    def ask(method, mask):
        packet = mad(SA, method, MC_MEMBER)
        packet[2] = 2
        struct.pack_into(">Q", packet, RECORD - 8, mask)
        packet[RECORD : RECORD + 32] = bytes.fromhex(group) + gid(node)
        # Q_Key, LID, MTU and traffic class, P_Key, rate and life time.
        struct.pack_into(">IHBBHBB", packet, RECORD + 32, 0xB1B, 0, 0x85, 0, key, 0x87, 0)
        packet[RECORD + 48] = 1
        with Umad(node.rdma, 1) as device:
            answer = device.ask(packet, node.sm_lid())
        assert answer is not None and status(answer) == 0, answer and hex(status(answer))

    ask(SET, 0x173F7)
    try:
        yield
    finally:
        ask(DELETE, 0x10003)


def test_other_scope_ours(lab, nodes, sound, ours):
    """R4391-4.1.e: the administrator of the node says by the broadcast address which scope the link has, while it is up or
    just before. An address that no link has is taken back."""
    a, b, c = nodes
    text = lab.manager.partitions.read_text()
    name, links = "wide", []
    for node, address in ((a, "10.5.0.1"), (b, "10.5.0.2")):
        node.ip("link", "add", "link", node.interface, "name", name, "type", "ipoib", "pkey", "0x8005")
        node.ip("addr", "add", f"{address}/24", "dev", name)
        links.append(node)
    try:
        lab.manager.partitions.write_text(text + "five=0x5,ipoib,mtu=5,rate=7,defmember=full : ALL=full;\n")
        lab.manager.sweep()
        for node in nodes:
            wait_for(f"the key of {node}", lambda: 0x8005 in node.p_keys().values(), PATIENCE)
        narrow = a.link(name)["broadcast"]
        wide = narrow.replace(":ff:12:40:1b:", ":ff:15:40:1b:")
        assert wide != narrow
        with membership(c, "ff15401b8005" + "0" * 12 + "f" * 8, 0x8005):
            a.ip("link", "set", name, "up")
            a.ip("link", "set", name, "broadcast", wide)
            b.ip("link", "set", name, "broadcast", wide, "up")
            for node in links:
                wait_for(f"the carrier of {node}", lambda: node.carrier(name), PATIENCE)
                assert node.link(name)["broadcast"] == wide
            reachable(a, "10.5.0.2")
            # Its stack has named all groups by the new address.
            wait_for("the group of all hosts", lambda: f"ff15401b8005{1:020x}" in saquery("-g"), 20, every=0.5)
            a.ip("link", "set", name, "broadcast", wide.replace(":40:1b:", ":40:1c:"))
            wait_for("the address to be taken back", lambda: a.link(name)["broadcast"] == wide)
            reachable(b, "10.5.0.1")
    finally:
        for node in links:
            node.ip("link", "del", name)
        lab.manager.partitions.write_text(text)


def test_umcast(nodes, sound):
    """G11: with it, groups that somebody on the port has joined already are not joined."""
    a, b, _ = nodes
    group = "ff15::77"
    a.ip("link", "add", "link", a.interface, "name", "twin", "type", "ipoib", "umcast", "1")
    try:
        a.ip("link", "set", "twin", "up")
        wait_for("the twin's carrier", lambda: a.carrier("twin"))
        a.ip("addr", "add", f"{group}/128", "dev", a.interface, "autojoin")
        a.ip("addr", "add", f"{group}/128", "dev", "twin", "autojoin")

        def heard(name):
            before = a.statistics(name)["rx"]["multicast"]
            b.run("ping", "-6", "-c", 5, "-i", "0.2", "-W", "1", "-I", b.interface, group, check=False)
            return a.statistics(name)["rx"]["multicast"] - before

        wait_for("the parent to hear the group", lambda: heard(a.interface) >= 4)
        assert heard("twin") < 4
        a.ip("addr", "del", f"{group}/128", "dev", "twin")
        a.ip("link", "set", "twin", "type", "ipoib", "umcast", "0")
        a.ip("addr", "add", f"{group}/128", "dev", "twin", "autojoin")
        wait_for("the twin to hear the group", lambda: heard("twin") >= 4)
    finally:
        a.ip("link", "del", "twin")
        a.ip("addr", "del", f"{group}/128", "dev", a.interface, check=False)


# Events.


def test_another_manager_alone_changes_nothing(a, b, sound):
    """B19: SM_CHANGE: no packet is lost, nobody is asked, the carrier stays."""
    changes = int(a.sysfs("carrier_changes"))
    assert traffic.ping(a, b.address4, count=5).lost == 0
    with questions(0x35, 0x38) as asked:
        for node in (a, b):
            control(f"set_sm_lid {node.index} {node.sm_lid()}")
        done = traffic.ping(a, b.address4, count=100, interval=0.01)
        assert done.lost == 0, str(done)
        assert asked() == [0, 0]
    assert int(a.sysfs("carrier_changes")) == changes


def test_reregister_ours(nodes, sound, ours):
    """B19, V6: groups are joined anew and ways asked for anew; meanwhile the old ones serve, and nothing is lost."""
    a, b, _ = nodes
    changes = int(a.sysfs("carrier_changes"))
    assert traffic.ping(a, b.address4, count=5).lost == 0
    with questions(0x35, 0x38) as asked:
        control("filter add class=3 method=0x81 delay=300000")
        control(f"reregister {a.index}")
        done = traffic.ping(a, b.address4, count=200, interval=0.01)
        assert done.lost == 0, str(done)
        wait_for("the questions", lambda: all(asked()[:2]))
    assert int(a.sysfs("carrier_changes")) == changes


def test_peer_moves_and_only_we_are_told(lab, a, b, sound):
    """B19: a peer has another LID, and all that we hear is a request to register again."""
    assert traffic.ping(a, b.address4, count=5).lost == 0
    restarts = sockets.counters(a).get("qp_restarts")
    lab.manager.kill()
    old, new = b.lid(), 0x61
    records = lab.manager.folder / "guid2lid"
    text = records.read_text()
    records.write_text(re.sub(rf"^({b.port_guid():#018x}) .*$", rf"\1 {new:#06x} {new:#06x}", text, flags=re.M))
    lab.manager.start()
    wait_for("the new LID", lambda: b.lid() == new != old, ACTIVE[lab.flavour])
    control(f"reregister {a.index}")
    reachable(a, b.address4)
    assert sockets.counters(a).get("qp_restarts") == restarts


def test_port_goes_and_comes(a, b, sound):
    """V2: no carrier while the port is down, and one change each way."""
    changes = int(b.sysfs("carrier_changes"))
    control(f"link {b.index} down")
    wait_for("the carrier to go", lambda: not b.carrier())
    control(f"link {b.index} up")
    wait_for("the carrier", b.carrier, PATIENCE)
    reachable(a, b.address4)
    assert int(b.sysfs("carrier_changes")) == changes + 2


def test_another_gid_ours(a, b, sound, ours):
    """V4, V10: the port has another prefix: the hardware address follows, the QPN stays, and back again. The core tells
    nobody; whoever sets prefixes has all clients register again."""
    before, changes = b.link()["address"], int(b.sysfs("carrier_changes"))
    try:
        control(f"set_prefix {b.index} 0xfec0000000000000")
        control(f"reregister {b.index}")
        wait_for("the new address", lambda: b.link()["address"] == before.replace(":fe:80:", ":fe:c0:", 1))
    finally:
        control(f"set_prefix {b.index} 0xfe80000000000000")
        control(f"reregister {b.index}")
    wait_for("the old address", lambda: b.link()["address"] == before)
    wait_for("the carrier", b.carrier, PATIENCE)
    reachable(a, b.address4)
    assert int(b.sysfs("carrier_changes")) <= changes + 4


def test_dead_device_ours(lab, a, b, sound, ours):
    """R4391-9.4: a device that reports its death loses the carrier, and is not used any more; its successor is found."""
    assert traffic.ping(b, a.address4, count=5).lost == 0
    control(f"fatal {b.index}")
    wait_for("the carrier to go", lambda: not b.carrier())
    assert "UP" in b.link()["flags"]
    unreachable(a, b.address4)
    b.delete_rdma()
    b.add_rdma()
    wait_for(f"{b.rdma} to be active", lambda: b.state() == "ACTIVE", 4 * ACTIVE[lab.flavour])
    b.adopt_interface()
    b.wait_ready()
    reachable(a, b.address4)


# Namespaces of the RDMA core.


def test_interface_is_born_where_its_device_is(lab, nodes):
    """N19: where the RDMA core keeps namespaces apart an interface is born in that of its device, and stays there."""
    def keep(how):
        return run("rdma", "system", "set", "netns", how, check=False).returncode == 0

    a, b, *_ = nodes
    lab.unload_all()
    lab.remove_wire()
    try:
        # The namespaces go a little later.
        wait_for("the namespaces to be apart", lambda: keep("exclusive"))
        run("ip", "netns", "add", "apart")
        lab.load_fabric()
        run("rdma", "dev", "set", a.rdma, "netns", "apart")
        before = set(links())
        lab.load()
        wait_for("the interfaces", lambda: len(set(links()) - before) == len(nodes) - 1)
        assert [row["link_type"] for name, row in links("apart").items() if name != "lo"] == ["infiniband"]
        # A device that moves takes its interface along: it is another one then.
        run("rdma", "dev", "set", b.rdma, "netns", "apart")
        wait_for("the interface", lambda: len(links("apart")) == 3 and len(set(links()) - before) == len(nodes) - 2)
        run("ip", "netns", "del", "apart")
        wait_for("the devices to come back", lambda: len(set(links()) - before) == len(nodes))
    finally:
        lab.unload_all()
        lab.unload_fabric()
        run("ip", "netns", "del", "apart", check=False)
        wait_for("the namespaces to be shared", lambda: keep("shared"))
        lab.build_wire()
        lab.add_rdma()
        lab.restore()
