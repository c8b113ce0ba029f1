"""One rank of a job that serves data: a worker, or a dispatcher and a worker. One thread.

`perseusrun -np 4 python -m perseus.tensorflow.data.compute_worker compute.json` runs until a rank
of the job that trains, which reads compute.json, calls `compute_client().shutdown()`.
"""

from __future__ import annotations

import argparse
import secrets

import tensorflow as tf

from perseus import basics
from perseus.compute_service import ComputeService
from perseus.run.bootstrap.addresses import named_interface
from perseus.tensorflow.data.compute_service import (
    TfDataServiceConfig,
    checked_side,
    compute_worker_fn,
)
from perseus.tensorflow.functions import broadcast_object


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Serve; ValueError unless `dispatchers` divides the ranks. See TfDataServiceConfig."""
    basics.init()
    size = basics.size()
    if dispatchers < 1 or size % dispatchers:
        raise ValueError(
            f"Number of processes ({size}) must be a multiple of number of dispatchers "
            f"({dispatchers})."
        )
    checked_side(dispatcher_side)
    compute = None
    try:
        config = None
        if basics.rank() == 0:
            key = secrets.token_bytes(32)
            interface = named_interface()
            nics = None if interface is None else [interface]
            compute = ComputeService(dispatchers, size // dispatchers, key=key, nics=nics)
            config = TfDataServiceConfig(
                dispatchers=dispatchers,
                workers_per_dispatcher=size // dispatchers,
                dispatcher_side=dispatcher_side,
                addresses=compute.addresses(),
                key=key,
                timeout=timeout,
            )
            config.write(configfile)
        with tf.device("/cpu:0"):
            config = broadcast_object(config, name="TfDataServiceConfig")
        compute_worker_fn(config)
    finally:
        if compute is not None:
            compute.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m perseus.tensorflow.data.compute_worker", description=__doc__
    )
    parser.add_argument("configfile", help="where to write what the job that trains has to know")
    parser.add_argument("--dispatchers", type=int, default=1, help="how many (1)")
    parser.add_argument(
        "--dispatcher-side",
        choices=("compute", "training"),
        default="compute",
        help="which job they run in (compute)",
    )
    parser.add_argument(
        "--timeout", type=int, default=60, help="seconds for everybody to register (60)"
    )
    arguments = parser.parse_args()
    main(
        arguments.dispatchers,
        arguments.dispatcher_side,
        arguments.configfile,
        arguments.timeout,
    )
