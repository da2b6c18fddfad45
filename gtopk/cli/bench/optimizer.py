"""`gtopk bench optimizer`: measure how much longer each optimizer's steps take than plain ones.

plain                  the wrapped optimizer alone, without an exchange
none, fp16, gtopk, auto      DistributedOptimizer with that compression
none-late, gtopk-late  the same, exchanged after backward
ddp, ddp-powersgd      DistributedDataParallel over gloo, and with PyTorch's PowerSGD hook
ddp-gtopk              the same with gtopk's hook
horovod                Horovod's own DistributedOptimizer, if it is built (make horovod)

Runs alone or on all ranks of a launcher. DDP uses a gloo process group. GTOPK_LINK (gtopk run
--link) slows only gtopk's messages, so DDP and Horovod are not measured with it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from collectives.transports import Transport

from ... import settings
from ...compression import Compression
from ...ddp import GTopKState, gtopk_hook
from ...optim.distributed import DistributedOptimizer
from ...runtime.liveness.heartbeat import own_address
from ...runtime.world import world
from ...torch.functions import allgather_object
from ..arguments import fail, share, text_stream, whole_number, write_records
from ..charts import aligned
from .collectives.run import count_hosts
from .harness import (
    NETWORKS,
    SHAPES,
    Compute,
    add_words,
    bench_parser,
    one_of,
    real,
    shapes,
    show_progress,
    silent,
)

POWER_RANK: Final = 2
WHOLE_MODEL_MB: Final = 1 << 16
_START: Final = timedelta(seconds=120)
# An emulated link does not slow the messages of these.
_UNPACED: Final = ("ddp", "ddp-powersgd", "horovod")


def open_gloo() -> Any:
    """Return a gloo group of all ranks; all ranks must call it."""
    # If gloo is gtopk's transport, the group exists already.
    if torch.distributed.is_initialized():
        return torch.distributed.group.WORLD
    here = world.current()

    def open_store(transport: Transport, all_flags: list[int]) -> TCPStore:
        address = own_address(one_host=count_hosts(transport) == 1)
        if transport.rank > 0:
            host, port = transport.broadcast_object(None)
            return TCPStore(host, port, here.size, False, _START)
        # Port 0: any free one.
        store = TCPStore(address, 0, here.size, True, _START, wait_for_workers=False)
        transport.broadcast_object([address, store.port])
        return store

    store = here.engine.submit("bench.gloo", [], open_store).wait()
    torch.distributed.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size)
    return torch.distributed.group.WORLD


def register_power(model: Any, group: Any) -> None:
    """Register PyTorch's PowerSGD hook with DDP."""
    # Start in step 2: PyTorch allows no earlier start, as DDP rebuilds its buckets after step 0.
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


PLAIN: Final = "plain"
_ALONE: Final = (PLAIN, "none", "gtopk")

# Maps a model to the module to call instead of it, and the optimizer.
Way = Callable[[nn.Module], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Record:
    """Medians over the rounds.

    step_seconds:       forward, backward and step.
    over_plain_seconds: difference to the plain step of the same round.
    quartiles:          lower and upper quartile of these differences.
    over_plain:         ratio to the plain step of the same round, minus 1.
    cpu_over_plain:     the same ratio for the CPU time of all threads of the process.
    working_seconds:    selection and communication on the engine's thread, per step.
    hidden_share:       fraction of this work that ran before `synchronize`, taken in each step from
                        the rank with the least left to do after it: the others include waiting for
                        slower ranks. None if nothing was recorded.
    buckets:            number of buckets in a step.
    """

    name: str
    step_seconds: float
    over_plain_seconds: float
    quartiles: tuple[float, float]
    over_plain: float
    cpu_over_plain: float
    working_seconds: float
    hidden_share: float | None
    buckets: int


def ways(density: float, group: Any = None) -> dict[str, Way]:
    """Return every way to train, by name; group: the gloo group for DDP."""
    gtopk = Compression.gtopk(density)

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def ours(compression: Any, overlap: bool = True) -> Way:
        return lambda model: (
            model,
            DistributedOptimizer(
                plain(model), model.named_parameters(), compression, overlap=overlap
            ),
        )

    def ddp(hook: Callable[[Any, Any], None] | None = None, bucket_mb: float | None = None) -> Way:
        def open_ddp(model: nn.Module) -> tuple[nn.Module, Any]:
            replica = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)
            if hook is not None:
                hook(replica, group)
            return replica, plain(model)

        return open_ddp

    def horovod(model: nn.Module) -> tuple[nn.Module, Any]:
        peer = importlib.import_module("horovod.torch")
        peer.init()
        # Without its launcher's variables Horovod starts a world of one rank in each process.
        if peer.size() != world.current().size:
            raise RuntimeError(
                f"Horovod sees {peer.size()} ranks, and gtopk {world.current().size}: start the "
                "benchmark with gtopk run or mpirun"
            )
        return model, peer.DistributedOptimizer(plain(model), model.named_parameters())

    def register_gtopk(model: DistributedDataParallel, _: Any) -> None:
        model.register_comm_hook(GTopKState(density), gtopk_hook)

    return {
        PLAIN: lambda model: (model, plain(model)),
        "none": ours(Compression.none),
        "fp16": ours(Compression.fp16),
        "gtopk": ours(gtopk),
        "auto": ours(Compression.auto(density=density)),
        "none-late": ours(Compression.none, overlap=False),
        "gtopk-late": ours(gtopk, overlap=False),
        "ddp": ddp(),
        "ddp-powersgd": ddp(register_power, WHOLE_MODEL_MB),
        "ddp-gtopk": ddp(register_gtopk),
        "horovod": horovod,
    }


def _is_built() -> bool:
    """Tell whether Horovod is installed with its torch binding."""
    try:
        importlib.import_module("horovod.torch")
    except ImportError:
        return False
    return True


def usual(ranks: int) -> tuple[str, ...]:
    """Return the ways compared by default; more of them on several ranks."""
    return _ALONE if ranks == 1 else (*_ALONE, "auto", "none-late", "gtopk-late", "ddp")


class Contender:
    """A model and its optimizer."""

    def __init__(self, name: str, way: Way, compute: Compute) -> None:
        self.name = name
        self._compute = compute
        self.model, self.optimizer = way(compute.make())
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.working: list[float] = []
        self.hidden: list[float] = []

    def step(self, counts: bool) -> None:
        """Take a step, and record its times if it counts."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        self._compute.backward(self.model)
        self.optimizer.step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not counts:
            return
        self.wall.append(wall)
        self.cpu.append(cpu)
        if (report := getattr(self.optimizer, "last_step", None)) is not None:
            self.working.append(report.working_seconds)
            self.hidden.append(report.hidden_seconds)

    def record(self, plain: Contender) -> Record:
        """Return the measurements, compared with the plain optimizer's; all ranks call it."""
        report = getattr(self.optimizer, "last_step", None)
        by_rank = allgather_object([self.working, self.hidden])
        # In each step take the rank with the least work left after backward: (not hidden, all).
        exposed = [
            min((w - h, w) for w, h in step)
            for step in zip(*(zip(*rank, strict=True) for rank in by_rank), strict=True)
        ]
        working = sum(w for _, w in exposed)
        # Compare within a round, as noise of the machine slows all ways of a round.
        above = [own - base for own, base in zip(self.wall, plain.wall, strict=True)]
        first, _, third = statistics.quantiles(above, n=4) if len(above) > 1 else above * 3
        return Record(
            name=self.name,
            step_seconds=statistics.median(self.wall),
            over_plain_seconds=statistics.median(above),
            quartiles=(first, third),
            over_plain=_over(self.wall, plain.wall),
            cpu_over_plain=_over(self.cpu, plain.cpu),
            working_seconds=statistics.median(self.working) if self.working else 0.0,
            hidden_share=1.0 - sum(e for e, _ in exposed) / working if exposed else None,
            buckets=report.buckets if report is not None else 0,
        )


def _over(own: list[float], plain: list[float]) -> float:
    return statistics.median(m / p for m, p in zip(own, plain, strict=True)) - 1.0


def measure(
    compute: Compute,
    compared: Mapping[str, Way],
    rounds: int,
    progress: Callable[[str], None] = silent,
    warm_up: int = 3,
) -> list[Record]:
    """Return a record of every way, compared with the first.

    Each round takes one step of every way; the order rotates from round to round. All ranks begin a
    step together.
    """
    contenders = [Contender(name, way, compute) for name, way in compared.items()]
    for done in range(-warm_up, rounds):
        # Rotate the order, because the first way after a wait finds colder caches.
        turn = done % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            # A barrier, so that a timed step does not wait for ranks still in the previous one.
            allgather_object(None)
            contender.step(counts=done >= 0)
        progress(f"round {done + 1} of {rounds}" if done >= 0 else "warming up")
    progress("")
    return [contender.record(contenders[0]) for contender in contenders]


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    described = bench_parser(
        "gtopk bench optimizer",
        "Time training steps of a plain optimizer and of distributed ones, in turn in "
        "one run. Alone, it shows what DistributedOptimizer costs; started on several ranks "
        "(mpirun -n 4 gtopk bench optimizer), how much of the exchange backward hides.",
        launched=True,
    )
    described.option(
        "--model",
        None,
        "resnet20",
        "a network, or the shapes of one, whose backward pass only copies gradients",
        choices=[*NETWORKS, *SHAPES],
    )
    described.option("--batch", whole_number, 32, "samples per step of a network")
    add_words(
        described,
        "--ways",
        one_of(ways(0.5)),
        metavar="WAY",
        help=f"optimizers to time, from {', '.join(ways(0.5))}; plain is always timed; default: "
        f"{', '.join(usual(1))}, and on several ranks also {', '.join(usual(2)[len(usual(1)) :])}",
    )
    described.option("--density", share, 0.001, "share of entries sent")
    described.option("--rounds", whole_number, 20, "timed rounds")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    options = parser().parse_args(arguments)
    if "horovod" in (options.ways or ()) and not _is_built():
        needs = "--ways horovod needs Horovod itself: see `make horovod`"
        return fail("bench optimizer", needs, code=2)
    link = settings.LINK.text()
    if link and (unpaced := [way for way in options.ways or () if way in _UNPACED]):
        return fail(
            "bench optimizer",
            f"{settings.LINK.name}={link} does not slow the messages of {', '.join(unpaced)}: "
            "leave them out, or emulate hosts with mpi_scripts/emulated_network.sh",
            code=2,
        )
    # Ranks on a machine share its cores, so torch's threads would compete for them.
    torch.set_num_threads(1)
    world.init()
    here = world.current()
    compared = options.ways or [way for way in usual(here.size) if not (link and way in _UNPACED)]
    names = dict.fromkeys([PLAIN, *compared])
    group = None
    if any(name.startswith("ddp") for name in names):
        group = open_gloo()
    available = ways(options.density, group)
    problem = ""
    try:
        compute = (
            shapes(options.model, here.rank)
            if options.model in SHAPES
            else real(options.model, options.batch, here.rank)
        )
    except RuntimeError as error:  # torch's, in place of a MemoryError
        problem = f"--batch {options.batch} is too large: {error}"
    if problem:
        world.shutdown()
        return fail("bench optimizer", problem, code=2)
    records = measure(
        compute,
        {name: available[name] for name in names},
        options.rounds,
        show_progress if here.rank == 0 else silent,
    )
    if here.rank == 0:
        facts = {
            "model": options.model,
            "batch": options.batch,
            "density": options.density,
            "ranks": here.size,
            "transport": here.transport.name,
            "link": here.transport.link_text,
            "threads": torch.get_num_threads(),
            "load": round(os.getloadavg()[0], 1),
        }
        heading = ", ".join(f"{name}: {value}" for name, value in facts.items() if value != "")
        print(heading, table(records), sep="\n", file=text_stream(options.json))
        write_records({**facts, "records": records}, options.json)
    world.shutdown()
    return 0


def table(records: Sequence[Record]) -> str:
    """Return the records as lines of text."""
    plain = ("above plain, ms (quartiles)", "over plain")
    rows = [("", "step", *plain, "CPU over", "engine", "hidden", "buckets")]
    for each in records:
        low, high = each.quartiles
        rows.append(
            (
                each.name,
                f"{1e3 * each.step_seconds:.1f} ms",
                f"{1e3 * each.over_plain_seconds:+.1f} ({1e3 * low:+.1f} to {1e3 * high:+.1f})",
                f"{each.over_plain:+.1%}",
                f"{each.cpu_over_plain:+.1%}",
                f"{1e3 * each.working_seconds:.1f} ms",
                "" if each.hidden_share is None else f"{each.hidden_share:.0%}",
                str(each.buckets),
            )
        )
    return "\n".join(aligned(rows))
