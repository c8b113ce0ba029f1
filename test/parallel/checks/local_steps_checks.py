"""LocalSGD and DiLoCo: hosts step on their own and exchange parameters every K steps."""

from __future__ import annotations

import gc

import torch
from local_replicas import Replicas
from local_training import (
    global_parameters,
    kinds,
    rounding,
    same,
)
from patterns import added, apart, assert_job_usable, nan_check, raised, world_with
from sloping_training import Training, Wrap, equal_everywhere
from torch import nn
from turns import RATE, slope

import perseus
import perseus.torch.horovod as hvd
from perseus.compression import Compressor


def check_local_sgd_gives_the_values_of_a_simulation() -> None:
    for every, delay in ((1, 1), (1, 0), (3, 1), (3, 3), (4, 0), (4, 2), (4, 4)):
        with apart():
            training = Training(hvd.LocalSGD, every=every, delay=delay)
            replicas = Replicas(every, delay=delay)
            differed = False
            for _ in range(3 * every + 1):
                training.step()
                replicas.step()
                same(training.values(), replicas.mine(), rounding())
                differed = differed or not training.equal_everywhere()
            assert differed == (delay > 0 or every > 1)
            if delay == 0:
                for _ in range(every - 1):
                    training.step()
                assert training.equal_everywhere()


def check_a_closure_may_compute_the_gradients() -> None:
    """Also several times in a step, which remains one of the steps between exchanges."""

    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()
            return super().step(closure)

    for wrap, options in ((hvd.LocalSGD, {}), (hvd.DiLoCo, {"compression": hvd.Compression.none})):
        for calls, inner in ((1, torch.optim.SGD), (2, Twice)):
            with apart():
                training = Training(wrap, inner=inner, every=3, delay=1, **options)
                other = Training(wrap, every=3, delay=1, **options)
                for _ in range(7):
                    training.optimizer.step(training.compute)
                    other.taken += calls - 1  # those of the last call are applied
                    other.step()
                    same(training.values(), other.values(), rounding())


def _train_by_lbfgs(steps: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameter of LocalSGD and that of a rank alone; ranks call closures differently often."""
    results = []
    for local in (True, False):
        weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = torch.optim.LBFGS([weight], lr=0.1, max_iter=2 + 2 * hvd.rank())
        if local:
            optimizer = hvd.LocalSGD(optimizer, [("weight", weight)], every=steps + 1)

        def closure(optimizer=optimizer, weight=weight) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight * torch.arange(1.0, 4.0) - hvd.rank()).pow(4).sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        results.append(weight.detach())
    return results[0], results[1]


def check_lbfgs_needs_hosts_of_one_rank() -> None:
    with apart():
        mine, alone = _train_by_lbfgs()
        assert torch.equal(mine, alone)
    for world in (world_with(), apart(**nan_check("report"))):
        with world:
            text = raised(ValueError, _train_by_lbfgs)
            assert text.startswith("[local steps] torch.optim.LBFGS"), text


def check_diloco_gives_the_values_of_a_simulation() -> None:
    cases = [(1, 1, 0), (1, 1, 1), (4, 1, 4), (4, 1, 0), (4, 2, 2), (6, 3, 1), (5, 3, 5), (4, 4, 0)]
    for every, fragments, delay in cases:
        with apart():
            training = Training(
                hvd.DiLoCo, every=every, fragments=fragments, delay=delay, outer_lr=0.5,
                outer_momentum=0.5, compression=hvd.Compression.none,
            )  # fmt: skip
            replicas = Replicas(every, fragments, delay, outer=(0.5, 0.5))
            for _ in range(3 * every + 1):
                training.step()
                replicas.step()
                same(training.values(), replicas.mine(), rounding())
            same(global_parameters(training), list(replicas.everywhere.values()), rounding())
            assert equal_everywhere(global_parameters(training))


def check_the_defaults_of_diloco() -> None:
    with apart():
        training, replicas = Training(hvd.DiLoCo, every=4), Replicas(4, 1, 1, outer=(0.7, 0.5))
        for _ in range(13):
            training.step()
            replicas.step()
        # Outer gradients of about 2 in 255 steps.
        same(training.values(), replicas.mine(), 0.2)
        assert (training.values()[0] - replicas.mine()[0]).abs().max() > 0, "int8 rounds"
        assert equal_everywhere(global_parameters(training))


def check_outer_gradients_travel_as_their_codec_says() -> None:
    """Each differs from what exact outer gradients give, by its rounding, but lossless ones."""
    exact, *codecs = (
        hvd.Compression.none,
        hvd.Compression.lossless,
        hvd.Compression.int8,
        hvd.Compression.int4,
        hvd.Compression.int2,
    )

    def trained(compression: type[Compressor]) -> list[torch.Tensor]:
        with apart():
            training = Training(hvd.DiLoCo, every=4, compression=compression)
            for _ in range(4 * 4 + 1):
                training.step()
            assert equal_everywhere(global_parameters(training))
            return [value.clone() for value in training.values()]

    expected = trained(exact)
    distances = [
        max(float((a - b).abs().max()) for a, b in zip(trained(codec), expected, strict=True))
        for codec in codecs
    ]
    assert distances[0] == 0, distances
    assert len(set(distances)) == len(codecs), distances
    assert all(a <= most for a, most in zip(distances, (0, 0.001, 0.02, 0.2), strict=True)), (
        distances
    )


def check_synchronized_parameters_have_the_same_bits_everywhere() -> None:
    for wrap, options in kinds():
        with apart():
            training = Training(wrap, **options)
            for _ in range(7):
                training.step()
            assert not training.equal_everywhere()
            hvd.synchronize_parameters()
            assert training.equal_everywhere()
            training.step()
            assert not training.equal_everywhere()


def check_synchronized_parameters_are_the_average() -> None:
    with apart():
        training, replicas = Training(hvd.LocalSGD, every=4), Replicas(4, delay=1)
        for _ in range(8):  # the last average is under way
            training.step()
            replicas.step()
        replicas.settle()
        hvd.synchronize_parameters()
        same(training.values(), replicas.average(), rounding())


def check_synchronizing_leaves_outer_gradients_as_they_were() -> None:
    """Their average does not change when local parameters become their average."""
    with apart():
        trainings = []
        for synchronizes in (False, True):
            options = {"every": 8, "compression": hvd.Compression.none, "delay": 0}
            training = Training(hvd.DiLoCo, **options)
            for step in range(8):
                training.step()
                if synchronizes and step == 4:
                    hvd.synchronize_parameters()
            trainings.append(training)
        same(global_parameters(trainings[1]), global_parameters(trainings[0]), 1e-6)


def check_ranks_of_one_host_are_one_worker() -> None:
    for options in ({"every": 3}, {"every": 3, "delay": 0}):
        local = Training(hvd.LocalSGD, **options)
        plain = Training(hvd.DistributedOptimizer, compression=hvd.Compression.none)
        for _ in range(7):
            local.step()
            plain.step()
            same(local.values(), plain.values())
        hvd.synchronize_parameters()
        same(local.values(), plain.values())


def check_local_sgd_costs_nothing_on_one_host() -> None:
    wraps = (hvd.LocalSGD, {"every": 2}), (hvd.DistributedOptimizer, {})
    sent = [_bytes_a_step(wrap, **options) for wrap, options in wraps]
    assert abs(sent[0] - sent[1]) < 0.01 * sent[1], sent


def _bytes_a_step(wrap: Wrap, **options: object) -> float:
    parameter = nn.Parameter(torch.zeros(4000, 100))
    named = [("p", parameter)]
    optimizer = wrap(torch.optim.SGD([parameter], lr=0.1), named_parameters=named, **options)

    def step() -> None:
        (parameter * (1 + hvd.rank())).sum().backward()
        optimizer.step()

    step()  # in which ranks compare their states
    before, steps = perseus.stats()["shm_bytes_sent"], 40
    for _ in range(steps):
        step()
    optimizer.state_dict()  # waits for what is under way
    return (perseus.stats()["shm_bytes_sent"] - before) / steps


def check_what_travels() -> None:
    exact = 2 * (hvd.size() - 1) / hvd.size() * 4 * 400_000
    cases: list[tuple[Wrap, dict[str, object], float]] = [
        (hvd.LocalSGD, {"every": 8}, 1),
        (hvd.DiLoCo, {"every": 8}, 1 / 4),
        (hvd.DiLoCo, {"every": 8, "fragments": 4, "compression": hvd.Compression.fp16}, 1 / 2),
    ]
    for wrap, options, bytes_of_exact in cases:
        with apart():
            expected = exact / 8 * bytes_of_exact
            sent = _bytes_a_step(wrap, **options)
            assert abs(sent - expected) < 0.15 * expected, (options, sent, expected)


def check_nothing_travels_between_exchanges() -> None:
    with apart():
        training = Training(hvd.LocalSGD, every=50)
        training.step()
        hvd.barrier()
        before = perseus.stats()
        # Hosts do not even wait for each other.
        for _ in range(20 if hvd.rank() == 0 else 30):
            training.step()
        after = perseus.stats()
        assert after["shm_bytes_sent"] == before["shm_bytes_sent"]
        for _ in range(10 if hvd.rank() == 0 else 0):
            training.step()
        hvd.synchronize_parameters()
        assert training.equal_everywhere()


def check_some_ranks_of_a_host_and_others() -> None:
    """Ranks 0 and 1 share a host, and others have one of their own or share it with another."""
    with world_with(LIGHT_2D_ALLREDUCE=1, LIGHT_INTRA_SIZE=2):
        for wrap, options in ((hvd.LocalSGD, {"every": 3}), (hvd.DiLoCo, {"every": 3})):
            training = Training(wrap, **options)
            for _ in range(8):
                training.step()
                flat = torch.cat([value.reshape(-1) for value in training.values()])
                rows = hvd.allgather(flat.reshape(1, -1))
                assert torch.equal(rows[0], rows[1])
            assert hvd.size() == 2 or not torch.equal(rows[0], rows[2])
            hvd.synchronize_parameters()
            assert training.equal_everywhere()


def check_a_nan_in_the_sum_of_a_host_shifts_no_turns() -> None:
    """Other hosts do not see it."""
    for wrap, options in (
        (hvd.LocalSGD, {"every": 3}),
        (hvd.DiLoCo, {"every": 3}),
        (hvd.DistributedOptimizer, {"compression": hvd.Compression.rotate(2)}),
    ):
        with world_with(LIGHT_2D_ALLREDUCE=1, LIGHT_INTRA_SIZE=2, **nan_check("skip")):
            parameter = nn.Parameter(torch.zeros(6))
            optimizer = wrap(torch.optim.SGD([parameter], lr=0.125), [("p", parameter)], **options)
            for step in range(5):
                numbers = torch.full((6,), hvd.rank() + 1.0)
                if step == 2 and hvd.rank() < 2:
                    numbers[4] = float("inf") if hvd.rank() == 0 else -float("inf")
                optimizer.zero_grad()
                (parameter * numbers).sum().backward()
                optimizer.step()
            hvd.synchronize_parameters()
            assert parameter.isfinite().all() and equal_everywhere([parameter.detach()])


def check_every_dtype_is_exchanged() -> None:
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float16, 0.1), (torch.bfloat16, 0.4)):
        with apart():
            local, replicas = Training(hvd.LocalSGD, dtype, every=3), Replicas(3, delay=1)
            options = {"every": 3, "outer_lr": 0.5, "outer_momentum": 0.5}
            diloco = Training(hvd.DiLoCo, dtype, compression=hvd.Compression.none, **options)
            others = Replicas(3, 1, 1, outer=(0.5, 0.5))
            for _ in range(8):
                for each in (local, replicas, diloco, others):
                    each.step()
            same(local.values(), replicas.mine(), tolerance)
            same(diloco.values(), others.mine(), tolerance)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            assert all(value.dtype == wide for value in global_parameters(diloco))
            hvd.synchronize_parameters()
            assert local.equal_everywhere() and diloco.equal_everywhere()


def check_accumulated_gradients_are_one_step() -> None:
    with apart(PERSEUS_ACCUMULATE_N_STEPS=2):
        training, replicas = Training(hvd.LocalSGD, every=2), Replicas(2, delay=1, summed=2)
        for _ in range(6):
            training.step()
            training.step()
            replicas.step()
        same(training.values(), replicas.mine(), rounding())
        text = raised(ValueError, lambda: Training(hvd.DiLoCo, every=2))
        assert "backward_passes_per_step" in text


def check_backward_passes_are_one_step() -> None:
    with apart():
        training = Training(hvd.LocalSGD, every=2, backward_passes_per_step=2)
        replicas = Replicas(2, delay=1, summed=2)
        for _ in range(6):
            training.optimizer.zero_grad()
            for _ in range(2):
                for name, parameter in training.parameters.items():
                    (parameter * slope(name, hvd.rank(), training.taken)).sum().backward()
                training.taken += 1
            training.optimizer.step()
            replicas.step()
        same(training.values(), replicas.mine(), rounding())


def check_two_models_with_the_same_names_do_not_mix() -> None:
    with apart():
        first, second = (Training(hvd.LocalSGD, every=3) for _ in range(2))
        replicas = Replicas(3, delay=1)
        for parameter in second.parameters.values():
            parameter.data.fill_(64.0)
        for _ in range(8):
            first.step()
            second.step()
            replicas.step()
        same(first.values(), replicas.mine(), rounding())
        same([value - 64.0 for value in second.values()], replicas.mine(), 1e-4)
        hvd.synchronize_parameters()
        assert first.equal_everywhere() and second.equal_everywhere()


def check_a_process_set_averages_by_itself() -> None:
    members = list(range(hvd.size() - 1))
    with apart(HOROVOD_DYNAMIC_PROCESS_SETS=1), added(members) as (others,):
        for wrap, options in ((hvd.LocalSGD, {"every": 3}), (hvd.DiLoCo, {"every": 3})):
            training = Training(wrap, process_set=others, **options)
            for _ in range(7):
                training.step()
            hvd.synchronize_parameters()
            flat = torch.cat([value.reshape(-1) for value in training.values()])
            rows = hvd.allgather(flat.reshape(1, -1))
            assert all(torch.equal(row, rows[0]) for row in rows[:-1])
            assert not torch.equal(rows[0], rows[-1])
            del training
            gc.collect()


def check_the_result_is_an_optimizer() -> None:
    with apart():
        for wrap in (hvd.LocalSGD, hvd.DiLoCo):
            training = Training(wrap, every=2)
            optimizer = training.optimizer
            assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            seen = []
            for _ in range(3):
                training.compute()
                assert optimizer.step(lambda: 5) == 5
                schedule.step()
                seen.append(optimizer.param_groups[0]["lr"])
            assert seen == [RATE / 2, RATE / 4, RATE / 8]
            text = raised(ValueError, lambda made=optimizer: hvd.DistributedOptimizer(made))
            assert "already" in text


def check_sparse_gradients_are_gathered_as_ever() -> None:
    with apart():
        embedding = nn.Embedding(20, 3, sparse=True)
        weight = embedding.weight
        weight.data.zero_()
        sgd = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.LocalSGD(sgd, [("e", weight)], every=2)
        for _ in range(3):
            optimizer.zero_grad()
            embedding(torch.tensor([hvd.rank(), 10])).sum().backward()
            optimizer.step()
        assert torch.allclose(weight[10], torch.full((3,), -3.0), atol=1e-5)


def check_bad_arguments_are_refused() -> None:
    cases: list[tuple[Wrap, dict[str, object], str]] = [
        (hvd.LocalSGD, {"every": 0}, "[LocalSGD] every=0: expected a whole number, 1 or more"),
        (hvd.LocalSGD, {"every": 1.5}, "every=1.5"),
        (hvd.LocalSGD, {"every": 2, "delay": 3}, "delay=3: expected a whole number, 0 to 2"),
        (hvd.LocalSGD, {"every": True}, "every=True"),
        (hvd.DiLoCo, {"every": -1}, "[DiLoCo] every=-1"),
        (hvd.DiLoCo, {"every": 4, "fragments": 0}, "fragments=0"),
        (hvd.DiLoCo, {"every": 4, "fragments": 5}, "1 to 4, as every=4"),
        (hvd.DiLoCo, {"every": 99, "fragments": 41}, "1 to 40, the rows of the largest parameter"),
        (hvd.DiLoCo, {"every": 4, "delay": 5}, "0 to 4, as every=4"),
        (hvd.DiLoCo, {"every": 4, "outer_lr": 0}, "outer_lr=0: expected a number above 0"),
        (hvd.DiLoCo, {"every": 4, "outer_momentum": 1}, "outer_momentum=1"),
        (hvd.DiLoCo, {"every": 4, "compression": hvd.Compression.rotate(2)}, "Compression.int8"),
        (hvd.DiLoCo, {"every": 4, "compression": hvd.Compression.topk(0.1)}, "Compression.int8"),
        (hvd.DiLoCo, {"every": 4, "compression": "int8"}, "compression"),
    ]
    for wrap, options, text in cases:
        message = raised((ValueError, TypeError), lambda w=wrap, o=options: Training(w, **o))
        assert text in message, message
    for wrap in (hvd.LocalSGD, hvd.DiLoCo):
        with apart(PERSEUS_PARAMETER_CHECK_N_STEPS=5):
            assert "cannot compare" in raised(ValueError, lambda w=wrap: Training(w, every=2))
    assert_job_usable()
