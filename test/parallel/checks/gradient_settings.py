"""What the variables about gradients do, whatever reduces them; results are held against numpy.

A way to reduce sums this rank's gradients, lists of arrays by step, and gives what would be applied
in each step. It makes a new optimizer, or tape, in every call.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
from worlds import world_with

import perseus
from perseus import basics, control

Arrays = list[np.ndarray]
Reduce = Callable[[list[Arrays]], list[Arrays]]

SHAPES = [(64, 64), (40,)]
ELEMENTS = 64 * 64


# Top-k treats small tensors as any others, and the first steps are as all others.
ALL_ALIKE = {
    "LIGHT_TOPK_THRESHOLD": 0,
    "LIGHT_TOPK_WARMUP_STEPS": 0,
    "PERSEUS_POWERSGD_WARMUP_STEPS": 0,
}


def apart(**settings: object) -> AbstractContextManager[None]:
    """Every rank is a host of its own: what goes between hosts goes between all."""
    world = {"LIGHT_2D_ALLREDUCE": 1, "LIGHT_INTRA_SIZE": 1, **ALL_ALIKE, **settings}
    return world_with(**world)


def whole(rank: int, step: int) -> Arrays:
    """Whole numbers from -4 to 4, which differ per rank, step and index: sums are exact."""
    arrays = []
    for shape in SHAPES:
        index = np.arange(np.prod(shape)).reshape(shape)
        numbers = (index * 7 + rank * 5 + step * 3 + index // 11) % 9 - 4
        arrays.append(numbers.astype(np.float32))
    return arrays


def normal(rank: int, step: int) -> Arrays:
    """Numbers that need all of their digits."""
    generator = np.random.default_rng([rank, step])
    return [generator.normal(size=shape).astype(np.float32) for shape in SHAPES]


def _mine(make: Callable[[int, int], Arrays], steps: int) -> list[Arrays]:
    return [make(basics.rank(), step) for step in range(steps)]


def _sums(make: Callable[[int, int], Arrays], steps: int) -> Arrays:
    """Over all ranks and steps, in float64."""
    everything = [make(rank, step) for rank in range(basics.size()) for step in range(steps)]
    return [np.sum(arrays, axis=0, dtype=np.float64) for arrays in zip(*everything, strict=True)]


def _added(results: list[Arrays]) -> Arrays:
    return [np.sum(arrays, axis=0, dtype=np.float64) for arrays in zip(*results, strict=True)]


def _error(results: list[Arrays], expected: Arrays) -> float:
    """The largest, in what was applied in all steps."""
    pairs = zip(_added(results), expected, strict=True)
    return max(float(np.abs(mine - right).max()) for mine, right in pairs)


def _assert_same(results: list[Arrays], expected: list[Arrays]) -> None:
    for mine, right in zip(results, expected, strict=True):
        assert all(map(np.array_equal, mine, right))


def assert_same_everywhere(arrays: Arrays) -> None:
    """The same bits on all ranks."""
    for index, array in enumerate(arrays):
        rows = control.gather_bytes(np.ascontiguousarray(array).tobytes(), f"same.{index}", 0)
        assert all(row == rows[0] for row in rows), index


def dtype_and_scale(reduce: Reduce) -> None:
    """PERSEUS_ALLREDUCE_DTYPE and PERSEUS_ALLREDUCE_GRADIENT_SCALE."""
    given, expected = _mine(normal, 1), _sums(normal, 1)
    rounded = 2.0**-11 * 5 * 2 * basics.size()  # of numbers below 5, once in and once out
    with apart():
        half = reduce(given)
        assert 1e-5 < _error(half, expected) < rounded
        assert_same_everywhere(half[0])
    with apart(PERSEUS_ALLREDUCE_DTYPE=2):
        _assert_same(reduce(given), half)
    with apart(PERSEUS_ALLREDUCE_DTYPE=1):
        assert _error(reduce(given), expected) < 1e-5
    assert _error(reduce(given), expected) < 1e-5, "one host"
    with world_with(PERSEUS_ALLREDUCE_DTYPE=0):
        assert 1e-5 < _error(reduce(given), expected) < rounded, "one host"
    # Above all numbers of float16 when multiplied by 1024; between them without.
    large, small = 100.0 + basics.rank(), 3 * 2.0**-26
    given = [[np.full(SHAPES[0], large, np.float32), np.full(SHAPES[1], small, np.float32)]]
    total = float(sum(100 + rank for rank in range(basics.size())))
    for scale, first, second in (
        (1, total, 2.0**-24 * basics.size()),
        (1024, np.inf, small * basics.size()),
    ):
        with apart(PERSEUS_ALLREDUCE_GRADIENT_SCALE=scale):
            ((one, other),) = reduce(given)
        assert (one == first).all() and (other == second).all(), (scale, one[0, 0], other[0])


def int8(reduce: Reduce) -> None:
    """PERSEUS_ALLREDUCE_CODEC=int8: what is left out comes with the next gradients."""
    with apart(PERSEUS_ALLREDUCE_CODEC="int8"):
        results = reduce(_mine(normal, 1))
        assert 1e-2 < _error(results, _sums(normal, 1)) < 0.1 * basics.size()
        assert_same_everywhere(results[0])
        steps = 8
        results = reduce(_mine(normal, steps))
        # As much is missing after many steps as after one.
        assert _error(results, _sums(normal, steps)) < 0.1 * basics.size()


def top_k(reduce: Reduce) -> None:
    """LIGHT_TOPK_ALLREDUCE, _RATIO, _THRESHOLD and _FP16."""

    def fine(rank: int, step: int) -> Arrays:
        return [array + np.float32(2.0**-13) for array in whole(rank, step)]

    steps, size = 3, basics.size()
    settings = {"LIGHT_TOPK_ALLREDUCE": 1, "PERSEUS_ALLREDUCE_DTYPE": 1}
    settings["LIGHT_TOPK_THRESHOLD"] = 4 * ELEMENTS
    for ratio, short in ((0.02, 0), (0.1, 1)):
        with apart(LIGHT_TOPK_RATIO=ratio, LIGHT_TOPK_FP16=short, **settings):
            results = reduce(_mine(fine, steps))
        for step, (large, small) in enumerate(results):
            kept = np.count_nonzero(large)
            assert ratio * ELEMENTS <= kept <= 1.25 * ratio * ELEMENTS * size, (step, kept)
            # float16 has no room for the last digits.
            in_steps_of_float16 = (large * 2**9) % 1 == 0
            assert in_steps_of_float16.all() if short else not in_steps_of_float16.all()
            exact = sum(fine(rank, step)[1] for rank in range(size))
            assert np.array_equal(small, exact), "below the threshold"
        assert_same_everywhere(results[-1])
    settings["LIGHT_TOPK_THRESHOLD"] += 1
    with apart(LIGHT_TOPK_RATIO=0.02, **settings):
        assert _error(reduce(_mine(whole, 1)), _sums(whole, 1)) == 0.0


def powersgd(reduce: Reduce) -> None:
    """PERSEUS_ALLREDUCE_CODEC=powersgd: what narrow matrices leave out comes later."""

    def of_rank_one(rank: int, step: int) -> Arrays:
        """One rank's matrix; the sum's rank is the number of ranks, which is at most 4."""
        column, small = whole(rank, step)[0][:, rank], whole(rank, step)[1]
        return [np.outer(column, np.arange(64) % (rank + 2)).astype(np.float32), small]

    settings = {"PERSEUS_ALLREDUCE_CODEC": "powersgd", "PERSEUS_ALLREDUCE_DTYPE": 1}
    steps = 3
    with apart(PERSEUS_POWERSGD_RANK=4, **settings):
        results = reduce(_mine(of_rank_one, steps))
        for step, (large, small) in enumerate(results):
            sums = [of_rank_one(rank, step) for rank in range(basics.size())]
            expected, exact = (np.sum(arrays, axis=0) for arrays in zip(*sums, strict=True))
            assert np.abs(large - expected).max() < 1e-3
            assert np.array_equal(small, exact), "too small for two matrices"
        assert_same_everywhere(results[-1])
    for rank in (2, 8):
        with apart(PERSEUS_POWERSGD_RANK=rank, **settings):
            results = reduce(_mine(normal, 1))
        assert np.linalg.matrix_rank(results[0][0].astype(np.float64), tol=1e-3) == rank
        assert np.allclose(results[0][1], _sums(normal, 1)[1], atol=1e-5)
    with apart(PERSEUS_POWERSGD_RANK=8, **settings):
        missing = []
        for steps in (1, 16, 64):
            results = reduce([normal(basics.rank(), 0)] * steps)
            given = steps * _sums(normal, 1)[0]
            missing.append(np.linalg.norm(_added(results)[0] - given) / np.linalg.norm(given))
        assert missing[0] > 0.3 > missing[1] > 2 * missing[2], missing


# Of the steps of learning_rates().
RATES = (0.5, 1.0, 0.25, 0.125)
_LOSSY = (
    {"PERSEUS_ALLREDUCE_CODEC": "int8"},
    {"PERSEUS_ALLREDUCE_CODEC": "powersgd", "PERSEUS_POWERSGD_RANK": 2},
    {"LIGHT_TOPK_ALLREDUCE": 1, "LIGHT_TOPK_RATIO": 0.02},
)


def flush_before_last(step: int) -> None:
    """In the last step of learning_rates(), all that is held back is sent."""
    if step == len(RATES) - 1:
        basics.flush_residuals()


def learning_rates(train: Reduce, known: bool = True) -> None:
    """What is held back moves the parameters as in the step that held it back.

    train: takes the gradients of every step, and returns the parameters after each, from zero on
        by SGD with RATES; gradients are averaged. It calls flush_before_last() before each step.
    known: whether the core gets to know the rates. Otherwise what is held back is a gradient of the
        step that sends it.
    """
    steps, size = len(RATES), basics.size()
    means = [[total / size for total in _sums_of(step)] for step in range(steps)]
    for codec in _LOSSY:
        with apart(PERSEUS_ALLREDUCE_DTYPE=1, **codec):
            values = train(_mine(normal, steps))
        weighted = unweighted = 0.0
        for index, shape in enumerate(SHAPES):
            moved = np.stack([np.zeros(shape), *(arrays[index] for arrays in values)])
            applied = sum(-np.diff(moved, axis=0) / np.reshape(RATES, (steps, *[1] * len(shape))))
            produced = sum(mean[index] for mean in means)
            exact = sum(rate * mean[index] for rate, mean in zip(RATES, means, strict=True))
            weighted = max(weighted, np.abs(moved[-1] + exact).max())
            unweighted = max(unweighted, np.abs(applied - produced).max())
        conserved, other = (weighted, unweighted) if known else (unweighted, weighted)
        assert conserved < 1e-4 and other > 1e-3, (codec, weighted, unweighted)


def _sums_of(step: int) -> Arrays:
    everything = [normal(rank, step) for rank in range(basics.size())]
    return [np.sum(arrays, axis=0, dtype=np.float64) for arrays in zip(*everything, strict=True)]


def left_out(rank: int, step: int) -> bool:
    """Whether a rank leaves out a step of rotation_of_parameters() that may be left out."""
    return (step + rank) % 4 == 3


def rotation_of_parameters(
    train: Reduce,
    after: bool = False,
    parts_of_all: Sequence[int] = (2, 3, 8),
    leaves_out: Callable[[int, int], bool] = lambda *_: False,
) -> None:
    """PERSEUS_DOWNSAMPLE_N_ELEMENTS: another part of the parameters is averaged in each step.

    train: takes the gradients of every step, and returns the parameters after each, from zero on
        by SGD with a rate of 1/8. What is averaged is sent before a step, or `after` it, and
        corrected one later.
    leaves_out: (rank, step) -> whether the rank does not apply this step's gradients.
    """
    for parts in parts_of_all:
        steps = 2 * parts + 1
        expected = _rotated(parts, steps, after, leaves_out)
        with apart(PERSEUS_DOWNSAMPLE_N_ELEMENTS=parts):
            found = train(_mine(whole, steps))
        for ours, right in zip(found, expected, strict=True):
            for a, b in zip(ours, right, strict=True):
                assert np.abs(a - b).max() < 1e-5


def _rotated(
    parts: int, steps: int, after: bool, leaves_out: Callable[[int, int], bool]
) -> list[Arrays]:
    """This rank's parameters after each step, from a simulation of all ranks."""
    replicas = [[np.zeros(s, np.float32) for s in SHAPES] for _ in range(basics.size())]
    pending = [[np.zeros(s, np.float32) for s in SHAPES] for _ in range(basics.size())]
    seen = []

    def take_turn(step: int) -> None:
        for replica, differences in zip(replicas, pending, strict=True):
            for value, difference in zip(replica, differences, strict=True):
                np.add(value, difference, out=value)
                difference[:] = 0
        for i, shape in enumerate(SHAPES):
            part = step % parts
            rows = slice(shape[0] * part // parts, shape[0] * (part + 1) // parts)
            mean = np.mean([replica[i][rows] for replica in replicas], axis=0)
            for replica, differences in zip(replicas, pending, strict=True):
                differences[i][rows] = mean - replica[i][rows]

    for step in range(steps):
        if not after:
            take_turn(step)
        for rank, replica in enumerate(replicas):
            if leaves_out(rank, step):
                continue
            for value, gradient in zip(replica, whole(rank, step), strict=True):
                np.subtract(value, gradient / 8, out=value)
        if after:
            take_turn(step)
        seen.append([value.copy() for value in replicas[basics.rank()]])
    return seen


def shape_of_the_allreduce(reduce: Reduce) -> None:
    """Modes, streams, fusion: how sums are made, and not what they are."""
    expected = _sums(whole, 2)
    for world, settings in (
        (world_with, {"PERSEUS_ALLREDUCE_MODE": 0, "PERSEUS_ALLREDUCE_STREAMS": 1}),
        (world_with, {"PERSEUS_ALLREDUCE_MODE": 1, "PERSEUS_ALLREDUCE_STREAMS": 12}),
        (apart, {"PERSEUS_ALLREDUCE_FUSION": 1, "PERSEUS_ALLREDUCE_DISABLE_STREAM_TUNING": 1}),
        (apart, {"PERSEUS_ALLREDUCE_FUSION": 128, "LIGHT_HIERARCHICAL_THRESHOLD": 100}),
    ):
        with world(PERSEUS_ALLREDUCE_DTYPE=1, **settings):
            results = reduce(_mine(whole, 2))
        assert _error(results, expected) == 0.0, settings
        assert_same_everywhere(results[1])


@contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """Gives a function that reads what anything in this process has written there since."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        old = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()
        finally:
            os.dup2(old, 2)
            os.close(old)


def agreed(flag: bool) -> bool:
    """Whether it is true on some rank."""
    return "yes" in control.gather_lines("yes" if flag else "no", "agreed")


class SlowRank:
    """Has the last rank dawdle before its steps, always as long, until rank 0 has named it."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self.steps = 0
        self.named = False

    def before_step(self) -> None:
        """Be slow, on one rank."""
        if basics.rank() == basics.size() - 1:
            time.sleep(0.3)

    def after_step(self) -> None:
        """Every few steps, ask; AssertionError when it has taken too long."""
        self.steps += 1
        if self.steps % 4:
            return
        lines = [line for line in self._text().splitlines() if "[perf check] slow" in line]
        slow = f" rank {basics.size() - 1} "
        self.named = agreed(any(slow in line.partition("for each:")[2] for line in lines))
        assert basics.rank() == 0 or not lines, lines
        assert self.named or self.steps < 28, self._text()


class Silence:
    """Counts what is sent to negotiate, until three steps in a row sent nothing on any rank."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.reached = False
        self._before = perseus.stats()["messages"]

    def after_step(self) -> None:
        """Once a step."""
        now = perseus.stats()["messages"]
        self.sent.append(now - self._before)
        self._before = now

    def ask(self) -> None:
        """Now and then; what ranks say to each other here does not count."""
        runs = [self.sent[i : i + 3] for i in range(len(self.sent))]
        self.reached = not agreed([0, 0, 0] not in runs)
        self._before = perseus.stats()["messages"]
