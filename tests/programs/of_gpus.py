"""A transport whose messages all pass through GPUs, for laws that are written for hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from collectives import Transport, open_transport


def up(host: np.ndarray) -> Any:
    """Return an array of the current GPU."""
    return import_module("cupy").asarray(host)


def device(rank: int) -> Any:
    """Return a rank's GPU; with fewer GPUs than ranks, ranks share them."""
    cuda = import_module("cupy").cuda
    return cuda.Device(rank % cuda.runtime.getDeviceCount())


def without_counts(laws: Sequence[Callable[..., None]]) -> list[Callable[..., None]]:
    """Return the laws that are not about counters, as GPU messages are counted differently."""
    return [law for law in laws if "traffic" not in law.__code__.co_names]


def refusal_by_nccl(host: Transport) -> str:
    """Return the error of an NCCL transport among ranks without a GPU for each."""
    with pytest.raises(RuntimeError, match="needs NCCL and a GPU for each rank") as caught:
        open_transport("nccl", bootstrap=host)
    return str(caught.value)


class OfGpus:
    """A transport whose messages and arrays all pass through GPUs; to the laws it is a host's."""

    def __init__(self, transport: Transport, views: dict[int, OfGpus] | None = None) -> None:
        self._transport = transport
        self._views = {} if views is None else views

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _device(self) -> Any:
        return device(self.ranks[self.rank])

    def send(self, message: np.ndarray, to: int) -> Callable[[], None]:
        with self._device():
            return self._transport.send(up(message), to)

    def receive(self, source: int) -> np.ndarray:
        with self._device():
            return self._transport.receive(source).get()

    def exchange(self, message: np.ndarray, peer: int) -> np.ndarray:
        with self._device():
            return self._transport.exchange(up(message), peer).get()

    def exchange_all(self, messages: Any, sources: Sequence[int]) -> list[np.ndarray]:
        with self._device():
            ours = ((up(message), to) for message, to in messages)
            return [each.get() for each in self._transport.exchange_all(ours, sources)]

    def allgather(self, message: np.ndarray) -> list[np.ndarray]:
        with self._device():
            return [each.get() for each in self._transport.allgather(up(message))]

    def broadcast(self, message: np.ndarray | None, root: int) -> np.ndarray:
        with self._device():
            return self._transport.broadcast(None if message is None else up(message), root).get()

    def _in_place(self, array: np.ndarray, collective: Callable[[Any], None]) -> None:
        with self._device():
            # A part of a larger array, whose rest must not change.
            framed = up(np.concatenate([array[:1], array, array[:1]]))
            part = framed[array[:1].size : array[:1].size + array.size]
            collective(part)
            array[...] = part.get()
            assert framed.get()[:1].tobytes() == framed.get()[-1:].tobytes()

    def allreduce(self, array: np.ndarray, reduction: str = "sum") -> None:
        self._in_place(array, lambda part: self._transport.allreduce(part, reduction))

    def reduce_scatter(self, array: np.ndarray, bounds: Any, reduction: str = "sum") -> None:
        self._in_place(array, lambda part: self._transport.reduce_scatter(part, bounds, reduction))

    def allgather_into(self, array: np.ndarray, bounds: Any) -> None:
        self._in_place(array, lambda part: self._transport.allgather_into(part, bounds))

    def broadcast_into(self, array: np.ndarray, root: int) -> None:
        self._in_place(array, lambda part: self._transport.broadcast_into(part, root))

    def alltoall(self, array: np.ndarray, bounds: Any) -> tuple[np.ndarray, list[int]]:
        with self._device():
            received, ends = self._transport.alltoall(up(array), bounds)
            return received.get(), ends

    def subset(self, ranks: Any) -> OfGpus:
        return self._view(self._transport.subset(ranks))

    def channel(self, number: int) -> OfGpus:
        return self._view(self._transport.channel(number))

    def _view(self, view: Transport) -> OfGpus:
        return self._views.setdefault(id(view), OfGpus(view, self._views))
