# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""What tools/vm makes of a guest's end, and what a guest reads in its own log."""

import argparse
import json
import sys

import pytest
from conftest import TOOLS, load_tool

vm = load_tool("vm")
CLEAN = "[    1.000000] vm: stage done\n"
WARNING = "[    1.000000] WARNING: net/core/dev.c:1 at f+0x1/0x2\n"


class Console:
    def __init__(self, path, text):
        self.path = path
        path.write_text(text)

    def text(self):
        return self.path.read_text()


@pytest.fixture
def verdict(tmp_path, capsys):
    def judge(console=CLEAN, killed="", dmesg=None, **status):
        state = {"stage": "done", "exit": 0, "problems": [], **status}
        (tmp_path / "status.json").write_text(json.dumps(state))
        if dmesg is not None:
            (tmp_path / "dmesg.txt").write_text(dmesg)
        code = vm.verdict(tmp_path, Console(tmp_path / "console.log", console), killed)
        return code, capsys.readouterr().err

    return judge


def test_clean_run(verdict):
    assert verdict() == (0, "")


def test_exit_status_of_the_command(verdict):
    assert verdict(exit=7) == (7, "")


def test_warning_on_the_console(verdict):
    code, text = verdict(console=CLEAN + WARNING)
    assert code == vm.LOST and "dev.c" in text


def test_warning_in_the_log_only(verdict):
    code, text = verdict(dmesg=WARNING)
    assert code == vm.LOST and "dev.c" in text


def test_warning_does_not_hide_the_exit_status(verdict):
    assert verdict(console=WARNING, exit=3)[0] == 3


def test_time_limit(verdict):
    code, text = verdict(killed="the guest did not finish within 9 s", stage="command", exit=None)
    assert code == vm.LOST and "within 9 s" in text and "stage: command" in text


GUEST = """
echo 'vm: stage {stage}' >&2
echo 'INFO: task rdma:289 blocked for more than 61 seconds.' >&2
exec sleep {time}
"""


@pytest.mark.parametrize("stage, time, killed", [
    ("teardown", 30, "something hangs"), ("command", 2, ""), ("command", 30, "did not finish within 6 s"),
])
def test_guest_that_hangs(tmp_path, monkeypatch, stage, time, killed):
    """What hangs in the end ends the guest; what hangs before may still tell more. A limit holds in any case."""
    monkeypatch.setattr(vm, "HUNG_REPORT", 1)
    options = argparse.Namespace(verb="run", quiet=True, timeout=6)
    console, reason = vm.boot(options, ["sh", "-c", GUEST.format(stage=stage, time=time)], tmp_path / "console.log")
    assert killed in reason and bool(killed) == bool(reason)
    assert "blocked for more" in console.text()


def test_guest_died(verdict):
    code, text = verdict(stage="teardown")
    assert code == vm.LOST and "died" in text


def test_problem_in_the_guest(verdict):
    code, text = verdict(problems=["taking the topology down: rmmod failed"])
    assert code == vm.LOST and "rmmod failed" in text


def test_guest_that_never_started(tmp_path, capsys):
    code = vm.verdict(tmp_path, Console(tmp_path / "console.log", ""), "")
    assert code == vm.LOST and "stage: boot" in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    ["run"], ["shell", "--", "true"], ["run", "--topology", "fabric", "--nodes", "69", "--", "true"],
    ["run", "--nodes", "9", "--", "true"], ["run", "--topology", "rxe", "--fabric-param", "mtu=4", "--", "true"],
    ["run", "--driver", "stock", "--kunit", "--", "true"], ["run", "--topology", "fabric", "--fabric-param", "mtu", "--", "true"],
    ["run", "--nodes", "1", "--", "true"], ["run", "--param", "roce", "--", "true"], ["run", "--topology", "rxe", "--driver", "both", "--", "true"],
])
def test_refused_arguments(monkeypatch, words):
    monkeypatch.setattr(vm.sys, "argv", ["tools/vm", *words])
    with pytest.raises(SystemExit) as caught:
        vm.arguments()
    assert caught.value.code == 2


def test_options_of_the_command_are_its_own(monkeypatch):
    monkeypatch.setattr(vm.sys, "argv", ["tools/vm", "run", "--icount", "--", "ping", "--debug", "--", "x"])
    options = vm.arguments()
    assert options.command == ["ping", "--debug", "--", "x"] and not options.debug and options.smp == 1


@pytest.mark.parametrize("record, lines", [
    (b"6,339,5140900,-;NET: Registered protocol family\n SUBSYSTEM=net\n", ["[    5.140900] NET: Registered protocol family"]),
    (b"4,1,12000000000,c;one\\x0atwo; \\xc3\\xa4\n", ["[12000.000000] one", "[12000.000000] two; \u00e4"]),
], ids=["dictionary", "escapes"])
def test_record_of_the_kernel_log(record, lines):
    sys.path.insert(0, str(TOOLS / "guest"))
    from lab import LogReader
    assert LogReader.lines_of(record) == lines
