"""How perseus-bench takes times: in turn, the slowest rank's, and nothing counts unverified."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.bench import sampling
from perseus.bench.sampling import Contender, measure, sent_bytes


class World:
    """This process as rank 0 of two; the other one's values are this one's plus `others`."""

    size = 2
    hosts = 1
    counts_wire = False

    def __init__(self, others: float = 0.0, other_right: bool = True) -> None:
        self.others, self.other_right = others, other_right
        self.barriers = 0

    def barrier(self) -> None:
        self.barriers += 1

    def agree(self, value: float) -> float:
        return value

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        *seconds, right, sent = values
        other = [second + self.others for second in seconds]
        return [list(values), [*other, right * self.other_right, sent]]


class Clock:
    """Time that passes only when somebody says so, in place of the module time."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def pass_ms(self, milliseconds: int) -> None:
        self.nanoseconds += milliseconds * 1_000_000

    def perf_counter_ns(self) -> int:
        return self.nanoseconds

    def perf_counter(self) -> float:
        return self.nanoseconds / 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sampling, "time", clock)
    return clock


def test_contenders_take_turns_and_begin_in_turn() -> None:
    order: list[str] = []
    contenders = [Contender(name, "copy", lambda _, n=name: order.append(n)) for name in "abc"]
    samples = measure(World(), contenders, budget=1e-9)
    # Two repetitions each to warm up, the first round, then four more.
    assert order[:6] == ["a", "a", "b", "b", "c", "c"]
    assert "".join(order[6:]) == "abcbcacababcbca"
    assert {name: len(found.seconds) for name, found in samples.items()} == dict.fromkeys("abc", 5)


@pytest.mark.parametrize(("seconds", "repetitions"), [(0.01, 5), (0.13, 16), (100.0, 400)])
def test_repetitions_fill_the_time_given(clock: Clock, seconds: float, repetitions: int) -> None:
    two = [Contender(name, "copy", lambda _: clock.pass_ms(4)) for name in "ab"]
    samples = measure(World(), two, seconds)
    assert samples["a"].seconds == samples["b"].seconds == [0.004] * repetitions


@pytest.mark.parametrize(("others", "slowest"), [(2.0, 2.003), (-0.001, 0.003)])
def test_the_slowest_rank_counts(clock: Clock, others: float, slowest: float) -> None:
    contender = Contender("a", "copy", lambda _: clock.pass_ms(3))
    samples = measure(World(others), [contender], budget=1e-9)
    assert samples["a"].seconds == pytest.approx([slowest] * 5)


def test_preparing_and_verifying_are_off_the_clock(clock: Clock) -> None:
    def check() -> bool:
        clock.pass_ms(50)
        return True

    contender = Contender("a", "copy", lambda _: clock.pass_ms(2), lambda: clock.pass_ms(50), check)
    samples = measure(World(), [contender], budget=1e-9)
    assert samples["a"].seconds == [0.002] * 5
    assert samples["a"].verified


def test_calls_of_a_repetition_are_timed_one_by_one(clock: Clock) -> None:
    seen: list[int] = []

    def run(i: int) -> None:
        seen.append(i)
        clock.pass_ms([100, 100, 3, 90, 2][i])  # the first two warm up

    samples = measure(World(), [Contender("a", "copy", run, calls=3, warm=2)], budget=1e-9)
    assert seen[:5] == [0, 1, 2, 3, 4]
    assert samples["a"].seconds == [0.003] * 5


@pytest.mark.parametrize("wrong_at", [0, 3, 6])
def test_one_wrong_result_spoils_the_measurement(wrong_at: int) -> None:
    checks = iter(range(100))
    wrong = Contender("wrong", "copy", lambda _: None, check=lambda: next(checks) != wrong_at)
    samples = measure(World(), [wrong, Contender("right", "copy", lambda _: None)], budget=1e-9)
    assert not samples["wrong"].verified
    assert samples["right"].verified


def test_a_wrong_result_on_another_rank_spoils_it_too() -> None:
    contender = Contender("a", "copy", lambda _: None)
    assert not measure(World(other_right=False), [contender], budget=1e-9)["a"].verified


def test_a_barrier_stands_before_every_repetition() -> None:
    world = World()
    measure(world, [Contender("a", "copy", lambda _: None)], budget=1e-9)
    assert world.barriers == 2 + 5


def test_sent_bytes_leave_loopback_out(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs\n"
        "    lo: 700 7 0 0 0 0 0 0 700 7 0 0 0 0 0 0\n"
        "  eth0: 100 1 0 0 0 0 0 0 2000 2 0 0 0 0 0 0\n"
        "  eth1: 100 1 0 0 0 0 0 0 30000 2 0 0 0 0 0 0\n"
    )
    assert sent_bytes(table, tmp_path) == 32000


@pytest.mark.parametrize(
    ("devices", "others", "sent"),
    [
        ((), ("eth0", "eth1", "bond0", "bond0.7"), 3333),  # a container's, none with a device
        (("eth0", "eth1"), ("bond0", "bond0.7"), 33),
        (("eth0",), (), 3333),  # /sys of another network, which has an eth0, too
    ],
)
def test_sent_bytes_count_once_below_bonds_and_vlans(
    tmp_path: Path, devices: tuple[str, ...], others: tuple[str, ...], sent: int
) -> None:
    table = tmp_path / "dev"
    sums = {"lo": 70000, "eth0": 11, "eth1": 22, "bond0": 1650, "bond0.7": 1650}
    lines = (f"{name}: 0 0 0 0 0 0 0 0 {count} 0 0 0 0 0 0 0\n" for name, count in sums.items())
    table.write_text("Inter-|\n face |\n" + "".join(lines))
    for name in (*devices, *others):
        (tmp_path / name).mkdir()
    for name in devices:
        (tmp_path / name / "device").mkdir()
    assert sent_bytes(table, tmp_path) == sent


def test_sums_that_float32_rounds_are_right() -> None:
    pytest.importorskip("torch")
    from perseus.bench import cases
    from perseus.bench.pattern import values

    ranks = 13  # its fourth power times the values is beyond 2**24

    class Peer:
        name = "perseus"
        calls = 0
        tensors: list[Any]

        def allreduce_many_(self, tensors: list[Any], names: list[str]) -> None:
            self.tensors = tensors
            for i, tensor in enumerate(tensors):
                own = tensor.clone()
                for rank in range(1, ranks):
                    tensor.add_(own if self.calls else values(rank + i, tensor.numel()))
            self.calls += 1

    peer = Peer()
    session = SimpleNamespace(rank=0, size=ranks, peers=[peer], payload=lambda *_: None)
    (subject,) = cases.small_tensors(session)  # type: ignore[arg-type]
    ours, _ = subject.contenders
    for wrong in (0.0, 1.0):
        ours.prepare()
        peer.calls = 0
        for i in range(ours.warm + ours.calls):
            ours.run(i)
            if i == 0:
                peer.tensors[-1][-1] += wrong
        assert ours.check() is not bool(wrong)
