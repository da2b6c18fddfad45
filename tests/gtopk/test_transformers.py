"""gtopk.transformers: the callback with Hugging Face's real Trainer, if installed."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip(
    "transformers", reason="Transformers is not installed: make test-adapters"
)
pytest.importorskip("accelerate", reason="Accelerate is not installed: make test-adapters")


def test_transformers_trainer_exchanges_by_gtopk(torchrun: Any, tmp_path: Any) -> None:
    job = torchrun(2, "transformers_train.py", str(tmp_path))
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("Trainer uses gTop-k") == 2


@pytest.mark.filterwarnings("ignore")  # theirs
def test_transformers_trainer_on_one_process_raises(tmp_path: Any) -> None:
    from gtopk.transformers import GTopK

    config = transformers.GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
        train_dataset=[{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8,
        callbacks=[GTopK(density=0.05)],
    )
    with pytest.raises(ValueError, match=r"two ranks or more.* got GPT2LMHeadModel on 1 process$"):
        trainer.train()
