"""What object collectives unpickle carries the codes of its sender, and else is not unpickled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from perseus import basics, control
from perseus.errors import HorovodInternalError
from perseus.operations import Kind

_unpickled: list[str] = []


def _note(where: str) -> None:
    _unpickled.append(where)


class Traced:
    """Tells when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _note, ("here",)


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    basics.init()
    _unpickled.clear()
    yield
    basics.shutdown()


Message = tuple[bytes, bytes]  # the head and the pickle


def sent(obj: object, name: str = "x", group: int = 0) -> Message:
    """What rank 0 sends to the others."""
    seal = control._Seal(name, group)
    pickled = control.objects.dumps(obj)
    return seal.head(pickled), pickled


def gathered(
    message: Message, patch: pytest.MonkeyPatch, name: str = "x", group: int = 0
) -> object:
    """The object of allgather_object where rank 0 sends this message."""
    control._keys.of(group)
    parts = iter(message)
    patch.setattr(control, "_run", lambda *_, **__: next(parts))
    return control.allgather_object(None, name, group)[0]


def received(
    message: Message, patch: pytest.MonkeyPatch, name: str = "x", group: int = 0
) -> object:
    """The object of broadcast_object on rank 1 where rank 0 sends this message."""
    control._keys.of(group)
    parts = iter(message)

    def run(kind: Kind, _name: str, memory: object, *, output: object, **_: object) -> None:
        assert kind is Kind.BROADCAST
        assert memory is output
        part = next(parts)
        assert len(output) == len(part)  # type: ignore[arg-type]
        output.raw = part  # type: ignore[attr-defined]

    patch.setattr(control, "_run", run)
    patch.setattr(basics, "rank", lambda: 1)
    return control.broadcast_object(None, 0, name, group)


Way = Callable[..., object]
both_ways = pytest.mark.parametrize("way", [gathered, received])


@both_ways
def test_what_comes_unchanged_is_the_object(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    assert way(sent({"a": [1, 2.5]}), monkeypatch) == {"a": [1, 2.5]}
    monkeypatch.undo()
    way(sent(Traced()), monkeypatch)
    assert _unpickled == ["here"]


@both_ways
def test_no_changed_byte_is_unpickled(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    head, pickled = sent(Traced())
    for place in range(len(head) + len(pickled)):
        changed = bytearray(head + pickled)
        changed[place] ^= 1 << place % 8
        message = bytes(changed[: len(head)]), bytes(changed[len(head) :])
        with pytest.raises(HorovodInternalError, match="from rank 0 as 'x' has a wrong auth"):
            way(message, monkeypatch)
        monkeypatch.undo()
    assert _unpickled == []


@both_ways
def test_nor_what_was_sent_for_another_purpose(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    message = sent(Traced())
    control._keys._of_group[1] = control._keys.of(0)
    monkeypatch.setattr(basics, "group_ranks", lambda _: [0])
    other = sent(Traced())
    with pytest.raises(HorovodInternalError, match="as 'y'"):
        way(message, monkeypatch, name="y")
    monkeypatch.undo()
    monkeypatch.setattr(basics, "group_ranks", lambda _: [0])
    with pytest.raises(HorovodInternalError, match="wrong authentication code"):
        way(message, monkeypatch, group=1)
    monkeypatch.undo()
    with pytest.raises(HorovodInternalError, match="wrong authentication code"):
        way((control._Seal("z", 0).head(other[1]), other[1]), monkeypatch)
    monkeypatch.undo()
    with pytest.raises(HorovodInternalError, match="wrong authentication code"):
        way((sent("a")[0], sent("b")[1]), monkeypatch)
    assert _unpickled == []


def test_nor_what_another_rank_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    message = sent(Traced())
    monkeypatch.setattr(basics, "group_ranks", lambda _: [1])
    with pytest.raises(HorovodInternalError, match="from rank 1"):
        gathered(message, monkeypatch)
    assert _unpickled == []


@both_ways
def test_nor_what_was_sent_in_an_earlier_world(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    message = sent(Traced())
    basics.shutdown()
    basics.init()
    with pytest.raises(HorovodInternalError, match="wrong authentication code"):
        way(message, monkeypatch)
    assert _unpickled == []
