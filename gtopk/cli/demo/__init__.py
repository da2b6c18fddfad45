"""`gtopk demo`: train on local ranks with four methods, and report the results."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives.algorithms.gtopk import USUAL_GROWTH
from collectives.cores import usable_cores

from ...compression import Compression, SparseCompression
from ...runtime.launch import LaunchError, explain, rank_environment, run
from ...units import bytes_text, count_text, counted
from ..arguments import Command, fail, share, whole_number, write_records
from ..bench.harness import show_progress
from ..charts import aligned, wrapped
from ..run import parse_link
from .page import page
from .verdicts import METHODS, PARTS, Record, epochs_text, level, link_verdict, over_link

NEEDED = {"mpi4py": "mpi4py", "sklearn": "scikit-learn"}
TRAIN_IMAGES = 1437  # of scikit-learn's digits
PROGRESS = "@progress "  # prefix of the JSON lines with rank 0's progress


@dataclass(frozen=True)
class Plan:
    """The settings of one demo, the same on every rank."""

    ranks: int = 4
    seeds: int = 5
    epochs: int = 30
    batch: int = 32  # samples per rank and step
    density: float = 0.01  # for top-k, and gTop-k at equal k
    lr: float = 0.05
    momentum: float = 0.9  # dense: in the optimizer; sparse: before the selection
    hidden: int = 256
    link: str = "100mbit"  # emulated in extra runs after those without a link

    def steps_per_epoch(self) -> int:
        """Return the number of full global batches in the training images."""
        return TRAIN_IMAGES // (self.batch * self.ranks)

    def runs(self) -> int:
        """Return the number of training runs: every method and seed, plus those over the link."""
        return self.seeds * len(self.methods()) + len(self.over_link())

    def over_link(self) -> list[Method]:
        """Return the methods also run over the emulated link, with one seed; empty for one rank."""
        return [self.methods()[0], self.methods()[2]] if self.ranks > 1 else []

    def methods(self) -> list[Method]:
        """Return the compared methods, in the order of the report."""
        equal = equal_bytes_density(self.density, self.ranks)
        return [
            Method("dense", "dense allreduce", Compression.none),
            Method("topk", "top-k allgather", self._sparse(Compression.topk, self.density)),
            Method("gtopk", "gTop-k, equal k", self._sparse(Compression.gtopk, self.density)),
            Method(
                "gtopk-equal-bytes", "gTop-k, equal bytes", self._sparse(Compression.gtopk, equal)
            ),
        ]

    def _sparse(self, kind: type[SparseCompression], density: float) -> SparseCompression:
        return kind(density, momentum_correction=self.momentum)


@dataclass(frozen=True)
class Method:
    """One way to reduce the gradients."""

    name: str
    label: str
    compression: Any

    @property
    def sparse(self) -> bool:
        return isinstance(self.compression, SparseCompression)

    @property
    def density(self) -> float:
        """Return the fraction of the entries that a rank selects."""
        return float(self.compression.density) if self.sparse else 1.0


def equal_bytes_density(density: float, ranks: int, growth: float = USUAL_GROWTH) -> float:
    """Return the density at which gTop-k sends as many bytes as top-k allgather at `density`.

    Of P ranks, let p be the largest power of two <= P. The allgather sends P (P-1) lists in total.
    gTop-k sends log2(p) lists from each of p ranks; each rank beyond p sends its picks and receives
    the result, which is `growth` (at most 2) lists long.
    """
    if ranks == 1:
        return density
    # The butterfly needs a power of two; the other ranks fold in first and get the result back.
    paired = 1 << (ranks.bit_length() - 1)
    lists = paired * (paired.bit_length() - 1) + (1 + growth) * (ranks - paired)
    return min(1.0, density * ranks * (ranks - 1) / lists)


def parser() -> Command:
    """Return the argument parser."""
    described = Command(
        "gtopk demo",
        "Train one network on real handwritten digits with dense allreduce, top-k "
        "allgather and gTop-k, on MPI ranks of this machine, and compare them; then train with "
        "dense and gTop-k as if a slow network joined the ranks.",
        "gtopk demo --ranks 4 --seeds 3 --out report",
    )
    plan = Plan()
    described.option("--ranks", whole_number, plan.ranks, "MPI ranks")
    described.option("--seeds", whole_number, plan.seeds, "runs per method")
    described.option("--epochs", whole_number, plan.epochs, "of a run")
    described.option("--density", share, plan.density, "share of entries sent")
    described.option(
        "--link",
        parse_link,
        plan.link,
        "the network to emulate, such as 1gbit,0.2ms",
        metavar="RATE[,LATENCY]",
    )
    described.option("--out", Path, Path("report"), "folder to write")
    described.flag("--json", "print the records as JSON, and nothing else")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    options = parser().parse_args(arguments)
    missing = [name for module, name in NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        needs = f"the demo needs {', '.join(missing)}: pip install {' '.join(missing)}"
        return fail("demo", needs)
    plan = Plan(
        options.ranks, options.seeds, options.epochs, density=options.density, link=options.link
    )
    if error := _argument_error(plan, options.out):
        return fail("demo", error, code=2)
    if options.json:
        # Keep human-readable output out of the records on stdout.
        with contextlib.redirect_stdout(sys.stderr):
            code = train(plan, options.out)
        if code == 0:
            print((options.out / "results.json").read_text(encoding="utf-8"), end="")
        return code
    return train(plan, options.out)


def train(plan: Plan, out: Path) -> int:
    """Train on local ranks, print and write the results, and return the exit code."""
    announce(plan)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        program = [
            sys.executable,
            "-m",
            "gtopk.cli.demo.rank",
            json.dumps(asdict(plan)),
            str(results),
        ]
        try:
            code = run(plan.ranks, program, on_line=progress_printer())
        except LaunchError as error:
            return fail("demo", error)
        finally:
            show_progress()
        if code != 0 or not results.exists():
            ended = f"the ranks ended with exit code {code}; see their output above"
            return fail("demo", ended)
        records: list[Record] = json.loads(results.read_text(encoding="utf-8"))
    show(records)
    write_records(records, out / "results.json")
    (out / "index.html").write_text(page(records), encoding="utf-8")
    print(
        f"\n{time.monotonic() - begun:.0f} s in all. Report: {out / 'index.html'}  "
        f"Figures: {out / 'results.json'}"
    )
    return 0


def _argument_error(plan: Plan, out: Path) -> str:
    """Return the error in the arguments, "" if there is none."""
    most = TRAIN_IMAGES // plan.batch
    if plan.ranks > most:
        return (
            f"--ranks must be at most {most}, got {plan.ranks}: a step takes "
            f"{plan.batch} images per rank, and there are {count_text(TRAIN_IMAGES)} to train on"
        )
    if plan.epochs * plan.steps_per_epoch() < 2:
        return (
            f"--epochs must be at least 2 with {counted(plan.ranks, 'rank')}, got {plan.epochs}: a "
            "run needs two steps to time one"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Try writing now, not after minutes of training.
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        return f"--out must be a folder that can be written to, got '{out}': {error.strerror}"
    return ""


def announce(plan: Plan) -> None:
    """Print the plan and its settings."""
    _say(
        f"MPI ranks: {plan.ranks}, cores: {usable_cores()}. They train an MLP on scikit-learn's "
        f"handwritten digits: 4 methods, {counted(plan.epochs, 'epoch')} each, seeds: {plan.seeds}."
    )
    if plan.over_link():
        _say(f"Then dense and gTop-k once more, over an emulated link: {plan.link}.")
    for line in explain(rank_environment(plan.ranks)):
        print(f"  set: {line}")


def _say(text: str) -> None:
    print(*wrapped(text), sep="\n")


def progress_printer() -> Callable[[str], None]:
    """Return a function that prints the ranks' lines, with progress in one line of a terminal."""
    seen: set[str] = set()

    def show_line(line: str) -> None:
        if not line.startswith(PROGRESS):
            show_progress()
            print(line)
            return
        at: dict[str, Any] = json.loads(line[len(PROGRESS) :])
        what = f"{at['method']}, seed {at['seed']}"
        text = f"{100 * (at['done'] - 1) // at['total']:3d} %  {what}"
        show_progress(text)
        if not sys.stderr.isatty() and what not in seen:
            print(text)
        seen.add(what)

    return show_line


def show(records: Sequence[Record]) -> None:
    """Print the table and its notes."""
    dense = records[0]
    reached = level(dense)
    rows = [
        ("", "test", "epochs", "sent per", "vs", "ms/step", "select", ""),
        (
            *("method", "accuracy %", f"to {100 * reached:.0f} %", "step", "dense"),
            *("compute", "+ copy", "commun."),
        ),
    ]
    # The later records are over the link; a sentence below the table reports them.
    for record in records[: len(METHODS)]:
        seeds, parts = record["accuracy_by_seed"], record["step_seconds"]
        sd = f" ± {100 * statistics.stdev(seeds):.2f}" if len(seeds) > 1 else ""
        bytes_sent = record["bytes_per_step"]
        compute, select, communicate = (f"{1000 * parts[part]:.2f}" for part in PARTS)
        rows.append(
            (
                record["label"],
                f"{100 * record['accuracy']:.2f}{sd}",
                epochs_text(reached, record),
                bytes_text(bytes_sent) + ("" if record["bytes_counted"] else " *"),
                f"1/{dense['bytes_per_step'] / bytes_sent:.1f}" if bytes_sent else "-",
                *(compute, select, communicate),
            )
        )
    print("Measured on this machine", "", *aligned(rows, gap=1), sep="\n")
    if not dense["bytes_counted"]:
        _say("* computed: the least that any allreduce sends; the others are counted.")
    cores = dense["machine"]["cores"]
    _say(
        "Sent: by each rank. Accuracy: mean ± standard deviation over "
        f"seeds ({dense['seeds']}). Epochs, of {dense['epochs']}: until that mean first is "
        f"{100 * reached:.0f} %, a point below dense's end. Times: medians over steps. "
        f"Ranks ({dense['ranks']}) share this machine's cores ({cores}) and memory: in this table "
        "there is no network between them, so compression cannot save time."
    )
    if linked := over_link(records):
        comparison = link_verdict(*linked).words
        _say(f"Over an emulated link of {linked[0]['link']}: {comparison}")
    identical = all(record["final_replicas_identical"] for record in records)
    print(f"Replicas bit-identical after every run: {'yes' if identical else 'NO'}")
