# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""tools/test counts what happened, not what it hopes for."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import TOOLS, load_tool

runner = load_tool("test")

JUNIT = """<testsuites><testsuite>
  <testcase name="good"/>
  <testcase name="bad"><failure message="short">assert 1 == 2</failure></testcase>
  <testcase name="broken"><error message="fixture died"/></testcase>
  <testcase name="later"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def states(cases):
    return {case.name: case.state for case in cases}


def test_cases(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    cases = runner.cases_of(tmp_path / "junit.xml", "s")
    assert states(cases) == {"s::good": "passed", "s::bad": "failed", "s::broken": "failed", "s::later": "skipped"}
    assert cases[1].account == "assert 1 == 2" and cases[2].account == "fixture died"


def test_kunit_log_with_errors_but_no_failed_test(tmp_path):
    (tmp_path / "junit.xml").write_text('<testsuite errors="1"><testcase name="good"/></testsuite>')
    assert "failed" in states(runner.kunit_cases_of(tmp_path / "junit.xml", "s")).values()


KTAP = """\
[   90.100000]     # Subtest: suite
[   90.200000]     ok 1 good
[   90.300000] ipoib_rs: cm/selftest.rs:7: does not hold: a == b
[   90.400000]     # bad: ASSERTION FAILED at cm/selftest.rs:3
[   90.500000]     not ok 2 bad
[   90.600000]     ok 3 better
[   90.700000] # suite: pass:2 fail:1 skip:0 total:3
[   90.800000] not ok 1 suite
"""


def test_failed_kunit_test_tells_what_the_kernel_said(tmp_path):
    rows = '<testcase name="good"/><testcase name="bad"><failure>Test Failed</failure></testcase>'
    (tmp_path / "junit.xml").write_text(f"<testsuite>{rows}</testsuite>")
    good, bad = runner.kunit_cases_of(tmp_path / "junit.xml", "s", KTAP)
    assert good.account == ""
    assert [line[15:] for line in bad.account.splitlines()[1:]] == [
        "ipoib_rs: cm/selftest.rs:7: does not hold: a == b",
        "    # bad: ASSERTION FAILED at cm/selftest.rs:3",
    ]


@pytest.mark.parametrize("text, seconds", [("90", 90), ("90s", 90), ("30m", 1800), ("8h", 28800)])
def test_times(text, seconds):
    assert runner.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "1d", "-5", "1.5h"])
def test_no_times(text):
    with pytest.raises(runner.Failure):
        runner.seconds_of(text)


@pytest.mark.parametrize("path", sorted((TOOLS.parent / "tests/integration").glob("[ts]*_*.py")), ids=lambda path: path.stem)
def test_every_suite_says_what_guest_it_needs(path):
    assert "--topology" in runner.vm_options(path)


@pytest.fixture
def booked(tmp_path, monkeypatch):
    """Runs a suite of a shell command and returns what was booked."""
    monkeypatch.setattr(runner, "RESULTS", tmp_path)

    def book(script, cases=(), options=()):
        monkeypatch.setattr(runner.sys, "argv", ["tools/test", *options])
        one = runner.Runner(runner.arguments())
        one.execute("s", ["sh", "-c", script], lambda _: list(cases), "nothing ran")
        return states(one.cases), one.summary(0)

    return book


def test_suite_that_dies_after_its_tests_passed(booked):
    assert booked("exit 125", [runner.Case("s::a", "passed")]) == ({"s::a": "passed", "s::guest": "failed"}, 1)


def test_suite_without_results(booked):
    assert booked("exit 0") == ({"s::results": "failed"}, 1)


def test_suite_with_failed_tests_is_not_counted_twice(booked):
    assert booked("exit 1", [runner.Case("s::a", "failed", "x")]) == ({"s::a": "failed"}, 1)


def test_good_suite(booked, capsys):
    assert booked("exit 0", [runner.Case("s::a", "passed")]) == ({"s::a": "passed"}, 0)
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed"


def test_no_suite_begins_after_the_budget(booked):
    """It is named, and has not passed."""
    assert booked("exit 0", [runner.Case("s::a", "passed")], ["--budget", "0"]) == ({"s::all": "failed"}, 1)


def test_the_short_tier_names_its_suites():
    assert runner.takes_part("traffic", "debug", "test")
    assert runner.takes_part("senders", "release", "test")
    assert not runner.takes_part("senders", "debug", "test")
    assert not runner.takes_part("a new one", "release", "test")
    assert runner.takes_part("a new one", "debug", "full")


TOLD_TO_STOP = """
import functools, pathlib, signal, sys
sys.path.insert(0, sys.argv[2])
import conftest
runner = conftest.load_tool("test")
folder = runner.RESULTS = pathlib.Path(sys.argv[1])
sys.argv = ["tools/test", "--jobs", "2"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
one = runner.Runner(runner.arguments())
one.together([functools.partial(one.execute, f"s{number}", ["sh", "-c", f"echo $$ > {folder}/{number}.pid; exec sleep 60"],
                                lambda _: [], "nothing ran") for number in range(4)], 2)
"""


def test_told_to_stop(tmp_path):
    """What runs is ended, and nothing that had to wait begins."""
    process = subprocess.Popen([sys.executable, "-c", TOLD_TO_STOP, tmp_path, TOOLS.parent / "tests/host"])
    began = time.monotonic()
    while len([path for path in tmp_path.glob("*.pid") if path.read_text().strip()]) < 2:
        assert time.monotonic() - began < 20
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    pids = sorted(tmp_path.glob("*.pid"))
    assert [path.name for path in pids] == ["0.pid", "1.pid"]
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_brief_account():
    account = "    x = 1\nlog of the guest\nE   assert 3 == 4\nE    +  where 3 = f()\n[ 83.7] rcu: INFO: rcu_sched stalls"
    assert runner.brief(account) == "assert 3 == 4 | +  where 3 = f() | [ 83.7] rcu: INFO: rcu_sched stalls"
    assert runner.brief("exit status 3, the log ends with:\n  nothing") == "exit status 3, the log ends with:"
    assert runner.brief("") == ""
