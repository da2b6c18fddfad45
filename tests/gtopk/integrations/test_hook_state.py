"""The report of a step whose buckets arrive one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gtopk
from collectives.transports import Transport
from gtopk.compression import GTopK
from gtopk.errors import HorovodInternalError
from gtopk.exchange.bucket_exchange import open_bucket_exchange
from gtopk.exchange.exchange import Exchanged, Progress
from gtopk.integrations import hook_state
from gtopk.integrations.hook_state import HookState, HookSteps
from gtopk.integrations.passes import PassTransaction
from gtopk.optim.peers import Peers
from gtopk.optim.step_transaction import NOT_FINITE
from gtopk.runtime.coordinator import Operation
from gtopk.runtime.world import world
from gtopk.telemetry.reading import read_run
from gtopk.telemetry.step_report import StepReport, parts


def test_steps_of_a_hook_are_reported_and_recorded(
    tmp_path: Path, threads: Callable[..., Any]
) -> None:
    length, steps, skipped_step = 300, 3, 1

    def program(transport: Transport) -> None:
        with world.entered(transport) as here:
            gtopk.record(str(tmp_path))
            peers = Peers(here, here.engine, "hooked", range(here.size), takes_part=True)
            hook_steps = HookSteps(peers, GTopK(0.1), Progress())
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
                    flags = NOT_FINITE if (step, number) == (skipped_step, 1) else 0
                    one_step.operations[number] = here.engine.submit(
                        bucket_exchange.name, [], partial(one_step.run, number), flags=flags
                    )
                    hook_steps.note_submit()
                for operation in one_step.operations.values():
                    operation.wait()
                hook_steps.note_wait_end()
                one_step.close()
                hook_steps.close(one_step, overlapped=True)
                assert hook_steps.last is not None
                assert hook_steps.last.skipped == (step == skipped_step)
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


def test_time_until_a_gpu_has_computed_the_gradients_counts_as_computing(
    threads: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([1.0, 2.0, 3.0, 10.0])
    monkeypatch.setattr(hook_state, "time", SimpleNamespace(perf_counter=lambda: next(now, 10.0)))

    def program(transport: Transport) -> StepReport | None:
        with world.entered(transport) as here:
            peers = Peers(here, here.engine, "hooked", range(here.size), takes_part=True)
            hook_steps = HookSteps(peers, GTopK(0.1), Progress())
            hook_steps._sizes = [0]  # its links are measured
            for _ in range(2):
                hook_steps.note_submit()
                hook_steps.note_wait_end()
                ended = PassTransaction()
                ended.exchanged[0] = Exchanged("gtopk", 1, 1, 0, 1, 0, True, True, ready_at=8.0)
                ended.spans.append((3.0, 9.0))
                hook_steps.close(ended, overlapped=True)
            return hook_steps.last

    (found,) = threads(1, program)
    assert (found.compute_seconds, found.synchronize_seconds) == (6.0, 2.0)
    assert found.hidden_seconds == 5.0


class Hook(HookState):
    _accumulation_hint = _optimizer_hint = _saving_hint = _clipping_hint = ""

    def _parameters(self) -> set[torch.Tensor]:
        return set()

    def _residuals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        return iter(())


def test_abort_undoes_a_pass_with_a_failed_bucket(
    threads: Callable[..., Any],
) -> None:
    """Also if its last bucket was exchanged, after which DDP's hook reports the whole pass."""

    def program(transport: Transport) -> None:
        with world.entered(transport) as here:
            peers = Peers(here, here.engine, "hooked", range(here.size), takes_part=True)
            hook = Hook(peers, GTopK(0.1), None, 20, None, {"adam": None})
            bucket = torch.nn.Parameter(torch.zeros(30))
            bucket_exchange = hook._open("bucket", bucket, [bucket])
            residual = bucket_exchange.exchange.residual

            def submit(name: str, signature: str) -> Operation:
                bucket.grad = torch.arange(30.0)
                return hook._submit(name, [signature], bucket_exchange)

            assert submit("good", "the same").wait()
            hook._close_pass()
            hook._report_pass(overlapped=True, where=[])
            before = residual.values.tolist()
            failing = submit("failing", f"of rank {here.rank}")
            assert submit("last", "the same").wait()
            with pytest.raises(HorovodInternalError):
                failing.wait()
            hook._report_pass(overlapped=True, where=[])
            assert residual.values.tolist() != before
            hook._abort_pass()
            assert residual.values.tolist() == before

    threads(2, program)
