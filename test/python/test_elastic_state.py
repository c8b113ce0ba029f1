"""The framework-neutral part of elastic training: states, news about hosts, the loop around it."""

from __future__ import annotations

import struct
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from perseus import basics
from perseus.elastic import (
    HostUpdateResult,
    ObjectState,
    State,
    WorkerNotificationManager,
    notification_manager,
    run_fn,
)
from perseus.elastic import loop as elastic_loop
from perseus.elastic.loop import failure_if, looped
from perseus.elastic.variables_state import VariablesState
from perseus.errors import (
    AbortedError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InitializationError,
    MismatchError,
)
from perseus.gradients import residuals
from perseus.process_sets import ProcessSet, global_process_set

REMOVED, ADDED = HostUpdateResult.removed, HostUpdateResult.added


def _own(obj):
    return obj


def _state(**values) -> ObjectState:
    return ObjectState(_own, lambda: 0, **values)


class Recorder(State):
    """Notes what is done to it."""

    def __init__(self) -> None:
        super().__init__(_own, lambda: 0)
        self.done: list[str] = []

    def save(self) -> None:
        self.done.append("save")

    def restore(self) -> None:
        self.done.append("restore")

    def sync(self) -> None:
        self.done.append("sync")

    def reset(self) -> None:
        self.done.append("reset")


# ---- values ----


def test_restore_goes_back_to_the_last_save():
    state = _state(batch=1, epoch=7)
    state.batch, state.epoch = 2, 8
    state.restore()
    assert (state.batch, state.epoch) == (1, 7)
    state.batch = 3
    state.save()
    state.batch, state.epoch = 4, 9
    state.restore()
    assert (state.batch, state.epoch) == (3, 7)


def test_saving_keeps_references_and_no_copies():
    state = _state(history=[1])
    state.save()
    state.history.append(2)
    state.restore()
    assert state.history == [1, 2]


def test_attributes_that_were_not_given_are_not_saved():
    state = _state(batch=1)
    state.other = 5
    state.save()
    state.other = 6
    state.restore()
    assert state.other == 6


def test_sync_takes_over_what_the_root_has_saved():
    sent = []

    def bcast(obj):
        sent.append(obj)
        return {"batch": 40, "epoch": 2}

    state = ObjectState(bcast, lambda: 1, batch=1, epoch=0)
    state.batch = 3  # not saved
    state.sync()
    assert sent == [{"batch": 1, "epoch": 0}]
    assert (state.batch, state.epoch) == (40, 2)
    state.batch = 41
    state.restore()  # what came is saved, too
    assert (state.batch, state.epoch) == (40, 2)


def test_a_state_without_values_broadcasts_nothing():
    ObjectState(lambda _: pytest.fail("broadcast"), lambda: 0).sync()


def test_the_contract_is_not_implemented():
    state = State(_own, lambda: 0)
    for call in (state.save, state.restore, state.sync):
        with pytest.raises(NotImplementedError):
            call()
    state.reset()


class Variable:
    """One of TensorFlow or Keras, as far as a state uses it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def numpy(self) -> int:
        return self.value

    def assign(self, value: int) -> None:
        self.value = value


class Residuals:
    """A source of residuals, with one of them."""

    def __init__(self, value: bytes) -> None:
        self.held = {"gradient": ((), value)}

    def residuals(self):
        return dict(self.held)

    def go_on_with(self, residuals, owner=None):
        self.held = dict(residuals)


class VariablesWithSources(VariablesState):
    def __init__(self, variables: list[Variable], sources: list[Residuals]) -> None:
        self.sources = sources
        super().__init__(_own, lambda: 0, lambda _: None, lambda: variables)

    def _sources(self):
        return self.sources


def test_restore_leaves_variables_that_are_new_since_the_save_as_they_are():
    first, second, new = Variable(1), Variable(2), Variable(30)
    variables = [first, second]
    state = VariablesWithSources(variables, [])
    first.value = second.value = 0
    variables[:] = [second, new, first]  # a layer that is no longer frozen changes the order, too
    state.restore()
    assert (first.value, second.value, new.value) == (1, 2, 30)
    state.save()
    new.value = 0
    state.restore()
    assert new.value == 30


def test_restore_gives_another_model_the_values_of_the_saved_one():
    variables = [Variable(1), Variable(2)]
    state = VariablesWithSources(variables, [])
    variables[:] = [Variable(0), Variable(0)]
    state.restore()
    assert [each.value for each in variables] == [1, 2]


def test_restore_drops_what_a_source_that_is_new_since_the_save_holds_back():
    sources = [Residuals(b"old")]
    state = VariablesWithSources([], sources)
    sources[0].held = {}
    sources.append(Residuals(b"new"))
    state.restore()
    assert sources[0].residuals() == {"gradient": ((), b"old")}
    assert sources[1].residuals() == {}


# ---- news about hosts ----


def _update_of(state: State, *news: tuple[float, HostUpdateResult]) -> HostsUpdatedInterrupt:
    for timestamp, change in news:
        state.on_hosts_updated(timestamp, change)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    return caught.value


@pytest.mark.parametrize(
    ("changes", "skip_sync"),
    [
        ([REMOVED], True),
        ([REMOVED, REMOVED], True),
        ([ADDED], False),
        ([REMOVED, ADDED], False),
        ([ADDED, REMOVED], False),
        ([HostUpdateResult.mixed], False),
    ],
)
def test_sync_is_skipped_only_when_every_change_was_a_removal(changes, skip_sync):
    news = [(10.0 + index, change) for index, change in enumerate(changes)]
    assert _update_of(_state(), *news).skip_sync is skip_sync


def test_nothing_new_raises_nothing():
    state = _state()
    state.check_host_updates()
    _update_of(state, (5.0, ADDED))
    state.check_host_updates()
    for timestamp in (4.0, 5.0):  # old news
        state.on_hosts_updated(timestamp, ADDED)
        state.check_host_updates()
    assert state._last_updated_timestamp == 5.0
    _update_of(state, (6.0, ADDED))


def test_rank_0s_view_counts():
    told = (0, 0, HostUpdateResult.no_update)
    state = ObjectState(lambda _: told, lambda: 1)
    state.on_hosts_updated(3.0, ADDED)
    state.check_host_updates()  # rank 0 has not learned of it
    told = (0, 3.0, REMOVED)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync is True


def test_commit_saves_before_it_looks_for_news():
    state = _state(batch=1)
    state.batch = 2
    state.on_hosts_updated(1.0, ADDED)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.batch = 3
    state.restore()
    assert state.batch == 2


@pytest.mark.parametrize("change", [REMOVED, ADDED])
@pytest.mark.parametrize("way", ["check", "copies", "marks"])
def test_parameters_are_averaged_once_before_the_world_changes(monkeypatch, change, way):
    """Local steps of ranks other than 0 would be lost; a commit has averaged them by then."""

    class Marking(Recorder):
        def mark(self):
            self.done.append("mark")

        def _can_mark(self):
            return way == "marks"

    state = Marking()
    monkeypatch.setattr(
        "perseus.elastic.state.synchronize_parameters", lambda: state.done.append("average")
    )
    look = state.check_host_updates if way == "check" else lambda: state.commit(copy=False)
    expected = {"check": [], "copies": ["average", "save"], "marks": ["mark", "average"]}[way]
    look()
    assert state.done == expected
    state.on_hosts_updated(1.0, change)
    with pytest.raises(HostsUpdatedInterrupt):
        look()
    assert state.done == (expected * 2 or ["average"])
    state.done.clear()
    _update_of(state, (2.0, change))
    assert state.done == ["average"]


def test_on_reset_forgets_news_then_resets_then_calls_back():
    state = Recorder()
    state.register_reset_callbacks([lambda: state.done.append("first")])
    state.register_reset_callbacks([lambda: state.done.append(f"{state._host_messages.empty()}")])
    state.on_hosts_updated(1.0, ADDED)
    state.on_reset()
    assert state.done == ["reset", "first", "True"]
    state.check_host_updates()


def test_the_manager_tells_those_who_are_registered():
    manager = WorkerNotificationManager()
    first, second = _state(), _state()
    manager.register_listener(first)
    manager.register_listener(second)
    manager.handle_hosts_updated(1.0, ADDED)
    manager.remove_listener(first)
    teller = threading.Thread(target=manager.handle_hosts_updated, args=(2.0, REMOVED))
    teller.start()
    teller.join()
    assert list(first._host_messages.queue) == [(1.0, ADDED)]
    assert list(second._host_messages.queue) == [(1.0, ADDED), (2.0, REMOVED)]
    with pytest.raises(ValueError, match="not registered"):
        manager.remove_listener(first)


def test_the_manager_refuses_an_address_and_stays_usable():
    manager = WorkerNotificationManager()
    state = _state()
    manager.register_listener(state)
    manager.init()
    with pytest.raises(ValueError, match="nobody at 10"):
        manager.init("10.0.0.1", 4242)
    manager.handle_hosts_updated(1.0, ADDED)
    assert list(state._host_messages.queue) == [(1.0, ADDED)]


# ---- the loop ----


def _run(state, outcomes, reset=lambda: None):
    """Run a function that raises or returns one outcome after the other."""
    outcomes = iter(outcomes)

    def train(state):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return run_fn(train, reset)(state)


def test_without_trouble_it_is_a_plain_call():
    def train(state, a, *, b):
        """Trains."""
        return state.batch + a + b

    wrapped = run_fn(train, lambda: pytest.fail("reset"))
    assert wrapped(_state(batch=1), 20, b=300) == 321
    assert (wrapped.__name__, wrapped.__doc__) == ("train", "Trains.")


@pytest.mark.parametrize(
    "error", [HorovodInternalError("a"), AbortedError("b"), MismatchError("c")], ids=repr
)
def test_an_internal_error_restores_and_starts_anew(error):
    state = Recorder()
    result = _run(state, [error, error, 5], lambda: state.done.append("new world"))
    again = ["restore", "new world", "reset", "sync"]
    assert (state.done, result) == (["sync", *again, *again], 5)


@pytest.mark.parametrize(
    ("skip_sync", "then"),
    [(False, ["save", "new world", "reset", "sync"]), (True, ["new world", "reset"])],
)
def test_changed_hosts_keep_the_state(skip_sync, then):
    state = Recorder()
    result = _run(
        state, [HostsUpdatedInterrupt(skip_sync), 6], lambda: state.done.append("new world")
    )
    assert (state.done, result) == (["sync", *then], 6)


def test_values_that_were_not_committed_survive_changed_hosts_and_not_an_error():
    state = _state(batch=0)
    seen = []

    def train(state):
        seen.append(state.batch)
        state.batch += 1
        if len(seen) == 1:
            raise HostsUpdatedInterrupt(False)
        if len(seen) == 2:
            raise HorovodInternalError("injected")
        return state.batch

    assert run_fn(train, lambda: None)(state) == 2
    assert seen == [0, 1, 1]


def test_a_skipped_sync_is_made_up_for_after_an_error():
    state = Recorder()
    _run(state, [HostsUpdatedInterrupt(True), HorovodInternalError(""), 1])
    assert state.done == ["sync", "reset", "restore", "reset", "sync"]


def test_an_error_while_syncing_or_calling_back_counts_too():
    state = Recorder()
    troubles = iter([HorovodInternalError("in sync"), None, None])

    def sync():
        state.done.append("sync")
        if trouble := next(troubles):
            raise trouble

    def callback():
        if state.done.count("reset") == 1:
            raise HorovodInternalError("in a callback")

    state.sync = sync
    state.register_reset_callbacks([callback])
    assert _run(state, [7]) == 7
    assert state.done == ["sync", "restore", "reset", "restore", "reset", "sync"]


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("y"), RuntimeError("z")], ids=repr)
def test_other_exceptions_propagate(error):
    state = Recorder()
    with pytest.raises(type(error)) as caught:
        _run(state, [error], lambda: pytest.fail("reset"))
    assert caught.value is error
    assert state.done == ["sync"]


@pytest.mark.parametrize("place", ["sync", "training", "callback"])
def test_a_frameworks_error_in_a_broken_world_restores_and_starts_anew(place, monkeypatch, caplog):
    class NativeError(RuntimeError):
        pass

    failures = []
    monkeypatch.setattr(basics, "world_failure", lambda: failures[-1] if failures else None)
    state = Recorder()

    def fail_once_at(here):
        if here == place and not failures:
            failures.append("lost rank 1")
            raise NativeError("[_Derived_]UnknownError")

    def sync():
        state.done.append("sync")
        fail_once_at("sync")

    def train(state):
        fail_once_at("training")
        if place == "callback" and "reset" not in state.done:
            raise HostsUpdatedInterrupt(False)
        return 7

    state.sync = sync
    state.register_reset_callbacks([lambda: fail_once_at("callback")])
    wrapped = looped(train, lambda: state.done.append("anew"), failure_if(NativeError))
    assert wrapped(state) == 7
    begun = {
        "sync": ["sync"],
        "training": ["sync"],
        "callback": ["sync", "save", "anew", "reset"],
    }[place]
    assert state.done == [*begun, "restore", "anew", "reset", "sync"]
    assert "going back to the last commit: lost rank 1" in caplog.text


def test_a_frameworks_error_in_a_whole_world_propagates():
    state = Recorder()
    train = _raising(ZeroDivisionError("mine"))
    wrapped = looped(train, lambda: pytest.fail("reset"), failure_if(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError, match="mine"):
        wrapped(state)
    assert state.done == ["sync"]


def _raising(error):
    def train(_):
        raise error

    return train


def test_what_reset_raises_propagates():
    def reset():
        raise InitializationError("rank 3 is missing")

    state = Recorder()
    with pytest.raises(InitializationError, match="rank 3 is missing"):
        _run(state, [HorovodInternalError("injected")], reset)
    assert state.done == ["sync", "restore"]


def test_the_state_hears_of_hosts_while_it_runs():
    state = _state()
    calls = []

    def train(state):
        calls.append(None)
        if len(calls) == 1:
            notification_manager.handle_hosts_updated(1.0, REMOVED)
            state.check_host_updates()

    run_fn(train, lambda: None)(state)
    assert len(calls) == 2
    notification_manager.handle_hosts_updated(2.0, REMOVED)
    state.check_host_updates()  # not registered any more


# ---- new worlds ----


@pytest.fixture
def starts(monkeypatch):
    """Failures of init(), one for each try; afterwards it works. Returns how often it was tried."""
    tries: list[None] = []

    def arrange(*failures):
        left = list(failures)

        def init(process_sets):
            assert process_sets == []
            tries.append(None)
            if left:
                raise left.pop(0)

        monkeypatch.setattr(basics, "init", init)
        return tries

    return arrange


def test_a_start_that_fails_is_tried_again(starts, caplog):
    tries = starts(InitializationError("rank 1 was late"), InitializationError("rank 1 went"))
    elastic_loop.reset()
    assert len(tries) == 3
    assert "start 1 of 3 failed: rank 1 was late" in caplog.text


def test_a_start_that_keeps_failing_is_given_up(starts):
    failures = [InitializationError(f"try {number}") for number in range(1, 5)]
    tries = starts(*failures)
    with pytest.raises(InitializationError, match="try 3"):
        elastic_loop.reset()
    assert len(tries) == 3


def test_without_a_launcher_the_next_world_is_this_process_again():
    basics.init()
    epoch = basics._world.epoch
    state = _state(batch=0)

    def train(state):
        state.batch += 1
        if basics._world.epoch == epoch:
            raise HorovodInternalError("injected")
        return state.batch

    try:
        assert run_fn(train, elastic_loop.reset)(state) == 1
        assert basics._world.epoch == epoch + 1
        assert (basics.rank(), basics.size()) == (0, 1)
    finally:
        basics.shutdown()


def test_what_codecs_hold_back_outlives_a_start_that_fails_once_the_ranks_are_connected():
    held = {"p": (0, struct.pack("<4f", 1.0, 2.0, 3.0, 4.0))}
    basics.init()
    kept = residuals.Residuals(basics.new_gradients(), global_process_set)
    kept.know("p", "p", False)
    kept.replace(held)
    kept.hand_over_known()
    try:
        basics.shutdown_for_next()
        with pytest.raises(InitializationError, match=r"process set \[0\] is a duplicate"):
            basics.init(process_sets=[ProcessSet([0])])
        basics.init()
        assert not kept.waiting
        assert kept.read() == held
    finally:
        basics.shutdown()


def test_while_the_state_is_restored_the_rank_is_known_and_the_world_is_over():
    basics.init()
    found = []

    class Asking(Recorder):
        def restore(self):
            found.append((basics.rank(), basics.size(), basics._world.context.failure()))

    try:
        _run(Asking(), [HorovodInternalError("injected"), None], elastic_loop.reset)
    finally:
        basics.shutdown()
    rank, size, reason = found[0]
    assert (rank, size) == (0, 1)
    assert reason.startswith("Horovod has been shut down")


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This process's membership in an elastic job."""
    found = SimpleNamespace(has_state=None, will_sync=True, commits=0, place=None, feeding=None)
    found.loops = []
    found.tell_loop = found.loops.append
    monkeypatch.setattr(elastic_loop, "_loops", elastic_loop._Loops())
    monkeypatch.setattr(basics, "membership", lambda: found)
    return found


def test_a_rank_of_an_elastic_job_goes_back_to_what_it_was_given(member: SimpleNamespace):
    """It has the state from then on, and may give it to others, before its first commit, too."""
    state = Recorder()
    found = []

    def train(state):
        found.append((list(state.done), member.has_state))
        if len(found) == 1:
            raise HorovodInternalError("injected")

    run_fn(train, lambda: state.done.append("new world"))(state)
    first = ["sync", "save"]
    second = [*first, "restore", "new world", "reset", "sync", "save"]
    assert found == [(first, True), (second, True)]


def test_a_second_loop_begins_with_the_state_of_the_first(member: SimpleNamespace):
    class Asking(Recorder):
        def sync(self) -> None:
            asked.append(member.has_state)

    asked: list[bool | None] = []
    for _ in range(2):
        run_fn(lambda state: None, lambda: None)(Asking())
    assert asked == [False, True]


def test_calls_with_another_function_or_another_state_are_other_loops(member: SimpleNamespace):
    """With the same ones, a new rank takes over the state where the others are."""
    first, again, part = (
        run_fn(form(lambda state: None), lambda: None) for form in (_own, _own, partial)
    )
    second = run_fn(lambda state: state.epoch, lambda: None)
    state = Recorder()
    state.epoch = 0
    first(state)
    first(state)
    again(state)  # as in a loop that decorates a function each time
    part(state)
    second(state)
    first(state)
    first(Recorder())  # maybe where the next one will be
    first(Recorder())
    assert member.loops == [1, 1, 1, 1, 2, 3, 4, 5]


def test_an_interrupted_loop_does_not_become_another_one(member: SimpleNamespace):
    state = Recorder()
    _run(state, [HorovodInternalError("injected"), HostsUpdatedInterrupt(False), None])
    assert member.loops == [1]
