# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Each fault of the test fabric bites, and each thing that hardware would not forgive is counted.

The witness is the fabric's null client, which only posts and polls, on two HCAs that no driver attaches
to: nobody else meets its faults. A test that provokes an anomaly has it forgiven, by its exact number.
"""

import errno
import pathlib
import struct
import threading

import pytest
import umad
from fabric import DEBUG, control, counters, fault, hits, lost, misuse, probe, told
from lab import rdma_devices, wait_for
from umad import GET, PERF, Umad, mad, status

VM = ["--topology", "fabric", "--driver", "stock", "--fabric-param", "sw_ports=16"]
COUNT = 32
CM, CM_REQ, PORT_COUNTERS = 0x07, 0x10, 0x12
# Completion statuses.
LEN_ERR, OP_ERR, PROT_ERR = 1, 2, 4
# The slots of the client's HCAs, and of some with parameters of their own. They come and go together: the
# manager does not listen to a switch that calls more than ten times in ten seconds.
TX, RX, OFFLOADS, SMALL, DOOMED = 5, 6, 7, 8, 9
MODES = {10: "physical=0", 11: "physical=0 deferred=1", 12: "deferred=1 interrupts=1", 13: "interrupts=1"}
HCAS = {TX: "", RX: "", OFFLOADS: "csum=1 tso=1", SMALL: "mtu=1", DOOMED: "", **MODES}
ENDS = f"{TX} {RX}"


@pytest.fixture(autouse=True)
def anomalies(lab):
    yield
    lab.check_anomalies()


@pytest.fixture(scope="module")
def ends(lab):
    """The HCAs of the null client."""
    lab.restore()
    for slot, words in HCAS.items():
        control(f"add {slot} stock=0 {words}")
    ports = [pathlib.Path(f"/sys/class/infiniband/ibf{slot}/ports/1/state") for slot in HCAS]
    wait_for("the HCAs to be active", lambda: all("ACTIVE" in port.read_text() for port in ports), 60)
    yield
    for slot in HCAS:
        if f"ibf{slot}" in rdma_devices():
            control(f"remove {slot}")


WHOLE = {"posted": COUNT, "sent": COUNT, "received": COUNT, "post_send_errno": 0, "post_recv_errno": 0,
         "send_status": 0, "recv_status": 0, "wrong": 0, "twice": 0, "swapped": 0, "send_calls": 1,
         "recv_calls": 1, "cq_errors": 0}


def state_of(slot):
    return next(row for row in (DEBUG / "state").read_text().splitlines() if row.startswith(f"ibf{slot} "))


def differences(seen, wanted):
    """What was seen and is neither wanted nor as when nothing is wrong."""
    return {name: (seen[name], value) for name, value in {**WHOLE, **wanted}.items() if seen[name] != value}


@pytest.mark.parametrize("size", [1, 256, 2048, 4096])
def test_nothing_is_wrong(ends, size):
    assert not differences(probe(f"{ENDS} {size} {COUNT}"), {})


# HCA, fault, rule, what is wanted of the probe, what is seen instead of WHOLE, hits.
DATA_FAULTS = [
    (TX, "drop", "n=3", "want=29", {"received": COUNT - 3}, 3),
    (TX, "dup", "n=2", "want=34", {"received": COUNT + 2, "twice": 2}, 2),
    (TX, "delay", "value=500000", "", {"swapped": 1}, 1),
    (TX, "reorder", "skip=5", "", {"swapped": 1}, 1),
    (TX, "corrupt", "value=77", "", {"wrong": 1}, 1),
    (TX, "misaddress", "value=16 n=2", "want=30", {"received": COUNT - 2}, 2),
    (TX, "misaddress", "value=17 n=2", "want=30", {"received": COUNT - 2}, 2),
    (TX, "bandwidth", "value=2 n=all", "", {}, COUNT),
    (TX, "fail_post_send", f"value={errno.ENOMEM} skip=4 n=2", "want=30",
     {"posted": COUNT - 2, "sent": COUNT - 2, "received": COUNT - 2, "post_send_errno": -errno.ENOMEM}, 2),
    (RX, "fail_post_recv", f"value={errno.EINVAL}", "", {"post_recv_errno": -errno.EINVAL}, 1),
    (TX, "send_status", "value=12 skip=4", "want=4", {"sent": 4, "received": 4, "send_status": 12}, 1),
    (RX, "recv_status", f"value={PROT_ERR} skip=4", "want=4 wait=100", {"received": 4, "recv_status": PROT_ERR}, 1),
    (TX, "lose_cq_event", "", "wait=100", {"send_calls": 0}, 1),
    (RX, "lose_cq_event", "", "wait=100", {"recv_calls": 0}, 1),
    (TX, "stall_send", "n=all", "want=0 wait=100", {"sent": 0, "received": 0, "send_calls": 0, "recv_calls": 0}, COUNT),
]


@pytest.mark.parametrize("slot, name, rule, order, seen, times", DATA_FAULTS,
                         ids=[f"{row[1]}-{row[0]}" for row in DATA_FAULTS])
def test_data_faults(ends, slot, name, rule, order, seen, times):
    with fault(slot, name, rule) as struck:
        found = probe(f"{ENDS} 1024 {COUNT} {order}")
        assert not differences(found, seen), found
        assert struck() == times
    least = {"delay": 500, "bandwidth": COUNT * 1024 * 8 // 2000 - 20}.get(name, 0)
    assert found["millis"] >= least, found
    assert not differences(probe(f"{ENDS} 1024 {COUNT}"), {})


def test_stalled_sends_go_on(ends):
    """When the fault is taken away all that was posted goes, in order."""
    seen = {}
    with fault(TX, "stall_send", "n=all"):
        client = threading.Thread(target=lambda: seen.update(probe(f"{ENDS} 1024 {COUNT} wait=20000")))
        before = hits(TX, "stall_send")
        client.start()
        wait_for("all to be posted", lambda: hits(TX, "stall_send") - before >= COUNT)
    client.join()
    assert not differences(seen, {})


def test_sends_are_read_late(ends):
    """Who uses its memory again before the completion sends something else: where sends wait, as in hardware."""
    assert not differences(probe(f"{ENDS} 1024 {COUNT} scribble=1"), {})
    with fault(TX, "bandwidth", "value=2 n=all"):
        seen = probe(f"{ENDS} 1024 {COUNT} scribble=1")
    assert seen["received"] == COUNT and seen["wrong"] >= COUNT - 4, seen


def test_probability_is_repeatable(ends):
    found = []
    for _ in range(2):
        control(f"seed {TX} 4711")
        with fault(TX, "drop", "n=all ppm=250000") as struck:
            found.append((probe(f"{ENDS} 64 64 wait=50")["received"], struck()))
    assert found[0] == found[1] and 4 <= found[0][1] <= 30 and sum(found[0]) == 64, found


VERBS = ["create_qp", "create_cq", "create_ah", "attach_mcast", "get_dma_mr", "query_port", "query_gid",
         "query_pkey", "modify_qp_reset", "modify_qp_init", "modify_qp_rtr", "modify_qp_rts", "modify_qp_err"]


@pytest.mark.parametrize("name", VERBS)
def test_verbs_fail(ends, name):
    """With the error that was asked for, as often as that, and all that the client had made is gone."""

    def objects():
        return state_of(TX).split(" pd=")[1].split(" attached=")[0]

    before = objects()
    with fault(TX, name, f"value={errno.EXFULL} n=all") as struck:
        with pytest.raises(OSError) as caught:
            probe(f"{ENDS} 64 1")
        assert caught.value.errno == errno.EXFULL
        assert struck() > 0
    wait_for("all to be gone", lambda: objects() == before)
    assert not differences(probe(f"{ENDS} 64 {COUNT}"), {})


# What the client does, what is counted, what it sees of it.
MISUSES = [
    ("send_key", "bad_lkey", {"posted": 1, "send_status": PROT_ERR, "received": 0}),
    ("recv_key", "bad_lkey", {"posted": 1, "sent": 1, "recv_status": PROT_ERR}),
    ("send_slots", "over_post", {"posted": 4, "post_send_errno": -errno.ENOMEM}),
    ("recv_slots", "over_post", {"post_recv_errno": -errno.ENOMEM, "received": 1}),
    ("send_state", "wrong_state", {"posted": 0, "post_send_errno": -errno.EINVAL}),
    ("recv_state", "wrong_state", {"post_recv_errno": -errno.EINVAL}),
    ("transition", "bad_transition", {"post_send_errno": -errno.EINVAL}),
    ("send_pieces", "too_many_sges", {"posted": 0, "post_send_errno": -errno.EINVAL}),
    ("recv_pieces", "too_many_sges", {"post_recv_errno": -errno.EINVAL}),
    ("short_buffer", "short_buffer", {"sent": 1, "received": 0, "recv_status": LEN_ERR}),
    ("large_send", "lso_without_flag", {"posted": 0, "post_send_errno": -errno.EINVAL}),
    ("checksum", "csum_without_cap", {"posted": 1, "send_status": OP_ERR, "received": 0}),
    ("cq_overflow", "cq_overflow", {"posted": 4, "sent": 2, "cq_errors": 1}),
    ("attached", "attached_at_destroy", {"received": 1}),
]


def provoke(line, anomaly):
    """Misuses the fabric; what the client saw. Exactly one anomaly is counted, and forgiven."""
    seen = misuse(line)
    assert {name: count for name, count in counters("anomalies").items() if count} == {anomaly: 1}, seen
    with pytest.raises(OSError):
        control(f"forgive {anomaly} 2")
    control(f"forgive {anomaly} 1")
    return seen


@pytest.mark.parametrize("what, anomaly, wanted", MISUSES, ids=[row[0] for row in MISUSES])
def test_misuse_is_counted(ends, what, anomaly, wanted):
    seen = provoke(f"{ENDS} {what}", anomaly)
    assert {name: seen[name] for name in wanted} == wanted, seen
    assert not differences(probe(f"{ENDS} 64 {COUNT}"), {})


def test_misuse_of_offloads(ends):
    """By an HCA that has them: packets that are none."""
    seen = provoke(f"{OFFLOADS} {RX} checksum", "bad_csum_request")
    assert (seen["sent"], seen["received"]) == (1, 1), seen
    seen = provoke(f"{OFFLOADS} {RX} large_header", "bad_lso")
    assert (seen["posted"], seen["send_status"], seen["received"]) == (1, LEN_ERR, 0), seen


def test_forgotten_object(ends, log):
    """A client leaves something behind: that is found when the HCA goes."""
    assert misuse(f"{DOOMED} {RX} forget")["received"] == 1
    assert not counters("anomalies")["leaked_object"]
    control(f"remove {DOOMED}")
    assert counters("anomalies")["leaked_object"] == 1
    assert log.lines(f"ibf{DOOMED}: 1 of mr left")
    control("forgive leaked_object 1")


@pytest.mark.parametrize("slot", MODES)
def test_ways_to_execute(ends, slot):
    """Deferred or not, handlers called from interrupts or not, addresses virtual or physical: all is the same."""
    assert all(word in state_of(slot) for word in MODES[slot].split()), state_of(slot)
    for pair in (f"{slot} {RX}", f"{TX} {slot}"):
        assert not differences(probe(f"{pair} 2048 {COUNT}"), {}), pair


def test_mtu(ends):
    """What is longer than the port's MTU does not leave: an error to its sender."""
    seen = probe(f"{SMALL} {RX} 257 {COUNT} want=0 wait=50")
    assert (seen["received"], seen["send_status"]) == (0, LEN_ERR), seen
    assert not differences(probe(f"{SMALL} {RX} 256 {COUNT}"), {})


EVENTS = [
    ("link 1 down", "port_err", lambda node: node.state() == "DOWN"),
    ("link 1 up", "port_active", lambda node: node.state() == "ACTIVE"),
    ("bounce 1", "port_err", lambda node: node.state() == "ACTIVE"),
    ("set_lid 1 88", "lid_change", lambda node: node.lid() == 88),
    ("set_sm_lid 1 77", "sm_change", lambda node: node.sm_lid() == 77),
    ("set_pkey 1 5 0x8123", "pkey_change", lambda node: node.p_keys().get(5) == 0x8123),
    ("set_guid 1 3 0x0202020202020202", "gid_change", lambda node: node.port("gids/3").endswith("0202:0202")),
    ("set_guid 1 3 0", "gid_change", lambda node: not node.port("gids/3").endswith("0202:0202")),
    ("reregister 1", "reregister", lambda node: True),
]


def test_changes_are_told(lab, nodes):
    """Each is counted where its event goes out, and is to be seen in the port's tables."""
    node = nodes[1]
    old = node.lid()
    for line, event, done in EVENTS:
        before = told(1, event), told(0, event)
        control(line)
        wait_for(f"{event} after {line}", lambda: told(1, event) > before[0], 60)
        wait_for(f"{line} to be seen", lambda: done(node), 60)
        assert told(0, event) == before[1], line
    # What was changed behind its back the manager sets right.
    control("trap 128")
    wait_for("all to be set right", lambda: (node.lid(), node.sm_lid()) == (old, nodes[0].lid()), 60)
    lab.wait_wire()


def filtered(number=0):
    line = (DEBUG / "filters").read_text().splitlines()[number]
    return int(line.split("hits=")[1])


def counters_of(device, lid, seconds=2):
    """Asks a port for its counters; the answer."""
    packet = mad(PERF, GET, PORT_COUNTERS)
    packet[64 + 1] = 1
    return device.ask(packet, lid, seconds)


def test_mads_are_filtered(nodes):
    """By class and attribute, whatever the class is: the rule's counter and the answer tell."""
    match = f"class={PERF} method={umad.GET_RESP} attr={PORT_COUNTERS:#x} dst=0"
    with Umad(nodes[0].rdma, 1) as device:
        lid = nodes[1].lid()
        for action in ("status=0x1c", "patch=68:a1b2c3", "dup", "delay=30000", "drop"):
            control(f"filter add {match} count=1 {action}")
            try:
                answer = counters_of(device, lid, seconds=1 if action == "drop" else 5)
                assert filtered() == 1
            finally:
                control("filter clear")
            if action == "drop":
                assert answer is None
            else:
                assert status(answer) == (0x1C if action.startswith("status") else 0), action
                assert (answer[68:71] == bytes.fromhex("a1b2c3")) == action.startswith("patch")
        # Attributes and classes that are not meant.
        control(f"filter add class={PERF} attr=0x1d drop")
        control("filter add class=3 drop count=0")
        try:
            assert counters_of(device, lid) is not None
            assert filtered(0) == filtered(1) == 0
        finally:
            control("filter clear")


def test_connection_mads_are_filtered(nodes):
    with Umad(nodes[0].rdma, 1) as device:
        for action in ("drop", "delay=1000", "dup", "status=7", "patch=40:ff"):
            control(f"filter add class={CM} attr={CM_REQ:#x} src=0 dst=1 {action}")
            try:
                device.tell(mad(CM, umad.SEND, CM_REQ, data=struct.pack(">I", 0x4711)), nodes[1].lid())
                device.tell(mad(CM, umad.SEND, CM_REQ + 1), nodes[1].lid())
                wait_for("the rule to apply", lambda: filtered() == 1)
            finally:
                control("filter clear")


def test_loss_has_a_reason(ends):
    """What does not arrive is counted, with its reason, at the HCA that knows it."""
    before = lost(TX, "fault")
    with fault(TX, "drop", "n=all"):
        probe(f"{ENDS} 64 5 want=0")
    assert lost(TX, "fault") == before + 5
    before = lost(TX, "link")
    control(f"link {SMALL} down")
    seen = probe(f"{TX} {SMALL} 64 5 want=0 wait=50")
    assert (seen["sent"], seen["received"]) == (5, 0), seen
    assert lost(TX, "link") == before + 5


def test_too_many_mads(nodes):
    """More than the fabric can hold up at a time: the rest is lost, and that is counted. What it holds is late for
    twenty seconds, so this test is the last.
    """
    control("filter add class=0x09 delay=20000000")
    try:
        with Umad(nodes[0].rdma, 1) as device:
            for _ in range(1100):
                device.tell(mad(0x09, umad.SEND, 0x99), nodes[1].lid())
            wait_for("some to be lost", lambda: counters("anomalies")["mad_overflow"])
            assert "hits=1100" in wait_for("all to be seen", lambda: [line for line in (
                DEBUG / "filters").read_text().splitlines() if "hits=1100" in line])[0]
    finally:
        control("filter clear")
    control(f"forgive mad_overflow {counters('anomalies')['mad_overflow']}")
