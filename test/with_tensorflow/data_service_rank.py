"""A rank that reads what another job computes: `… CONFIG SIDE shared|own OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import tensorflow as tf

import perseus.tensorflow.horovod as hvd
from perseus.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

ELEMENTS = 1001


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(ELEMENTS).map(lambda x: 3 * x + 1).batch(7)


def main(config_file: str, side: str, pass_: str, out: str) -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    config = TfDataServiceConfig.read(config_file, wait_for_file_creation=True)
    assert config.dispatcher_side == side
    found: list[int] = []
    if side == "compute":
        dataset = numbers().send_to_data_service(
            config, rank, size, reuse_dataset=pass_ == "shared"
        )
        found = [int(x) for batch in dataset for x in batch]
        hvd.allreduce(tf.constant(float(rank)), name="done")
    else:
        with tf_data_service(config, rank) as address:
            service = tf.data.experimental.service.distribute("distributed_epoch", address)
            found = [int(x) for batch in numbers().apply(service) for x in batch]
            # Rank 0's dispatcher may be everybody's.
            hvd.allreduce(tf.constant(float(rank)), name="done")
    Path(f"{out}.{rank}").write_text(" ".join(map(str, sorted(found))))
    if rank == 0:
        config.compute_client().shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
