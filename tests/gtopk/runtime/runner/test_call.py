"""A function is sent as its name, or without one as a pickle if that is allowed."""

from __future__ import annotations

import functools
import math
import os
import sys

import pytest

from gtopk.runtime import object_codec as objects
from gtopk.runtime.runner import call


class Counter:
    def __call__(self) -> int:
        return 1

    @staticmethod
    def static() -> int:
        return 2

    def method(self) -> int:
        return 3


def test_reference_names_a_function_by_its_module() -> None:
    for function in (os.path.join, math.sqrt, functools.reduce, dict, Counter.static):
        where = call.reference(function, in_script=False)
        assert where is not None
        assert call.resolve(where) is function


@pytest.mark.parametrize(
    "function",
    [
        lambda: 0,
        Counter(),
        Counter().method,
        functools.partial(math.sqrt, 4),
        len(sys.argv).bit_length,
    ],
)
def test_callable_without_an_importable_name_has_no_reference(function: object) -> None:
    assert call.reference(function, in_script=True) is None  # type: ignore[arg-type]


def test_function_of_main_has_a_reference_only_in_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter.static, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Counter", Counter, raising=False)
    assert call.reference(Counter.static, in_script=True) == "__main__:Counter.static"
    assert call.reference(Counter.static, in_script=False) is None


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_execute_calls_the_function_with_its_arguments(allow_pickle: bool) -> None:
    _, content = call.pack(math.ldexp, (3,), {}, allow_pickle, [])
    assert not objects.holds_pickle(content)
    with pytest.raises(TypeError):
        call.execute(content, allow_pickle)
    _, content = call.pack(int, ("12",), {"base": 5}, allow_pickle, [])
    assert call.execute(content, allow_pickle) == 7


def test_closure_is_sent_as_a_pickle() -> None:
    pytest.importorskip("cloudpickle")
    offset = 3
    preparation, content = call.pack(lambda x: x + offset, (4,), {}, True, [])
    assert objects.holds_pickle(content)
    assert objects.decode(preparation, allow_pickle=False)["allow_pickle"] is True
    assert call.execute(content, True) == 7
    with pytest.raises(objects.ObjectFormatError, match="holds a pickle"):
        call.execute(content, False)


def test_packed_call_does_not_hold_the_process_authkey() -> None:
    preparation, _ = call.pack(os.getpid, (), {}, False, [])
    assert "authkey" not in str(objects.decode(preparation, allow_pickle=False))
