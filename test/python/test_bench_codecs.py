"""What perseus-bench holds codecs to: names, bytes, and bounds that wrong results do not meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from perseus import config
from perseus.bench import __main__ as command_line
from perseus.bench import gradients
from perseus.bench.codecs import Codec, check_variables, parse
from perseus.bench.gradients import Entrant, NormalData
from perseus.bench.models import MODELS, TRAINED
from perseus.bench.nets import NETS
from perseus.bench.session import Session

_SHAPES = ((40, 250), (6000,))


def test_codecs_are_read_as_they_are_shown() -> None:
    text = "none,fp16,topk:0.01,rotate:8,auto,fp16"
    assert [codec.label for codec in parse(text)] == text.split(",")[:-1]
    assert parse("") == []


def test_a_codec_that_refuses_its_argument_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compression:
        @staticmethod
        def topk(ratio: float) -> object:
            raise ValueError(f"a ratio of {ratio}")

    monkeypatch.setattr("perseus.torch.horovod.Compression", Compression)
    with pytest.raises(ValueError, match=r"--codec topk:2: a ratio of 2\.0"):
        Codec("topk", 2.0).arguments()
    with pytest.raises(ValueError, match=r"has no hvd\.Compression\.bf16; it has topk"):
        Codec("bf16").arguments()
    assert Codec("default").arguments() == {}


def test_variables_give_a_process_group_the_codec_of_a_label() -> None:
    known = {entry.name for entry in config.variables()}
    labels = "default,none,fp16,lossless,int8,int4,int2,topk:0.02,powersgd:4,rotate:4,auto"
    for codec in parse(labels):
        found = codec.variables()
        assert set(found) <= known
        assert codec.argument is None or f"{codec.argument:g}" in found.values()
    with pytest.raises(ValueError, match="--codec bf16: no variable"):
        parse("bf16")[0].variables()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PERSEUS_ALLREDUCE_CODEC", "int8"),
        ("PERSEUS_ALLREDUCE_DTYPE", "0"),
        ("LIGHT_TOPK_ALLREDUCE", "yes"),
        ("PERSEUS_DOWNSAMPLE_N_ELEMENTS", "8"),
    ],
)
@pytest.mark.parametrize("cases", [["gradients"], ["latency", "ddp"], []])
def test_a_variable_that_chooses_a_codec_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, cases: list[str]
) -> None:
    given = command_line._parser().parse_args(cases)
    assert command_line._jobs(given)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"^{name}='{value}': .*: use --codec instead"):
        command_line._jobs(given)


def test_other_cases_and_usual_values_leave_variables_alone() -> None:
    for entry in config.variables():
        check_variables({entry.name: entry.default})
    check_variables({"PERSEUS_ALLREDUCE_DTYPE": "1", "LIGHT_TOPK_ALLREDUCE": "off"})
    given = command_line._parser().parse_args(["network", "collectives"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PERSEUS_ALLREDUCE_CODEC", "int8")
        assert command_line._jobs(given)


@pytest.mark.parametrize(
    ("settings", "payload"),
    [
        ({}, 6 << 20),
        ({"PERSEUS_ALLREDUCE_ALGORITHM": "auto"}, 6 << 20),
        ({"PERSEUS_ALLREDUCE_ALGORITHM": "recursive_doubling"}, None),
    ],
)
def test_an_algorithm_that_is_chosen_sends_as_much_as_it_wants(
    settings: dict[str, str], payload: int | None
) -> None:
    session = Session.__new__(Session)
    session.hosts = session.size = 4
    session._settings = settings
    assert session.payload("allreduce", 4 << 20) == payload
    assert session.payloads(Codec("none"), 4 << 20).get("payload") == payload


def test_bytes_on_the_wire_relative_to_plain() -> None:
    assert Codec("none").share(2) == (1, 1)
    assert Codec("fp16").share(4) == Codec("bf16").share(2) == (0.5, 0.5)
    assert Codec("rotate", 8).share(2) == (0.125, 0.125)
    for name, share in (("int8", 1 / 3.94), ("int4", 1 / 7.76), ("int2", 1 / 12.8)):
        least, most = Codec(name).share(2)
        assert least < share < most
    # Two ranks, 1 %: 1.25 pairs of 8 bytes for each 100 elements of 4, half of them come in, and up
    # to twice as many go out.
    assert Codec("topk", 0.01).share(2) == pytest.approx((0.005, 0.0375))
    assert Codec("topk", 0.5).share(4)[1] == 1


class _Alone:
    """A session of one rank."""

    rank, size = 0, 1

    def same(self, tensors: object) -> bool:
        return True


def _entrant(codec: Codec) -> tuple[Entrant, list[torch.Tensor]]:
    work = [torch.zeros(shape) for shape in _SHAPES]
    data = NormalData(sum(tensor.numel() for tensor in work), 1)
    return Entrant(_Alone(), data, work, codec, 1), work  # type: ignore[arg-type]


def test_data_differs_by_rank_and_step_and_averages() -> None:
    data = NormalData(5000, 3)
    pieces = [data.piece(rank, step, 100, 4000) for rank in range(3) for step in range(2)]
    for i, piece in enumerate(pieces):
        assert all(float((piece == other).float().mean()) < 0.01 for other in pieces[:i])
    stack = torch.stack([data.piece(rank, 1, 100, 4000).double() for rank in range(3)])
    assert torch.allclose(data.average(1, 100, 4000).double(), stack.mean(0), atol=1e-6)


def _int8(tensor: torch.Tensor, steps: int = 127) -> torch.Tensor:
    blocks = tensor.view(-1, 250)
    unit = blocks.abs().amax(1, keepdim=True) / steps
    return (blocks / unit).round().mul(unit).view(tensor.shape)


@pytest.mark.parametrize(
    ("name", "through", "right"),
    [
        ("none", lambda t: t, True),
        ("none", lambda t: t.half().float(), False),
        ("fp16", lambda t: t.half().float(), True),
        ("default", lambda t: t.half().float(), True),
        ("fp16", lambda t: t.bfloat16().float(), False),
        ("bf16", lambda t: t.bfloat16().float(), True),
        ("bf16", _int8, False),
        ("int8", _int8, True),
        ("int8", lambda t: _int8(t, 31), False),
        ("int4", lambda t: _int8(t, 7), True),
        ("int4", lambda t: _int8(t, 2), False),
        (
            "int8",
            lambda t: t.clone().view(-1).index_fill(0, torch.tensor(7), 9).view(t.shape),
            False,
        ),
        ("int8", lambda t: t * float("nan"), False),
    ],
)
def test_results_are_held_to_the_codecs_bound(
    name: str, through: Callable[[torch.Tensor], torch.Tensor], right: bool
) -> None:
    entrant, work = _entrant(Codec(name))
    for _ in range(2):
        entrant.fill()
        for tensor in work:
            tensor.copy_(through(tensor))
        assert entrant.check() is right
    assert entrant.conclude(lambda _: None)


class _TopK:
    """Error feedback in its simplest form. kept: the share of what is not sent that stays."""

    def __init__(self, work: list[torch.Tensor], ratio: float, kept: float) -> None:
        self._work, self._ratio, self._kept = work, ratio, kept
        self._held = [torch.zeros_like(tensor) for tensor in work]
        self.dense = False

    def reduce(self, _: int = 0) -> None:
        for tensor, held in zip(self._work, self._held, strict=True):
            held.add_(tensor)
            flat = held.view(-1)
            count = flat.numel() if self.dense else int(self._ratio * flat.numel())
            chosen = flat.abs().topk(count).indices
            tensor.zero_().view(-1)[chosen] = flat[chosen]
            flat[chosen] = 0
            held.mul_(self._kept)

    def flush(self) -> None:
        self.dense = True


@pytest.mark.parametrize(
    ("ratio", "kept", "sparse", "complete"),
    [(0.05, 1.0, True, True), (0.1, 1.0, False, True), (0.05, 0.9, True, False)],
)
def test_what_topk_holds_back_comes_out_in_the_end(
    monkeypatch: pytest.MonkeyPatch, ratio: float, kept: float, sparse: bool, complete: bool
) -> None:
    entrant, work = _entrant(Codec("topk", 0.05))
    topk = _TopK(work, ratio, kept)
    monkeypatch.setattr(gradients.hvd, "flush_residuals", topk.flush, raising=False)
    for _ in range(4):
        entrant.fill()
        topk.reduce()
        assert entrant.check() is sparse
    assert entrant.conclude(topk.reduce) is complete


@pytest.mark.parametrize("label", ["powersgd:4", "auto", "int2", "topk:0.05"])
def test_only_what_travels_as_float16_may_be_lost(
    monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    monkeypatch.setattr(gradients.hvd, "flush_residuals", lambda: None, raising=False)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "exact": lambda t: t,
        "float16": lambda t: t.half().float(),
        "int8": lambda t: _int8(t, 31),
    }
    right = []
    for name, through in ways.items():
        entrant, work = _entrant(parse(label)[0])

        def reduce(_: int) -> None:
            for tensor in work:  # noqa: B023 - it is called within this turn
                tensor.copy_(through(tensor))  # noqa: B023

        for _ in range(4):
            entrant.fill()
            reduce(0)
            entrant.check()
        if entrant.conclude(reduce):
            right.append(name)
    assert right == ["exact", *(["float16"] if label in ("powersgd:4", "auto") else [])]


def test_without_a_flush_topk_must_point_where_gradients_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(gradients.hvd, "flush_residuals", raising=False)
    for sign in (1, -1):
        entrant, work = _entrant(Codec("topk", 0.05))
        topk = _TopK(work, 0.05, 1.0)
        for _ in range(3):
            entrant.fill()
            topk.reduce()
            for tensor in work:
                tensor.mul_(sign)
            assert entrant.check()
        assert entrant.conclude(topk.reduce) is (sign == 1)


@pytest.mark.parametrize("model", TRAINED)
def test_networks_have_the_parameters_of_the_table(model: str) -> None:
    with torch.device("meta"):
        net = NETS[model].make()
    assert [(name, tuple(p.shape)) for name, p in net.named_parameters()] == MODELS[model]()
