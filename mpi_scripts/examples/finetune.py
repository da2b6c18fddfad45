"""Fine-tune a language model with Hugging Face's Trainer: all weights, or LoRA's.

torchrun --nproc-per-node 2 -m mpi_scripts.examples.finetune           # a small untrained GPT-2
torchrun --nproc-per-node 2 -m mpi_scripts.examples.finetune --dense   # with the same ramp
torchrun --nproc-per-node 2 -m mpi_scripts.examples.finetune --model FOLDER --rank 8   # LoRA

LoRA adapts a pretrained model: give one with --model. Its gradients are small (1.2 MB for GPT-2 at
rank 8), so compress them only if steps wait. With all weights (500 MB) they do on Ethernet.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence

import torch

import gtopk
from models.data.docstrings import load_docstrings

try:
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
    )
except ImportError as missing:
    sys.exit(f'this example needs {missing.name}: pip install peft, and ".[transformers]"')


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, and return the loss on held-out text, which is equal on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dense", action="store_true", help="Trainer without the callback")
    parser.add_argument("--model", help="for from_pretrained; without: a small one, of bytes")
    parser.add_argument("--rank", type=int, default=0, help="of LoRA; 0: all weights are trained")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        tiny = GPT2Config(
            vocab_size=256,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = GPT2LMHeadModel(tiny)
    if options.rank:
        lora = LoraConfig(r=options.rank, target_modules=["c_attn"], fan_in_fan_out=True)
        model = get_peft_model(model, lora)

    text = load_docstrings()  # bytes: a model of your own takes its tokenizer's numbers
    train, test = (
        [{"input_ids": x, "labels": x} for x in part[: len(part) // 64 * 64].view(-1, 64)]
        for part in (text.train, text.test[:4096])
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = gtopk.ramp(optimizer, options.steps, lambda step: 1 - step / options.steps)
    shards = gtopk.torch.Compression.shards()
    callbacks = [] if options.dense else [gtopk.transformers.GTopK(compression=shards)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=8,
                logging_steps=50,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=train,
            eval_dataset=test,
            callbacks=callbacks,
            optimizers=(optimizer, schedule),
        )
        trainer.train()
        loss: float = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {loss:.2f} after step {options.steps}", flush=True)
    return loss


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
