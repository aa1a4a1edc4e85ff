# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Our driver beside the C driver, on the software fabric: from what was counted to tables and a plot."""

import collections

import figures
from figures import number, table

DRIVERS = {"stock": "ib_ipoib", "rs": "ipoib_rs"}
MODULES = {"ipoib_rs": "driver", "ib_ipoib": "driver", "ibf": "fabric", "ib_core": "fabric"}
OWNERS = ("driver", "fabric", "network", "copies", "user", "other")
# Of the C driver's driver-only instructions, ours may take so much: by a word of the workload's name, the first that fits.
ALONE_GOALS = (("connected", 0.7), ("", 0.6))
# End to end, by the beginning of a workload's name and a word; the first that fits.
RATIO_GOALS = (("TCP stream, connected", "MTU 9000", 1.15), ("TCP stream, connected", "", 1.0), ("TCP stream", "TSO", 1.0),
               ("TCP stream", "", 1.2), ("", "", 1.0))
MEMORY_GOALS = {"idle": 1 / 8, "busy": 1 / 2}


def ratio_goal(name):
    return next(goal for start, word, goal in RATIO_GOALS if name.startswith(start) and word in name)


def alone_goal(name):
    return next(goal for word, goal in ALONE_GOALS if word in name)


def rate(name, row):
    """What a user sees: (value, unit)."""
    seconds = row["nanoseconds"] / 1e9
    if name.startswith("TCP stream"):
        return round(row["bytes"] * 8 / seconds / 1e6, 1), "Mbit/s"
    if name.startswith("TCP round trips"):
        return round(row["received"] / 2 / seconds), "round trips/s"
    return round(row["received"] / seconds), "packets/s"


def workload(name, row, instructions, network):
    """A driver's figures. A frame is what one interface received."""
    frames = row["rx_packets"]
    if not frames:
        raise figures.Failure(f"{name}: nothing was received while it was measured")
    owners = collections.Counter()
    for place, count in instructions.items():
        owners[figures.owner(place, network, MODULES)] += count
    value, unit = rate(name, row)
    ours = {place.partition(" ")[2]: round(count / frames, 1) for place, count in instructions.items()
            if figures.owner(place, network, MODULES) == "driver"}
    posts = row.get("tx_posts")
    return {
        "rate": value,
        "unit": unit,
        "lost": row["sent"] - row["received"] if row["sent"] and "multicast" not in name else None,
        "frames": frames,
        "instructions_per_frame": round(sum(owners.values()) / frames),
        "owners": {whose: round(owners[whose] / frames) for whose in OWNERS},
        "requests_per_post": round(row["tx_sent_packets"] / posts, 1) if posts else None,
        "frames_per_gro_packet": round(frames / row["ip_receives"], 1) if row["ip_receives"] else None,
        "functions": dict(sorted(ours.items(), key=lambda item: -item[1])[:25]),
    }


def driver(measured, counts, known, network):
    """All of one driver's figures."""
    rows = {}
    for name, row in measured["workloads"].items():
        if row is not None:
            begin, end = (counts[mark] for mark in row["marks"])
            rows[name] = workload(name, row, figures.by_function(begin, end, known), network)
    other = {key: measured[key] for key in ("memory", "cold", "link", "raw", "nodes")}
    return {**other, "workloads": rows}


def compare(ours, stock):
    """Workload by workload; what a driver cannot do has no row."""
    rows = []
    for name, theirs in stock["workloads"].items():
        mine = ours["workloads"].get(name)
        if mine is None:
            continue
        ratio = mine["rate"] / theirs["rate"]
        alone = mine["owners"]["driver"] / theirs["owners"]["driver"]
        rest = theirs["instructions_per_frame"] - theirs["owners"]["driver"]
        rows.append({
            "workload": name, "rs": mine, "stock": theirs,
            "ratio": round(ratio, 3), "goal": ratio_goal(name),
            # What a driver without any instructions would reach if all else were equal.
            "bound": round(theirs["instructions_per_frame"] / rest, 3),
            "driver_ratio": round(alone, 3), "driver_goal": alone_goal(name),
        })
    return rows


def mark(good):
    return "" if good else ", missed"


def rings(side):
    return "{send} and {receive}".format(**side["machine"]["rings"])


def tables(found, hz):
    """The three kinds of figures, and what is no workload."""
    rows, rs, stock = found["workloads"], found["rs"], found["stock"]
    names = [row["workload"] for row in rows]
    machine = rs["machine"]
    lines = [
        f"Kernel {machine['kernel']} ({machine['flavour']} flavour), HZ {hz}; one CPU, ``{machine['cpu']}``, whose time",
        f"counts instructions; {rs['nodes']} nodes on the fabric. Send and receive rings of {rings(stock)} (``ib_ipoib``),",
        f"{rings(rs)} (``ipoib_rs``). Command: ``make bench``.",
        "",
        *table("End to end: both drivers",
               ("workload", "ib_ipoib", "ipoib_rs", "ratio", "goal", "a driver of nothing", "requests per post",
                "frames per GRO packet"),
               [(row["workload"], f"{number(row['stock']['rate'])} {row['stock']['unit']}", number(row["rs"]["rate"]),
                 f"{row['ratio']:.3f}{mark(row['ratio'] >= row['goal'])}", f"{row['goal']:.2f}", f"{row['bound']:.3f}",
                 number(row["rs"]["requests_per_post"]),
                 f"{number(row['stock']['frames_per_gro_packet'])}, {number(row['rs']['frames_per_gro_packet'])}")
                for row in rows]),
        *table("The drivers alone: instructions of their own text per frame, both ends together",
               ("workload", "ib_ipoib", "ipoib_rs", "ratio", "goal"),
               [(row["workload"], number(row["stock"]["owners"]["driver"]), number(row["rs"]["owners"]["driver"]),
                 f"{row['driver_ratio']:.2f}{mark(row['driver_ratio'] <= row['driver_goal'])}", f"{row['driver_goal']}") for row in rows]),
        *table("Where a frame's instructions go: ib_ipoib, ipoib_rs", ("workload", "in all", *OWNERS),
               [(row["workload"], both(row, lambda side: side["instructions_per_frame"]),
                 *(both(row, lambda side, whose=whose: side["owners"][whose]) for whose in OWNERS)) for row in rows]),
        *table("The interface",
               ("what", "ib_ipoib", "ipoib_rs", "ratio", "goal"),
               [*(memory(kind, rs, stock) for kind in ("idle", "busy")), *starts(rs, stock), *links(rs, stock)]),
        *table("The raw verbs on the fabric: a datagram by a client that only posts and polls",
               ("bytes", "instructions", "datagrams/s"),
               [(size, number(round(whole := part["post_recv"] + part["post_send"] + part["poll"])),
                 number(round(1e9 / whole))) for size, part in rs["raw"].items()]),
    ]
    missing = [name for name in found["skipped"] if name not in names]
    if missing:
        lines += ["Not measured, as one of the drivers could not: " + "; ".join(missing) + ".", ""]
    return lines


def both(row, what):
    return f"{number(what(row['stock']))}, {number(what(row['rs']))}"


def memory(kind, rs, stock):
    ours, theirs, goal = rs["memory"][kind], stock["memory"][kind], MEMORY_GOALS[kind]
    title = {"idle": "memory, down (KiB)", "busy": "memory, up (KiB)"}[kind]
    ratio = ours / theirs
    return title, number(theirs), number(ours), f"{ratio:.2f}{mark(ratio <= goal)}", f"{goal}"


def starts(rs, stock):
    for kind, title in (("first", "first datagram to {} peers"), ("reregister", "the same after a re-register")):
        sides = [side["cold"][kind] for side in (stock, rs)]
        title = title.format(rs["nodes"] - 1)
        for what, values in (
            ("arrived", [side["received"] for side in sides]),
            ("ms", [round(side["nanoseconds"] / 1e6) for side in sides]),
            ("path queries", [side["questions"]["paths"] for side in sides]),
            ("join queries", [side["questions"]["joins"] for side in sides]),
        ):
            yield f"{title}: {what}", *map(number, values), "", ""


def links(rs, stock):
    for kind in ("down", "up"):
        theirs, ours = (side["link"][f"{kind}_ns"] / 1e6 for side in (stock, rs))
        yield f"link {kind} (ms)", f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.2f}", ""


# The plot.

WIDTH, BAR, GAP, LEFT, TOP = 900, 11, 10, 290, 56
COLOURS = {"stock": "#9aa5b1", "rs": "#b7410e"}


def text(x, y, words, anchor="start", size=12):
    words = str(words).replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def plot(rows):
    """Driver-only instructions per frame as pairs of bars, the end-to-end ratio behind each."""
    most = max(row[side]["owners"]["driver"] for row in rows for side in DRIVERS)
    scale = (WIDTH - LEFT - 190) / most
    height = TOP + len(rows) * (2 * BAR + GAP) + 10
    out = ["<!-- SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause -->",
           f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
           text(10, 22, "Instructions of the driver's own text per frame, both ends together", size=15)]
    for at, side in enumerate(DRIVERS):
        out += [f'<rect x="{LEFT + 110 * at}" y="34" width="12" height="12" fill="{COLOURS[side]}"/>',
                text(LEFT + 18 + 110 * at, 45, DRIVERS[side])]
    out.append(text(WIDTH - 10, 45, "end to end, ours / theirs", "end"))
    y = TOP
    for row in rows:
        out.append(text(LEFT - 8, y + BAR + 4, row["workload"], "end"))
        for at, side in enumerate(DRIVERS):
            value = row[side]["owners"]["driver"]
            top = y + at * BAR
            out += [f'<rect x="{LEFT}" y="{top}" width="{value * scale:.1f}" height="{BAR - 1}" fill="{COLOURS[side]}"/>',
                    text(f"{LEFT + value * scale + 4:.1f}", top + BAR - 2, f"{value:,}", size=10)]
        out.append(text(WIDTH - 10, y + BAR + 4, f"{row['ratio']:.2f}", "end"))
        y += 2 * BAR + GAP
    return "\n".join([*out, "</svg>", ""])
