"""SyncBatchNorm: batch normalization with the mean and variance of all ranks' batches together.

    forward     count, mean, invstd of this rank -> allgather -> those of all rows -> normalize
    backward    sum_dy, sum_dy_xmu of this rank  -> allreduce -> those of all rows -> gradient

Each sends a few float64 numbers per channel, for any dtype of the input.

If ranks have different weights (`set_num_samples`, `adapt`), the total loss is the sum of
w_j * loss_j, and the optimizer multiplies rank i's gradient by w_i. So rank j's loss must enter the
gradient of rank i's rows with a factor w_j / w_i. Each rank therefore multiplies its sums by its
weight before the allreduce, and divides the total by its weight afterwards.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ..optim.samples import own_weight
from . import mpi_ops


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d over all ranks' rows; the result is that of one rank with all rows.

    In training, all ranks must call it equally often, with any number of rows, including zero. Each
    row has the same weight in the statistics. The placeholder batch of a rank without data does not
    count. Do not run two layers concurrently in threads: all layers use the same operation names.
    In eval mode, and in a world of one rank, it behaves as BatchNorm.

    The input's gradient is that of the weighted loss of all ranks. The rank's weight is the one
    that the optimizer uses for this layer's parameter `weight`; set it before the forward pass
    (`set_num_samples`, `adapt`). With affine=False all ranks weigh the same. The gradients of
    weight and bias cover this rank's rows only, as in any other layer.

    float16 and bfloat16 input is normalized in float32. Raises ValueError, on all ranks, if they
    have fewer than two values per channel together.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"expected input of {self.num_features} channels (got {input.shape[1]})"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input, [rows, channels, ...], normalized by channel."""
        if not self.training or mpi_ops.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        weight = own_weight(self.weight if self.affine else None)
        batch = _statistics_of_all(input, self.eps, counts=weight > 0)
        if batch.total < 2:
            raise ValueError(
                "Expected more than 1 value per channel when training, got "
                f"{batch.total} on all ranks together"
            )
        if self.track_running_stats:
            self._track(batch)
        output: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, batch, self.eps, weight
        )
        return output

    @torch.no_grad()
    def _track(self, batch: _Statistics) -> None:
        """Update the running statistics with those of a batch."""
        if (
            self.num_batches_tracked is None
            or self.running_mean is None
            or self.running_var is None
        ):
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = batch.variance * (batch.total / (batch.total - 1))
        self.running_mean.lerp_(batch.mean.to(self.running_mean), share)
        self.running_var.lerp_(unbiased.to(self.running_var), share)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replace every BatchNorm in a module with a SyncBatchNorm, and return the module.

        Parameters and running statistics stay the same tensors, so an existing optimizer keeps
        working.
        """
        converted = module
        if isinstance(module, _BatchNorm):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
            )
            converted.weight, converted.bias = module.weight, module.bias
            converted.running_mean, converted.running_var = module.running_mean, module.running_var
            converted.num_batches_tracked = module.num_batches_tracked
            converted.train(module.training)
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child))
        return converted


class _Statistics(NamedTuple):
    """The statistics of all ranks' rows; mean and variance are float64 [channels], on the host.

    total: the number of values per channel.
    variance: biased.
    """

    total: int
    mean: torch.Tensor
    variance: torch.Tensor


def _statistics_of_all(input: torch.Tensor, eps: float, counts: bool) -> _Statistics:
    """Return the statistics of all ranks' inputs, the same on each rank.

    counts: whether this rank's rows count.
    """
    wide = _widened(input.detach())
    # The rows of a placeholder are samples of other ranks, which count them already.
    count = input.shape[0] * math.prod(input.shape[2:]) if counts else 0
    mean = variance = torch.zeros(input.shape[1], dtype=torch.float64, device="cpu")
    if count:
        parts = torch.var_mean(wide, _all_but_channels(input), correction=0)
        variance, mean = torch.stack(parts).to("cpu", torch.float64)  # waits for a GPU once
    own_statistics = {
        "count": torch.tensor([count], device="cpu"),
        "mean": mean[None],
        # The inverse standard deviation, as in torch's own SyncBatchNorm; turned back into a
        # variance below.
        "invstd": (variance + eps).rsqrt()[None],
    }
    # Begin all before waiting for the first, so that they share an engine cycle.
    handles = [
        mpi_ops.allgather_async(tensor, f"sync_batch_norm.{name}")
        for name, tensor in own_statistics.items()
    ]
    rows, means, invstds = map(mpi_ops.synchronize, handles)
    total = int(rows.sum())
    # At least 1, to avoid NaN: `forward` raises its own error if no rank has rows.
    shares = (rows.double() / max(total, 1))[:, None]
    mean = (shares * means).sum(0)
    # Chan et al. 1979: add the variance within the ranks and the variance between them.
    variances = (invstds**-2 - eps).clamp(min=0) + (means - mean) ** 2
    return _Statistics(total, mean, (shares * variances).sum(0))


class _Normalize(torch.autograd.Function):
    """(input - mean) * invstd * weight + bias; mean and invstd depend on all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        batch: _Statistics,
        eps: float,
        rank_weight: int,
    ) -> torch.Tensor:
        mean, invstd = _broadcastable(input, batch.mean, (batch.variance + eps).rsqrt())
        ctx.save_for_backward(input, weight, mean, invstd)
        ctx.total, ctx.rank_weight = batch.total, rank_weight
        # The dtype is enough: no gradient depends on the bias itself.
        ctx.bias_dtype = None if bias is None else bias.dtype
        output = (_widened(input) - mean) * invstd
        if weight is not None:
            output *= _broadcastable(input, weight)[0]
        if bias is not None:
            output += _broadcastable(input, bias)[0]
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, mean, invstd = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dims = _all_but_channels(input)
        dy, xmu = _widened(gradient), _widened(input) - mean
        sum_dy, sum_dy_xmu = dy.sum(dims), (dy * xmu).sum(dims)
        gradients: list[torch.Tensor | None] = [None] * 6
        if needs_weight:
            # From this rank's rows only: the optimizer exchanges it like any parameter's gradient.
            gradients[1] = (sum_dy_xmu * invstd.flatten()).to(weight.dtype)
        if needs_bias:
            gradients[2] = sum_dy.to(ctx.bias_dtype)
        if needs_input:
            on_host = torch.stack([sum_dy, sum_dy_xmu]).to("cpu", torch.float64)
            handles = [
                mpi_ops.allreduce_async(
                    _weighted(tensor, ctx.rank_weight),
                    name=f"sync_batch_norm.{name}",
                    op=mpi_ops.Sum,
                )
                for name, tensor in zip(("sum_dy", "sum_dy_xmu"), on_host, strict=True)
            ]
            # With weight 0 the optimizer multiplies this gradient by 0, so it must be finite.
            total = ctx.total * max(ctx.rank_weight, 1)
            sums = [mpi_ops.synchronize(handle) / total for handle in handles]
            mean_dy, mean_dy_xmu = _broadcastable(input, *sums)
            dx = (dy - mean_dy - xmu * (invstd**2 * mean_dy_xmu)) * invstd
            if weight is not None:
                dx *= _broadcastable(input, weight)[0]
            gradients[0] = dx.to(input.dtype)
        return tuple(gradients)


def _weighted(sums: torch.Tensor, weight: int) -> torch.Tensor:
    """Return the sums times a weight; zeros for weight 0, even if a sum is NaN."""
    return sums * weight if weight else torch.zeros_like(sums)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype to compute in: its own, or float32 if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _all_but_channels(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _broadcastable(like: torch.Tensor, *vectors: torch.Tensor) -> list[torch.Tensor]:
    """Reshape vectors over channels so that they broadcast over an input's rows."""
    shape = [1, like.shape[1]] + [1] * (like.dim() - 2)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return [vector.to(like.device, dtype).view(shape) for vector in vectors]
