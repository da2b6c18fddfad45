"""Horovod's names exist where its scripts look for them."""

from __future__ import annotations

import importlib
import inspect

import pytest

import gtopk.torch as hvd
from gtopk import exceptions
from gtopk.torch import elastic

# By module; for a class, the parameters of its __init__.
NAMES = {
    "gtopk.torch.elastic": {
        "TorchState": ("model", "optimizer", "kwargs"),
        "ElasticSampler": ("dataset", "shuffle", "seed"),
        "State": ("bcast_object", "get_rank"),
        "ObjectState": ("bcast_object", "get_rank", "kwargs"),
        "run": ("func",),
        "run_fn": ("func", "reset"),
    },
    "gtopk.torch.elastic.sampler": {"ElasticSampler": ("dataset", "shuffle", "seed")},
    "gtopk.torch.elastic.state": {
        "TorchState": ("model", "optimizer", "kwargs"),
        "StateHandler": ("value",),
        "ModelStateHandler": ("value",),
        "OptimizerStateHandler": ("value",),
        "SamplerStateHandler": ("value",),
        "get_handler_registry": (),
        "set_handler_registry": ("registry",),
    },
    "gtopk.common.elastic": {
        "State": ("bcast_object", "get_rank"),
        "ObjectState": ("bcast_object", "get_rank", "kwargs"),
        "run_fn": ("func", "reset"),
    },
    "gtopk.exceptions": {"HostsUpdatedInterrupt": ("skip_sync",)},
}
METHODS = {
    "State": {
        "save": (),
        "restore": (),
        "sync": (),
        "reset": (),
        "commit": (),
        "check_host_updates": (),
        "on_reset": (),
        "on_hosts_updated": ("timestamp", "update_res"),
        "register_reset_callbacks": ("callbacks",),
    },
    "ElasticSampler": {
        "set_epoch": ("epoch",),
        "record_batch": ("batch_idx", "batch_size"),
        "state_dict": (),
        "load_state_dict": ("state_dict",),
        "reset": (),
    },
}


@pytest.mark.parametrize("module", NAMES)
def test_names_and_parameters_are_horovods(module):
    for name, parameters in NAMES[module].items():
        found = getattr(importlib.import_module(module), name)
        assert tuple(inspect.signature(found).parameters) == parameters, name


def test_methods_and_parameters_are_horovods():
    for name, methods in METHODS.items():
        for method, parameters in methods.items():
            found = inspect.signature(getattr(getattr(elastic, name), method)).parameters
            assert tuple(found)[1:] == parameters, (name, method)
    assert issubclass(elastic.TorchState, elastic.ObjectState)
    assert issubclass(elastic.ObjectState, elastic.State)


def test_elastic_is_reachable_as_hvd_elastic():
    assert hvd.elastic is elastic
    assert elastic.__all__ == sorted(elastic.__all__)


def test_hosts_updated_interrupt_holds_skip_sync():
    assert issubclass(exceptions.HostsUpdatedInterrupt, RuntimeError)
    assert not issubclass(exceptions.HostsUpdatedInterrupt, exceptions.HorovodInternalError)
    assert [exceptions.HostsUpdatedInterrupt(skip).skip_sync for skip in (True, False)] == [
        True,
        False,
    ]
