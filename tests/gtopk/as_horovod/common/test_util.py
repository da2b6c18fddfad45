"""horovod.common.util as scripts use it."""

from __future__ import annotations

import pytest

from gtopk.as_horovod.common import util


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_list_is_split_into_runs_of_nearly_equal_length(count: int) -> None:
    items = list(range(7))
    runs = util.split_list(items, count)
    assert len(runs) == count
    assert [item for run in runs for item in run] == items
    lengths = [len(run) for run in runs]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_only_torchs_extension_is_there() -> None:
    assert util.extension_available("torch")
    assert not util.extension_available("tensorflow")
    with pytest.raises(ImportError, match=r"horovod\.tensorflow has not been built"):
        util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", "", "mpi_lib")


def test_what_is_built_is_what_torchs_api_says() -> None:
    import gtopk.torch as hvd

    assert util.mpi_built is hvd.mpi_built
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        _ = util.anything


def test_small_questions() -> None:
    assert [ranks for ranks in range(-1, 9) if util.num_rank_is_power_2(ranks)] == [1, 2, 4, 8]
    assert util.is_iterable([])
    assert not util.is_iterable(1)
