# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Raw packets on the IPoIB interface. Run in a node's namespace: `packets.py WHAT INTERFACE …`.

Prints one line of results: `ok` or the name of an errno each, or what was captured in hexadecimal.
"""

import errno
import socket
import sys

ETH_P_ALL = 0x0003
ETH_P_ARP = 0x0806
ETH_P_IP = 0x0800


def result(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    return "ok"


def raw(interface, protocol=ETH_P_ALL):
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(protocol))
    sock.bind((interface, protocol))
    return sock


def datagram_without_address(interface):
    """H2: no destination address to build a header from."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
    sock.bind((interface, ETH_P_IP))
    return result(lambda: sock.send(b"x" * 40))


def frames(interface, address, *lengths):
    """H3, H5: raw frames of these lengths in all, to a link address in hexadecimal."""
    sock = raw(interface)
    whole = bytes.fromhex(address.replace(":", "")) + ETH_P_IP.to_bytes(2, "big") + b"\0\0"
    return " ".join(result(lambda: sock.send((whole + b"\xa5" * int(length))[: int(length)])) for length in lengths)


def capture_arp(interface):
    """H4: the first ARP packet that arrives, with its link header."""
    sock = raw(interface, ETH_P_ARP)
    sock.settimeout(20)
    print("ready", flush=True)
    while True:
        data, origin = sock.recvfrom(4096)
        if origin[2] != socket.PACKET_OUTGOING:
            return data.hex()


what, *words = sys.argv[1:]
print({"datagram": datagram_without_address, "frames": frames, "arp": capture_arp}[what](*words))
