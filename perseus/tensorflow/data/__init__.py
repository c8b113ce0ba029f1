"""tf.data on processes of their own: `python -m perseus.tensorflow.data.compute_worker`."""
