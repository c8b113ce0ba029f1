"""TensorFlow's data service, which one job runs for another job that trains.

Source of behaviour: Horovod 0.28.1, horovod.tensorflow.data.compute_service. Its servers serve
one host; these are reached at the address that leads to the compute service. One thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from perseus import basics, control
from perseus.compute_service import ComputeClient
from perseus.run.bootstrap.addresses import is_loopback, source_address

_LOOK_AGAIN_SECONDS = 0.2
_SIDES = ("compute", "training")


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """What the job that trains must know about the job that computes.

    dispatcher_side: "compute" or "training", where dispatchers run. addresses, key: those of
    the ComputeService. timeout: seconds until everybody must have registered.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes
    timeout: int = 60

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Connect a new client; ConnectionError if the service cannot be reached."""
        return ComputeClient(self.addresses, self.key, verbose=verbose)

    def to_dict(self) -> Mapping[str, Any]:
        """The fields for JSON, with the key as hexadecimal digits."""
        return {**vars(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Recreate a configuration from to_dict's result, also after JSON."""
        addresses = {
            interface: [(str(host), int(port)) for host, port in places]
            for interface, places in config["addresses"].items()
        }
        key = bytes.fromhex(config["key"])
        return TfDataServiceConfig(**{**config, "addresses": addresses, "key": key})

    def write(self, filename: str) -> None:
        """Write the file atomically, readable by this user only, since it has the key."""
        path = Path(filename)
        descriptor, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file)
        os.replace(name, path)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Read what write() wrote; waits for the file if asked to."""
        path = Path(filename)
        while wait_for_file_creation and not path.exists():
            time.sleep(_LOOK_AGAIN_SECONDS)
        return TfDataServiceConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Provide the address, "grpc://host:port", of the dispatcher that this rank uses.

    If dispatchers run in the job that trains, rank 0 runs one for all ranks, or every rank its own,
    until the end of the `with`. TimeoutException if a server does not register in time.
    """
    compute = compute_config.compute_client(verbose=2)
    alone = compute_config.dispatchers == 1
    with contextlib.ExitStack() as servers:
        if compute_config.dispatcher_side == "training" and (rank == 0 or not alone):
            servers.enter_context(_dispatcher(compute, rank))
        dispatcher_id = 0 if alone else rank
        address = compute.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        compute.wait_for_dispatcher_worker_registration(dispatcher_id, compute_config.timeout)
        yield address


def send_to_data_service(  # noqa: PLR0917 - as in Horovod
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Have compute workers produce a dataset's elements; RuntimeError with dispatchers that train.

    rank, size: of the job that trains. reuse_dataset: all ranks share one pass over the dataset,
    first come, first served, or in turn with round_robin. It is a method of tf.data.Dataset, too.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "training side dispatcher not supported, use tf_data_service context manager instead"
        )
    in_turn = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if in_turn else None,
                num_consumers=size if in_turn else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Be this rank's worker, and its dispatcher if it has one, until the service is shut down."""
    basics.init()
    index = basics.rank()
    per_dispatcher = compute_config.workers_per_dispatcher
    dispatcher_id = index // per_dispatcher
    compute = compute_config.compute_client(verbose=2)
    with contextlib.ExitStack() as servers:
        if compute_config.dispatcher_side == "compute" and index % per_dispatcher == 0:
            servers.enter_context(_dispatcher(compute, dispatcher_id))
        address = compute.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        worker = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(
                dispatcher_address=address.split("://")[1],
                worker_address=f"{_own_host(compute)}:%port%",
                heartbeat_interval_ms=1000,
                dispatcher_timeout_ms=compute_config.timeout * 1000,
            )
        )
        servers.callback(_stop, worker)
        compute.register_worker_for_dispatcher(dispatcher_id, index)
        compute.wait_for_shutdown()
        # TensorFlow stops a server under Python's lock: by then this one has answered all.
        control.barrier()


def checked_side(side: str) -> str:
    """Return the side; ValueError if it is unknown."""
    if side not in _SIDES:
        raise ValueError(f"dispatcher side is '{side}', expected one of {', '.join(_SIDES)}")
    return side


@contextlib.contextmanager
def _dispatcher(compute: ComputeClient, dispatcher_id: int) -> Iterator[None]:
    server = tf.data.experimental.service.DispatchServer()
    try:
        protocol, place = server.target.split("://")
        port = place.rsplit(":", 1)[1]
        compute.register_dispatcher(dispatcher_id, f"{protocol}://{_own_host(compute)}:{port}")
        yield
    finally:
        _stop(server)


def _own_host(compute: ComputeClient) -> str:
    """The address from which this host reaches the service, and at which others reach this host."""
    hosts = [host for places in compute.addresses().values() for host, _ in places]
    # The service's own host also reaches it over loopback, which is of no use to others.
    service = next((host for host in hosts if not is_loopback(host)), hosts[0])
    return source_address(service) or "localhost"


def _stop(server: Any) -> None:
    server._stop()  # TensorFlow has no public way
    server.join()
