"""Where methods run, and by whose clock: this host, and a GPU (gpu.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from collectives import SparseVector
from collectives.kernels.host import threads

from .gradients import Array
from .methods import FLOOR, Method


class Timed(NamedTuple):
    """What one method took of one round, and what it selected, on the host."""

    picked: SparseVector
    seconds: dict[str, float]  # by each of the place's clocks


class Place(Protocol):
    """One device, with its own memory for what all methods of a round begin with."""

    device: str  # its name
    names: list[str]  # of the methods, the floor first

    def clock(self, method: str) -> str:
        """Return by which clock a method is told: "cpu", "wall" or "gpu"."""

    def begin_round(self, residual: Array, gradient: Array, k: int) -> None:
        """Take the arrays that every method is to begin with."""

    def time(self, method: str) -> Timed:
        """Run one method on a copy of the residual."""


class Host:
    """This process: the CPU seconds of its one thread, or wall seconds where there are several."""

    def __init__(self, device: str, methods: Sequence[Method]) -> None:
        self.device = device
        self._methods = {method.name: method for method in methods}
        self.names = list(self._methods)
        self._copy = np.empty(0, np.float32)

    def clock(self, method: str) -> str:
        """Return "cpu" where one thread works, else "wall"."""
        return "cpu" if self._methods[method].threads == 1 else "wall"

    def begin_round(self, residual: Array, gradient: Array, k: int) -> None:
        """Remember the arrays: they stay as they are until the round is over."""
        self._begin = residual, gradient, k
        if self._copy.size != residual.size:
            self._copy = np.empty_like(residual)

    def time(self, method: str) -> Timed:
        """Run one method by both clocks."""
        residual, gradient, k = self._begin
        step = self._methods[method]
        np.copyto(self._copy, residual)
        with threads.using(step.threads):
            begun, began = time.thread_time(), time.perf_counter()
            picked = step.step(self._copy, gradient, k)
            cpu, wall = time.thread_time() - begun, time.perf_counter() - began
        return Timed(picked, {"cpu": cpu, "wall": wall})


def wanted(names: Sequence[str], words: Sequence[str] | None) -> list[str]:
    """Return those of a place's methods that were asked for, or all; the floor is always there."""
    return [name for name in names if words is None or name in (FLOOR, *words)]
