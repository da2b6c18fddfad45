"""`gtopk plan` prints its advice in 80 columns, and refuses bad arguments."""

from __future__ import annotations

import json
import re
import sys

import pytest

from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Candidate, CodingRate, Format, Network, predict
from gtopk.cli import main, plan
from gtopk.cli.arguments import PARAMETERS

SLOW = ["--model", "resnet50", "--ranks", "32", "--bandwidth", "1gbit", "--latency", "0.4ms"]
BACKWARD = ["--backward-ms", "200"]  # hides dense's latencies
FAST = ["--model", "resnet50", "--ranks", "4", "--bandwidth", "800gbit", "--latency", "2us"]
assumed = "--no-measure"


def planned(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def prose(out: str) -> str:
    return " ".join(out.split())


def test_plan_for_slow_network_names_what_pays_and_the_break_even(capsys):
    out = planned(capsys, *SLOW, *BACKWARD, assumed)
    text = prose(out)
    assert "Modelled, not measured: 25,557,032 float32 values (102 MB), 32 ranks," in text
    assert "1 Gbit/s and 400 µs between nodes, density 0.001" in text
    assert "Selecting, coding, merging: as assumed, not measured." in text
    (cheapest,) = [line for line in out.splitlines() if line.startswith(">")]
    assert "gTop-k" in cheapest
    assert 'Compression.gtopk(density=0.001, wire="packed") pays here: it adds' in text
    assert "At this latency it pays below about" in text
    assert "Density 0.001 may cost accuracy: 'Tuning' in gtopk's docs." in text
    assert "upper bound" not in text
    (headings, _) = [line for line in out.splitlines() if line.startswith("method")]
    assert headings.endswith(" speed")


def test_plan_without_backward_time_is_an_upper_bound(capsys):
    out = planned(capsys, *SLOW, assumed)
    text = prose(out)
    assert "An upper bound, of the exchange alone, with nothing hidden behind" in text
    assert 'Compression.gtopk(density=0.001, wire="packed") takes ' in text
    assert "Training gains less: give --backward-ms" in text
    assert "Density 0.001 may cost accuracy: 'Tuning' in gtopk's docs." in text
    (headings, _) = [line for line in out.splitlines() if line.startswith("method")]
    assert headings.endswith(" exchange")


def test_fewer_bits_per_value_reduce_bytes_and_appear_in_advice(capsys):
    out = planned(capsys, *SLOW, assumed, "--values", "int3")
    assert 'Compression.gtopk(density=0.001, wire="packed", values="int3") takes' in prose(out)
    all_bits, three_bits = (
        json.loads(planned(capsys, *SLOW, assumed, "--json", "--values", values))["methods"]
        for values in ("exact", "int3")
    )
    for exact, rounded in zip(all_bits[1:-1], three_bits[1:-1], strict=True):
        assert rounded["format"]["values"] == "int3"
        all_rounded = rounded["algorithm"] in ("gtopk", "topk-allgather")
        assert rounded["sent"]["bytes"] < (0.4 if all_rounded else 1) * exact["sent"]["bytes"]


def test_shards_are_listed_for_comparison_with_any_value_code(capsys):
    for values in ("exact", "int8"):
        record = json.loads(planned(capsys, *SLOW, assumed, "--json", "--values", values))
        shards = record["methods"][-1]
        assert (shards["algorithm"], shards["density"]) == ("shards", 0.5)
        assert shards["format"] == {"indices": "whole", "values": "int2"}
        assert 39 < record["methods"][0]["sent"]["bytes"] / shards["sent"]["bytes"] < 40
        assert record["cheapest"] != "shards"
    assert "and shards: half of all values a step in 1.6 bits; they may take less time" in prose(
        planned(capsys, *SLOW, assumed)
    )


def test_plan_for_fast_network_says_not_to_compress(capsys):
    out = planned(capsys, *FAST, assumed)
    (cheapest,) = [line for line in out.splitlines() if line.startswith(">")]
    assert "dense" in cheapest
    assert "Do not compress here" in out


def test_plan_near_the_break_even_is_too_close_to_tell(capsys):
    edge = json.loads(planned(capsys, *SLOW, *BACKWARD, assumed, "--json"))
    bits = edge["break_even_bits_per_second"]
    command = ["--model", "resnet50", "--ranks", "32", "--latency", "0.4ms", *BACKWARD, assumed]
    text = prose(planned(capsys, *command, "--bandwidth", f"{0.99 * bits / 1e9}gbit"))
    assert "Too close to tell" in text
    assert "pays here" not in text
    assert "What decides: this verdict changes with half the bandwidth" in text


def test_rates_measured_for_shards_alone_do_not_change_the_verdict(capsys, monkeypatch):
    """Lists in 3 bits would pay here, but were not requested."""

    def measured(formats):
        coding = {format: DEFAULT_RATES.coding[format] for format in formats}
        return DEFAULT_RATES._replace(coding=coding | {Format("raw", "int3"): CodingRate(0, 0)})

    monkeypatch.setattr(plan, "measure_rates", measured)
    command = ["--model", "resnet50", "--ranks", "8", "--density", "0.1", "--bandwidth", "8gbit"]
    assert "Too close to tell" in prose(planned(capsys, *command))
    assert "Too close to tell" not in prose(planned(capsys, *command, "--values", "int3"))


def test_plan_says_which_input_decides_and_the_memory_needed(capsys):
    text = prose(planned(capsys, *SLOW, *BACKWARD, assumed))
    assert "What decides: " in text or "Halving or doubling any one input" in text
    assert "Memory on each rank beside the model: about 8 bytes a parameter" in text
    alone = ["--elements", "1M", "--ranks", "4", "--bandwidth", "1mbit", assumed]
    assert "Halving or doubling any one input does not change this verdict" in prose(
        planned(capsys, *alone)
    )


@pytest.mark.parametrize("ranks", ["2", "65536"])
def test_largest_model_can_be_planned(capsys, ranks):
    for density in ("1e-320", "1"):
        command = ["--elements", "1e15", "--ranks", ranks, "--bandwidth", "1gbit"]
        assert "4,000 TB" in planned(capsys, *command, "--density", density, assumed)


def test_dense_exchange_hides_behind_backward(capsys):
    args = ["--model", "resnet50", "--ranks", "8", "--bandwidth", "10gbit", assumed]
    assert "Do not compress" not in planned(capsys, *args)
    out = prose(planned(capsys, *args, "--backward-ms", "200"))
    assert "Do not compress here: dense adds 0 µs to a step" in out
    assert "Dense hides behind 200 ms of backward" in out


def test_dense_sends_more_messages_between_nodes_than_within_one(capsys):
    links = ["--bandwidth", "1gbit", "--latency", "10ms", "--node-latency", "10ms"]
    command = ["--model", "resnet50", "--ranks", "16", *links, assumed, "--json", "-"]
    dense = json.loads(planned(capsys, *command))["methods"][0]
    network = Network(16, Link.of(1e9, 10e-3))
    expected = predict(Candidate("dense"), PARAMETERS["resnet50"], network, DEFAULT_RATES)
    assert dense["communicate_seconds"] == pytest.approx(expected.communicate_seconds)
    assert dense["sent"]["messages"] == 2 * 2 * 4
    inside = json.loads(planned(capsys, *command, "--ranks-per-node", "16"))["methods"][0]
    assert inside["sent"]["messages"] == 2 * 4


def test_ranks_of_one_node_use_the_node_link(capsys):
    command = ["--elements", "1M", "--ranks", "4", "--ranks-per-node", "4", "--bandwidth", "1gbit"]
    text = prose(planned(capsys, *command, "--node-bandwidth", "20gbit", assumed))
    assert "20 Gbit/s and 5 µs inside the node, density 0.001" in text


def test_one_rank_has_nothing_to_compress(capsys):
    out = planned(capsys, "--elements", "1M", "--ranks", "1", "--bandwidth", "1gbit", assumed)
    assert "nothing to compress" in out
    assert "Equal k" not in out


@pytest.mark.parametrize(
    "more", [[], ["--ranks-per-node", "8"], ["--backward-ms", "150"], ["--density", "0.0001"]]
)
@pytest.mark.parametrize("model", ["resnet20", "llama-7b"])
@pytest.mark.parametrize("ranks", ["8", "4096"])
@pytest.mark.parametrize("rate", ["1mbit", "33.3MB/s", "400gbit"])
def test_plan_fits_80_columns(capsys, model, ranks, rate, more):
    command = ["--model", model, "--ranks", ranks, "--bandwidth", rate, "--latency", "123us"]
    out = planned(capsys, *command, assumed, *more)
    assert max(map(len, out.splitlines())) <= 80


def test_allgather_updates_more_values_at_equal_bytes(capsys):
    out = planned(capsys, *SLOW, assumed)
    assert "Equal k is not equal accuracy" in out
    table = out.split("these update:")[1].splitlines()
    updates = {
        line[2:19].strip(): int(line.split()[-5].replace(",", ""))
        for line in table
        if line.startswith("  ")
    }
    assert updates["top-k allgather"] > updates["gTop-k"]


def test_lists_longer_than_dense_pay_above_a_bandwidth(capsys):
    words = ["--elements", "100k", "--ranks", "4", "--bandwidth", "10gbit", "--latency", "50ms"]
    words += [assumed, "--density", "0.9"]
    assert "it pays above 15 Mbit/s at least" in prose(planned(capsys, *words))
    record = json.loads(planned(capsys, *words, "--json", "-"))
    assert record["pays"] == "always"
    every, highest = record["break_even_bounds_bits_per_second"]
    assert every == 0 < highest
    words[-1] = "1"
    record = json.loads(planned(capsys, *words, "--json", "-"))
    assert record["pays"] == "above"
    assert 0 < record["break_even_bits_per_second"] < highest


def test_json_holds_the_figures_of_the_plan(capsys, tmp_path):
    path = tmp_path / "plan.json"
    planned(capsys, *SLOW, *BACKWARD, assumed, "--json", str(path))
    record = json.loads(path.read_text())
    assert record == json.loads(planned(capsys, *SLOW, *BACKWARD, assumed, "--json", "-"))
    assert record["modelled"]
    assert record["cheapest"] == "gtopk"
    assert record["pays"] == "below"
    lowest, highest = record["break_even_bounds_bits_per_second"]
    assert 0 < lowest < record["break_even_bits_per_second"] < highest
    dense, *sparse = record["methods"]
    assert dense["algorithm"] == "dense"
    assert dense["sent"]["bytes"] == pytest.approx(2 * 31 / 32 * 4 * 25_557_032)
    parts = ("agreement", "select", "code", "communicate", "merge")
    for each in sparse:
        total = sum(each[f"{part}_seconds"] for part in parts)
        assert each["exposed_seconds"] == pytest.approx(total)
        assert each["speedup"] == pytest.approx((0.2 + dense["exposed_seconds"]) / (0.2 + total))


def test_rates_are_measured_on_this_machine_by_default(capsys):
    out = planned(capsys, "--elements", "1M", "--ranks", "4", "--bandwidth", "1gbit")
    assert "as measured on this machine now (" in prose(out)


def test_fastest_method_is_bold_on_a_terminal(capsys, monkeypatch):
    plain = planned(capsys, *SLOW, assumed)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    coloured = planned(capsys, *SLOW, assumed)
    (bold,) = [line for line in coloured.splitlines() if "\x1b" in line]
    assert bold.startswith("\x1b[1;32m> ")
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


@pytest.mark.parametrize("text", PARAMETERS)
def test_every_model_can_be_planned(capsys, text):
    command = ["--model", text, "--ranks", "8", "--bandwidth", "1gbit", assumed]
    assert f"{PARAMETERS[text]:,} float32 values" in prose(planned(capsys, *command))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "--ranks, --bandwidth"),
        (["--elements", "1M", "--model", "vgg16"], "not allowed with"),
        (["--elements", "many"], "--elements: must be a number such as 25557032 or 25.6M"),
        (["--model", "resnet51"], "--model: 'resnet51' is none of resnet20, "),
        (["--model", "mygpt"], "for your own model give --elements, its number of parameters"),
        ([*SLOW, "--bandwidth", "1 foo"], "--bandwidth: must be a rate such as 1gbit"),
        ([*SLOW, "--latency", "0.4"], "--latency: must be a time such as 0.4ms or 30us"),
        ([*SLOW, "--density", "0"], "--density: must lie in (0, 1], got '0'"),
        ([*SLOW, "--density", "x"], "--density: must lie in (0, 1], got 'x'"),
        ([*SLOW, "--backward-ms", "-1"], "--backward-ms: must lie in [0, inf), got '-1'"),
        ([*SLOW, "--latency", "1e999s"], "--latency: must be at most 1e+09s, got '1e999s'"),
        (
            ["--elements", "99999999999999999999", *SLOW[2:]],
            "--elements must be at most 1,000,000,000,000,000, got 99,999,999,999,999,999,999",
        ),
        ([*SLOW, "--ranks", "0"], "must be at least 1, got '0'"),
        ([*SLOW, "--ranks-per-node", "33"], "--ranks-per-node must be at most --ranks 32, got 33"),
        ([*SLOW, "--ranks", "1M"], "--ranks must be at most 65,536, got 1,000,000"),
        ([*SLOW, "--json", "/dev/null/x.json"], "cannot be written"),
    ],
)
def test_invalid_arguments_exit_with_the_reason(capsys, arguments, reason):
    try:
        code = main(["plan", *arguments, assumed])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert reason in capsys.readouterr().err


def test_simulation_options_without_simulate_are_rejected(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *SLOW, assumed, "--sites", "2"])
    assert "unrecognized arguments: --sites 2" in capsys.readouterr().err


def test_simulate_without_a_checkout_says_what_it_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("gtopk.cli.plan.SIMULATED", tmp_path / "simulated_plan.py")
    assert main(["plan", *SLOW, assumed, "--simulate", "--sites", "2"]) == 2
    assert "--simulate needs a checkout of gtopk" in capsys.readouterr().err


def test_recommended_call_has_the_options_that_were_modelled(capsys):
    """On a slow link indices are packed, which is not the default of the call."""
    slow = ["--elements", "1M", "--ranks", "4", "--bandwidth", "20mbit", assumed]
    assert 'Compression.gtopk(density=0.001, wire="packed") takes' in prose(planned(capsys, *slow))
