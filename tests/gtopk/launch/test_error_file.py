"""What a rank failed with reaches torchrun's own report."""

from __future__ import annotations

import time

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gtopk.launch.error_file import write_error_file


def test_torchrun_reads_what_a_rank_failed_with_and_when(tmp_path):
    path = tmp_path / "0" / "error.json"
    error = ValueError("boom")
    write_error_file("rank 2 of 3 failed", error, {"TORCHELASTIC_ERROR_FILE": str(path)})
    failure = ProcessFailure(local_rank=2, pid=1, exitcode=1, error_file=str(path))
    assert failure.message["message"] == "rank 2 of 3 failed"
    assert "ValueError: boom" in failure.message["extraInfo"]["py_callstack"]
    assert abs(failure.timestamp - time.time()) < 100


def test_without_torchrun_nothing_is_written_and_a_full_disk_is_no_further_error(tmp_path):
    write_error_file("rank 0 failed", ValueError(), {})
    write_error_file("rank 0 failed", ValueError(), {"TORCHELASTIC_ERROR_FILE": "/proc/no/file"})
    assert list(tmp_path.iterdir()) == []
