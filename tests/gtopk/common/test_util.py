"""What clients take from horovod.common."""

from __future__ import annotations

import pytest

import gtopk.torch as hvd
from gtopk.common.exceptions import HorovodInternalError
from gtopk.common.process_sets import ProcessSet, global_process_set
from gtopk.common.util import check_extension, split_list


def test_a_list_is_split_into_parts_of_nearly_one_size() -> None:
    assert split_list([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2, 3], [4, 5], [6, 7]]
    assert split_list([1], 2) == [[1], []]
    for length in range(8):
        parts = split_list([*range(length)], 3)
        assert [item for part in parts for item in part] == [*range(length)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_torchs_extension_is_always_there_and_others_never() -> None:
    assert check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2") is None
    with pytest.raises(ImportError, match=r"horovod.tensorflow has not been built"):
        check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")


def test_the_objects_are_those_of_the_torch_api() -> None:
    assert HorovodInternalError is hvd.HorovodInternalError
    assert ProcessSet is hvd.ProcessSet
    assert global_process_set is hvd.global_process_set
