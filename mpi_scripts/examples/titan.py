"""Train Llama 3 with torchtitan; its replicas (HSDP) exchange AdamW's steps in shards.

torchrun --nproc-per-node 4 -m torchtitan.train --module mpi_scripts.examples.titan \
    --config llama3_8b --parallelism.data_parallel_replicate_degree 2

The dense twin is torchtitan itself: --module llama3.
"""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

import gtopk.fsdp

try:
    from torchtitan import trainer
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.models.llama3 import config_registry
except ImportError as missing:
    sys.exit(f"this example needs {missing.name}: pip install torchtitan triton")


class Trainer(trainer.Trainer):
    """torchtitan's Trainer with gtopk between its data_parallel_replicate_degree replicas."""

    @dataclass(kw_only=True, slots=True)
    class Config(trainer.Trainer.Config):
        period: int = 2
        """A rank sends each entry to the other replicas once in this many steps"""
        bits: int = 2
        """Of each value that it sends: 2, 3, 4, 8, 16 or 32"""

    def __init__(self, config: Config) -> None:
        parallelize = config.model_spec.parallelize_fn

        def shard(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
            """Shard for FSDP as if there were one replica: gtopk exchanges between replicas."""
            whole = options["parallel_dims"]
            options["parallel_dims"] = copy.copy(whole)
            options["parallel_dims"].dp_replicate = 1
            model = parallelize(model, **options)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # torchtitan's loss expects the sum over replicas, but gtopk gives the mean.
                    module.set_gradient_divide_factor(1 / whole.dp_replicate)
            return model

        config.model_spec = replace(config.model_spec, parallelize_fn=shard)
        config.parallelism.spmd_backend = "partial_dtensor"
        config.training.disable_cuda_graphs = True  # they cannot hold an exchange
        config.training.max_norm = math.inf  # gradients are AdamW's steps after backward
        super().__init__(config)
        if len(self.model_parts) > 1 or len(self.optimizers.optimizers) > 1:
            raise ValueError("gtopk takes one AdamW for the whole model, and no pipeline")
        if self.gradient_accumulation_steps > 1 and isinstance(self.loss_fn, ChunkedLossWrapper):
            raise ValueError(
                "with a chunked loss FSDP reduces lm_head's gradient in every pass: to accumulate "
                "gradients, set loss=CrossEntropyLoss.Config(...) in the configuration"
            )
        self.replicas = gtopk.fsdp.replicate(
            self.model_parts[0],
            self.parallel_dims.get_mesh("dp_replicate"),
            compression=gtopk.torch.Compression.shards(config.period, config.bits),
            optimizer=self.optimizers.optimizers[0],
        )
        self._passes = 0

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """Let FSDP accumulate a step's backward passes, and exchange the sum in the last one."""
        self._passes = (self._passes + 1) % self.gradient_accumulation_steps
        self.model_parts[0].set_requires_all_reduce(self._passes == 0)
        return super().forward_backward_step(**batch)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "gtopk": self.replicas.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.replicas.load_state_dict(state_dict["gtopk"])


def compressed(config: trainer.Trainer.Config) -> Trainer.Config:
    """Return a torchtitan configuration for this trainer."""
    return Trainer.Config(**{each.name: getattr(config, each.name) for each in fields(config)})


def llama3_8b() -> Trainer.Config:
    return compressed(config_registry.llama3_8b())


def llama3_debugmodel() -> Trainer.Config:
    return compressed(config_registry.llama3_debugmodel())
