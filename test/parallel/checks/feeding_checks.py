"""Elastic states of ranks that have been fed: sync() sends what some rank lacks, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

import perseus.torch.horovod as hvd
from perseus import _core, control
from perseus.elastic import known_blocks
from perseus.feeding import BLOCK, blocks_of
from perseus.torch.functions import buffer_of


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bits, NaN and denormal numbers among them; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    elements = torch.empty(shape, dtype=dtype)
    size = elements.element_size()
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return bits.to(torch.uint8).view(dtype).reshape(shape)


def bits_of(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(bytes(buffer_of(tensor)) for tensor in tensors)


@contextmanager
def sent_blocks() -> Iterator[list[int]]:
    """The sizes of what rank 0 sends in blocks."""
    sizes: list[int] = []
    before = control.broadcast_bytes

    def counted(data: bytearray, root_rank: int, name: str) -> None:
        if name == "elastic.blocks":
            sizes.append(len(data))
        before(data, root_rank, name)

    control.broadcast_bytes = counted
    try:
        yield sizes
    finally:
        control.broadcast_bytes = before


def fed_with(view: memoryview, numbers: set[int]) -> dict[bytes, bytes]:
    blocks = [bytes(block) for block in blocks_of(view)]
    return {_core.hash_blocks(blocks[number], BLOCK): blocks[number] for number in numbers}


def check_only_what_some_rank_lacks_is_sent() -> None:
    rank = hvd.rank()
    elements = 5 * BLOCK // 4 + 3  # five blocks and a bit
    values = noise(1, elements)
    table = values.clone()
    if rank > 0:
        table.view(torch.uint8)[BLOCK:] ^= 1  # all but the first one differ
    fed = fed_with(buffer_of(values), {1, 2, 5} | ({3} if rank == 1 else set()))
    with sent_blocks() as sent, known_blocks.used({} if rank == 0 else fed):
        hvd.broadcast_parameters({"table": table}, root_rank=0)
    assert bits_of([table]) == bits_of([values])
    lacking = [4] if hvd.size() == 2 else [3, 4]  # rank 1 alone has been fed the third one
    assert sum(sent) == BLOCK * len(lacking), sent


def check_a_rank_that_is_not_the_root_gives_nothing_away() -> None:
    rank = hvd.rank()
    weights = noise(10 + rank, 100)
    with known_blocks.used({}), sent_blocks() as sent:
        hvd.broadcast_parameters([weights], root_rank=hvd.size() - 1)
    assert bits_of([weights]) == bits_of([noise(10 + hvd.size() - 1, 100)])
    assert not sent


def _network(seed: int) -> nn.Module:
    network = nn.Module()
    shapes = {"table": (3000, 40), "head": (7, 5), "empty": (0, 4)}
    for number, (name, shape) in enumerate(shapes.items()):
        value = noise(seed + number, *shape)
        network.register_parameter(name, nn.Parameter(value, requires_grad=name == "head"))
    turned = noise(seed + 7, 6, 50).t()
    assert not turned.is_contiguous()
    network.register_buffer("turned", turned)
    network.register_buffer("short", noise(seed + 8, 33, dtype=torch.bfloat16))
    network.register_buffer("scalar", torch.tensor(seed))
    return network


def check_a_whole_state_is_that_of_rank_0() -> None:
    rank = hvd.rank()
    network = _network(100 if rank == 0 else 200 + rank)
    optimizer = torch.optim.SGD([network.head], lr=0.1 + rank, momentum=0.9)
    if rank == 0:  # moments that the others do not have yet
        network.head.grad = torch.ones_like(network.head)
        optimizer.step()
    state = hvd.elastic.TorchState(network, optimizer, step=rank + 5)
    expected = bits_of(list(network.state_dict().values())) if rank == 0 else b""
    expected = hvd.broadcast_object(expected, name="expected")
    views = list(state.contents())
    assert sum(map(len, views)) == sum(
        tensor.nbytes for name, tensor in network.state_dict().items() if name != "turned"
    ) + (7 * 5 * 4 if rank == 0 else 0)
    fed = fed_with(buffer_of(noise(100, 3000, 40)), {0, 7, 29})
    with known_blocks.used({} if rank == 0 else fed), sent_blocks() as sent:
        state.sync()
    assert bits_of(list(network.state_dict().values())) == expected
    moments = optimizer.state[network.head]["momentum_buffer"]
    assert bits_of([moments]) == bits_of([torch.ones(7, 5)])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert state.step == 5
    table = 3000 * 40 * 4
    assert 0 < sum(sent) < table - 2 * BLOCK, sent


def check_ranks_with_other_arrays_get_everything() -> None:
    rank = hvd.rank()
    values = [bytearray([rank] * 10), bytearray([rank] * (20 + (rank == 1)))]
    before = [bytes(each) for each in values]
    views = [memoryview(each) for each in values]
    with known_blocks.used({}):
        assert not known_blocks.take_over(views, ["a", "b"])
        assert not known_blocks.take_over([views[0], None if rank == 1 else views[0]], ["a", "b"])
        assert not known_blocks.take_over(views[:1], ["b" if rank == 1 else "a"])
        assert [bytes(each) for each in values] == before
        assert known_blocks.take_over([views[0], None], ["a", "b"])
    assert values[0] == bytes(10)


def check_more_than_one_message_of_blocks() -> None:
    rank = hvd.rank()
    size = known_blocks._BYTES_AT_ONCE + BLOCK + 5
    pattern = bytes(range(251)) * (size // 251 + 1)
    data = bytearray(pattern[:size] if rank == 0 else size)
    with known_blocks.used({}), sent_blocks() as sent:
        assert known_blocks.take_over([memoryview(data)], [])
    assert data == pattern[:size]
    assert sent == [known_blocks._BYTES_AT_ONCE, BLOCK + 5]
