"""The command `gtopk demo`: starts the ranks, shows progress, prints and writes results."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.cores import usable_cores

from ...runtime.launch import LaunchError, explain, rank_environment, run
from ...units import about_bandwidth_text, bytes_text, count_text
from ..run import parse_link
from .plan import PROGRESS, TRAIN_IMAGES, Plan
from .verdicts import (
    LATENCY_SECONDS,
    METHODS,
    PARTS,
    Record,
    epochs_text,
    level,
    link_verdict,
    over_link,
    pays_below,
)

if TYPE_CHECKING:
    from rich.console import Console

NEEDED = {"mpi4py": "mpi4py", "sklearn": "scikit-learn", "rich": "rich"}


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="gtopk demo",
        description="Train one network on real handwritten digits with dense allreduce, top-k "
        "allgather and gTop-k, on MPI ranks of this machine, and compare them; then train with "
        "dense and gTop-k as if a slow network joined the ranks.",
        epilog="example:\n  gtopk demo --ranks 4 --seeds 3 --out report",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan = Plan()
    described.add_argument("--ranks", type=int, default=plan.ranks, help="default: %(default)s")
    described.add_argument(
        "--seeds", type=int, default=plan.seeds, help="runs per method; default: %(default)s"
    )
    described.add_argument("--epochs", type=int, default=plan.epochs, help="default: %(default)s")
    described.add_argument(
        "--density",
        type=float,
        default=plan.density,
        help="share of entries sent; default: %(default)s",
    )
    described.add_argument(
        "--link",
        type=parse_link,
        default=plan.link,
        metavar="RATE[,LATENCY]",
        help="the network to emulate, such as 1gbit,0.2ms; default: %(default)s",
    )
    described.add_argument(
        "--out", type=Path, default=Path("report"), help="folder to write; default: %(default)s"
    )
    described.add_argument(
        "--json", action="store_true", help="print the records as JSON, and nothing else"
    )
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    options = parser().parse_args(arguments)
    lacking = [name for module, name in NEEDED.items() if not importlib.util.find_spec(module)]
    if lacking:
        return fail(f"the demo needs {', '.join(lacking)}: pip install {' '.join(lacking)}")
    for name in ("ranks", "seeds", "epochs"):
        if getattr(options, name) < 1:
            return refuse(f"--{name} must be at least 1, got {getattr(options, name)}")
    plan = Plan(
        options.ranks,
        options.seeds,
        options.epochs,
        density=options.density,
        link=options.link,
    )
    if plan.ranks > plan.most_ranks():
        return refuse(
            f"--ranks must be at most {plan.most_ranks()}, got {plan.ranks}: a step takes "
            f"{plan.batch} images per rank, and there are {count_text(TRAIN_IMAGES)} to train on"
        )
    if plan.epochs * plan.steps_per_epoch() < 2:
        return refuse(
            f"--epochs must be at least 2 with {plan.ranks} ranks, got {plan.epochs}: a run needs "
            "two steps to time one"
        )
    try:
        plan.methods()
    except ValueError as error:
        return refuse(f"--{error}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass  # before the ranks start, not after minutes of training
    except OSError as error:
        return refuse(
            f"--out must be a folder that can be written to, got '{options.out}': {error.strerror}"
        )
    from rich.console import Console

    # What the table takes at the least: a narrower terminal breaks its lines and loses no figure.
    width = max(80, Console().width) if sys.stdout.isatty() else 80
    console = Console(width=width, highlight=False, quiet=options.json)
    announce(console, plan)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        program = [sys.executable, "-m", "gtopk.cli.demo.rank", plan.to_json(), str(results)]
        try:
            with progress_shown(console) as on_line:
                code = run(plan.ranks, program, on_line=on_line)
        except LaunchError as error:
            return fail(str(error))
        if code != 0 or not results.exists():
            return fail(f"the ranks ended with exit code {code}; what they said stands above")
        records: list[Record] = json.loads(results.read_text(encoding="utf-8"))
    show(console, records)
    write_report(records, options.out)
    if options.json:
        print(json.dumps(records, indent=1))
    console.print(
        f"\n{time.monotonic() - begun:.0f} s in all. Report: {options.out / 'index.html'}  "
        f"Figures: {options.out / 'results.json'}",
        soft_wrap=True,
    )
    return 0


def fail(reason: str) -> int:
    """Print why nothing was shown, and return the exit code."""
    print(f"gtopk demo: {reason}", file=sys.stderr)
    return 1


def refuse(reason: str) -> int:
    """Print what is wrong with how it was called, and return the exit code of that."""
    fail(reason)
    return 2


def announce(console: Console, plan: Plan) -> None:
    """Print the plan and its settings."""
    console.print(
        f"MPI ranks: {plan.ranks}, cores: {usable_cores()}. They train an MLP on scikit-learn's "
        f"handwritten digits: 4 methods, {plan.epochs} epochs each, seeds: {plan.seeds}."
    )
    if plan.over_link():
        console.print(f"Then dense and gTop-k once more, over an emulated link: {plan.link}.")
    for line in explain(rank_environment(plan.ranks)):
        console.print(f"  set: {line}", markup=False, style="dim", soft_wrap=True)


class progress_shown:
    """A context whose value takes the ranks' lines; shows a bar, or lines without a terminal."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("starting the ranks", total=None)
        self.shown = ""

    def __enter__(self) -> Callable[[str], None]:
        self.bar.start()
        return self.take

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def take(self, line: str) -> None:
        """Show one line that a rank printed."""
        if not line.startswith(PROGRESS):
            self.console.print(line, markup=False)
            return
        at: dict[str, Any] = json.loads(line[len(PROGRESS) :])
        what = f"{at['method']}, seed {at['seed']}"
        self.bar.update(
            self.task, description=f"{what:28}", completed=at["done"], total=at["total"]
        )
        if not self.console.is_terminal and what != self.shown:
            self.shown = what
            percent = 100 * (at["done"] - 1) // at["total"]
            self.console.print(f"{percent:3d} %  {what}")


def show(console: Console, records: Sequence[Record]) -> None:
    """Print the table, and the notes on it."""
    from rich.table import Table

    dense = records[0]
    reached = level(dense)
    table = Table(
        title="Measured on this machine\n",
        title_justify="left",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("\nmethod", no_wrap=True)
    for heading in (
        "test\naccuracy %",
        f"epochs\nto {100 * reached:.0f} %",
        "sent per\nstep",
        "vs\ndense",
        "ms/step\ncompute",
        "select\n+ copy",
        "\ncommun.",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records[: len(METHODS)]:
        parts = record["step_seconds"]
        table.add_row(
            record["label"],
            accuracy_text(record),
            epochs_text(reached, record),
            bytes_text(record["bytes_per_step"]) + ("" if record["bytes_counted"] else " *"),
            against_dense(record, dense),
            *(f"{1000 * parts[part]:.2f}" for part in PARTS),
        )
    console.print(table)
    if not dense["bytes_counted"]:
        console.print(
            "* by formula, the least that any allreduce sends; the others are counted.", style="dim"
        )
    cores = dense["machine"]["cores"]
    console.print(
        "Sent: by each rank. Accuracy: mean ± standard deviation over "
        f"seeds ({dense['seeds']}). Epochs, of {dense['epochs']}: until that mean first is "
        f"{100 * reached:.0f} %, a point below dense's end. Times: medians over steps. "
        f"Ranks ({dense['ranks']}) share this machine's cores ({cores}) and memory: in this table "
        "no network lies between them, so there is nothing for compression to save time on.",
        style="dim",
    )
    if linked := over_link(records):
        said = link_verdict(*linked).words
        console.print(f"Over an emulated link of {linked[0]['link']}: {said}", soft_wrap=True)
    identical = all(record["final_replicas_identical"] for record in records)
    console.print(f"Replicas bit-identical after every run: {'yes' if identical else 'NO'}")
    console.print(f"Model, not measured: {model_line(dense, records[2])}", soft_wrap=True)


def accuracy_text(record: Record) -> str:
    """Return mean and standard deviation over seeds, in percent."""
    seeds = record["accuracy_by_seed"]
    spread = f" ± {100 * statistics.stdev(seeds):.2f}" if len(seeds) > 1 else ""
    return f"{100 * record['accuracy']:.2f}{spread}"


def against_dense(record: Record, dense: Record) -> str:
    """Return a text of how many times fewer bytes it sends than dense."""
    if not record["bytes_per_step"]:
        return "-"
    return f"1/{dense['bytes_per_step'] / record['bytes_per_step']:.1f}"


def model_line(dense: Record, gtopk: Record) -> str:
    """Return where the alpha-beta model sees the break-even."""
    latency = f"{1e6 * LATENCY_SECONDS:.0f} us latency"
    bits_per_second = pays_below(dense, gtopk)
    if bits_per_second is None:
        return f"on links of {latency}, this step of gTop-k pays at no bandwidth"
    if bits_per_second == float("inf"):
        return f"on links of {latency}, this step of gTop-k pays at every bandwidth"
    return (
        f"on links of {latency}, this step of gTop-k is faster than dense below "
        f"{about_bandwidth_text(bits_per_second)}, slower above (select and merge as measured here)"
    )


def write_report(records: Sequence[Record], folder: Path) -> None:
    """Write results.json and index.html into a folder that is there."""
    from .page import write_page

    (folder / "results.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    write_page(records, folder / "index.html")
