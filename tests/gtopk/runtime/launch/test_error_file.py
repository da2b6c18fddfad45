"""torchrun's report contains a rank's error."""

from __future__ import annotations

import time

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gtopk.runtime.world.guard import write_error_file
from tests.started import under


def test_torchrun_reads_error_and_time_from_the_error_file(tmp_path):
    path = tmp_path / "0" / "error.json"
    error = ValueError("boom")
    under({"TORCHELASTIC_ERROR_FILE": str(path)}, write_error_file, "rank 2 of 3 failed", error)
    failure = ProcessFailure(local_rank=2, pid=1, exitcode=1, error_file=str(path))
    assert failure.message["message"] == "rank 2 of 3 failed"
    stack = failure.message["extraInfo"]["py_callstack"]  # torchrun shows only this
    assert stack.startswith("rank 2 of 3 failed\n")
    assert "ValueError: boom" in stack
    assert abs(failure.timestamp - time.time()) < 100


def test_error_of_a_survivor_is_shown_but_not_as_first_failure(tmp_path):
    """Although torchrun dates the end of a killed rank to when it notices."""
    path = tmp_path / "error.json"
    under({"TORCHELASTIC_ERROR_FILE": str(path)}, write_error_file, "rank 2 is lost", None)
    survivor = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    killed = ProcessFailure(local_rank=2, pid=2, exitcode=-9, error_file="none")
    error = ChildFailedError("train.py", {0: survivor, 2: killed})
    assert error.get_first_failure() == (2, killed)
    text = str(error)
    assert text.index("rank 2 is lost") < text.index("Root Cause") < text.index("Signal 9")


def test_error_file_without_torchrun_or_a_usable_disk_raises_nothing(tmp_path):
    under({}, write_error_file, "rank 0 failed", ValueError())
    under(
        {"TORCHELASTIC_ERROR_FILE": "/proc/no/file"},
        write_error_file,
        "rank 0 failed",
        ValueError(),
    )
    assert list(tmp_path.iterdir()) == []
