# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The laboratory on the software InfiniBand fabric: HCAs on one switch, managed by OpenSM.

HCA i is ibf<i>, belongs to node i and is cabled to port i+1 of the switch. RDMA devices and OpenSM
stay in the initial namespace, the IPoIB interfaces move into the nodes.
"""

import contextlib
import errno
import json
import os
import pathlib
import re
import signal
import subprocess

import lab
import spaces
from lab import LabError, run, wait_for

DEBUG = pathlib.Path("/sys/kernel/debug/ibf")
# mtu 5 is 4096 bytes, rate 7 is 40 Gb/s. The groups of the partitions get them; a port that cannot
# do as much is refused.
PARTITIONS = """\
Default=0x7fff,ipoib,mtu=5,rate=7,defmember=full : ALL=full;
one=0x1,ipoib,mtu=5,rate=7,defmember=full : ALL=full;
two=0x2,ipoib,mtu=5,rate=7,defmember=full : ALL=full;
"""
# Seconds of guest time until all ports are active: what is demanded when nothing else goes on, and what others wait.
SOON = {"release": 10, "debug": 90}
ACTIVE = {"release": 60, "debug": 90}


def control(line):
    """Tells the fabric something: see tests/fabric/README.rst."""
    (DEBUG / "ctl").write_text(line + "\n")


def counters(name):
    """A file of counters, one `name value` a line."""
    rows = (line.split() for line in (DEBUG / name).read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1], 0) for row in rows if len(row) == 2}


def null_client(size, packets=4096):
    """Nanoseconds for each datagram of `size` bytes that a client takes which only posts and polls, by part."""
    control(f"null 0 1 {size} {packets}")
    found = dict(word.split("=") for word in (DEBUG / "null").read_text().split())
    packets = int(found.pop("packets"))
    return {name.removesuffix("_ns"): int(value) / packets for name, value in found.items()}


def lost(slot, why):
    """How many datagrams of an HCA's got lost for a reason."""
    found = re.search(rf"^ibf{slot} .*\blost_{why}=(\d+)", (DEBUG / "state").read_text(), re.M)
    return int(found[1]) if found else 0


def told(slot, event):
    """How often the clients of an HCA were told of an event."""
    found = re.search(rf"^ibf{slot} .*\btold_{event}=(\d+)", (DEBUG / "state").read_text(), re.M)
    return int(found[1]) if found else 0


def did(slot, what):
    """How often an HCA has computed something for its users."""
    found = re.search(rf"^ibf{slot} .*\bdid_{what}=(\d+)", (DEBUG / "state").read_text(), re.M)
    return int(found[1]) if found else 0


def hits(slot, fault):
    """How often a fault of an HCA has struck."""
    found = re.search(rf"^ibf{slot} {fault} hits=(\d+)", (DEBUG / "faults").read_text(), re.M)
    return int(found[1]) if found else 0


@contextlib.contextmanager
def fault(slot, name, rule=""):
    """A fault; gives a function that tells how often it has struck since."""
    before = hits(slot, name)
    control(f"fault {slot} {name} {rule}")
    try:
        yield lambda: hits(slot, name) - before
    finally:
        control(f"fault {slot} {name} off")


def probe(line):
    """What the null client saw when it sent as `line` says, see tests/fabric/README.rst."""
    control(f"probe {line}")
    return counters("probe")


def misuse(line):
    """What the null client saw when it did what is forbidden."""
    control(f"misuse {line}")
    return counters("probe")


class OpenSm:
    """A subnet manager on the port of an HCA. It is a daemon to us: whoever asks finds it by its pid file."""

    def __init__(self, node, priority=None):
        self.node = node
        self.priority = priority
        self.folder = pathlib.Path(f"/run/opensm/{node.rdma}")
        self.pid_file = self.folder / "pid"
        self.log = lab.RESULTS / f"opensm-{node.rdma}.log"
        self.partitions = self.folder / "partitions.conf"

    def pid(self):
        """Its process id, None if it does not run."""
        try:
            pid = int(self.pid_file.read_text())
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None
        return None if state in "ZX" else pid

    def start(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.partitions.exists():
            self.partitions.write_text(PARTITIONS)
        config = self.folder / "opensm.conf"
        config.write_text("sminfo_polling_timeout 1000\npolling_retry_number 2\n")
        # An emulated machine is slow to answer: transactions have a second instead of 200 ms.
        argv = ["opensm", "-F", config, "-g", f"0x{self.node.port_guid():016x}", "-P", self.partitions,
                "-f", self.log, "-s", "5", "-t", "1000", "-n", "16", "-y"]
        if self.priority is not None:
            argv += ["-p", self.priority]
        process = subprocess.Popen([str(word) for word in argv], env={**os.environ, "OSM_CACHE_DIR": str(self.folder)},
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   start_new_session=True)
        self.pid_file.write_text(str(process.pid))

    def signal(self, number):
        if pid := self.pid():
            os.kill(pid, number)

    def kill(self):
        """Without any chance to say goodbye."""
        self.signal(signal.SIGKILL)
        wait_for(f"the subnet manager on {self.node.rdma} to die", lambda: not self.pid())

    def sweep(self):
        """A heavy sweep, with the partitions read anew. The main thread looks every 10 s."""
        self.signal(signal.SIGHUP)

    def lids(self):
        """The LIDs it has given, by port GUID."""
        rows = (line.split() for line in (self.folder / "guid2lid").read_text().splitlines())
        return {int(row[0], 16): int(row[1], 16) for row in rows if row}


class Node(lab.Node):
    """One network namespace with an HCA and an IPoIB interface."""

    def __init__(self, index):
        super().__init__(index)
        self.rdma = f"ibf{index}"
        self.ethernet = None
        self.switch_port = index + 1
        self.stock = True

    def port(self, name):
        """A file of the port in sysfs."""
        return pathlib.Path(f"/sys/class/infiniband/{self.rdma}/ports/1/{name}").read_text().strip()

    def port_guid(self):
        return int(self.port("gids/0").replace(":", "")[16:], 16)

    def state(self):
        """The name of the port's state."""
        return self.port("state").split()[-1]

    def sm_lid(self):
        return int(self.port("sm_lid"), 16)

    def p_keys(self):
        """The P_Keys that are set, by their place in the table."""
        base = pathlib.Path(f"/sys/class/infiniband/{self.rdma}/ports/1/pkeys")
        table = {int(path.name): int(path.read_text(), 16) for path in base.iterdir()}
        return {index: key for index, key in table.items() if key}

    def add_rdma(self, *options):
        """A new HCA, with `key=value` options in place of the fabric's parameters."""
        control(" ".join(["add", str(self.index), f"stock={int(self.stock)}", *options]))

    def delete_rdma(self):
        control(f"remove {self.index}")

    def repair(self):
        if self.rdma in lab.rdma_devices() and self.find_interface() == (self.name, self.interface):
            self.ip("link", "set", self.interface, "mtu", lab.INTERFACE_MTU, "up", check=False)
            self.ip("addr", "replace", f"{self.address4}/24", "dev", self.interface)
            self.ip("addr", "replace", f"{self.address6}/64", "dev", self.interface)

    def healthy(self):
        """True if HCA and interface are as after the set-up."""
        if self.rdma not in lab.rdma_devices() or self.state() != "ACTIVE":
            return False
        ours = lab.links(self.name).get(self.interface)
        if not ours:
            return False
        addresses = spaces.addresses(self.name).get(ours["ifindex"], [])
        local = {info["local"] for info in addresses}
        return (
            "LOWER_UP" in ours["flags"]
            and not any(info["tentative"] for info in addresses)
            and ours["mtu"] == lab.INTERFACE_MTU
            and ours["address"].endswith(self.gid())
            and {self.address4, self.address6} <= local
        )


class Lab(lab.Lab):
    """The fabric and the module described by a session."""

    node_class = Node

    def __init__(self, session):
        super().__init__(session)
        self.fabric_file = session["fabric"]
        self.fabric_params = session["fabric_params"]
        self.manager = OpenSm(self.nodes[0])
        if self.driver == "both":
            ours = ",".join(node.rdma for node in self.nodes[::2])
            self.params = [f"hcas={ours}", *self.params]
        for node in self.nodes:
            node.stock = bool(self.stock_mask() >> node.index & 1)

    def stock_mask(self):
        """The HCAs that the fabric lets the stock driver attach to, as a mask."""
        if self.driver == "both":
            return sum(1 << node.index for node in self.nodes[1::2])
        return (1 << 64) - 1 if self.driver == "stock" else 0

    def describe(self):
        for name in ("state", "faults", "filters", "anomalies"):
            yield name, (DEBUG / name).read_text()
        for words in (["saquery", "--smkey", "1", "-g"], ["saquery", "--smkey", "1", "-m"], ["dump_mfts"]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                yield " ".join(words), run(*words, "-C", self.manager.node.rdma, check=False, timeout=10).stdout
        yield from super().describe()

    # The wire below: namespaces, HCAs, a subnet manager.

    def build_wire(self):
        for node in self.nodes:
            run("ip", "netns", "add", node.name)
            node.ip("link", "set", "lo", "up")

    def load_fabric(self, *params):
        depends = run("modinfo", "-F", "depends", self.fabric_file).stdout.strip()
        run("modprobe", "-a", "ib_umad", *filter(None, depends.split(",")))
        values = {"nr_hcas": len(self.nodes), "sw_ports": max(8, len(self.nodes)), "stock_mask": self.stock_mask()}
        # The session's come last: a Rust module takes each parameter once.
        values |= dict(word.split("=", 1) for word in (*params, *self.fabric_params))
        run("insmod", self.fabric_file, *(f"{name}={value}" for name, value in values.items()))

    def unload_fabric(self):
        if pathlib.Path("/sys/module/ibf").is_dir():
            self.check_anomalies()
            run("rmmod", "ibf", timeout=60)

    def check_anomalies(self):
        """Whatever the fabric saw a driver do that hardware would not forgive."""
        found = {name: count for name, count in counters("anomalies").items() if count}
        if found:
            raise LabError(f"the fabric counted anomalies: {found}")

    def add_rdma(self):
        self.load_fabric()
        self.manager.start()
        self.wait_wire()

    def has_interfaces(self):
        return True

    def wait_wire(self, timeout=None):
        states = {}

        def active():
            states.update((node.rdma, node.state()) for node in self.nodes)
            return set(states.values()) == {"ACTIVE"}

        try:
            wait_for("the subnet to become active", active, timeout or ACTIVE[self.flavour])
        except LabError as error:
            said = run("tail", "-n", "20", self.manager.log, check=False).stdout
            raise LabError(f"{error}: {states}. OpenSM's log ends with:\n{said}") from None

    def restore_wire(self):
        present = lab.rdma_devices()
        for node in self.nodes:
            if node.rdma not in present:
                node.add_rdma()
        if not self.manager.pid():
            self.manager.start()
        self.wait_wire()

    def remove_wire(self):
        for path in pathlib.Path("/run/opensm").glob("ibf*/pid"):
            try:
                os.kill(int(path.read_text()), signal.SIGKILL)
            except OSError as error:
                if error.errno != errno.ESRCH:
                    raise
        self.unload_fabric()
        for node in self.nodes:
            run("ip", "netns", "del", node.name, check=False)


def laboratory(session):
    """The laboratory of a session."""
    return Lab(session) if session["topology"] == "fabric" else lab.Lab(session)


def of_session():
    return laboratory(json.loads(lab.SESSION.read_text()))
