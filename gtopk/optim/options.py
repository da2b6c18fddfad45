"""Options: the checked arguments of DistributedOptimizer for reducing gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from ..compression import (
    Automatic,
    ErrorFeedback,
    Shards,
    SparseCompression,
    selected,
)
from ..errors import check_count, check_number
from ..exchange.adamw import AdamGroups
from ..exchange.automatic import hides_behind_backward
from ..exchange.bucket_exchange import require_compression
from ..reduce_ops import NAMES, Adasum, Average, Sum
from ..runtime.world.process_sets import ProcessSet, require_process_set
from .step_checks import require_check

_log = logging.getLogger("gtopk")
# Measured: below this, accuracy suffers whatever the other settings (docs/accuracy.md).
FEW_ENTRIES: Final = 500

# A number of groups, or lists of the parameters in each.
Groups = int | Sequence[Sequence[torch.nn.Parameter]] | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for reducing an optimizer's gradients; `DistributedOptimizer` documents each.

    adam: the groups of an AdamW with steps computed before the selection; None: it steps itself.
    local_residual: whether forward and backward include this rank's unsent steps.
    """

    compression: Any
    op: int
    gradient_predivide_factor: float
    groups: Groups
    sparse_as_dense: bool
    process_set: ProcessSet
    missing_gradients: Literal["error", "zeros"]
    overlap: bool
    bucket_bytes: int | None
    local_clip_norm: float | None
    global_clip_norm: float | None
    check_every: int | None
    on_divergence: Literal["error", "warn", "heal"] | None
    max_skipped_steps: int
    adam: AdamGroups | None = None
    local_residual: bool = False

    def __post_init__(self) -> None:
        require_compression(self.compression)
        require_process_set(self.process_set)
        if self.op not in (Average, Sum, Adasum):
            raise ValueError(
                f"op must be Average, Sum or Adasum, got {NAMES.get(self.op, self.op)}"
            )
        factor = self.gradient_predivide_factor
        check_number("gradient_predivide_factor", factor)
        if factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor is for op=Average only")
        if not 0 < factor < math.inf:
            raise ValueError(f"gradient_predivide_factor must be above 0 and finite, got {factor}")
        if self.missing_gradients not in ("error", "zeros"):
            raise ValueError(
                f"missing_gradients must be 'error' or 'zeros', got {self.missing_gradients!r}"
            )
        for name in ("local_clip_norm", "global_clip_norm"):
            value = getattr(self, name)
            if value is None:
                continue
            check_number(name, value)
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        require_check(self.check_every, self.on_divergence, ("error", "warn", "heal"))
        check_count("max_skipped_steps", self.max_skipped_steps)
        self._check_buckets()
        self._refuse_clipping_of_steps()
        if hides_behind_backward(self.compression):
            self._require_overlap()
        if self.op == Adasum:
            self._refuse_gradient_options()

    def _refuse_clipping_of_steps(self) -> None:
        feedback = self.feedback
        if feedback is None or not feedback.corrects:
            return
        if self.global_clip_norm is not None:
            raise ValueError(
                f"global_clip_norm is not for {feedback.correction}: it would shorten steps, which "
                f"are far longer than gradients. {instead_of_clipping(feedback)}"
            )
        if feedback.adam_correction and self.local_clip_norm is not None:
            raise ValueError(
                "local_clip_norm is not for adam_correction: the length of Adam's steps does not "
                f"depend on that of the gradients. {instead_of_clipping(feedback)}"
            )

    def _refuse_gradient_options(self) -> None:
        for name in ("local_clip_norm", "global_clip_norm", "check_every", "on_divergence"):
            if getattr(self, name) not in (None, 0):  # check_every=0 requests nothing either
                raise ValueError(
                    f"{name} is not for op=Adasum: ranks step with gradients of their own"
                )

    def _require_overlap(self) -> None:
        values = {"overlap": True, "local_clip_norm": None}
        if self.adam is not None:
            values["global_clip_norm"] = None
        for name, usual in values.items():
            if (value := getattr(self, name)) != usual:
                raise ValueError(
                    f"hide_behind_backward=True is not for {name}={value}, with which gradients "
                    "are exchanged after the backward pass; give density= or bytes_per_step="
                )

    def _check_buckets(self) -> None:
        if self.bucket_bytes is not None:
            check_count("bucket_bytes", self.bucket_bytes)
            if self.groups is not None:
                raise ValueError("give bucket_bytes or groups, not both")
        _check_groups(self.groups)

    def elements_compressed(self, parameters: Iterable[torch.nn.Parameter]) -> int:
        """Return how many elements have gradients to compress; sparse ones are not compressed."""
        return sum(
            p.numel()
            for p in parameters
            if p.requires_grad and (self.sparse_as_dense or p.grad is None or not p.grad.is_sparse)
        )

    @property
    def clips_before(self) -> bool:
        """Return whether gradients are clipped before any of them is exchanged."""
        clips_mean = self.adam is not None and self.global_clip_norm is not None
        return self.local_clip_norm is not None or clips_mean

    @property
    def feedback(self) -> ErrorFeedback | None:
        """Return the compression if it has a residual, else None."""
        return self.compression if isinstance(self.compression, ErrorFeedback) else None

    def signature(self) -> list[str]:
        """Return a description of the options that must be equal on all ranks."""
        # Leave out groups, bucket_bytes and overlap: all ranks use rank 0's plan, and submitting a
        # bucket earlier does not change the result.
        return [
            f"op={NAMES[self.op]}",
            f"gradient_predivide_factor={self.gradient_predivide_factor:g}",
            signature_of(self.compression),
            f"missing_gradients={self.missing_gradients!r}",
            f"global_clip_norm={self.global_clip_norm}",
            f"check_every={self.check_every}",
            f"on_divergence={self.on_divergence!r}",
            f"max_skipped_steps={self.max_skipped_steps}",
            f"adam_steps={'after' if self.adam is None else 'before'}",
        ]


def signature_of(compression: Any) -> str:
    """Return a description of the compression's options that must be equal on all ranks."""
    if isinstance(compression, ErrorFeedback):
        return compression.signature()
    name = compression.__name__
    return "dense" if name == "NoneCompressor" else f"dense {name}"


def _check_groups(groups: Groups) -> None:
    """Raise ValueError unless groups is a number, or disjoint lists of parameters."""
    if groups is None:
        return
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise ValueError(f"groups must be at least 1, got {groups}")
        return
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, list | tuple) and all(isinstance(p, torch.Tensor) for p in group)
        for group in groups
    ):
        raise ValueError(
            f"groups must be an integer or a list of lists of parameters, got {groups!r}"
        )
    seen: set[torch.Tensor] = set()
    for parameter in (p for group in groups for p in group):
        if parameter in seen:
            raise ValueError(
                f"groups must not hold a parameter twice, got one of shape {list(parameter.shape)} "
                "more than once"
            )
        seen.add(parameter)


def warn_of_few_entries(compression: object, elements: int) -> None:
    """Warn if the density leaves too few entries for a model to train well."""
    if not isinstance(compression, SparseCompression | Automatic):
        return
    if isinstance(compression, Shards):
        return  # shards take turns, and together send every entry
    density = compression.density
    if density is None:
        return
    if selected(density, elements) < FEW_ENTRIES < elements:
        digits = 1 - math.floor(math.log10(FEW_ENTRIES / elements))
        enough = math.ceil(FEW_ENTRIES / elements * 10**digits) / 10**digits  # to two digits, up
        _log.warning(
            "density=%g leaves %s of %s entries a step; under about %d accuracy suffers: "
            "use density=%g or more",
            density,
            f"{selected(density, elements):,}",
            f"{elements:,}",
            FEW_ENTRIES,
            enough,
        )


def instead_of_clipping(compression: ErrorFeedback) -> str:
    """Return a sentence on how to clip gradients that a correction turns into steps."""
    if compression.adam_correction is not None:
        return (
            "Use AdamW itself instead of SGD with adam_correction: global_clip_norm= then clips "
            "the mean gradient before the moments"
        )
    return (
        "DistributedOptimizer(local_clip_norm=) clips each rank's gradients before the momentum; "
        "with a hook, let SGD apply the momentum, and clip as before"
    )
