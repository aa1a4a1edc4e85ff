# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Finds what is wrong in a kernel log."""

import re

# Searched in every line. Reports often arrive as several lines: the first one that matches
# starts a finding, what follows is shown with it.
TROUBLE = re.compile(
    "|".join(
        (
            # Oopses, panics, assertions.
            r"\bBUG\b",
            r"\bWARNING:",
            r"\bOops\b",
            r"[Kk]ernel panic",
            r"general protection fault",
            r"unable to handle",
            r"panicked at",
            r"Call Trace:",
            r"cut here",
            r"double fault",
            r"stack segment",
            r"divide error",
            r"invalid opcode",
            r"unchecked MSR access",
            # Locks, RCU, scheduling.
            r"INFO: possible",
            r"INFO: trying to register non-static key",
            r"\*\*\* DEADLOCK \*\*\*",
            r"suspicious RCU usage",
            r"bad unlock balance",
            r"locking correctness validator",
            r"scheduling while atomic",
            r"blocked for more than",
            r"blocked in I/O wait",
            r"rcu.*detected.*stall",
            r"(soft|hard) ?lockup",
            r"workqueue lockup",
            r"NETDEV WATCHDOG",
            r"nobody cared",
            # Memory.
            r"KASAN",
            r"UBSAN",
            r"KFENCE",
            r"kmemleak: \d+ new suspected",
            r"kmemleak: .*(disabled|pool empty|Cannot)",
            r"unreferenced object",
            r"refcount_t:",
            r"list_(add|del) corruption",
            r"ODEBUG:",
            r"DMA-API: .*(device driver|overlapping|cacheline|disab|pending)",
            r"Bad page",
            r"bad pointer",
            r"overwritten",
            r"Objects remaining",
            r"page allocation failure",
            r"Out of memory",
            r"oom-kill",
            r"vmalloc error",
            # References.
            r"unregister_netdevice",
            r"waiting for .* to become free",
            r"ref_tracker:",
            r"RESTRACK",
            r"leaked",
            # A user program that died of a signal.
            r"segfault at",
            r"traps: ",
        )
    )
)

# Lines that are known and proven not to be ours: each entry is a regular expression for the
# whole message, with the line and the proof above it.
ACCEPTED = (
    # "virtme-ng-init: WARNING: failed to run: "systemd-tmpfiles" --create --boot …": the guest's
    # init, a program in user space, writes its own messages into the kernel log.
    r"virtme-ng-init: .*",
)

# A test that provokes a line says so before, and is forgiven one line with these words.
PROVOKED = re.compile(r"vm: provoked (.+)")


def strip(line):
    """The message of a line, without time stamp and caller."""
    return re.sub(r"^(<\d+>)?\[ *\d+\.\d+\](\[[ \w]+\])? ?", "", line.rstrip())


def scan(text):
    """The troubled lines of a log as (index, message)."""
    found, forgiven = [], []
    for index, line in enumerate(text.splitlines()):
        message = strip(line)
        if announced := PROVOKED.fullmatch(message):
            forgiven.append(announced[1])
        elif TROUBLE.search(message) and not any(re.fullmatch(known, message) for known in ACCEPTED):
            words = next((words for words in forgiven if words in message), None)
            if words:
                forgiven.remove(words)
            else:
                found.append((index, message))
    return found


def report(text, before=5, after=45):
    """A readable account of what `scan` found, or an empty string."""
    found = scan(text)
    if not found:
        return ""
    lines = [line.rstrip() for line in text.splitlines()]
    first = found[0][0]
    shown = lines[max(0, first - before) : first + after]
    rest = [f"    {message}" for index, message in found if index >= first + after]
    account = ["The kernel log is not clean:", *("    " + line for line in shown)]
    if rest:
        account += [f"and {len(rest)} more such lines further down:", *rest[:15]]
    return "\n".join(account)
