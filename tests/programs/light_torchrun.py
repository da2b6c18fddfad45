"""torchrun with a light torch for the agent, which compiles nothing; ranks load what they need."""

import light_torch  # noqa: F401

from torch.distributed.run import main

if __name__ == "__main__":
    main()
