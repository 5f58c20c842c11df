"""The paper's synthetic example: self-training with hard, soft and credal labels on the unit interval.

    python scripts/lab/synthetic.py [--reading=pooled|full|terms] [--repetitions=40] [-o figures/synthetic]

25 labelled and 500 unlabelled points, uniform on [0, 1]; the positive class has probability sigmoid(10 (x - 1/2)). A
network of one hidden layer of 100 sigmoid units trains by SGD (rate 0.5) for 100 iterations; an iteration labels the
unlabelled points with the present model, then trains on all points. The table gives the mean distance |p(x) - truth(x)|
of the function averaged over 5 initialisations, as mean and standard error over data sets (the paper shows one).

The paper does not say what an iteration is; three readings:
  pooled  an epoch of minibatches of 25 from labelled and pseudo-labelled points together, all points weighted alike
  full    10 gradient steps on all 525 points, weighted alike
  terms   20 steps on mean labelled loss + mean loss of 25 unlabelled points, the objective of the paper's Sec. 3.4
`pooled` is what the appendix says with the fewest additions, and the default whatever it shows; BENCHMARKS.md has what
each shows. If the labels were renewed before every step, soft and credal labels would have no effect at all: a
prediction has zero gradient against itself, and lies in the credal set that it spans. The dynamics amplify rounding (a
rate of 0.5 is beyond the stable one for 100 units), so that means move by 0.01 between builds of TensorFlow.
"""
import argparse
import time
from pathlib import Path

import numpy as np

from cssl import cli
from cssl.program import exit_on_user_error

cli.start_tensorflow()  # quietly, before anything else does

import tensorflow as tf

from libml.errors import UserError
from libml.learn import losses
from libml.results import plots, tables

LABELED, UNLABELED, HIDDEN, ITERATIONS, RATE, SLOPE = 25, 500, 100, 100, 0.5, 10.0
METHODS = ("labels alone", "hard", "soft", "credal")
READINGS = {"pooled": (25, 21), "full": (525, 10), "terms": (25, 20)}  # unlabelled or pooled points per step, steps
GRID = np.linspace(0, 1, 201, dtype=np.float32)


def truth(x: np.ndarray) -> np.ndarray:
    """Returns the probability of the positive class."""
    return 1 / (1 + np.exp(-SLOPE * (x - 0.5)))


def draw(repetitions: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws data sets: labelled points [R, 25], their classes [R, 25] and unlabelled points [R, 500]."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(repetitions, LABELED))
    y = rng.uniform(size=x.shape) < truth(x)
    return x.astype(np.float32), y.astype(np.int32), rng.uniform(size=(repetitions, UNLABELED)).astype(np.float32)


def initial_weights(models: int) -> list[tf.Variable]:
    """Returns the weights of independent networks, Glorot-uniform with zero biases."""
    rng = np.random.default_rng(0)
    first, second = np.sqrt(6 / (1 + HIDDEN)), np.sqrt(6 / (HIDDEN + 2))
    arrays = (rng.uniform(-first, first, (models, 1, HIDDEN)), np.zeros((models, 1, HIDDEN)),
              rng.uniform(-second, second, (models, HIDDEN, 2)), np.zeros((models, 1, 2)))
    return [tf.Variable(array.astype(np.float32)) for array in arrays]


def logits(weights: list[tf.Variable], x: tf.Tensor) -> tf.Tensor:
    """Returns the outputs [B, N, 2] of B networks, each at its own points x [B, N]."""
    w, b, v, c = weights
    return tf.matmul(tf.sigmoid(x[..., tf.newaxis] * w + b), v) + c


def example_loss(method: str, output: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
    """Returns the loss [B, N] of outputs [B, N, 2] with (pseudo-)labels q [B, N, 2]; one-hot q is a known label."""
    output, flat = tf.reshape(output, [-1, 2]), tf.reshape(q, [-1, 2])
    y = tf.argmax(flat, axis=-1, output_type=tf.int32)
    if method == "soft":
        loss = losses.soft_cross_entropy(output, flat)
    elif method == "credal":
        loss = losses.credal_loss(output, y, 1 - tf.reduce_max(flat, axis=-1))
    else:
        loss = losses.cross_entropy(output, y)
    return tf.reshape(loss, tf.shape(q)[:2])


def fit(method: str, reading: str, labeled: np.ndarray, classes: np.ndarray, unlabeled: np.ndarray, *,
        iterations: int = ITERATIONS) -> np.ndarray:
    """Trains one network per line of the data [B, …] and returns its probability of the positive class on GRID [B, G].

    All networks train at once: they are independent, so the sum of their losses has each one's own gradient.
    """
    weights = initial_weights(len(labeled))
    x, known = tf.constant(labeled), tf.one_hot(classes, 2)
    u, points = tf.constant(unlabeled), tf.concat([labeled, unlabeled], axis=1)
    size, steps = READINGS[reading]
    count = UNLABELED if reading == "terms" else LABELED + UNLABELED
    counts = tf.ones([1, count])
    if method == "labels alone":
        counts = tf.cast(tf.range(count) < count - UNLABELED, tf.float32)[tf.newaxis]

    def loss(q: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
        pool = [u, q, counts] if reading == "terms" else [points, tf.concat([known, q], axis=1), counts]
        if size < count:
            pool = [tf.gather(values, chosen, axis=1) for values in pool]
        value = tf.reduce_sum(example_loss(method, logits(weights, pool[0]), pool[1]) * pool[2]) / size
        if reading == "terms":
            value += tf.reduce_sum(example_loss("hard", logits(weights, x), known)) / LABELED
        return value

    @tf.function
    def iterate(order: tf.Tensor) -> None:
        q = tf.nn.softmax(logits(weights, u))
        for chosen in order:
            with tf.GradientTape() as tape:
                value = loss(q, chosen)
            for weight, gradient in zip(weights, tape.gradient(value, weights), strict=True):
                weight.assign_sub(RATE * gradient)

    rng = np.random.default_rng(1)
    for _ in range(iterations):
        order = [rng.permutation(count) for _ in range(-(-size * steps // count))]
        iterate(tf.constant(np.concatenate(order).reshape(steps, size), tf.int32))
    return tf.nn.softmax(logits(weights, tf.tile(GRID[np.newaxis], [len(labeled), 1]))).numpy()[..., 1]


def figure_of(target: np.ndarray, functions: dict[str, np.ndarray], data: list[np.ndarray]):
    """Plots learned functions [seeds, grid] by method, the truth and the data."""
    labeled, classes, unlabeled = data
    figure, ((axis,),) = plots.panels(1, 1, 6.5, 4.2)
    axis.scatter(unlabeled, np.full(len(unlabeled), 0.5), s=6, color=plots.COLOURS[5], label="unlabelled")
    axis.scatter(labeled, classes, marker="x", color=plots.COLOURS[6], label="labelled")
    axis.plot(GRID, target, color=plots.COLOURS[6], linestyle="--", label="truth")
    for number, (name, lines) in zip((3, 2, 4, 0), functions.items(), strict=True):
        colour = plots.COLOURS[number]
        axis.plot(GRID, lines.T, color=colour, alpha=0.35, linewidth=0.7)
        axis.plot(GRID, lines.mean(axis=0), color=colour, linewidth=2.5, label=name)
    axis.set(xlabel="x", ylabel="probability of the positive class", ylim=(-0.05, 1.05))
    axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def main() -> None:
    """Runs the example and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reading", choices=tuple(READINGS), default="pooled")
    parser.add_argument("--repetitions", type=int, help="data sets to draw (default: 24; for `full`, 8)")
    parser.add_argument("--seeds", type=int, default=5, help="initialisations per data set")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("-o", "--output", type=Path, help="figure of the first data set, without extension: PNG, SVG")
    args = parser.parse_args()
    repetitions = args.repetitions or (8 if args.reading == "full" else 24)
    if min(repetitions, args.seeds, args.iterations) < 1:
        raise UserError("--repetitions, --seeds and --iterations must be at least 1.")
    start = time.time()
    data = draw(repetitions, seed=0)
    repeated = [np.repeat(array, args.seeds, axis=0) for array in data]
    target = truth(GRID)
    curves, distance = {}, {}
    for method in METHODS:
        p = fit(method, args.reading, *repeated, iterations=args.iterations)
        curves[method] = p.reshape(repetitions, args.seeds, -1)
        distance[method] = np.abs(curves[method].mean(axis=1) - target).mean(axis=-1)  # [R]

    def shown(values: np.ndarray, plus: str = "") -> str:
        mean, std = tables.mean_and_std(values)
        return f"{mean:{plus}.4f} ± {std / np.sqrt(len(values)):.4f}"

    print(f"{repetitions} data sets, {args.seeds} initialisations each, {args.iterations} iterations, "
          f"reading `{args.reading}`\n")
    lines = [["labels", "distance to the truth ± standard error", "rise from 0 to 1", "credal minus this (paired)",
              "credal nearer"]]
    for method in METHODS:
        rise = float((curves[method][..., -1] - curves[method][..., 0]).mean())
        paired = distance["credal"] - distance[method]
        versus = ("–", "–") if method == "credal" else (shown(paired, "+"), f"{np.mean(paired < 0):.0%}")
        lines.append([method, shown(distance[method]), f"{rise:.2f}", *versus])
    print(f"{tables.markdown(lines)}\n\n{time.time() - start:.0f} s")
    if args.output:
        figure = figure_of(target, {name: curve[0] for name, curve in curves.items()}, [array[0] for array in data])
        print("\n".join(map(str, plots.save(figure, args.output))))


if __name__ == "__main__":
    exit_on_user_error(main)
