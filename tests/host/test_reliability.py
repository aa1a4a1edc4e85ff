# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""tools/reliability shows what the cells left, and nothing better."""

from conftest import load_tool

tool = load_tool("reliability")


def result(mode, load, ok=True, **more):
    return {"id": f"x-{mode}-{load}", "fault": "x", "mode": mode, "load": load, "modes": ["datagram", "connected"],
            "limit": 10, "ok": ok, **more}


def row_of(results):
    text = tool.render(results, "debug")
    return text, next(line.split() for line in text.splitlines() if line.split()[:1] == ["x"])


def test_cells():
    text, row = row_of([result("datagram", "idle", seconds=1.25), result("connected", "idle", ok=False)])
    assert row == ["x", "10", "1.2", "\\", "\\", "**failed**", "\\", "\\"]
    assert "1 cells passed, 1 failed" in text and "debug kernel" in text


def test_a_fault_of_one_mode():
    _, row = row_of([result("connected", "stream", seconds=0) | {"modes": ["connected"]}])
    assert row == ["x", "10", "\\-", "\\-", "\\-", "\\", "0.0", "\\"]


def test_what_went_wrong_after_a_cell(tmp_path):
    """A cell that came back and left a line in the kernel log has failed."""
    junit = tmp_path / "junit.xml"
    junit.write_text('<testsuite><testcase name="test_cell[x-datagram-idle]"><error>log</error></testcase>'
                     '<testcase name="test_cell[x-datagram-stream]"/></testsuite>')
    results = [result("datagram", "idle"), result("datagram", "stream")]
    assert [row["ok"] for row in tool.judged(results, junit)] == [False, True]
