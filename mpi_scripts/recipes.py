"""Recipes: ways to train with compressed gradients, which `convergence.py` compares.

They differ in whether momentum is applied before or after the selection, in the warm-up, in who
keeps dropped entries, in the width of updates, in the rounding of values and in the order of
merges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import torch

from gtopk.cli.demo import equal_bytes_density
from gtopk.compression import Compression, SparseCompression
from gtopk.local_sgd import averaging, nesterov
from gtopk.local_sgd.local_sgd import Outer

MOMENTUM: Final = 0.9
BETAS: Final = (0.9, 0.999)  # of AdamW
AFTER: Final = {"adam_steps": "after"}
RAMP: Final = (0.5, 0.5)


class Setting(NamedTuple):
    """What a recipe may depend on.

    length: number of the model's parameters. steps: number of steps in the whole training.
    """

    ranks: int
    density: float
    length: int
    steps: int


class Recipe(NamedTuple):
    """How a model is trained.

    compression: the compression of gradients.
    momentum:    the momentum of the wrapped SGD.
    adam:        use AdamW instead of SGD; with adam_correction, before the selection.
    rate:        factor of the task's learning rate for SGD with momentum, or for AdamW.
    ramp:        the rate's first factor, and the share of the training after which the factor is 1.
    low_rank:    above 0: PowerSGD of this rank instead of compression.
    decoupled:   above 0: DeMo with this many components per chunk instead of compression.
    node_size:   ranks per node; 0: each rank is alone.
    inner_steps: above 0: steps in a round of LocalSGD, instead of an exchange in every step.
    options:     options of DistributedOptimizer, LocalSGD or LowRank.
    """

    compression: Any = Compression.none
    momentum: float = MOMENTUM
    rate: float = 1.0
    ramp: tuple[float, float] = (1.0, 1.0)
    adam: bool = False
    low_rank: int = 0
    decoupled: int = 0
    node_size: int = 0
    inner_steps: int = 0
    options: Mapping[str, Any] = {}

    @property
    def is_adam_before(self) -> bool:
        """Tell whether Adam's steps are made before the exchange; SGD is then wrapped."""
        corrected = getattr(self.compression, "adam_correction", None) is not None
        return self.adam and (corrected or "betas" in self.options)

    def rate_at(self, share: float) -> float:
        """Return the factor of the task's learning rate at a share of the training."""
        start, until = self.ramp
        return self.rate * min(1.0, start + (1.0 - start) * share / until)

    @property
    def is_dense(self) -> bool:
        """Tell whether all entries are sent unrounded: such recipes are the baselines."""
        usual = not self.adam or self.rate == 1.0
        every_step = not (self.low_rank or self.decoupled or self.inner_steps)
        return self.compression is Compression.none and usual and every_step


@dataclass(frozen=True)
class PublishedTree(SparseCompression):
    """gTop-k as published: a tree; a pick is cleared whenever its index is in the result."""

    algorithm: ClassVar[str] = "gtopk-tree"

    def options(self, k: int, length: int) -> dict[str, Any]:
        return {"put_back": "published"}


def plain(compression: Any = Compression.none) -> Recipe:
    """Return a recipe without momentum, with the highest learning rate that the tasks allow."""
    return Recipe(compression, momentum=0.0, rate=6.0)


def corrected(kind: Callable[..., Any], density: float, **options: Any) -> Recipe:
    """Return a recipe with momentum before the selection, and masking as in Lin et al."""
    options = {"factor_masking": True, **options}
    return Recipe(kind(density, momentum_correction=MOMENTUM, **options), momentum=0.0)


def adam_before(kind: Callable[..., Any], density: float, **options: Any) -> Recipe:
    """Return a recipe that makes Adam's steps before it selects.

    A rank's own gradients are noisier than the mean, so its steps are shorter: hence a higher rate.
    """
    return Recipe(kind(density, adam_correction=BETAS, **options), adam=True, rate=3.0)


def adamw_before(density: float, rate: float = 1.2, values: str = "int8", **options: Any) -> Recipe:
    """Return a recipe that wraps AdamW, whose steps are made before the selection."""
    compression = gtopk(density, wire="packed", values=values, growth=2.0)
    return Recipe(compression, adam=True, rate=rate, ramp=RAMP, options=options)


def adamw_shards(period: int) -> Recipe:
    """Return a recipe that wraps AdamW and exchanges its steps in shards."""
    return Recipe(Compression.shards(period), adam=True, rate=1.2, ramp=RAMP)


def gentle_nesterov(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer with the rate and momentum that a search found best here."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.7, nesterov=True)


def local_adamw(
    inner_steps: int,
    compression: Any,
    outer: Outer = averaging,
    rate: float = 1.2,
    **options: Any,
) -> Recipe:
    """Return a recipe whose ranks train locally with AdamW between two exchanges of changes."""
    return Recipe(
        compression,
        adam=True,
        rate=rate,
        ramp=RAMP,
        inner_steps=inner_steps,
        options={"outer": outer, **options},
    )


def tenth(setting: Setting) -> int:
    """Return the number of warm-up steps: a tenth of the training."""
    return max(1, setting.steps // 10)


def deep(setting: Setting) -> Recipe:
    """Return Deep Gradient Compression: momentum correction, factor masking, warm-up.

    Lin et al. 2018, section 3; they clip gradients of recurrent networks only.
    """
    return corrected(Compression.topk, setting.density, warmup_steps=tenth(setting))


def as_many_bytes_as_exact(setting: Setting) -> float:
    """Return the density at which packed int8 entries take as many bytes as exact ones."""
    index_bits = math.log2(math.e / setting.density)
    return min(1.0, setting.density * 48 / (index_bits + 8.25))


def gtopk(density: float, *, growth: float = 1.0, **options: Any) -> SparseCompression:
    """Return gTop-k with the paper's narrow updates, unless `growth` is given."""
    return Compression.gtopk(density, growth=growth, **options)


RECIPES: Final[Mapping[str, Callable[[Setting], Recipe]]] = {
    "dense": lambda s: Recipe(),
    "dense, no momentum": lambda s: plain(),
    "fp16": lambda s: Recipe(Compression.fp16),
    "bf16": lambda s: Recipe(Compression.bf16),
    "PowerSGD, rank 2": lambda s: Recipe(low_rank=2),
    "PowerSGD, rank 4": lambda s: Recipe(low_rank=4),
    "topk, momentum after": lambda s: Recipe(Compression.topk(s.density)),
    "topk, no momentum": lambda s: plain(Compression.topk(s.density)),
    "topk": lambda s: corrected(Compression.topk, s.density),
    "topk, int8": lambda s: corrected(Compression.topk, s.density, wire="packed", values="int8"),
    "DGC": deep,
    "published": lambda s: Recipe(PublishedTree(s.density)),
    "published, corrected": lambda s: corrected(PublishedTree, s.density),
    "gtopk, momentum after": lambda s: Recipe(gtopk(s.density)),
    "gtopk, momentum after, int8": lambda s: Recipe(gtopk(s.density, wire="packed", values="int8")),
    "gtopk, momentum after, int8, growth 2": lambda s: Recipe(
        gtopk(s.density, wire="packed", values="int8", growth=2.0)
    ),
    "gtopk, momentum after, int8, growth 4": lambda s: Recipe(
        gtopk(s.density, wire="packed", values="int8", growth=4.0)
    ),
    "gtopk, momentum after, int8, growth 8": lambda s: Recipe(
        gtopk(s.density, wire="packed", values="int8", growth=8.0)
    ),
    "gtopk, momentum after, int8, growth 16": lambda s: Recipe(
        gtopk(s.density, wire="packed", values="int8", growth=16.0)
    ),
    "gtopk, no momentum": lambda s: plain(gtopk(s.density)),
    "gtopk, no momentum, growth 2": lambda s: plain(gtopk(s.density, growth=2.0)),
    "gtopk, no momentum, growth 4": lambda s: plain(gtopk(s.density, growth=4.0)),
    "oktopk, no momentum, k_out 4": lambda s: plain(Compression.oktopk(s.density, k_out=4.0)),
    "gtopk": lambda s: corrected(gtopk, s.density),
    "gtopk, unmasked": lambda s: corrected(gtopk, s.density, factor_masking=False),
    "gtopk, unmasked, int8, growth 4": lambda s: corrected(
        gtopk, s.density, wire="packed", values="int8", growth=4.0, factor_masking=False
    ),
    "gtopk, unmasked, int8, growth 16": lambda s: corrected(
        gtopk, s.density, wire="packed", values="int8", growth=16.0, factor_masking=False
    ),
    "topk, unmasked": lambda s: corrected(Compression.topk, s.density, factor_masking=False),
    "gtopk, warm-up": lambda s: corrected(gtopk, s.density, warmup_steps=tenth(s)),
    "gtopk, vectors dense": lambda s: corrected(gtopk, s.density, dense_vectors=True),
    "gtopk, by parameter": lambda s: corrected(gtopk, s.density)._replace(
        options={"bucket_bytes": 1}
    ),
    "gtopk, growth 4": lambda s: corrected(gtopk, s.density, growth=4.0),
    "gtopk, int8": lambda s: corrected(gtopk, s.density, wire="packed", values="int8"),
    "gtopk, int8, growth 4": lambda s: corrected(
        gtopk, s.density, wire="packed", values="int8", growth=4.0
    ),
    "gtopk, int8, bytes of exact": lambda s: corrected(
        gtopk, as_many_bytes_as_exact(s), wire="packed", values="int8"
    ),
    "gtopk, bytes of topk": lambda s: corrected(
        gtopk, equal_bytes_density(s.density, s.ranks, growth=1.0)
    ),
    "gtopk across nodes of 4": lambda s: corrected(
        Compression.hierarchical, s.density, growth=1.0
    )._replace(node_size=4),
    "gtopk across dense nodes of 4": lambda s: corrected(
        Compression.hierarchical, s.density, inside="dense", growth=1.0
    )._replace(node_size=4),
    "oktopk": lambda s: corrected(Compression.oktopk, s.density),
    "oktopk, k_out 4": lambda s: corrected(Compression.oktopk, s.density, k_out=4.0),
    "shards, 3 bits": lambda s: Recipe(Compression.shards(1, 3)),
    "shards, 4 bits": lambda s: Recipe(Compression.shards(1, 4)),
    "AdamW": lambda s: Recipe(adam=True),
    "AdamW, 3 times the rate": lambda s: Recipe(adam=True, rate=3.0),
    "AdamW, tuned": lambda s: Recipe(adam=True, rate=1.2, ramp=RAMP),
    "AdamW before, gtopk, int8": lambda s: adamw_before(s.density),
    "AdamW before, gtopk, int3": lambda s: adamw_before(s.density, values="int3"),
    "AdamW before, gtopk, int2": lambda s: adamw_before(s.density, values="int2"),
    "AdamW, fp16, tuned": lambda s: Recipe(Compression.fp16, adam=True, rate=1.2, ramp=RAMP),
    "AdamW before, topk, int3": lambda s: Recipe(
        Compression.topk(s.density, wire="packed", values="int3"), adam=True, rate=1.2, ramp=RAMP
    ),
    "AdamW before, shards": lambda s: adamw_shards(2),
    "AdamW before, shards of 4": lambda s: adamw_shards(4),
    "AdamW before, shards of 8": lambda s: adamw_shards(8),
    "AdamW before, shards of 16": lambda s: adamw_shards(16),
    "AdamW, 4 local steps": lambda s: local_adamw(4, Compression.none),
    "AdamW, 8 local steps": lambda s: local_adamw(8, Compression.none),
    "AdamW, 32 local steps": lambda s: local_adamw(32, Compression.none),
    "AdamW, 8 local steps, DiLoCo": lambda s: local_adamw(8, Compression.none, nesterov),
    "AdamW, 32 local steps, DiLoCo": lambda s: local_adamw(32, Compression.none, nesterov),
    "AdamW, 4 local steps, 4 bits": lambda s: local_adamw(4, Compression.shards(1, 4)),
    "AdamW, 8 local steps, 4 bits": lambda s: local_adamw(8, Compression.shards(1, 4)),
    "AdamW, 8 local steps, 4 bits, overlap 4": lambda s: local_adamw(
        8, Compression.shards(1, 4), overlap_steps=4
    ),
    "AdamW, 8 local steps, 4 bits, fragments 4": lambda s: local_adamw(
        8, Compression.shards(1, 4), fragments=4
    ),
    "AdamW, 8 local steps, tuned DiLoCo": lambda s: local_adamw(
        8, Compression.none, gentle_nesterov
    ),
    "AdamW, 32 local steps, 4 bits": lambda s: local_adamw(32, Compression.shards(1, 4)),
    "AdamW, 8 local steps, gtopk, int3": lambda s: local_adamw(
        8, gtopk(s.density, wire="packed", values="int3", growth=2.0)
    ),
    "AdamW, 8 local steps, gtopk, int3, decay 0.95": lambda s: local_adamw(
        8, gtopk(s.density, wire="packed", values="int3", growth=2.0), residual_decay=0.95
    ),
    "AdamW before, gtopk, int8, dense's rate": lambda s: adamw_before(s.density, rate=1.0),
    "AdamW before, gtopk, int8, residual not applied": lambda s: adamw_before(
        s.density, local_residual=False
    ),
    "AdamW, topk": lambda s: Recipe(Compression.topk(s.density), adam=True, options=AFTER),
    "AdamW, gtopk": lambda s: Recipe(gtopk(s.density), adam=True, options=AFTER),
    "AdamW, gtopk, raised rate": lambda s: Recipe(
        gtopk(s.density), adam=True, rate=s.density**-0.5, options=AFTER
    ),
    "AdamW, gtopk, warm-up": lambda s: Recipe(
        gtopk(s.density, warmup_steps=tenth(s)), adam=True, options=AFTER
    ),
    "AdamW, gtopk, growth 4": lambda s: Recipe(
        gtopk(s.density, growth=4.0), adam=True, options=AFTER
    ),
    "AdamW, PowerSGD, rank 2": lambda s: Recipe(adam=True, low_rank=2),
    "AdamW, PowerSGD, rank 4": lambda s: Recipe(adam=True, low_rank=4),
    "AdamW, PowerSGD, rank 4, tuned": lambda s: Recipe(adam=True, low_rank=4, rate=1.2, ramp=RAMP),
    "AdamW, PowerSGD, rank 2, tuned": lambda s: Recipe(adam=True, low_rank=2, rate=1.2, ramp=RAMP),
    "AdamW before, PowerSGD, rank 4": lambda s: Recipe(
        adam=True, low_rank=4, rate=1.2, ramp=RAMP, options={"betas": BETAS}
    ),
    "DeMo": lambda s: Recipe(adam=True, decoupled=32, rate=3.0, ramp=RAMP),
    "Adam before, topk": lambda s: adam_before(Compression.topk, s.density),
    "Adam before, gtopk": lambda s: adam_before(gtopk, s.density),
    "Adam before, gtopk, int8, growth 2": lambda s: adam_before(
        gtopk, s.density, wire="packed", values="int8", growth=2.0
    ),
    "Adam before, gtopk, int8, growth 4": lambda s: adam_before(
        gtopk, s.density, wire="packed", values="int8", growth=4.0
    ),
}
