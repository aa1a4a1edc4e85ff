# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""One end of a verified transfer: `peer.py receive PORT` or `peer.py send PORT ADDRESS SIZE`.

Prints the number of bytes and their SHA-256.
"""

import hashlib
import random
import socket
import sys

CHUNK = 1 << 16


def send(port, address, size):
    digest = hashlib.sha256()
    stream = random.Random(port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as connection:
        connection.connect((address, port))
        left = size
        while left:
            data = stream.randbytes(min(CHUNK, left))
            connection.sendall(data)
            digest.update(data)
            left -= len(data)
    return size, digest


def receive(port):
    digest = hashlib.sha256()
    total = 0
    with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(CHUNK):
                digest.update(data)
                total += len(data)
    return total, digest


role, port, *rest = sys.argv[1:]
count, result = send(int(port), rest[0], int(rest[1])) if role == "send" else receive(int(port))
print(count, result.hexdigest())
