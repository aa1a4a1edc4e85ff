# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Fixtures for the tests that run inside the guest. tools/test boots one guest per file here."""

import contextlib
import itertools
import os
import pathlib
import subprocess
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "tools/guest"), str(TOP / "tools/lib")]

import fabric  # noqa: E402
import kernlog  # noqa: E402
import lab as lab_module  # noqa: E402

SCALE = float(os.environ.get("IPOIB_SCALE", "1"))


# Descriptions of waits in vain that are kept.
WITNESSED = 5


@pytest.fixture(scope="session")
def lab():
    lab = fabric.of_session()
    files = iter([lab_module.RESULTS / f"in-vain-{number}.txt" for number in range(WITNESSED)])

    def witness(what):
        if file := next(files, None):
            # The wait's own error matters more than one of the description.
            with file.open("w") as out, contextlib.suppress(OSError, lab_module.LabError, subprocess.SubprocessError):
                for title, text in itertools.chain([("in vain", what)], lab.describe()):
                    out.write(f"== {title}\n{text}\n")

    lab_module.witnesses.append(witness)
    yield lab
    lab_module.witnesses.remove(witness)


@pytest.fixture
def nodes(lab):
    """The nodes, with the driver loaded and every interface up: a test that broke them does not break the next."""
    lab.restore()
    return lab.nodes


@pytest.fixture
def a(nodes):
    return nodes[0]


@pytest.fixture
def b(nodes):
    return nodes[1]


@pytest.fixture
def scaled():
    """Loop counts: `scaled(n)` is n times the tier's factor, at least `least`."""
    return lambda count, least=2: max(least, round(count * SCALE))


@pytest.fixture
def no_driver(lab):
    """The wire and the RDMA devices without any driver loaded; whatever the test loads is removed."""
    lab.unload_all()
    lab.restore_wire()
    yield lab
    lab.unload_all()


class Log:
    """The kernel log since a mark."""

    def __init__(self, name):
        lab_module.log(f"mark {name}")
        self.reader = lab_module.LogReader()

    def text(self):
        return self.reader.text()

    def lines(self, *needles):
        return [line for line in self.text().splitlines() if all(needle in line for needle in needles)]


@pytest.fixture(autouse=True)
def log(request):
    """Marks the test in the kernel log, and blames it for what it caused there."""
    since = Log(request.node.nodeid)
    yield since
    account = kernlog.report(since.text())
    since.reader.close()
    if account:
        pytest.fail(account, pytrace=False)


def pytest_report_header():
    return f"loop counts times {SCALE:g}"
