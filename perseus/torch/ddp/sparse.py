"""Averages a part of the gradients in each step, and holds the others back for later steps.

Biases, norms and other small parameters go whole in every step. Every message ends with an element
that is NaN if the sender's gradients are not finite, and then all results are NaN, wherever the
gradient was. What is held back of such gradients is dropped.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.distributed as dist

from perseus.torch.ddp.gradients import FeedbackExchange, Gradients, Held, Parameter, Record
from perseus.torch.ddp.owners import all_gather

# Up to this size a parameter goes whole, even if it is a matrix.
_SMALL = 1024
_FIRST_RATIO = 0.25
# A sample of this size, or one that contains so many selected elements, gives the threshold.
_SAMPLE, _SAMPLE_SELECTED = 16384, 100
_MARGIN = 1.2
_MOST_ELEMENTS = 2**31 - 1  # in a bucket, of which positions are int32
# Elements that are sent together by the rotating subset.
_RUN = 16


class _Bucket(Record):
    """held: what the last messages left out, as in the bucket. Gradients are added to it."""

    def __init__(self, gradients: Gradients) -> None:
        self.parameters = {parameter.key: parameter for parameter in gradients.parameters}
        self.held = torch.zeros_like(gradients.flat, dtype=torch.float32)

    def split(self) -> dict[str, Held]:
        """Return copies of what is held back, by parameter."""
        return {
            key: {"sent": self.held[parameter.elements].clone()}
            for key, parameter in self.parameters.items()
        }

    def take(self, key: str, held: Held) -> None:
        """Set what is held back of a parameter."""
        self.held[self.parameters[key].elements] = held["sent"]


class _SparseExchange(FeedbackExchange):
    """What top-k and the rotating subset share."""

    def _begin(self, gradients: Gradients, group: dist.ProcessGroup) -> _Bucket:
        return _Bucket(gradients)

    def average(self, gradients: Gradients, group: dist.ProcessGroup, step: int) -> None:
        """See the module."""
        record: _Bucket = self._record(gradients, group)
        record.held.add_(gradients.flat, alpha=1 / group.size())
        low, high = gradients.flat.aminmax()
        health = (low * 0 + high * 0).to(torch.float32).reshape(1)  # NaN instead of 0
        gradients.flat.copy_(self._exchange(gradients, record.held, health, group, step))
        if health.device.type != "cpu" or not health.isfinite().item():
            record.held.nan_to_num_(0.0, 0.0, 0.0)

    @abstractmethod
    def _exchange(
        self,
        gradients: Gradients,
        held: torch.Tensor,
        health: torch.Tensor,
        group: dist.ProcessGroup,
        step: int,
    ) -> torch.Tensor:
        """Send a part of `held`, which leaves it, and `health`; return the sum over all ranks."""


class TopK(_SparseExchange):
    """Sends the largest elements of each parameter; everything that any rank sends is applied.

    message = positions:i32[k] values:f32[k + w + 1], w the elements of the parameters that go
    whole. A rank that has found fewer than k elements fills up with zeros.
    """

    def __init__(self, ratio: float, warm_up: int) -> None:
        super().__init__()
        self._ratio = ratio
        self._warm_up = warm_up

    def _begin(self, gradients: Gradients, group: dist.ProcessGroup) -> _Bucket:
        count = gradients.flat.numel()
        if count > _MOST_ELEMENTS:
            raise ValueError(
                f"[ddp] topk, a bucket of {count} elements: expected at most {_MOST_ELEMENTS}, as "
                "positions have 32 bits. Pass DistributedDataParallel a smaller bucket_cap_mb, or "
                "choose another hook for a parameter that is larger by itself"
            )
        return super()._begin(gradients, group)

    def _count(self, parameter: Parameter, step: int) -> int:
        """Return how many elements of a parameter are sent; 0 = all, without positions."""
        ratio = self._ratio
        if step < self._warm_up and ratio < _FIRST_RATIO:
            ratio = _FIRST_RATIO * (ratio / _FIRST_RATIO) ** (step / self._warm_up)
        count = max(1, round(ratio * parameter.size))
        whole = len(parameter.shape) < 2 or parameter.size <= _SMALL or 2 * count >= parameter.size
        return 0 if whole else count

    def _exchange(
        self,
        gradients: Gradients,
        held: torch.Tensor,
        health: torch.Tensor,
        group: dist.ProcessGroup,
        step: int,
    ) -> torch.Tensor:
        counts = [(parameter, self._count(parameter, step)) for parameter in gradients.parameters]
        whole = [parameter.elements for parameter, count in counts if count == 0]
        total = sum(count for _, count in counts)
        values = [held.new_empty(0)]
        positions = [torch.empty(0, dtype=torch.int32, device=held.device)]
        for parameter, count in counts:
            if count > 0:
                found = largest(held[parameter.elements], count) + parameter.first
                missing = (0, count - found.numel())
                values.append(torch.nn.functional.pad(held[found], missing))
                held[found] = 0
                positions.append(torch.nn.functional.pad(found.to(torch.int32), missing))
        values += [*(held[part] for part in whole), health]
        message = torch.cat([*positions, torch.cat(values).view(torch.int32)])
        for part in whole:
            held[part] = 0
        messages = message.new_empty(group.size() * message.numel())
        all_gather(messages, message, group=group)
        received = messages.view(group.size(), -1)
        numbers = received[:, total:].view(torch.float32)
        result = numbers[:, -1].sum().expand_as(held).clone()
        for sent, added in zip(received, numbers, strict=True):
            result.index_add_(0, sent[:total], added[:total])
            at = total
            for part in whole:
                length = part.stop - part.start
                result[part].add_(added[at : at + length])
                at += length
        return result


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of the `count` elements of largest magnitude, or of a few less."""
    magnitudes = values.abs()
    size = magnitudes.numel()
    sampled = max(_SAMPLE, _SAMPLE_SELECTED * size // count)
    if values.device.type != "cpu" or size < 4 * sampled:
        return torch.topk(magnitudes, count, sorted=False).indices
    sample = magnitudes[:: size // sampled]
    expected = min(sample.numel(), round(_MARGIN * count * sample.numel() / size) + 1)
    threshold = torch.topk(sample, expected).values[-1]
    found = (magnitudes >= threshold).nonzero().view(-1)
    if found.numel() > count:
        return found[torch.topk(magnitudes[found], count, sorted=False).indices]
    if found.numel() < 3 * count // 4:
        return torch.topk(magnitudes, count, sorted=False).indices
    return found


class Rotate(_SparseExchange):
    """Sends every n-th run of 16 elements of each parameter, in each step the next ones."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._n = n

    def _turn(self, parameter: Parameter, tensor: torch.Tensor, step: int) -> list[torch.Tensor]:
        """Return views of those elements of a bucket whose turn it is."""
        part = tensor[parameter.elements]
        if len(parameter.shape) < 2 or parameter.size <= _SMALL:
            return [part]
        end = parameter.size // _RUN * _RUN
        runs = part[:end].view(-1, _RUN)[step % self._n :: self._n]
        last = end // _RUN % self._n == step % self._n
        return [runs, part[end:]] if last else [runs]

    def _exchange(
        self,
        gradients: Gradients,
        held: torch.Tensor,
        health: torch.Tensor,
        group: dist.ProcessGroup,
        step: int,
    ) -> torch.Tensor:
        def turn(tensor: torch.Tensor) -> list[torch.Tensor]:
            parts = [self._turn(each, tensor, step) for each in gradients.parameters]
            return [part for of_parameter in parts for part in of_parameter]

        sent = turn(held)
        message = torch.cat([*(part.reshape(-1) for part in sent), health])
        for part in sent:
            part.zero_()
        dist.all_reduce(message, group=group)
        result = message[-1].expand_as(held).clone()
        at = 0
        for part in turn(result):
            part.add_(message[at : at + part.numel()].view_as(part))
            at += part.numel()
        return result
