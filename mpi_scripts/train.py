"""Train a reference model on all ranks: a Horovod script with one import changed.

mpirun -n 4 python mpi_scripts/train.py --compression gtopk --density 0.01        # real digits
mpirun -n 32 python mpi_scripts/train.py --preset vgg16-cifar10 --data DIR --compression published
python mpi_scripts/train.py                  # one rank

A preset is a model, its data and hyper-parameters. Without --data, synthetic data replace published
sets, and every line that reports a measure says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

import torch

# Run as `python mpi_scripts/train.py`, Python finds neither `models` nor an uninstalled gtopk.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gtopk.torch as hvd  # was: import horovod.torch as hvd
from collectives.algorithms.gtopk import USUAL_GROWTH
from gtopk.cli.arguments import as_argument, number_in, output_file
from gtopk.compression import SparseCompression
from mpi_scripts.arguments import Parser, at_least, on_every_rank, own_device
from mpi_scripts.recipes import PublishedTree
from mpi_scripts.training.loop import AMP_DTYPES, Training, loss_scaler, train
from mpi_scripts.training.presets import PRESETS, Preset
from mpi_scripts.training.task import Feed, Source

DENSE: Final = ("none", "fp16", "bf16")
WARM: Final = SparseCompression.warmup_from
PUBLISHED: Final = "published"
SPARSE: Final = ("topk", "gtopk", "oktopk", "hierarchical", PUBLISHED)
ADAM_BETAS: Final = (0.9, 0.999)
GROWING: Final = ("gtopk", "hierarchical")


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="digits")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, help="the folder of the preset's published files")
    data.add_argument("--dataset", help="for preset digits: 'digits', or an .npz file")
    data.add_argument("--synthetic-samples", type=at_least(1), help="how many to train on")
    data.add_argument("--workers", type=at_least(0), default=0, help="processes that load batches")
    data.add_argument("--seed", type=at_least(0), default=0)
    recipe = parser.add_argument_group("recipe", "default: the preset's values")
    recipe.add_argument("--epochs", type=at_least(1))
    recipe.add_argument("--steps", type=at_least(1), help="stop after this many steps")
    recipe.add_argument("--batch-size", type=at_least(1), help="per rank and backward pass")
    recipe.add_argument("--passes", type=at_least(1), default=1, help="backward passes per step")
    recipe.add_argument("--lr", type=float)
    recipe.add_argument("--momentum", type=float)
    recipe.add_argument("--weight-decay", type=float, help="weight decay of SGD or AdamW")
    recipe.add_argument("--amp", choices=AMP_DTYPES, help="compute in half precision")
    sending = parser.add_argument_group("compression")
    sending.add_argument(
        "--compression",
        choices=[*DENSE, *SPARSE, "auto"],
        default="gtopk",
        help="published: the authors' gTop-k, a tree that loses some of the entries it drops",
    )
    sending.add_argument("--density", type=float, help="share of the entries to send")
    sending.add_argument(
        "--density-warmup-epochs",
        type=as_argument(number_in("[0, inf)")),
        default=0.0,
        help=f"epochs in which the density falls from {WARM:g} to --density",
    )
    sending.add_argument(
        "--growth",
        type=as_argument(number_in("[1, inf)")),
        help=f"width of gTop-k's updates, times k; 1: the paper's; default: {USUAL_GROWTH:g}",
    )
    sending.add_argument(
        "--momentum-correction",
        action=argparse.BooleanOptionalAction,
        help="apply momentum, or compute AdamW's steps, before the selection",
    )
    run = parser.add_argument_group("run")
    run.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    run.add_argument("--checkpoint", type=Path, help="folder to save to and to resume from")
    run.add_argument(
        "--checkpoint-every", type=at_least(0), default=0, help="steps between saves; 0: epochs"
    )
    # Not --log: torchrun and horovodrun would take it as an abbreviation of their own options.
    run.add_argument(
        "--log-file", type=as_argument(output_file), help="file for a line of JSON per epoch"
    )
    arguments = parser.parse_args()
    _require_one_source(arguments)
    _require_use(arguments)
    return arguments


def _require_one_source(arguments: argparse.Namespace) -> None:
    """Raise ValueError for a data option that would be ignored."""
    if arguments.preset == "digits":
        if arguments.data or arguments.synthetic_samples:
            raise ValueError(
                "--preset digits takes --dataset NAME or an .npz file, not --data or "
                "--synthetic-samples"
            )
    elif arguments.dataset:
        raise ValueError(f"--dataset is for --preset digits: give {arguments.preset} --data FOLDER")
    elif arguments.synthetic_samples and PRESETS[arguments.preset].is_at_hand:
        raise ValueError(f"--synthetic-samples: {arguments.preset} always trains on real data")
    if arguments.data and arguments.synthetic_samples:
        raise ValueError("give --data FOLDER or --synthetic-samples N, not both")


def _require_use(arguments: argparse.Namespace) -> None:
    """Raise ValueError for a given option that would have no effect; presets are not checked."""
    compression, preset = arguments.compression, PRESETS[arguments.preset]
    idle = []
    if compression in DENSE and arguments.density is not None:
        idle.append("--density")
    if compression not in SPARSE and arguments.density_warmup_epochs:
        idle.append("--density-warmup-epochs")
    if compression not in GROWING and arguments.growth is not None:
        raise ValueError(
            f"--growth is for {' and '.join(GROWING)}, got --compression {compression}"
        )
    if compression in DENSE and arguments.momentum_correction:
        idle.append("--momentum-correction")
    if idle:
        raise ValueError(
            f"--compression {compression} does not use {', '.join(idle)}: leave it out, or choose "
            f"one of {', '.join(SPARSE)}"
        )
    if preset.is_adam and arguments.momentum is not None:
        raise ValueError(f"--momentum is for SGD; {arguments.preset} trains with AdamW")
    has_momentum = preset.is_adam or _given(arguments.momentum, preset.momentum)
    if arguments.momentum_correction and not has_momentum:
        raise ValueError(f"--momentum-correction needs momentum, but {arguments.preset} has none")
    if arguments.workers and not preset.has_workers:
        raise ValueError(f"--workers: {arguments.preset} reads one text in order, without workers")
    if arguments.density_warmup_epochs and _given(arguments.density, preset.density) >= WARM:
        raise ValueError(f"--density-warmup-epochs starts at {WARM:g}: the density must be lower")
    if arguments.checkpoint_every and not arguments.checkpoint:
        raise ValueError("--checkpoint-every needs --checkpoint FOLDER to save in")


def prepare(arguments: argparse.Namespace) -> Training:
    """Return the training; raise ValueError, OSError or ImportError for the user's errors."""
    preset = PRESETS[arguments.preset]
    device = own_device(arguments.device)
    torch.manual_seed(arguments.seed)
    batch_size = _given(arguments.batch_size, preset.batch_size)
    task = preset.open(
        Source(
            arguments.dataset or "digits",
            arguments.data,
            arguments.synthetic_samples,
            arguments.seed,
        ),
        Feed(hvd.rank(), hvd.size(), batch_size, arguments.seed, arguments.workers),
    )
    steps_per_epoch = task.batches_per_epoch // arguments.passes
    if not steps_per_epoch:
        raise ValueError(
            f"--passes {arguments.passes} must not exceed the {task.batches_per_epoch} batches "
            "that each rank has in an epoch"
        )
    model = preset.model(task.sizes).to(device)
    facts = {
        "preset": arguments.preset,
        "ranks": hvd.size(),
        "batch_size": batch_size,
        "passes": arguments.passes,
        "parameters": sum(p.numel() for p in model.parameters()),
        "compression": arguments.compression,
        "density": _density(arguments, preset),
        "seed": arguments.seed,
        "device": device.type,
    }
    compression = _compression(arguments, preset, steps_per_epoch)  # refuses a momentum of 1
    return Training(
        task=task,
        model=model,
        optimizer=_optimizer(arguments, preset, model),
        compression=compression,
        adam_steps="before" if _takes_before(arguments, preset) else "after",
        schedule=preset.schedule,
        device=device,
        epochs=_given(arguments.epochs, preset.epochs),
        passes=arguments.passes,
        steps=arguments.steps,
        clip_norm=preset.clip_norm,
        amp=arguments.amp,
        scaler=loss_scaler(arguments.amp, device),
        checkpoint=arguments.checkpoint,
        checkpoint_every=arguments.checkpoint_every,
        log=arguments.log_file,
        facts=facts,
    )


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _density(arguments: argparse.Namespace, preset: Preset) -> float | None:
    """Return the share of the entries to send; None: always all of them."""
    if arguments.compression in DENSE:
        return None
    return float(_given(arguments.density, preset.density))


def _takes_before(arguments: argparse.Namespace, preset: Preset) -> bool:
    return bool(_given(arguments.momentum_correction, preset.momentum_correction))


def _correction(arguments: argparse.Namespace, preset: Preset) -> dict[str, Any]:
    """Return the compression's options for momentum before the selection; empty without it."""
    if arguments.compression in DENSE or not _takes_before(arguments, preset):
        return {}
    if preset.is_adam:
        return {}
    momentum = float(_given(arguments.momentum, preset.momentum))
    return {"momentum_correction": momentum} if momentum else {}


def _optimizer(
    arguments: argparse.Namespace, preset: Preset, model: torch.nn.Module
) -> torch.optim.Optimizer:
    lr = _given(arguments.lr, preset.lr)
    weight_decay = _given(arguments.weight_decay, preset.weight_decay)
    corrected = _correction(arguments, preset)
    if preset.is_adam:
        return torch.optim.AdamW(
            model.parameters(), lr, betas=ADAM_BETAS, weight_decay=weight_decay
        )
    momentum = _given(arguments.momentum, preset.momentum)
    if corrected:  # weight decay then bypasses SGD's momentum
        momentum, weight_decay = 0.0, weight_decay / (1.0 - momentum)
    return torch.optim.SGD(model.parameters(), lr, momentum, weight_decay=weight_decay)


def _compression(arguments: argparse.Namespace, preset: Preset, steps_per_epoch: int) -> Any:
    published = arguments.compression == PUBLISHED
    kind: Any = PublishedTree if published else getattr(hvd.Compression, arguments.compression)
    if arguments.compression in DENSE:
        return kind
    options = _correction(arguments, preset)
    if arguments.compression in SPARSE:
        options["warmup_steps"] = round(arguments.density_warmup_epochs * steps_per_epoch)
    if arguments.growth is not None:
        options["growth"] = arguments.growth
    return kind(density=_density(arguments, preset), **options)


def main() -> None:
    hvd.init()
    arguments = on_every_rank(parse)
    train(on_every_rank(lambda: prepare(arguments)))


if __name__ == "__main__":
    main()
