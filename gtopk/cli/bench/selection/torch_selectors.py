"""The published selectors by torch's operators, whole-vector: for tensors of any device.

Each takes a sum, float32 [n], and k, and returns the positions it selects, int64 [about k]. They
decide as `collectives.SELECTORS` do, which have the papers; what they read is rounded a little
differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Final

import torch

from collectives.selectors.gaussian import CORRECTIONS
from collectives.selectors.mstopk import PASSES
from collectives.selectors.sampled import FEWEST, ROUNDS, SHARE
from collectives.selectors.sidco import FIRST, STAGES

Selector = Callable[[torch.Tensor, int], torch.Tensor]


def topk(total: torch.Tensor, k: int) -> torch.Tensor:
    """abs, torch.topk, as most implementations do it; exact."""
    return torch.topk(total.abs(), k, sorted=False).indices


def sampled_dgc(total: torch.Tensor, k: int) -> torch.Tensor:
    """Take the threshold from a strided sample, lower it while it finds too few; at most k."""
    magnitudes = total.abs()
    stride = max(1, min(round(1 / SHARE), k // 2)) | 1
    sample = magnitudes[::stride]
    rank = max(1, round(k * sample.numel() / total.numel()))
    threshold = float(torch.topk(sample, rank).values[-1])
    for _ in range(ROUNDS):
        if _count(magnitudes, threshold) >= FEWEST * k:
            break
        threshold *= FEWEST
    found = _above(magnitudes, threshold)
    if found.numel() <= k:
        return found
    return found[torch.topk(magnitudes[found], k, sorted=False).indices]


def gaussian_k(total: torch.Tensor, k: int) -> torch.Tensor:
    """Fit mean and deviation, and correct the threshold a few times by half."""
    deviation, mean = (float(number) for number in torch.std_mean(total, correction=0))
    magnitudes = total.abs()
    if deviation == 0 or k == total.numel():
        return _above(magnitudes, 0.0)
    threshold = NormalDist(mean, deviation).inv_cdf(1 - k / total.numel() / 2)
    for _ in range(CORRECTIONS):
        count = _count(magnitudes, threshold)
        if count < 2 * k / 3:
            threshold *= 0.5
        elif count > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return _above(magnitudes, threshold)


def mstopk(total: torch.Tensor, k: int) -> torch.Tensor:
    """Search between mean and maximum; what is missing to k comes from just under the threshold."""
    magnitudes = total.abs()
    mean, highest = float(magnitudes.mean()), float(magnitudes.max())
    low, high = 0.0, 1.0
    too_many, enough = 0.0, highest
    for _ in range(PASSES):
        middle = (low + high) / 2
        threshold = mean + middle * (highest - mean)
        if _count(magnitudes, threshold) <= k:
            high, enough = middle, threshold
        else:
            low, too_many = middle, threshold
    sure = _above(magnitudes, enough)[:k]
    nearly = _above(magnitudes, too_many)
    spare = nearly[magnitudes[nearly] < enough][: k - sure.numel()]
    return torch.cat([sure, spare])


def sidco(total: torch.Tensor, k: int) -> torch.Tensor:
    """Fit the mean of the exceedances in each stage; the stages' shares multiply to k / n."""
    magnitudes = total.abs()
    share = k / total.numel()
    first = max(FIRST, share)
    rest = (share / first) ** (1 / STAGES)
    threshold = -float(magnitudes.mean()) * math.log(first)
    exceeding = magnitudes
    for _ in range(STAGES):
        exceeding = exceeding[exceeding > threshold]
        if not exceeding.numel():
            break
        threshold -= (float(exceeding.mean()) - threshold) * math.log(rest)
    return _above(magnitudes, threshold)


def _above(magnitudes: torch.Tensor, threshold: float) -> torch.Tensor:
    return torch.nonzero((magnitudes >= threshold) & (magnitudes > 0)).flatten()


def _count(magnitudes: torch.Tensor, threshold: float) -> int:
    return int(torch.count_nonzero(magnitudes >= threshold))


TORCH_SELECTORS: Final[dict[str, Selector]] = {
    "torch.topk": topk,
    "sampled-dgc": sampled_dgc,
    "gaussian-k": gaussian_k,
    "mstopk": mstopk,
    "sidco": sidco,
}
