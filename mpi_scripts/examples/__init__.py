"""Complete training scripts to copy from; `--dense` runs each without compression.

    images.py       DistributedDataParallel, SGD with momentum         gtopk.ddp
    nanogpt.py      a small GPT, AdamW, clipping, a ramp of the rate   gtopk.torch
    finetune.py     Hugging Face's Trainer, LoRA or all weights        gtopk.transformers
    trainer.py      Lightning's Trainer                                gtopk.lightning
    fabric.py       Lightning Fabric: the loop is yours                gtopk.lightning
    titan.py        torchtitan's trainer, HSDP, AdamW                  gtopk.fsdp
    two_sites.py    local steps, a rare exchange between sites         gtopk.LocalSGD

From the root of a clone, after `pip install ".[demo]"` for scikit-learn's digits:
torchrun --nproc-per-node 2 -m mpi_scripts.examples.images
"""
