"""The paper's synthetic example: self-training with hard, soft and credal labels on the unit interval.

    python scripts/lab/synthetic.py [--reading=pooled|full|terms] [--repetitions=40]

An iteration labels the unlabelled points with the present model, then trains on all points. The table gives the mean
distance |p(x) - truth(x)| of the function averaged over 5 initialisations, as mean and standard error over data sets.

The paper does not say what an iteration is; three readings:
  pooled  an epoch of minibatches of 25 from labelled and pseudo-labelled points together, all points weighted alike
  full    10 gradient steps on all 525 points, weighted alike
  terms   20 steps on mean labelled loss + mean loss of 25 unlabelled points, the objective of the paper's Sec. 3.4
docs/evidence/synthetic.md has what each shows. The dynamics amplify rounding (a rate of 0.5 is beyond the stable one
for 100 units), so that means move by 0.01 between builds of TensorFlow.
"""
import numpy as np

from cssl import cli, tools
from cssl.program import exit_on_user_error

cli.start_tensorflow()  # quietly, before anything else does

import tensorflow as tf

from libml.errors import UserError
from libml.learn import losses
from libml.results import tables

LABELED, UNLABELED, HIDDEN, ITERATIONS, RATE, SLOPE, SEEDS = 25, 500, 100, 100, 0.5, 10.0, 5
METHODS = ("labels alone", "hard", "soft", "credal")
READINGS = {"pooled": (25, 21), "full": (525, 10), "terms": (25, 20)}  # unlabelled or pooled points per step, steps
GRID = np.linspace(0, 1, 201, dtype=np.float32)


def truth(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-SLOPE * (x - 0.5)))


def draw(repetitions: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Data sets: labelled points [R, 25], their classes [R, 25] and unlabelled points [R, 500]."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(repetitions, LABELED))
    y = rng.uniform(size=x.shape) < truth(x)
    return x.astype(np.float32), y.astype(np.int32), rng.uniform(size=(repetitions, UNLABELED)).astype(np.float32)


def logits(weights: list[tf.Variable], x: tf.Tensor) -> tf.Tensor:
    """Outputs [B, N, 2] of B networks, each at its own points x [B, N]."""
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
    models, rng = len(labeled), np.random.default_rng(0)
    first, second = np.sqrt(6 / (1 + HIDDEN)), np.sqrt(6 / (HIDDEN + 2))  # Glorot's
    weights = [tf.Variable(array.astype(np.float32)) for array in (
        rng.uniform(-first, first, (models, 1, HIDDEN)), np.zeros((models, 1, HIDDEN)),
        rng.uniform(-second, second, (models, HIDDEN, 2)), np.zeros((models, 1, 2)))]
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


def main() -> None:
    parser = tools.parser(__doc__)
    parser.add_argument("--reading", choices=tuple(READINGS), default="pooled")
    parser.add_argument("--repetitions", type=int, help="data sets to draw (default: 24; for `full`, 8)")
    args = parser.parse_args()
    repetitions = args.repetitions or (8 if args.reading == "full" else 24)
    if repetitions < 1:
        raise UserError(f"--repetitions={repetitions} must be at least 1.")
    repeated = [np.repeat(array, SEEDS, axis=0) for array in draw(repetitions, seed=0)]
    distance = {}
    for method in METHODS:
        curves = fit(method, args.reading, *repeated).reshape(repetitions, SEEDS, -1)
        distance[method] = np.abs(curves.mean(axis=1) - truth(GRID)).mean(axis=-1)

    def shown(values: np.ndarray, plus: str = "") -> str:
        mean, std = tables.mean_and_std(values)
        return f"{mean:{plus}.4f} ± {std / np.sqrt(len(values)):.4f}"

    print(f"{repetitions} data sets, reading `{args.reading}`\n")
    lines = [["labels", "distance to the truth ± standard error", "credal minus this (paired)"]]
    for method in METHODS:
        paired = "–" if method == "credal" else shown(distance["credal"] - distance[method], "+")
        lines.append([method, shown(distance[method]), paired])
    print(tables.markdown(lines))


if __name__ == "__main__":
    exit_on_user_error(main)
