"""The parts of horovod.common that clients use."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import local_world
from gtopk.common import util
from gtopk.common.basics import HorovodBasics
from gtopk.common.exceptions import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
)
from gtopk.common.process_sets import ProcessSet, global_process_set
from gtopk.common.util import check_extension, split_list
from gtopk.runtime.world import world


def test_split_list_gives_parts_of_nearly_equal_size() -> None:
    assert split_list([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2, 3], [4, 5], [6, 7]]
    assert split_list([1], 2) == [[1], []]
    for length in range(8):
        parts = split_list([*range(length)], 3)
        assert [item for part in parts for item in part] == [*range(length)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_extension_checks_accept_only_torch() -> None:
    assert check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2") is None
    with pytest.raises(ImportError, match=r"horovod.tensorflow has not been built"):
        check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")
    assert [util.extension_available(name) for name in ("torch", "mxnet")] == [True, False]
    assert not util.gpu_available("tensorflow")
    assert util.gpu_available("torch", verbose=True) == torch.cuda.is_available()


def test_built_functions_agree_with_the_torch_api() -> None:
    for name in ("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built"):
        assert getattr(util, name)(verbose=True) == getattr(hvd, name)()


def test_common_objects_are_those_of_the_torch_api() -> None:
    assert HorovodInternalError is hvd.HorovodInternalError
    assert ProcessSet is hvd.ProcessSet
    assert global_process_set is hvd.global_process_set
    assert HostsUpdatedInterrupt(True).skip_sync


def test_env_context_sets_variables_and_restores_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GTOPK_TEST_THERE", "before")
    monkeypatch.setenv("GTOPK_TEST_KEPT", "kept")
    monkeypatch.delenv("GTOPK_TEST_NEW", raising=False)

    def current() -> list[str | None]:
        return [os.environ.get(f"GTOPK_TEST_{name}") for name in ("THERE", "KEPT", "NEW")]

    before = current()
    with util.env(GTOPK_TEST_THERE="within", GTOPK_TEST_KEPT=None, GTOPK_TEST_NEW="new"):
        assert current() == ["within", "kept", "new"]
    assert current() == before
    with util.env(GTOPK_TEST_NEW="new"):
        del os.environ["GTOPK_TEST_NEW"]  # by the program itself
    assert current() == before
    with pytest.raises(ZeroDivisionError), util.env(GTOPK_TEST_THERE="within"):
        1 / 0  # noqa: B018
    assert current() == before
    with pytest.raises(TypeError), util.env(GTOPK_TEST_THERE="x", GTOPK_TEST_NEW=1):  # type: ignore[arg-type]
        pass
    assert current() == before


def test_num_rank_is_power_2_recognizes_powers_of_two() -> None:
    powers = [number for number in range(-2, 17) if util.num_rank_is_power_2(number)]
    assert powers == [1, 2, 4, 8, 16]


def test_is_iterable_accepts_only_iterables() -> None:
    assert [util.is_iterable(x) for x in ([], "a", {}, iter(()), 1, None)] == [
        *[True] * 4,
        *[False] * 2,
    ]


def test_versions_are_compared_numerically() -> None:
    later = util.is_version_greater_equal_than
    assert later("2.10.0", "2.9.1")
    assert later("2.9.1+cpu", "2.9.1")
    assert not later("1.13.1", "2.0.0")
    with pytest.raises(ValueError, match=r"'major\.minor\.patch', got '2\.0'"):
        later("2.0.0", "2.0")
    with pytest.raises(ValueError, match="must be strings"):
        later(2, "2.0.0")  # type: ignore[arg-type]


def test_deprecated_average_argument_maps_to_an_op() -> None:
    op_of = util.get_average_backwards_compatibility_fun(types.SimpleNamespace(Average=7, Sum=8))
    assert (op_of(None, None), op_of(5, None)) == (7, 5)
    with pytest.warns(DeprecationWarning, match="replaced by `op`") as warned:
        assert (op_of(None, True), op_of(None, False)) == (7, 8)
    assert {Path(each.filename) for each in warned} == {Path(__file__)}
    with pytest.raises(ValueError, match="only one of them"):
        op_of(5, True)


def test_version_mismatch_error_names_both_versions() -> None:
    error = HorovodVersionMismatchError("pytorch", "2.1", "2.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("pytorch", "2.1", "2.0")
    assert "2.1" in str(error)
    assert "2.0" in str(error)
    assert util.check_installed_version("pytorch", "0.0.0") is None


def test_extension_full_path_is_beside_the_package() -> None:
    path = Path(util.get_extension_full_path("/a/b/__init__.py", "c", "mpi_lib_v2"))
    assert path == Path("/a/b/c") / f"mpi_lib_v2{util.get_ext_suffix()}"


def test_basics_agree_with_the_torch_api() -> None:
    basics = HorovodBasics(__file__, "mpi_lib_v2")
    assert (basics.Average, basics.Sum, basics.Adasum) == (hvd.Average, hvd.Sum, hvd.Adasum)
    with world.entered(local_world(1)[0]):
        assert (basics.rank(), basics.size(), basics.local_rank(), basics.cross_size()) == (
            0,
            1,
            0,
            1,
        )
        assert basics.is_homogeneous()
        assert basics.is_initialized()
