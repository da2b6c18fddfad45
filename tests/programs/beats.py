"""Processes with a heartbeat and nothing else; the test decides what happens to them.

Arguments: how many ranks, and the timeout in seconds. A rank prints "rank R is PID beside
COMPANION at PORT" when it has started, and "rank R lost OTHER: WHY". It obeys lines on stdin that
start with its number:

    hold SECONDS    call C code that keeps Python's lock
    step NUMBER     be at that step
    fail WHY        end, after announcing why
    leave           end normally
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading

import numpy as np

from collectives.transports import Transport
from gtopk.runtime.launch.job import torchrun_agent
from gtopk.runtime.liveness.heartbeat import Heartbeat, LostRank

size, timeout_seconds = int(sys.argv[1]), float(sys.argv[2])


class Table:
    """The part of a transport that a heartbeat needs; rank 0 passes all messages on."""

    def __init__(self, rank: int, ends: list[tuple[socket.socket, socket.socket]]) -> None:
        self.rank, self.size, self.ranks, self._ends = rank, size, range(size), ends

    def neighbours(self) -> list[int]:
        return list(range(size))

    def allgather(self, message: np.ndarray) -> list[np.ndarray]:
        if self.rank > 0:
            own = self._ends[self.rank][1]
            own.send(message.tobytes())
            messages = [own.recv(1 << 16) for _ in range(size)]
        else:
            messages = [message.tobytes(), *(root.recv(1 << 16) for root, _ in self._ends[1:])]
            for root, _ in self._ends[1:]:
                for each in messages:
                    root.send(each)
        return [np.frombuffer(each, np.uint8) for each in messages]

    gather_object = Transport.gather_object


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def be(rank: int, orders: int, ends: list[tuple[socket.socket, socket.socket]]) -> None:
    def on_lost(lost: LostRank) -> None:
        say(f"rank {rank} lost {lost.rank}: {lost.why}")

    table = Table(rank, ends)
    heartbeat = Heartbeat(table, timeout_seconds, timeout_seconds / 2, torchrun_agent())
    heartbeat.on_lost = on_lost
    heartbeat.start(table.gather_object(heartbeat.introduction))
    port = heartbeat._setting.peers[rank].port
    say(f"rank {rank} is {os.getpid()} beside {heartbeat._companion.pid} at {port}")
    for line in os.fdopen(orders):
        what, _, argument = line.strip().partition(" ")
        if what == "hold":
            ctypes.PyDLL(None).usleep(int(1e6 * float(argument)))
        elif what == "step":
            heartbeat.note(int(argument), "start it again")
            say(f"rank {rank} is at step {argument}")
        elif what == "fail":
            heartbeat.explain(argument)
            os._exit(1)
        elif what == "leave":
            heartbeat.close()
            os._exit(0)


ends = [socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in range(size)]
pipes = [os.pipe() for _ in range(size)]
for rank in range(size):
    if os.fork() == 0:
        be(rank, pipes[rank][0], ends)
        os._exit(0)


def pass_on() -> None:
    for line in sys.stdin:
        number, _, order = line.partition(" ")
        os.write(pipes[int(number)][1], order.encode())


threading.Thread(target=pass_on, daemon=True).start()
for _ in range(size):
    pid, status = os.wait()
    say(f"{pid} ended with {os.waitstatus_to_exitcode(status)}")
