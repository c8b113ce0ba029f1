"""Passes news about hosts to the states that listen. Thread-safe.

Whoever learns that hosts came or went calls `notification_manager.handle_hosts_updated`; each
registered state keeps the news until its next commit.
"""

from __future__ import annotations

import threading
from enum import IntFlag
from typing import Protocol

from perseus import basics


class HostUpdateResult(IntFlag):
    """How the set of hosts changed; several updates are combined with |."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class Listener(Protocol):
    """A receiver of changes, such as perseus.elastic.State."""

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Called in the thread that reports the change."""


class WorkerNotificationManager:
    """The states of this process that react to host changes."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()
        # Whether a survivor feeds those that have come: ranks that commit often wait for its end.
        self.is_feeding = False

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Called by run() before the first world's training; may be called again.

        In an elastic job of perseusrun, its news come to handle_hosts_updated(). In any other job
        there is nobody to subscribe to. ValueError for an address: no other launcher's service is
        spoken to. Source: horovod.runner.elastic.worker.
        """
        if rendezvous_addr is not None:
            raise ValueError(
                f"[elastic] WorkerNotificationManager.init: nobody at {rendezvous_addr} tells "
                "Perseus of hosts; leave rendezvous_addr out and call handle_hosts_updated() where "
                "hosts come or go"
            )
        if (member := basics.membership()) is not None:
            member.on_news = self._on_news

    def _on_news(self, timestamp: float, change: int, feeding: bool) -> None:
        self.is_feeding = feeding
        self.handle_hosts_updated(timestamp, HostUpdateResult(change))

    def register_listener(self, listener: Listener) -> None:
        """Tell `listener` of every change from now on."""
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Undo one register_listener; ValueError for a listener that is not registered."""
        with self._lock:
            for index, known in enumerate(self._listeners):
                if known is listener:
                    del self._listeners[index]
                    return
        raise ValueError(f"[elastic] {listener!r} is not registered")

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Pass a change on. timestamp: seconds; grows from one change to the next."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
