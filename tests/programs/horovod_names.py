"""Every path by which scripts import Horovod leads to gtopk's objects; run by as_horovod."""

from __future__ import annotations

import pickle

import horovod
import horovod.torch as hvd
import pytest
from horovod import run
from horovod import torch as hvd_of_package
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet
from horovod.common.util import check_extension, env, num_rank_is_power_2, split_list
from horovod.torch import elastic, mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.elastic import TorchState
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allreduce_async_, synchronize
from horovod.torch.optimizer import DistributedOptimizer

import gtopk.exceptions
import gtopk.torch

assert hvd is hvd_of_package is gtopk.torch
assert hvd.mpi_ops is mpi_ops is gtopk.torch.mpi_ops
assert hvd.elastic is elastic is gtopk.torch.elastic
assert elastic.TorchState is TorchState
assert hvd.ProcessSet is ProcessSet
assert hvd.Compression is Compression
assert hvd.broadcast_object is broadcast_object
assert hvd.DistributedOptimizer is DistributedOptimizer
assert (mpi_ops.allreduce_async_, mpi_ops.synchronize) == (allreduce_async_, synchronize)
assert hvd.HorovodInternalError is HorovodInternalError is gtopk.exceptions.HorovodInternalError
assert HostsUpdatedInterrupt is gtopk.exceptions.HostsUpdatedInterrupt
assert horovod.__version__ == "0.28.1"
check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
assert split_list([1, 2, 3], 2) == [[1, 2], [3]]

# The modules are gtopk's, by name.
assert gtopk.torch.__name__ == gtopk.torch.__spec__.name == "gtopk.torch"

# Horovod moved its run twice.
assert horovod.run is run is gtopk.run
import horovod.run.runner  # noqa: E402 - until Horovod 0.20, run was a package
from horovod.run.runner import run as run_of_old  # noqa: E402
from horovod.runner import run as run_of_runner  # noqa: E402

assert run is run_of_runner is run_of_old is horovod.run.runner.run
with pytest.raises(TypeError, match="func must be callable"):
    horovod.run(None)  # a package that can still be called

for name in ("horovod.tensorflow", "horovod.keras", "horovod.torch.nothing"):
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}': gtopk.as_h"):
        __import__(name)


class OfThisScript:
    """Found by pickle in __main__, as in a script that Python itself runs."""


assert type(pickle.loads(pickle.dumps(OfThisScript()))) is OfThisScript
hvd.init()
assert (HorovodBasics().rank(), HorovodBasics().size()) == (hvd.rank(), hvd.size())
assert num_rank_is_power_2(4)
with env(HOROVOD_LOG_LEVEL="debug", HOROVOD_TIMELINE=None):
    pass
assert mpi_ops.Compression is Compression
assert type(hvd.allgather_object(OfThisScript())[-1]) is OfThisScript  # a pickle, as with Horovod
print("every name is gtopk's", flush=True)
