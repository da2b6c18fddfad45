"""Checks for any number of ranks: the questions that scripts ask Horovod about itself.

Imported by mpi_ops.py, after init.
"""

from __future__ import annotations

import os

import light_torch  # noqa: F401

import torch
from checks import raises

import gtopk.torch as hvd
from gtopk.runtime.launch import launched_by, transport_name

OVER_MPI = transport_name(launched_by()) == "mpi"


def test_built_and_enabled_questions_are_answered() -> None:
    assert hvd.mpi_built() is True
    assert hvd.gloo_built() is True
    assert hvd.mpi_enabled() is OVER_MPI
    assert hvd.gloo_enabled() is not OVER_MPI
    assert hvd.cuda_built() is (torch.version.cuda is not None)
    assert hvd.rocm_built() is (torch.version.hip is not None)
    assert (hvd.ddl_built(), hvd.ccl_built()) == (False, False)
    assert type(hvd.nccl_built()) is int
    assert hvd.mpi_ops.is_homogeneous() is True
    if OVER_MPI:
        assert hvd.mpi_threads_supported() is True
    else:
        raises(ValueError, hvd.mpi_threads_supported, "MPI is not enabled")


def test_start_timeline_needs_the_environment_variable() -> None:
    os.environ.pop("HOROVOD_TIMELINE", None)
    raises(ValueError, lambda: hvd.start_timeline("trace.json"), "HOROVOD_TIMELINE", "DYNAMIC")
