"""Values that DCP saved under text keys load under the original keys of the target."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest

from gtopk.torch.checkpoint.state import restore_keys


@pytest.mark.parametrize(
    ("written", "like", "saved"),
    [
        ({"1": "a", "None": "b"}, {1: "", None: ""}, {1: "a", None: "b"}),
        ({"3": 1, "-7": 2, "x": 3}, {5: 0}, {3: 1, -7: 2, "x": 3}),
        ({"3": 1}, {"5": 0, 5: 0}, {"3": 1}),
        ({"3": 1}, {}, {"3": 1}),
        ({"3": 1}, None, {"3": 1}),
        ({"a": [{"1": 2}, {"1": 3}]}, {"a": [{1: 0}]}, {"a": [{1: 2}, {"1": 3}]}),
        ({"a": {"1": 2}}, {"a": 5}, {"a": {"1": 2}}),
        ({"a": 1}, {"a": 0, "empty": {}, "new": {1: 2}}, {"a": 1, "empty": {}}),
        ({"3": 2}, Counter({3: 1}), Counter({3: 2})),
        ({"a": 2}, OrderedDict(a=1), OrderedDict(a=2)),
        (
            {"inner": {"state": {"0": "a", "w": "b"}, "param_groups": [{"params": [0, "w"]}]}},
            None,
            {"inner": {"state": {0: "a", "w": "b"}, "param_groups": [{"params": [0, "w"]}]}},
        ),
        ({"param_groups": "none"}, None, {"param_groups": "none"}),
        ({"param_groups": [{"lr": 1}]}, None, {"param_groups": [{"lr": 1}]}),  # not of an optimizer
    ],
    ids=repr,
)
def test_restore_keys_turns_text_keys_into_those_of_the_target(written, like, saved):
    before = repr(like)
    found = restore_keys(written, like)
    assert repr(found) == repr(saved)
    assert repr(like) == before
