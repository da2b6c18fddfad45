"""Run on two ranks or more: any mistake in a step is one error, the same on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import light_torch  # noqa: F401

import torch
from checks import raises, run_tests, same_bits_everywhere, same_everywhere

import gtopk.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ODD = SIZE - 1  # the rank that does something else
IS_ODD = RANK == ODD
OTHERS = ", ".join(str(rank) for rank in range(SIZE - 1))
COMPRESSIONS = (
    hvd.Compression.none,
    hvd.Compression.fp16,
    hvd.Compression.topk(density=0.2),
    hvd.Compression.gtopk(density=0.2),
    hvd.Compression.gtopk(density=0.2, momentum_correction=0.9),
)


class Pair(torch.nn.Module):
    """Two parallel layers; a rank may use only the first."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, outputs)
        self.second = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, with_second: bool = True) -> torch.Tensor:
        total = self.first(x).square().sum()
        return total + self.second(x).square().sum() if with_second else total


Named = Iterable[tuple[str, torch.nn.Parameter]]


def distribute(
    model: torch.nn.Module,
    compression: Any = hvd.Compression.none,
    named: Named | None = None,
    **options: Any,
) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters() if named is None else named,
        compression,
        **options,
    )


def backward(model: torch.nn.Module, batch: int = 0, with_second: bool = True) -> None:
    """Compute a gradient that differs by rank and batch."""
    generator = torch.Generator().manual_seed(1000 * batch + RANK)
    model(torch.randn(5, 4, generator=generator), with_second).backward()


def take_steps(model: torch.nn.Module, optimizer: Any, batches: Iterable[int]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def bits(model: torch.nn.Module, optimizer: Any) -> list[bytes]:
    """Return everything that a step may change: parameters, inner optimizer state, residual."""
    tensors = [*model.parameters()]
    tensors += [t for state in optimizer.state.values() for t in state.values() if t is not None]
    arrays = [tensor.detach().numpy() for tensor in tensors]
    held, _ = optimizer._reducer.export_state()
    tensors = [tensor for name in sorted(held) for tensor in held[name].values()]
    arrays += [tensor.numpy() for tensor in tensors if tensor.any()]
    return [array.tobytes() for array in arrays]


def check_that_training_goes_on() -> None:
    """Check that a new model takes two steps, and is equal on every rank."""
    model = Pair()
    before = model.first.weight.detach().clone()
    take_steps(model, distribute(model, hvd.Compression.gtopk(density=0.2)), range(2))
    assert not torch.equal(model.first.weight, before)
    for parameter in model.parameters():
        assert same_bits_everywhere(parameter)


def sides(rest: str, odd: str) -> tuple[str, str]:
    """Return the two parts of an error about one rank that disagrees with the rest."""
    return f"{'rank' if SIZE == 2 else 'ranks'} {OTHERS}: {rest}", f"rank {ODD}: {odd}"


def renamed(model: torch.nn.Module, old: str, new: str) -> Named:
    return [(new if name == old else name, p) for name, p in model.named_parameters()]


def test_step_signatures_that_differ_are_an_error_quoting_both() -> None:
    def of(rest: Any, odd: Any) -> Any:
        return odd if IS_ODD else rest

    gtopk, topk = hvd.Compression.gtopk, hvd.Compression.topk
    # Model, arguments, the other ranks' side of the error, and the odd rank's.
    cases: list[tuple[Pair, dict[str, Any], tuple[str, str]]] = [
        (
            Pair(of(3, 2)),
            {"compression": gtopk(density=0.5)},
            sides("parameter 'first.weight' [3, 4] ", "parameter 'first.weight' [2, 4] "),
        ),
        (
            of(Pair(), Pair().double()),
            {},
            sides(
                "parameter 'first.weight' [3, 4] torch.float32",
                "parameter 'first.weight' [3, 4] torch.float64",
            ),
        ),
        (
            Pair(),
            {"compression": of(gtopk(density=0.5), gtopk(density=0.2))},
            sides("density=0.5", "density=0.2"),
        ),
        (
            Pair(),
            {"compression": of(gtopk(density=0.5), topk(density=0.5))},
            sides("gtopk density=0.5 ", "topk-allgather density=0.5 "),
        ),
        (
            Pair(),
            {"compression": of(gtopk(0.5, momentum_correction=0.9), gtopk(0.5))},
            sides("momentum_correction=0.9", "momentum_correction=0.0"),
        ),
        (
            Pair(),
            {"compression": of(gtopk(density=0.5), hvd.Compression.none)},
            sides("gtopk density=0.5 ", "dense"),
        ),
        (
            Pair(),
            {"compression": of(hvd.Compression.none, hvd.Compression.fp16)},
            sides("dense", "dense FP16Compressor"),
        ),
        (Pair(), {"op": of(hvd.Average, hvd.Sum)}, sides("op=Average", "op=Sum")),
        (
            Pair(),
            {"missing_gradients": of("error", "zeros")},
            sides("missing_gradients='error'", "missing_gradients='zeros'"),
        ),
    ]
    model = Pair()
    named = of(list(model.named_parameters()), renamed(model, "second.bias", "second.offset"))
    cases.append(
        (
            model,
            {"named": named},
            sides("parameter 'second.bias' [3]", "parameter 'second.offset' [3]"),
        )
    )
    # The same names and shapes in another order: every rank has the same signature.
    model = Pair()
    swap = {"first.weight": "second.weight", "second.weight": "first.weight"}
    swapped = [(swap.get(name, name), p) for name, p in model.named_parameters()]
    cases.append(
        (
            model,
            {"named": of(list(model.named_parameters()), swapped)},
            sides("parameter 'first.weight' [3, 4]", "parameter 'second.weight' [3, 4]"),
        )
    )
    model = Pair()
    model.second.bias.requires_grad_(not IS_ODD)
    cases.append((model, {}, sides("parameter 'second.bias' [3]", "nothing in its place")))

    for model, arguments, parts in cases:
        optimizer = distribute(model, **arguments)
        before = bits(model, optimizer)
        backward_of_any_dtype(model)
        text = raises(
            hvd.HorovodInternalError,
            optimizer.step,
            f"the ranks disagree about {optimizer._reducer.peers.name}.plan: ",
            *parts,
        )
        assert bits(model, optimizer) == before
        check_that_training_goes_on()
        assert same_everywhere(text)


def backward_of_any_dtype(model: torch.nn.Module) -> None:
    model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).backward()


def test_optimizers_are_distinguished_by_the_names_of_their_parameters() -> None:
    """Neither the order in which a rank creates them matters, nor how many others it creates."""
    first, second = Pair(), Pair()
    prefixed = [(f"second.{name}", p) for name, p in second.named_parameters()]
    made = {}
    for one in ("second", "first") if IS_ODD else ("first", "second"):
        if one == "first":
            made[one] = distribute(first)
        else:
            made[one] = distribute(second, named=prefixed)
    if IS_ODD:
        model = Pair()
        distribute(model, named=[(f"more.{name}", p) for name, p in model.named_parameters()])
    backward(first)
    backward(second, batch=1)
    made["first"].step()
    made["second"].step()
    for parameter in (*first.parameters(), *second.parameters()):
        assert same_bits_everywhere(parameter)
    check_that_training_goes_on()


def test_missing_gradient_is_an_error_if_requested() -> None:
    for compression in COMPRESSIONS:
        model = Pair()
        optimizer = distribute(model, compression, missing_gradients="error")
        before = bits(model, optimizer)
        backward(model, with_second=not IS_ODD)
        text = raises(
            hvd.HorovodInternalError,
            optimizer.step,
            f"'second.weight' has none on rank {ODD}",
            f"'second.bias' has none on rank {ODD}",
            "leave out missing_gradients='error'",
        )
        assert "'first." not in text
        assert bits(model, optimizer) == before
        check_that_training_goes_on()
        take_steps(model, optimizer, [0])  # the failed optimizer continues as well
        assert bits(model, optimizer) != before
        assert same_everywhere(text)


def test_gradient_missing_on_all_ranks_is_no_error() -> None:
    model = Pair()
    optimizer = distribute(model)
    before = model.second.weight.detach().clone()
    backward(model, with_second=False)
    optimizer.step()
    assert torch.equal(model.second.weight, before)


def test_gradient_missing_on_one_rank_counts_as_zeros() -> None:
    for compression in COMPRESSIONS:
        results = []
        for missing in (True, False):
            model = Pair()
            optimizer = distribute(model, compression)
            for batch in range(4):
                optimizer.zero_grad()
                backward(model, batch, with_second=not IS_ODD)
                if not missing and IS_ODD:
                    for parameter in model.second.parameters():
                        parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
            for parameter in model.parameters():
                assert same_bits_everywhere(parameter)
            results.append(bits(model, optimizer))
        assert results[0] == results[1]
        assert not torch.equal(model.second.weight, Pair().second.weight)


def test_missing_gradient_is_reported_once_by_name() -> None:
    model = Pair()
    optimizer = distribute(model)

    def train() -> None:
        for batch in range(4):
            optimizer.zero_grad()
            backward(model, batch, with_second=not (IS_ODD and batch % 2))
            optimizer.step()

    (message,) = logged_lines(train)
    assert message.startswith("WARNING")
    assert f"'second.weight' has none on rank {ODD}" in message
    assert "missing_gradients='error'" in message


class LogLines(logging.Handler):
    """Keeps the log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname}: {record.getMessage()}")


def logged_lines(call: Callable[[], object]) -> list[str]:
    """Return the messages that gtopk logs during a call."""
    heard, log = LogLines(), logging.getLogger("gtopk")
    log.addHandler(heard)
    log.propagate = False
    try:
        call()
    finally:
        log.removeHandler(heard)
        log.propagate = True
    return heard.texts


def test_nonfinite_gradient_skips_one_step_on_every_rank() -> None:
    for compression in COMPRESSIONS:
        for value in (float("nan"), float("inf"), -float("inf")):
            model, twin = Pair(), Pair()
            optimizer, spared = distribute(model, compression), distribute(twin, compression)
            take_steps(model, optimizer, range(3))
            take_steps(twin, spared, range(3))
            before = bits(model, optimizer)
            optimizer.zero_grad()
            backward(model, 3)
            if IS_ODD:
                model.second.weight.grad[1, 2] = value
            (text,) = logged_lines(optimizer.step)
            assert text.startswith(f"WARNING: rank {RANK}: step "), text
            assert "skipped on every rank, residuals untouched" in text
            assert text.endswith(f"not finite on rank {ODD}: 'second.weight'")
            assert bits(model, optimizer) == before
            assert optimizer.skipped_steps == 1
            assert optimizer.last_step.skipped is True
            assert all(bool(p.grad.isnan().all()) for p in model.parameters())
            # The next steps are those of a twin that never saw it.
            assert logged_lines(lambda m=model, o=optimizer: take_steps(m, o, range(4, 6))) == []
            take_steps(twin, spared, range(4, 6))
            assert bits(model, optimizer) == bits(twin, spared)
            assert bits(model, optimizer) != before
            assert optimizer.last_step.skipped is False


def test_every_rank_with_a_nonfinite_gradient_is_named() -> None:
    model = Pair()
    optimizer = distribute(model, hvd.Compression.gtopk(density=0.2))
    backward(model)
    if RANK in (0, ODD):
        model.first.bias.grad.fill_(float("nan"))
    if IS_ODD:
        model.second.bias.grad.fill_(float("inf"))
    (text,) = logged_lines(optimizer.step)
    assert text.endswith(
        f"not finite on rank 0: 'first.bias'; rank {ODD}: 'first.bias', 'second.bias'"
    )


def test_grad_scaler_sees_an_overflow_on_any_rank() -> None:
    for compression in COMPRESSIONS:
        model = Pair()
        optimizer = distribute(model, compression)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for batch in range(3):
            before = bits(model, optimizer)
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(1000 * batch + RANK)
            x = torch.randn(5, 4, generator=generator)
            if batch == 1 and IS_ODD:
                x *= 1e30
            scaler.scale(model(x)).backward()

            def step(scaler: Any = scaler, optimizer: Any = optimizer) -> None:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()

            assert len(logged_lines(step)) == (batch == 1)
            assert (bits(model, optimizer) == before) == (batch == 1)
            assert scaler.get_scale() == (2.0 if batch else 4.0)


def test_excess_backward_pass_is_an_error_naming_the_parameter() -> None:
    for passes in (1, 2):
        model = Pair()
        optimizer = distribute(model, backward_passes_per_step=passes)
        for batch in range(passes):
            backward(model, batch)
        text = raises(
            AssertionError,
            lambda model=model: backward(model),
            f"was computed {passes + 1} times before a call to step()",
            "increase backward_passes_per_step",
        )
        assert any(f"gradient of '{name}'" in text for name, _ in model.named_parameters())
        optimizer.step()
        backward(model)  # passes count from the last step
        optimizer.load_state_dict(optimizer.state_dict())
        for batch in range(passes):
            backward(model, batch)  # and from the last load of a state
    check_that_training_goes_on()


def test_invalid_named_parameters_are_refused() -> None:
    model = Pair()
    pairs = list(model.named_parameters())
    for named, parts in (
        (pairs[:2], ("not in it", "number 2 of group 0, [3, 4]", "number 3 of group 0, [3]")),
        ([], ("not in it", "number 0 of group 0", "pass model.named_parameters() of the model")),
        (model, ("pairs of a name and a parameter", "model.named_parameters()")),
        (
            renamed(model, "second.bias", "first.bias"),
            ("must be unique", "come twice: 'first.bias'", "prefix"),
        ),
        (model.parameters(), ("pairs of a name and a parameter", "model.named_parameters()")),
        (dict(pairs), ("pairs of a name and a parameter",)),
        ([(name,) for name, _ in pairs], ("pairs of a name and a parameter",)),
        ([(name, p, 1) for name, p in pairs], ("pairs of a name and a parameter",)),
    ):
        raises(ValueError, lambda named=named: distribute(model, named=named), *parts)
    # Names are optional, and may include parameters that the optimizer does not step.
    plain = torch.optim.SGD(model.first.parameters(), lr=0.01)
    assert hvd.DistributedOptimizer(plain, model.named_parameters()) is not None
    assert hvd.DistributedOptimizer(plain) is not None


def test_compression_arguments_out_of_range_are_refused() -> None:
    model = Pair()
    gtopk = hvd.Compression.gtopk
    for density in (0, 0.0, -0.1, 1.001, float("nan"), float("inf")):
        raises(
            ValueError,
            lambda d=density: gtopk(density=d),
            "density must lie in (0, 1]",
            str(density),
        )
        raises(ValueError, lambda d=density: hvd.Compression.topk(d), "density must lie in (0, 1]")
    for density in ("0.01", None, [0.1], True):
        raises(
            TypeError, lambda d=density: gtopk(density=d), "density must be a number", repr(density)
        )
    for factor in (-0.1, 1.0, float("nan")):
        raises(
            ValueError,
            lambda f=factor: gtopk(momentum_correction=f),
            "momentum_correction must lie in [0, 1)",
        )
    for uncalled in ("topk", "gtopk", "oktopk", "hierarchical", "shards", "auto"):
        raises(
            TypeError,
            lambda name=uncalled: distribute(model, getattr(hvd.Compression, name)),
            f"compression is the class of Compression.{uncalled}(...): call it",
        )
    raises(
        TypeError, lambda: distribute(model, process_set=3), "process_set must be a ProcessSet", "3"
    )
    for passes in (1.5, True, "2"):
        raises(
            TypeError,
            lambda n=passes: distribute(model, backward_passes_per_step=n),
            f"backward_passes_per_step must be an integer, got {passes!r}",
        )
    for compression in ("gtopk", None, 0.01, object()):
        raises(
            TypeError,
            lambda c=compression: distribute(model, c),
            "compression must be Compression.none",
            "Compression.gtopk(density=...)",
            repr(compression),
        )
    for passes in (0, -1):
        raises(
            ValueError,
            lambda n=passes: distribute(model, backward_passes_per_step=n),
            f"backward_passes_per_step must be at least 1, got {passes}",
        )
    for op in (hvd.Min, hvd.Max, hvd.Product, 17):
        raises(
            ValueError, lambda op=op: distribute(model, op=op), "op must be Average, Sum or Adasum"
        )
    raises(
        ValueError,
        lambda: distribute(model, op=hvd.Sum, gradient_predivide_factor=2.0),
        "gradient_predivide_factor",
        "op=Average",
    )
    raises(
        ValueError,
        lambda: distribute(model, gradient_predivide_factor=0.0),
        "gradient_predivide_factor must be above 0",
    )
    raises(
        ValueError,
        lambda: distribute(model, missing_gradients="ignore"),
        "missing_gradients must be 'error' or 'zeros'",
        "'ignore'",
    )
    frozen = Pair().requires_grad_(False)
    raises(ValueError, lambda: distribute(frozen), "a parameter that requires a gradient")


def test_lbfgs_and_momentum_beside_correction_are_refused() -> None:
    parameters = list(Pair().parameters())
    lbfgs = torch.optim.LBFGS(parameters)
    raises(ValueError, lambda: hvd.DistributedOptimizer(lbfgs), "LBFGS")
    compression = hvd.Compression.gtopk(density=0.1, momentum_correction=0.9)
    momentum = torch.optim.SGD(
        [{"params": parameters[:1]}, {"params": parameters[1:], "momentum": 0.8}], lr=0.1
    )
    raises(
        ValueError,
        lambda: hvd.DistributedOptimizer(momentum, compression=compression),
        "momentum_correction=0.9",
        "momentum=0",
        "0.8",
    )


if __name__ == "__main__":
    run_tests(globals())
    check_that_training_goes_on()
    hvd.shutdown()
    print(f"rank {RANK}: every mistake was reported\n", end="", flush=True)
