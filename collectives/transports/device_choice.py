"""Device choice: how GPU messages are carried, and why; the same choice on all ranks.

    every rank has its own GPU, CuPy, and the same NCCL           NCCL through CuPy
    the same without CuPy, with torch's NCCL                      NCCL through torch: dense only
    anything else                                                 staged through host memory

Every rank decides from all ranks' facts, so no further message is needed. The choice takes effect
once a small allreduce has given the right sum on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

OWN_GPU: Final = "give each rank its own: torch.cuda.set_device(hvd.local_rank())"


class GpuRoute(Enum):
    """The ways to carry GPU messages."""

    NCCL = "NCCL"
    TORCH = "torch's NCCL"
    STAGED = "host memory"


class GpuFacts(NamedTuple):
    """The facts about a rank on which the choice depends.

    device:     the GPU that it uses, by a globally unique name; "" if it has none.
    problem:    why it has none.
    cupy:       why CuPy cannot be used; "" if it can.
    nccl:       version of CuPy's NCCL, such as 22703; 0 for none.
    torch_nccl: version of torch's NCCL; 0 for none.
    checks:     whether all messages must be checked, which excludes NCCL.
    """

    device: str
    problem: str = ""
    cupy: str = ""
    nccl: int = 0
    torch_nccl: int = 0
    checks: bool = False


class RouteChoice(NamedTuple):
    """How GPU messages are carried, and the reason, worded as the end of a sentence."""

    route: GpuRoute
    reason: str

    def __str__(self) -> str:
        return f"{self.route.value}: {self.reason}"


def choose(facts: Sequence[GpuFacts], ranks: Sequence[int]) -> RouteChoice:
    """Choose how these ranks' GPU messages are carried.

    ranks: their numbers for texts.
    """
    info_by_rank = list(zip(ranks, facts, strict=True))
    if without_gpu := [(rank, fact) for rank, fact in info_by_rank if not fact.device]:
        rank, fact = without_gpu[0]
        return RouteChoice(GpuRoute.STAGED, f"rank {rank} has no GPU ({fact.problem})")
    owners: dict[str, list[int]] = defaultdict(list)
    for rank, fact in info_by_rank:
        owners[fact.device].append(rank)
    for device, sharing in owners.items():
        if len(sharing) > 1:
            return RouteChoice(GpuRoute.STAGED, f"ranks {sharing} share {device}; {OWN_GPU}")
    if any(fact.checks for fact in facts):
        return RouteChoice(
            GpuRoute.STAGED, "NCCL's messages cannot be checked (GTOPK_CHECK_MESSAGES=1)"
        )
    own_gpus = f"each of {len(facts)} ranks has a GPU of its own"
    cupy_problem = _cupy_problem(info_by_rank)
    if not cupy_problem:
        version = version_text(facts[0].nccl)
        return RouteChoice(GpuRoute.NCCL, f"{own_gpus}; NCCL {version} through CuPy")
    torch_problem = _nccl_mismatch(
        [(rank, fact.torch_nccl) for rank, fact in info_by_rank], "torch's NCCL"
    )
    if torch_problem:
        return RouteChoice(GpuRoute.STAGED, f"{cupy_problem}, and {torch_problem}")
    library = f"NCCL {version_text(facts[0].torch_nccl)} of torch, dense reductions only"
    return RouteChoice(GpuRoute.TORCH, f"{own_gpus}; {library}: {cupy_problem}")


def _cupy_problem(info_by_rank: Sequence[tuple[int, GpuFacts]]) -> str:
    """Return why NCCL cannot be reached through CuPy; "" if it can."""
    for rank, fact in info_by_rank:
        if fact.cupy:
            return f"CuPy cannot be used on rank {rank} ({fact.cupy})"
    return _nccl_mismatch([(rank, fact.nccl) for rank, fact in info_by_rank], "CuPy's NCCL")


def _nccl_mismatch(versions: Sequence[tuple[int, int]], library: str) -> str:
    """Return why ranks with these NCCL versions cannot use it together; "": they can.

    NCCL refuses peers with another version.
    """
    first_rank, first = versions[0]
    for rank, version in versions:
        if not version:
            return f"{library} is missing on rank {rank}"
        if version != first:
            return (
                f"{library} is {version_text(first)} on rank {first_rank} and "
                f"{version_text(version)} on rank {rank}"
            )
    return ""


def fall_back_after_test(
    choice: RouteChoice, failures: Sequence[str], ranks: Sequence[int]
) -> RouteChoice:
    """Return the choice after its test; failures: each rank's failure, or ""."""
    for rank, failure in zip(ranks, failures, strict=True):
        if failure:
            reason = f"{choice.route.value} failed its start-up test on rank {rank}: {failure}"
            return RouteChoice(GpuRoute.STAGED, reason)
    return choice


def version_text(version: int) -> str:
    """Return NCCL's version in the usual form: 22703 as 2.27.3."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
