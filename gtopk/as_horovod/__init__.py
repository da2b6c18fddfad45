"""gtopk under Horovod's names, for one process: `python -m gtopk.as_horovod script.py ...`.

    mpirun -n 4 python -m gtopk.as_horovod train.py --epochs 3
    torchrun --nproc-per-node 4 -m gtopk.as_horovod train.py --epochs 3
    python -m gtopk.as_horovod -m package.train

The script says `import horovod.torch as hvd` and is not changed; an installed Horovod is neither
changed nor imported. Objects may be sent as pickles, as with Horovod, unless GTOPK_ALLOW_PICKLE
forbids it.
"""

from __future__ import annotations

from .finder import install

__all__ = ["install"]
