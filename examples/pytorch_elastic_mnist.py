"""Elastic training of pytorch_mnist's network: when a rank fails, all go back to the last commit.

    perseusrun -np 2 python pytorch_elastic_mnist.py --fail-at-epoch 2

--fail-at-epoch has the last rank fail once in the middle of that epoch, to see what happens then.
"""

import argparse

import torch
import torch.nn.functional as F
from pytorch_mnist import Net, load_digits, test
from torch.utils.data import DataLoader

import perseus.torch.horovod as hvd


@hvd.elastic.run
def train(state, loader, arguments):
    """Called anew with the restored state whenever the world has changed."""
    if hvd.rank() == 0 and (state.epoch, state.batch) != (0, 0):
        print(f"going on at epoch {state.epoch}, batch {state.batch}", flush=True)
    while state.epoch < arguments.epochs:
        # After a failure the sampler deals out only what this epoch has not processed yet.
        for images, labels in loader:
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(images), labels)
            loss.backward()
            state.optimizer.step()

            state.sampler.record_batch(state.batch, arguments.batch_size)
            state.batch += 1
            if state.batch % arguments.batches_per_commit == 0:
                state.commit()
            fail_once(arguments, state)
        state.epoch += 1
        state.batch = 0
        state.sampler.set_epoch(state.epoch)
        state.commit()


def fail_once(arguments, state):
    """What a broken network would do, on the last rank."""
    middle = arguments.batches_per_commit + 1
    last = hvd.rank() == hvd.size() - 1
    if last and (state.epoch, state.batch) == (arguments.fail_at_epoch, middle):
        arguments.fail_at_epoch = None
        raise hvd.HorovodInternalError("failing on purpose")


def parse_arguments():
    parser = argparse.ArgumentParser(description="A small CNN on handwritten digits, elastic")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (10)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (32)")
    parser.add_argument("--lr", type=float, default=0.04, help="learning rate of one rank (0.04)")
    parser.add_argument("--seed", type=int, default=42, help="for weights and shuffling (42)")
    parser.add_argument("--batches-per-commit", type=int, default=5, help="steps at risk (5)")
    parser.add_argument("--fail-at-epoch", type=int, help="the epoch in which to fail once (none)")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    hvd.init()
    torch.manual_seed(arguments.seed)
    train_set, test_set = load_digits()

    sampler = hvd.elastic.ElasticSampler(train_set, seed=arguments.seed)
    loader = DataLoader(train_set, batch_size=arguments.batch_size, sampler=sampler)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # Its attributes are saved by commit() and made equal on all ranks before train() starts.
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    def scale_learning_rate():
        for group in state.optimizer.param_groups:
            group["lr"] = arguments.lr * hvd.size()

    state.register_reset_callbacks([scale_learning_rate])
    train(state, loader, arguments)

    loss, accuracy = test(model, test_set)
    if hvd.rank() == 0:
        print(f"test loss: {loss:.4f}")
        print(f"test accuracy: {accuracy:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
