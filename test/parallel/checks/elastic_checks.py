"""Elastic training on real ranks: changed hosts, ranks lost or late, process sets."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from adasum_checks import adasum_of
from patterns import apart, assert_job_usable, shared_folder, values, world_with
from torch import nn

import perseus.torch.horovod as hvd
from perseus import basics
from perseus.elastic import HostUpdateResult, notification_manager
from perseus.process_sets import ids_and_ranks


def check_changed_hosts_keep_the_state_and_other_exceptions_propagate() -> None:
    rank, size, first = hvd.rank(), hvd.size(), basics._world.epoch
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(rank))
    sampler = hvd.elastic.ElasticSampler(range(6 * size), shuffle=False)
    state = hvd.elastic.TorchState(model, sampler=sampler, step=0)
    callbacks: list[int] = []
    state.register_reset_callbacks([lambda: callbacks.append(basics._world.epoch - first)])
    seen = []

    def announce_change(change: int) -> None:
        """Rank 0 alone learns of a change; the commit point tells the others."""
        if rank == 0:
            notification_manager.handle_hosts_updated(float(len(seen)), change)
        state.check_host_updates()
        raise AssertionError("nobody has interrupted")

    @hvd.elastic.run
    def train(state, bonus, *, last):
        world = basics._world.epoch - first
        seen.append((world, state.step, model.weight[0, 0].item(), list(sampler)))
        with torch.no_grad():
            model.weight.add_(10 + rank)  # from now on they differ
        sampler.record_batch(0, 2)
        state.step += bonus
        if world < 2:
            announce_change([HostUpdateResult.added, HostUpdateResult.removed][world])
        assert state.step == last
        raise KeyError("mine")

    try:
        train(state, 2, last=6)
    except KeyError as error:
        assert error.args == ("mine",)
    else:
        raise AssertionError("the exception was swallowed")

    def share(processed: int) -> list[int]:
        return [processed * size + rank + size * i for i in range(6 - processed)]

    assert seen == [
        (0, 0, 0.0, share(0)),
        (1, 2, 10.0, share(2)),  # rank 0's weights, not restored
        (2, 4, 20.0 + rank, share(4)),  # after a removal everybody keeps the own ones
    ], seen
    assert callbacks == [1, 2]
    assert hvd.is_initialized() and (hvd.rank(), hvd.size()) == (rank, size)
    assert_job_usable()


def check_no_step_is_applied_twice_where_gradients_are_cleared_after_the_commit() -> None:
    """Neither after a failure nor when hosts change; ranks add different gradients."""
    size = hvd.size()
    mean = sum(values((5, 3), torch.float64, each, salt=1) for each in range(size)) / size
    for passes in (1, 2):
        for fails in (True, False):
            expected = values((5, 3), torch.float64, 0) - 4 * 0.5 * passes * mean
            torch.testing.assert_close(_after_four_steps(passes, fails), expected)


def _after_four_steps(passes: int, fails: bool) -> torch.Tensor:
    """Return a parameter of a training whose world changes after two of them."""
    model = nn.ParameterList([nn.Parameter(values((5, 3), torch.float64, hvd.rank()))])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        model.named_parameters(),
        backward_passes_per_step=passes,
        compression=hvd.Compression.none,
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    worlds: list[int] = []

    @hvd.elastic.run
    def train(state):
        worlds.append(state.step)
        while state.step < 4:
            for _ in range(passes):
                own = values((5, 3), torch.float64, hvd.rank(), salt=1)
                (model[0] * own).sum().backward()
            if len(worlds) == 1 and state.step == 2 and fails:
                hvd.barrier()
                raise hvd.HorovodInternalError("injected")
            optimizer.step()
            state.step += 1
            if len(worlds) == 1 and state.step == 2 and not fails:
                state.on_hosts_updated(1.0, HostUpdateResult.added)
            state.commit()
            optimizer.zero_grad()

    train(state)
    assert worlds == [0, 2], worlds
    return model[0].detach()


def check_gradient_scalers_go_on_as_they_were_committed() -> None:
    """Ranks begin with different scales; the others take over rank 0's."""
    _scale_and_fail("after the step")


def check_gradient_scalers_forget_a_step_that_has_failed() -> None:
    """Otherwise the next one would be applied without having been unscaled."""
    _scale_and_fail("after unscaling")


def _scale_and_fail(where: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + rank), growth_interval=2)
    state = hvd.elastic.TorchState(nn.ParameterList([parameter]), optimizer, scaler=scaler, step=0)
    scales: list[float] = []

    @hvd.elastic.run
    def train(state):
        while state.step < 6:
            optimizer.zero_grad()
            scaler.scale((parameter * (rank + 1.0)).sum()).backward()
            scaler.unscale_(optimizer)
            if where == "after unscaling" and len(scales) == 2:
                scales.append(scaler.get_scale())
                raise hvd.HorovodInternalError("injected")
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            state.step += 1
            if where == "after the step" and rank == size - 1 and len(scales) == 3:
                raise hvd.HorovodInternalError("injected")
            if state.step % 2 == 0:
                state.commit()

    train(state)
    assert state.scaler is scaler
    # The failure may come before some rank's third step has ended, which is taken back.
    assert scales[2:-4] in ([], [32.0]), scales
    assert [*scales[:2], *scales[-4:]] == [16.0, 32.0, 32.0, 64.0, 64.0, 128.0], scales
    expected = torch.full((3,), -6.0 * (size + 1) / 2)
    torch.testing.assert_close(parameter.detach(), expected)


def check_schedulers_lower_the_learning_rates_of_all_ranks() -> None:
    """Ranks begin with different ones, as rank 0 has trained before; the others take over its."""
    rank, size = hvd.rank(), hvd.size()
    parameter = nn.Parameter(torch.full((3,), 5.0 + rank, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], compression=hvd.Compression.none
    )
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.25)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [steps, later], milestones=[4])
    for _ in range(2 if rank == 0 else 0):
        both.step()
    state = hvd.elastic.TorchState(nn.ParameterList([parameter]), optimizer, both=both, step=2)
    rates: list[float] = []

    @hvd.elastic.run
    def train(state):
        while state.step < 6:
            optimizer.zero_grad()
            (parameter * values((3,), torch.float64, rank)).sum().backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            state.both.step()
            state.step += 1
            if rank == size - 1 and len(rates) == 3:
                raise hvd.HorovodInternalError("injected")
            if state.step % 2 == 0:
                state.commit()

    train(state)
    assert state.both is both and both.optimizer is optimizer
    # The failure may come before some rank's third step has ended, which is taken back.
    assert rates[2:-2] in ([], [1.0]), rates
    lasting = [*rates[:2], *rates[-2:]]
    assert lasting == [0.5, 0.5, 1.0, 0.25], rates  # the second one begins with the initial rate
    mean = sum(values((3,), torch.float64, each) for each in range(size)) / size
    torch.testing.assert_close(parameter.detach(), 5.0 - sum(lasting) * mean)


def check_changed_hosts_lose_no_local_step() -> None:
    """Every rank is a host of its own, whose steps count as much as rank 0's."""
    rank, size = hvd.rank(), hvd.size()
    gradients = [values((6, 2), torch.float64, each, salt=2) for each in range(size)]
    mean = sum(gradients) / size
    for wrap, options in (
        (hvd.LocalSGD, {"every": 100}),
        (hvd.DistributedOptimizer, {"compression": hvd.Compression.rotate(2)}),
    ):
        with apart():
            parameter = nn.Parameter(values((6, 2), torch.float64, rank))
            optimizer = wrap(torch.optim.SGD([parameter], lr=0.5), [("p", parameter)], **options)
            state = hvd.elastic.TorchState(nn.ParameterList([parameter]), optimizer, steps=0)
            found: list[torch.Tensor] = []

            @hvd.elastic.run
            def train(state, optimizer, parameter, found):
                found.append(parameter.detach().clone())
                if len(found) == 3:
                    return
                for _ in range(3):
                    optimizer.zero_grad()
                    (parameter * gradients[rank]).sum().backward()
                    optimizer.step()
                    state.steps += 1
                if rank == 0:
                    change = HostUpdateResult.added if len(found) == 1 else HostUpdateResult.removed
                    state.on_hosts_updated(float(len(found)), change)
                state.check_host_updates()

            train(state, optimizer, parameter, found)
            start = values((6, 2), torch.float64, 0)
            for world, weights in enumerate(found):
                torch.testing.assert_close(weights, start - 0.5 * 3 * world * mean)


def check_a_rank_that_was_given_up_as_lost_comes_back() -> None:
    """The last rank is stopped until the others have given it up; then all go on together."""
    with world_with(GLOO_TIMEOUT_SECONDS=4):
        rank, size = hvd.rank(), hvd.size()
        last = size - 1
        pids = hvd.allgather_object(os.getpid())
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
        errors: list[tuple[int, str]] = []

        @hvd.elastic.run
        def train(state):
            try:
                while state.step < 4:
                    if not errors and state.step == 2 and rank == last:
                        os.kill(os.getpid(), signal.SIGSTOP)
                    mine = torch.tensor([2.0**rank])
                    total = hvd.allreduce(mine, op=hvd.Sum, name=f"{state.step}")
                    assert total.item() == 2.0**size - 1, total
                    state.step += 1
                    state.commit()
            except hvd.HorovodInternalError as error:
                errors.append((state.step, str(error)))
                os.environ["GLOO_TIMEOUT_SECONDS"] = "60"
                if rank == 0:
                    os.kill(pids[last], signal.SIGCONT)
                raise

        train(state)
        assert [step for step, _ in errors] == [2], errors
        assert f"no sign of life from rank {last}" in errors[0][1], errors


@contextmanager
def _start_timeouts(late: bool, given_up: Path) -> Iterator[list[str]]:
    """Starts that wait for a second, after one failure and where `late` as long as it takes.

    Yields the messages of those that failed; the first makes the file `given_up`.
    """
    init = basics.init
    failures: list[str] = []

    def patient_init(**arguments: object) -> None:
        os.environ["HOROVOD_START_TIMEOUT"] = "60" if late or failures else "1"
        try:
            init(**arguments)
        except hvd.HorovodInternalError as error:
            failures.append(str(error))
            given_up.touch()
            raise

    basics.init = patient_init
    yield failures
    basics.init = init
    del os.environ["HOROVOD_START_TIMEOUT"]


def check_a_rank_that_comes_after_the_others_gave_up_meets_them_in_the_next_world() -> None:
    rank, size, first = hvd.rank(), hvd.size(), basics._world.epoch
    late = rank == size - 1
    state = hvd.elastic.TorchState(worlds=[])
    given_up = Path(shared_folder(), "given up")
    with _start_timeouts(late, given_up) as failures:

        @hvd.elastic.run
        def train(state):
            state.worlds.append(basics._world.epoch - first)
            if len(state.worlds) == 1:
                hvd.barrier()
                state.commit()
                if rank == 0:
                    raise hvd.HorovodInternalError("injected")
                deadline = time.monotonic() + 60
                while late and not given_up.exists():
                    assert time.monotonic() < deadline, "nobody gave up"
                    time.sleep(0.02)
            return hvd.allreduce(torch.tensor([float(2**rank)]), op=hvd.Sum).item()

        assert train(state) == 2.0**size - 1
    assert state.worlds == [0, 2], state.worlds  # the one between never became a world
    assert len(failures) == 1, failures
    assert not late or f"has given up this start (world {first})" in failures[0], failures


def check_an_abort_takes_all_ranks_back_to_the_commit() -> None:
    """Another thread of rank 0 calls it while both wait; an allreduce of the others has no end."""
    failures = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        state.worlds += 1
        if state.worlds > 1:
            return
        state.commit()
        state.worlds += 10  # is lost
        if hvd.rank() == 0:
            threading.Timer(0.2, hvd.abort, ["it looks wrong"]).start()
        try:
            name = "barrier" if hvd.rank() == 0 else "others"
            hvd.allreduce(torch.ones(3), name=name)
        except hvd.HorovodInternalError as error:
            failures.append(str(error))
            raise

    state = hvd.elastic.TorchState(worlds=0)
    train(state)
    assert state.worlds == 2, state.worlds
    assert failures == ["rank 0 called abort(): it looks wrong"], failures


def _expect_sets(*sets: list[int]) -> None:
    everyone = dict(enumerate([list(range(hvd.size())), *sets]))
    assert ids_and_ranks() == everyone, ids_and_ranks()


def check_optimizers_follow_a_process_set_whose_ranks_change() -> None:
    """As if ranks moved up because one was gone: one begins to take part, another one ceases to."""
    size = hvd.size()
    some = hvd.ProcessSet([])

    def begin(first: int) -> None:
        hvd.barrier()
        hvd.shutdown()
        some.ranks = list(range(first, first + size - 1))
        hvd.init(process_sets=[some])

    def mean_of(numbers: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(numbers).mean(0)

    # With an outer learning rate of 1, it ends with the average.
    outer = {"compression": hvd.Compression.none, "outer_lr": 1.0, "outer_momentum": 0.0}
    for wrap, combine, options in (
        (hvd.DistributedOptimizer, mean_of, {}),
        (hvd.DistributedOptimizer, adasum_of, {"op": hvd.Adasum}),
        (hvd.DistributedOptimizer, mean_of, {"compression": hvd.Compression.rotate(2)}),
        (hvd.LocalSGD, mean_of, {"every": 2}),
        (hvd.DiLoCo, mean_of, {"every": 2, **outer}),
    ):
        begin(0)
        parameter = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        optimizer = wrap(
            torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], process_set=some, **options
        )
        for world, first in enumerate((0, 1, 0)):
            if world > 0:
                begin(first)
            parameter.data.zero_()
            expected = torch.zeros_like(parameter)
            for salt in range(world, world + 3):
                own = [values((4,), torch.float64, rank, salt) for rank in range(size)]
                optimizer.zero_grad()
                (parameter * own[hvd.rank()]).sum().backward()
                optimizer.step()
                members = [own[rank] for rank in some.ranks]
                expected -= combine(members) if some.included() else own[hvd.rank()]
            hvd.synchronize_parameters()
            torch.testing.assert_close(parameter.detach(), expected)
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


def check_process_sets_given_to_init_come_back_and_dynamic_ones_do_not() -> None:
    rank, size = hvd.rank(), hvd.size()
    first, rest = hvd.ProcessSet([0]), hvd.ProcessSet(range(1, size))
    mine = first if rank == 0 else rest
    worlds: list[object] = []

    hvd.shutdown()
    hvd.init(process_sets=[first, rest])
    torch.manual_seed(3)
    model = nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=mine
    )

    def step() -> None:
        """One step of the optimizer over the ranks of this one's set."""
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        (model(torch.ones(1, 2)).sum() * (10.0 + rank)).backward()
        optimizer.step()
        mean = sum(10.0 + r for r in mine.ranks) / mine.size()
        torch.testing.assert_close(before - model.weight, torch.full((1, 2), mean))

    @hvd.elastic.run
    def train(_):
        worlds.append(mine.process_set_id)
        _expect_sets([0], list(range(1, size)))
        step()
        if len(worlds) == 1 and rank == size - 1:
            raise hvd.HorovodInternalError("injected")
        hvd.barrier()  # in the first world it ends with that failure
        step()
        hvd.barrier()  # who leaves earlier ends the others' world

    train(hvd.elastic.TorchState(model, optimizer, step=0))
    assert worlds == [1 if rank == 0 else 2] * 2, worlds

    # With dynamic sets the script says what the new world has, as it must with Horovod.
    hvd.shutdown()
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init(process_sets=[first])
    worlds.clear()
    added = hvd.add_process_set(rest)
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)

    def add_again() -> None:
        assert (first.process_set_id, rest.process_set_id) == (None, None)
        _expect_sets()
        assert hvd.add_process_set(added) is rest and hvd.add_process_set(first) is first

    state.register_reset_callbacks([add_again])

    @hvd.elastic.run
    def train_again(_):
        worlds.append((first.process_set_id, rest.process_set_id))
        step()
        if len(worlds) == 1 and rank == 0:
            raise hvd.HorovodInternalError("injected")
        hvd.barrier()

    train_again(state)
    assert worlds == [(1, 2), (2, 1)], worlds
    # A world that is started by hand has what that init() says.
    hvd.shutdown()
    hvd.init()
    _expect_sets()
