"""The operations that run after a cycle, and their order."""

from __future__ import annotations

from gtopk.runtime.coordinator.execution import fusion_groups
from gtopk.runtime.coordinator.fusion import Layout
from gtopk.runtime.coordinator.operation import OperationSpec
from gtopk.runtime.coordinator.readiness_table import ReadyOperation


def ready(name: str, *lengths: int) -> ReadyOperation:
    dense = tuple(Layout("<f4", length, "sum", 1.0, 1.0) for length in lengths)
    return ReadyOperation(name, OperationSpec((), None, dense), [0])


def fused_steps(*operations: ReadyOperation, threshold_bytes: int = 1000) -> list[str]:
    steps = fusion_groups(operations, threshold_bytes, alone_bytes=1000)
    return [" ".join(operations[number].name for number in step.parts) for step in steps]


def test_small_arrays_fuse_in_the_step_of_the_first_of_them():
    assert fused_steps(ready("a", 1), ready("b"), ready("c", 1), ready("d", 1)) == ["a c d", "b"]


def test_operation_with_several_arrays_may_be_in_several_steps():
    assert fused_steps(ready("a", 1, 300, 1), ready("b", 1)) == ["a b", "a"]
    assert fused_steps(ready("a", 1, 2), threshold_bytes=0) == ["a", "a"]
