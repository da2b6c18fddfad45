"""Messages longer than 2^31 bytes arrive whole."""

from __future__ import annotations

import os

import pytest

from tests.launchers import VENDOR

BYTES_NEEDED = (20 if VENDOR == "MPICH" else 14) << 30


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_message_longer_than_2_31_bytes_arrives_whole(mpirun):
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < BYTES_NEEDED:
        pytest.skip(f"needs {BYTES_NEEDED >> 30} GiB of free memory")
    job = mpirun(2, "beyond_31_bits.py", timeout=1000)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("arrived whole") == 2
