"""Measure on the ranks of a transport: calibrate, run the contenders, return the records.

The contenders of a case take turns. The time of one run (a go) is that of the slowest rank.

    round 1   gtopk   topk-allgather   dense-library   ...
    round 2   gtopk   topk-allgather   dense-library   ...

    a go      rest | barrier | reduce | share the time     each rank starts its clock at the barrier

All contenders see the same noise of machine and network. A contender that has used up its time
budget skips the remaining rounds. Links rest before a go, as they do while gradients are computed,
so that a token bucket can refill to its burst size.

If the ranks get different results, the measurement raises WrongResultError.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from collectives.cost import Link
from collectives.cost import rounds as rounds_of
from collectives.cost_model import Calibration, Format, Network
from collectives.cost_model.calibration import agree_on_rates, measure_network, measure_rates
from collectives.cost_model.per_call_overhead import measure_calls
from collectives.errors import CollectiveError
from collectives.transports import Transport
from collectives.vector import Array, SparseVector

from ....runtime.machine import load, this_machine
from ..harness import UsageError, per_rank, show_progress, silent, spread
from .cases import SCHEMA, Case, Record, Results, cases, picks
from .contenders import (
    BASELINES,
    Contender,
    Place,
    Task,
    Update,
    own_contenders,
    reference_of,
    to_measure,
)
from .library import ModelledLibrary, open_library


class WrongResultError(CollectiveError):
    """A reduction gave a wrong result, so that its time is meaningless."""


def digest(update: Update) -> Array:
    """Return a digest of an update, uint8 [16]; equal for bit-identical updates."""
    hashed = hashlib.blake2b(digest_size=16)
    parts = (update.indices, update.values) if isinstance(update, SparseVector) else (update,)
    for array in parts:
        hashed.update(np.ascontiguousarray(array).view(np.uint8).data)
    return np.frombuffer(hashed.digest(), np.uint8)


def check_agreement(name: str, digests: Sequence[Array]) -> None:
    """Raise WrongResultError unless all ranks have the same update."""
    differ = [rank for rank, each in enumerate(digests) if (each != digests[0]).any()]
    if differ:
        raise WrongResultError(
            f"{name} must give the same update on all ranks; that of rank {differ[0]} differs"
        )


REST_SECONDS: Final = 0.02


@dataclass
class Measured:
    """The times of one contender's goes; lists by round.

    cpu_seconds, sent_bytes, sent_messages, interface_bytes: by rank, in the last round.
    counted: True: sent bytes were counted per message; False: calculated.
    """

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    sent_messages: list[float] = field(default_factory=list)
    interface_bytes: list[float] | None = None
    updated: int = 0
    counted: bool = False


def measure(
    options: argparse.Namespace,
    case: Case,
    rounds: int,
    contenders: Sequence[Contender],
    transport: Transport,
    library: ModelledLibrary,
    say: Callable[[str], None],
) -> list[Measured]:
    """Measure every contender; return the same values on every rank of `transport`.

    Raises WrongResultError if the ranks' updates differ.
    """
    selected = picks(case.distribution, case.length, case.k, transport.rank, options.seed)
    task = Task(selected, case.k, transport, library)
    found = [Measured(contender) for contender in contenders]
    for number in range(rounds):
        for measured in found:
            # Run each contender at least once, however slow, to check its result.
            if number == 0 or sum(measured.seconds) < options.budget_seconds:
                say(f"{case}: round {number + 1} of {rounds}, {measured.contender.name}")
                run_once(measured, task, options.interface)
    return found


def run_once(measured: Measured, task: Task, interface: str | None) -> None:
    """Run a contender once; check that all ranks have the same update."""
    contender, transport = measured.contender, task.transport
    is_own = contender.algorithm is not None
    counters = transport.traffic if is_own else task.library.traffic
    prepared = contender.prepare(task)
    interface_before = interface_bytes(interface)
    time.sleep(REST_SECONDS)
    transport.barrier()
    # Reset after the barrier, so that its messages are not counted.
    counters.read_and_reset()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    update = prepared()
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    sent = counters.read_and_reset()
    on_interface = interface_bytes(interface) - interface_before
    report = np.array([seconds, cpu_seconds, sent.sent_bytes, sent.sent_messages, on_interface])
    # Compare digests: the update itself may be as long as the dense vector.
    reports = transport.allgather(np.concatenate([report.view(np.uint8), digest(update)]))
    check_agreement(contender.name, [message[report.nbytes :] for message in reports])
    rows = [np.frombuffer(message[: report.nbytes].tobytes()) for message in reports]
    seconds_by_rank, *by_rank, on_interfaces = np.stack(rows, axis=1).tolist()
    measured.seconds.append(max(seconds_by_rank))
    measured.cpu_seconds, measured.sent_bytes, measured.sent_messages = by_rank
    measured.interface_bytes = on_interfaces if interface else None
    measured.updated = entries(update)
    measured.counted = is_own and (contender.algorithm != "dense" or transport.counts_allreduce)


def entries(update: Update) -> int:
    """Return the number of coordinates that an update changes."""
    return update.entries if isinstance(update, SparseVector) else int(np.count_nonzero(update))


def interface_bytes(interface: str | None) -> float:
    """Return the bytes that a network interface has sent since it came up; 0 for None."""
    if interface is None:
        return 0.0
    return float(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


_GATHERS: Final = 32
WARM_UP = Case(ranks=0, length=4096, density=0.01, distribution="uniform")


def message_seconds(transport: Transport) -> float:
    """Return a rank's CPU seconds to send and receive an empty message; the same on all ranks."""
    transport.barrier()
    begun = time.process_time()
    for _ in range(_GATHERS):
        transport.barrier()
    own_seconds = (time.process_time() - begun) / _GATHERS / max(1, rounds_of(transport.size))
    return statistics.fmean(transport.gather_object(own_seconds))


def run(options: argparse.Namespace, command: str, transport: Transport) -> Results:
    """Return the results, complete on rank 0; every rank must call it.

    Raises UsageError if options.ranks exceeds the number of ranks that were started.
    """
    sizes = options.ranks or [transport.size]
    if max(sizes) > transport.size:
        raise UsageError(
            f"--ranks must lie in 1..{transport.size} (the ranks that were started), "
            f"got {max(sizes)}"
        )
    machine = this_machine()
    say = show_progress if transport.rank == 0 else silent
    formats = to_measure(options.algorithms, options.formats)
    say("measuring the link, coding and merging")
    calibration = calibrate(transport, formats)
    _, link = modelled_network(options, calibration.network)
    library_name = ""
    records: list[Record] = []
    for size in sizes:
        library = open_library(transport, range(size))
        library_name = library.name
        # Idle ranks enter the operation too: they wait at its final barrier.
        with transport.operation(f"the benchmark of {size} ranks"):
            if transport.rank < size:
                subset = transport.subset(range(size)) if size < transport.size else transport
                found = measure_network(subset)[0] if size < transport.size else calibration.network
                adjusted = replace(
                    calibration,
                    network=modelled_network(options, found)[0],
                    rates=measure_calls(subset, found, calibration.rates),
                )
                records += measure_cases(options, subset, library, adjusted, say)
            transport.barrier()
    say("")
    machine["load_after"] = load()
    run = {
        "command": command,
        "transport": transport.name,
        "library": library_name,
        "ranks": transport.size,  # the launched ones
        "hosts": count_hosts(transport),
        "link": link,
        "calibration": calibration.origin,
        "shared_cores": options.shared_cores,
        "seed": options.seed,
    }
    return Results(
        schema=SCHEMA, benchmark="collectives", machine=machine, run=run, records=records
    )


def measure_cases(
    options: argparse.Namespace,
    transport: Transport,
    library: ModelledLibrary,
    calibration: Calibration,
    say: Callable[[str], None],
) -> list[Record]:
    """Measure all cases with this number of ranks, and return their records."""
    records: list[Record] = []
    network, rates = calibration.network, calibration.rates
    # On shared cores, add the CPU time of the other ranks' messages; the latency has this rank's.
    sharing_seconds = (network.coding_waves(network.ranks) - 1) * message_seconds(transport)
    for case, first in cases((transport.size,), options.lengths, options.densities, options.picks):
        place = Place(case.length, case.k, network, rates)
        for what, rounds in ((_warm_up(case), 1), (case, options.rounds)):
            # New contenders each time: those of the warm-up keep boundaries for another length.
            contenders = contenders_of(options, place, first)
            found = measure(options, what, rounds, contenders, transport, library, say)
        reference = reference_of(contenders, place)
        records += [_record(each, case, place, reference, sharing_seconds) for each in found]
    return records


def calibrate(transport: Transport, formats: list[Format]) -> Calibration:
    """Measure the link and the coding rates; return the same values on every rank.

    The rates are in CPU seconds, not wall-clock seconds as in a training's calibration, so that
    shared cores and other load on the machine do not distort them.
    """
    network, _ = measure_network(transport)
    rates = agree_on_rates(transport, measure_rates(formats, time.thread_time))
    return Calibration(network, rates, "measured in this run")


def contenders_of(options: argparse.Namespace, place: Place, first: bool) -> list[Contender]:
    """Return the contenders of a case; dense ones only if it is the first."""
    ours = own_contenders(options.algorithms, options.formats, place)
    baselines = [contender for name in options.baselines for contender in BASELINES[name]]
    return [contender for contender in (*ours, *baselines) if contender.selective or first]


def _warm_up(case: Case) -> Case:
    """Return a small case with the same ranks, which opens the connections."""
    return WARM_UP._replace(ranks=case.ranks, length=min(case.length, WARM_UP.length))


def modelled_network(
    options: argparse.Namespace, network: Network
) -> tuple[Network, dict[str, Any]]:
    """Return the modelled network: one rank per host; link and cores given or measured."""
    measured = network.link(1)
    latency = measured.latency_seconds if options.latency is None else options.latency
    seconds_per_byte = 8.0 / options.bandwidth if options.bandwidth else measured.seconds_per_byte
    link = Link(latency, seconds_per_byte, measured.burst_bytes)
    record = {
        "latency_seconds": latency,
        "bits_per_second": 8.0 / seconds_per_byte if seconds_per_byte else 0.0,
        "burst_bytes": measured.burst_bytes,  # pass at full speed after a pause
        "bandwidth_from": "given" if options.bandwidth else "measured",
        "latency_from": "measured" if options.latency is None else "given",
    }
    ranks_per_core = network.ranks_per_core
    if options.shared_cores is not None:
        ranks_per_core = max(1.0, network.ranks / options.shared_cores)
    found = Network(
        network.ranks, link, native_bytes=network.native_bytes, ranks_per_core=ranks_per_core
    )
    return found, record


def count_hosts(transport: Transport) -> int:
    return len({*transport.gather_object(min(transport.neighbours()))})


def _record(
    measured: Measured, case: Case, place: Place, reference: str | None, sharing_seconds: float
) -> Record:
    contender = measured.contender
    seconds = spread(measured.seconds)
    modelled = contender.modelled(place)
    wire = modelled and modelled.wire_seconds
    code = modelled and modelled.code_seconds + modelled.rounds * sharing_seconds
    on_interface = measured.interface_bytes
    return Record(
        contender=contender.name,
        label=contender.label,
        ours=contender.algorithm is not None,
        reference=contender.name == reference,
        selective=contender.selective,
        algorithm=contender.algorithm,
        options=contender.options,
        format=None if contender.format is None else "+".join(contender.format),
        ranks=case.ranks,
        length=case.length,
        density=case.density,
        k=case.k,
        distribution=case.distribution,
        rounds=len(measured.seconds),
        seconds=seconds,
        seconds_by_round=measured.seconds,
        cpu_seconds=per_rank(measured.cpu_seconds),
        sent_bytes=per_rank(measured.sent_bytes),
        sent_messages=per_rank(measured.sent_messages),
        counted=measured.counted,
        interface_bytes=None if on_interface is None else per_rank(on_interface),
        updated=measured.updated,
        modelled_link=list(place.network.between),
        modelled_wire_seconds=wire,
        modelled_code_seconds=code,
        measured_over_modelled=seconds["median"] / wire if wire else None,
        measured_over_wire_and_code=(
            seconds["median"] / (wire + code) if wire and code is not None else None
        ),
    )
