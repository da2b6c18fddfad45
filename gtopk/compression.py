"""Compression: ways to send gradients; sparse methods as frozen records, Horovod's as classes."""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch

from collectives.algorithms import Regions
from collectives.algorithms.gtopk import USUAL_GROWTH
from collectives.cost_model import Candidate
from collectives.wire import WHOLE, Format
from collectives.wire.format import (
    CHOSEN_FROM,
    CODES_OF_BITS,
    INDEX_CODES,
    USUAL_INDICES,
    VALUE_CODES,
)

from .errors import check_choice, check_count, check_number


class Compressor:
    """Horovod's interface: tensors are reduced in another form, entry by entry.

    Subclass it and pass the class itself. The form must be linear: the sum of compressed tensors
    must be the compressed sum.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to reduce, and a context for `decompress`."""
        raise TypeError("compress of this Compressor is not defined; subclass it")

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced tensor in its original form."""
        raise TypeError("decompress of this Compressor is not defined; subclass it")


class NoneCompressor(Compressor):
    """Send gradients as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Send floating-point gradients as float16."""

    sent_as = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.sent_as) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Send floating-point gradients as bfloat16: float32's range, and 8 significant bits."""

    sent_as = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback:
    """Send a part of the gradient's entries; keep the rest in a residual."""

    # 0: the wrapped optimizer's momentum works on the reduced gradient. Above 0: momentum with this
    # factor is taken before selection, on each rank (Lin et al. 2018, section 3.2: momentum
    # correction), and the wrapped optimizer's momentum must be 0. Momentum then no longer
    # multiplies its weight decay: give 1 / (1 - momentum) times as much for the same effect.
    momentum_correction: float = 0.0
    # With it, True: the velocity of sent entries is cleared (section 3.3: factor masking). False:
    # it goes on, so that a gradient moves the model as far as momentum without a selection would
    # (docs/tuning.md).
    factor_masking: bool = False
    # (beta1, beta2), say (0.9, 0.999): each rank takes Adam's moments of its own gradients, before
    # the selection; Adam's steps are selected and kept in the residual (Chen et al. 2021).
    # The wrapped optimizer is then SGD without momentum, whose weight decay acts as AdamW's.
    adam_correction: tuple[float, float] | None = None
    # Parameters that travel whole, beside the others: regular expressions found in their names,
    # all of one dimension and less (biases and norms), and those of fewer elements than this.
    dense: tuple[str, ...] = ()
    dense_vectors: bool = False
    dense_under: int = 0
    # How indices travel: "raw" takes the least time and the most bytes, "packed" the other way
    # round; "auto": what is quickest on this network.
    wire: str = USUAL_INDICES
    # How values travel: "exact", or "bf16", "fp16", "int8", "int4", "int3", "int2": fewer bytes,
    # and the rounding error stays in the residual; "auto": the quickest of 8 bits and more.
    values: str = "exact"

    def __post_init__(self) -> None:
        check_choice("wire", self.wire, (*INDEX_CODES, "auto"))
        check_choice("values", self.values, (*VALUE_CODES, "auto"))
        if isinstance(self.dense, str):
            object.__setattr__(self, "dense", (self.dense,))
        for pattern in self.dense:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(f"dense takes regular expressions, got {pattern!r}") from error
        check_count("dense_under", self.dense_under)
        if not isinstance(self.factor_masking, bool):
            raise TypeError(f"factor_masking must be True or False, got {self.factor_masking!r}")
        check_number("momentum_correction", self.momentum_correction)
        if not 0.0 <= self.momentum_correction < 1.0:
            raise ValueError(
                f"momentum_correction must lie in [0, 1), got {self.momentum_correction}"
            )
        if self.factor_masking and not self.momentum_correction:
            raise ValueError(
                "factor_masking=True resets the momentum of sent entries and requires "
                "momentum_correction"
            )
        if self.adam_correction is not None:
            object.__setattr__(self, "adam_correction", check_betas(self.adam_correction))
            if self.momentum_correction:
                raise ValueError("give momentum_correction or adam_correction, which has its own")

    @property
    def corrects(self) -> bool:
        """Tell whether momentum is taken before the selection: SGD's or Adam's."""
        return bool(self.correction)

    @property
    def correction(self) -> str:
        """Return the option by which momentum is taken before the selection; "" without one."""
        if self.adam_correction is not None:
            return f"adam_correction={self.adam_correction}"
        momentum = self.momentum_correction
        return f"momentum_correction={momentum}" if momentum else ""

    def is_dense(self, name: str, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter's gradient travels whole."""
        return (
            parameter.numel() < self.dense_under
            or (self.dense_vectors and parameter.dim() <= 1)
            or any(re.search(pattern, name) for pattern in self.dense)
        )

    def formats(self) -> list[Format]:
        """Return the formats to choose from."""
        wires = INDEX_CODES if self.wire == "auto" else (self.wire,)
        values = CHOSEN_FROM if self.values == "auto" else (self.values,)
        return [Format(indices, code) for indices in wires for code in values]

    def signature(self) -> str:
        """Return the options in words, which must be equal on all ranks."""
        # dataclasses list inherited fields first, which would put the density last.
        names = [field.name for field in sorted(fields(self), key=lambda f: f.kw_only is True)]
        return " ".join(f"{name}={getattr(self, name)}" for name in names)


@dataclass(frozen=True)
class SparseCompression(ErrorFeedback):
    """Send the k = density * n entries of largest magnitude."""

    # Lower: less traffic, slower convergence per step. Under about 500 entries left, accuracy
    # suffers: small models want 0.01 and more.
    density: float = 0.001
    _: KW_ONLY
    # Above 0: the first steps send more, from `warmup_from` down to `density` in equal ratios
    # (Lin et al. 2018, section 3.3). Higher: a smoother start, and more bytes in it.
    warmup_steps: int = 0
    warmup_from: float = 0.25

    algorithm: ClassVar[str]

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_density("warmup_from", self.warmup_from)
        check_count("warmup_steps", self.warmup_steps)
        super().__post_init__()

    def density_at(self, steps: int) -> float:
        """Return the density of the step after `steps` steps."""
        # A density above `warmup_from` needs no warm-up: its first steps would send less, not more.
        if steps >= self.warmup_steps or self.warmup_from <= self.density:
            return self.density
        # In equal ratios, as Lin et al. do: equal differences would stay near `warmup_from` for
        # long.
        share = steps / self.warmup_steps
        return float(self.warmup_from ** (1.0 - share) * self.density**share)

    def widening(self) -> float:
        """Return how many entries the update may have, over those that a rank selects."""
        return 1.0

    def widened(self, widening: float) -> SparseCompression:
        """Return this compression with another widening; raise ValueError where it has none."""
        if widening != 1.0:
            raise ValueError(f"{self.algorithm} has no widening, got {widening:g}")
        return self

    def candidate(self, format: Format) -> Candidate:
        """Return the candidate by which the cost model knows this compression."""
        return Candidate(self.algorithm, self.density, format, self.widening())

    def options(self, k: int, length: int) -> dict[str, Any]:
        """Return the algorithm's options besides k and the format."""
        return {}

    def signature(self) -> str:
        return f"{self.algorithm} {super().signature()}"


@dataclass(frozen=True)
class TopK(SparseCompression):
    """Send every rank's k entries to every rank; an update has up to k times world size entries."""

    algorithm: ClassVar[str] = "topk-allgather"


@dataclass(frozen=True)
class GTopK(SparseCompression):
    """Global top-k: the ranks agree on one set of k entries, or some more (Shi et al. 2019).

    Begin with density=0.01, and compare with a dense run; halve it while accuracy stays.

    density: the share of the entries that a rank sends in a step. Lower: fewer bytes, slower
        convergence by step. Under about 500 entries a step accuracy suffers.
    warmup_steps, warmup_from: begin at the density `warmup_from`, and reach `density` in
        `warmup_steps`.
    growth: the update holds up to growth * k entries. Higher: it converges better, for few bytes
        more; 1 is the paper's.
    momentum_correction: take SGD's momentum, say 0.9, before the selection, and set the
        optimizer's own to 0: better than momentum after it. factor_masking: clear the velocity of
        sent entries.
    adam_correction: Adam's betas, to make its steps before the selection under a plain SGD.
    dense, dense_vectors, dense_under: parameters that travel whole: by regular expressions on
        their names, all vectors (biases and norms), or those of fewer elements.
    wire, values: "packed" and "int8" cut the bytes to about a third, and take time to encode;
        rounding errors stay in the residual. "auto" takes the quickest on this network.
    Raises ValueError for an option out of its range. Measurements: docs/tuning.md.
    """

    _: KW_ONLY
    # Higher: updates of up to growth * k entries, for few more bytes in the last rounds. 1 is the
    # paper's; 2 sends no byte more on a power of two ranks, and loses less (docs/tuning.md).
    growth: float = USUAL_GROWTH

    algorithm: ClassVar[str] = "gtopk"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_widening("growth", self.growth)

    def widening(self) -> float:
        return self.growth

    def widened(self, widening: float) -> SparseCompression:
        return replace(self, growth=widening)

    def options(self, k: int, length: int) -> dict[str, Any]:
        return {"growth": self.growth}


@dataclass(frozen=True)
class OkTopK(SparseCompression):
    """Send the exact top-k of all picks' sum, in P - 1 or more messages (Li and Hoefler 2022)."""

    _: KW_ONLY
    # Entries of the update over those that a rank selects. Higher: wider updates, more bytes to
    # gather them: 4 costs about what gtopk does on 32 ranks.
    k_out: float = 1.0

    algorithm: ClassVar[str] = "oktopk"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_widening("k_out", self.k_out)

    def widening(self) -> float:
        return self.k_out

    def widened(self, widening: float) -> SparseCompression:
        return replace(self, k_out=widening)

    def options(self, k: int, length: int) -> dict[str, Any]:
        """Return the options; `regions` is a new object that keeps boundaries from step to step."""
        return {"k_out": min(length, round(self.k_out * k)), "regions": Regions()}


@dataclass(frozen=True)
class Hierarchical(SparseCompression):
    """Sum inside each node, and exchange between nodes by gtopk or oktopk, a node as one rank."""

    _: KW_ONLY
    across: str = "gtopk"  # or "oktopk"
    growth: float = USUAL_GROWTH  # of gtopk across nodes
    # Summed inside a node: each rank's "picks"; or "dense", the whole gradients, and the node picks
    # from the sum (Shi et al. 2021, HiTopKComm). Dense: better picks, more bytes inside; on the
    # host only.
    inside: str = "picks"
    # How many ranks, in their order, make a node, as those of a site. None: those of each host.
    node_size: int | None = None

    algorithm: ClassVar[str] = "hierarchical"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("across", self.across, ("gtopk", "oktopk"))
        check_choice("inside", self.inside, ("picks", "dense"))
        check_widening("growth", self.growth)
        if self.inside == "dense" and self.adam_correction is not None:
            raise ValueError(
                "adam_correction takes the moments of each rank's gradients, which inside='dense' "
                "adds up before: use inside='picks'"
            )
        if self.across != "gtopk" and self.growth != USUAL_GROWTH:
            raise ValueError(f"growth is of across='gtopk', got across={self.across!r}")
        if self.node_size is not None:
            check_count("node_size", self.node_size)
            if self.node_size == 0:
                raise ValueError("node_size must be at least 1, got 0; None takes hosts for nodes")

    def widening(self) -> float:
        return self.growth if self.across == "gtopk" else 1.0

    def widened(self, widening: float) -> SparseCompression:
        return replace(self, growth=widening)

    def options(self, k: int, length: int) -> dict[str, Any]:
        if self.across == "oktopk":
            return {"across": self.across, "regions": Regions()}
        return {"across": self.across, "growth": self.growth}


@dataclass(frozen=True)
class Shards(SparseCompression):
    """Send one shard of the residual a step, all of it, in few bits; no indices travel.

    Step t sends the entries of shard t mod `period`, rounded, to the owners of its parts; each adds
    its part up and sends the sum, rounded, to all. Rounding errors wait for the shard's next turn,
    at each rank and at the owner. As good as a selection where all entries are of similar size, as
    Adam's steps are, and cheaper on many ranks.
    """

    density: float = field(init=False, default=0.25)  # 1 / period
    # Higher: less traffic, and each entry waits for longer.
    period: int = 4
    # For a value: 2, 3, 4, 8, 16, or 32, which rounds nothing. Fewer: less traffic, more rounding.
    bits: int = 3
    _: KW_ONLY
    warmup_steps: int = field(init=False, default=0)
    warmup_from: float = field(init=False, default=0.25)
    factor_masking: bool = field(init=False, default=False)
    wire: str = field(init=False, default=USUAL_INDICES)
    values: str = field(init=False, default="int3")

    algorithm: ClassVar[str] = "shards"

    def __post_init__(self) -> None:
        check_count("period", self.period, 1)
        if isinstance(self.bits, bool) or self.bits not in CODES_OF_BITS:
            raise ValueError(
                f"bits must be one of {', '.join(map(str, CODES_OF_BITS))}; got {self.bits!r}"
            )
        # Before the checks of the base class, which read both.
        object.__setattr__(self, "density", 1.0 / self.period)
        object.__setattr__(self, "values", CODES_OF_BITS[self.bits])
        super().__post_init__()

    def formats(self) -> list[Format]:
        return [Format(WHOLE, self.values)]

    def signature(self) -> str:
        """Return the options, which must be equal on all ranks."""
        # Fields without init follow from the others: ranks that differ in them would be named
        # twice.
        given = [each for each in fields(self) if each.init]
        names = [each.name for each in sorted(given, key=lambda f: f.kw_only is True)]
        return " ".join([self.algorithm, *(f"{name}={getattr(self, name)}" for name in names)])


@dataclass(frozen=True, kw_only=True)
class Automatic(ErrorFeedback):
    """Run the method that trains fastest here within a budget, dense included; measure it again.

    The budget is one of density, bytes_per_step and hide_behind_backward; without any, the
    `usual_density` of the model. Of the methods that keep it, the one runs that ends a training of
    `steps` first, with the further steps that narrow updates need (docs/tuning.md).
    """

    # Every sparse method sends this share of the entries.
    density: float | None = None
    # No rank sends more in a step; of the methods, the one that updates the most coordinates runs.
    bytes_per_step: float | None = None
    # True: the largest density whose exchange takes no longer than the backward pass: for several
    # buckets, which are exchanged while it goes on.
    hide_behind_backward: bool = False
    # Of the whole training. Fewer: methods that update more coordinates a step are preferred, dense
    # most.
    steps: int = 10_000
    wire: str = "auto"
    # Rounding errors come back through the residual (docs/tuning.md).
    values: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.hide_behind_backward, bool):
            raise TypeError(
                f"hide_behind_backward must be True or False, got {self.hide_behind_backward!r}"
            )
        check_count("steps", self.steps, 1)
        given = {
            name: getattr(self, name)
            for name in ("density", "bytes_per_step", "hide_behind_backward")
            if getattr(self, name) is not None and getattr(self, name) is not False
        }
        if len(given) > 1:
            told = ", ".join(f"{name}={value}" for name, value in given.items())
            raise ValueError(f"give one budget, not several: {told}")
        if self.density is not None:
            check_density("density", self.density)
        if self.bytes_per_step is not None:
            check_number("bytes_per_step", self.bytes_per_step)
            if not 0.0 < self.bytes_per_step < math.inf:
                raise ValueError(
                    f"bytes_per_step must be above 0 and finite, got {self.bytes_per_step}"
                )

    def density_of(self, elements: float) -> float | None:
        """Return the density for a model of `elements` values; None: the budget is another one."""
        if self.bytes_per_step is not None or self.hide_behind_backward:
            return None
        return self.density or usual_density(elements)

    def signature(self) -> str:
        return f"auto {super().signature()}"


def usual_density(elements: float) -> float:
    """Return the density to begin with for a model of `elements` values: 1,000 entries a step."""
    return min(1.0, max(0.001, 1000.0 / elements))


def selected(density: float, length: int) -> int:
    """Return k for a vector of `length` elements: at least 1."""
    return max(1, round(length * density))


def check_density(name: str, value: float) -> None:
    """Raise TypeError for a value that is no number, ValueError for one out of (0, 1]."""
    check_number(name, value)
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} must lie in (0, 1], got {value}")


def check_betas(value: object) -> tuple[float, float]:
    """Return Adam's two betas as floats; raise TypeError or ValueError for anything else."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(
            f"adam_correction must be Adam's betas, say (0.9, 0.999), or None, got {value!r}"
        )
    for beta in value:
        check_number("adam_correction", beta)
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"adam_correction's betas must lie in [0, 1), got {value!r}")
    return float(value[0]), float(value[1])


def check_widening(name: str, value: float) -> None:
    """Raise TypeError for a value that is no number, ValueError for one below 1 or infinite."""
    check_number(name, value)
    if not 1.0 <= value < math.inf:
        raise ValueError(f"{name} must be a number from 1 on, got {value}")


# The type of an optimizer's `compression`: a Compressor class, or a method with a residual.
Compressing = type[Compressor] | ErrorFeedback


class Compression:
    """The choices: `Compression.none`, `.gtopk(density=0.001)`, `.auto(bytes_per_step=1e6)`, ..."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    topk = TopK
    gtopk = GTopK
    oktopk = OkTopK
    hierarchical = Hierarchical
    shards = Shards
    auto = Automatic
