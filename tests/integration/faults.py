# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Memory that is not to be had: the debug kernel's fault injection, aimed at the driver.

An allocation counts if it is made by the driver's code, or by what that calls. The release kernel has
no fault injection: there the same steps run and nothing fails.
"""

import errno
import fcntl
import functools
import os
import pathlib
import socket
import struct
import threading

DEBUG = pathlib.Path("/sys/kernel/debug")
FAIL_NTH = "/proc/thread-self/fail-nth"
SIOCSIFFLAGS = 0x8914
IFF_UP, IFF_BROADCAST, IFF_MULTICAST = 1, 2, 0x1000
KINDS = ("failslab", "fail_page_alloc")
NO_MEMORY = (errno.ENOMEM, errno.ENOBUFS)
EVERYWHERE = (0, 2**64 - 1)
# Reference trackers that cannot be had are reported in the log, and none of the driver's business.
LOUD = "ref_tracker_alloc"


def injecting():
    return (DEBUG / "failslab").is_dir()


def symbols():
    """(address, type, name, module) of the kernel's symbols."""
    for line in open("/proc/kallsyms"):
        words = line.split()
        yield int(words[0], 16), words[1], words[2], words[3].strip("[]") if len(words) > 3 else ""


@functools.cache
def code_of_function(name):
    """From the start of a function of the kernel itself to the next symbol's."""
    found = sorted((address, symbol) for address, kind, symbol, _ in symbols() if kind in "tT")
    start = next(address for address, symbol in found if symbol == name)
    return start, next(address for address, _ in found if address > start)


def code_of_module(module):
    """From the lowest to the highest of its functions."""
    found = [address for address, kind, _, where in symbols() if where == module and kind in "tT"]
    return min(found), max(found) + 1


def configure(kind, attributes):
    """Sets what is to fail, the probability last: what comes before it may not fail either."""
    for name in sorted(attributes, key=lambda name: name == "probability"):
        (DEBUG / kind / name).write_text(str(attributes[name]))


def reset():
    """Nothing fails."""
    if not injecting():
        return
    for kind in KINDS:
        (DEBUG / kind / "probability").write_text("0")
        start, end = code_of_function(LOUD)
        configure(kind, {
            "verbose": 0, "interval": 1, "space": 0, "task-filter": "N", "ignore-gfp-wait": "N", "stacktrace-depth": 64,
            "require-start": EVERYWHERE[0], "require-end": EVERYWHERE[1], "reject-start": start, "reject-end": end})
    configure("fail_page_alloc", {"ignore-gfp-highmem": "N", "min-order": 0})


class Random:
    """Some of the driver's allocations fail meanwhile, no more than `times`."""

    def __init__(self, lab, kind, probability, times):
        self.folder = DEBUG / kind
        self.times = times
        if not injecting():
            return
        start, end = code_of_module(lab.module_name())
        configure(kind, {"require-start": start, "require-end": end, "times": times, "probability": probability})

    def hits(self):
        """How many allocations failed; None where none can."""
        if not injecting():
            return None
        return self.times - int((self.folder / "times").read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        reset()


class Nth:
    """Actions of which one allocation fails, made below the code that `where(name)` finds.

    Pages do not count: what the kernel does when it gets none is not always quiet. Nor do allocations below the kernel's
    function `spared`.
    """

    def __init__(self, where, name, spared=LOUD):
        if injecting():
            start, end = where(name)
            configure("fail_page_alloc", {"min-order": 20})
            configure("failslab", {"require-start": start, "require-end": end})
            start, end = code_of_function(spared)
            configure("failslab", {"reject-start": start, "reject-end": end})

    def fail(self, number, action):
        """Runs an action whose nth allocation fails. False if there were not so many; an error comes out."""
        if not injecting():
            action()
            return number < 3
        result = []

        def work():
            descriptor = os.open(FAIL_NTH, os.O_RDWR)
            try:
                os.write(descriptor, str(number).encode())
                error = None
                try:
                    action()
                except OSError as raised:
                    error = raised
                left = int(os.pread(descriptor, 20, 0))
                os.write(descriptor, b"0")
                result.append((error, left == 0))
            finally:
                os.close(descriptor)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        error, happened = result[0]
        if error:
            raise error
        return happened

    def __enter__(self):
        return self

    def __exit__(self, *_):
        reset()


def set_up(sock, node, up):
    """`ip link set up` or `down` as a single system call."""
    flags = IFF_BROADCAST | IFF_MULTICAST | (IFF_UP if up else 0)
    fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", node.interface.encode(), flags))
