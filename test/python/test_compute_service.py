"""The service through which the parts of a data service find each other."""

from __future__ import annotations

import hmac
import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from perseus import compute_service
from perseus.compute_service import ComputeClient, ComputeService, TimeoutException

KEY = b"a key of this test"


@pytest.fixture
def service() -> Iterator[ComputeService]:
    made = ComputeService(2, 2, KEY, nics=["lo"])
    yield made
    made.shutdown()


@pytest.fixture
def client(service: ComputeService) -> ComputeClient:
    return ComputeClient(service.addresses(), KEY)


def test_registered_dispatchers_are_found(client, service):
    assert service.addresses() == {"lo": [("127.0.0.1", service.get_port())]}
    assert client.addresses() == service.addresses()
    client.register_dispatcher(0, "grpc://a:1")
    client.register_dispatcher(1, "grpc://b:2")
    client.register_dispatcher(1, "grpc://b:2")
    assert client.wait_for_dispatcher_registration(0, 1) == "grpc://a:1"
    assert client.wait_for_dispatcher_registration(1, 1) == "grpc://b:2"
    with pytest.raises(ValueError, match=re.escape("different address grpc://b:2: grpc://c:3")):
        client.register_dispatcher(1, "grpc://c:3")
    assert client.wait_for_dispatcher_registration(1, 1) == "grpc://b:2"


def test_a_dispatcher_that_comes_later_is_waited_for(client, service):
    found = []
    other = ComputeClient(service.addresses(), KEY)
    waiting = threading.Thread(
        target=lambda: found.append(other.wait_for_dispatcher_registration(1, 60))
    )
    waiting.start()
    client.register_dispatcher(0, "grpc://a:1")
    client.register_dispatcher(1, "grpc://b:2")
    waiting.join(60)
    assert found == ["grpc://b:2"]


def test_workers_count_for_their_dispatcher_only(client):
    for worker in (0, 1, 1):
        client.register_worker_for_dispatcher(0, worker)
    client.register_worker_for_dispatcher(1, 2)
    client.wait_for_dispatcher_worker_registration(0, 1)
    with pytest.raises(TimeoutException, match="workers for dispatcher 1 to register"):
        client.wait_for_dispatcher_worker_registration(1, 0.01)
    client.register_worker_for_dispatcher(1, 3)
    client.wait_for_dispatcher_worker_registration(1, 1)


def test_a_wait_ends_in_time(client):
    with pytest.raises(
        TimeoutException,
        match=re.escape(
            "Timed out waiting for dispatcher 0 to register. Try to find out what takes the "
            "dispatcher so long to register or increase timeout. Timeout after 0.01 seconds."
        ),
    ):
        client.wait_for_dispatcher_registration(0, 0.01)


@pytest.mark.parametrize("dispatcher", [-1, 2])
def test_a_dispatcher_that_does_not_exist_is_an_error(client, dispatcher):
    text = re.escape(f"Dispatcher id must be within [0..1]: {dispatcher}")
    for ask in (
        lambda: client.register_dispatcher(dispatcher, "grpc://a:1"),
        lambda: client.register_worker_for_dispatcher(dispatcher, 0),
        lambda: client.wait_for_dispatcher_registration(dispatcher, 1),
        lambda: client.wait_for_dispatcher_worker_registration(dispatcher, 1),
    ):
        with pytest.raises(IndexError, match=text):
            ask()


def test_who_trains_may_ask_with_any_rank_for_the_only_dispatcher():
    service = ComputeService(1, 1, KEY, nics=["lo"])
    client = ComputeClient(service.addresses(), KEY)
    client.register_worker_for_dispatcher(0, 0)
    client.wait_for_dispatcher_worker_registration(5, 1)
    service.shutdown()


def test_shutdown_ends_all_waits(service):
    clients = [ComputeClient(service.addresses(), KEY) for _ in range(4)]
    ended = []

    def wait(client: ComputeClient) -> None:
        client.wait_for_shutdown()
        ended.append(client)

    def wait_for_dispatcher() -> None:
        with pytest.raises(TimeoutException, match="was shut down"):
            clients[2].wait_for_dispatcher_registration(0, 300)
        ended.append(clients[2])

    threads = [threading.Thread(target=wait, args=(client,)) for client in clients[:2]]
    threads.append(threading.Thread(target=wait_for_dispatcher))
    for thread in threads:
        thread.start()
    # A request that comes when the service has ended is no wait that this could end.
    deadline = time.monotonic() + 60
    while not service._answering["wait_for_dispatcher"] and time.monotonic() < deadline:
        time.sleep(0.01)
    clients[3].shutdown()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 3
    clients[0].wait_for_shutdown()
    service.shutdown()  # returns once it is closed, which it may be a moment after its answers
    with pytest.raises(ConnectionError):
        ComputeClient(service.addresses(), KEY)


def test_one_broken_connection_is_not_the_end(client, monkeypatch):
    answers = iter([{"result": False}, None, {"result": False}, None, {"result": True}])

    def ask(*_):
        if (answer := next(answers)) is None:
            raise ConnectionError("Connection reset by peer")
        return answer

    monkeypatch.setattr(compute_service, "_ask", ask)
    monkeypatch.setattr(compute_service, "_RETRY_SECONDS", 0.0)
    client.wait_for_shutdown()
    assert next(answers, "none left") == "none left"


def test_a_client_without_the_key_is_neither_answered_nor_believed(service):
    with pytest.raises(
        ConnectionError, match=rf"none answers at 127\.0\.0\.1:{service.get_port()}"
    ):
        ComputeClient(service.addresses(), b"another key")
    connection = http.client.HTTPConnection("127.0.0.1", service.get_port(), timeout=60)
    connection.request("POST", "/", b'["register_dispatcher", [0, "grpc://evil:1"], ""]')
    assert connection.getresponse().status == 403
    connection.close()
    client = ComputeClient(service.addresses(), KEY)
    with pytest.raises(TimeoutException):
        client.wait_for_dispatcher_registration(0, 0)


def test_a_silent_connection_keeps_nobody(service, client):
    with socket.create_connection(("127.0.0.1", service.get_port())):
        client.register_dispatcher(0, "grpc://a:1")
        service.shutdown()


def exchanges(service, monkeypatch) -> list[tuple[str, bytes, dict[str, str]]]:
    """What a client sends from now on: method, body, headers."""
    sent = []
    request = http.client.HTTPConnection.request

    def listened(connection, method, url, body=None, headers=None):
        sent.append((method, body, headers or {}))
        return request(connection, method, url, body, headers or {})

    monkeypatch.setattr(http.client.HTTPConnection, "request", listened)
    return sent


def status_of(connection, method, body=None, headers=None) -> int:
    connection.request(method, "/", body, headers or {})
    response = connection.getresponse()
    response.read()
    return response.status


def test_a_recorded_message_cannot_be_replayed(service, client, monkeypatch):
    sent = exchanges(service, monkeypatch)
    client.register_dispatcher(0, "grpc://a:1")
    (_, post) = sent
    monkeypatch.undo()
    for repeat_challenge in (False, True):
        other = http.client.HTTPConnection("127.0.0.1", service.get_port(), timeout=60)
        if repeat_challenge:
            assert status_of(other, "GET") == 200
        assert status_of(other, *post) == 403
        other.close()


def test_a_challenge_serves_one_request(service):
    connection = http.client.HTTPConnection("127.0.0.1", service.get_port(), timeout=60)
    connection.request("GET", "/")
    challenge = connection.getresponse().read()
    body = b'["wait_for_shutdown", [0.0], ""]'
    headers = {"X-Perseus-Signature": hmac.new(KEY, challenge + b"\n" + body, "sha256").hexdigest()}
    assert status_of(connection, "POST", body, headers) == 200
    assert status_of(connection, "POST", body, headers) == 403
    connection.close()


def test_pending_connections_have_few_threads_and_keep_out_nobody(service, client):
    before = threading.active_count()
    pending = [socket.create_connection(("127.0.0.1", service.get_port())) for _ in range(200)]
    client.register_dispatcher(0, "grpc://a:1")
    # The oldest have made room: all but the last ones see the end.
    for connection in pending[:100]:
        connection.settimeout(60)
        assert connection.recv(1) == b""
    assert threading.active_count() - before <= 70
    for connection in pending:
        connection.close()


def test_a_request_that_does_not_get_finished_is_ended(monkeypatch):
    monkeypatch.setattr("perseus.compute_service._REQUEST_SECONDS", 0.5)
    service = ComputeService(1, 1, KEY, nics=["lo"])
    with (
        socket.create_connection(("127.0.0.1", service.get_port()), timeout=60) as connection,
        pytest.raises((ConnectionResetError, BrokenPipeError)),
    ):
        for _ in range(600):  # a byte now and then keeps the connection busy, and open no longer
            connection.sendall(b"X")
            time.sleep(0.1)
    service.shutdown()


def test_the_service_listens_on_the_chosen_interface_only(service):
    with socket.socket() as other:  # which it could not on all
        other.bind(("127.0.0.2", service.get_port()))
        other.listen()


@pytest.mark.parametrize(
    "make", [lambda: ComputeService(1, 1, b""), lambda: ComputeClient({}, b"")]
)
def test_an_empty_key_is_refused(make):
    with pytest.raises(ValueError, match=r"the key is empty: make one by secrets\.token_bytes"):
        make()


@pytest.mark.parametrize(("dispatchers", "workers"), [(0, 1), (-1, 1), (1, 0)])
def test_numbers_must_be_positive(dispatchers, workers):
    with pytest.raises(ValueError, match="must be larger than 0: "):
        ComputeService(dispatchers, workers, KEY)


def test_an_interface_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="network interface 'eth77'"):
        ComputeService(1, 1, KEY, nics=["eth77"])
