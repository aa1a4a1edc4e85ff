# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The network laboratory inside the guest: namespaces, RDMA devices, the driver's interfaces.

Both the session (which sets things up before the command) and the integration tests use it.
Nothing here sleeps for a guessed time: every wait is for a state and has a limit.
"""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import time

import spaces
from spaces import LabError

RESULTS = pathlib.Path("/run/results")
SESSION = RESULTS / "session.json"
ETHERNET_MTU = 4200  # carries an IB MTU of 4096 and the RoCE headers
INTERFACE_MTU = 4092  # that less the 4-byte header
# What limits are multiplied with. Guest time that counts instructions leaps ahead while the guest
# waits for its files, so limits mean nothing there; the host's limit remains.
patience = 1
MODULES = {"rs": "ipoib_rs", "stock": "ib_ipoib"}
# Seconds until all rxe devices are gone. Emulated, the debug kernel takes 20 for one when it has nothing else to do.
GONE = {"release": 60, "debug": 180}
# What describes the state of things when a wait was in vain: by then it still is as it was.
witnesses = []


def run(*argv, check=True, timeout=60, namespace=None, **kwargs):
    """Runs a command, in a network namespace if one is named, and returns it with its output as text."""
    argv = [str(word) for word in argv]
    with start(*argv, namespace=namespace, **kwargs) as process:
        try:
            output, _ = process.communicate(timeout=min(timeout * patience, 10**6))
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(argv, process.returncode, output)
    if check and done.returncode:
        raise LabError(f"`{' '.join(argv)}` failed with exit {done.returncode}: {done.stdout.strip()}")
    return done


def start(*argv, namespace=None, **kwargs):
    """Starts a command and does not wait for it. A sysfs of the namespace costs a mount: it is there if /sys is named."""
    argv = [str(word) for word in argv]
    kwargs = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, **kwargs}
    if namespace and any("/sys" in word for word in argv):
        return subprocess.Popen(["ip", "netns", "exec", namespace, *argv], **kwargs)
    with spaces.inside(namespace):
        return subprocess.Popen(argv, **kwargs)


def wait_for(what, condition, timeout=30, every=0.05, may_fail=False):
    """Polls until `condition()` is true and returns its value. That it `may_fail` says who goes on if it never is."""
    end = time.monotonic() + timeout * patience
    while True:
        # It is asked once more after the end, however long it took before.
        late = time.monotonic() > end
        value = condition()
        if value:
            return value
        if late:
            for witness in witnesses if not may_fail else ():
                witness(what)
            raise LabError(f"waited {timeout} s in vain for {what}")
        time.sleep(every)


def log(text):
    """A line in the kernel log, so that the console shows what went on around a message."""
    with open("/dev/kmsg", "w") as kmsg:
        kmsg.write(f"<6>vm: {text}\n")


def kernel_log():
    return run("dmesg").stdout


def links(namespace=None):
    """All links of a namespace with their details, by name."""
    return spaces.links(namespace)


def rdma_devices():
    base = pathlib.Path("/sys/class/infiniband")
    return sorted(path.name for path in base.iterdir()) if base.is_dir() else []


def objects():
    """Counts of RDMA objects by device and kind, as the restrack code knows them."""
    rows = json.loads(run("rdma", "-j", "res").stdout or "[]")
    return {row["ifname"]: {kind: count for kind, count in row.items() if isinstance(count, int) and kind != "ifindex"}
            for row in rows}


def slab_kib():
    """Kernel memory in slabs, after what can be dropped was dropped."""
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
    text = pathlib.Path("/proc/meminfo").read_text()
    return int(text.split("\nSUnreclaim:", 1)[1].split()[0])


class LogReader:
    """The kernel log from now on, read without a program: that is asked for after each test."""

    ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")

    def __init__(self):
        self.file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(self.file, 0, os.SEEK_END)
        self.lines = []

    def close(self):
        os.close(self.file)

    def text(self):
        """All lines so far, as dmesg writes them."""
        while True:
            try:
                record = os.read(self.file, 16384)
            except BlockingIOError:
                return "\n".join(self.lines)
            except BrokenPipeError:
                self.lines.append("(lines were overwritten before they were read)")
                continue
            self.lines += self.lines_of(record)

    @classmethod
    def lines_of(cls, record):
        """The lines of a record: `priority,sequence,microseconds,flags;message`, then a dictionary."""
        prefix, _, message = record.split(b"\n", 1)[0].partition(b";")
        stamp = int(prefix.split(b",")[2])
        raw = cls.ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), message)
        return [f"[{stamp // 10**6:5}.{stamp % 10**6:06}] {line}" for line in raw.decode(errors="replace").split("\n")]


class Node:
    """One network namespace with an Ethernet link, an RDMA device and an IPoIB interface."""

    ethernet = "eth0"
    interface = "ib0"

    def __init__(self, index):
        self.index = index
        self.name = f"n{index}"
        self.rdma = f"rxe{index}"
        self.address4 = f"10.0.0.{index + 1}"
        self.address6 = f"fd00::{index + 1}"
        self.ethernet_mac = f"02:00:00:00:00:{index + 1:02x}"

    def __repr__(self):
        return self.name

    def run(self, *argv, **kwargs):
        """Runs a command in the namespace."""
        return run(*argv, namespace=self.name, **kwargs)

    def start(self, *argv, **kwargs):
        """Starts a command in the namespace and does not wait for it."""
        return start(*argv, namespace=self.name, **kwargs)

    def ip(self, *words, **kwargs):
        return self.run("ip", *words, **kwargs)

    def link(self, name=None):
        """Details of a link, None if it is not there."""
        return links(self.name).get(name or self.interface)

    def sysctl(self, key, value):
        spaces.write(self.name, f"/proc/sys/{key.replace('.', '/')}", f"{value}\n")

    # The RDMA device.

    def add_rdma(self):
        self.run("rdma", "link", "add", self.rdma, "type", "rxe", "netdev", self.ethernet)

    def delete_rdma(self):
        self.run("rdma", "link", "del", self.rdma, timeout=max(GONE.values()))

    def gid(self):
        """Raw GID 0 of the RDMA device, in the notation of a link address."""
        text = pathlib.Path(f"/sys/class/infiniband/{self.rdma}/ports/1/gids/0").read_text().strip()
        digits = text.replace(":", "")
        return ":".join(digits[at : at + 2] for at in range(0, 32, 2))

    # The IPoIB interface.

    def find_interface(self):
        """(namespace, name) of the driver's net device for our RDMA device, None if there is none.

        It is the one whose 20-byte address ends with our GID. A driver may give birth to it in
        our namespace or in the initial one.
        """
        gid = self.gid()
        for namespace in (self.name, None):
            for name, row in links(namespace).items():
                if row.get("link_type") == "infiniband" and row.get("address", "").endswith(gid):
                    return namespace, name
        return None

    def repair(self):
        """Sets what a test may have unset: links down, an MTU, addresses that went with a link."""
        self.ip("link", "set", self.ethernet, "mtu", ETHERNET_MTU, "up")
        if self.rdma in rdma_devices() and self.find_interface() == (self.name, self.interface):
            self.ip("link", "set", self.interface, "mtu", INTERFACE_MTU, "up", check=False)
            self.ip("addr", "replace", f"{self.address4}/24", "dev", self.interface)
            self.ip("addr", "replace", f"{self.address6}/64", "dev", self.interface)

    def adopt_interface(self, timeout=15):
        """Waits for the driver's interface, moves it here, names it, gives it its addresses, sets it up."""
        namespace, name = wait_for(
            f"the driver's interface on {self.rdma}", self.find_interface, timeout
        )
        if namespace is None:
            run("ip", "link", "set", name, "netns", self.name, "name", self.interface)
        elif name != self.interface:
            self.ip("link", "set", name, "name", self.interface)
        self.ip("addr", "add", f"{self.address4}/24", "dev", self.interface)
        self.ip("addr", "add", f"{self.address6}/64", "dev", self.interface)
        self.ip("link", "set", self.interface, "up")

    def carrier(self, name=None):
        return "LOWER_UP" in (self.link(name) or {}).get("flags", [])

    def settled(self, name=None):
        """True when duplicate address detection is over on an interface."""
        row = self.link(name)
        addresses = [info for info in spaces.addresses(self.name).get(row["ifindex"] if row else None, [])
                     if info["family"] == "inet6"]
        failed = [info["local"] for info in addresses if info["dadfailed"]]
        if failed:
            raise LabError(f"{self}: duplicate address detection refused {', '.join(failed)}")
        return bool(addresses) and not any(info["tentative"] for info in addresses)

    def healthy(self):
        """True if Ethernet, RDMA device and interface are as after the set-up."""
        if self.rdma not in rdma_devices():
            return False
        rows, addresses = links(self.name), spaces.addresses(self.name)
        ethernet, ours = rows.get(self.ethernet), rows.get(self.interface)
        if not ethernet or not ours:
            return False
        return (
            all("LOWER_UP" in row["flags"] and not any(info["tentative"] for info in addresses.get(row["ifindex"], []))
                for row in (ethernet, ours))
            and ethernet["mtu"] == ETHERNET_MTU
            and ours["address"].endswith(self.gid())
            and {self.address4, self.address6} <= {info["local"] for info in addresses.get(ours["ifindex"], [])}
        )

    def wait_ready(self, timeout=30):
        wait_for(f"the carrier of {self}/{self.interface}", self.carrier, timeout)
        wait_for(f"the end of address detection on {self}/{self.interface}", self.settled, timeout)

    def lid(self):
        return int(pathlib.Path(f"/sys/class/infiniband/{self.rdma}/ports/1/lid").read_text(), 16)

    def sysfs(self, name):
        """A file of the interface in sysfs."""
        return spaces.read_sysfs(self.name, f"class/net/{self.interface}/{name}").strip()

    def write_sysfs(self, name, text):
        """Writes a file of the interface in sysfs; a refusal is an OSError."""
        spaces.write_sysfs(self.name, f"class/net/{self.interface}/{name}", text.encode())

    def forget_neighbours(self):
        self.ip("neigh", "flush", "dev", self.interface)

    def qpn(self):
        """The queue pair number in the interface's hardware address."""
        return int("".join(self.link()["address"].split(":")[1:4]), 16)

    def statistics(self, name=None):
        rows = json.loads(self.ip("-s", "-s", "-j", "link", "show", "dev", name or self.interface).stdout)
        return rows[0]["stats64"]


class Lab:
    """The topology and the module described by a session."""

    node_class = Node

    def __init__(self, session):
        self.topology = session["topology"]
        self.driver = session["driver"]
        self.module_file = session["module"]
        self.params = session["params"]
        self.checkout = session["checkout"]
        self.flavour = session["flavour"]
        self.nodes = [self.node_class(index) for index in range(session["nodes"])] if self.topology != "none" else []

    def describe(self):
        """The state of everything, for a person to read."""
        for node in self.nodes:
            for words in (["ip", "-d", "-s", "link"], ["ip", "-s", "neigh"], ["ip", "maddr"], ["ethtool", "-S", node.interface]):
                yield f"{node}: {' '.join(words)}", node.run(*words, check=False).stdout
        yield "kernel log", kernel_log()

    # The wire below: namespaces and Ethernet.

    def build_wire(self):
        """Namespaces joined by a veth pair, or by a bridge when there are more than two.

        Duplicate address detection stays on: packets that wait for the Ethernet's link-local
        address are something that users see too.
        """
        for node in self.nodes:
            run("ip", "netns", "add", node.name)
            node.ip("link", "set", "lo", "up")
        common = ["mtu", ETHERNET_MTU]
        if len(self.nodes) == 2:
            a, b = self.nodes
            run("ip", "link", "add", a.ethernet, "netns", a.name, *common, "address", a.ethernet_mac,
                "type", "veth", "peer", "name", b.ethernet, "netns", b.name, *common,
                "address", b.ethernet_mac)
        else:
            run("ip", "link", "add", "br0", *common, "type", "bridge")
            run("ip", "link", "set", "br0", "addrgenmode", "none", "up")
            for node in self.nodes:
                port = f"port{node.index}"
                run("ip", "link", "add", port, *common, "type", "veth", "peer", "name", node.ethernet,
                    "netns", node.name, *common, "address", node.ethernet_mac)
                run("ip", "link", "set", port, "addrgenmode", "none", "master", "br0", "up")
        for node in self.nodes:
            node.ip("link", "set", node.ethernet, "up")
        for node in self.nodes:
            wait_for(f"the carrier of {node}/{node.ethernet}", lambda: node.carrier(node.ethernet))

    def add_rdma(self):
        run("modprobe", "rdma_rxe")
        for node in self.nodes:
            node.add_rdma()

    def wait_wire(self):
        for node in self.nodes:
            wait_for(f"the end of address detection on {node}/{node.ethernet}",
                     lambda: node.settled(node.ethernet))

    # The module.

    def module_name(self):
        return MODULES["stock" if self.driver == "stock" else "rs"]

    def loaded(self, name=None):
        return pathlib.Path(f"/sys/module/{name or self.module_name()}").is_dir()

    def load(self, *params, check=True):
        """Loads the driver with `params`, or with those of the session."""
        params = params or self.params
        if self.driver == "stock":
            return run("modprobe", MODULES["stock"], *params, check=check)
        depends = run("modinfo", "-F", "depends", self.module_file).stdout.strip()
        if depends:
            run("modprobe", "-a", *depends.split(","))
        # A module with KUnit suites runs them now: half a minute on an idle machine, emulated, with the debug kernel.
        return run("insmod", self.module_file, *params, check=check, timeout=300)

    def load_drivers(self):
        """Loads all that the session asks for. The stock driver comes first: it insists on its name."""
        if self.driver == "both":
            run("modprobe", MODULES["stock"])
        self.load()

    def has_interfaces(self):
        """Whether interfaces come up by themselves. The stock driver ignores RoCE."""
        return bool(self.nodes) and self.driver != "stock"

    def unload(self, timeout=60):
        run("rmmod", self.module_name(), timeout=timeout)

    def adopt(self):
        """Takes the driver's interfaces into the nodes and waits until they work."""
        for node in self.nodes:
            node.adopt_interface()
        for node in self.nodes:
            node.wait_ready()

    def unload_all(self):
        """Unloads every IPoIB driver there is."""
        for name in MODULES.values():
            if self.loaded(name):
                run("rmmod", name, timeout=60)

    # Back to a good state, from whatever a test left behind.

    def restore_wire(self):
        for node in self.nodes:
            node.ip("link", "set", node.ethernet, "mtu", ETHERNET_MTU, "up")
            if node.rdma not in rdma_devices():
                node.add_rdma()
        self.wait_wire()

    def restore(self):
        """Repairs what needs it; what a repair does not heal gets a fresh driver."""
        if self.loaded():
            broken = [node for node in self.nodes if not node.healthy()]
            for node in broken:
                node.repair()
            with contextlib.suppress(LabError):
                for node in broken:
                    wait_for(f"{node} to recover", node.healthy, timeout=5, may_fail=True)
                return
        self.restore_wire()
        self.unload_all()
        self.load_drivers()
        self.adopt()

    # The end.

    def kill_stragglers(self):
        for node in self.nodes:
            for pid in run("ip", "netns", "pids", node.name, check=False).stdout.split():
                try:
                    os.kill(int(pid), 9)
                except (ProcessLookupError, ValueError):
                    pass

    def remove_wire(self):
        for node in self.nodes:
            if node.rdma in rdma_devices():
                node.delete_rdma()
        for node in self.nodes:
            run("ip", "netns", "del", node.name, check=False)
        if len(self.nodes) > 2:
            run("ip", "link", "del", "br0", check=False)
