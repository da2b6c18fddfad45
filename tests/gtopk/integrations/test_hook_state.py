"""What a step costs whose buckets are handed over one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gtopk
from collectives.transports import Transport
from gtopk.compression import GTopK
from gtopk.exchange.bucket_exchange import open_bucket_exchange
from gtopk.exchange.exchange import Progress
from gtopk.integrations.hook_state import HookSteps
from gtopk.integrations.passes import PassTransaction
from gtopk.optim.peers import Peers
from gtopk.optim.step_transaction import NOT_FINITE
from gtopk.runtime.world import world
from gtopk.telemetry.reading import read_run
from gtopk.telemetry.step_report import parts


def test_steps_of_a_hook_are_reported_and_recorded(
    tmp_path: Path, threads: Callable[..., Any]
) -> None:
    length, steps, bad = 300, 3, 1

    def program(transport: Transport) -> None:
        with world.entered(transport) as here:
            gtopk.record(str(tmp_path))
            peers = Peers(here, here.engine, "hooked", range(here.size), takes_part=True)
            watched = HookSteps(peers, GTopK(0.1), Progress())
            bucket_exchanges = [
                open_bucket_exchange(
                    name,
                    [torch.nn.Parameter(torch.zeros(length))],
                    ["bucket"],
                    GTopK(0.1),
                    Progress(),
                )
                for name in "ab"
            ]

            for step in range(steps):
                gtopk.log_samples(10 + step)
                one_step = PassTransaction()
                for bucket_exchange in bucket_exchanges:
                    bucket_exchange.parameters[0].grad = torch.randn(length)
                    bucket_exchange.capture_gradients(1.0 / here.size, 1.0)
                    number = one_step.add(bucket_exchange)
                    flags = NOT_FINITE if (step, number) == (bad, 1) else 0
                    one_step.operations[number] = here.engine.submit(
                        bucket_exchange.name, [], partial(one_step.run, number), flags=flags
                    )
                    watched.note_submit()
                for operation in one_step.operations.values():
                    operation.wait()
                watched.note_wait_end()
                one_step.close()
                watched.close(one_step, overlapped=True)
                assert watched.last is not None
                assert watched.last.skipped == (step == bad)
            assert here.step == steps

    threads(3, program)
    for rank in read_run(tmp_path).ranks:
        assert [step.report.step for step in rank.steps] == list(range(steps))
        assert [step.report.samples for step in rank.steps] == [10 + step for step in range(steps)]
        for step in rank.steps:
            assert step.report.elements == 2 * length
            assert sum(parts(step.report).values()) > 0
            if not step.report.skipped:
                assert step.report.selected == 2 * length // 10
                assert step.report.algorithm == "gtopk"
        assert rank.steps[-1].bytes_so_far > 0
        assert [note.step for note in rank.residuals] == [1, 3]  # counted: 1 and 2
