"""Configurations between ranks: dataclasses as fields, and namespaces; decoding runs no code."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from typing import Any, Generic, TypeVar

import pytest
import torch

from gtopk.runtime.object_codec import ObjectFormatError, decode, encode

T = TypeVar("T")


@dataclasses.dataclass
class Layer:
    width: int
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Config(Generic[T]):
    name: str
    layers: list[Layer]
    seed: torch.Tensor
    kind: T
    made: list[str] = dataclasses.field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        self.made.append("here")


@dataclasses.dataclass(slots=True)
class Slotted:
    one: int
    two: int = dataclasses.field(init=False)


class Holder:
    @dataclasses.dataclass
    class Inner:
        value: Any


@dataclasses.dataclass
class OfDict(dict):  # type: ignore[type-arg]
    value: int = 0


def round_trip(obj: Any) -> Any:
    return decode(encode(obj, allow_pickle=False), allow_pickle=False)


def test_dataclass_is_decoded_field_by_field_without_calling_its_code() -> None:
    sent = Config("net", [Layer(3), Layer(4, 0.5)], torch.ones(2), ("a", None))
    received = round_trip({"config": sent})["config"]
    assert type(received) is Config
    assert (received.name, received.layers, received.kind) == (sent.name, sent.layers, sent.kind)
    assert torch.equal(received.seed, sent.seed)
    assert received.made == ["here"]  # not twice, as after a second __post_init__


def test_slots_nested_classes_and_unset_fields_survive_round_trip() -> None:
    received = round_trip([Slotted(1), Holder.Inner([Holder.Inner(2)])])
    assert received[0].one == 1
    assert not hasattr(received[0], "two")
    assert received[1] == Holder.Inner([Holder.Inner(2)])


def test_namespaces_survive_round_trip() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--sizes", type=int, nargs="*", default=[3, 4])
    options = parser.parse_args([])
    options.self = "a name that a call could not take"
    received = round_trip([options, types.SimpleNamespace(a=1, b=options)])
    assert type(received[0]) is argparse.Namespace
    assert received == [options, types.SimpleNamespace(a=1, b=options)]


def test_dataclass_with_more_than_its_fields_is_refused() -> None:
    @dataclasses.dataclass
    class Local:
        value: int = 0

    extended = Layer(3)
    extended.more = 1  # type: ignore[attr-defined]
    for obj, why in (
        (Local(), "not defined at the top of a module"),
        (extended, r"with attributes \['more'\]"),
        (OfDict(), "a subclass of dict"),
        ([Layer(print)], r"builtin_function_or_method at \[0\]\.width"),  # type: ignore[arg-type]
        (types.SimpleNamespace(x=print), r"at \.x"),
    ):
        with pytest.raises(TypeError, match=why):
            encode(obj, allow_pickle=False)


def test_error_names_the_dataclass_that_the_receiver_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    message = encode(Layer(3), allow_pickle=False)
    module = sys.modules[__name__]
    monkeypatch.delattr(module, "Layer")
    with pytest.raises(ObjectFormatError, match=rf"{__name__}.Layer, and no such dataclass is imp"):
        decode(message)

    @dataclasses.dataclass
    class Other:
        height: int

    monkeypatch.setattr(module, "Layer", Other, raising=False)
    with pytest.raises(ObjectFormatError, match="has no field 'scale', 'width' here"):
        decode(message)
    monkeypatch.setattr(module, "Layer", print, raising=False)
    with pytest.raises(ObjectFormatError, match="no such dataclass is imported"):
        decode(message)


def test_decoding_imports_a_module_only_if_imports_are_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "a_config.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import a_config  # type: ignore[import-not-found]

    message = encode(a_config.C(2), allow_pickle=False)
    monkeypatch.delitem(sys.modules, "a_config")
    with pytest.raises(ObjectFormatError, match="import a_config before it is received"):
        decode(message)
    assert "a_config" not in sys.modules
    assert decode(message, imports=True).x == 2
    monkeypatch.delitem(sys.modules, "a_config")
