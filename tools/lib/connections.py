# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Figures of connected mode: from what was measured and counted to tables."""

import figures

# Driver instructions that 64 KB may take, sent and received together; KiB of an interface that never connected.
INSTRUCTIONS = 6000
INTERFACE_KIB = 2048
LONGEST = 65520  # bytes of the largest packet


def workload(name, measured, instructions):
    total = {key: sum(node[key] for node in measured["counters"]) for key in measured["counters"][0]}
    driver = sum(count for place, count in instructions.items() if place.startswith("ipoib_rs "))
    connected = total["tx_conn_packets"]
    packets = total["tx_sent_packets"]
    octets = total["rx_conn_bytes"] if connected else total["rx_delivered_bytes"]
    return {
        "workload": name,
        "end_to_end": measured["end_to_end"],
        "bytes_per_packet": round(octets / packets),
        "driver_instructions_per_packet": round(driver / packets),
        "driver_instructions_per_64_kb": round(driver / (octets / LONGEST)),
        "instructions_per_64_kb": round(sum(instructions.values()) / (octets / LONGEST)),
        "requests_per_post": round(connected / total["tx_conn_posts"], 2) if connected else None,
    }


def summary(measured, counts, known):
    rows = []
    for name, row in measured["workloads"].items():
        begin, end = (counts[number] for number in row["marks"])
        rows.append(workload(name, row, figures.by_function(begin, end, known)))
    return {"memory": measured["memory"], "set_ups": measured["set_ups"], "workloads": rows,
            "raw": figures.raw_figures(measured["raw"])}


def against(value, limit):
    return f"{figures.number(round(value))} of {figures.number(limit)}" + (", over" if value > limit else "")


def tables(found):
    memory, rate = found["memory"], found["set_ups"]["count"] / found["set_ups"]["seconds"]
    stream = next(row for row in found["workloads"] if row["workload"] == "TCP stream, connections")
    limit, reached = found["raw"]["end_to_end"]["Mbit/s"], stream["end_to_end"]["Mbit/s"]
    return [
        *figures.table("Connected mode beside datagrams",
                       ("workload", "end to end", "bytes per packet", "driver, per packet", "driver, per 64 KB",
                        "all, per 64 KB", "requests per post"),
                       [(row["workload"], figures.speeds(row["end_to_end"]),
                         *(figures.number(row[key]) for key in (
                             "bytes_per_packet", "driver_instructions_per_packet", "driver_instructions_per_64_kb",
                             "instructions_per_64_kb", "requests_per_post")))
                        for row in found["workloads"]]),
        *figures.table("What connections cost",
                       ("what", "value"),
                       [("raw verbs, stream of 65,524 bytes over a connection",
                         f"{figures.number(limit)} Mbit/s, of which TCP reaches {reached / limit:.0%}"),
                        ("driver's instructions for 64 KB, sent and received",
                         against(stream["driver_instructions_per_64_kb"], INSTRUCTIONS)),
                        ("KiB of an interface that never connected", against(memory["interface"], INTERFACE_KIB)),
                        ("KiB more once it has connected, receive queue included", figures.number(round(memory["first"]))),
                        ("KiB of a connection, both ends", figures.number(round(memory["connection"]))),
                        ("set-ups and tear-downs per second", figures.number(round(rate)))]),
    ]
