"""Reduces gradients: hooks start reductions during backward, and synchronize() waits for them.

Belongs to the thread that steps the optimizer. Hooks may run in autograd's threads, one at a time
for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from perseus import basics
from perseus.config import elastic
from perseus.failures import Failures
from perseus.gradients.arguments import check_sparse
from perseus.gradients.bundles import bundles
from perseus.gradients.handle_reducer import HandleReducer, Reduction
from perseus.gradients.plan import Plan
from perseus.memory import keep_freed_memory
from perseus.torch.functions import broadcast_object
from perseus.torch.gradient_memory import SharedMemory, is_shared
from perseus.torch.hooks import on_gradient
from perseus.torch.session import keep, session
from perseus.torch.sparse import empty_like, start_sparse_allreduce

_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally. (If another "
    "DistributedOptimizer of the same parameters has taken this one's place, delete this one.)"
)

_CHANGED = (
    "[torch] the gradient of {} was changed in place between loss.backward() and "
    "optimizer.step(), while it was being averaged, so that ranks would go on with different "
    "values: call optimizer.synchronize() before gradients are clipped or scaled, and step() "
    "within optimizer.skip_synchronize()"
)


class _Bundle(Reduction):
    """The gradients that one operation reduces: those of one parameter or of a group.

    dense: the parameters to which Reduction.gradients belong.
    settled: whether nothing changes the gradients after their hooks in this backward pass.
    watched: gradients that are reduced in place, and their versions before that.
    """

    __slots__ = (
        "dense", "parameters", "passes_left", "settled", "unhook", "waiting", "watched",
    )  # fmt: skip

    def __init__(self, name: str, parameters: list[torch.Tensor]) -> None:
        super().__init__(name, name)
        self.parameters = self.dense = parameters
        self.passes_left: list[int] = []  # for each parameter, until its gradient is complete
        self.waiting = 0  # the number of parameters whose gradients are not complete
        self.settled = True
        self.watched: list[tuple[torch.Tensor, int]] = []
        self.unhook: list[Callable[[], object]] = []  # removes the hooks of the parameters


class GradientReducer(HandleReducer):
    """Reduces the gradients of some parameters, once per step.

    parameters: those whose gradients are reduced; with [], every method does nothing.
    names: the names of at least these parameters, equal on all ranks.
    passes: the number of backward passes that complete a gradient.
    step_of: returns the learning rate and the momentum of some parameters' next step; see
        perseus_request. The adapter replaces it when its groups have changed.
    applies: whether the gradients of the last finish_begun() may be applied. They may not if they
        are part of an incomplete sum over steps, or contain a NaN that is to be skipped.
    begins_world: whether it is older than this world, and has finished no reduction in it yet.
    """

    reductions: list[_Bundle]

    def __init__(
        self,
        parameters: list[torch.Tensor],
        names: dict[torch.Tensor, str],
        plan: Plan,
        passes: int,
        step_of: Callable[[list[torch.Tensor]], tuple[float, float]],
    ) -> None:
        super().__init__(plan, session)
        self.names = names
        self.passes = passes
        self.step_of = step_of
        # The number of sparse dimensions, for parameters that have had a sparse gradient.
        self._sparse_dims: dict[torch.Tensor, int] = {}
        # What removes the hooks of master weights.
        self._masters: dict[torch.Tensor, Callable[[], object]] = {}
        self._memory = SharedMemory()
        self._failures = Failures()  # those of the step, which an interrupt may have split
        self.applies = True
        self.begins_world = False
        self._take(_make_bundles(parameters, names, plan))
        if parameters:
            keep_freed_memory()

    def add(self, parameters: list[torch.Tensor]) -> None:
        """Reduce more parameters, which `names` has, from now on; none of them in a group."""
        self._take([_Bundle(self.names[p], [p]) for p in parameters])

    def add_all(self, parameters: list[torch.Tensor]) -> None:
        """Reduce parameters, which `names` has, from now on, in the groups of the plan."""
        self._take(_make_bundles(parameters, self.names, self.plan))

    def catch_up(self, added: list[torch.Tensor]) -> None:
        """Do what synchronize() would have done for parameters that were added after it."""
        if added:
            before = self.applies
            for bundle in self.reductions[-len(added) :]:
                self._start(bundle)
            self.finish_begun()
            self.applies = self.applies and before

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget all others than these. No reduction of them may be under way.

        What is left of a group remains one, but codecs hold nothing back of it yet.
        """
        kept = set(parameters)
        broken = [b for b in self.reductions if not kept.issuperset(b.parameters)]
        if not broken:
            return
        for bundle in broken:
            self._forget(bundle, kept)
        self.reductions = [b for b in self.reductions if kept.issuperset(b.parameters)]
        left = [[p for p in bundle.parameters if p in kept] for bundle in broken]
        self._take([_Bundle(self.names[rest[0]], rest) for rest in left if rest])

    def _forget(self, bundle: _Bundle, kept: set[torch.Tensor]) -> None:
        for unhook in bundle.unhook:
            unhook()
        self.residuals.drop(bundle.key)
        for parameter in bundle.parameters:
            if parameter not in kept:
                self._sparse_dims.pop(parameter, None)

    def refuse(self, masters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Let backward passes that reach master weights raise ValueError: nothing reduces theirs.

        masters: all that there are now, and the parameters of the model that they stand for.
        """
        for gone in self._masters.keys() - masters.keys():
            self._masters.pop(gone)()
        for master, parameter in masters.items():
            if master not in self._masters and master.requires_grad:
                self._masters[master] = on_gradient(
                    master, self, GradientReducer._reached, self.names[parameter], in_place=False
                )

    def _reached(self, _: torch.Tensor, name: str, last: bool) -> None:
        del last
        raise ValueError(
            f"[torch] a backward pass has reached a parameter that has taken the place of {name} "
            "in the optimizer, in a wider dtype as master weights do, so that its gradient is not "
            "reduced: wrap the optimizer anew"
        )

    def share_sparse(self) -> None:
        """Learn from rank 0 which gradients have been sparse. Collective over the world.

        A rank that is new in an elastic job may lack such a gradient in its first step.
        """
        own = {self.names[p]: dims for p, dims in self._sparse_dims.items()}
        known = broadcast_object(own, 0, "sparse_gradients")
        of_root = {p: known.get(self.names[p]) for p in self.parameters()}
        self._sparse_dims.update((p, dims) for p, dims in of_root.items() if dims is not None)

    def parameters(self) -> set[torch.Tensor]:
        """Return those whose gradients are reduced."""
        return {parameter for bundle in self.reductions for parameter in bundle.parameters}

    def _take(self, bundles: list[_Bundle]) -> None:
        for bundle in bundles:
            self.residuals.know(bundle.key, bundle.name, len(bundle.parameters) > 1)
            self._restart(bundle)
            bundle.unhook = [
                on_gradient(parameter, self, GradientReducer._count, (bundle, index), in_place=True)
                for index, parameter in enumerate(bundle.parameters)
            ]
        self.reductions += bundles

    def _restart(self, bundle: _Bundle) -> None:
        bundle.passes_left = [self.passes] * len(bundle.parameters)
        bundle.waiting = len(bundle.parameters)
        bundle.settled = True
        bundle.watched.clear()
        bundle.finished = False
        bundle.applies = True

    def reset(self) -> None:
        """Restart the count of backward passes."""
        for bundle in self.reductions:
            self._restart(bundle)

    def has_begun(self) -> bool:
        """Return whether a backward pass has computed gradients since the last synchronize()."""
        return any(
            bundle.is_under_way() or any(left < self.passes for left in bundle.passes_left)
            for bundle in self.reductions
        )

    def busy(self) -> bool:
        """Return whether gradients are being reduced, or wait for synchronize() to begin it."""
        return super().busy() or any(
            bundle.waiting == 0 and not bundle.settled and not bundle.finished
            for bundle in self.reductions
        )

    def has_begun_only(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether no reductions of others than these are under way."""
        others = self.parameters().difference(parameters)
        return others.isdisjoint(
            p for bundle in self.reductions if bundle.is_under_way() for p in bundle.parameters
        )

    def begin_world(self) -> None:
        """See HandleReducer."""
        super().begin_world()
        self._memory.end_step()
        self._failures = Failures()
        self.begins_world = True
        self.reset()

    def synchronize(self) -> None:
        """Start the missing reductions, wait for all, and write the results into p.grad."""
        for bundle in self.reductions:
            if bundle.handle == 0 and not bundle.others and not bundle.finished:
                self._start(bundle)
        self.begins_world = False
        self.finish_begun()

    def finish_begun(self) -> None:
        """Wait for reductions in flight; raise once all have ended if one failed. See Failures."""
        changed = self._changed()
        self.applies = True
        self.applies = self.finish(self.reductions, self._failures)
        if changed is not None:
            self._failures.add(ValueError(_CHANGED.format(changed.name)))
        for bundle in self.reductions:
            for parameter, result in zip(bundle.dense, bundle.gradients, strict=False):
                self._write(parameter, result)
            bundle.gradients = []
        self._memory.end_step()
        self.reset()
        failures, self._failures = self._failures, Failures()
        failures.raise_first()

    def allow_changes(self) -> None:
        """Let it be no error if the script has changed gradients under way: others replace them."""
        for bundle in self.reductions:
            bundle.watched.clear()

    def _changed(self) -> _Bundle | None:
        """Return one of which the script has changed a gradient that is being reduced."""
        for bundle in self.reductions:
            for gradient, version in bundle.watched:
                if gradient._version != version:
                    return bundle
        return None

    def _decompress(self, reduction: Reduction) -> None:
        super()._decompress(reduction)
        for tensor in reduction.sent:  # which a hook has made, maybe on another stream
            keep(tensor)

    def _write(self, parameter: torch.Tensor, result: torch.Tensor) -> None:
        """Write a result into p.grad, unless it is there.

        p.grad remains the same object, because scripts may hold it. It may be another one than that
        which was reduced: then the script has replaced it, on this rank at least.
        """
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient.is_sparse:
            if not result.is_sparse:  # some optimizers require that it stays sparse
                result = result.to_sparse(self._sparse_dims[parameter])
            gradient.data = result
        elif result.is_sparse:
            parameter.grad = result
        elif gradient.data_ptr() != result.data_ptr():
            gradient.copy_(result)
            keep(result)  # which a hook may have made on another stream

    def _count(self, parameter: torch.Tensor, place: tuple[_Bundle, int], last: bool) -> None:
        """Count a backward pass for a parameter; start the reduction of a complete bundle.

        place: the bundle, and the parameter's index in it. last: see on_gradient(); if a hook of
            the script may still change the gradient, or has taken it, synchronize() starts the
            reduction.
        """
        if self.begins_world and not self.plan.process_set.included():
            return  # it was a member in an earlier world
        bundle, index = place
        left = bundle.passes_left[index] - 1
        if left < 0:
            raise AssertionError(_TOO_MANY)
        bundle.passes_left[index] = left
        if left == 0:
            bundle.waiting -= 1
            if not last or parameter.grad is None:
                bundle.settled = False
            if bundle.waiting == 0 and bundle.settled:
                self._start(bundle)

    def _start(self, bundle: _Bundle) -> None:
        bundle.dense = bundle.parameters
        gradients = [self._gradient(parameter, bundle) for parameter in bundle.parameters]
        for gradient in gradients:  # any() over a generator costs 0.3 µs
            if gradient.is_sparse:
                gradients = self._start_sparse(bundle, gradients)
                break
        if gradients:
            rate, momentum = self.step_of(bundle.parameters)
            if momentum and self.unapplied:  # as where a gradient scaler has found an overflow
                basics.forget_momenta(self.number)
                self.unapplied = False
            self.begin(bundle, gradients, rate, momentum)

    def _gradient(self, parameter: torch.Tensor, bundle: _Bundle) -> torch.Tensor:
        """Return what is to be reduced: a dense tensor that nothing else uses, or a sparse one."""
        gradient = parameter.grad
        if gradient is None:
            if parameter in self._sparse_dims:
                gradient = empty_like(parameter, self._sparse_dims[parameter])
            else:
                gradient = torch.zeros_like(parameter)
            parameter.grad = gradient
        if gradient.is_sparse:
            if not self.plan.sparse_as_dense:
                return gradient
            self._sparse_dims[parameter] = gradient.sparse_dim()
            return gradient.to_dense()
        if is_shared(gradient):
            if self._memory.concerns(gradient):
                return gradient.detach().clone()
        elif self._plain and not gradient.is_inference():  # else a Compressor may change it
            # Others that share the memory would count versions together with it.
            bundle.watched.append((gradient, gradient._version))
        # It holds the memory, also where the script gives p.grad another one by p.grad.data = ….
        return gradient.detach()

    def _start_sparse(self, bundle: _Bundle, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Start the reduction of each sparse gradient; return the dense ones."""
        plan = self.plan
        bundle.dense = []
        for parameter, gradient in zip(bundle.parameters, gradients, strict=True):
            if not gradient.is_sparse:
                bundle.dense.append(parameter)
                continue
            check_sparse(self.names[parameter], "torch")
            self._sparse_dims[parameter] = gradient.sparse_dim()
            finish = start_sparse_allreduce(
                gradient, self.names[parameter], plan.op, plan.process_set, plan.compression,
                gradient_of=self.number,
            )  # fmt: skip
            bundle.others.append(self._finishing(parameter, finish))
        return [gradient for gradient in gradients if not gradient.is_sparse]

    def _finishing(
        self, parameter: torch.Tensor, finish: Callable[[], torch.Tensor | None]
    ) -> Callable[[], bool]:
        """Return what waits for a sparse gradient; it returns False if it has a NaN to skip."""

        def wait() -> bool:
            result = finish()
            if result is not None:
                self._write(parameter, result)
            return result is not None

        return wait


def _make_bundles(
    parameters: list[torch.Tensor], names: dict[torch.Tensor, str], plan: Plan
) -> list[_Bundle]:
    if plan.groups is None or not parameters:
        return [_Bundle(names[p], [p]) for p in parameters]
    ordered = _in_common_order(parameters, names, plan)
    groups = plan.groups
    if not isinstance(groups, int):
        groups = [[id(p) for p in group] for group in groups]
    found = bundles([id(p) for p in ordered], groups)
    return [_Bundle(names[ordered[b[0]]], [ordered[i] for i in b]) for b in found]


def _in_common_order(
    parameters: list[torch.Tensor], names: dict[torch.Tensor, str], plan: Plan
) -> list[torch.Tensor]:
    """Return the parameters in an order of all ranks, so that groups are equal on all ranks.

    It is that of the set's first rank. In an elastic job it is that of the names: survivors are
    elsewhere when a new rank makes its optimizer, and would not answer.

    Raises ValueError if ranks have different parameters, which an elastic job does not compare.
    """
    by_name = {names[p]: p for p in parameters}
    if elastic():
        return [by_name[name] for name in sorted(by_name)]
    ranks = plan.process_set.ranks
    of_root = broadcast_object(
        list(by_name), ranks[0] if ranks else 0, "parameter_names", plan.process_set
    )
    if set(of_root) != set(by_name):
        different = sorted(set(of_root) ^ set(by_name))
        raise ValueError(
            f"[torch] groups need the same parameters on all ranks; not everywhere: "
            f"{', '.join(different[:5])}"
        )
    return [by_name[name] for name in of_root]
