"""One rank of perseus.run(): `python -m perseus.run.rank` calls the function, returns its result.

Standard input holds a pickled pair: sys.path (None keeps this process's own), and the pickled
function with its arguments. The result is written to the descriptor that ANSWER_VARIABLE names.
Single-threaded, apart from what the function does.
"""

from __future__ import annotations

import os
import sys
import traceback

from perseus.objects import dumps, loads
from perseus.run.agent import ANSWER_VARIABLE
from perseus.run.function import FAILED, RETURNED


def main() -> int:
    """Call the function; return the exit status, 1 if it raised an exception.

    SystemExit is not caught: the process then ends without a result.
    """
    descriptor = int(os.environ.pop(ANSWER_VARIABLE))
    os.set_inheritable(descriptor, False)
    answer, status = _answer(_take_standard_input())
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(answer)
    return status


def _take_standard_input() -> bytes:
    """Read all of standard input, then replace it with an empty one, as perseusrun's ranks have."""
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
        # The first frame is this function's.
        trace = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
        # The caller of perseus.run() raises the error, so it would appear twice if printed here.
        return FAILED + dumps(("".join(trace), _pickled(error))), 1


def _pickled(error: BaseException) -> bytes | None:
    try:
        return dumps(error)
    except Exception:  # the traceback's text suffices if the exception cannot be pickled
        return None


if __name__ == "__main__":
    sys.exit(main())
