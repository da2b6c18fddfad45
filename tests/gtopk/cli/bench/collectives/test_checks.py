"""A wrong result raises instead of giving a time."""

from __future__ import annotations

import numpy as np
import pytest

from gtopk.cli.bench.collectives.run import WrongResultError, check_agreement, digest, picks


def test_update_that_differs_by_one_bit_raises() -> None:
    vector = picks("uniform", 500, 50, rank=0, seed=1)
    nudged = vector._replace(values=np.nextafter(vector.values, np.float32(9)))
    check_agreement("gtopk", [digest(vector), digest(vector)])
    with pytest.raises(WrongResultError, match="rank 1"):
        check_agreement("gtopk", [digest(vector), digest(nudged)])
    dense = vector.to_dense()
    with pytest.raises(WrongResultError):
        check_agreement("dense", [digest(dense), digest(-dense)])
