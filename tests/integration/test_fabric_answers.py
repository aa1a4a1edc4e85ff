# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""A subnet administrator that refuses, is silent or talks nonsense, and datagrams that no IPoIB would send.

Whatever comes is dropped or cut, counted and logged, asks no storm of questions, and traffic goes on.
"""

import contextlib
import math
import pathlib
import random
import re
import socket
import struct
import tempfile
import time

import pytest
import sockets
import traffic
from fabric import DEBUG, control, lost
from lab import run, wait_for
from test_fabric_filter import GET_RESP, MC_MEMBER, PATH_RECORD, SA, restart
from test_multicast import PORT, Member, sender

VM = ["--topology", "fabric", "--nodes", "3"]
# Where records in the administrator's MADs have their parts.
RECORD = 24 + 12 + 20
MGID_AT, MEMBER_QKEY_AT, MLID_AT, MEMBER_MTU_AT, MEMBER_PKEY_AT = (RECORD + at for at in (0, 32, 36, 38, 40))
MEMBER_RATE_AT, STATE_AT = RECORD + 42, RECORD + 48
DGID_AT, DLID_AT, HOPS_AT, PKEY_AT, SL_AT, RATE_AT = (RECORD + at for at in (8, 40, 47, 50, 53, 55))
BROADCAST = "ff12401bffff000000000000ffffffff"
SET = 2
# A patch that changes nothing: the rule only counts.
COUNT = "patch=0:01"
GROUP = "239.7.7.7"


@pytest.fixture(autouse=True)
def sound(lab, nodes):
    """After each test the fabric has nothing to complain of, and everybody answers."""
    yield
    control("filter clear")
    lab.restore()
    for node in nodes[1:]:
        reachable(node, nodes[0].address4, 40)
    lab.check_anomalies()


@pytest.fixture
def every_line():
    """The kernel's limit for the log lines of networking, ten in five seconds, is off."""
    cost = pathlib.Path("/proc/sys/net/core/message_cost")
    before = cost.read_text()
    cost.write_text("0")
    yield
    cost.write_text(before)


@pytest.fixture
def c(nodes):
    return nodes[2]


@contextlib.contextmanager
def rules(*texts):
    """Filter rules, behind those there are; gives a function that tells the hits of each."""
    before = len((DEBUG / "filters").read_text().splitlines())
    for text in texts:
        control(f"filter add {text}")
    try:
        yield lambda: [int(hits) for hits in re.findall(r" hits=(\d+)$", (DEBUG / "filters").read_text(), re.M)[before:]]
    finally:
        control("filter clear")


def answers(attribute, node):
    return f"class={SA} method={GET_RESP:#x} attr={attribute:#x} dst={node.index}"


def joins(node):
    return f"class={SA} method={SET} attr={MC_MEMBER:#x} src={node.index}"


def mgid(group):
    """Of an IPv4 group, as 32 digits."""
    number = struct.unpack("!I", socket.inet_aton(group))[0] & 0x0FFFFFFF
    return f"ff12401bffff00000000{number:012x}"


def reachable(node, target, timeout=30):
    wait_for(f"{target} to answer {node}", lambda: traffic.ping(node, target, count=1, wait=1).received, timeout)


def gid_of_stranger(number):
    """As 32 digits."""
    return f"fe800000000000000bad0000{number:08x}"


def strangers(node, numbers):
    """Neighbours that nobody is: who sends to one has the administrator asked."""
    addresses = {f"10.0.0.{100 + number}": f"00:00:12:34:{bytes.fromhex(gid_of_stranger(number)).hex(':')}"
                 for number in numbers}
    lines = (f"neigh replace {address} lladdr {lladdr} nud permanent dev {node.interface}\n"
             for address, lladdr in addresses.items())
    with tempfile.NamedTemporaryFile("w", dir="/run") as batch:
        batch.write("".join(lines))
        batch.flush()
        node.run("ip", "-batch", batch.name)
    return list(addresses)


# The broadcast group.

NONSENSE = {"q_key 0": f"{MEMBER_QKEY_AT}:00000000", "lid of a port": f"{MLID_AT}:0003", "permissive lid": f"{MLID_AT}:ffff",
            "mgid": f"{MGID_AT + 12}:01020304", "p_key": f"{MEMBER_PKEY_AT}:8123", "mtu 0": f"{MEMBER_MTU_AT}:80",
            "mtu 6": f"{MEMBER_MTU_AT}:86"}


def test_nonsense_about_the_link(a, b, log, every_line):
    """R4391-12: the answer counts as none: no carrier on such terms, and a line in the log; asked again, the administrator is
    believed."""
    for number, patch in enumerate(NONSENSE.values()):
        account = sockets.Account(b)
        with rules(f"{answers(MC_MEMBER, b)} match={MGID_AT}:{BROADCAST} count=1 patch={patch}") as hits:
            restart(b)
            wait_for("the answer to be falsified", lambda: hits() == [1])
            wait_for("the carrier", b.carrier)
        # The RDMA core itself refuses a foreign P_Key.
        assert account["sa_answers_bad"] == int(f"{MEMBER_PKEY_AT}:" not in patch), (patch, account.grown("sa_"))
        assert account["sa_joins_failed"] == 1
        assert len(log.lines("joining group", "ffff:ffff failed")) == number + 1
        reachable(a, b.address4)


STATUSES = [0x0001, 0x0004, 0x000C, 0x001C, *range(0x0100, 0x0800, 0x0100), 0xFF00]


def test_every_status(b, log, every_line):
    """Refused with any word, a path is refused: counted, logged, and traffic to others goes on."""
    numbers = range(110, 110 + len(STATUSES))
    for count, (status, number, target) in enumerate(zip(STATUSES, numbers, strangers(b, numbers))):
        account = sockets.Account(b)
        # The administrator is asked again if it is slow, and answers each time.
        rule = f"{answers(PATH_RECORD, b)} match={DGID_AT}:{gid_of_stranger(number)} status={status:#x}"
        with rules(rule) as hits, sockets.udp(b) as sock:
            sock.sendto(b"hello", (target, 9))
            wait_for("the answer to be falsified", lambda: hits()[0] >= 1)
            wait_for("the loss to be counted", lambda: account["tx_neigh_failed"] == 1)
        assert account["sa_paths_failed"] == 1 <= account["sa_paths_asked"]
        assert len(log.lines("no path to")) == count + 1
    b.ip("neigh", "flush", "dev", b.interface, "nud", "permanent")


def test_refused_joins_of_the_link(a, b):
    """R4391-5.c: refused again and again, the driver asks with longer and longer pauses and makes no group of its own."""
    account = sockets.Account(b)
    with rules(f"{answers(MC_MEMBER, b)} match={MGID_AT}:{BROADCAST} status=0x0300"):
        restart(b)
        time.sleep(6)
        assert not b.carrier()
        # At once, after one second, and after two more.
        assert 2 <= account["sa_joins_asked"] <= 4, account.grown()
        assert account["join_failed"] >= 2
    wait_for("the carrier", b.carrier, 20)
    reachable(a, b.address4)


def test_larger_than_the_port(lab, a, b, c):
    """R4391-4.1.c: a group MTU above the port's is cut to it; the rate above the link's is not used."""
    c.delete_rdma()
    control(f"add {c.index} mtu=4")
    wait_for("the port", lambda: c.state() == "ACTIVE")
    # OpenSM refuses such a port: its no becomes a yes, with the record that it gives to others.
    port = "".join(c.gid().split(":"))
    record = [f"{MGID_AT}:{BROADCAST}", f"{MGID_AT + 16}:{port}", f"{MEMBER_QKEY_AT}:00000b1bc0008500ffff8a9200000000",
              f"{STATE_AT}:2100"]
    first = f"{answers(MC_MEMBER, c)} count=1"
    try:
        with rules(f"{first} status=0", *(f"{first} patch={patch}" for patch in record)):
            c.adopt_interface()
            wait_for("the carrier", c.carrier)
        assert c.link()["mtu"] == 2044
        assert sockets.counters(c)["sa_answers_clamped"] >= 2
    finally:
        c.delete_rdma()
        c.add_rdma()
        wait_for("the port", lambda: c.state() == "ACTIVE")
        c.adopt_interface()
        c.wait_ready()
    assert c.link()["mtu"] == 4092
    reachable(c, a.address4)


# Paths.

def test_nonsense_about_known_paths(a, b):
    """B19: a path that is in use is kept until there is a better one, and no packet is lost meanwhile."""
    assert traffic.ping(a, b.address4).lost == 0
    for patch in (f"{DLID_AT}:0000", f"{DLID_AT}:c001", f"{DGID_AT + 8}:0102", f"{PKEY_AT}:8123"):
        account = sockets.Account(a)
        with rules(f"{answers(PATH_RECORD, a)} count=1 patch={patch}") as hits:
            control(f"reregister {a.index}")
            done = traffic.ping(a, b.address4, count=50, interval=0.01)
            wait_for("the answer to be falsified", lambda: hits() == [1])
        assert done.lost == 0, (patch, str(done))
        # Other paths may fail too: the core knows no administrator for a moment after such an event.
        wait_for("the answer to be counted", lambda: account["sa_answers_bad"] == 1 and account["sa_paths_failed"] >= 1)


@contextlib.contextmanager
def recorded():
    """What is sent meanwhile; gives a function that returns the datagrams, each a dictionary of words."""
    control("record 1")

    def sent():
        rows = []
        for line in (DEBUG / "sent").read_text().splitlines():
            first, *words = line.split()
            rows.append({"from": first, **dict(word.split("=") for word in words)})
        return rows

    try:
        yield sent
    finally:
        control("record 0")


def asked_anew(node, peer, patch):
    """Has the paths of a node asked for anew, and the answer about that to a peer falsified."""
    target = peer.gid().replace(":", "")
    with rules(f"{answers(PATH_RECORD, node)} match={DGID_AT}:{target} patch={patch}") as hits:
        control(f"reregister {node.index}")
        wait_for("the answer to be falsified", lambda: all(hits()))


def test_rate_of_a_path(a, b):
    """R4391-9.1.2.a: the static rate is the administrator's, unless the link has less."""
    reachable(a, b.address4)

    def rates():
        with recorded() as sent:
            assert traffic.ping(a, b.address4).lost == 0
            return {row["rate"] for row in sent() if row["from"] == a.rdma and row["dest_qp"] == str(b.qpn())}

    for code, used in ((0x8A, 0), (0x82, 2), (0xBF, 0), (0x87, 7)):
        account = sockets.Account(a)
        asked_anew(a, b, f"{RATE_AT}:{code:02x}")
        wait_for("the rate to be used", lambda: rates() == {str(used)})
        assert bool(account["sa_answers_clamped"]) == (used == 0)


def test_service_level_of_a_path(a, b):
    """R4391-9.1.2.a: datagrams have the service level that the administrator names, also when it names another one."""
    reachable(a, b.address4)
    for level in ("5", "0"):
        asked_anew(a, b, f"{SL_AT}:0{level}")

        def levels():
            with recorded() as sent:
                assert traffic.ping(a, b.address4).lost == 0
                return {row["sl"] for row in sent() if row["from"] == a.rdma and row["dest_qp"] == str(b.qpn())}

        wait_for("the level to be used", lambda: levels() == {level})


def test_route_header_of_a_path(a, b):
    """R4391-6.d: a path with a hop limit has a global route header, and both forms are received."""
    reachable(a, b.address4)
    for hops in ("40", "00"):
        asked_anew(a, b, f"{HOPS_AT}:{hops}")

        def limits():
            with recorded() as sent:
                assert traffic.ping(a, b.address4).lost == 0
                return {row.get("hop_limit") for row in sent()
                        if row["from"] == a.rdma and row["dest_qp"] == str(b.qpn())}

        wait_for("the header", lambda: limits() == {"64" if hops == "40" else None})


def test_silent_about_known_paths(a, b):
    """B15, B19: paths in use outlive an administrator that does not answer; it is not asked on and on."""
    assert traffic.ping(a, b.address4).lost == 0
    account = sockets.Account(a)
    with rules(f"{answers(PATH_RECORD, a)} drop") as hits:
        start = time.monotonic()
        control(f"reregister {a.index}")
        wait_for("a question", lambda: hits()[0] > 0)
        done = traffic.ping(a, b.address4, count=200, interval=0.02)
        assert done.lost == 0, str(done)
        asked, took = account["sa_paths_asked"], time.monotonic() - start
        # About two peers: at once, and whenever a second of waiting and one of pause are over.
        assert asked <= 2 + took, (account.grown("sa_"), took)
    reachable(a, b.address4)


def test_silent_about_many(a, b):
    """B15: a silent administrator and a hundred neighbours: questions are bounded, and so is what waits."""
    reachable(a, b.address4)
    targets = strangers(a, range(100))
    account = sockets.Account(a)
    try:
        with rules(f"class={SA} attr={PATH_RECORD:#x} src={a.index} drop"), sockets.udp(a) as sock:
            start = time.monotonic()
            for _ in range(20):
                for target in targets:
                    sock.sendto(bytes(1000), (target, 9))
                time.sleep(0.1)
            assert traffic.ping(a, b.address4).lost == 0
            took = time.monotonic() - start
            # So many at a time, each of which takes a second.
            assert 32 <= account["sa_paths_asked"] <= 32 * (2 + took), (account.grown("sa_"), took)
            wait_for("losses", lambda: account["tx_neigh_failed"] + account["tx_neigh_queue_full"] > 0)
    finally:
        a.ip("neigh", "flush", "dev", a.interface, "nud", "permanent")


# Groups.

def test_refused_groups_are_no_storm(a, b):
    """B06, B23: forty groups are refused: each is asked for after one second, two, four; counted."""
    account = sockets.Account(b)
    with contextlib.ExitStack() as stack:
        stack.enter_context(rules(f"{answers(MC_MEMBER, b)} match={MGID_AT}:{mgid('239.9.0.0')[:28]} status=0x0200"))
        members = []
        for at in range(0, 40, 20):
            members.append(stack.enter_context(Member(b, f"239.9.0.{at}", PORT + 100 + at)))
            for number in range(at, at + 20):
                members[-1].request = socket.inet_aton(f"239.9.0.{number}") + members[-1].request[4:]
                members[-1].join()
        wait_for("all to be refused", lambda: account["join_failed"] >= 40)
        time.sleep(5)
        asked = account["sa_joins_asked"]
        assert 80 <= asked <= 40 * 4 + 10, account.grown()
        assert account["sa_joins_failed"] >= 80
        # One that is not refused is not held up by the others.
        with rules(f"{joins(b)} match={MGID_AT}:{mgid(GROUP)} {COUNT}") as requests, Member(b, GROUP).join() as member, \
                sender(a, GROUP) as sock:
            wait_for("another group to be asked for", lambda: requests()[0], 3)

            def arrives():
                sock.sendto(b"probe", (GROUP, PORT))
                return sockets.received(member.sock, 1, limit=0.1)

            # The sender joins too, and the switch is told.
            wait_for("another group", arrives, 15)


def test_group_for_senders_by_the_old_state(a, b):
    """R4391-10.b: the administrator does not know SendOnlyFullMember; the group is joined as SendOnlyNonMember."""
    group, account = "239.7.7.8", sockets.Account(a)
    with rules(f"{joins(a)} match={MGID_AT}:{mgid(group)} match={STATE_AT}:08 patch={STATE_AT}:00") as hits, \
            Member(b, group).join() as member, sender(a, group) as sock:
        wait_for("the group", lambda: mgid(group) in saquery("-g"), every=0.3)

        def arrives():
            sock.sendto(b"probe", (group, PORT))
            return sockets.received(member.sock, 1, limit=0.1)

        wait_for("a datagram", arrives, 15)
        # A request is repeated if the administrator is slow.
        assert hits()[0] >= 1 and account["sa_joins_failed"] == 1


@contextlib.contextmanager
def no_such_group(node, group):
    """The administrator refuses to make a group for who only sends."""
    with rules(f"{joins(node)} match={MGID_AT}:{mgid(group)} patch={STATE_AT}:00") as hits:
        yield hits


def heard(sock, target):
    wanted = socket.inet_aton(target)
    return [data for data in sockets.received(sock, 100, limit=0.2) if data[20:22] == b"\x08\0" and data[40:44] == wanted]


@pytest.mark.parametrize("routers", [True, False])
def test_detour_of_wide_groups(a, b, c, routers):
    """R4391-10.c: what is sent to a group that is not there goes to the routers, or to everybody if there are none."""
    group = "239.8.8.8" if routers else "239.8.8.9"
    # A router's group that was joined before would still be sent to.
    a.ip("link", "set", a.interface, "down")
    a.repair()
    a.wait_ready()
    account = sockets.Account(a)
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_such_group(a, group))
        if routers:
            stack.enter_context(Member(c, "224.0.0.2").join())
            wait_for("the routers' group", lambda: mgid("224.0.0.2") in saquery("-g"), 20, every=0.5)
        else:
            stack.enter_context(rules(f"{joins(a)} match={MGID_AT}:{mgid('224.0.0.2')} patch={STATE_AT}:00"))
        taps = [stack.enter_context(sockets.packet(node)) for node in (b, c)]
        sock = stack.enter_context(sender(a, group))

        def arrives():
            sock.sendto(b"probe", (group, PORT))
            return heard(taps[1], group)

        wait_for("a datagram at the router", arrives, 15)
        assert bool(heard(taps[0], group)) == (not routers)
        # The housekeeper, every ten seconds, leaves groups that nobody sends to.
        end = time.monotonic() + 12
        while time.monotonic() < end:
            wait_for("a datagram at the router", arrives, 5)
    assert account["group_detours"] == 1


def saquery(*words):
    """What saquery prints, GIDs as 32 digits."""
    text = run("saquery", "-C", "ibf0", "--smkey", "1", *words).stdout
    return re.sub(r"f[ef][0-9a-f]{2}:[0-9a-f:]+", lambda found: expanded(found[0]), text)


def expanded(text):
    with contextlib.suppress(OSError):
        return socket.inet_pton(socket.AF_INET6, text).hex()
    return text


def test_refused_narrow_groups(a, b, log, every_line):
    """B23: a group of the link that nobody listens to: dropped and counted; a handful of requests and log lines."""
    group, account = "224.0.0.99", sockets.Account(a)
    start = time.monotonic()
    with no_such_group(a, group) as hits, sender(a, group) as sock, sockets.packet(b) as tap:
        for _ in range(100):
            sock.sendto(b"probe", (group, PORT))
            time.sleep(0.03)
        assert heard(tap, group) == []
        # Each request is repeated if the administrator is slow.
        assert 1 <= hits()[0] <= 20
    assert account["tx_neigh_failed"] >= 90 and account["group_detours"] == 0
    # At once, and after one second, two more, four; in both states, with a line.
    failed, lines, took = account["sa_joins_failed"], len(log.lines("to send failed")), time.monotonic() - start
    most = 1 + int(math.log2(1 + took))
    assert 1 <= lines <= most and 1 <= failed <= 2 * most, (lines, account.grown(), took)
    assert traffic.ping(a, b.address4).lost == 0


# Datagrams.

def grh(source, target, version=6, following=0x1B):
    return struct.pack("!IHBB", version << 28, 100, following, 64) + source + target


def gid(node):
    return bytes.fromhex(node.gid().replace(":", ""))


def inject(node, payload, header=None, qkey=0x0B1B, qpn=None, src_qp=77):
    words = ["inject", node.index, node.qpn() if qpn is None else qpn, payload.hex() or "-", f"qkey={qkey:#x}", f"src_qp={src_qp}"]
    if header:
        words.append(f"grh={header.hex()}")
    control(" ".join(map(str, words)))


def test_short_datagrams(a, b, log):
    """Fewer bytes than the headers have: counted as length errors, said once."""
    account = sockets.Account(b)
    for length in (0, 1, 2, 3):
        inject(b, bytes(length))
    wait_for("all to be counted", lambda: account["rx_bad_length"] == 4)
    assert len(log.lines("too short")) == 1
    # Headers and nothing else are the stack's business.
    inject(b, b"\x08\0\0\0")
    wait_for("it to be passed on", lambda: account["rx_delivered_packets"] >= 1)
    assert account["rx_bad_length"] == 4
    assert traffic.ping(a, b.address4).lost == 0


def test_route_headers(a, b):
    """R4391-6.b, R4391-6.d, B32: with and without, right or not: the datagram is the stack's, as for this host or a group."""
    other = bytes.fromhex("fe80") + bytes(13) + b"\x99"
    host = {"none": None, "right": grh(gid(a), gid(b)), "of another version": grh(gid(a), gid(b), version=4),
            "of another payload": grh(gid(a), gid(b), following=17), "from us": grh(gid(b), gid(b)), "to another": grh(gid(a), other)}
    cases = [(header, socket.PACKET_HOST) for header in host.values()]
    cases.append((grh(gid(a), bytes.fromhex(mgid("239.3.3.3"))), socket.PACKET_MULTICAST))
    with sockets.packet(b) as tap, sockets.udp(b, 9999) as sock:
        for number, (header, kind) in enumerate(cases):
            data = bytes([0xA0 + number]) * 30
            inject(b, struct.pack("!HH", sockets.ETH_P_IP, 0xFFFF) + sockets.udp_packet(a.address4, b.address4, 9999, data), header)
            if kind == socket.PACKET_HOST:
                assert sockets.received(sock, 1) == [data]
            tap.settimeout(5)
            while True:
                got, address = tap.recvfrom(4096)
                if data in got:
                    break
            assert address[2] == kind, number


def test_wrong_keys(a, b):
    """R4391-9.1.2.b: what has another Q_Key never arrives."""
    before = lost(b.index, "qkey")
    for _ in range(5):
        inject(b, b"\x08\0\0\0" + bytes(40), qkey=0x1234)
    assert traffic.ping(a, b.address4).lost == 0
    assert lost(b.index, "qkey") == before + 5


def test_unknown_types(a, b):
    """Types that no one knows: the stack's taps get them, and nothing is upset."""
    with sockets.packet(b) as tap:
        for kind in (0x0000, 0x0600, 0x88B5, 0xFFFF):
            inject(b, struct.pack("!HH", kind, 0) + b"\xcd" * 60)
        found = set()

        def all_came():
            found.update(data[20:22] for data in sockets.received(tap, 10, limit=0.2) if data[24:84] == b"\xcd" * 60)
            return len(found) == 4

        wait_for("all types", all_came)
    assert traffic.ping(a, b.address4).lost == 0


def test_random_datagrams(a, b, scaled):
    """Random bytes of every length, with random route headers."""
    chance = random.Random(4391)
    qpn = b.qpn()
    for _ in range(scaled(400, least=50)):
        payload = chance.randbytes(chance.randrange(0, 120))
        if chance.random() < 0.7:
            payload = chance.choice([b"\x08\0", b"\x86\xdd", b"\x08\x06"]) + payload
        inject(b, payload, chance.choice([None, chance.randbytes(40), grh(chance.randbytes(16), gid(b))]), qpn=qpn)
    assert traffic.ping(a, b.address4, count=20).lost == 0
