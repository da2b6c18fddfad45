"""The end of a rank in its record: normal or not, with a readable text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gtopk
import gtopk.torch as hvd
from gtopk.cli.report import events, tiles
from gtopk.cli.top import _snapshots, rows, status_of
from gtopk.runtime.world import world
from gtopk.telemetry.lines import path_of
from gtopk.telemetry.reading import RankRecord, read_run
from gtopk.telemetry.run_record import LineFile
from tests.gtopk.made_runs import lines_of
from tests.started import STARTED_PATH

CHECKOUT = Path(__file__).parents[3]
DIES = """
import gtopk
import gtopk.torch as hvd
hvd.init()
raise ValueError("boom")
"""


def rank_of(folder: Path) -> RankRecord:
    (rank,) = read_run(folder).ranks
    return rank


def write_end(folder: Path, **end: Any) -> Path:
    """Write the record of a run of one rank with this end."""
    *lines, _ = lines_of(0, 1, 10)
    file = LineFile(path_of(folder, 0))
    file.take([*lines, {"what": "end", "seconds": 0.2, "step": 10, **end}])
    file.close()
    return folder


STUCK = "ended the job at step 10, in gradients.0, as rank 1 is lost (silent for 30.2 s)"


@pytest.mark.parametrize(
    ("end", "in_order"),
    [
        ({"how": STUCK, "in_order": False}, False),
        ({"how": "called shutdown() as nothing failed at step 10", "in_order": True}, True),
        # Records of earlier versions:
        ({"how": "failed at step 10: ValueError: boom"}, False),
        ({"how": "was stopped by SIGTERM at step 10"}, False),
        ({"how": "its program ended at step 10"}, True),
    ],
)
def test_abnormal_end_is_reported_with_its_reason(
    tmp_path: Path, end: dict[str, Any], in_order: bool
) -> None:
    run = read_run(write_end(tmp_path, **end))
    reported = [what for where, what in events(run) if where == "rank 0"]
    assert reported == ([] if in_order else [end["how"]])
    (ranks,) = [tile for tile in tiles(run) if tile.name == "Ranks"]
    assert ranks.loss is not in_order
    (status,) = status_of(run, tmp_path)
    assert status.failed is not in_order
    assert rows([status])[1][0][-1] == ("ended" if in_order else end["how"])


def test_script_that_raises_is_recorded_as_abnormal_end(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": STARTED_PATH, "GTOPK_RUN": str(tmp_path)}
    job = subprocess.run([sys.executable, "-c", DIES], env=variables, check=False)
    assert job.returncode == 1
    rank = rank_of(tmp_path)
    assert rank.end is not None
    assert rank.end.startswith("its program ended by ValueError: boom at step 0; host ")
    assert not rank.in_order


@pytest.mark.parametrize(("error", "in_order"), [(ValueError("boom"), False), (SystemExit(), True)])
def test_shutdown_while_handling_an_error_is_recorded_as_abnormal_end(
    tmp_path: Path, error: BaseException, in_order: bool
) -> None:
    hvd.init()
    gtopk.record(str(tmp_path))
    try:
        raise error
    except BaseException:
        hvd.shutdown()
    rank = rank_of(tmp_path)
    assert rank.end is not None
    assert rank.end.startswith(f"called shutdown() while it handled {type(error).__name__}")
    assert rank.in_order is in_order


def test_shutdown_with_failed_unfinished_work_is_an_abnormal_end(tmp_path: Path) -> None:
    class Lost:
        def is_ready(self) -> bool:
            return True

        def begin(self, engine: Any) -> Any:
            def end() -> None:
                raise RuntimeError("checkpoint lost")

            return end

    hvd.init()
    gtopk.record(str(tmp_path))
    world.current().unfinished.append(Lost())
    with pytest.raises(RuntimeError, match="checkpoint lost"):
        hvd.shutdown()
    rank = rank_of(tmp_path)
    assert rank.end is not None
    assert rank.end.endswith("; unfinished work failed: checkpoint lost")
    assert not rank.in_order


def test_recovery_is_not_recorded_as_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.init()
    gtopk.record(str(tmp_path))
    join, statuses = world.join, []

    def snapshot_and_join(comm: Any) -> Any:
        snapshots = _snapshots(tmp_path, 0.001)
        statuses.extend(next(snapshots) + next(snapshots))
        return join(comm)

    monkeypatch.setattr(world, "join", snapshot_and_join)
    world.rejoin()
    assert [(status.state, status.failed) for status in statuses] == [("running", False)] * 2
    hvd.shutdown()
    assert rank_of(tmp_path).in_order


def test_failed_recovery_is_recorded_as_abnormal_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hvd.init()
    gtopk.record(str(tmp_path), every=2)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with monkeypatch.context() as patched:
        patched.setattr(world.World, "leave", lambda self, reason, leave_timeout_seconds: [0])
        try:
            world.rejoin()
        except hvd.HorovodInternalError:
            patched.undo()
            hvd.shutdown()
    rank = rank_of(tmp_path)
    assert "cannot rejoin this job" in str(rank.end)
    assert not rank.in_order
    assert len(rank.steps) == 2
