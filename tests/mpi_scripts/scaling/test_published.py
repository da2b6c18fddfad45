"""The published figures are those of the paper's headline."""

from __future__ import annotations

from mpi_scripts.scaling.models import PUBLISHED, WORKERS


def test_published_gtopk_is_2_7_to_12_times_faster_than_ssgd_on_32_workers() -> None:
    over_ssgd, over_topk = [], []
    for model in PUBLISHED.values():
        gtopk, topk, ssgd = (
            model.efficiency(name, 32) for name in ("gtopk-tree", "topk-allgather", "ssgd")
        )
        over_ssgd.append(gtopk / ssgd)
        over_topk.append(gtopk / topk)
    assert (round(min(over_ssgd), 1), int(max(over_ssgd))) == (2.7, 12)
    assert (round(min(over_topk), 1), round(max(over_topk), 1)) == (1.1, 2.0)


def test_published_efficiency_falls_with_workers_and_is_none_if_absent() -> None:
    for model in PUBLISHED.values():
        for name in model.by_method:
            shares = [model.efficiency(name, ranks) for ranks in WORKERS]
            assert sorted(shares, reverse=True) == shares
            assert all(0.0 < share < 1.0 for share in shares)
        assert model.efficiency("ddp", 4) is None
        assert model.efficiency("ssgd", 5) is None
