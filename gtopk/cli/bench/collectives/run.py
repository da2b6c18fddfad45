"""Run: a plan on the ranks of a transport, from calibration to records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from collectives.cost import Link
from collectives.cost import rounds as rounds_of
from collectives.planning import Calibration, Format, Network
from collectives.planning.calibration import agree_on_rates, measure_network, measure_rates
from collectives.planning.per_call_overhead import measure_calls
from collectives.transports import Transport

from ....runtime.machine import load, this_machine
from ..progress import silent, tell
from . import record, rounds
from .cases import Case, cases
from .contenders import BASELINES, Contender, own_contenders, reference_of, to_measure
from .library import Reckoning, open_library
from .plan import Plan
from .record import Record, Results

_GATHERS: Final = 32
_WARM_UP = Case(ranks=0, length=4096, density=0.01, distribution="uniform")


def message_seconds(transport: Transport) -> float:
    """Return the processor time of a rank to send an empty message and get one; the same on all."""
    transport.barrier()
    begun = time.process_time()
    for _ in range(_GATHERS):
        transport.barrier()
    mine = (time.process_time() - begun) / _GATHERS / max(1, rounds_of(transport.size))
    return statistics.fmean(transport.gather_object(mine))


def run(plan: Plan, transport: Transport) -> Results:
    """Return the results; every rank must call it, rank 0's are whole."""
    plan.check(transport.size)
    machine = this_machine()
    say = tell if transport.rank == 0 else silent
    formats = to_measure(plan.algorithms, plan.formats)
    say("the link, and what coding and merging take")
    calibration = calibrate(transport, formats)
    _, link = modelled_network(plan, calibration.network)
    sizes = plan.ranks or (transport.size,)
    library_name = ""
    records: list[Record] = []
    for size in sizes:
        library = open_library(transport, range(size))
        library_name = library.name
        with transport.operation(f"the benchmark of {size} ranks"):
            if transport.rank < size:
                some = transport.subset(range(size)) if size < transport.size else transport
                found = measure_network(some)[0] if size < transport.size else calibration.network
                here = replace(
                    calibration,
                    network=modelled_network(plan, found)[0],
                    rates=measure_calls(some, found, calibration.rates),
                )
                records += on_these_ranks(plan, some, library, here, say)
            transport.barrier()
    say("")
    machine["load_after"] = load()
    return Results(
        schema=record.SCHEMA,
        benchmark="collectives",
        machine=machine,
        run=record.Run(
            command=plan.command,
            transport=transport.name,
            library=library_name,
            ranks=transport.size,
            hosts=count_hosts(transport),
            link=link,
            calibration=calibration.origin,
            shared_cores=plan.shared_cores,
            seed=plan.seed,
        ),
        records=records,
    )


def on_these_ranks(
    plan: Plan,
    transport: Transport,
    library: Reckoning,
    calibration: Calibration,
    say: Callable[[str], None],
) -> list[Record]:
    """Return the records of all cases with this number of ranks."""
    records: list[Record] = []
    network, rates = calibration.network, calibration.rates
    # The others' messages, where ranks share cores; a round's own one is in its latency.
    sharing_seconds = (network.turns(network.ranks) - 1) * message_seconds(transport)
    for case, first in cases((transport.size,), plan.lengths, plan.densities, plan.distributions):
        for what, times in ((_warm_up(case), 1), (case, plan.rounds)):
            contenders = chosen(plan, case, first, calibration)  # anew: they keep boundaries
            found = rounds.measure(
                what,
                contenders,
                transport,
                library,
                times,
                plan.budget_seconds,
                plan.seed,
                plan.interface,
                say,
            )
        reference = reference_of(contenders, case.length, case.k, network, rates)
        records += [_record(each, case, calibration, reference, sharing_seconds) for each in found]
    return records


def calibrate(transport: Transport, formats: list[Format]) -> Calibration:
    """Return link and rates, the same on every rank.

    Unlike `planning.calibrate`, rates are in seconds of a core: where ranks share cores, or others
    use the machine, the clock would tell more of that than of the codes, and decide on the format.
    """
    network, _ = measure_network(transport)
    rates = agree_on_rates(transport, measure_rates(formats, time.thread_time))
    return Calibration(network, rates, "measured in this run")


def chosen(
    plan: Plan,
    case: Case,
    first: bool,
    calibration: Calibration,
) -> list[Contender]:
    """Return who takes part in a case; the dense ones do in the first only."""
    network, rates = calibration.network, calibration.rates
    ours = own_contenders(plan.algorithms, plan.formats, case.length, case.k, network, rates)
    theirs = [contender for name in plan.baselines for contender in BASELINES[name]]
    return [contender for contender in (*ours, *theirs) if contender.selective or first]


def _warm_up(case: Case) -> Case:
    """Return a small case of the same ranks: it opens the connections."""
    return _WARM_UP._replace(ranks=case.ranks, length=min(case.length, _WARM_UP.length))


def modelled_network(plan: Plan, network: Network) -> tuple[Network, record.Link]:
    """Return the network of the model: one rank a host, link and cores given or measured."""
    measured = network.link(1)
    latency = measured.latency_seconds if plan.latency is None else plan.latency
    seconds_per_byte = 8.0 / plan.bandwidth if plan.bandwidth else measured.seconds_per_byte
    link = Link(latency, seconds_per_byte, measured.burst_bytes)
    told = record.Link(
        latency_seconds=latency,
        bits_per_second=8.0 / seconds_per_byte if seconds_per_byte else 0.0,
        burst_bytes=measured.burst_bytes,
        bandwidth_from="given" if plan.bandwidth else "measured",
        latency_from="measured" if plan.latency is None else "given",
    )
    crowding = network.ranks_per_core
    if plan.shared_cores is not None:
        crowding = max(1.0, network.ranks / plan.shared_cores)
    found = Network(network.ranks, link, native_bytes=network.native_bytes, ranks_per_core=crowding)
    return found, told


def count_hosts(transport: Transport) -> int:
    """Return on how many hosts the ranks are."""
    return len({*transport.gather_object(min(transport.neighbours()))})


def _record(
    measured: rounds.Measured,
    case: Case,
    calibration: Calibration,
    reference: str | None,
    sharing_seconds: float,
) -> Record:
    contender = measured.contender
    seconds = record.spread(measured.seconds)
    network, rates = calibration.network, calibration.rates
    modelled = contender.modelled(case.length, case.k, network, rates)
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
        cpu_seconds=record.per_rank(measured.cpu_seconds),
        sent_bytes=record.per_rank(measured.sent_bytes),
        sent_messages=record.per_rank(measured.sent_messages),
        counted=measured.counted,
        interface_bytes=None if on_interface is None else record.per_rank(on_interface),
        updated=measured.updated,
        modelled_link=list(network.between),
        modelled_wire_seconds=wire,
        modelled_code_seconds=code,
        measured_over_modelled=seconds["median"] / wire if wire else None,
        measured_over_wire_and_code=(
            seconds["median"] / (wire + code) if wire and code is not None else None
        ),
    )
