"""Compression methods for gradients: sparse ones as frozen dataclasses, Horovod's as classes."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch

from collectives.algorithms import Regions
from collectives.algorithms.gtopk import USUAL_GROWTH
from collectives.cost_model import Candidate
from collectives.cost_model.prediction import WIDENING_OPTIONS
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
    """Horovod's interface for reducing tensors in a compressed form.

    Subclass it and pass the class itself. Compression must work entry by entry and be linear: the
    sum of compressed tensors must equal the compressed sum.
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
    """Send gradients uncompressed."""

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

    # 0: the wrapped optimizer applies its momentum to the reduced gradient. Above 0: each rank
    # applies momentum with this factor before the selection (Lin et al. 2018, section 3.2: momentum
    # correction), and the wrapped optimizer's momentum must be 0. Momentum then no longer amplifies
    # weight decay: for the same effect, set it to 1 / (1 - momentum) times the value.
    momentum_correction: float = 0.0
    # Used with momentum_correction. True: clear the velocity of sent entries (section 3.3: factor
    # masking). False: keep it, so that a gradient moves the model as far as plain momentum would
    # (docs/tuning.md).
    factor_masking: bool = False
    # (beta1, beta2), for example (0.9, 0.999): each rank updates Adam's moments from its own
    # gradients, then selects from Adam's steps; the rest of them stays in the residual (Chen et al.
    # 2021). The wrapped optimizer must be SGD without momentum; its weight decay acts as AdamW's.
    adam_correction: tuple[float, float] | None = None
    # Parameters that are sent whole: those whose name matches one of these regular expressions
    # (re.search), all with at most one dimension (biases and norms), and those with fewer elements
    # than dense_under.
    dense: tuple[str, ...] = ()
    dense_vectors: bool = False
    dense_under: int = 0
    # Index encoding. "raw": least time, most bytes; "packed": most time, fewest bytes; "auto": the
    # fastest on this network.
    wire: str = USUAL_INDICES
    # Value encoding. "exact"; or "bf16", "fp16", "int8", "int4", "int3", "int2": fewer bytes, and
    # the rounding error stays in the residual; "auto": the fastest one with 8 bits or more.
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
                raise ValueError("give momentum_correction or adam_correction, not both")

    @property
    def corrects(self) -> bool:
        """Tell whether momentum, SGD's or Adam's, is applied before the selection."""
        return bool(self.correction)

    @property
    def correction(self) -> str:
        """Return the option that applies momentum before the selection, as text; "" if none."""
        if self.adam_correction is not None:
            return f"adam_correction={self.adam_correction}"
        momentum = self.momentum_correction
        return f"momentum_correction={momentum}" if momentum else ""

    def is_dense(self, name: str, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter's gradient is sent whole."""
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
        """Return the options as text; it must be equal on all ranks."""
        # Positional fields first: dataclasses list inherited ones first, so density would be last.
        names = [field.name for field in sorted(fields(self), key=lambda f: f.kw_only is True)]
        return " ".join(f"{name}={getattr(self, name)}" for name in names)


@dataclass(frozen=True)
class SparseCompression(ErrorFeedback):
    """Send the k = density * n entries of largest magnitude."""

    density: float = 0.001
    _: KW_ONLY
    # Above 0: the density falls from `warmup_from` to `density` over this many steps, by an equal
    # ratio each step (Lin et al. 2018, section 3.3). Higher: a smoother start that sends more.
    warmup_steps: int = 0
    warmup_from: float = 0.25

    algorithm: ClassVar[str]

    def __post_init__(self) -> None:
        check_density("density", self.density)
        check_density("warmup_from", self.warmup_from)
        check_count("warmup_steps", self.warmup_steps)
        if (option := WIDENING_OPTIONS.get(self.algorithm)) is not None:
            check_widening(option, getattr(self, option))
        super().__post_init__()

    def density_at(self, steps: int) -> float:
        """Return the density of the step that follows `steps` steps."""
        # A density above `warmup_from` needs no warm-up: its first steps would send less, not more.
        if steps >= self.warmup_steps or self.warmup_from <= self.density:
            return self.density
        # Equal ratios, as in Lin et al.: with equal differences the density would fall too slowly.
        share = steps / self.warmup_steps
        return float(self.warmup_from ** (1.0 - share) * self.density**share)

    def widening(self) -> float:
        """Return the factor by which an update may have more entries than a rank selects."""
        option = WIDENING_OPTIONS.get(self.algorithm)
        return 1.0 if option is None else float(getattr(self, option))

    def widened(self, widening: float) -> SparseCompression:
        """Return a copy with another widening; raise ValueError if the method has none."""
        if self.algorithm in WIDENING_OPTIONS:
            changed: dict[str, Any] = {WIDENING_OPTIONS[self.algorithm]: widening}
            return replace(self, **changed)
        if widening != 1.0:
            raise ValueError(f"{self.algorithm} has no widening, got {widening:g}")
        return self

    def candidate(self, format: Format) -> Candidate:
        """Return the cost model's description of this compression."""
        return Candidate(self.algorithm, self.density, format, self.widening())

    def options(self, k: int, length: int) -> dict[str, Any]:
        """Return the algorithm's options other than k and the format."""
        return {}

    def signature(self) -> str:
        return f"{self.algorithm} {super().signature()}"


@dataclass(frozen=True)
class TopK(SparseCompression):
    """Send every rank's k entries to every rank; an update has up to k * world size entries.

    Use it on two ranks: it sends as much as gtopk there, and merges less.
    """

    algorithm: ClassVar[str] = "topk-allgather"


@dataclass(frozen=True)
class GTopK(SparseCompression):
    """Global top-k: all ranks agree on one set of k to growth * k entries (Shi et al. 2019).

    Start with the larger of 0.001 and 1000/n for n parameters; raise it if accuracy suffers.

    density: the share of its entries that a rank sends in a step. Lower: fewer bytes, slower
        convergence per step. With fewer than about 500 entries a step accuracy suffers.
    warmup_steps, warmup_from: start at density `warmup_from` and reach `density` after
        `warmup_steps` steps.
    growth: the update has up to growth * k entries. The paper uses 1; 2 sends no extra byte on a
        power of two ranks, and loses less accuracy. Higher: better convergence on many ranks, for a
        few more bytes in the last rounds.
    momentum_correction: apply SGD's momentum, for example 0.9, before the selection, where it
        converges better; set the optimizer's own to 0, and its weight decay to 1 / (1 - momentum)
        times as much. factor_masking: clear the velocity of sent entries.
    adam_correction: Adam's betas, to compute Adam's steps before the selection; the optimizer must
        be plain SGD.
    dense, dense_vectors, dense_under: parameters that are sent whole: those whose name matches a
        regular expression, all vectors (biases and norms), or those with fewer elements.
    wire, values: "packed" and "int8" cut the bytes to about a third but take time to encode;
        rounding errors stay in the residual. "auto" picks the fastest on this network.
    Raises ValueError for an option out of its range. Measurements: docs/tuning.md.
    """

    _: KW_ONLY
    growth: float = USUAL_GROWTH

    algorithm: ClassVar[str] = "gtopk"

    def options(self, k: int, length: int) -> dict[str, Any]:
        return {"growth": self.growth}


@dataclass(frozen=True)
class OkTopK(SparseCompression):
    """Send the exact top-k of all picks' sum, in P - 1 or more messages (Li and Hoefler 2022).

    k_out: the update has k_out * k entries. Higher: wider updates, more bytes to gather them; 4
        costs about as much as gtopk on 32 ranks.
    """

    _: KW_ONLY
    k_out: float = 1.0

    algorithm: ClassVar[str] = "oktopk"

    def options(self, k: int, length: int) -> dict[str, Any]:
        """Return the options; `regions` is a new object that keeps boundaries between steps."""
        return {"k_out": round(min(length, self.k_out * k)), "regions": Regions()}


@dataclass(frozen=True)
class Hierarchical(SparseCompression):
    """Sum inside each node, then exchange between nodes by gtopk or oktopk, a node as one rank.

    across: the method between nodes: "gtopk" or "oktopk". growth: that of gtopk between nodes.
    inside: the sum inside a node. "picks": of each rank's picks. "dense": of whole gradients, from
        which the node then picks (Shi et al. 2021, HiTopKComm): better picks, more bytes inside;
        on the host only.
    node_size: so many consecutive ranks are a node, for example those of a site; None: the ranks of
        a host.
    """

    _: KW_ONLY
    across: str = "gtopk"
    growth: float = USUAL_GROWTH
    inside: str = "picks"
    node_size: int | None = None

    algorithm: ClassVar[str] = "hierarchical"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("across", self.across, ("gtopk", "oktopk"))
        check_choice("inside", self.inside, ("picks", "dense"))
        if self.inside == "dense" and self.adam_correction is not None:
            raise ValueError(
                "adam_correction needs each rank's own gradients, but inside='dense' sums them "
                "first: use inside='picks'"
            )
        if self.across != "gtopk" and self.growth != USUAL_GROWTH:
            raise ValueError(f"growth requires across='gtopk', got across={self.across!r}")
        if self.node_size is not None:
            check_count("node_size", self.node_size)
            if self.node_size == 0:
                raise ValueError("node_size must be at least 1, got 0; None makes a node per host")

    def widening(self) -> float:
        return self.growth if self.across == "gtopk" else 1.0

    def options(self, k: int, length: int) -> dict[str, Any]:
        if self.across == "oktopk":
            return {"across": self.across, "regions": Regions()}
        return {"across": self.across, "growth": self.growth}


@dataclass(frozen=True)
class Shards(SparseCompression):
    """Send one shard of the residual in each step: all its entries, in few bits, without indices.

    Step t sends the entries of shard t mod `period`, rounded, to the owners of its parts; each
    owner sums its part and sends the rounded sum to all ranks. Rounding errors, of each rank and of
    the owner, are kept until the shard's next turn. This works as well as a selection where all
    entries have similar magnitudes, as in Adam's steps, and costs less on many ranks.

    period: each entry is sent once in this many steps. Higher: less traffic, but entries wait
        longer, which costs more accuracy on more ranks (docs/tuning.md).
    bits: of a value: 2 (-1, 0 or 1, 1.6 bits on the wire), 3, 4, 8, 16 (bfloat16) or 32 (no
        rounding). Fewer: less traffic, more rounding.
    """

    density: float = field(init=False, default=0.5)  # 1 / period
    period: int = 2
    bits: int = 2
    _: KW_ONLY
    warmup_steps: int = field(init=False, default=0)
    warmup_from: float = field(init=False, default=0.25)
    factor_masking: bool = field(init=False, default=False)
    wire: str = field(init=False, default=USUAL_INDICES)
    values: str = field(init=False, default="int2")

    algorithm: ClassVar[str] = "shards"

    def __post_init__(self) -> None:
        check_count("period", self.period, 1)
        if isinstance(self.bits, bool) or self.bits not in list(CODES_OF_BITS):
            raise ValueError(
                f"bits must be one of {', '.join(map(str, CODES_OF_BITS))}; got {self.bits!r}"
            )
        # Set before the base class's checks, which read both.
        object.__setattr__(self, "density", 1.0 / self.period)
        object.__setattr__(self, "values", CODES_OF_BITS[self.bits])
        super().__post_init__()

    def formats(self) -> list[Format]:
        return [Format(WHOLE, self.values)]

    def signature(self) -> str:
        """Return the options as text; it must be equal on all ranks."""
        # Fields without init follow from the others; an error need not list a difference twice.
        given = [each for each in fields(self) if each.init]
        names = [each.name for each in sorted(given, key=lambda f: f.kw_only is True)]
        return " ".join([self.algorithm, *(f"{name}={getattr(self, name)}" for name in names)])


@dataclass(frozen=True, kw_only=True)
class Automatic(ErrorFeedback):
    """Choose the method, dense included, that trains fastest here within a budget.

    The choice is reviewed from measurements during training. Give at most one budget: density,
    bytes_per_step or hide_behind_backward.

    density: every sparse method sends this share of the entries, and the method is chosen that
        would finish `steps` steps first, counting the extra steps that narrow updates need
        (docs/tuning.md). Without any budget: the larger of 0.001 and 1000/n for n parameters.
    bytes_per_step: the most that a rank sends in a step, in bytes; the method is chosen that then
        updates the most coordinates.
    hide_behind_backward: use the largest density whose exchange takes no longer than the backward
        pass. Needs several buckets, so that exchanges overlap with it.
    steps: of the whole training. Fewer: prefers methods that update more coordinates a step, dense
        most of all.
    """

    density: float | None = None
    bytes_per_step: float | None = None
    hide_behind_backward: bool = False
    steps: int = 10_000
    wire: str = "auto"
    # The residual makes up for rounding errors (docs/tuning.md).
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
            budgets = ", ".join(f"{name}={value}" for name, value in given.items())
            raise ValueError(f"give one budget, not several: {budgets}")
        if self.density is not None:
            check_density("density", self.density)
        if self.bytes_per_step is not None:
            check_number("bytes_per_step", self.bytes_per_step)
            if not 0.0 < self.bytes_per_step < math.inf:
                raise ValueError(
                    f"bytes_per_step must be above 0 and finite, got {self.bytes_per_step}"
                )

    def density_of(self, elements: float) -> float | None:
        """Return the density for a model of `elements` values; None if another budget is given."""
        if self.bytes_per_step is not None or self.hide_behind_backward:
            return None
        return self.density or usual_density(elements)

    def signature(self) -> str:
        return f"auto {super().signature()}"


def usual_density(elements: float) -> float:
    """Return a starting density for a model of `elements` values: 1,000 entries a step."""
    return min(1.0, max(0.001, 1000.0 / elements))


def selected(density: float, length: int) -> int:
    """Return k for a vector of `length` elements, at least 1."""
    return max(1, round(length * density))


def check_density(name: str, value: float) -> None:
    """Raise TypeError if the value is not a number, ValueError if it is not in (0, 1]."""
    check_number(name, value)
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} must lie in (0, 1], got {value}")


def check_betas(value: object) -> tuple[float, float]:
    """Return Adam's two betas as floats; raise TypeError or ValueError for anything else."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(
            f"adam_correction must be Adam's betas, such as (0.9, 0.999), or None, got {value!r}"
        )
    for beta in value:
        check_number("adam_correction", beta)
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"adam_correction's betas must lie in [0, 1), got {value!r}")
    return float(value[0]), float(value[1])


def check_widening(name: str, value: float) -> None:
    """Raise TypeError if the value is not a number, ValueError if it is below 1 or infinite."""
    check_number(name, value)
    if not 1.0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be a number from 1 on, got {value}")


# The type of an optimizer's `compression`: a Compressor class, or a method with a residual.
Compressing = type[Compressor] | ErrorFeedback


class Compression:
    """All methods: `Compression.none`, `.gtopk(density=0.001)`, `.auto(bytes_per_step=1e6)`, ..."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    topk = TopK
    gtopk = GTopK
    oktopk = OkTopK
    hierarchical = Hierarchical
    shards = Shards
    auto = Automatic
