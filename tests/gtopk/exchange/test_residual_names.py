"""The names of residuals in checkpoints match those in the model."""

from __future__ import annotations

import logging

import pytest
import torch

from gtopk.exchange.residual_state import (
    ResidualState,
    plain_name,
    translate,
    under_known_names,
    unmatched,
)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("_orig_mod.layers.0._orig_mod.weight", "layers.0.weight"),
        ("_orig_mod", ""),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_plain_name_drops_the_prefix_of_compiled_modules(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_translate_keeps_known_names_and_merges_none() -> None:
    known = {"a", "_orig_mod.b", "_orig_mod.a"}
    assert translate({"a", "_orig_mod.a", "b", "c"}, known) == {
        "a": "a",
        "_orig_mod.a": "_orig_mod.a",
        "b": "_orig_mod.b",
        "c": "c",
    }
    assert translate({"a", "_orig_mod.a"}, {"a"}) == {"a": "a", "_orig_mod.a": "_orig_mod.a"}


def test_unmatched_nonzero_residuals_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held: dict[str, ResidualState] = {
        **{f"gone.{n}": {"residual": torch.ones(2)} for n in range(6)},
        "zeros": {"residual": torch.zeros(2)},
        "a": {"residual": torch.ones(2)},
    }
    with caplog.at_level(logging.WARNING, "gtopk"):
        kept = unmatched(under_known_names(held, {"a"}), {"a"}, 3, "nobody has it")
        assert unmatched({"a": held["a"]}, {"a"}, 3, "nobody has it") == {}
    assert kept == {f"gone.{n}": held[f"gone.{n}"] for n in range(6)}
    named = ", ".join(f"'gone.{n}'" for n in range(5))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"rank 3: residuals for {named}, ... are kept but cannot be applied: nobody has it"
    )
