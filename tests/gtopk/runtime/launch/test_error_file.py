"""torchrun's report contains a rank's error."""

from __future__ import annotations

import time

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gtopk.runtime.world.guard import write_error_file


def test_torchrun_reads_what_a_rank_failed_with_and_when(tmp_path):
    path = tmp_path / "0" / "error.json"
    error = ValueError("boom")
    write_error_file("rank 2 of 3 failed", error, {"TORCHELASTIC_ERROR_FILE": str(path)})
    failure = ProcessFailure(local_rank=2, pid=1, exitcode=1, error_file=str(path))
    assert failure.message["message"] == "rank 2 of 3 failed"
    stack = failure.message["extraInfo"]["py_callstack"]  # torchrun shows only this
    assert stack.startswith("rank 2 of 3 failed\n")
    assert "ValueError: boom" in stack
    assert abs(failure.timestamp - time.time()) < 100


def test_what_another_rank_is_the_cause_of_is_told_and_is_not_the_first(tmp_path):
    """Although torchrun dates the end of a killed rank to when it notices."""
    path = tmp_path / "error.json"
    write_error_file("rank 2 is lost", None, {"TORCHELASTIC_ERROR_FILE": str(path)})
    survivor = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    killed = ProcessFailure(local_rank=2, pid=2, exitcode=-9, error_file="none")
    error = ChildFailedError("train.py", {0: survivor, 2: killed})
    assert error.get_first_failure() == (2, killed)
    said = str(error)
    assert said.index("rank 2 is lost") < said.index("Root Cause") < said.index("Signal 9")


def test_without_torchrun_nothing_is_written_and_a_full_disk_is_no_further_error(tmp_path):
    write_error_file("rank 0 failed", ValueError(), {})
    write_error_file("rank 0 failed", ValueError(), {"TORCHELASTIC_ERROR_FILE": "/proc/no/file"})
    assert list(tmp_path.iterdir()) == []
