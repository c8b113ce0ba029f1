"""Through this service the parts of a data service find each other: dispatchers, workers, trainers.

Requests are JSON over HTTP. A client first asks for a challenge (GET), then sends its request on
the same connection (POST). Requests and answers carry an HMAC that covers the challenge, so that
nobody without the key is answered or believed, and recorded messages cannot be replayed.
ComputeService answers each request in a thread of its own; ComputeClient is thread-safe.

Source of behaviour: Horovod 0.28.1, horovod.runner.common.service.compute_service.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from perseus.run.bootstrap.addresses import interface_address

_SIGNATURE = "X-Perseus-Signature"
_MOST_BYTES = 1 << 16  # of a request or an answer
_SLICE_SECONDS = 5.0  # of a wait without a limit, so that a service that died is noticed
_RETRY_SECONDS = 1.0  # until a service that could not be reached is asked once more
_ANSWER_SECONDS = 30.0  # for everything but what a request waits for
_REQUEST_SECONDS = 10.0  # for a whole request to arrive
_MOST_PENDING = 64  # connections that have not shown the key yet; the oldest makes room
_PORT_ATTEMPTS = 20  # for one that is free on all interfaces

Addresses = Mapping[str, Sequence[tuple[str, int]]]


class TimeoutException(TimeoutError):  # noqa: N818 - Horovod's name
    """The awaited event did not happen in time."""


_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (IndexError, ValueError, TimeoutException)
}


class ComputeService:
    """Knows who has registered, until shutdown().

    dispatchers, workers_per_dispatcher: how many there will be; ValueError unless positive. key:
    the secret that clients need, ValueError where it is empty. nics: the interfaces to listen on,
    whose addresses clients get, ValueError for one that has none; None = all that have.
    """

    NAME = "Compute service"

    def __init__(
        self,
        dispatchers: int,
        workers_per_dispatcher: int,
        key: bytes,
        nics: Iterable[str] | None = None,
    ) -> None:
        for what, number in (
            ("dispatchers", dispatchers),
            ("workers per dispatcher", workers_per_dispatcher),
        ):
            if number <= 0:
                raise ValueError(f"The number of {what} must be larger than 0: {number}")
        self._hosts = _addresses_of(nics)
        checked_key(key)
        self._workers_per_dispatcher = workers_per_dispatcher
        self._dispatchers: list[str | None] = [None] * dispatchers
        self._workers: list[set[int]] = [set() for _ in range(dispatchers)]
        self._over = False  # nothing else is waited for
        self._ended = False  # and all that was asked is answered, but for waits for this
        self._answering: Counter[str] = Counter()  # requests that have no answer yet, by name
        self._changed = threading.Condition()  # guards all of the above
        places = [""] if nics is None else list(dict.fromkeys(self._hosts.values()))
        self._servers = _listening(places, key, self)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()

    def get_port(self) -> int:
        """The TCP port, the same on all interfaces."""
        return int(self._servers[0].server_address[1])

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """By interface."""
        return {name: [(host, self.get_port())] for name, host in self._hosts.items()}

    def shutdown(self) -> None:
        """End all waits, answer pending requests, and close. May be called again."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            # A client may then stop servers in this process, which then answer nothing.
            self._changed.wait_for(
                lambda: self._answering.total() == self._answering["wait_for_shutdown"],
                _ANSWER_SECONDS,
            )
            self._ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._answering.total(), _ANSWER_SECONDS)
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @contextlib.contextmanager
    def answering(self, name: str) -> Any:
        """While a request is being answered: shutdown() waits for its end."""
        with self._changed:
            self._answering[name] += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering[name] -= 1
                self._changed.notify_all()

    def register_dispatcher(self, dispatcher_id: int, address: str) -> None:
        """See ComputeClient, here and below."""
        with self._changed:
            known = self._dispatchers[self._checked(dispatcher_id)]
            if known not in (None, address):
                raise ValueError(
                    f"Dispatcher with id {dispatcher_id} has already been registered under "
                    f"different address {known}: {address}"
                )
            self._dispatchers[dispatcher_id] = address
            self._changed.notify_all()

    def register_worker(self, dispatcher_id: int, worker_id: int) -> None:
        with self._changed:
            self._workers[self._checked(dispatcher_id)].add(worker_id)
            self._changed.notify_all()

    def wait_for_dispatcher(self, dispatcher_id: int, seconds: float) -> str:
        with self._changed:
            self._checked(dispatcher_id)
            self._wait(
                lambda: self._dispatchers[dispatcher_id] is not None,
                seconds,
                f"dispatcher {dispatcher_id} to register",
                "the dispatcher",
            )
            return str(self._dispatchers[dispatcher_id])

    def wait_for_workers(self, dispatcher_id: int, seconds: float) -> None:
        with self._changed:
            # Who trains asks with its own rank where all share one dispatcher.
            asked = self._checked(dispatcher_id if len(self._dispatchers) > 1 else 0)
            self._wait(
                lambda: len(self._workers[asked]) >= self._workers_per_dispatcher,
                seconds,
                f"workers for dispatcher {asked} to register",
                "the workers",
            )

    def wait_for_shutdown(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, seconds)

    def request_shutdown(self) -> None:
        # It waits for the answer to this request, too.
        threading.Thread(target=self.shutdown, daemon=True).start()

    def _checked(self, dispatcher_id: int) -> int:
        last = len(self._dispatchers) - 1
        if not 0 <= dispatcher_id <= last:
            raise IndexError(f"Dispatcher id must be within [0..{last}]: {dispatcher_id}")
        return dispatcher_id

    def _wait(self, done: Callable[[], bool], seconds: float, activity: str, who: str) -> None:
        self._changed.wait_for(lambda: done() or self._over, seconds)
        if not done():
            why = (
                "The compute service was shut down."
                if self._over
                else f"Timeout after {seconds} seconds."
            )
            raise TimeoutException(
                f"Timed out waiting for {activity}. Try to find out what takes {who} so long to "
                f"register or increase timeout. {why}"
            )


class ComputeClient:
    """Talks to a ComputeService; ConnectionError if none with the key can be reached.

    compute_addresses: as the service's addresses() gives them. verbose: for Horovod's sake.
    """

    def __init__(self, compute_addresses: Addresses, key: bytes, verbose: int = 1) -> None:
        self._key = checked_key(key)
        self._reachable: dict[str, list[tuple[str, int]]] = {}
        for interface, places in compute_addresses.items():
            good = [(str(host), int(port)) for host, port in places if self._reach(host, port)]
            if good:
                self._reachable[interface] = good
        if not self._reachable:
            tried = ", ".join(
                f"{h}:{p}" for places in compute_addresses.values() for h, p in places
            )
            raise ConnectionError(
                f"[compute service] none answers at {tried or 'no address'} that has this key: is "
                "the job of compute workers running, and the config file from this run of it?"
            )

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Those under which the service answers."""
        return self._reachable

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register its address; ValueError if it has another one already, IndexError if unknown."""
        self._call("register_dispatcher", dispatcher_id, dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Return its address; TimeoutException after `timeout` seconds."""
        return str(self._call("wait_for_dispatcher", dispatcher_id, timeout, wait=timeout))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Announce that it is ready; IndexError for an unknown dispatcher."""
        self._call("register_worker", dispatcher_id, worker_id)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Return once all its workers are ready; TimeoutException after `timeout` seconds."""
        self._call("wait_for_workers", dispatcher_id, timeout, wait=timeout)

    def shutdown(self) -> None:
        """End the service, and all waits for its end."""
        self._call("request_shutdown")

    def wait_for_shutdown(self) -> None:
        """Return once the service ends, however it does."""
        has_failed = False
        while True:
            try:
                if self._call("wait_for_shutdown", _SLICE_SECONDS, wait=_SLICE_SECONDS):
                    return
                has_failed = False
            except ConnectionError:
                if has_failed:
                    return
                has_failed = True
                time.sleep(_RETRY_SECONDS)

    def _reach(self, host: str, port: int) -> bool:
        try:
            _ask((host, port), self._key, "wait_for_shutdown", (0.0,), _SLICE_SECONDS)
        except ConnectionError:
            return False
        return True

    def _call(self, name: str, *arguments: Any, wait: float = 0.0) -> Any:
        place = next(iter(self._reachable.values()))[0]
        answer = _ask(place, self._key, name, arguments, wait + _ANSWER_SECONDS)
        if "error" in answer:
            raise _ERRORS[answer["error"]](answer["text"])
        return answer["result"]


# What a request may name.
_CALLS = frozenset(
    {
        "register_dispatcher",
        "register_worker",
        "request_shutdown",
        "wait_for_dispatcher",
        "wait_for_shutdown",
        "wait_for_workers",
    }
)


def checked_key(key: bytes) -> bytes:
    """The key; ValueError if it is empty, since an empty key protects nothing."""
    if not key:
        raise ValueError("[compute service] the key is empty: make one by secrets.token_bytes(32)")
    return key


def _addresses_of(nics: Iterable[str] | None) -> dict[str, str]:
    if nics is not None:
        return {name: interface_address(name) for name in nics}
    found = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ValueError):
            found[name] = interface_address(name)
    return found


def _signature(key: bytes, *parts: bytes) -> str:
    return hmac.new(key, b"\n".join(parts), "sha256").hexdigest()


def _ask(
    place: tuple[str, int], key: bytes, name: str, arguments: tuple[Any, ...], seconds: float
) -> dict[str, Any]:
    """Send one request and return the answer; ConnectionError if no service has the key."""
    # An answer belongs to one request, and a request to one challenge: each is used once.
    body = json.dumps([name, arguments, secrets.token_hex(16)]).encode()
    connection = http.client.HTTPConnection(*place, timeout=seconds)
    try:
        connection.request("GET", "/")
        challenge = connection.getresponse().read(_MOST_BYTES)
        connection.request("POST", "/", body, {_SIGNATURE: _signature(key, challenge, body)})
        response = connection.getresponse()
        text = response.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"[compute service] {place[0]}:{place[1]}: {error}") from error
    finally:
        connection.close()
    signed = response.headers.get(_SIGNATURE, "")
    if not hmac.compare_digest(signed.encode(), _signature(key, challenge, body, text).encode()):
        raise ConnectionError(f"[compute service] {place[0]}:{place[1]} does not have this key")
    answer: dict[str, Any] = json.loads(text)
    return answer


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a silent connection does not keep the process alive
    request_queue_size = 128  # many ranks may come at once

    def __init__(self, place: tuple[str, int], key: bytes, service: ComputeService) -> None:
        self.key, self.service = key, service
        # Connections that have not shown the key, oldest first, and since when they are there.
        self._pending: dict[socket.socket, float] = {}
        self._lock = threading.Lock()  # guards them
        super().__init__(place, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; pending connections have a limited number."""
        with self._lock:
            if len(self._pending) >= _MOST_PENDING:
                self._dismiss(next(iter(self._pending)))
            self._pending[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Between connections: end those that take too long to show the key."""
        late = time.monotonic() - _REQUEST_SECONDS
        with self._lock:
            for request in [each for each, since in self._pending.items() if since < late]:
                self._dismiss(request)

    def trust(self, request: socket.socket) -> bool:
        """It has shown the key; whether it had time left."""
        with self._lock:
            return self._pending.pop(request, None) is not None

    def shutdown_request(self, request: Any) -> None:
        """At the end of its thread."""
        self.trust(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the client has gone, or has not shown the key."""

    def _dismiss(self, request: socket.socket) -> None:
        """With the lock held; its thread sees the end of the stream."""
        del self._pending[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


def _listening(places: Sequence[str], key: bytes, service: ComputeService) -> list[_Server]:
    """One server per address, all with the same port; OSError if no port is free on all."""
    for attempts_left in reversed(range(_PORT_ATTEMPTS)):
        servers: list[_Server] = []
        try:
            for place in places:
                port = servers[0].server_address[1] if servers else 0
                servers.append(_Server((place, port), key, service))
            return servers
        except OSError:
            for server in servers:
                server.server_close()
            if not attempts_left or not servers:
                raise
    raise AssertionError  # the last attempt returns or raises


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"  # a challenge and its request share a connection
    timeout = _REQUEST_SECONDS
    _challenge = ""

    def do_GET(self) -> None:
        self._challenge = secrets.token_hex(16)
        self._send(self._challenge.encode())

    def do_POST(self) -> None:
        self.close_connection = True
        length = self.headers.get("Content-Length", "")
        is_number = length.isascii() and length.isdigit() and len(length) < 9
        body = b""
        if is_number and int(length) <= _MOST_BYTES:
            body = self.rfile.read(int(length))
        key, challenge = self.server.key, self._challenge.encode()
        signature = _signature(key, challenge, body)
        known = hmac.compare_digest(self.headers.get(_SIGNATURE, "").encode(), signature.encode())
        if not challenge or not known or not self.server.trust(self.connection):
            self.send_error(403)
            return
        name, arguments, _ = json.loads(body)
        with self.server.service.answering(name):
            text = json.dumps(self._answer(name, arguments)).encode()
            self._send(text, _signature(key, challenge, body, text))

    def _send(self, text: bytes, signature: str = "") -> None:
        self.send_response(200)
        if signature:
            self.send_header(_SIGNATURE, signature)
            self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _answer(self, name: str, arguments: list[Any]) -> dict[str, Any]:
        try:
            if name not in _CALLS:
                raise ValueError(f"[compute service] no such request: {name}")
            return {"result": getattr(self.server.service, name)(*arguments)}
        except tuple(_ERRORS.values()) as error:
            return {"error": type(error).__name__, "text": str(error)}

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""
