# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Waits in the guest: how long they last, and who is told when they are in vain."""

import time

import lab
import pytest


def test_slow_condition_is_asked_once_more():
    answers = iter([False, True])

    def slow():
        time.sleep(0.2)
        return next(answers)

    assert lab.wait_for("it", slow, timeout=0.1)


@pytest.mark.parametrize("may_fail", [False, True])
def test_witnesses_of_waits_in_vain(monkeypatch, may_fail):
    seen = []
    monkeypatch.setattr(lab, "witnesses", [seen.append])
    with pytest.raises(lab.LabError):
        lab.wait_for("it", lambda: False, timeout=0, every=0.01, may_fail=may_fail)
    assert seen == ([] if may_fail else ["it"])
