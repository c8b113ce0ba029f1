"""tf.data in separate processes: `python -m perseus.tensorflow.data.compute_worker`."""
