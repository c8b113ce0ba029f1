"""Learns vectors of words by what stands beside them: an embedding, whose gradients are sparse.

    perseusrun -np 2 python tensorflow_word2vec.py

Skip-gram with negative sampling (Mikolov et al. 2013) on the texts of Python's help(), which are
part of the standard library. A step touches few rows of the tables: their gradients are
tf.IndexedSlices, of which ranks exchange the rows that they have.
"""

import argparse
import pydoc_data.topics
import re
from collections import Counter

import numpy as np
import tensorflow as tf

import perseus.tensorflow.horovod as hvd

WINDOW = 2  # words on either side
NEGATIVES = 8  # words drawn at random for a true neighbour


def load_words(fewest):
    """(numbers of the text's words in order, the words by number); rare words are left out."""
    topics = pydoc_data.topics.topics
    found = re.findall("[a-z]+", " ".join(topics[name] for name in sorted(topics)).lower())
    words = [word for word, count in Counter(found).most_common() if count >= fewest]
    number_of = {word: number for number, word in enumerate(words)}
    return np.array([number_of[word] for word in found if word in number_of], np.int32), words


def neighbours(text):
    """Every (word, one beside it) of the text, as an array (count, 2)."""
    pairs = []
    for distance in range(1, WINDOW + 1):
        ahead = np.stack([text[:-distance], text[distance:]], 1)
        pairs += [ahead, ahead[:, ::-1]]
    return np.concatenate(pairs)


class SkipGram(tf.Module):
    """Two vectors for every word: of the word itself, and of the word as a neighbour."""

    def __init__(self, words, width):
        super().__init__()
        random = tf.random.uniform([words, width], -0.5 / width, 0.5 / width)
        self.word_vectors = tf.Variable(random, name="word_vectors")
        self.neighbour_vectors = tf.Variable(tf.zeros([words, width]), name="neighbour_vectors")

    def score(self, words, others):
        """How well others, (batch, any number), go with words, (batch,)."""
        vectors = tf.gather(self.word_vectors, words)
        return tf.einsum("bd,bnd->bn", vectors, tf.gather(self.neighbour_vectors, others))


def loss_of(model, pairs, negatives):
    """The mean over (word, neighbour) pairs; negatives: as many words at random for each."""
    true = model.score(pairs[:, 0], pairs[:, 1:])
    false = model.score(pairs[:, 0], negatives)
    return -tf.reduce_mean(
        tf.reduce_sum(tf.math.log_sigmoid(true), 1) + tf.reduce_sum(tf.math.log_sigmoid(-false), 1)
    )


def train(model, text, arguments):
    """Steps with this rank's pairs; prints the loss on rank 0 ten times."""
    pairs = neighbours(text)
    random = np.random.default_rng(arguments.seed + hvd.rank())
    mine = pairs[hvd.rank() :: hvd.size()]
    optimizer = tf.keras.optimizers.Adagrad(arguments.lr)

    @tf.function
    def training_step(pairs, negatives, first_batch):
        with tf.GradientTape() as tape:
            loss = loss_of(model, pairs, negatives)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.trainable_variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    for step in range(arguments.steps):
        batch = mine[random.integers(len(mine), size=arguments.batch_size)]
        negatives = random.choice(text, (arguments.batch_size, NEGATIVES))
        loss = training_step(tf.constant(batch), tf.constant(negatives), step == 0)
        if hvd.rank() == 0 and (step + 1) % max(1, arguments.steps // 10) == 0:
            print(f"step {step + 1}: loss {loss:.3f}")


def test(model, text):
    """How often a true neighbour goes better with a word than one at random, 0.5 being luck."""
    mine = neighbours(text)[hvd.rank() :: hvd.size()]
    others = np.random.default_rng(hvd.rank()).choice(text, len(mine))
    scores = model.score(mine[:, 0], np.stack([mine[:, 1], others], 1))
    better = tf.reduce_sum(tf.cast(scores[:, 0] > scores[:, 1], tf.float32))
    better, count = hvd.allreduce(tf.stack([better, float(len(mine))]), op=hvd.Sum, name="test")
    return float(better / count)


def show_similar(model, words):
    """Prints what is nearest to some words, by the angle between vectors."""
    vectors = tf.math.l2_normalize(model.word_vectors, 1).numpy()
    for word in ("function", "two", "string"):
        nearest = np.argsort(-vectors @ vectors[words.index(word)])[1:6]
        print(f"{word}: {', '.join(words[number] for number in nearest)}")


def main():
    """Returns the vectors."""
    parser = argparse.ArgumentParser(description="Vectors of words")
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="of the optimizer (2000)")
    add("--batch-size", type=int, default=256, help="pairs of words per rank and step (256)")
    add("--width", type=int, default=32, help="of a vector (32)")
    add("--lr", type=float, default=2.0, help="learning rate (2)")
    add("--fewest", type=int, default=10, help="leave out words that are rarer (10)")
    add("--seed", type=int, default=42, help="for vectors and batches (42)")
    arguments = parser.parse_args()
    hvd.init()
    tf.random.set_seed(arguments.seed + hvd.rank())
    # Else TensorFlow adds up a word's rows in any order, and ranks drift apart by what is rounded.
    tf.config.experimental.enable_op_determinism()
    text, words = load_words(arguments.fewest)
    # Every tenth passage is for testing.
    passages = np.array_split(text, 100)
    training = np.concatenate([passage for i, passage in enumerate(passages) if i % 10])
    model = SkipGram(len(words), arguments.width)
    train(model, training, arguments)
    accuracy = test(model, np.concatenate(passages[::10]))
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.4f}")
        show_similar(model, words)
    hvd.shutdown()
    return [variable.numpy() for variable in model.trainable_variables]


if __name__ == "__main__":
    main()
