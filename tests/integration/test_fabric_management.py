# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The test fabric as OpenSM and the InfiniBand diagnostics see it, and what clients of an HCA hear.

The client is the stock driver, which logs each event that it is told.
"""

import contextlib
import json
import pathlib
import re

import connected
import pytest
import traffic
from fabric import ACTIVE, OpenSm, control, counters, did
from lab import LabError, LogReader, rdma_devices, run, wait_for

VM = ["--topology", "fabric", "--nodes", "3", "--driver", "stock", "--fabric-param", "sw_ports=16"]
DEBUG_LEVEL = pathlib.Path("/sys/module/ib_ipoib/parameters/debug_level")
PORT_ACTIVE, PORT_ERR, LID_CHANGE, PKEY_CHANGE, SM_CHANGE, REREGISTER = 9, 10, 11, 12, 13, 17
SWITCH_PORTS = 16
# Seconds for a manager to do something: the debug kernel is slow, and two managers poll each other once a second.
PATIENCE = {"release": 40, "debug": 180}


class Heard:
    """The events that the stock driver was told since the last `clear`."""

    def __init__(self, patience):
        self.patience = patience
        self.log = LogReader()

    def clear(self):
        self.log.close()
        self.log = LogReader()

    def by(self, node):
        return [int(number) for number in re.findall(rf"Event (\d+) on device {node.rdma} port 1", self.log.text())]

    def wait(self, node, *wanted):
        wait_for(f"{node.rdma} to hear {wanted}, heard {self.by(node)}",
                 lambda: set(wanted) <= set(self.by(node)), self.patience)


@pytest.fixture
def heard(lab, nodes):
    level = DEBUG_LEVEL.read_text()
    DEBUG_LEVEL.write_text("1")
    hearing = Heard(PATIENCE[lab.flavour])
    yield hearing
    hearing.log.close()
    DEBUG_LEVEL.write_text(level)


@pytest.fixture
def active(lab):
    """Waits until all ports are active again."""
    return lambda: wait_for("all ports to be active", lambda: all(node.state() == "ACTIVE" for node in lab.nodes),
                            ACTIVE[lab.flavour])


def reachable(node, target, timeout=120):
    wait_for(f"{target} to answer {node}", lambda: traffic.ping(node, target, count=1, wait=1).received, timeout)


def all_reachable(nodes):
    for node in nodes:
        for peer in nodes:
            if peer is not node:
                reachable(node, peer.address4)


def lids(lab):
    return {node: node.lid() for node in lab.nodes}


def switch_lid(node):
    words = run("smpquery", "-C", node.rdma, "-D", "portinfo", "0,1", "0").stdout
    return int(re.search(r"^Lid:\.*(\d+)", words, re.M)[1])


# What the diagnostics say.


def test_ibstat(nodes):
    for node in nodes:
        text = run("ibstat", node.rdma).stdout
        for line in ("State: Active", "Physical state: LinkUp", "Rate: 40", "Link layer: InfiniBand",
                     f"Base lid: {node.lid()}", "SM lid: ", "Number of ports: 1"):
            assert line in text, text
    assert len({re.search(r"Node GUID: (\S+)", run("ibstat", node.rdma).stdout)[1] for node in nodes}) == len(nodes)


def test_rdma_tool(nodes):
    rows = {row["ifname"]: row for row in json.loads(run("rdma", "-j", "-d", "dev").stdout)}
    ports = {row["ifname"]: row for row in json.loads(run("rdma", "-j", "-d", "link").stdout)}
    assert set(rows) == {node.rdma for node in nodes}
    for node in nodes:
        assert rows[node.rdma]["node_type"] == "ca"
        port = ports[node.rdma]
        assert (port["state"], port["physical_state"], port["lid"]) == ("ACTIVE", "LINK_UP", node.lid()), port
        assert port["subnet_prefix"] == "fe80:0000:0000:0000", port


def test_smpquery(nodes):
    first = nodes[0]
    for node in nodes:
        path = "0" if node is first else f"0,1,{node.switch_port}"
        for route in (("-D", path), (str(node.lid()),)):
            direct = route[:1] if len(route) > 1 else ()
            text = run("smpquery", "-C", first.rdma, *direct, "nodeinfo", route[-1]).stdout
            assert "NodeType:........................Channel Adapter" in text, text
            assert f"{node.port_guid():#018x}" in text, text
            text = run("smpquery", "-C", first.rdma, *direct, "portinfo", route[-1]).stdout
            for line in ("LinkState:.......................Active", "NeighborMTU:.....................4096",
                         "LinkSpeedActive:.................10.0 Gbps", f"Lid:.............................{node.lid()}"):
                assert line in text, text
            assert "0xffff" in run("smpquery", "-C", first.rdma, *direct, "pkeys", route[-1]).stdout
    text = run("smpquery", "-C", first.rdma, "-D", "nodeinfo", "0,1").stdout
    assert "NodeType:........................Switch" in text, text
    assert f"NumPorts:........................{SWITCH_PORTS}" in text, text
    text = run("smpquery", "-C", first.rdma, "-D", "switchinfo", "0,1").stdout
    assert "LinearFdbCap:....................4096" in text and "McastFdbCap:.....................1024" in text, text


def test_ibnetdiscover(nodes):
    text = run("ibnetdiscover", "-C", nodes[0].rdma).stdout
    assert len(re.findall(rf"^Switch\s+{SWITCH_PORTS} ", text, re.M)) == 1, text
    assert len(re.findall(r"^Ca\s+1 ", text, re.M)) == len(nodes), text
    for node in nodes:
        found = re.search(rf"^\[{node.switch_port}\]\s+\"H-[0-9a-f]+\"\[1\]\((\w+)\).*lid (\d+) (\S+)$",
                          text, re.M)
        assert found, text
        assert (int(found[1], 16), int(found[2]), found[3]) == (node.port_guid(), node.lid(), "4xQDR"), found[0]


def test_iblinkinfo(nodes):
    text = run("iblinkinfo", "-C", nodes[0].rdma, "--switches-only").stdout
    up = [line for line in text.splitlines() if "LinkUp" in line]
    down = [line for line in text.splitlines() if "Down/ Polling" in line]
    assert (len(up), len(down)) == (len(nodes), SWITCH_PORTS - len(nodes)), text
    assert all("4X          10.0 Gbps Active/  LinkUp" in line for line in up), text
    assert "Could be" not in text, text


def test_saquery(nodes):
    text = run("saquery", "-C", nodes[1].rdma, "NR").stdout
    assert text.count("NodeRecord dump") == len(nodes) + 1, text
    for node in nodes:
        assert f"{node.port_guid():#018x}" in text, text
    text = run("saquery", "-C", nodes[1].rdma, "PR", "--slid", nodes[1].lid(), "--dlid", nodes[2].lid()).stdout
    assert f"dlid....................{nodes[2].lid()}" in text and "PathRecord dump" in text, text
    assert text.count("PathRecord dump") == 1 and "mtu.....................0x85" in text, text
    groups = run("saquery", "-C", nodes[1].rdma, "-g").stdout
    assert re.search(r"MGID\.+ff12:401b:ffff::ffff:ffff", groups), groups
    # Who is a member only those may ask who know the manager's key.
    members = run("saquery", "-C", nodes[1].rdma, "--smkey", "1", "-m").stdout
    for node in nodes:
        assert re.search(rf"MGID\.+ff12:401b:ffff::ffff:ffff\n(?:.*\n){{4}}.*NodeDescription\.+{node.rdma}$",
                         members, re.M), members


def test_perfquery(nodes):
    first, second = nodes[:2]

    def counted(lid, port):
        text = run("perfquery", "-C", nodes[2].rdma, "-x", lid, port).stdout
        return {name: int(value) for name, value in re.findall(r"^(\w+):\.+(\d+)$", text, re.M)}

    switch = switch_lid(first)
    places = {"sender": (first.lid(), 1), "ingress": (switch, first.switch_port),
              "egress": (switch, second.switch_port), "receiver": (second.lid(), 1)}
    before = {name: counted(*place) for name, place in places.items()}
    assert traffic.ping(first, second.address4, count=100, size=1000).lost == 0
    for name, place in places.items():
        now = counted(*place)
        for kind in ("Xmit", "Rcv"):
            assert now[f"Port{kind}Pkts"] - before[name][f"Port{kind}Pkts"] >= 100, (name, before[name], now)
            assert now[f"Port{kind}Data"] - before[name][f"Port{kind}Data"] >= 100 * 250, (name, before[name], now)
    run("perfquery", "-C", first.rdma, "-R", second.lid(), 1)
    assert counted(second.lid(), 1)["PortRcvPkts"] < 100
    text = run("perfquery", "-C", first.rdma, second.lid(), 1).stdout
    assert re.search(r"SymbolErrorCounter:\.+0$", text, re.M), text


def test_forwarding_tables(nodes):
    text = run("dump_lfts", "-C", nodes[0].rdma).stdout
    for node in nodes:
        row = f"{node.lid():#06x} {node.switch_port:03} : (Channel Adapter portguid {node.port_guid():#018x}"
        assert f"\n{row}" in text, text
    assert re.search(rf"^{switch_lid(nodes[0]):#06x} 000 : \(Switch portguid", text, re.M), text
    text = run("dump_mfts", "-C", nodes[0].rdma).stdout
    rows = re.findall(r"^0x(c[0-9a-f]{3})((?: +[x ])*) *$", text, re.M | re.I)
    assert "c000" in [row[0] for row in rows], text
    # The broadcast group: everybody is in it.
    assert dict(rows)["c000"].count("x") == len(nodes), text
    for line in text.splitlines():
        assert not re.search(r"error|failed|timeout", line, re.I), text


def test_sysfs_counters(nodes):
    base = pathlib.Path(f"/sys/class/infiniband/{nodes[0].rdma}/ports/1/counters")
    before = int((base / "port_xmit_packets").read_text())
    assert traffic.ping(nodes[0], nodes[1].address4, count=10).lost == 0
    assert int((base / "port_xmit_packets").read_text()) >= before + 10


# What clients hear.


def test_port_bounce(lab, nodes, heard, active, scaled):
    """The link goes and comes back: only its own clients hear of it, and the manager at once, by a trap."""
    for _ in range(scaled(10)):
        heard.clear()
        control("bounce 1")
        heard.wait(nodes[1], PORT_ERR, PORT_ACTIVE)
        assert heard.by(nodes[1]).index(PORT_ERR) < heard.by(nodes[1]).index(PORT_ACTIVE)
        assert not heard.by(nodes[2])
        active()
    all_reachable(nodes)


def test_link_down_and_up(lab, nodes, heard, active):
    control("link 1 down")
    heard.wait(nodes[1], PORT_ERR)
    wait_for("the carrier to go", lambda: not nodes[1].carrier())
    assert nodes[1].state() == "DOWN" and "Polling" in nodes[1].port("phys_state")
    assert traffic.ping(nodes[0], nodes[1].address4, count=1, wait=1).received == 0
    assert traffic.ping(nodes[0], nodes[2].address4).lost == 0
    control("link 1 up")
    active()
    heard.wait(nodes[1], PORT_ACTIVE)
    nodes[1].wait_ready()
    all_reachable(nodes)


def test_switch_port_is_disabled(lab, nodes, heard, active):
    """By a management program, through the switch."""
    port = nodes[2].switch_port
    run("ibportstate", "-C", nodes[0].rdma, "-D", "0,1", port, "disable")
    heard.wait(nodes[2], PORT_ERR)
    assert nodes[2].state() == "DOWN"
    text = run("ibportstate", "-C", nodes[0].rdma, "-D", "0,1", port, "query").stdout
    assert "PhysLinkState:...................Disabled" in text, text
    run("ibportstate", "-C", nodes[0].rdma, "-D", "0,1", port, "enable")
    active()
    heard.wait(nodes[2], PORT_ACTIVE)
    all_reachable(nodes)


def test_switch_loses_its_power(lab, nodes, heard, active):
    control("reset_switch")
    for node in nodes:
        heard.wait(node, PORT_ERR, PORT_ACTIVE)
    active()
    all_reachable(nodes)


def test_lid_change(lab, nodes, heard, active):
    """The manager starts again and finds another LID in its records."""
    node = nodes[1]
    old, new = node.lid(), 0x42
    lab.manager.kill()
    records = lab.manager.folder / "guid2lid"
    text = records.read_text()
    changed = re.sub(rf"^({node.port_guid():#018x}) .*$", rf"\1 {new:#06x} {new:#06x}", text, flags=re.M)
    assert changed != text, text
    records.write_text(changed)
    lab.manager.start()
    heard.wait(node, LID_CHANGE)
    assert node.lid() == new != old
    assert LID_CHANGE not in heard.by(nodes[2])
    active()
    all_reachable(nodes)


def test_partition_change(lab, nodes, heard, active):
    """Two of three become members of a new partition."""
    members = nodes[:2]
    conf = lab.manager.partitions
    old = conf.read_text()
    rows = ", ".join(f"{node.port_guid():#x}=full" for node in members)
    conf.write_text(f"{old}three=0x3,ipoib,mtu=5,rate=7 : {rows};\n")
    try:
        control("trap 128")
        for node in members:
            heard.wait(node, PKEY_CHANGE)
            assert 0x8003 in node.p_keys().values()
        assert PKEY_CHANGE not in heard.by(nodes[2]) and 0x8003 not in nodes[2].p_keys().values()
    finally:
        conf.write_text(old)
    heard.clear()
    control("trap 128")
    for node in members:
        heard.wait(node, PKEY_CHANGE)
        assert 0x8003 not in node.p_keys().values()
    active()
    all_reachable(nodes)


def test_manager_starts_again(lab, nodes, heard, active):
    """A new manager knows no groups: it asks all clients to register again."""
    lab.manager.kill()
    heard.clear()
    lab.manager.start()
    for node in nodes:
        heard.wait(node, REREGISTER)
    active()
    all_reachable(nodes)


def sm_state(node, lid):
    text = run("sminfo", "-C", node.rdma, lid, check=False).stdout
    found = re.search(r"state \d (SMINFO_\w+)", text)
    return found[1] if found else None


def test_standby_takes_over(lab, nodes, heard, active):
    """The master is killed without a word; the standby finds out, and everybody learns of the new one."""
    lab.manager.kill()
    master = OpenSm(nodes[0], priority=10)
    standby = OpenSm(nodes[2], priority=1)

    def wait_state(node, state):
        wait_for(f"{state} on {node.rdma}", lambda: sm_state(nodes[1], node.lid()) == state, PATIENCE[lab.flavour])

    try:
        master.start()
        wait_state(nodes[0], "SMINFO_MASTER")
        standby.start()
        wait_state(nodes[2], "SMINFO_STANDBY")
        assert {node.sm_lid() for node in nodes} == {nodes[0].lid()}
        heard.clear()
        master.kill()
        for node in nodes:
            heard.wait(node, SM_CHANGE, REREGISTER)
        assert {node.sm_lid() for node in nodes} == {nodes[2].lid()}
        wait_state(nodes[2], "SMINFO_MASTER")
        active()
        all_reachable(nodes)
        # Back again: a manager of higher priority is handed the subnet.
        heard.clear()
        master.start()
        for node in nodes:
            heard.wait(node, SM_CHANGE)
        assert {node.sm_lid() for node in nodes} == {nodes[0].lid()}
        active()
        all_reachable(nodes)
    finally:
        standby.kill()
        master.kill()
        lab.manager.start()


@pytest.mark.parametrize("line, event", [
    ("set_pkey 1 5 0x8123", PKEY_CHANGE),
    ("set_sm_lid 1 77", SM_CHANGE),
    ("set_lid 1 88", LID_CHANGE),
    ("reregister 1", REREGISTER),
])
def test_change_without_a_manager(lab, nodes, heard, active, line, event):
    """Each has its own event, at its own HCA alone; a heavy sweep of the manager repairs what was changed."""
    lid = nodes[1].lid()
    control(line)
    heard.wait(nodes[1], event)
    assert not heard.by(nodes[0]) and not heard.by(nodes[2])
    control("trap 128")
    wait_for("all to be set right", lambda: (nodes[1].lid(), nodes[1].sm_lid()) == (lid, nodes[0].lid()),
             PATIENCE[lab.flavour])
    active()
    all_reachable(nodes)


def test_gid_change(lab, nodes, active):
    """ib_core reads the table again. Of InfiniBand ports it tells no client: there is no event to hear."""
    control("set_guid 1 3 0x0202020202020202")
    wait_for("the GID to change", lambda: nodes[1].port("gids/3") == "fe80:0000:0000:0000:0202:0202:0202:0202")
    control("set_guid 1 3 0")
    wait_for("the GID to go", lambda: nodes[1].port("gids/3") == "fe80:0000:0000:0000:0000:0000:0000:0000")


def test_hca_comes_and_goes(lab, nodes, active, scaled):
    for _ in range(scaled(10)):
        nodes[2].delete_rdma()
        assert nodes[2].rdma not in rdma_devices()
        assert len(re.findall(r"^Ca\s", run("ibnetdiscover", "-C", nodes[0].rdma).stdout, re.M)) == 2
        nodes[2].add_rdma()
        active()
        nodes[2].adopt_interface()
        nodes[2].wait_ready()
        reachable(nodes[0], nodes[2].address4)
    all_reachable(nodes)


def test_sixteen_hcas(lab, nodes, active):
    """As many come at run time as make 16, with and without what is optional; all are managed, and go again."""
    options = ["", "csum=1 tso=1", "srq=0 max_send_sge=1", "vectors=1 mcast_lb=1"]
    slots = range(len(nodes), SWITCH_PORTS)
    states = {slot: pathlib.Path(f"/sys/class/infiniband/ibf{slot}/ports/1/state") for slot in slots}
    for slot in slots:
        control(f"add {slot} stock=0 {options[slot % len(options)]}")
    lab.manager.sweep()
    wait_for("16 HCAs to be active", lambda: all("ACTIVE" in state.read_text() for state in states.values()),
             PATIENCE[lab.flavour])
    assert len(rdma_devices()) == SWITCH_PORTS
    assert len(re.findall(r"^Ca\s", run("ibnetdiscover", "-C", nodes[0].rdma).stdout, re.M)) == SWITCH_PORTS
    lids = {run("ibstat", name).stdout.split("Base lid: ")[1].split()[0] for name in rdma_devices()}
    assert len(lids) == SWITCH_PORTS, lids
    for slot in slots:
        control(f"probe {slot} {(slot + 1) % SWITCH_PORTS} 256 8")
        assert counters("probe")["received"] == 8, slot
    for slot in slots:
        control(f"remove {slot}")
    assert len(rdma_devices()) == len(nodes)
    active()
    all_reachable(nodes)


def test_multicast_is_kept_from_its_sender(nodes, active):
    """By an HCA that does so, and is asked to by the stock driver."""
    for option, blocks in (("mcast_lb=1", True), ("mcast_lb=0", False)):
        connected.replace_hca(nodes[2], option)
        nodes[2].run("ping", "-n", "-b", "-c", 10, "-i", "0.02", "-W", "1", "10.0.0.255", check=False)
        assert (did(2, "blocked") >= 10) is blocks, option
        assert not did(0, "blocked")
        reachable(nodes[0], nodes[2].address4)


def test_fabric_comes_and_goes(lab, nodes, no_driver, scaled):
    """Load, unload, with HCAs that nobody has managed yet and with a manager at work."""
    for turn in range(scaled(100, least=4)):
        lab.manager.kill()
        lab.unload_fabric()
        assert not rdma_devices()
        lab.load_fabric()
        assert len(rdma_devices()) == len(lab.nodes)
        if turn % 2:
            lab.manager.start()
    lab.restore_wire()
    with contextlib.suppress(LabError):
        lab.load_drivers()
    lab.adopt()
