"""What object collectives unpickle carries the code of its sender, and else is not unpickled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from perseus import basics, control
from perseus.errors import HorovodInternalError

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


def sent(obj: object, name: str = "x") -> bytes:
    """What this rank sends for allgather_object."""
    seen: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "gather_bytes", lambda data, *_: seen.append(data) or [data])
        control.allgather_object(obj, name, 0)
    _unpickled.clear()
    return seen[0]


def received(data: bytes, monkeypatch: pytest.MonkeyPatch, name: str = "x") -> object:
    """The object of these bytes, as if rank 0 had sent them."""
    monkeypatch.setattr(control, "gather_bytes", lambda *_: [data])
    return control.allgather_object(None, name, 0)[0]


def test_what_comes_unchanged_is_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    assert received(sent({"a": [1, 2.5]}), monkeypatch) == {"a": [1, 2.5]}
    received(sent(Traced()), monkeypatch)
    assert _unpickled == ["here"]


def test_no_changed_byte_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sent(Traced())
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        with pytest.raises(HorovodInternalError, match="from rank 0 as 'x' has a wrong auth"):
            received(bytes(changed), monkeypatch)
    for size in (0, 31, 32, len(whole) - 1):
        with pytest.raises(HorovodInternalError, match="wrong authentication code"):
            received(whole[:size], monkeypatch)
    assert _unpickled == []


def test_nor_what_was_sent_for_another_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sent(Traced())
    with pytest.raises(HorovodInternalError, match="as 'y'"):
        received(whole, monkeypatch, name="y")
    monkeypatch.setattr(basics, "group_ranks", lambda _: [1])
    with pytest.raises(HorovodInternalError, match="from rank 1"):
        received(whole, monkeypatch)
    monkeypatch.undo()
    basics.shutdown()
    basics.init()
    with pytest.raises(HorovodInternalError, match="wrong authentication code"):
        received(whole, monkeypatch)  # of the world before
    assert _unpickled == []
