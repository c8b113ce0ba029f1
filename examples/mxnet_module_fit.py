"""A small CNN on handwritten digits with MXNet's Module.fit and the KVStore of Perseus.

    perseusrun -np 2 python mxnet_module_fit.py

`mpirun -np 2` does as well. Without --data-dir the 1797 digits that ship with scikit-learn are used
(8 x 8 pixels).
"""

import mnist_data
import mxnet as mx
import numpy as np

import perseus.mxnet as perseus_kv


def build_symbol():
    """Two convolutions and two dense layers; images are (batch, 1, side, side)."""
    found = mx.sym.Variable("data")
    for filters in (16, 32):
        found = mx.sym.Convolution(found, kernel=(3, 3), pad=(1, 1), num_filter=filters)
        found = mx.sym.Activation(found, act_type="relu")
        found = mx.sym.Pooling(found, kernel=(2, 2), stride=(2, 2), pool_type="max")
    found = mx.sym.FullyConnected(found, num_hidden=64)
    found = mx.sym.Activation(found, act_type="relu")
    found = mx.sym.FullyConnected(found, num_hidden=10)
    return mx.sym.SoftmaxOutput(found, name="softmax")


def batches(data, batch_size, shuffle=False):
    """MXNet's iterator over (images, labels); what is left at the end is left out."""
    images, labels = data
    images = images.transpose(0, 3, 1, 2)
    return mx.io.NDArrayIter(images, labels, batch_size, shuffle, last_batch_handle="discard")


def train(model, data, kv, arguments):
    """Module divides gradients by the batch of all ranks, as the store's name says dist_sync."""
    data = mnist_data.share_of(data, kv.rank, kv.num_workers)
    steps = arguments.epochs * (len(data[1]) // arguments.batch_size)
    # The batch grows with the number of ranks, and the learning rate with it.
    rate = arguments.lr * kv.num_workers
    scheduler = mx.lr_scheduler.CosineScheduler(steps, base_lr=rate, warmup_steps=steps // 10)

    def report(epoch, *_):
        if kv.rank == 0:
            print(f"epoch {epoch + 1} of {arguments.epochs}")

    model.fit(
        batches(data, arguments.batch_size, shuffle=True),
        kvstore=kv,
        optimizer="sgd",
        optimizer_params={"learning_rate": rate, "momentum": 0.9, "lr_scheduler": scheduler},
        initializer=mx.init.Xavier(),
        num_epoch=arguments.epochs,
        epoch_end_callback=report,
    )


def test(model, data, kv):
    """Accuracy over the whole test set, each rank looking at its share."""
    share = tuple(array[kv.rank :: kv.num_workers] for array in data)
    labels = share[1]
    answers = model.predict(batches(share, batch_size=len(labels))).asnumpy().argmax(1)
    counts = mx.nd.array([np.sum(answers == labels), len(labels)])
    kv.init("counts", counts, param_only=True)  # no parameter, so that it is only summed up
    kv.pushpull("counts", counts)
    correct, count = counts.asnumpy()
    return correct / count


def main():
    """Returns the weights."""
    arguments = mnist_data.parser("A small CNN on handwritten digits").parse_args()
    kv = perseus_kv.create("dist_sync_perseus")
    mx.random.seed(arguments.seed + kv.rank)
    np.random.seed(arguments.seed + kv.rank)
    train_set, test_set = mnist_data.load(arguments.data_dir)
    model = mx.mod.Module(build_symbol(), context=mx.cpu())
    train(model, train_set, kv, arguments)
    accuracy = test(model, test_set, kv)
    if kv.rank == 0:
        print(f"test accuracy: {accuracy:.4f}")
    weights, _ = model.get_params()
    return [weights[name].asnumpy() for name in sorted(weights)]


if __name__ == "__main__":
    main()
