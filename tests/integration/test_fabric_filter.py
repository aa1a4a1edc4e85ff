# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""MADs that are lost, late, doubled or falsified on their way, and what the stock driver makes of it.

Each test shows by the rule's counter that the rule has struck.
"""

import contextlib
import re
import time

import pytest
import traffic
from fabric import DEBUG, control
from lab import wait_for

VM = ["--topology", "fabric", "--driver", "stock"]
SA, GET_RESP, PATH_RECORD, MC_MEMBER = 3, 0x81, 0x35, 0x38
# Where a path record in an answer of the subnet administrator has its destination's LID.
DLID_AT = 24 + 12 + 20 + 40


@contextlib.contextmanager
def rule(text):
    """A filter rule; gives a function that tells its hits."""
    control(f"filter add {text}")
    try:
        yield lambda: int(re.search(r"^0: .* hits=(\d+)$", (DEBUG / "filters").read_text(), re.M)[1])
    finally:
        control("filter clear")


def answers(attribute, dst):
    return f"class={SA} method={GET_RESP:#x} attr={attribute:#x} dst={dst}"


def restart(node):
    """All that the driver knows of paths and groups is gone, and it joins its groups again."""
    node.ip("link", "set", node.interface, "down")
    node.ip("link", "set", node.interface, "up")


@pytest.fixture
def a(nodes):
    """A node that knows no path yet."""
    restart(nodes[0])
    nodes[0].ip("addr", "replace", f"{nodes[0].address6}/64", "dev", nodes[0].interface)
    nodes[0].wait_ready()
    return nodes[0]


def answers_within(node, target, seconds):
    start = time.monotonic()
    wait_for(f"{target} to answer {node}", lambda: traffic.ping(node, target, count=1, wait=1).received, seconds)
    return time.monotonic() - start


def test_lost_paths(a, b):
    """The administrator is asked again."""
    with rule(f"{answers(PATH_RECORD, 0)} count=2 drop") as hits:
        answers_within(a, b.address4, 30)
        assert hits() == 2


def test_silent_administrator(a, b):
    """Nobody is reached as long as no question for a path is answered, and everybody soon afterwards."""
    with rule(f"{answers(PATH_RECORD, 0)} drop") as hits:
        assert traffic.ping(a, b.address4, count=3, wait=1).received == 0
        assert hits() > 0
    answers_within(a, b.address4, 60)


def test_late_paths(a, b):
    with rule(f"{answers(PATH_RECORD, 0)} count=1 delay=200000") as hits:
        answers_within(a, b.address4, 30)
        assert hits() == 1


def test_doubled_answers(a, b):
    with rule(f"class={SA} method={GET_RESP:#x} dup") as hits:
        restart(b)
        b.wait_ready()
        answers_within(a, b.address4, 30)
        assert hits() > 2
    assert traffic.ping(a, b.address4, count=100).lost == 0


def test_refused_joins(a, b):
    """The first answer says that the group cannot be joined: the driver tries again."""
    with rule(f"{answers(MC_MEMBER, 1)} count=1 status=0x0700") as hits:
        restart(b)
        wait_for("the answer to be falsified", hits)
        wait_for("the carrier", b.carrier, 60)
        assert hits() == 1
    answers_within(a, b.address4, 30)


def test_wrong_lid(a, b):
    """A path that leads nowhere: what is sent is lost, and the fabric says why."""

    def lost():
        return sum(map(int, re.findall(r"ibf0 .*lost_no_route=(\d+)", (DEBUG / "state").read_text())))

    before = lost()
    with rule(f"{answers(PATH_RECORD, 0)} count=1 patch={DLID_AT}:0bb8") as hits:
        assert traffic.ping(a, b.address4, count=3, wait=1).received == 0
        assert hits() == 1
    assert lost() > before
    restart(a)
    answers_within(a, b.address4, 30)


def test_no_anomaly(lab, nodes):
    lab.check_anomalies()
