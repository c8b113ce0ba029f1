"""One rank of perseus.run(): `python -m perseus.run.rank` makes the call and answers. One thread.

Standard input has the call: where to find modules (None = as found), and the pickled function with
its arguments.
"""

from __future__ import annotations

import os
import sys
import traceback

from perseus.objects import dumps, loads
from perseus.run.agent import ANSWER_VARIABLE
from perseus.run.function import FAILED, RETURNED


def main() -> int:
    """The exit status: 1 where the function raised something other than SystemExit."""
    descriptor = int(os.environ.pop(ANSWER_VARIABLE))
    os.set_inheritable(descriptor, False)
    answer, status = _answer(_take_standard_input())
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(answer)
    return status


def _take_standard_input() -> bytes:
    """All of it; the function then finds an empty one, as under perseusrun."""
    data = sys.stdin.buffer.read()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, sys.stdin.fileno())
    os.close(null)
    return data


def _answer(request: bytes) -> tuple[bytes, int]:
    try:
        path, call = loads(request)
        if path is not None:
            sys.path[:] = path
        func, args, kwargs = loads(call)
        return RETURNED + dumps(func(*args, **kwargs)), 0
    except SystemExit:
        raise
    except BaseException as error:
        assert error.__traceback__ is not None
        # The first frame is this one.
        trace = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
        # Not printed here: the caller raises it, and shows it once.
        return FAILED + dumps(("".join(trace), _pickled(error))), 1


def _pickled(error: BaseException) -> bytes | None:
    try:
        return dumps(error)
    except Exception:  # it holds what cannot be pickled; its text is enough
        return None


if __name__ == "__main__":
    sys.exit(main())
