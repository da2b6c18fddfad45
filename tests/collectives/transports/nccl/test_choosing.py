"""The GPU that a rank gets, and the required packages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from collectives import PeerError, Transport, open_transport, run_ranks
from collectives.transports import local_world
from collectives.transports.nccl import NcclTransport
from tests.collectives.transports.nccl.on_model import complete_first_exchange
from tests.programs.of_gpus import device, refusal_by_nccl


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_a_gpu_are_named_on_all_ranks(cuda: Any, ranks: int) -> None:
    cuda.gpus = 1
    messages = run_ranks(local_world(ranks), refusal_by_nccl)
    text = (
        f"transport 'nccl' needs NCCL and a GPU for each rank: ranks {list(range(ranks))} share "
        "0000:00:00.0 on the host of rank 0; give each rank its own: "
        "torch.cuda.set_device(hvd.local_rank()); open_transport('staged', bootstrap=...) goes "
        "through pinned host memory instead"
    )
    assert messages == [text] * ranks


def test_host_with_fewer_gpus_than_ranks_is_refused_on_all_ranks(cuda: Any) -> None:
    cuda.gpus = 2

    def program(host: Transport) -> str:
        with pytest.raises(RuntimeError) as caught:
            NcclTransport(host)
        return str(caught.value)

    messages = run_ranks(local_world(3), program)
    assert len(set(messages)) == 1
    assert (
        "for each rank: rank 2 has no GPU (it sees 2 GPUs and would use number 2); " in messages[0]
    )


def test_rank_uses_the_gpu_given_as_device(cuda: Any) -> None:
    def program(host: Transport) -> None:
        transport = NcclTransport(host, device=5 - host.rank)
        with device(5 - host.rank):
            complete_first_exchange(transport)
        transport.leave("done")

    run_ranks(local_world(2), program)
    assert sorted(c.device for c in cuda.communicators) == [4, 5]


@pytest.mark.parametrize(("gpus", "places"), [(8, [0, 1, 2]), (2, [0, 1, 0]), (1, [0, 0, 0])])
def test_rank_that_has_joined_before_it_connects_stands_in_on_its_own_gpu(
    cuda: Any, gpus: int, places: list[int]
) -> None:
    cuda.gpus = gpus
    transports = [NcclTransport(host, automatic=True) for host in local_world(3)]
    assert [each.tensor_place for each in transports] == [f"cuda:{place}" for place in places]


def test_rank_opens_no_context_on_other_gpus(cuda: Any) -> None:
    transport = NcclTransport(local_world(1)[0], device=5)
    transport.leave("done")
    assert [c.aborted for c in cuda.communicators] == [True]
    assert cuda.opened == {5}


def test_missing_gpu_number_is_refused(cuda: Any) -> None:
    with pytest.raises(RuntimeError, match="it sees 8 GPUs and would use number 8"):
        NcclTransport(local_world(1)[0], device=8)


def test_rank_without_a_gpu_is_named_with_the_reason(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(sys.modules["cupy.cuda"].runtime, "getDeviceCount", count)
    text = (
        r"rank 0 has no GPU \(it sees 0 GPUs and would use number 0; cudaErrorInsufficientDriver\)"
    )
    with pytest.raises(RuntimeError, match=text):
        NcclTransport(local_world(1)[0])


def test_nccl_failure_at_start_raises_peer_error(cuda: Any) -> None:
    # Two containers of one host may hide from us that they share a GPU; not from NCCL.
    def program(host: Transport) -> None:
        host.neighbours = lambda: [host.rank]
        with pytest.raises(PeerError, match=r"NCCL failed on rank \d .* \[0, 1\]: NCCL_ERROR 5"):
            NcclTransport(host, device=0)

    run_ranks(local_world(2), program)


# ---- missing packages


def test_open_transport_opens_nccl_and_staged(cuda: Any) -> None:
    (host,) = local_world(1)
    nccl = open_transport("nccl", bootstrap=host)
    assert (nccl.name, nccl.library(), nccl.supports_device_messages) == (
        "nccl",
        "NCCL 2.32.3",
        True,
    )
    staged = open_transport("staged", bootstrap=host)
    assert (staged.name, staged.library()) == (host.name, host.library())
    assert staged.supports_device_messages


@pytest.mark.parametrize("name", ["nccl", "staged"])
def test_nccl_and_staged_need_a_bootstrap(name: str) -> None:
    with pytest.raises(ValueError, match=rf"open_transport\('{name}'\) needs bootstrap="):
        open_transport(name)


def test_missing_cupy_raises_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = r"transport 'nccl' needs cupy and NCCL \(.*cupy.*\): pip install cupy-cuda12x "
    with pytest.raises(ImportError, match=text):
        open_transport("nccl", bootstrap=local_world(1)[0])
    with pytest.raises(ImportError, match=r"'staged' needs cupy, for .*: pip install cupy-cuda12x"):
        open_transport("staged", bootstrap=local_world(1)[0])


def test_missing_nccl_raises_error_that_says_what_to_install(cuda: Any) -> None:
    sys.modules["cupy.cuda.nccl"].available = False
    text = r"'nccl' needs cupy and NCCL \(CuPy finds no libnccl\): pip install cupy-cuda12x "
    with pytest.raises(ImportError, match=text):
        open_transport("nccl", bootstrap=local_world(1)[0])


def test_rank_without_cupy_is_named_by_the_other_ranks(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = threading.local()
    find = importlib.import_module

    def import_module(name: str) -> ModuleType:
        if where.rank == 1:
            raise ImportError(f"No module named {name!r}")
        return find(name)

    monkeypatch.setattr("collectives.transports.gpu.importlib.import_module", import_module)

    def program(host: Transport) -> BaseException:
        where.rank = host.rank
        with pytest.raises((ImportError, RuntimeError)) as caught:
            NcclTransport(host)
        return caught.value

    errors = run_ranks(local_world(3), program)
    assert [type(error) for error in errors] == [RuntimeError, ImportError, RuntimeError]
    assert str(errors[0]) == str(errors[2])
    assert f"rank 1 has no GPU (it sees 0 GPUs and would use number 1; {errors[1]})" in str(
        errors[0]
    )
