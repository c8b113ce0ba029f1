"""What torch parameters with local steps exchange in DiLoCo: outer gradients.

Source: Douillard et al. 2023, DiLoCo; Douillard et al. 2025, Streaming DiLoCo.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from perseus.compression import Compressor
from perseus.failures import Failures
from perseus.gradients.handle_reducer import HandleReducer, Reduction
from perseus.gradients.local_steps import Pace
from perseus.gradients.plan import Plan
from perseus.gradients.residuals import own
from perseus.process_sets import ProcessSet
from perseus.torch.local_exchanges import Exchange, TorchLocalSteps, hashed
from perseus.torch.parameter_rows import ParameterRows
from perseus.torch.residuals import as_buffers, as_tensors
from perseus.torch.session import session


class Outer(NamedTuple):
    """SGD with Nesterov momentum, as torch.optim.SGD(nesterov=True) has it.

    compression: of the outer gradients, which the core knows as gradients.
    """

    rate: float
    momentum: float
    compression: type[Compressor]


class OuterSteps(TorchLocalSteps):
    """DiLoCo: global parameters take a step by the average of (global - sent) of all ranks.

    The local ones become x += global - sent, so that what the steps since then have changed stays.
    Global parameters and velocity are equal on all ranks, in float32 (of float64: float64).

    The arguments but `outer`: see TorchLocalSteps.
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        name: str,
        process_set: ProcessSet,
        pace: Pace,
        outer: Outer,
    ) -> None:
        super().__init__(parameters, name, process_set, pace)
        self._parameters = parameters
        self._outer = outer
        self._global: list[torch.Tensor] = []  # none before the first step
        self._velocity: list[torch.Tensor] = []
        self._reducer = HandleReducer(
            Plan(compression=outer.compression, process_set=process_set), session
        )

    def begin(self, part: int, due: int) -> Exchange | None:
        """See LocalSteps."""
        sent = self._rows.read(part)
        before = ParameterRows(self._global, self.parts).read(part)
        if sent is None or before is None:
            return None
        self._reducer.begin(self._reducer.reductions[part], [before.sub_(sent)])
        return Exchange(part, due, sent)

    def wait(self, begun: Exchange) -> None:
        """See LocalSteps."""
        if begun.average is not None:
            return
        reduction, failures = self._reducer.reductions[begun.part], Failures()
        applies = self._reducer.finish([reduction], failures)
        failures.raise_first()
        (average,), reduction.gradients = reduction.gradients, []
        # A NaN that the settings skip leaves no outer gradient.
        begun.average = average if applies else torch.zeros_like(average)

    def apply(self, begun: Exchange) -> None:
        """See LocalSteps."""
        gradient, part = self.average_of(begun), begun.part
        everywhere = ParameterRows(self._global, self.parts)
        velocity = ParameterRows(self._velocity, self.parts)
        speed, now = velocity.read(part), everywhere.read(part)
        assert speed is not None and now is not None
        speed.mul_(self._outer.momentum).add_(gradient)
        now.sub_(gradient.add(speed, alpha=self._outer.momentum), alpha=self._outer.rate)
        velocity.write(part, speed)
        everywhere.write(part, now)
        if self.pace.delay == 0 and not begun.loaded:
            self._rows.write(part, now)
        else:
            self._rows.add(part, now - begun.sent)

    def begin_world(self) -> None:
        """See LocalSteps."""
        super().begin_world()
        self._reducer.reductions = []
        self._reducer.residuals.forget_names()

    def agree(self) -> None:
        """See LocalSteps. Global parameters begin as the local ones."""
        if not self._reducer.reductions:
            self._name_reductions()
        if not self._global:
            self._global = self._like_parameters([each.detach() for each in self._parameters])
            self._velocity = [torch.zeros_like(each) for each in self._global]
        super().agree()

    def signature(self) -> tuple[Any, ...]:
        """See TorchLocalSteps."""
        return *super().signature(), *map(hashed, self._global), *map(hashed, self._velocity)

    def state(self) -> dict[str, Any]:
        """See TorchLocalSteps."""
        return {**super().state(), "global": self._global, "velocity": self._velocity}

    def saved(self) -> dict[str, Any]:
        """See TorchLocalSteps."""
        state = self.state()  # after which nothing is in flight
        return {**state, "residuals": as_tensors(self._reducer.residuals.read())}

    def load(self, state: dict[str, Any] | None, owner: int | None = None) -> None:
        """See TorchLocalSteps."""
        super().load(state, owner)
        self._reducer.forget()
        residuals = as_buffers((state or {}).get("residuals", {}))
        self._reducer.residuals.replace(own(residuals, owner))

    def take_over(self, state: dict[str, Any]) -> None:
        """See TorchLocalSteps."""
        self._global = self._like_parameters(state.get("global", []))
        self._velocity = self._like_parameters(state.get("velocity", []))
        super().take_over(state)

    def _like_parameters(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if tensors and [each.shape for each in tensors] != [p.shape for p in self._parameters]:
            raise ValueError(
                "[DiLoCo] the state belongs to parameters of other shapes: load it into an "
                "optimizer of the same model"
            )
        return [
            each.to(p.device, torch.promote_types(p.dtype, torch.float32), copy=True)
            for each, p in zip(tensors, self._parameters, strict=bool(tensors))
        ]

    def _name_reductions(self) -> None:
        """Give each part's outer gradient the name that this world has for the parameters."""
        for part in range(self.parts):
            # The key stays the same where another model's name makes this one a numbered one.
            reduction = Reduction(f"{self.name}.{part}.outer", f"{self._name}.{part}.outer")
            self._reducer.residuals.know(reduction.key, reduction.name, False)
            self._reducer.reductions.append(reduction)
