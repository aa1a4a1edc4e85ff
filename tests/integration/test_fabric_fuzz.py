# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Nonsense for the agents of the test fabric: MADs from user space and lines for its control file."""

import contextlib
import errno
import os
import random

import pytest
import traffic
import umad
from fabric import DEBUG, control
from lab import rdma_devices, wait_for
from umad import GET, PERF, SET, SUBN, SUBN_DIRECTED, Umad, mad, status

VM = ["--topology", "fabric", "--driver", "stock"]
SEED = 20261129
BAD_METHOD, BAD_ATTRIBUTE, BAD_FIELD = 0x08, 0x0C, 0x1C
# Packets between two looks whether the fabric has worked off all that came before.
BATCH = 64
METHODS = [GET, SET, umad.SEND, umad.TRAP, 0x06, umad.REPRESS, umad.GET_RESP, 0x86, 0xFF]
ATTRIBUTES = [0, 1, 2, *range(0x10, 0x21), 0x30, 0x31, 0xFF00, 0xFFFF]


@pytest.fixture
def no_manager(lab, nodes):
    """Nobody repairs the subnet meanwhile. Afterwards all of it is made anew."""
    lab.manager.kill()
    yield lab
    for node in nodes:
        if node.rdma in rdma_devices():
            node.delete_rdma()
    control("reset_switch")
    for node in nodes:
        node.add_rdma()
    lab.manager.start()
    lab.wait_wire()


def ask(device, *words, **kwargs):
    answer = device.ask(mad(*words, **kwargs))
    assert answer is not None, words
    return status(answer), answer[64:128]


def port_info(device, path, modifier):
    return bytearray(ask(device, SUBN_DIRECTED, GET, umad.PORT_INFO, modifier, path=path)[1])


def test_illegal_port_states(nodes):
    """At the own port, at another HCA's, at the switch: refused, and nothing is changed."""
    for path, modifier in (((), 1), ((1, 2), 1), ((1,), 2)):
        refuse_port_states(nodes, path, modifier)
    assert traffic.ping(nodes[0], nodes[1].address4).lost == 0


def refuse_port_states(nodes, path, modifier):
    with Umad(nodes[0].rdma) as device:
        before = port_info(device, path, modifier)
        wrong = [(32, 0xF0, 2), (32, 0xF0, 3), (32, 0xF0, 5), (32, 0xF0, 15), (33, 0x0F, 0x40), (33, 0x0F, 0x60),
                 (33, 0x0F, 0xF0), (36, 0x0F, 0x00), (36, 0x0F, 0x60), (29, 0x00, 0x04), (35, 0xF0, 0x08),
                 (43, 0x0F, 0x50)]
        if path != (1,):
            # LIDs: none, a group's, one that the mask does not fit. A switch's external port has none.
            wrong += [(17, 0, 0), (16, 0, 0xC0), (18, 0, 0xFF), (34, 0, 7)]
        for at, keep, value in wrong:
            data = bytearray(before)
            data[32] &= 0xF0
            data[33] &= 0x0F
            data[at] = data[at] & keep | value
            code, _ = ask(device, SUBN_DIRECTED, SET, umad.PORT_INFO, modifier, data=data, path=path)
            assert code == BAD_FIELD, (at, value)
            assert port_info(device, path, modifier) == before


OUT_OF_RANGE = [
    ((1,), GET, umad.PORT_INFO, 37, BAD_FIELD),
    ((1,), SET, umad.PORT_INFO, 0x7FFFFFFF, BAD_FIELD),
    ((1,), GET, umad.LINEAR, 64, BAD_FIELD),
    ((1,), SET, umad.LINEAR, 0xFFFFFFFF, BAD_FIELD),
    ((1,), GET, umad.MULTICAST, 32, BAD_FIELD),
    ((1,), SET, umad.MULTICAST, 0xF0000000, BAD_FIELD),
    ((1,), SET, umad.MULTICAST, 0x0FFFFFFF, BAD_FIELD),
    ((1,), GET, umad.P_KEY_TABLE, 1, BAD_FIELD),
    ((1,), SET, umad.P_KEY_TABLE, 1 << 16, BAD_FIELD),
    ((1,), GET, umad.SWITCH_INFO, 1, BAD_FIELD),
    ((1,), GET, 0x17, 0xFF, BAD_FIELD),
    ((1,), SET, 0x18, 5 << 16, BAD_FIELD),
    ((1,), GET, 0xFFFF, 0, BAD_ATTRIBUTE),
    ((1,), SET, umad.NODE_INFO, 0, BAD_ATTRIBUTE),
    ((1, 2), GET, umad.PORT_INFO, 2, BAD_FIELD),
    ((1, 2), SET, umad.P_KEY_TABLE, 2, BAD_FIELD),
    ((1, 2), GET, umad.P_KEY_TABLE, 0xFFFF, BAD_FIELD),
    ((1, 2), SET, umad.GUID_INFO, 1, BAD_FIELD),
    ((1, 2), GET, 0x18, 0, BAD_FIELD),
    ((1, 2), GET, umad.SWITCH_INFO, 0, BAD_ATTRIBUTE),
    ((1, 2), GET, umad.LINEAR, 0, BAD_ATTRIBUTE),
    ((), SET, umad.NODE_DESCRIPTION, 0, BAD_ATTRIBUTE),
]


def test_out_of_range(nodes):
    with Umad(nodes[0].rdma) as device:
        for path, method, attribute, modifier, code in OUT_OF_RANGE:
            data = bytes(range(64)) if method == SET else b""
            answer, _ = ask(device, SUBN_DIRECTED, method, attribute, modifier, data=data, path=path)
            assert answer == code, (path, method, attribute, modifier)


def test_ways_that_lead_nowhere(nodes):
    """Ports that are not there or have no cable, HCAs as if they were switches: no answer."""
    with Umad(nodes[0].rdma) as device:
        for path in ((1, 9), (1, 255), (1, 0), (1, 3), (1, 2, 1), (1,) * 63):
            assert device.ask(mad(SUBN_DIRECTED, GET, umad.NODE_INFO, path=path), seconds=0.3) is None, path
            assert ask(device, SUBN_DIRECTED, GET, umad.NODE_INFO, path=(1, 2))[0] == 0


def random_mad(dice):
    """Most of it makes sense, so that the rest is looked at."""
    kind = dice.choice([SUBN_DIRECTED, SUBN_DIRECTED, SUBN_DIRECTED, SUBN, PERF])
    path = dice.choice([(), (1,), (1,), (1, 1), (1, 2), (1, 2), (1, 3), (2,), (1, 1, 1),
                        tuple(dice.randrange(256) for _ in range(dice.randrange(64)))])
    modifier = dice.choice([0, 1, 2, dice.randrange(64), dice.randrange(64) << 16, 1 << 31, dice.getrandbits(32)])
    packet = mad(kind, dice.choice([GET, SET, SET, dice.choice(METHODS)]), dice.choice(ATTRIBUTES), modifier,
                 dice.randbytes(dice.choice([0, 64])), path if kind == SUBN_DIRECTED else ())
    for _ in range(dice.choice([0, 0, 0, 1, 4])):
        packet[dice.randrange(umad.LEN)] = dice.randrange(256)
    if dice.random() < 0.05:
        packet = bytearray(dice.randbytes(umad.LEN))
    lid = 0xFFFF if kind == SUBN_DIRECTED and dice.random() < 0.9 else dice.choice([*range(6), 0xBFFF, 0xC000, 0xFFFF])
    return packet, lid


def test_mads_of_nonsense(no_manager, nodes, scaled):
    """Sent by both HCAs to everybody: to agents behind them, to the switch, to each other."""
    dice = random.Random(SEED)
    sent = refused = 0
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(Umad(node.rdma, qpn)) for node in nodes for qpn in (0, 1)]
        for _ in range(scaled(100_000) // BATCH + 1):
            for _ in range(BATCH):
                agent = dice.choice(agents)
                packet, lid = random_mad(dice)
                sent += 1
                try:
                    agent.send(packet, lid, remote=dice.choice([agent.qpn, agent.qpn, 0, 1, 2, 0xFFFFFF]))
                except OSError as error:
                    assert error.errno in (errno.EINVAL, errno.EAGAIN, errno.ENOMEM), error
                    refused += 1
            # In order behind the others; where a link is down no answer comes, but time passes.
            agents[0].ask(mad(SUBN_DIRECTED, GET, umad.NODE_INFO, path=(1,)), seconds=0.05)
            if dice.random() < 0.1:
                control("reset_switch")
                for node in nodes:
                    control(f"link {node.index} up")
    assert refused < sent / 2, (refused, sent)
    for node in nodes:
        with Umad(node.rdma) as device:
            assert ask(device, SUBN_DIRECTED, GET, umad.NODE_INFO)[0] == 0
    print(f"{sent} MADs, {refused} refused by the kernel")


def test_after_the_nonsense(lab, nodes):
    assert traffic.ping(nodes[0], nodes[1].address4).lost == 0
    lab.check_anomalies()


LINES = [
    "nonsense", "add", "add 68", "add 36", "add -1", "add 0", "add 99999999999999999999", "add 5 mtu=9", "add 5 colour=1",
    "remove", "remove 15", "remove 0x", "link", "link 0", "link 0 sideways", "link 9 up", "bounce", "bounce 0 1",
    "set_lid 0", "set_lid 0 65536", "set_lid 0 0xc000", "set_lid 0 -1", "set_pkey 0 64 1", "set_pkey 0 0 65536",
    "set_guid 0 8 1", "set_guid 0 1", "trap", "trap 129", "trap 144", "trap 144 9", "move 0 99", "move 0 0",
    "fault", "fault 0", "fault 0 x", "filter", "filter add", "filter add drop dup", "filter del 0", "filter del 16",
    "filter del -1", "seed 0", "reregister 8", "\x00", "add 3 " + "x" * 500, "link 0 up " * 100,
    "\u00e4\u00f6\u00fc",
]


def test_control_of_nonsense(nodes):
    """Each line is refused, with a reason."""
    present = rdma_devices()
    for line in LINES:
        with pytest.raises(OSError) as caught:
            control(line)
        assert rdma_devices() == present
        assert caught.value.errno in (errno.EINVAL, errno.ENODEV, errno.ENOENT, errno.EEXIST, errno.EBUSY), line


def test_control_of_random_bytes(lab, nodes, scaled):
    dice = random.Random(SEED)
    words = ["add", "remove", "filter", "fault", "trap", "link", "move", "0", "1", "9", "=", "drop", "up", "\n", " ", "0x"]
    file = os.open(DEBUG / "ctl", os.O_WRONLY)
    try:
        for _ in range(scaled(2000)):
            line = dice.choice([dice.randbytes(dice.randrange(600)),
                                " ".join(["zz", *dice.choices(words, k=dice.randrange(8))]).encode()])
            with contextlib.suppress(OSError):
                os.write(file, line)
    finally:
        os.close(file)
    wait_for("all ports to be active", lambda: all(node.state() == "ACTIVE" for node in nodes))


def test_nothing_happened(lab, nodes):
    assert traffic.ping(nodes[0], nodes[1].address4).lost == 0
    lab.check_anomalies()
