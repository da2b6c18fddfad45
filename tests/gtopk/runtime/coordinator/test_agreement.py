"""Errors name the ranks, and quote only what differs."""

from __future__ import annotations

from gtopk.runtime.coordinator.agreement import (
    advice_on_uneven,
    describe_deadlock,
    describe_mismatch,
    name_ranks,
)


def test_mismatch_message_quotes_only_what_differs():
    common = ["gradients.1", "op=Average"]
    text = describe_mismatch(
        {0: [*common, "k=5", "b [2]"], 1: [*common, "k=5", "b [3]"], 2: [*common, "k=5", "b [2]"]}
    )
    assert text == "the ranks disagree about gradients.1: ranks 0, 2: b [2]; rank 1: b [3]"


def test_mismatch_message_quotes_only_options_that_differ():
    options = "gtopk density={} growth=2.0 wire=auto"
    text = describe_mismatch({r: ["a", options.format(d)] for r, d in enumerate((0.1, 0.2, 0.1))})
    assert text == (
        "the ranks disagree about a: ranks 0, 2: density=0.1; rank 1: density=0.2; all ranks must "
        "be given the same"
    )


def test_mismatch_message_names_rank_with_shorter_signature():
    text = describe_mismatch({3: ["a", "x", "y"], 7: ["a", "x"]})
    assert text == "the ranks disagree about a: rank 3: y; rank 7: nothing in its place"


def test_same_signature_in_another_order_is_a_mismatch():
    text = describe_mismatch({0: ["a", "x", "y"], 1: ["a", "y", "x"]})
    assert text == "the ranks disagree about a: rank 0: x; rank 1: y"


def test_deadlock_message_names_likely_cause():
    uneven = describe_deadlock({0: "gradients.0.bias.0", 1: "allreduce.loss", 2: "allreduce.loss"})
    assert uneven.startswith(
        "the ranks disagree about their next operation: rank 0: gradients.0.bias.0; "
        "ranks 1, 2: allreduce.loss; call each operation on all ranks, not under "
        "`if hvd.rank() == 0`; give all ranks equally many batches"
    )
    assert uneven.endswith("call hvd.join() when it is done")
    alone = describe_deadlock({0: "allgather.checkpoint.problem", 1: "gradients.0.bias.0"})
    assert "every rank must call save_checkpoint and load_latest" in alone
    assert "batches" not in alone
    for others in ("gradients.1", "allreduce.a"):  # all of one kind: unknown
        kind = others.rpartition(".")[0]
        text = describe_deadlock({0: f"{kind}.x", 1: others})
        assert text.endswith(f"rank 0: {kind}.x; rank 1: {others}")


def test_advice_on_uneven_batches_names_join_only_for_gradients():
    for name, expected in (
        ("gradients.0.bias.0", "or have each call hvd.join() when it is done"),
        ("local_sgd.0.bias.outer.1", "or use inner_steps=None, and call outer_step() on all"),
        ("ddp.bucket.0", "or train within DDP's `with model.join():`"),
        (
            "fsdp.0",
            "give all ranks equally many batches (drop_last=True, a DistributedSampler)",
        ),
    ):
        advice = advice_on_uneven(name)
        assert expected in advice
        assert ("hvd.join()" in advice) == name.startswith("gradients.")


def test_name_ranks_writes_singular_and_plural():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 2]) == "ranks 0, 2"
