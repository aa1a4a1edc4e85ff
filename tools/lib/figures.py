# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""From what was measured and counted to the tables of Documentation/performance.rst."""

import bisect
import collections
import re

from house import Failure

# The raw verbs that a workload is compared with, and in which unit.
CEILINGS = {
    "TCP stream": ("stream of 4096", "Mbit/s"),
    "UDP MTU-size": ("stream of 4096", "packets/s"),
    "UDP 64 bytes": ("stream of 64", "packets/s"),
    "TCP round trips": ("round trips of 64", "round trips/s"),
}
# Instructions of the driver's own text that a packet may take.
BUDGET = {"transmit": 600, "receive": 500}
INSTRUCTIONS_PER_SECOND = 10**9  # of guest time

# Whose instructions: columns of the table, in order.
OWNERS = ("driver", "rxe", "network", "copies", "CRC", "user", "other")
MODULES = {"ipoib_rs": "driver", "raw_verbs": "driver", "rdma_rxe": "rxe", "ib_core": "rxe", "ib_uverbs": "rxe",
           "udp_tunnel": "network", "ip6_udp_tunnel": "network"}
FUNCTIONS = (
    (re.compile(r"crc32"), "CRC"),
    (re.compile(r"memcpy|memmove|rep_movs|csum|checksum|_copy_(to|from)_|copy_user"), "copies"),
)
# Where the network stack's functions are defined, in the kernel's source.
NETWORK = ("net/core", "net/ipv4", "net/ipv6", "net/sched", "net/ethernet", "net/netlink", "net/socket.c",
           "drivers/net/veth.c", "include/net")
DEFINITION = re.compile(r"^(?![\s#*/]).*?\b(\w+)\s*\(", re.M)


def network_functions(source):
    """Names of the functions that the network stack in a kernel's source defines, and some of what it declares."""
    names = set()
    for place in (source / word for word in NETWORK):
        for path in [place] if place.is_file() else [*place.rglob("*.[ch]")]:
            names.update(DEFINITION.findall(path.read_text(errors="replace")))
    if not names:
        raise Failure(f"there is no network stack in {source}")
    return names


def symbols(kallsyms):
    """The kernel's functions, sorted: (first address, "module function")."""
    found = []
    for line in kallsyms.splitlines():
        words = line.split()
        if words[1] in "tTwW":
            module = words[3].strip("[]") if len(words) > 3 else "vmlinux"
            found.append((int(words[0], 16), f"{module} {words[2]}"))
    return sorted(found)


def snapshots(lines):
    """What tools/count.c wrote: by number, the instructions in all and by address, the user's without one."""
    found, counts = {}, {}
    for line in lines:
        words = line.split()
        if words[0] == "snapshot":
            found[int(words[1])] = int(words[2]), (counts := {})
        else:
            counts[int(words[0], 16)] = int(words[1])
    return found


def by_function(before, after, known):
    """Instructions between two snapshots by "module function", or "user"."""
    found = collections.Counter()
    for address, count in after[1].items():
        count -= before[1].get(address, 0)
        at = bisect.bisect_right(known, (address, "~")) - 1
        if count:
            found[known[at][1] if at >= 0 else "unknown"] += count
    found["user"] = after[0] - before[0] - sum(found.values())
    return found


def owner(place, network, modules=MODULES):
    """Whose a "module function" is."""
    module, _, function = place.partition(" ")
    if module == "user":
        return "user"
    if module in modules:
        return modules[module]
    for pattern, whose in FUNCTIONS:
        if pattern.search(function):
            return whose
    return "network" if function.split(".")[0] in network else "other"


def owners(instructions, network):
    """Instructions by owner."""
    found = dict.fromkeys(OWNERS, 0)
    for place, count in instructions.items():
        found[owner(place, network)] += count
    return found


def way(place):
    """Which way a function of the driver works, None for others'."""
    module, _, function = place.partition(" ")
    if module != "ipoib_rs":
        return None
    if re.search(r"RecvPoll|RecvQueue|Received|2ud6refill", function):
        return "receive"
    if re.search(r"SendPoll|SendQueue|SendCompleter|Slot|start_xmit|header_create|2Tx4send|2Tx5flush|4xmit", function):
        return "transmit"
    return "other"


def raw_figures(line):
    """Figures of the raw verbs, from the line that the module logs."""
    values = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}
    kind = re.search(r"raw_verbs: (\w+) ", line)[1]
    rate = values["received"] * 10**9 / values["nanoseconds"]
    if kind == "round_trips":
        end_to_end = {"round trips/s": round(rate)}
        packets = 2 * rate
    else:
        end_to_end = {"packets/s": round(rate), "Mbit/s": round(rate * values["size"] * 8 / 1e6, 1)}
        packets = rate
    return {"end_to_end": end_to_end, "lost": values["lost"], "window": values["window"],
            "requests_per_post": round(values["received"] / values["posts"], 1),
            "instructions_per_packet": round(INSTRUCTIONS_PER_SECOND / packets)}


def spread(instructions, total, network):
    """A packet's `total` instructions by owner, in proportion to all."""
    found = owners(instructions, network)
    whole = sum(found.values())
    return {whose: {"instructions": round(total * count / whole), "share": round(count / whole, 4)}
            for whose, count in found.items()} if whole else {}


def workload_figures(name, measured, instructions, raw, network):
    counters = measured["counters"]
    total = {key: sum(node[key] for node in counters) for key in counters[0]}
    packets = {"transmit": total["tx_sent_packets"], "receive": total["rx_delivered_packets"]}
    if not all(packets.values()):
        raise Failure(f"{name}: no packets were sent or received while it was measured")
    spent = {"transmit": 0, "receive": 0, "other": 0}
    for place, count in instructions.items():
        if way(place):
            spent[way(place)] += count
    ceiling, unit = CEILINGS[name]
    limit = raw[ceiling]["end_to_end"][unit]
    per_packet = sum(instructions.values()) / packets["transmit"]
    ours = {place: count for place, count in instructions.items() if way(place)}
    frames, ip_packets = counters[1]["rx_delivered_packets"], counters[1]["ip_receives"]
    return {
        "workload": name,
        "end_to_end": measured["end_to_end"],
        "ceiling": {"raw": ceiling, "unit": unit, "value": limit},
        "ratio": round(measured["end_to_end"][unit] / limit, 3),
        "packets": packets,
        "driver_instructions_per_packet": {key: round(spent[key] / packets[key]) for key in packets},
        "other_driver_instructions": spent["other"],
        "requests_per_post": round(packets["transmit"] / total["tx_posts"], 1) if total["tx_posts"] else None,
        "frames_per_gro_packet": round(frames / ip_packets, 1) if ip_packets else None,
        "instructions_per_packet": round(per_packet),
        "owners": spread(instructions, per_packet, network),
        "functions": dict(sorted(ours.items(), key=lambda item: -item[1])[:12]),
    }


def figures(measured, counts, known, network):
    """All figures, from what the guest measured and the emulator counted."""

    def instructions(row):
        begin, end = (counts[number] for number in row["marks"])
        return by_function(begin, end, sorted(known + symbols(row.get("symbols", ""))))

    raw = {}
    for name, row in measured["raw"].items():
        raw[name] = raw_figures(row["log"])
        raw[name]["owners"] = spread(instructions(row), raw[name]["instructions_per_packet"], network)
    rows = [workload_figures(name, row, instructions(row), raw, network) for name, row in measured["workloads"].items()]
    machine = {key: value for key, value in measured.items() if key not in ("raw", "workloads")}
    return {"machine": machine, "raw": raw, "workloads": rows}


def table(title, head, rows):
    """Lines of a table in reStructuredText."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (head, *rows)]
    return [f".. table:: {title}", "", *("   " + line for line in (rule, lines[0], rule, *lines[1:], rule)), ""]


def number(value):
    return "-" if value is None else f"{value:,}"


def speeds(end_to_end):
    return ", ".join(f"{number(value)} {unit}" for unit, value in end_to_end.items())


def against_budget(row, direction):
    spent, limit = row["driver_instructions_per_packet"][direction], BUDGET[direction]
    return f"{spent} of {limit}" + (", over" if spent > limit else "")


def excess(row, raw):
    """What a workload's packet takes more than a raw datagram, the largest part first."""
    more = {whose: part["instructions"] - raw["owners"][whose]["instructions"] for whose, part in row["owners"].items()}
    parts = sorted(more.items(), key=lambda item: -item[1])
    return f"{number(sum(more.values()))} (" + ", ".join(f"{whose} {number(count)}" for whose, count in parts) + ")"


def tables(found):
    """The three figures, never mixed: end to end against the raw verbs, the driver alone, what takes the time."""
    machine, rows = found["machine"], found["workloads"]
    costs = [*((f"raw {name}", row) for name, row in found["raw"].items()), *((row["workload"], row) for row in rows)]
    rings = machine["rings"]
    return [
        f"Kernel {machine['kernel']} ({machine['flavour']} flavour), HZ {machine['hz']}; one CPU, ``{machine['cpu']}``,",
        "whose time counts instructions, 10\\ :sup:`9` to the second; two nodes over Soft-RoCE, IP MTU",
        f"{machine['mtu']}, rings of {rings['send']} (send) and {rings['receive']} (receive), raw verbs with a window of",
        f"{max(row['window'] for row in found['raw'].values())}. Command: ``{machine['command']}``.",
        "",
        *table("End to end, and what the verbs can do",
               ("workload", "end to end", "raw verbs", "ratio", "requests per post", "frames per GRO packet"),
               [(row["workload"], speeds(row["end_to_end"]),
                 "{value:,} {unit}".format(**row["ceiling"]),
                 f"{row['ratio']:.0%}", number(row["requests_per_post"]), number(row["frames_per_gro_packet"]))
                for row in rows]),
        *table("The driver alone: instructions of its own text per packet",
               ("workload", "transmit, with completion", "receive, with refill"),
               [(row["workload"], against_budget(row, "transmit"), against_budget(row, "receive")) for row in rows]),
        *table("Where a packet's instructions go, both nodes together",
               ("workload", "per packet", *OWNERS),
               [(name, number(row["instructions_per_packet"]),
                 *(f"{number(part['instructions'])} ({part['share']:.0%})" for part in row["owners"].values()))
                for name, row in costs]),
        "What a packet takes more than its raw datagram:",
        "",
        *(f"- {row['workload']}: {excess(row, found['raw'][row['ceiling']['raw']])}" for row in rows),
    ]


def written(text, lines, part="bench"):
    """A document with `lines` between the marks of a part."""
    start, stop = f".. {part}: begin", f".. {part}: end"
    if text.count(f"\n{start}") != 1 or text.count(f"\n{stop}\n") != 1 or text.index(start) > text.index(stop):
        raise Failure(f"the document needs one '{start}' and, after it, one '{stop}', each at the start of a line")
    before, rest = text.split(f"\n{start}", 1)
    mark, after = rest.split("\n", 1)[0], rest.split(f"\n{stop}\n", 1)[1]
    body = "\n".join(lines).strip("\n")
    return f"{before}\n{start}{mark}\n\n{body}\n\n{stop}\n{after}"
