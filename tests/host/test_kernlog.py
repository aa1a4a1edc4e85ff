# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The scanner of the kernel log must not miss anything, and must be silent about a healthy log."""

import kernlog
import pytest

# First lines of reports as kernels print them.
REPORTS = """
[   12.345678] WARNING: net/core/dev.c:1234 at unregister_netdevice_many_notify+0x1d3/0x780, CPU#1: rmmod/123
[   12.345678] WARNING: CPU: 0 PID: 77 at kernel/softirq.c:387 __local_bh_enable_ip+0x6e/0x90
[   12.345678] WARNING: possible circular locking dependency detected
[   12.345678] WARNING: inconsistent lock state
[   12.345678] WARNING: suspicious RCU usage
[   12.345678] WARNING: bad unlock balance detected!
[   12.345678] INFO: possible recursive locking detected
[   12.345678] INFO: trying to register non-static key.
[   12.345678] turning off the locking correctness validator.
[   12.345678] BUG: MAX_LOCKDEP_ENTRIES too low!
[   12.345678] BUG: kernel NULL pointer dereference, address: 0000000000000010
[   12.345678] BUG: unable to handle page fault for address: ffffed1000abcdef
[   12.345678] BUG: KASAN: slab-use-after-free in ipoib_rs_poll+0x123/0x456 [ipoib_rs]
[   12.345678] BUG: sleeping function called from invalid context at kernel/locking/mutex.c:283
[   12.345678] BUG: scheduling while atomic: swapper/0/0/0x00000100
[   12.345678] BUG: workqueue lockup - pool cpus=0 node=0 flags=0x0 nice=0 stuck for 32s!
[   12.345678] BUG kmalloc-64 (Tainted: G           O      ): Poison overwritten
[   12.345678] BUG kmalloc-1k (Not tainted): Objects remaining on __kmem_cache_shutdown()
[   12.345678] kernel BUG at mm/slub.c:553!
[   12.345678] Oops: general protection fault, probably for non-canonical address 0xdffffc0000000000: 0000 [#1] SMP
[   12.345678] Oops: 0000 [#1] PREEMPT SMP NOPTI
[   12.345678] Kernel panic - not syncing: Fatal exception in interrupt
[   12.345678] rust_kernel: panicked at ipoib/ring.rs:42:9:
[   12.345678] ------------[ cut here ]------------
[   12.345678] INFO: task ip:123 blocked for more than 60 seconds.
[   12.345678] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks: { 1-... } 5 jiffies s: 1 root: 0x2/.
[   12.345678] rcu: INFO: rcu_sched self-detected stall on CPU
[   12.345678] watchdog: BUG: soft lockup - CPU#0 stuck for 26s! [ping:99]
[   12.345678] unregister_netdevice: waiting for ib0 to become free. Usage count = 3
[   12.345678] ref_tracker: netdev@ffff8880 has 1/2 users at
[   12.345678] refcount_t: underflow; use-after-free.
[   12.345678] kmemleak: 3 new suspected memory leaks (see /sys/kernel/debug/kmemleak)
[   12.345678] kmemleak: Kernel memory leak detector disabled
[   12.345678] unreferenced object 0xffff888008a3c400 (size 192):
[   12.345678] list_del corruption. prev->next should be ffff88800, but was dead000000000100
[   12.345678] ODEBUG: free active (active state 0) object: ffff888 object type: work_struct hint: run
[   12.345678] DMA-API: rxe0: device driver frees DMA memory with wrong function [device address=0x00000000fffff000]
[   12.345678] DMA-API: exceeded 7 overlapping mappings of cacheline 0x0000000000123456
[   12.345678] DMA-API: debugging out of memory - disabling
[   12.345678] UBSAN: array-index-out-of-bounds in drivers/infiniband/core/cm.c:12:3
[   12.345678] ping: page allocation failure: order:4, mode:0xcc0(GFP_KERNEL), nodemask=(null)
[   12.345678] Out of memory: Killed process 77 (iperf3) total-vm:1000kB
[   12.345678] NETDEV WATCHDOG: CPU: 1: transmit queue 0 timed out 10240 ms
[   12.345678] iperf3[99]: segfault at 0 ip 0000000000401136 sp 00007ffe error 6 in iperf3[401000+1000]
[   12.345678] infiniband rxe0: BUG: RESTRACK detected leak of resources
[   12.345678][  T123] WARNING: kernel/workqueue.c:2257 at __queue_work+0x1/0x2, CPU#0: kworker/0:1/9
""".strip().splitlines()

HEALTHY = """
[    0.000000] Linux version 7.3.4-ipoib-debug (root@vm) (Debian clang version 22.1.8) #1 SMP PREEMPT
[    0.000000] kasan: KernelAddressSanitizer initialized (generic)
[    0.100000] Lock dependency validator: Copyright (c) 2006 Red Hat, Inc., Ingo Molnar
[    0.100000] DMA-API: preallocated 65536 debug entries
[    0.100000] DMA-API: debugging enabled by kernel config
[    0.100000] kmemleak: Kernel memory leak detector initialized (mem pool available: 63000)
[    0.100000] kmemleak: Automatic memory scanning thread started
[    1.000000] ipoib_rs: loading out-of-tree module taints kernel.
[    1.000000] infiniband rxe0: added eth0
[    1.000000] rcu: Hierarchical RCU implementation.
[    1.000000] rcu: 	RCU lockdep checking is enabled.
[    1.000000] vm: stage command
[    1.000000]     ok 1 ring_wraps
[    1.000000] IPv6: ADDRCONF(NETDEV_CHANGE): ib0: link becomes ready
[    1.000000] audit: type=1400 debug
[    1.529259] virtme-ng-init: WARNING: failed to run: "systemd-tmpfiles" --create (error: No such file or directory)
"""


@pytest.mark.parametrize("line", REPORTS)
def test_report_is_found(line):
    log = HEALTHY + line + "\n" + HEALTHY
    assert [message for _, message in kernlog.scan(log)] == [kernlog.strip(line)]


def test_healthy_log_is_silent():
    assert kernlog.scan(HEALTHY) == []
    assert kernlog.report(HEALTHY) == ""


def test_report_shows_what_follows():
    log = HEALTHY + REPORTS[0] + "\n" + "".join(f"[   13.000000] line {n}\n" for n in range(200)) + REPORTS[1]
    account = kernlog.report(log)
    assert "unregister_netdevice_many_notify" in account and "line 20" in account
    assert "1 more" in account and "softirq.c:387" in account


def test_strip():
    assert kernlog.strip("<4>[    1.234567] hello") == "hello"
    assert kernlog.strip("[    1.234567][    T1] hello") == "hello"
    assert kernlog.strip("[    1.234567][ C0] hello\r\n") == "hello"
    assert kernlog.strip("no stamp") == "no stamp"


def test_accepted_must_match_the_whole_message(monkeypatch):
    monkeypatch.setattr(kernlog, "ACCEPTED", (r"WARNING: known",))
    assert kernlog.scan("[    1.000000] WARNING: known\n") == []
    assert kernlog.scan("[    1.000000] WARNING: known and more\n") != []


def test_what_a_test_provokes_is_forgiven_once():
    watchdog = "[   69.79] platform ibf.0 ib0: NETDEV WATCHDOG: CPU: 1: transmit queue 0 timed out 10004 ms\n"
    announced = "[   60.00] vm: provoked NETDEV WATCHDOG\n"
    assert len(kernlog.scan(watchdog + announced)) == 1
    assert kernlog.scan(announced + watchdog) == []
    assert len(kernlog.scan(announced + watchdog + watchdog)) == 1
    assert len(kernlog.scan(announced + "[   61.00] BUG: KASAN: x\n")) == 1
