"""What becomes of a loader whose world is over: after elastic's recovery, or `shutdown` and `init`.

In mode "balanced" all that ranks have under way is the batch in hand, so that the loader goes on.
The other modes' gradients, replicas and shared models end with the world.
"""

from __future__ import annotations

from ...runtime.world import world
from ...runtime.world.state import World


def entered(here: World) -> World | None:
    """Return the world of today where it is another one, which has the ranks where they were.

    Raises RuntimeError for other ranks.
    """
    if not is_over(here):
        return None
    now = world.current()
    if (now.rank, now.size) != (here.rank, here.size):
        raise RuntimeError(
            f"this loader was created on rank {here.rank} of {here.size} but now runs on rank "
            f"{now.rank} of {now.size}; call hvd.adapt() again"
        )
    return now


def require_its_world(here: World, mode: str, way_out: str = "") -> None:
    """Raise RuntimeError where the loader's world is over; no failure that elastic recovers from.

    way_out: what to do, where that is not to create optimizer and loader again.
    """
    if not is_over(here):
        return
    raise RuntimeError(
        f"rank {here.rank}: the loader that hvd.adapt made in mode {mode!r} cannot go on after "
        "shutdown() or elastic's recovery, which end what its ranks have under way: "
        + (
            way_out
            or "create it and its DistributedOptimizer again, as within the function that "
            "hvd.elastic.run decorates; or use mode 'balanced', whose loader goes on"
        )
    )


def is_over(here: World) -> bool:
    """Tell whether there is another world by now; without any, operations say so."""
    return world.is_initialized() and world.current() is not here
