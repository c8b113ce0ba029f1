"""Keeps ranks at the same check: each reports what became of it and waits for the others' reports.

The reports go over a socket in the file system, beside the collectives under test, so a rank that
failed can say so while the others still wait for it. `Lockstep` belongs to the test that launched
the ranks, `Step` to one rank.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

# Seconds until ranks that have not ended a check are given up: from its first failure, and from the
# first rank's end of it.
GRACE = 60.0
PATIENCE = 300.0
SOCKET = "lockstep"


class Lockstep:
    """Answers the reports of all ranks on one thread of its own; a context manager.

    `reports` has for each check what the ranks reported, in the order in which they came.
    """

    def __init__(self, directory: Path, ranks: int) -> None:
        self.reports: dict[str, list[dict[str, Any]]] = {}
        self.abandoned = ""  # why the launch was ended before its last check
        self._ranks = ranks
        self._replies: list[socket.socket] = []
        self._deadline: float | None = None  # of the ranks that have not ended this check
        self._changed = threading.Condition()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / SOCKET))
        self._listener.listen(ranks)
        self._threads = [threading.Thread(target=self._watch)]

    def __enter__(self) -> Lockstep:
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        """The ranks have ended: their connections are closed, and so are the threads' loops."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("r", encoding="utf-8") as lines:
            with contextlib.suppress(ConnectionError):  # a rank that was killed
                for line in lines:
                    self._take(json.loads(line), connection)
            with self._changed:
                # Whoever waits for the report of a rank that is gone would wait for ever.
                if self._replies and not self._closed:
                    self._abandon("a rank ended during this check")

    def _take(self, report: dict[str, Any], connection: socket.socket) -> None:
        with self._changed:
            reports = self.reports.setdefault(report["step"], [])
            reports.append(report)
            self._replies.append(connection)
            self._limit(GRACE if any(other["error"] for other in reports) else PATIENCE)
            if len(reports) == self._ranks:
                failed = any(other["error"] for other in reports)
                self._answer(failed=failed, epoch=max(other["epoch"] for other in reports))

    def _limit(self, seconds: float) -> None:
        """Wait no longer than this for the ranks that have not ended the check."""
        deadline = time.monotonic() + seconds
        if self._deadline is None or deadline < self._deadline:
            self._deadline = deadline
            self._changed.notify_all()

    def _answer(self, **answer: Any) -> None:
        for connection in self._replies:
            with contextlib.suppress(OSError):  # its own thread sees that the rank is gone
                connection.sendall((json.dumps(answer) + "\n").encode())
        self._replies.clear()
        self._deadline = None

    def _abandon(self, why: str) -> None:
        self.abandoned = self.abandoned or why
        self._answer(abandoned=why)

    def _watch(self) -> None:
        """Give up ranks that do not end a check, however the world of the others ended."""
        with self._changed:
            while not self._closed:
                if self._deadline is None:
                    self._changed.wait()
                elif (left := self._deadline - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    self._abandon("others did not end it, long after a rank had")


class Step:
    """One rank's end of it."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(directory / SOCKET))
        self._answers = self._socket.makefile("r", encoding="utf-8")

    def report(self, step: str, epoch: int, error: str = "", skipped: str = "") -> None:
        """Say what became of the check, before this rank does anything about it."""
        report = {
            "step": step,
            "rank": self._rank,
            "epoch": epoch,
            "error": error,
            "skipped": skipped,
        }
        self._socket.sendall((json.dumps(report) + "\n").encode())

    def everyone(self) -> dict[str, Any]:
        """Wait until every rank has reported this step: whether one failed, and the last epoch.

        {"abandoned": why} where ranks cannot get on together.
        """
        line = self._answers.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"abandoned": "the test has ended"}
        return answer

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
