"""torchrun, whose agent compiles nothing: its ranks load of torch what they ask for."""

import light_torch  # noqa: F401

from torch.distributed.run import main

if __name__ == "__main__":
    main()
