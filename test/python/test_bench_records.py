"""perseus-bench's arithmetic: sizes, bandwidths, models, verdicts, what goes into README.md."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from perseus.bench.bars import BARS, Bar, suite
from perseus.bench.models import MODELS
from perseus.bench.record import Record, bus_factor, counters_match, pairwise_ratio
from perseus.bench.report import bars, results, write_page
from perseus.bench.sizes import parse_sizes, show_bytes, show_seconds

ROOT = Path(__file__).resolve().parents[2]


def record(peer: str = "perseus", median_s: float = 0.004, **changes: object) -> Record:
    fields = Record(
        case="memory",
        peer=peer,
        operation="allreduce",
        ranks=2,
        hosts=1,
        bytes=64 << 20,
        median_s=median_s,
        min_s=median_s / 2,
        n=9,
        verified=True,
    )
    return replace(fields, **changes)  # type: ignore[arg-type]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_factor("allreduce", 4) == 1.5
    assert bus_factor("allgather", 4) == bus_factor("reducescatter", 4) == 0.75
    assert bus_factor("alltoall", 8) == 0.875
    assert bus_factor("broadcast", 8) == 1
    assert bus_factor("copy", 8) == 0
    measured = record(ranks=4, median_s=0.1, bytes=2 * 10**9)
    assert measured.algbw_GBps == pytest.approx(20)
    assert measured.busbw_GBps == pytest.approx(30)


def test_ratios_are_taken_within_a_repetition() -> None:
    # The machine was ten times slower in the second and third: the ratio of medians would be 0.2.
    assert pairwise_ratio([2.0, 20.0, 22.0, 2.4], [1.0, 10.0, 11.0, 1.2]) == pytest.approx(2)
    with pytest.raises(ValueError):
        pairwise_ratio([1.0], [1.0, 2.0])


def test_a_record_survives_json() -> None:
    written = record(settings={"PERSEUS_TRANSPORT": "tcp"}, wire_bytes=123, rate_gbit=1.0)
    assert Record.from_json(written.to_json()) == written


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", [4]),
        ("64K,4", [4, 65536]),
        ("4k-1M", [4096, 16384, 65536, 262144, 1048576]),
        ("1G,1GiB,512MB", [512 << 20, 1 << 30]),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "4,,8", "3", "0", "1M-4K", "-4", "4T"])
def test_a_wrong_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="--sizes"):
        parse_sizes(text)


def test_sizes_and_times_are_shown_with_units() -> None:
    assert [show_bytes(n) for n in (4, 4096, 64 << 20, 3 << 29)] == [
        "4 B",
        "4 KiB",
        "64 MiB",
        "1.5 GiB",
    ]
    assert [show_seconds(s) for s in (1.5, 0.0041, 12.3e-6, 2e-9)] == [
        "1.5 s",
        "4.1 ms",
        "12.3 µs",
        "2 ns",
    ]


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("bert-base", 199, 109_482_240),
        ("gpt2", 148, 124_439_808),
    ],
)
def test_models_have_their_published_sizes(model: str, tensors: int, parameters: int) -> None:
    shapes = MODELS[model]()
    assert len({name for name, _ in shapes}) == len(shapes) == tensors
    assert sum(math.prod(shape) for _, shape in shapes) == parameters


def test_counters_that_do_not_match_are_noticed() -> None:
    payload = 64 << 20
    assert counters_match(payload + payload // 500, payload)
    assert counters_match(payload + payload * 7 // 100, payload)  # some packets were lost
    assert not counters_match(payload + payload // 5, payload)
    assert not counters_match(payload // 2, payload)  # half of it went another way
    assert not counters_match(2 * payload, payload)
    assert counters_match(None, payload)  # one host
    assert counters_match(12345, None)  # an algorithm of its own


def test_counters_may_lie_between_two_ends_where_an_algorithm_decides() -> None:
    least, most = 1 << 19, 1 << 21
    assert counters_match(1 << 20, least, most)
    assert counters_match(most + most // 50, least, most)
    assert not counters_match(least - 1, least, most)
    assert not counters_match(2 * most, least, most)


def test_a_codec_is_a_contender_of_its_own_and_meets_no_bar_of_plain() -> None:
    coded = record(median_s=0.001, codec="topk:0.01")
    assert (record().contender, coded.contender) == ("perseus", "perseus topk:0.01")
    bar = Bar("latency", "memory", "seconds", 0.002)
    assert bar.judge([coded]).met is None
    assert bar.judge([record(), coded]).met is False


SLOWER = Bar("copying", "memory", "slower", 1.6, ("memcpy", "memcpy-unaligned"))
FASTER = Bar("gloo", "memory", "faster", 7, ("torch-gloo",))


def test_the_faster_of_two_limits_counts() -> None:
    ours = record(median_s=0.006)
    slow = record("memcpy-unaligned", 0.006, vs_perseus=1.0)
    fast = record("memcpy", 0.003, vs_perseus=0.5)
    assert SLOWER.judge([ours, slow]).met is True
    verdict = SLOWER.judge([ours, slow, fast])
    assert verdict.met is False
    assert verdict.result == "2.00 × its time"


def test_a_bar_is_met_missed_or_not_measured() -> None:
    gloo = record("torch-gloo", 0.032, vs_perseus=8.0)
    assert FASTER.judge([record(), gloo]).met is True
    assert FASTER.judge([record(), replace(gloo, vs_perseus=6.9)]).met is False
    assert FASTER.judge([record()]).met is None
    assert FASTER.judge([gloo]).met is None
    assert FASTER.judge([record(ranks=4), replace(gloo, ranks=4)]).met is None


def test_what_all_contenders_do_is_no_part_of_an_exchange() -> None:
    bar = Bar("exchange", "ddp", "faster", 3, ("gloo",), beyond="none", bucket="25 MiB")
    ours, gloo, none = (
        record(peer, seconds, case="ddp", settings={"bucket": "25 MiB"}, vs_perseus=1.0)
        for peer, seconds in (("perseus", 0.05), ("gloo", 0.10), ("none", 0.03))
    )
    verdict = bar.judge([ours, gloo, none])
    assert (verdict.met, verdict.result) == (True, "3.5 × as fast")
    assert bar.judge([ours, gloo, replace(none, median_s=0.02)]).met is False  # 80 ms of 30 ms
    assert bar.judge([ours, gloo]).met is None
    assert bar.judge([ours, gloo, replace(none, settings={"bucket": "1 MiB"})]).met is None


def test_a_codec_is_held_to_the_fastest_other_at_its_rate() -> None:
    others = ("gloo", "gloo fp16")
    bar = Bar("auto", "memory", "faster", 1, others, ours="perseus auto", rate=0.3)
    slow = {"rate_gbit": 0.3}
    ours = record(codec="auto", vs_perseus=0.8, **slow)
    plain = record("gloo", 0.012, vs_perseus=3.0, **slow)
    half = record("gloo", 0.006, codec="fp16", vs_perseus=1.2, **slow)
    assert bar.judge([ours, plain, half]).result == "1.50 × as fast"
    assert bar.judge([ours, plain, replace(half, vs_perseus=0.7)]).met is False
    assert bar.judge([record(), plain, half]).met is None
    assert bar.judge([replace(ours, rate_gbit=1.0), plain, half]).met is None


def test_a_wrong_result_meets_no_bar() -> None:
    gloo = record("torch-gloo", 0.032, vs_perseus=8.0)
    verdict = FASTER.judge([record(verified=False, note="wrong result"), gloo])
    assert verdict.met is False
    assert verdict.result == "invalid: wrong result"


def test_bars_without_a_contender_are_absolute() -> None:
    latency = Bar("latency", "latency", "seconds", 30e-6)
    staging = Bar("staging", "memory", "staging", 64 << 20)
    assert latency.judge([record(case="latency", median_s=12e-6)]).met is True
    assert latency.judge([record(case="latency", median_s=31e-6)]).met is False
    assert staging.judge([record(staging_bytes=64 << 20)]).met is True
    assert staging.judge([record(staging_bytes=65 << 20)]).met is False


def test_the_suite_measures_every_bar() -> None:
    rates = {None: None, "1gbit": 1.0, "300mbit": 0.3}
    measured = {
        (case, job.ranks, job.hosts, rate)
        for job in suite()
        for case in job.plan.cases
        for rate in (None, rates[job.rate])
    }
    assert {(bar.case, bar.ranks, bar.hosts, bar.rate) for bar in BARS} <= measured


def test_pages_get_tables_between_their_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# A\n<!-- bench:begin -->\nold\n<!-- bench:end -->\n\n## B\n")
    measured = [record(), record("torch-gloo", 0.032, vs_perseus=8.0)]
    text = results(measured, ["virtual hosts need root"], load_before=0.5)
    write_page("--readme", readme, text)
    written = readme.read_text()
    assert written.startswith("# A\n<!-- bench:begin -->\nMeasured by `make bench`")
    assert written.endswith("<!-- bench:end -->\n\n## B\n")
    assert "old" not in written
    row = "| the same | 4 ms | torch gloo 32 ms | 8.0 × as fast | `perseus-bench memory` |"
    assert row in written
    assert "Not measured: virtual hosts need root." in written
    write_page("--readme", readme, text)
    assert readme.read_text() == written


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_pages_say_of_their_numbers_what_the_generator_says(page: str) -> None:
    said = next(line for line in bars([], load_before=0.5).splitlines() if "a ratio" in line)
    assert "beyond those of the contender `no-exchange`" in said
    assert f"\n{said}\n" in (ROOT / page).read_text(encoding="utf-8")


def test_only_the_page_of_bars_has_verdicts() -> None:
    measured = [record(), record("torch-gloo", 0.012, vs_perseus=3.0)]
    assert "| ≥ 7 × | **missed** |" in bars(measured, load_before=0.5)
    assert "missed" not in results(measured, [], load_before=0.5)


@pytest.mark.parametrize(("rate", "where"), [(0.3, "2 hosts, 0.3 Gbit/s"), (None, "2 hosts")])
def test_a_model_says_where_it_was_measured(rate: float | None, where: str) -> None:
    settings = {"model": "gpt2"}
    ours = record(case="gradients", hosts=2, rate_gbit=rate, settings=settings, tensors=148)
    theirs = replace(ours, peer="torch-gloo", median_s=0.01, vs_perseus=2.5)
    row = f"| gpt2 | 148 | 64 MiB | {where} | 4 ms | 10 ms | 2.50 × as fast |"
    assert row in results([ours, theirs], [], load_before=0.5)


def test_a_bar_names_the_command_that_measures_it() -> None:
    commands = {bar.command() for bar in BARS}
    assert "perseus-bench memory -np 4" in commands
    assert "PERSEUS_TRANSPORT=tcp perseus-bench network" in commands
    assert "perseus-bench network --hosts 2 --rate 1gbit" in commands
    assert "perseus-bench ddp --sizes 25M" in commands
    trained = "perseus-bench ddp-training --model resnet50 --codec default,int8,int4,int2,auto"
    assert f"{trained} --hosts 2 --rate 300mbit" in commands


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# A\n<!-- bench:end -->\n")
    with pytest.raises(ValueError, match=r"--bars .*bench:begin"):
        write_page("--bars", page, "text")
    assert page.read_text() == "# A\n<!-- bench:end -->\n"
