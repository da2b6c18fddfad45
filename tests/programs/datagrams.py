"""Rank 0 of two sends numbered datagrams to rank 1, which sends back each that comes.

Arguments: how many, seconds between them. Rank 0 prints a line of JSON: how many were sent, and the
seconds that each took which came back.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

PORT = 7000
count, pause_seconds = int(sys.argv[1]), float(sys.argv[2])
rank = int(os.environ["RANK"])
other = (f"10.0.0.{2 - rank}", PORT)

link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.bind((f"10.0.0.{rank + 1}", PORT))


def send_back() -> None:
    """Send back what comes, until something empty does."""
    link.settimeout(60)
    while message := link.recv(1500):
        link.sendto(message, other)


def came_back(seconds: float) -> list[int]:
    """Return the numbers that come back in the next seconds."""
    numbers = []
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        link.settimeout(left)
        try:
            numbers.append(int(link.recv(1500)))
        except TimeoutError:
            break
        round_trips.setdefault(numbers[-1], time.monotonic() - sent_at[numbers[-1]])
    return numbers


def send(number: int) -> None:
    sent_at[number] = time.monotonic()
    link.sendto(str(number).encode(), other)


def until_back(number: int) -> None:
    """Send a number again and again, until it comes back."""
    send(number)
    while number not in came_back(0.2):
        send(number)


sent_at: dict[int, float] = {}
round_trips: dict[int, float] = {}
if rank == 1:
    send_back()
else:
    until_back(-1)  # the hosts know each other's addresses
    for number in range(count):
        send(number)
        came_back(pause_seconds)
    until_back(count)  # what was sent before it has come, or will not
    for number in (-1, count):
        del round_trips[number]
    for _ in range(20):  # one of them comes
        link.sendto(b"", other)
    result = {"sent": count, "round_trips": list(round_trips.values())}
    print(f"{json.dumps(result)}\n", end="", flush=True)
