"""What the gradients of every framework share, with frameworks that are lists and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from perseus import basics
from perseus.arguments import checked_compression
from perseus.compression import (
    EXACT,
    TOP_K,
    NoneCompressor,
    TopKCompressor,
    all_applied_here,
    applied_here,
    top_k,
)
from perseus.failures import Failures
from perseus.gradients.adasum import AdasumOfSteps
from perseus.gradients.aggregation import LocalAggregation, Passes, forget_passes
from perseus.gradients.handle_reducer import HandleReducer, Reduction
from perseus.gradients.local_sources import LocalSources
from perseus.gradients.plan import Plan
from perseus.operations import ReduceOp

# ---- HandleReducer ----


class _Session:
    """Gives handles 1, 2, 3 …; `answers` has what waiting for one gives, or raises."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, Any, dict[str, Any]]] = []
        self.answers: dict[int, Any] = {}
        self.waited: list[int] = []

    def submit(self, kind: int, name: str, sent: Any, output: Any, **terms: Any) -> int:
        assert kind == 0 and output is sent
        self.submitted.append((name, sent, terms))
        return len(self.submitted)

    def poll(self, handle: int) -> bool:
        return True

    def synchronize(self, handle: int) -> Any:
        self.waited.append(handle)
        answer = self.answers.get(handle, self.submitted[handle - 1][1])
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Halving(NoneCompressor):
    """Of lists: the half travels, and what was left out is the context."""

    @staticmethod
    def compress(tensor):
        return [value / 2 for value in tensor], len(tensor)

    @staticmethod
    def decompress(tensor, ctx):
        assert ctx == len(tensor)
        return [value * 2 for value in tensor]


def _reductions(count: int) -> list[Reduction]:
    return [Reduction(f"scope/{index}", str(index)) for index in range(count)]


def test_all_are_waited_for_though_some_fail():
    session = _Session()
    reducer = HandleReducer(Plan(), session)
    reductions = _reductions(4)
    reducer.reductions = reductions
    for index, reduction in enumerate(reductions):
        reducer.begin(reduction, [[float(index)]])
    assert reducer.busy()
    session.answers = {2: OSError("second"), 3: ValueError("third")}
    failures = Failures()
    assert reducer.finish(reductions, failures)
    assert session.waited == [1, 2, 3, 4] and not reducer.busy()
    with pytest.raises(OSError, match="second") as caught:
        failures.raise_first()
    assert any("third" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("withheld", [1, 3])
def test_one_result_that_is_withheld_withholds_the_step(withheld):
    session = _Session()
    reducer = HandleReducer(Plan(), session)
    reductions = _reductions(3)
    for reduction in reductions:
        reducer.begin(reduction, [[1.0]])
    session.answers = {withheld: None}
    failures = Failures()
    assert not reducer.finish(reductions, failures) and not failures
    assert session.waited == [1, 2, 3]


@pytest.mark.parametrize("outcome", [True, False, OSError("sparse")])
def test_what_was_started_beside_an_operation_is_finished_with_it(outcome):
    def finish() -> bool:
        finished.append(len(session.waited))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    finished: list[int] = []
    session = _Session()
    reducer = HandleReducer(Plan(), session)
    dense, sparse = _reductions(2)
    reducer.begin(dense, [[1.0]])
    sparse.others.append(finish)
    assert sparse.is_under_way()
    failures = Failures()
    applies = reducer.finish([dense, sparse], failures)
    assert finished == [1] and not sparse.is_under_way()
    assert (applies, bool(failures)) == (outcome is not False, isinstance(outcome, Exception))


@pytest.mark.parametrize("withheld", ["dense", "sparse", None])
def test_an_interrupt_does_not_let_a_result_that_is_withheld_be_applied(withheld):
    def interrupted() -> bool:
        finished.append(len(session.waited))
        if len(finished) == 1:
            raise KeyboardInterrupt
        return True

    finished: list[int] = []
    session = _Session()
    reducer = HandleReducer(Plan(), session)
    dense, sparse = _reductions(2)
    for step in range(2):
        reducer.begin(dense, [[1.0]])
        reducer.begin(sparse, [[1.0]])
        if step == 0:
            session.answers = {1: None} if withheld == "dense" else {}
            sparse.others += [lambda: withheld != "sparse", interrupted]
            with pytest.raises(KeyboardInterrupt):
                reducer.finish([dense, sparse], Failures())
        applies = reducer.finish([dense, sparse], Failures())
        assert applies == (step == 1 or withheld is None)
    assert session.waited == [1, 2, 3, 4]
    assert finished == [2, 2]


def test_a_bundle_travels_as_its_plan_says():
    session = _Session()
    plan = Plan(op=ReduceOp.Sum, compression=top_k(0.25), predivide_factor=4.0)
    reducer = HandleReducer(plan, session)
    first, second = _reductions(2)
    reducer.begin(first, [[1.0]])
    reducer.begin(second, [[2.0], [3.0, 4.0]], 0.5, 0.75)
    expected = {
        "op": ReduceOp.Sum, "prescale": 0.25, "postscale": 4.0, "group": 0,
        "gradient_of": reducer.number, "codec": TOP_K, "codec_argument": 0.25,
    }  # fmt: skip
    step = {"learning_rate": 0.5, "momentum": 0.75}
    assert session.submitted == [
        ("scope/0", [1.0], expected | dict.fromkeys(step, 0.0)),
        ("scope/1", ([2.0], [3.0, 4.0]), expected | step),
    ]


def test_a_compression_of_ones_own_is_undone_in_the_results():
    session = _Session()
    reducer = HandleReducer(Plan(compression=_Halving), session)
    (reduction,) = _reductions(1)
    reducer.begin(reduction, [[2.0, 6.0], [8.0]])
    assert session.submitted[0][1] == ([1.0, 3.0], [4.0])
    assert reducer.finish([reduction], Failures())
    assert reduction.gradients == [[2.0, 6.0], [8.0]]
    assert reduction.sent == reduction.contexts == []


class _Doubling:
    """Of lists, without a base class."""

    @staticmethod
    def compress(tensor):
        return [value * 2 for value in tensor], None

    @staticmethod
    def decompress(tensor, ctx):
        return [value / 2 for value in tensor]


class _OfAnother(_Halving):
    """With the methods of the class that it derives from."""


class _FromBoth(_Doubling, TopKCompressor):
    """With the methods of a class without a base."""


class _Lossy(top_k(0.25)):
    """With one method of its own, and another beside it."""

    @staticmethod
    def compress(tensor):
        return _Doubling.compress(tensor)

    @staticmethod
    def decompress(tensor, ctx):
        return _Doubling.decompress(tensor, ctx)


@pytest.mark.parametrize(
    "compression", [_Halving, _OfAnother, _Doubling, _Doubling(), _FromBoth, _Lossy]
)
def test_the_core_does_not_encode_what_a_script_compresses(compression):
    assert checked_compression(compression, "here") is checked_compression(compression, "there")
    plan = Plan(compression=compression)
    assert plan == Plan(compression=compression)
    found = plan.compression
    assert not found.in_core and not found.stateful
    assert (found.codec, found.argument) == (EXACT, 0.0)
    session = _Session()
    reducer = HandleReducer(plan, session)
    (reduction,) = _reductions(1)
    reducer.begin(reduction, [[2.0]])
    _, sent, terms = session.submitted[0]
    assert sent in ([1.0], [4.0]) and terms["codec"] == EXACT
    assert reducer.finish([reduction], Failures())
    assert reduction.gradients == [[2.0]]
    assert applied_here(compression).compress([2.0])[0] == sent
    assert all_applied_here(compression).compress([2.0])[0] == sent


def test_a_compressor_may_state_that_the_core_encodes():
    class Stated(_Halving):
        in_core = True
        codec = TOP_K

        @staticmethod
        def compress(tensor):
            return tensor, None

    class Named(TopKCompressor):
        """Has no methods of its own."""

        argument = 0.5

    for compression in (Stated, Named):
        assert compression.in_core and compression.codec == TOP_K
        assert applied_here(compression) is NoneCompressor


def test_what_the_core_would_encode_is_exact_where_adapters_apply_all():
    found = all_applied_here(top_k(0.25))
    assert (found.in_core, found.codec, found.argument) == (False, EXACT, 0.0)
    assert found.compress([1.0]) == ([1.0], None)
    assert all_applied_here(top_k(0.25)) is found


# ---- LocalAggregation ----


class _Numbers:
    """Variables that are lists of one number."""

    def read(self, variable: Any) -> Any:
        return variable[0]

    def kept(self, value: Any) -> Any:
        return value

    def assign(self, variable: Any, value: Any) -> Any:
        variable[0] = value

    def add(self, variable: Any, value: Any) -> Any:
        variable[0] += value

    def clear(self, variable: Any) -> Any:
        variable[0] = 0.0

    def mean(self, variable: Any, total: Any, number: int) -> Any:
        return total / number

    def clear_now(self, variable: Any) -> None:
        self.clear(variable)

    def is_zero(self, value: Any) -> Any:
        return value == 0

    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        return nullcontext()

    def choose(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        return then() if condition else otherwise()


@pytest.mark.parametrize("average", [False, True])
def test_every_nth_pass_completes_a_step(average):
    aggregation = LocalAggregation(3, average, _Numbers())
    aggregation.counter = [0]
    sums = [[0.0], [0.0]]
    seen = []
    for number in range(7):
        seen.append(
            aggregation.add(
                sums,
                [float(number), 10.0 * number],
                lambda totals: ("complete", totals, [s[0] for s in sums]),
                lambda totals: ("sum", totals),
            )
        )
    over = 3.0 if average else 1.0
    assert seen == [
        ("sum", [0.0, 0.0]),
        ("sum", [1.0, 10.0]),
        ("complete", [3.0 / over, 30.0 / over], [0.0, 0.0]),
        ("sum", [3.0, 30.0]),
        ("sum", [7.0, 70.0]),
        ("complete", [12.0 / over, 120.0 / over], [0.0, 0.0]),
        ("sum", [6.0, 60.0]),
    ]


def test_a_world_begins_with_no_pass_counted():
    aggregation, passes = LocalAggregation(3, False, _Numbers()), Passes(3, _Numbers())
    forget_passes()  # before there are variables
    aggregation.counter, passes.counter = [0], [0]
    aggregation.sums = [[0.0], [0.0]]
    results = [lambda totals: ("complete", totals), lambda totals: ("sum", totals)]
    aggregation.add(aggregation.sums, [1.0, 10.0], *results)
    passes.count()
    forget_passes()
    assert passes.begins()
    seen = [aggregation.add(aggregation.sums, [2.0, 20.0], *results) for _ in range(3)]
    assert seen == [("sum", [2.0, 20.0]), ("sum", [4.0, 40.0]), ("complete", [6.0, 60.0])]


def test_the_first_and_the_last_pass_of_a_step_are_known():
    passes = Passes(3, _Numbers())
    passes.counter = [0]
    seen = [(passes.begins(), passes.count()) for _ in range(6)]
    assert seen == [(True, False), (False, False), (False, True)] * 2


# ---- AdasumOfSteps ----


class _Steps(AdasumOfSteps):
    """Variables are lists of one number; `combined` is the Adasum, or None."""

    def __init__(self, combined: list[float] | None) -> None:
        self.combined = combined
        self.given: list[float] = []

    def copies(self, variables: Sequence[Any]) -> list[Any]:
        return [variable[0] for variable in variables]

    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        return nullcontext()

    def value(self, variable: Any) -> Any:
        return variable[0]

    def reduce(self, steps: Iterable[Any]) -> Sequence[Any] | None:
        self.given = list(steps)
        return self.combined

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> Any:
        for variable, value in zip(variables, values, strict=True):
            variable[0] = value
        return "written"


@pytest.mark.parametrize(("combined", "expected"), [([0.5, -3.0], [1.5, -1.0]), (None, [1.0, 2.0])])
def test_variables_go_from_the_start_to_the_combined_steps(combined, expected):
    def step() -> str:
        variables[0][0] += 4.0
        variables[1][0] -= 8.0
        return "loss"

    variables = [[1.0], [2.0]]
    steps = _Steps(combined)
    assert steps.around(variables, step) == ("loss", "written")
    assert steps.given == [4.0, -8.0]
    assert [variable[0] for variable in variables] == expected


# ---- LocalSources ----


@pytest.mark.parametrize("scales", [True, False])
def test_gradients_of_local_sources_are_only_scaled(monkeypatch, scales):
    monkeypatch.setattr(basics, "setting", {"PERSEUS_ACCUMULATE_N_STEPS": 1}.get)

    def reduce(gradients: list[Any], sources: list[Any]) -> tuple[list[Any], Any]:
        given.append((gradients, sources))
        return [None if gradient is None else 10 * gradient for gradient in gradients], "verdict"

    given: list[Any] = []
    local = LocalSources(str.lower, (lambda gradient: gradient / 4) if scales else None, "test")
    assert local.around(reduce, [1.0, None], ["a", "b"]) == ([10.0, None], "verdict")
    for source in ("B", "D"):
        local.register(source)
    assert [local.is_local(source) for source in "abcD"] == [False, True, False, True]
    over = 4.0 if scales else 1.0
    found = local.around(reduce, [1.0, 2.0, None, None, 5.0], ["a", "b", "c", "d", "e"])
    assert found == ([10.0, 2.0 / over, None, None, 50.0], "verdict")
    assert given[1] == ([1.0, None, 5.0], ["a", "c", "e"])


def test_sums_over_steps_refuse_local_sources(monkeypatch):
    monkeypatch.setattr(basics, "setting", {"PERSEUS_ACCUMULATE_N_STEPS": 2}.get)
    local = LocalSources(str.lower, None, "test")
    local.register("b")
    assert local.around(lambda *_: ([1.0], None), [3.0], ["a"]) == ([1.0], None)
    with pytest.raises(ValueError, match=r"^\[test\] PERSEUS_ACCUMULATE_N_STEPS .*backward_passes"):
        local.around(lambda *_: ([1.0], None), [3.0, 4.0], ["a", "b"])
