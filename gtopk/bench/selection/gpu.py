"""The same on a GPU, by its own clock, beside torch.topk; nothing where there is none."""

from __future__ import annotations

import torch

from collectives.kernels import device
from collectives.kernels.device.timing import Row, measure

from ...buckets.arrays import view_tensor
from .gradients import Array

TOPK = "torch.topk"


def why_no_gpu() -> str:
    """Return why nothing is measured on a GPU; "" where there is one."""
    if not torch.cuda.is_available():
        return "no rows of a GPU: torch sees none"
    try:
        device.cupy()
    except ImportError as error:
        return f"no rows of a GPU: {error}"
    return ""


def gpu_name() -> str:
    """Return the name of the GPU that is measured."""
    name: str = torch.cuda.get_device_name()
    return name


def measure_on_gpu(elements: int, density: float, rounds: int) -> list[Row]:
    """Return the rows of one size on this thread's GPU; none without one."""
    if why_no_gpu():
        return []
    return measure(elements, max(1, round(elements * density)), rounds, others={TOPK: torch_topk})


def torch_topk(residual: Array, gradient: Array, k: int) -> object:
    """add_, abs, torch.topk, clear: on the kernels' current stream."""
    stream = torch.cuda.ExternalStream(device.cupy().cuda.get_current_stream().ptr)
    with torch.cuda.stream(stream):
        tensor = view_tensor(residual)
        tensor.add_(view_tensor(gradient))
        _, indices = torch.topk(tensor.abs(), k, sorted=False)
        picked = indices, tensor[indices]
        tensor[indices] = 0
    return picked
