"""Run under torchrun on 4 ranks: torchtitan's trainer, two replicas of two shards, on CPUs.

torchtitan is for GPUs: stand-ins replace its GPU calls, and FSDP uses gloo's sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"
import torchtitan.tools.utils  # noqa: E402  (it looks for the device once)

torchtitan.tools.utils.get_local_device = lambda: torch.device("cpu")
torchtitan.tools.utils.device_module = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    synchronize=lambda: None,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)

import torchtitan.distributed.utils  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402

from mpi_scripts.examples import titan  # noqa: E402

torchtitan.distributed.utils.set_pg_timeouts = lambda **timeouts: None  # needs a later torch


class Counting(BaseDataLoader):
    """Sequences that count up from anywhere; a small model learns them in a few steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **others: Any
    ) -> None:
        self.rank, self.shape, self.batches = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.batches + self.rank)
            begin = torch.randint(64, (self.shape[0], 1), generator=generator)
            text = (begin + torch.arange(self.shape[1])) % 64
            self.batches += 1
            yield {"input": text[:, :-1].contiguous()}, text[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class Plain(BaseTokenizer):
    """A tokenizer that does nothing: the data already is numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *call: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode


def small(folder: str, steps: int, accumulated: int = 1) -> Any:
    """Return torchtitan's configuration of a small Llama on two replicas of two shards."""
    config = config_registry.llama3_debugmodel()
    layers = config.model_spec.model.layers
    del layers[1:]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelize = config.model_spec.parallelize_fn

    def over_gloo(model: torch.nn.Module, **how: Any) -> torch.nn.Module:
        model = parallelize(model, **how)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec = replace(config.model_spec, parallelize_fn=over_gloo)
    config.dataloader, config.tokenizer = Counting.Config(), Plain.Config()
    config.dump_folder, config.training.steps = folder, steps
    config.training.seq_len, config.training.local_batch_size = 32, 4
    config.training.global_batch_size = 4 * 4 * accumulated
    if accumulated > 1:
        config.loss = config.loss.loss_fn
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.training.max_norm = float("inf")
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.optimizer.implementation = "foreach"
    config.lr_scheduler.decay_ratio = None
    config.validator.enable = False
    config.debug.seed = 1
    config.checkpoint.enable = True
    return config


def train(config: Any) -> Any:
    """Return the trainer, when it has trained."""
    trainer = config.build()
    trainer.train()
    return trainer


def weights(trainer: Any) -> torch.Tensor:
    return whole(trainer.model_parts[0].parameters())


def whole(parts: Iterable[DTensor]) -> torch.Tensor:
    return torch.cat([part.full_tensor().detach().reshape(-1) for part in parts])


def mean_gradients(trainer: Any) -> torch.Tensor:
    """Return AdamW's first moments, which show the gradients' magnitude, as its steps do not."""
    (optimizer,) = trainer.optimizers.optimizers
    return whole(state["exp_avg"] for state in optimizer.state.values())


def ours(config: Any, period: int = 4, bits: int = 3) -> Any:
    config = titan.compressed(config)
    config.period, config.bits = period, bits
    return config


folder = sys.argv[1]
dense = train(small(f"{folder}/dense", 2))
replicate = titan.gtopk.fsdp.replicate
titan.gtopk.fsdp.replicate = partial(replicate, adam_steps="after")
after = train(ours(small(f"{folder}/after", 2), 1, 32))
titan.gtopk.fsdp.replicate = replicate
torch.testing.assert_close(mean_gradients(after), mean_gradients(dense))
torch.testing.assert_close(weights(after), weights(dense))
print("all entries make the dense gradient", flush=True)

straight = train(ours(small(f"{folder}/straight", 4)))
step = straight.replicas.last_step
assert step.selected < 0.3 * step.elements
train(ours(small(f"{folder}/halved", 2)))
resumed = train(ours(small(f"{folder}/halved", 4)))
assert torch.equal(weights(resumed), weights(straight))
print("it resumes to the bit", flush=True)

train(ours(small(f"{folder}/accumulated", 2, accumulated=2)))
print("passes add up", flush=True)
torch.distributed.destroy_process_group()
