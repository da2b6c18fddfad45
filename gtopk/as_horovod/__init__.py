"""gtopk under Horovod's names, for one process: `python -m gtopk.as_horovod script.py ...`.

    mpirun -n 4 python -m gtopk.as_horovod train.py --epochs 3
    torchrun --nproc-per-node 4 -m gtopk.as_horovod train.py --epochs 3
    python -m gtopk.as_horovod -m package.train

The script says `import horovod.torch as hvd` and is not changed; a real Horovod beside it is not
touched, and not seen. Objects may travel as pickles there, as they do with Horovod, unless
GTOPK_ALLOW_PICKLE says otherwise.
"""

from __future__ import annotations

from .finder import install

__all__ = ["install"]
