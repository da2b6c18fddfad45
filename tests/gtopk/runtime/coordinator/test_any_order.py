"""For any submissions in any order, each operation ends correctly on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.errors import HorovodInternalError
from gtopk.runtime.coordinator import Engine, Operation, Settings
from gtopk.runtime.coordinator.fusion import Dense

NAMES = [f"tensor.{number}" for number in range(6)]
# For each name, the ranks that submit it, with their signatures.
Submissions = dict[str, dict[int, str]]


@st.composite
def cases(draw: Any, all_ranks_submit: bool) -> tuple[int, list[Submissions], int]:
    """Return the number of ranks, the submissions of several steps, and a seed."""
    ranks = draw(st.integers(2, 5))
    signature = st.sampled_from(["x", "x", "x", "x", "y"])
    everyone = st.fixed_dictionaries(dict.fromkeys(range(ranks), signature))
    some = st.dictionaries(st.integers(0, ranks - 1), st.just("x"), max_size=ranks)
    submissions = (
        everyone
        if all_ranks_submit
        else st.one_of(everyone.map(lambda d: dict.fromkeys(d, "x")), some)
    )
    steps = draw(
        st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, submissions)), min_size=1, max_size=3)
    )
    return ranks, steps, draw(st.integers(0, 1000))


def submit_all(engine: Engine, submissions: Submissions, seed: list[int]) -> dict[str, Operation]:
    """Make this rank's submissions in a random order; some as dense arrays, some not."""
    rank = engine.transport.rank
    operations = {}
    for name in np.random.default_rng([*seed, rank]).permutation(NAMES).tolist():
        if rank not in submissions[name]:
            continue
        array = np.full(3, 2.0**rank, np.float32)
        operations[name] = engine.submit(
            name,
            [submissions[name][rank]],
            lambda transport, all_flags, array=array: float(array[0]),
            fusion=[Dense(array)],
        )
    return operations


def wait_for_all(operations: dict[str, Operation]) -> dict[str, float | str]:
    """Return each operation's result, or the text of its error."""
    outcomes: dict[str, float | str] = {}
    for name, operation in operations.items():
        try:
            outcomes[name] = operation.wait()
        except HorovodInternalError as error:
            outcomes[name] = str(error)
    return outcomes


def limits(seed: int) -> Settings:
    return Settings(cache_capacity=seed % 8, fusion_threshold_bytes=seed % 40, idle_seconds=0.02)


@settings(max_examples=25, deadline=None)
@given(cases(all_ranks_submit=True))
def test_operation_completes_or_reports_mismatch_on_all_ranks(
    case: tuple[int, list[Submissions], int],
) -> None:
    ranks, steps, seed = case

    def program(transport: LocalTransport) -> list[dict[str, float | str]]:
        engine = Engine(transport, limits(seed))
        found = [
            wait_for_all(submit_all(engine, submissions, [seed, n]))
            for n, submissions in enumerate(steps)
        ]
        engine.close("the test ended")
        return found

    for found in run_ranks(local_world(ranks, 20), program):
        for submissions, outcomes in zip(steps, found, strict=True):
            for name in NAMES:
                if len(set(submissions[name].values())) == 1:
                    assert outcomes[name] == 2.0**ranks - 1
                else:
                    assert str(outcomes[name]).startswith(f"the ranks disagree about {name}: ")


@settings(max_examples=25, deadline=None)
@given(cases(all_ranks_submit=False))
def test_joined_ranks_add_nothing_to_operations_they_did_not_submit(
    case: tuple[int, list[Submissions], int],
) -> None:
    ranks, steps, seed = case

    def program(transport: LocalTransport) -> tuple[list[dict[str, float | str]], list[int]]:
        engine = Engine(transport, limits(seed))
        found, last = [], []
        for number, submissions in enumerate(steps):
            operations = submit_all(engine, submissions, [seed, number])
            joined = engine.join()
            found.append(wait_for_all(operations))
            last.append(joined.wait())
        engine.close("the test ended")
        return found, last

    results = run_ranks(local_world(ranks, 20), program)
    assert all(last == results[0][1] for _, last in results)
    for rank, (found, _) in enumerate(results):
        for submissions, outcomes in zip(steps, found, strict=True):
            expected = {
                name: sum(2.0**r for r in there)
                for name, there in submissions.items()
                if rank in there
            }
            assert outcomes == expected


@settings(max_examples=25, deadline=None)
@given(cases(all_ranks_submit=False), st.integers(0, 4))
def test_fully_submitted_operations_complete_after_a_rank_leaves_others_fail(
    case: tuple[int, list[Submissions], int], leaver: int
) -> None:
    ranks, (submissions, *_), seed = case
    leaver %= ranks

    def program(transport: LocalTransport) -> dict[str, float | str]:
        engine = Engine(transport, limits(seed))
        operations = submit_all(engine, submissions, [seed])
        if transport.rank == leaver:
            engine.close("it was told to")
        outcomes = wait_for_all(operations)
        engine.close("the test ended")
        return outcomes

    for outcomes in run_ranks(local_world(ranks, 20), program):
        for name, outcome in outcomes.items():
            if len(submissions[name]) == ranks:
                assert outcome == 2.0**ranks - 1
            else:  # otherwise a leaving rank waits for others in a deadlock
                text = str(outcome)
                assert "has been shut down" in text or "about their next operation" in text
