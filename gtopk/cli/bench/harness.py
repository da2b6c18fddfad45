"""The benchmarks' shared harness: parser and JSON, ranks, progress, and spreads over rounds.

Separate the words of an option with spaces, not commas, as a word may contain commas:
hierarchical:across=gtopk,growth=2.0.

Workloads: some networks compute (two residual networks, He et al. 2016); others have only the
shapes of a network, and their gradients cost a copy. A layer lists its weight first, then its
biases and the parameters of its batch norm; their gradients become ready together, when backward
has passed the layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict, TypeVar

import numpy as np
import torch
from torch import nn

from collectives.errors import CollectiveError, PeerError
from collectives.transports import Transport, local_world, run_ranks

from ...runtime.launch import launched_by, transport_name
from ...runtime.world.joining import join
from ...runtime.world.membership import emulate_on
from ..arguments import Command, fail, records_file

# Long, because ranks that are not being measured wait for those that are.
TIMEOUT_SECONDS: Final = 3600.0
T = TypeVar("T")


def add_words(
    described: argparse.ArgumentParser,
    option: str,
    read: Callable[[str], T],
    default: Sequence[T] | None = None,
    *,
    may_be_none: bool = False,
    metavar: str = "NAME",
    help: str | None = None,
) -> None:
    """Add an option that takes one or more words, each converted with `read`.

    read:        raises ValueError for an unknown word.
    may_be_none: also accept the option without words, as an empty list.
    """

    def word(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            hint = f"; give several with spaces: {text.replace(',', ' ')}" if "," in text else ""
            raise argparse.ArgumentTypeError(f"{error}{hint}") from None

    many = "*" if may_be_none else "+"
    described.add_argument(
        option, type=word, nargs=many, default=default, metavar=metavar, help=help
    )


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """Return a function that accepts one of these words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}; got {text!r}")
        return text

    return read


def show_progress(text: str = "") -> None:
    """Replace the progress line on a terminal; without a text, clear it for the next output."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def silent(text: str = "") -> None:
    """Print nothing: the progress callback of ranks other than 0."""


class Spread(TypedDict):
    """The spread of a number over the rounds."""

    min: float
    lower_quartile: float
    median: float
    upper_quartile: float
    max: float


class PerRank(TypedDict):
    """The spread of a number over the ranks, per round."""

    mean: float
    max: float


def spread(seconds: Sequence[float]) -> Spread:
    """Return the spread of a contender's rounds."""
    least, lower, median, upper, most = np.percentile(seconds, [0, 25, 50, 75, 100]).tolist()
    return Spread(min=least, lower_quartile=lower, median=median, upper_quartile=upper, max=most)


def per_rank(numbers: Sequence[float]) -> PerRank:
    """Return the spread over the ranks."""
    return PerRank(mean=statistics.fmean(numbers), max=max(numbers))


def bench_parser(call: str, description: str, launched: bool = False) -> Command:
    """Return a benchmark's parser, with the option --json.

    call:     the full command, such as "gtopk bench optimizer".
    launched: show an example under mpirun.
    """
    example = f"{'mpirun -n 4 ' * launched}{call} --json records.json"
    described = Command(call, description, example)
    written = "file to write the records to; -: stdout"
    described.option("--json", records_file, None, written, metavar="FILE")
    return described


class UsageError(Exception):
    """An argument does not fit the ranks that were started; all of them raise it."""


def on_ranks(work: Callable[[Transport], object], threads: int, over: str | None = None) -> int:
    """Run a benchmark on the launcher's ranks, or on threads; a failure ends the whole job.

    threads: their number, used without a launcher or over "local"; these measure no network.
    over:    the transport; None: the one that training would use.
    """
    if (over or transport_name(launched_by())) == "local":
        try:
            run_ranks(local_world(threads, TIMEOUT_SECONDS), work)
        except CollectiveError as error:
            return fail("bench", error)
        except MemoryError as error:
            return _fail_for_memory(error)
        return 0
    transport = join(over=over, timeout_seconds=TIMEOUT_SECONDS)
    try:
        emulate_on(transport)
        work(transport)
    except UsageError as error:
        transport.leave(f"{error}")
        return fail("bench", error, code=2) if transport.rank == 0 else 2
    except BaseException as error:
        if isinstance(error, MemoryError):
            _fail_for_memory(error)
        # Only the failing rank knows the cause; skip the PeerErrors that it triggers on others.
        elif not isinstance(error, PeerError) or transport.rank == 0:
            traceback.print_exc()
        # `abort` ends the process without flushing.
        sys.stderr.flush()
        transport.abort(1)
        raise
    return 0


def _fail_for_memory(error: MemoryError) -> int:
    return fail("bench", f"not enough memory ({error}): use shorter vectors")


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def _residual(widths: list[int], blocks: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(),
    ]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(_Block(inputs, width, 2 if stage and not block else 1))
            inputs = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    return nn.Sequential(*layers)


def resnet20() -> nn.Module:
    """Return a network of 0.27 million parameters."""
    return _residual([16, 32, 64], 3)


def resnet18() -> nn.Module:
    """Return a network of 11.2 million parameters."""
    return _residual([64, 128, 256, 512], 2)


NETWORKS: Final = {"resnet20": resnet20, "resnet18": resnet18}


Shape = tuple[int, ...]
Layer = tuple[Shape, ...]


def convolution(inputs: int, outputs: int, kernel: int, *, biased: bool, normed: bool) -> Layer:
    vectors = biased + 2 * normed
    return ((outputs, inputs, kernel, kernel), *[(outputs,)] * vectors)


def linear(inputs: int, outputs: int) -> Layer:
    return ((outputs, inputs), (outputs,))


def resnet50() -> Iterator[Layer]:
    def normed(inputs: int, outputs: int, kernel: int) -> Layer:
        return convolution(inputs, outputs, kernel, biased=False, normed=True)

    yield normed(3, 64, 7)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            yield from (normed(inputs, width, 1), normed(width, width, 3))
            yield normed(width, 4 * width, 1)
            if block == 0:
                yield normed(inputs, 4 * width, 1)
            inputs = 4 * width
    yield linear(inputs, 1000)


def lstm_ptb() -> Iterator[Layer]:
    vocabulary, width = 10_000, 1500
    yield ((vocabulary, width),)
    for _ in range(2):
        yield ((4 * width, width), (4 * width, width), (4 * width,), (4 * width,))
    yield linear(width, vocabulary)


def _gpt2() -> Iterator[Layer]:
    width = 768
    yield ((50_257, width),)
    yield ((1024, width),)
    norm = ((width,), (width,))
    for _ in range(12):
        yield (*norm, (width, 3 * width), (3 * width,), (width, width), (width,))
        yield (*norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,))
    yield norm


# A step's overhead depends on the number of parameters and their lengths; these span both.
SHAPES: Final[Mapping[str, Callable[[], Iterator[Layer]]]] = {
    "one-50m": lambda: iter([((50_000_000,),)]),
    "160x1000": lambda: iter([((1000,),)] * 160),
    "1000x10": lambda: iter([((10,),)] * 1000),
    "resnet50-shapes": resnet50,
    "gpt2-shapes": _gpt2,
    "lstm-ptb-shapes": lstm_ptb,
}


class Compute(NamedTuple):
    """The computation of a step. make: creates the model. backward: runs forward and backward."""

    make: Callable[[], nn.Module]
    backward: Callable[[nn.Module], None]


class _Pass(torch.autograd.Function):
    """Return a copy of x; backward calls `pause`, then yields fixed gradients for a layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gradients: list[torch.Tensor],
        pause: Callable[[], None],
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gradients, ctx.pause = gradients, pause
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        ctx.pause()
        # Return copies: autograd stores a gradient as .grad, which optimizers change in place.
        return outputs[0], None, None, *(gradient.clone() for gradient in ctx.gradients)


class Shapes(nn.Module):
    """Layers of the given shapes with fixed random gradients, without any computation.

    pause: called in backward before each layer's gradients; make it sleep to model computation.
    """

    def __init__(self, layers: list[Layer], seed: int, pause: Callable[[], None]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.ParameterList(torch.zeros(shape) for shape in layer) for layer in layers
        )
        self._gradients = [
            [torch.randn(shape, generator=generator) for shape in layer] for layer in layers
        ]
        self._pause = pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, gradients in zip(self.layers, self._gradients, strict=True):
            x = _Pass.apply(x, gradients, self._pause, *layer.parameters())  # type: ignore[no-untyped-call]
        return x


def of_layers(layers: list[Layer], rank: int, pause: Callable[[], None] = lambda: None) -> Compute:
    """Return a computation on parameters of these shapes; gradients cost a copy and a pause."""

    def backward(network: nn.Module) -> None:
        network(torch.ones(1, requires_grad=True)).sum().backward()

    return Compute(lambda: Shapes(layers, rank, pause), backward)


def shapes(model: str, rank: int) -> Compute:
    """Return a computation of a copy per gradient, so that the rest of a step is overhead."""
    return of_layers(list(SHAPES[model]()), rank)


def real(model: str, batch: int, rank: int) -> Compute:
    """Return the computation of a real network on random 32 x 32 images."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (batch,), generator=generator)

    def make() -> nn.Module:
        # All ranks and all contenders start with the same weights.
        torch.manual_seed(0)
        return NETWORKS[model]()

    def backward(network: nn.Module) -> None:
        nn.functional.cross_entropy(network(images), labels).backward()

    return Compute(make, backward)
