"""Run under torchrun on 2 ranks, with a folder: a Trainer whose DDP uses gTop-k."""

import logging
import re
import shutil
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checks import logged
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gtopk.torch as hvd
from gtopk.transformers import GTopK

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.simplefilter("ignore")
logging.getLogger("gtopk").setLevel(logging.WARNING)
FOLDER = Path(sys.argv[1])
WORDS = 32


def samples() -> list[dict[str, torch.Tensor]]:
    """Return sequences that count up, by 1 to 4, from somewhere."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, WORDS, (128,), generator=generator)
    strides = torch.randint(1, 5, (128,), generator=generator)
    texts = (starts[:, None] + strides[:, None] * torch.arange(16)) % WORDS
    return [{"input_ids": text, "labels": text} for text in texts]


def made(
    callbacks: list[Any], folder: Path, optimizer: Any = None, loss: Any = None, **options: Any
) -> Trainer:
    """Return a Trainer of a tiny GPT-2, always with the same initial weights."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )
    usual = {
        "max_steps": 8,
        "save_steps": 4,
        "logging_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return Trainer(
        model,
        TrainingArguments(str(folder), **{**usual, **options}),
        train_dataset=samples(),
        callbacks=callbacks,
        optimizers=(optimizer and optimizer(model.parameters()), None),
        compute_loss_func=loss,
    )


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in trainer.model.parameters()])


def residual_norm(callback: GTopK, trainer: Trainer) -> torch.Tensor:
    (held,) = callback.state.state_dict(trainer.model)["held"].values()
    return torch.stack([tensors["residual"].norm() for tensors in held.values()]).norm()


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_resumed(name: str, **options: Any) -> None:
    """Train 8 steps, then again from the checkpoint after 4: the result is the same bit for bit."""
    folder = FOLDER / name
    whole = GTopK(density=0.05)
    trainer = made([whole], folder, **options)
    assert not [text for text in logged(trainer.train) if "residual" in text]
    assert whole.state.makes_adam_steps
    mine = weights(trainer)
    assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None]))
    assert trainer.args.max_grad_norm == 1.0  # Trainer's own value again

    part = GTopK(density=0.05)
    resumed = made([part], folder, **options)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert torch.equal(weights(resumed), mine)
    norm = residual_norm(whole, trainer)
    assert norm > 0
    assert torch.equal(residual_norm(part, resumed), norm)
    # The checkpoint after 8 steps was written twice, and has the second run's parts.
    hvd.barrier()
    assert len(list((folder / "checkpoint-8").glob("gtopk-*"))) == 1

    # Trainer's logs have the report as well as the loss.
    entries = [entry for entry in trainer.state.log_history if "gtopk/sent bytes" in entry]
    assert [entry["step"] for entry in entries] == [4, 8]
    assert entries[-1]["gtopk/sent bytes"] == whole.state.last_step.sent_bytes
    assert "gtopk seconds/wait" in entries[-1]


check_resumed("float32")
check_resumed("bf16", bf16=True)

# A moved checkpoint: its parts are found if the script names it; otherwise a warning says so.
hvd.barrier()
moved = shutil.move(FOLDER / "bf16", FOLDER / "moved") if hvd.rank() == 0 else None
hvd.barrier()
checkpoint = str(FOLDER / "moved" / "checkpoint-4")
for named in ({}, {"resume_from_checkpoint": checkpoint}):
    callback = GTopK(density=0.05)
    trainer = made([callback], FOLDER / f"elsewhere-{len(named)}", save_strategy="no", **named)
    messages = logged(partial(trainer.train, resume_from_checkpoint=checkpoint))
    missed = [text for text in messages if "the residuals and moments" in text]
    assert len(missed) == (not named and hvd.rank() == 0), messages
    for text in missed:
        norm = re.search(r"the norm of rank 0's residual was (\S+)\)", text)
        assert norm is not None, text
        assert float(norm[1]) > 0
    assert callback.state.progress.steps == (8 if named else 4)

# A run that clips, with Trainer's max_grad_norm, trains like one with whole gradients.
long = {"max_steps": 64, "logging_steps": 16, "save_strategy": "no", "max_grad_norm": 0.5}
dense, ours = made([], FOLDER / "c", **long), made([GTopK(density=0.05)], FOLDER / "c", **long)
dense.train()
ours.train()
first, last = losses(dense)[0], losses(dense)[-1]
print("losses", losses(dense), losses(ours), flush=True)
assert losses(ours)[-1] - last < 0.2 * (first - last)

# Another `train` of a Trainer keeps the residual and the hook.
callback = GTopK(density=0.05)
trainer = made([callback], FOLDER / "twice", save_strategy="no", gradient_accumulation_steps=2)
trainer.train()
norm = residual_norm(callback, trainer)


class Look(transformers.TrainerCallback):
    """Looks at the residual when training begins again."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 0:
            assert torch.equal(residual_norm(callback, trainer), norm)
            assert callback.state.progress.steps == 8


trainer.add_callback(Look())
trainer.train()
assert callback.state.progress.steps == 16


# A restart with smaller batches, after memory did not suffice, keeps the residual.
tries = 0


def too_much(outputs: Any, labels: torch.Tensor, **others: Any) -> torch.Tensor:
    """Fail in the first try's fourth step, after a forward pass with this rank's unsent steps."""
    global tries
    tries += 1
    if tries == 4:
        raise RuntimeError("CUDA out of memory.")
    return outputs["logits"].square().mean()


class Found(transformers.TrainerCallback):
    """Notes the residual's norm whenever training has begun, before a step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.steps: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.norms.append(float(residual_norm(callback, trainer)))
        self.steps.append(callback.state.progress.steps)


callback, found = GTopK(density=0.05), Found()
again = {"auto_find_batch_size": True, "save_strategy": "no"}
trainer = made([callback, found], FOLDER / "again", loss=too_much, **again)
trainer.train()
assert found.steps == [0, 1, 2, 3, *range(3, 11)], found.steps
assert found.norms[4] == found.norms[3] > 0
assert callback.state.progress.steps == 3 + 8
mine = weights(trainer)
assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None]))


# A gradient that is not finite on one rank costs one step on all.
calls = 0


def bad_once(outputs: Any, labels: torch.Tensor, **others: Any) -> torch.Tensor:
    global calls
    calls += 1
    return outputs["logits"].square().mean() * (float("nan") if calls == 3 and hvd.rank() else 1.0)


callback = GTopK(density=0.05)
trainer = made([callback], FOLDER / "bad", loss=bad_once, save_strategy="no")
trainer.train()
assert callback.state.skipped_steps == 1
assert bool(weights(trainer).isfinite().all())


# Other optimizers step with agreed gradients, which Trainer clips; it must not clip anything else.
def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


callback = GTopK(density=0.05)
trainer = made([callback], FOLDER / "sgd", optimizer=sgd, save_strategy="no")
trainer.train()
assert not callback.state.makes_adam_steps
assert trainer.args.max_grad_norm == 1.0
for correction in ({"adam_correction": (0.9, 0.999)}, {"momentum_correction": 0.9}):
    trainer = made([GTopK(density=0.05, **correction)], FOLDER / "no", optimizer=sgd)
    with pytest.raises(ValueError, match=r"max_grad_norm=1 is .*_correction.*give TrainingArg"):
        trainer.train()


# A callback that is removed would leave its hook in DDP.
class Removes(transformers.TrainerCallback):
    """Removes the other callback after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        trainer.remove_callback(GTopK)


trainer = made([GTopK(density=0.05), Removes()], FOLDER / "no", optimizer=sgd, save_strategy="no")
with pytest.raises(RuntimeError, match=r"GTopK was removed .* make a new Trainer"):
    trainer.train()
print("Trainer uses gTop-k\n", end="", flush=True)
torch.distributed.destroy_process_group()
