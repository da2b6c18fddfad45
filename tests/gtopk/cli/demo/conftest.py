"""Made-up records in the demo's format, with round numbers."""

from __future__ import annotations

import pytest

from gtopk.cli.demo.verdicts import METHODS, Record

LABELS = ("dense allreduce", "top-k allgather", "gTop-k, equal k", "gTop-k, equal bytes")
LINK = "100 Mbit/s"
MACHINE = {
    "cores": 2,
    "processor": "an imagined processor",
    "python": "3.10.0",
    "torch": "2.1.0",
    "mpi": "Open MPI 5.0.0",
    "started": "2000-01-01T00:00:00+00:00",
}


@pytest.fixture
def records() -> list[Record]:
    """Return four methods that differ in bytes and seconds and agree in accuracy."""
    selected = (80_000, 800, 800, 1_200)
    sent = (480_000.0, 19_200.0, 12_800.0, 19_200.0)
    seconds = (8.0, 10.0, 12.0, 14.0)
    return [
        Record(
            method=method,
            label=label,
            link="",
            accuracy=0.95,
            accuracy_by_seed=[0.94, 0.95, 0.96],
            accuracy_by_epoch=[[0.5, 0.9, last] for last in (0.94, 0.95, 0.96)],
            loss_by_epoch=[[2.3, 0.8, 0.2, 0.1]] * 3,
            seconds_by_epoch=[[0.0, wall / 3, 2 * wall / 3, wall]] * 3,
            bytes_per_step=bytes_per_step,
            bytes_counted=method != "dense",
            density=k / 80_000,
            seconds=wall,
            step_seconds={
                "compute": 0.002,
                "select": 0.0002 if method == "dense" else 0.0005,
                "communicate": 0.001,
            },
            merge_seconds=0.0 if method == "dense" else 0.0003,
            final_replicas_identical=True,
            ranks=4,
            parameters=80_000,
            selected=k,
            epochs=3,
            steps=33,
            seeds=3,
            batch_per_rank=32,
            dataset="digits",
            model="MLP 64-256-256-10",
            machine=MACHINE,
        )
        for method, label, k, bytes_per_step, wall in zip(
            METHODS, LABELS, selected, sent, seconds, strict=True
        )
    ]


@pytest.fixture
def linked(records: list[Record]) -> list[Record]:
    """Return them with dense and gTop-k over a link: 24 s and 6 s to the same loss."""
    more = []
    for record, wall in ((records[0], 24.0), (records[2], 6.0)):
        seconds = [[0.0, wall / 3, 2 * wall / 3, wall]]
        losses = record["loss_by_epoch"][:1]
        more.append({**record, "link": LINK, "seconds": wall, "seeds": 1})
        more[-1] |= {"seconds_by_epoch": seconds, "loss_by_epoch": losses}
    return [*records, *more]
