# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The tests that Documentation/conformance.rst relies on fail when there is something to find.

Each is run twice: as it is, and with a named fault of the fabric or of the system, which makes the driver seem to do what
the RFC forbids. tools/conformance reads CASES.
"""

import contextlib
import importlib
import inspect
import os
import pathlib
import shutil
import tempfile
import threading

import lab as lab_module
import pytest
from conftest import Log
from fabric import control
from lab import LabError
from test_fabric_answers import (MEMBER_PKEY_AT, MEMBER_QKEY_AT, MEMBER_RATE_AT, MGID_AT, STATE_AT, answers, c,  # noqa: F401
                                 every_line, joins, reachable)
from test_fabric_filter import MC_MEMBER, SA
from test_fabric_rfc import MASK_AT, leaves

VM = ["--topology", "fabric", "--nodes", "3"]
# Suite, test, its parameters, the fault, and the demands that the test shows to be met when it is not there.
CASES = [
    ("fabric_rfc", "test_unicast", {}, "datagrams get lost", ["R4391-2"]),
    ("fabric_rfc", "test_unicast", {}, "another queue pair", ["R4391-9.1.1.b"]),
    ("fabric_rfc", "test_unicast", {}, "another Q_Key", ["R4391-9.1.2.b"]),
    ("fabric_rfc", "test_unicast", {}, "another type", ["R4391-6.a"]),
    ("fabric_rfc", "test_bytes", {}, "another type", ["R4391-6.c"]),
    ("fabric_rfc", "test_bytes", {}, "reserved bytes", ["R4391-6.b"]),
    ("fabric_rfc", "test_mapping_on_the_wire", {}, "another flag and scope", ["R4391-4.a", "R4391-4.f"]),
    ("fabric_rfc", "test_mapping_on_the_wire", {}, "another signature", ["R4391-4.b"]),
    ("fabric_rfc", "test_mapping_on_the_wire", {}, "another group", ["R4391-4.c", "R4391-4.d"]),
    ("fabric_rfc", "test_limited_broadcast", {}, "another group", ["R4391-4.e"]),
    ("fabric_rfc", "test_join_of_the_link", {}, "joins with another P_Key", ["R4391-4.1.a"]),
    ("fabric_rfc", "test_join_of_the_link", {}, "joins of another scope", ["R4391-4.1.e"]),
    ("fabric_rfc", "test_join_of_the_link", {}, "joins as no full member", ["R4391-5.a"]),
    ("fabric_rfc", "test_join_of_the_link", {}, "joins that can make the group", ["R4391-5.c"]),
    ("fabric_rfc", "test_joins_of_groups", {"state": 1}, "joins as no full member", ["R4391-10.f"]),
    ("fabric_rfc", "test_joins_of_groups", {"state": 1}, "joins of another scope", ["R4391-4.f"]),
    ("fabric_rfc", "test_joins_of_groups", {"state": 1}, "joins with another Q_Key", ["R4391-10.g"]),
    ("fabric_rfc", "test_joins_of_groups", {"state": 8}, "joins with another rate", ["R4391-10.h"]),
    ("fabric_rfc", "test_leaving", {}, "groups are not left", ["R4391-10.i"]),
    ("fabric_rfc", "test_joined_before_sent", {}, "joins are not answered", ["R4391-10.a"]),
    ("fabric_rfc", "test_joined_before_sent", {}, "register again and again", ["R4391-10.d"]),
    ("fabric_rfc", "test_2044_by_default", {}, "datagrams get lost", ["R4391-7.b"]),
    ("fabric_rfc", "test_link", {}, "another prefix", ["R4391-9.1.1.c"]),
    ("fabric_rfc", "test_flags_in_addresses", {}, "another queue pair", ["R4391-9.1.1.a"]),
    ("fabric_rfc", "test_neighbour_discovery", {}, "another padding", ["R4391-9.3"]),
    ("fabric_rfc", "test_identifiers", {}, "no generated addresses", ["R4391-8.a", "R4391-8.b"]),
    ("fabric_rfc", "test_stable_identifiers", {}, "identifiers of GUIDs only", ["R8064-3"]),
    ("fabric_rfc", "test_privileged", {}, "privileges for all", ["R4391-13.a"]),
    ("fabric_answers", "test_route_headers", {}, "receives fail", ["R4391-6.d"]),
    ("fabric_answers", "test_detour_of_wide_groups", {"routers": True}, "another group", ["R4391-10.c"]),
    ("fabric_answers", "test_nonsense_about_the_link", {}, "no log", ["R4391-12"]),
    ("fabric_answers", "test_larger_than_the_port", {}, "answers within the port's limits", ["R4391-4.1.c"]),
    ("partitions", "test_controlled_q_key", {"sound": None}, "another Q_Key", ["R4391-4.1.b", "R4391-13.b"]),
    ("fabric_cases", "test_sender_leaves", {}, "groups are not left", ["R4392-4.2.5.a"]),
]
# What limits of waits are multiplied with: a test that fails waits until its limit.
PATIENCE = {"partitions": 1, "fabric_cases": 0.7}
HASTE = {"release": 0.2, "debug": 0.6}


@contextlib.contextmanager
def commands(start, end):
    control(start)
    try:
        yield
    finally:
        control(end)


def strikes(index, rule):
    """A fault of an HCA."""
    return lambda nodes: commands(f"fault {index} {rule} n=all", f"fault {index} {rule.split()[0]} off")


def falsifies(*texts):
    """Rules for MADs that come before those of the test."""

    @contextlib.contextmanager
    def meanwhile(nodes):
        for text in texts:
            control(f"filter add {text}")
        try:
            yield
        finally:
            control("filter clear")

    return meanwhile


def all_joins(patch):
    return falsifies(f"class={SA} method=2 attr={MC_MEMBER:#x} src=0 {patch}", f"class={SA} method=2 attr={MC_MEMBER:#x} src=1 {patch}")


@contextlib.contextmanager
def prefix(nodes):
    with commands(f"set_prefix {nodes[0].index} 0xfec0000000000000", f"set_prefix {nodes[0].index} 0xfe80000000000000"):
        lab_module.wait_for("the prefix", lambda: nodes[0].gid().startswith("fe:c0"))
        yield


@contextlib.contextmanager
def register_again(nodes):
    over = threading.Event()

    def work():
        while not over.wait(0.1):
            control(f"reregister {nodes[0].index}")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def sysctl(name, value, restart=True):
    """Of the first node's interface."""

    @contextlib.contextmanager
    def meanwhile(nodes):
        node = nodes[0]
        key = f"net.ipv6.conf.{node.interface}.{name}"
        node.sysctl(key, value)
        try:
            for state in ("down", "up"):
                node.ip("link", "set", node.interface, state)
            yield
        finally:
            node.sysctl(key, 0)
            for state in ("down", "up"):
                node.ip("link", "set", node.interface, state)

    return meanwhile


@contextlib.contextmanager
def only_guids(nodes):
    """Nobody can choose another way to make identifiers."""
    node = nodes[0]
    path = f"/proc/sys/net/ipv6/conf/{node.interface}/addr_gen_mode"
    inside = ("nsenter", f"--net=/run/netns/{node.name}")
    lab_module.run(*inside, "mount", "--bind", "/dev/null", path)
    try:
        yield
    finally:
        lab_module.run(*inside, "umount", path)


@contextlib.contextmanager
def for_all(nodes):
    """A program for the administrator's work that anybody may run with the administrator's rights."""
    path = os.environ["PATH"]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy(shutil.which("ip"), folder)
        os.chmod(program, 0o4755)
        os.environ["PATH"] = f"{folder}:{path}"
        try:
            yield
        finally:
            os.environ["PATH"] = path


@contextlib.contextmanager
def no_log(nodes):
    # A burst of none in five seconds; without the seconds there is no limit.
    limits = {pathlib.Path(f"/proc/sys/net/core/message_{name}"): value for name, value in (("burst", "0"), ("cost", "5"))}
    before = {path: path.read_text() for path in limits}
    try:
        for path, value in limits.items():
            path.write_text(value)
        yield
    finally:
        for path, value in before.items():
            path.write_text(value)


@contextlib.contextmanager
def modest(nodes):
    """The administrator's answers to the third node are those of a smaller link, whatever the test makes of them."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("test_fabric_answers")
        true = module.rules
        patch.setattr(module, "rules", lambda *texts: true(*(text.replace("c0008500ffff8a92", "c0008400ffff8792") for text in texts)))
        yield


FAULTS = {
    "datagrams get lost": strikes(0, "drop"),
    "another queue pair": strikes(0, "misaddress value=16"),
    "another Q_Key": strikes(0, "misaddress value=17"),
    "another flag and scope": strikes(0, "misaddress value=1"),
    "another signature": strikes(0, "misaddress value=2"),
    "another group": strikes(0, "misaddress value=15"),
    "another type": strikes(0, "corrupt value=0"),
    "reserved bytes": strikes(0, "corrupt value=2"),
    "another padding": strikes(0, f"corrupt value={4 + 40 + 24 + 2}"),
    "receives fail": strikes(1, "recv_status value=4"),
    "joins with another P_Key": all_joins(f"patch={MEMBER_PKEY_AT}:8001"),
    "joins of another scope": all_joins(f"patch={MGID_AT + 1}:15"),
    "joins as no full member": all_joins(f"patch={STATE_AT}:04"),
    "joins that can make the group": all_joins(f"patch={MASK_AT}:00000000000173f7"),
    "joins with another Q_Key": all_joins(f"patch={MEMBER_QKEY_AT}:00000b1c"),
    "joins with another rate": all_joins(f"patch={MEMBER_RATE_AT}:83"),
    "groups are not left": lambda nodes: falsifies(f"{leaves(nodes[0])} drop")(nodes),
    "joins are not answered": lambda nodes: falsifies(f"{answers(MC_MEMBER, nodes[0])} drop")(nodes),
    "register again and again": register_again,
    "another prefix": prefix,
    "no generated addresses": sysctl("addr_gen_mode", 1),
    "identifiers of GUIDs only": only_guids,
    "privileges for all": for_all,
    "no log": no_log,
    "answers within the port's limits": modest,
}


@pytest.fixture(autouse=True)
def sound(lab, nodes):
    yield
    control("filter clear")
    lab.restore()
    for node in nodes[1:]:
        reachable(nodes[0], node.address4, 60)
        reachable(node, nodes[0].address4, 60)
    lab.check_anomalies()


def call(request, suite, name, parameters):
    """Runs a test of another suite with this one's fixtures."""
    test = getattr(importlib.import_module(f"test_{suite}"), name)
    values = {"log": Log(f"{suite}::{name}"), **parameters}
    test(**{key: values[key] if key in values else request.getfixturevalue(key) for key in inspect.signature(test).parameters})


@pytest.mark.parametrize("suite, name, parameters, fault, rows", CASES,
                         ids=[f"{name.removeprefix('test_')}: {fault}" for _, name, _, fault, _ in CASES])
def test_fails(request, monkeypatch, lab, nodes, suite, name, parameters, fault, rows):
    monkeypatch.setattr(lab_module, "patience", PATIENCE.get(suite, HASTE[lab.flavour]))
    call(request, suite, name, parameters)
    lab.restore()
    # What is to fail needs no description.
    monkeypatch.setattr(lab_module, "witnesses", [])
    with FAULTS[fault](nodes), pytest.raises((AssertionError, LabError)) as caught:
        call(request, suite, name, parameters)
    lab_module.log(f"{name} says: {str(caught.value)[:200]!r}")
