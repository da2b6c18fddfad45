"""Tests of the check that all ranks read the same stream, which adapt divides over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import gtopk.torch as hvd
from collectives.errors import MismatchError
from collectives.transports import Transport
from gtopk.adaptive.sources import checksum, columns_of, require_same_samples
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.indices import indices_of
from tests.gtopk.adaptive.modelled_ranks import on_ranks, some_optimizer


class Sample(NamedTuple):
    x: torch.Tensor
    y: int


def image(label: int, rank: int = 0) -> Sample:
    """Return an image with a rank's augmentation, and its label."""
    return Sample(torch.full((2, 2), float(label)) + rank, label)


def test_columns_hold_checksums_of_readable_values() -> None:
    samples, *columns = columns_of([(i, 7, object(), [i, "a"]) for i in range(3)]).tolist()
    assert samples == 3
    assert columns[::2] == [1, 0, 0, 1]
    assert [bool(checksum) for checksum in columns[1::2]] == [True, True, False, True]
    assert columns_of([]).tolist() == [0]
    assert columns_of([5])[1] == 1
    ragged = columns_of([[1, 2], [3], []])
    assert len(ragged) == 3
    assert ragged[2] != columns_of([[1], [2, 3], [4]])[2]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.5),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(3, 2).T,
        np.arange(6).reshape(2, 3).T,
        np.float32(2),
        True,
        1.5,
        "a text",
        "\ud800",
        b"bytes",
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([True, False]),
        {"a": 1, 2: [torch.ones(1)]},
    ],
)
def test_checksum_depends_on_values_alone(value: Any) -> None:
    assert checksum(value) == checksum(value) != 0
    assert checksum([value, 1]) != checksum([value, 2])


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, None, torch.ones(2).to_sparse(), torch.ones(2, device="meta")],
)
def test_checksum_skips_objects_without_readable_values(value: Any) -> None:
    assert checksum(value) == 0
    assert checksum([value, 1]) == checksum(1)


def test_checksum_passes_unrelated_errors_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*of: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("gtopk.adaptive.sources.checksums", fails)
    with pytest.raises(RuntimeError, match="the device is gone"):
        checksum([torch.ones(2)])


def test_checksum_of_mapping_ignores_key_order() -> None:
    assert checksum({"a": 1, "b": 2}) == checksum({"b": 2, "a": 1}) != checksum({"a": 2, "b": 1})


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_with_differing_augmentations_read_the_same_stream(
    size: int, threads: Callable[..., Any]
) -> None:
    def program(transport: Transport) -> None:
        rank = transport.rank
        for block in (
            [],
            [object()] * 4,
            [image(label) for label in range(4)],
            [image(label, rank) for label in range(4)],
            [image(7)] * 4,
        ):
            assert require_same_samples(transport, columns_of(block))

    threads(size, program)


@pytest.mark.parametrize("size", [2, 3])
def test_constant_columns_cannot_confirm_the_same_stream(
    size: int, threads: Callable[..., Any]
) -> None:
    def program(transport: Transport) -> None:
        rank = transport.rank
        augmented = [(torch.full((2, 2), 10.0 * i + rank), 7) for i in range(4)]
        assert not require_same_samples(transport, columns_of(augmented))
        assert not require_same_samples(transport, columns_of([(rank, 7)] * 4))
        for block in ([(image, rank) for image, _ in augmented], [(object(), rank)] * 4):
            with pytest.raises(MismatchError, match="different streams"):
                require_same_samples(transport, columns_of(block))

    threads(size, program)


class OneClass(IterableDataset[Any]):
    """A stream sorted by class, with a different augmentation on each rank."""

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([float(i), hvd.rank()]), 7) for i in range(16))


def test_stream_that_cannot_be_compared_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(here: World) -> None:
        loader = hvd.adapt(DataLoader(OneClass(), 4), some_optimizer())
        for _ in range(2):
            assert [loader.num_samples for _ in loader] == [4, 4]

    with caplog.at_level("WARNING", "gtopk"):
        on_ranks(2, program)
    (warning,) = [r.getMessage() for r in caplog.records if "same stream" in r.getMessage()]
    assert "without sharding by rank" in warning


class Sharded(IterableDataset[torch.Tensor]):
    def __init__(self, of: Callable[[int, int], range]) -> None:
        self._of = of

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, size = hvd.rank(), hvd.size()
        return (torch.tensor([float(i)]) for i in self._of(rank, size))


SHARDS: dict[str, Callable[[int, int], range]] = {
    "every other": lambda rank, size: range(rank, 64, size),
    "a part": lambda rank, size: range(64 * rank // size, 64 * (rank + 1) // size),
    "none on rank 0": lambda rank, size: range(64 * min(rank, 1)),
    "a longer one on rank 0": lambda rank, size: range(4 - min(rank, 1)),
}


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("size", [2, 3])
def test_sharded_stream_raises_on_every_rank(size: int, shard: str) -> None:
    def program(here: World) -> str:
        loader = hvd.adapt(DataLoader(Sharded(SHARDS[shard]), 4), some_optimizer())
        with pytest.raises(hvd.HorovodInternalError) as raised:
            next(iter(loader))
        return str(raised.value)

    first, *others = on_ranks(size, program)
    assert others == [first] * (size - 1)
    assert "the ranks read different streams, which begin with " in first
    assert "samples of checksum" in first


class Drawn(IterableDataset[int]):
    """A stream that its workers shuffle."""

    def __iter__(self) -> Iterator[int]:
        assert get_worker_info() is not None
        return iter(torch.randperm(50).tolist())


def test_data_workers_draw_the_same_on_all_ranks() -> None:
    def program(here: World) -> Any:
        loader = DataLoader(Drawn(), 4, num_workers=1, multiprocessing_context="fork")
        adapted = hvd.adapt(loader, some_optimizer())
        return [indices_of(adapted) for _ in range(2)]

    ranks = on_ranks(2, program)
    epochs = [[i for seen in ranks for batch in seen[epoch] for i in batch] for epoch in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 2
    assert epochs[0] != epochs[1]


def test_data_workers_draw_the_same_with_any_seed_of_the_rank() -> None:
    """Scripts add the rank to torch's seed, so that dropout differs."""

    def drawn(own: int, **options: Any) -> Any:
        def program(here: World) -> Any:
            torch.manual_seed(own)  # all threads share it, so one rank at a time
            loader = DataLoader(Drawn(), 4, num_workers=1, multiprocessing_context="fork")
            return indices_of(hvd.adapt(loader, some_optimizer(), **options))

        return on_ranks(1, program)

    with torch.random.fork_rng(devices=[]):
        assert drawn(42) == drawn(43) != drawn(42, seed=1)
