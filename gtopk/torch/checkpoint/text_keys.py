"""Keys of dicts in what torch.distributed.checkpoint wrote: it has text for all, and no empty dict.

    {"milestones": Counter({3: 1, 5: 1}), "state": {}}    as saved
    {"milestones": {"3": 1, "5": 1}}                      as written

What they were is known from the state of what they are loaded into, where that has them; from the
names of its parameters, in an optimizer's; and from the ranks, in their residuals.
"""

from __future__ import annotations

import copy
from itertools import zip_longest
from typing import Any

from ...wrapped import checkpoint as optimizer_checkpoint


def keyed(written: Any, like: Any) -> Any:
    """Return a state with the keys, types of dicts, and empty dicts that were saved.

    like: the state now of what it is loaded into; anything else where there is none.
    A key that is not there yet is an integer where all that are there are; else it stays text.
    """
    if type(written) is list:
        items = like if isinstance(like, list) else []
        return [keyed(item, of) for item, of in zip_longest(written, items[: len(written)])]
    if type(written) is not dict:
        return written
    state: dict[Any, Any] = copy.copy(like) if isinstance(like, dict) else {}
    there = dict(state)
    state.clear()
    written = _add_known_keys(written, there)
    keys = {str(key): key for key in there}
    are_integers = bool(there) and all(type(key) is int for key in there)
    for text, value in written.items():
        key = keys.get(text, _integer(text) if are_integers else text)
        state[key] = keyed(value, there.pop(key, None))
    state |= {key: each for key, each in there.items() if isinstance(each, dict) and not each}
    return state


def _add_known_keys(written: dict[Any, Any], like: dict[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's state, or a part of residuals, with what DCP has left out of it.

    The keys that are known to be in it are added to what it is like.
    """
    groups = written.get("param_groups")
    if isinstance(groups, list) and all(isinstance(g, dict) and "params" in g for g in groups):
        names = [name for group in groups for name in group["params"]]
        like["state"] = dict.fromkeys(names) | like.get("state", {})
        return {"state": {}, **written}
    if optimizer_checkpoint.is_part({"held": {}, **written}):
        ranks = range(written["ranks"])
        like["held"] = dict.fromkeys(ranks) | like.get("held", {})
        return {"held": {rank: {} for rank in ranks}, **written}  # none has a residual
    return written


def _integer(text: Any) -> Any:
    try:
        return int(text)
    except ValueError:
        return text
