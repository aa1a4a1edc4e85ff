# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Public bug reports about IPoIB on InfiniBand, each end to end.

B27 and B28 are in test_partitions.py, B32 is in test_fabric_rfc.py and test_fabric_answers.py too.
"""

import concurrent.futures
import contextlib
import itertools
import random
import re
import socket
import struct
import time

import pytest
import sockets
import traffic
from fabric import ACTIVE, PARTITIONS, control, fault
from lab import log as say
from lab import objects, slab_kib, wait_for
from test_fabric_answers import (BROADCAST, MGID_AT, answers, c, joins, mgid, reachable, recorded, rules,  # noqa: F401
                                 saquery)
from test_fabric_filter import MC_MEMBER, PATH_RECORD, SA, restart
from test_fabric_rfc import DELETE
from test_multicast import IGMP, PORT, Member, sender
from umad import SET, Umad, mad, status

GUID_INFO_RECORD = 0x30
VM = ["--topology", "fabric", "--nodes", "3"]


@pytest.fixture(autouse=True)
def sound(lab, nodes):
    """After each test the subnet is whole, the fabric has nothing to complain of, and everybody answers."""
    yield
    control("filter clear")
    lab.restore()
    for node, peer in itertools.permutations(nodes, 2):
        reachable(node, peer.address4, 60)
    lab.check_anomalies()


def addresses_back(node):
    """What went with the link."""
    node.ip("addr", "replace", f"{node.address6}/64", "dev", node.interface)


def many(node, stack, count, port=PORT):
    """Sockets that are members of so many groups."""
    groups = [f"239.20.{number // 200}.{number % 200 + 1}" for number in range(count)]
    for at in range(0, count, 20):  # a socket joins 20 groups at most
        member = stack.enter_context(Member(node, groups[at], port + at))
        for group in groups[at : at + 20]:
            member.request = socket.inet_aton(group) + member.request[4:]
            member.join()
    return groups


def memberships(node):
    """The MGIDs of which the administrator knows a node as a member."""
    own = node.gid().replace(":", "")
    return {record for record, port in re.findall(r"MGID\W+([0-9a-f]{32}).*?PortGid\W+([0-9a-f]{32})", saquery("-m"), re.S)
            if port == own}


def try_to_send(sock, group):
    with contextlib.suppress(OSError):
        sock.sendto(b"x", (group, PORT))


@contextlib.contextmanager
def children(node, count):
    """Interfaces in one partition, up."""
    names = [f"kid{number}" for number in range(count)]
    for name in names:
        node.ip("link", "add", "link", node.interface, "name", name, "type", "ipoib", "pkey", "0x8001")
    try:
        for name in names:
            node.ip("link", "set", name, "up")
        yield names
    finally:
        for name in names:
            node.ip("link", "del", name)


@pytest.mark.parametrize("event", ["reregister", "bounce"])
def test_storm_of_events(a, b, scaled, event):
    """B01, B06: events come faster than slow joins of many groups end. Then all are joined, and nobody asks any more."""
    count = scaled(200, least=40)
    chance = random.Random(event)
    with contextlib.ExitStack() as stack:
        groups = many(b, stack, count)
        sock = stack.enter_context(sender(b, "239.21.1.1"))
        with rules(f"class={SA} method=0x81 attr={MC_MEMBER:#x} dst={b.index} delay=20000"):
            end = time.monotonic() + scaled(60, least=5)
            while time.monotonic() < end:
                control(f"{event} {b.index}")
                try_to_send(sock, f"239.21.1.{chance.randrange(1, 20)}")
                time.sleep(chance.uniform(0.005, 0.03))
        wait_for("the port", lambda: b.state() == "ACTIVE", 90)
        wait_for("the carrier", b.carrier, 60)
        wait_for("all groups", lambda: {mgid(group) for group in groups} <= memberships(b), 60, every=1)
        reachable(a, b.address4)

        def quiet():
            account = sockets.Account(b)
            time.sleep(2)
            return account["sa_joins_asked"] <= 4

        # The manager may still be looking at what the storm told it.
        wait_for("the end of all questions", quiet, 40)
        start = time.monotonic()
        b.ip("link", "set", b.interface, "down")
        assert time.monotonic() - start < 5
        b.ip("link", "set", b.interface, "up")


def test_half_built(lab, nodes):
    """B09: what fails while an interface is made leaves nothing, does not disturb others, and works the next time."""
    lab.unload_all()
    without = objects()
    found = set()
    for name, skip in itertools.product(("create_cq", "create_qp", "query_gid", "query_pkey", "query_port"), range(2)):
        with fault(nodes[1].index, name, f"skip={skip}") as hits:
            lab.load()
            if hits():
                found.add(name)
            for node in (nodes[0], nodes[2]):
                assert wait_for(f"the interface of {node}", node.find_interface), name
            lab.unload_all()
        assert objects() == without, name
    assert found >= {"create_cq", "create_qp", "query_port"}, found
    lab.restore()


def test_half_built_child(a):
    """B09: the same of children: refused, nothing is left, the parent works, and the next attempt succeeds."""
    without = objects()
    found = set()
    for name, skip in itertools.product(("create_cq", "create_qp", "query_gid", "query_pkey", "query_port"), range(2)):
        with fault(a.index, name, f"skip={skip}") as hits:
            done = a.ip("link", "add", "link", a.interface, "name", "kid", "type", "ipoib", "pkey", "0x8001", check=False)
            if hits():
                found.add(name)
            if done.returncode:
                assert hits() and not a.link("kid"), (name, done.stdout)
                wait_for("all to be gone", lambda: objects() == without)
        if not done.returncode:
            a.ip("link", "del", "kid")
        with children(a, 1) as names:
            wait_for("the carrier", lambda: a.carrier(names[0]), 30)
        wait_for("all to be gone", lambda: objects() == without)
        assert a.carrier()
    assert found >= {"create_cq", "create_qp"}, found


def test_lost_completion_event(a, b):
    """B11: an event of the send queue is swallowed. The housekeeper or the watchdog notices, and everything is as before."""
    changes, address = int(a.sysfs("carrier_changes")), a.link()["address"]
    account = sockets.Account(a)
    say("provoked NETDEV WATCHDOG")
    with fault(a.index, "lose_cq_event") as hits, sockets.udp(a) as sock:
        def struck():
            with contextlib.suppress(BlockingIOError):
                sock.sendto(bytes(1000), (b.address4, 9))
            return hits()

        sock.setblocking(False)
        wait_for("the event to be lost", struck)
        for _ in range(1000):
            struck()
        wait_for("an answer", lambda: traffic.ping(a, b.address4, count=1, wait=1).received, 40)
    assert int(a.sysfs("carrier_changes")) == changes and a.link()["address"] == address
    assert account["tx_timeouts"] <= 1 and account["tx_failed"] <= 512, account.grown("tx_")


def test_failed_send(a, b):
    """B14: one send completes with an error: counted once, and within a second everything goes again."""
    assert traffic.ping(a, b.address4).lost == 0
    before = a.statistics()["tx"]["errors"]
    with fault(a.index, "send_status") as hits, sockets.udp(a) as sock:
        sock.sendto(b"hello", (b.address4, 9))
        wait_for("the send to fail", hits)
    start = time.monotonic()
    reachable(a, b.address4, 5)
    assert time.monotonic() - start < 3
    assert 1 <= a.statistics()["tx"]["errors"] - before <= 2


def test_failed_receives(a, b):
    """W12: receives fail, and what else was posted with them: each is counted, and no place in the ring is lost."""
    count = 6
    assert traffic.ping(a, b.address4).lost == 0
    account = sockets.Account(b)
    with fault(b.index, "recv_status", f"value=4 n={count}") as hits, sockets.udp(a) as sock:
        def struck():
            sock.sendto(b"hello", (b.address4, 9))
            return hits() == count

        wait_for("all to fail", struck, 60)
    wait_for("all to be counted", lambda: account["rx_failed"] >= count)
    reachable(a, b.address4)
    assert traffic.ping(a, b.address4, count=600, interval=0.002).lost == 0


def test_silence_under_flood(a, b, scaled):
    """B15: paths to a neighbour are not told: memory does not grow, losses are counted, and it ends with the silence."""
    address = b.link()["address"]
    with rules(f"{answers(PATH_RECORD, a)} drop"):
        restart(a)
        wait_for("the carrier", a.carrier)
        a.ip("neigh", "replace", b.address4, "lladdr", address, "nud", "permanent", "dev", a.interface)
        account, dropped, slab = sockets.Account(a), a.statistics()["tx"]["dropped"], slab_kib()
        seconds = scaled(60, least=10)
        flood = a.start("ping", "-q", "-f", "-W", "1", "-w", seconds, b.address4)
        time.sleep(seconds)
        flood.wait()
        assert slab_kib() - slab < 8 << 10
        assert a.statistics()["tx"]["dropped"] - dropped > 20
        # After pauses of 1, 2, 4, 8, 16, 16 … seconds, each question lasting one; others ask for their paths too.
        assert account["sa_paths_asked"] <= 12, account.grown("sa_")
    a.ip("neigh", "del", b.address4, "dev", a.interface)
    reachable(a, b.address4, 20)
    addresses_back(a)


def stream(a, b):
    return traffic.ping(a, b.address4, count=200, interval=0.01)


def test_three_reactions(lab, a, b):
    """B19: another manager's LID: nothing. Register again: no loss, carrier kept, groups joined. Another LID: soon found."""
    assert traffic.ping(a, b.address4).lost == 0
    changes, account = int(a.sysfs("carrier_changes")), sockets.Account(a)
    control(f"set_sm_lid {a.index} {a.sm_lid()}")
    assert stream(a, b).lost == 0
    assert not account.grown("sa_"), account.grown("sa_")
    with rules(f"class={SA} method=0x81 dst={a.index} delay=500000"):
        control(f"reregister {a.index}")
        done = stream(a, b)
        assert done.lost <= 2, str(done)
        wait_for("the groups to be joined again", lambda: account["sa_joins_asked"] >= 3)
    assert int(a.sysfs("carrier_changes")) == changes
    wait_for("all answers", lambda: BROADCAST in memberships(a), every=0.5)
    lab.manager.kill()
    records = lab.manager.folder / "guid2lid"
    records.write_text(re.sub(rf"^({b.port_guid():#018x}) .*$", r"\1 0x0071 0x0071", records.read_text(), flags=re.M))
    lab.manager.start()
    wait_for("the new LID", lambda: b.lid() == 0x71, ACTIVE[lab.flavour])
    reachable(a, b.address4, 10 * (6 if lab.flavour == "debug" else 1))


def test_refused_for_minutes(a, scaled, log):
    """B23: a refused group is sent to all the time: a few requests a minute, a few lines, and each loss is counted."""
    seconds = scaled(120, least=20)
    group = "224.0.0.77"
    account = sockets.Account(a)
    with rules(f"{joins(a)} match={MGID_AT}:{mgid(group)} patch=104:00") as hits, sender(a, group) as sock:
        end, sent = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            sock.sendto(b"x", (group, PORT))
            sent += 1
            time.sleep(0.02)
        # Two for each attempt: both states are tried.
        assert 2 <= hits()[0] <= 12 + seconds // 8
        wait_for("all to be counted", lambda: account["tx_neigh_failed"] + account["tx_neigh_queue_full"] >= sent)
    assert len(log.lines("to send failed")) <= 4 + seconds // 16


def test_sender_leaves(a, b, c, scaled):  # noqa: F811
    """B24, R4392-4.2.5.a: groups that were sent to once are left; a sender that becomes a member hears, and the other way
    round. The base is not left (R4392-4.2.5.b)."""
    count = scaled(500, least=50)
    wait_for("the base", lambda: BROADCAST in memberships(a), every=0.5)
    base = {BROADCAST, mgid("224.0.0.1")}
    groups = [f"239.30.{number // 200}.{number % 200 + 1}" for number in range(count)]
    with sender(a, groups[0]) as sock:
        for group in groups:
            sock.sendto(b"once", (group, PORT))
            time.sleep(0.002)
        wait_for("all to be joined", lambda: {mgid(group) for group in groups} <= memberships(a), 60, every=1)
        # Upwards: what it sends still arrives, and it hears others.
        with Member(a, groups[0]).join() as own, Member(b, groups[0]).join() as peer, sender(c, groups[0]) as other:
            def both():
                sock.sendto(b"from a", (groups[0], PORT))
                other.sendto(b"from c", (groups[0], PORT))
                return (b"from c" in sockets.received(own.sock, 4, limit=0.3)
                        and b"from a" in sockets.received(peer.sock, 4, limit=0.3))

            wait_for("both ways", both, 20)
            own.leave()

            # And down: left as a member, joined again to send.
            def arrives():
                sock.sendto(b"again", (groups[0], PORT))
                return b"again" in sockets.received(peer.sock, 100, limit=0.2)

            wait_for("what the sender sends", arrives, 20)
    wait_for("all to be left", lambda: not {mgid(group) for group in groups} & memberships(a), 150, every=2)
    assert base <= memberships(a)


def test_no_room_for_a_group(a, b):
    """A group for which the HCA has no room is left with the last who wants it, and works once there is room."""
    group = "239.42.1.1"
    with fault(a.index, "attach_mcast", "n=all") as struck:
        with Member(a, group).join():
            wait_for("the fault", struck)
        wait_for("the group to be left", lambda: mgid(group) not in memberships(a), 20, every=0.5)
        member = Member(a, group).join()
        seen = struck()
        wait_for("another attempt", lambda: struck() > seen)
    with member, sender(b, group) as sock:
        wait_for("a datagram to the group",
                 lambda: sock.sendto(b"x", (group, PORT)) and sockets.received(member.sock, 1, limit=0.2), 40)
    wait_for("the group to be left", lambda: mgid(group) not in memberships(a), 20, every=0.5)


def administer(lab, line):
    """Another manager takes over, with other ideas of the link."""
    lab.manager.kill()
    lab.manager.partitions.write_text("\n".join([line, *PARTITIONS.splitlines()[1:]]) + "\n")
    lab.manager.start()
    lab.wait_wire()


@pytest.mark.parametrize("line, mtu, qkey", [
    ("Default=0x7fff,ipoib,mtu=4,rate=3,defmember=full : ALL=full;", 2044, 0x0B1B),
    ("Default=0x7fff,ipoib,mtu=5,rate=7,Q_Key=0x80001b1b,defmember=full : ALL=full;", 4092, 0x80001B1B)])
def test_other_terms(lab, nodes, a, b, log, line, mtu, qkey):
    """B26, R4391-4.1.b, R4391-13.b, R4391-5.b, R4391-7.a: the link's MTU, Q_Key and rate change with its manager; a smaller
    MTU that somebody chose stays. No group is joined on the old terms, which would be refused."""
    b.ip("link", "set", b.interface, "mtu", "1500")

    def refused():
        return log.lines("ib0: joining group", "failed: Error(22)")

    with Member(b, "239.6.6.6").join() as member, sender(a, "239.6.6.6") as sock:
        # The manager that the last test started may still be making itself known.
        wait_for("the group", lambda: mgid("239.6.6.6") in memberships(b), 60, every=0.5)
        before = len(refused())
        try:
            administer(lab, line)
            wait_for("the MTU", lambda: a.link()["mtu"] == mtu, 60)

            def keys():
                with recorded() as sent:
                    traffic.ping(a, b.address4, count=1, wait=1)
                    sock.sendto(b"hello", ("239.6.6.6", PORT))
                    return [row for row in sent() if row["from"] == a.rdma and int(row["qkey"], 16) == qkey]

            wait_for("the Q_Key to be used", lambda: len(keys()) >= 2, 60)
            wait_for("a datagram to the group",
                     lambda: sock.sendto(b"x", ("239.6.6.6", PORT)) and sockets.received(member.sock, 1, limit=0.2), 60)
            reachable(a, b.address4, 60)
            assert b.link()["mtu"] == 1500
            assert traffic.ping(a, nodes[2].address4, size=mtu - 28, options=("-M", "do")).lost == 0
            with recorded() as sent:
                assert traffic.ping(a, nodes[2].address4, size=20000).lost == 0
                assert max(int(row["len"]) for row in sent() if row["from"] == a.rdma) <= mtu + 4
            assert not refused()[before:]
        finally:
            administer(lab, PARTITIONS.splitlines()[0])
            wait_for("the old MTU", lambda: a.link()["mtu"] == 4092, 60)
            b.ip("link", "set", b.interface, "mtu", "4092")


def test_key_comes_while_loading(lab, a, b, scaled):
    """B29: the P_Key comes at some moment around the load: whatever came first, the interface works."""
    chance = random.Random(29)
    took = 0.2
    for _ in range(scaled(40, least=4)):
        lab.unload_all()
        control(f"set_pkey {b.index} 0 0")
        start = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            loading = pool.submit(lab.load)
            time.sleep(chance.uniform(0, 1.1 * took))
            control(f"set_pkey {b.index} 0 0xffff")
            loading.result()
        took = time.monotonic() - start
        lab.adopt()
        reachable(a, b.address4)


def test_query_is_answered(a, b):
    """B32: an IGMP query that another node sends is answered: the stack sees that it was sent to a group."""
    group = "239.41.1.1"
    query = struct.pack("!BBH4s", 0x11, 10, 0, bytes(4))
    query = query[:2] + struct.pack("!H", sockets.checksum(query)) + query[4:]
    with Member(a, group).join(), sockets.packet(a) as tap, sockets.make(b, socket.AF_INET, socket.SOCK_RAW, IGMP) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, bytes(8) + struct.pack("=i", sockets.index_of(b)))
        # Those that the join itself makes the stack send come first.
        time.sleep(3)
        sockets.nothing_waits(tap)

        def answered():
            sock.sendto(query, ("224.0.0.1", 0))
            return [data for data in sockets.received(tap, 100, limit=2)
                    if data[20:22] == b"\x08\0" and data[24 + 9] == IGMP and socket.inet_aton(group) in data
                    and data[24 + 12 : 24 + 16] == socket.inet_aton(a.address4)]

        wait_for("a report", answered, 20, every=0.5)


def tell_guid(manager, node, index, guid, method=SET):
    """Has the administrator put a GUID into a node's table, or take it out."""
    packet = mad(SA, method, GUID_INFO_RECORD)
    packet[2] = 2
    struct.pack_into(">Q", packet, 48, 1 | 2 | 1 << 4 + index)
    struct.pack_into(">H", packet, 56, node.lid())
    struct.pack_into(">Q", packet, 64 + 8 * index, guid)
    with Umad(manager.rdma, 1) as device:
        answer = device.ask(packet, node.sm_lid())
    assert answer is not None and status(answer) == 0, answer and hex(status(answer))


def test_chosen_guid(a, b, c):  # noqa: F811
    """O10, Q8, L4: the administrator chooses the GUID of the hardware address. It is joined by it once the port has it; what
    is sent to groups comes from it, so that own copies are known (W29)."""
    guid = "0002c90300a1b2c3"
    before = b.link()["address"]
    chosen = before[:36] + ":".join(guid[at : at + 2] for at in range(0, 16, 2))

    def refused(address):
        return b.ip("link", "set", b.interface, "address", address, check=False).returncode != 0

    assert refused(chosen)
    b.ip("link", "add", "link", b.interface, "name", "kid", "type", "ipoib", "pkey", "0x8001")
    told = False
    try:
        b.ip("link", "set", b.interface, "down")
        for wrong in (chosen[:9] + "aa" + chosen[11:], chosen[:12] + "fd" + chosen[14:], chosen[:36] + "00:" * 7 + "00"):
            assert refused(wrong), wrong
        assert b.link()["address"] == before
        assert not refused(chosen)
        assert b.link()["address"] == chosen
        wait_for("the child", lambda: b.link("kid")["address"].endswith(chosen[36:]))
        b.ip("link", "set", b.interface, "up")
        account = sockets.Account(b)
        time.sleep(2)
        assert not b.carrier() and account["sa_joins_asked"] == 0
        tell_guid(a, b, 1, int(guid, 16))
        told = True
        wait_for("the carrier", b.carrier, 20)
        assert b.link()["address"] == chosen
        addresses_back(b)
        gid = b.gid().replace(":", "")[:16] + guid
        wait_for("the memberships", lambda: gid in saquery("-m"), 20, every=0.5)
        for node in (a, c):
            node.forget_neighbours()
            reachable(node, b.address4)
            reachable(b, node.address4)
        account = sockets.Account(b)
        with recorded() as sent, sockets.udp(b) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b.interface.encode())
            sock.sendto(b"hello", ("255.255.255.255", 9))
            wait_for("the own copy to be known", lambda: account["rx_own_echo"])
            assert {row["sgid_index"] for row in sent() if row["from"] == b.rdma and row.get("dgid") == BROADCAST} == {"1"}
    finally:
        b.ip("link", "set", b.interface, "down")
        assert not refused(before)
        b.ip("link", "set", b.interface, "up")
        if told:
            tell_guid(a, b, 1, int(guid, 16), DELETE)
        b.ip("link", "del", "kid")
        addresses_back(b)
    b.wait_ready()
    assert b.link()["address"] == before
    a.forget_neighbours()
    reachable(a, b.address4)


def test_chosen_guid_of_a_child(a, b, sound):  # noqa: F811
    """R1, O10: a child may be born with a GUID of its own, of which the address that is asked for tells."""
    guid = "0002c90300a1b2c4"
    tail = ":".join(guid[at : at + 2] for at in range(0, 16, 2))
    parent = b.link()["address"]

    def add(address, *words):
        return b.ip("link", "add", "link", b.interface, "name", "kid", "address", address, *words,
                    "type", "ipoib", "pkey", "0x8001", check=False)

    for wrong in (parent[:12] + "fd" + parent[14:], parent[:36] + "00:" * 7 + "00"):
        assert "subnet" in add(wrong).stdout and not b.link("kid"), wrong
    tell_guid(a, b, 1, int(guid, 16))
    try:
        # An MTU that no interface can have is not noted.
        done = add("00:00:00:99:" + parent[12:36] + tail, "mtu", "50")
        assert not done.returncode, done.stdout
        row = b.link("kid")
        assert row["address"].endswith(parent[12:36] + tail) and row["address"][:11] not in (parent[:11], "00:00:00:99")
        assert row["mtu"] == b.link()["mtu"]
        b.ip("link", "set", "kid", "up")
        wait_for("the carrier", lambda: b.carrier("kid"), 20)
        assert b.link("kid")["address"] == row["address"] and b.link()["address"] == parent
    finally:
        b.ip("link", "del", "kid", check=False)
        tell_guid(a, b, 1, int(guid, 16), DELETE)


@pytest.mark.parametrize("kids", [0, 5])
def test_down_while_joining(a, b, scaled, kids):
    """B35, B55: down comes at every moment of a join, with and without children. It never waits long, and in the end nobody
    is a member."""
    worst = 0
    rounds = scaled(100, least=20)
    with children(b, kids), rules(f"class={SA} method=0x81 attr={MC_MEMBER:#x} dst={b.index} delay=25000"), \
            sender(b, "239.40.1.1") as sock:
        for number in range(rounds):
            b.ip("link", "set", b.interface, "up")
            try_to_send(sock, "239.40.1.1")
            time.sleep(number * 0.05 / rounds)
            start = time.monotonic()
            b.ip("link", "set", b.interface, "down")
            worst = max(worst, time.monotonic() - start)
        control("filter clear")
        wait_for("the end of all memberships", lambda: not memberships(b), 20, every=0.5)
    assert worst < 2, worst
    b.ip("link", "set", b.interface, "up")
    addresses_back(b)
    b.wait_ready()
