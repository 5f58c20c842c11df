"""The semi-supervised model: one training step with its augmentation, loss, SGD, averages and probe."""
import hashlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import keras
import numpy as np
import tensorflow as tf

from libml import losses, optim
from libml.augment import Augmenter, to_float
from libml.options import option

ALIGNMENT_LENGTH = 128  # batches in the moving average of predictions
Scalars = dict[str, tf.Tensor]
State = dict  # what `SSLModel.read` returns


def fold_in(seed: tf.Tensor, number) -> tf.Tensor:
    """Derives an independent seed [2] from a seed and a number."""
    return tf.random.experimental.stateless_fold_in(seed, number, alg="philox")


def average_over_replicas(tree):
    """Returns a structure with its float tensors averaged over all replicas."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tree
    flat = tf.nest.flatten(tree)
    floats = [i for i, value in enumerate(flat) if value.dtype.is_floating]
    means = context.all_reduce(tf.distribute.ReduceOp.MEAN, [flat[i] for i in floats])
    for i, mean in zip(floats, means, strict=True):
        flat[i] = mean
    return tf.nest.pack_sequence_as(tree, flat)


def values_of(variables: Sequence) -> list[tf.Tensor]:
    """Reads variables, on the replica that asks."""
    return [tf.convert_to_tensor(v) for v in variables]


def assign_all(variables: Sequence, values: Sequence[tf.Tensor]) -> None:
    """Assigns values that are equal on all replicas, with one synchronisation for all variables together."""
    variables = [getattr(v, "value", v) for v in variables]  # Keras wraps the variable that tf.distribute knows
    if not tf.distribute.has_strategy():
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return

    def assign(strategy, *values):
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable, lambda v, x: v.assign(x), args=(value,), group=False)

    tf.distribute.get_replica_context().merge_call(assign, args=tuple(values))


class Step:
    """What a loss may use within one update: forward passes, seeds, the time. Lives while the step is traced."""

    def __init__(self, model: "SSLModel", seed: tf.Tensor, now: State):
        self.model = model
        self.images_seen = now["updates"] * model.options.batch
        self.weights, self.ema_weights, self.statistics = now["weights"], now["ema"], now["statistics"]
        self.new_statistics = self.statistics
        self.predictions, self.mean_prediction = now.get("predictions"), None
        self.state = {name: now[f"state_{name}"] for name in model.method_state}
        self.new_state = dict(self.state)  # what a loss puts here is averaged over replicas and kept
        self._seed, self._draws = seed, 0

    def new_seed(self) -> tf.Tensor:
        """Returns a seed [2] that nothing else in this step uses."""
        self._draws += 1
        return fold_in(self._seed, self._draws)

    def forward(self, images: tf.Tensor, *, training: bool = True, update_statistics: bool = True, ema: bool = False,
                **options):
        """Runs the network.

        Args:
            images: [N, H, W, C] float views.
            training: whether batch normalisation uses the statistics of this batch.
            update_statistics: whether this (training) pass moves batch normalisation's averages.
            ema: whether to use the averaged weights instead of the current ones.
            **options: further arguments of the network's call, such as `mc_dropout` or `with_embedding`.
        """
        weights = self.ema_weights if ema else self.weights
        if self.model.network_takes_seed:
            options["seed"] = self.new_seed()
        outputs, statistics = self.model.network.stateless_call(
            weights, self.new_statistics if training else self.statistics, self.model.normalize(images),
            training=training, **options)
        if training and update_statistics and not ema:
            self.new_statistics = statistics
        return outputs

    def ramp(self, images: float) -> tf.Tensor:
        """Rises from 0 to 1 while the given number of labelled images is seen; is 1 if that number is 0."""
        if images <= 0:
            return tf.ones([])
        return tf.clip_by_value(tf.cast(self.images_seen, tf.float32) / images, 0.0, 1.0)


class SSLModel(keras.Model):
    """A classifier trained on a few labelled and many unlabelled images.

    A method is a subclass: its hyperparameters in `Options`, and `unlabeled_loss` (most methods) or the wider
    `compute_losses`; class attributes, `views_per_image`, `initial_state` and `presets` say what else is special.

    Args:
        network: any built Keras classifier from float images to logits.
        num_classes: K.
        options: an instance of the class's `Options`.
        augmenter: makes the views; None when only `train_on_views` is used.
        total_images: horizon of the learning-rate schedule, in labelled images.
        seed: of everything random in training.
        image_statistics: per-channel mean and standard deviation to whiten with, or None.
        loss_scaling: scales the loss dynamically, for float16.
        jit: compiles forward and backward pass with XLA.
    """

    uses_alignment = False  # whether `aligned` is called
    uses_unlabeled = True
    uses_all_labels = False  # whether the command line turns any dataset into its fully labelled version
    strong_labeled = False  # whether labelled images train on strong views
    cosine_decay = True  # of the learning rate; else it is constant
    decoupled_weight_decay = False  # kernels shrink by wd * lr each step, instead of L2 in the loss
    optimizer_rule = optim.Nesterov()
    needs_float32 = False  # whether half precision would break it

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Hyperparameters that all methods share."""

        batch: int = option(64, "B: labelled images per update")
        uratio: int = option(7, "mu: unlabelled images per labelled one")
        lr: float = option(0.03, "eta: initial learning rate; falls with cos(7 pi k / 16 K)")
        wd: float = option(0.0005, "weight decay: factor of 0.5 ||W||^2 over the kernels")
        wu: float = option(1.0, "lambda_u: weight of the unlabelled loss")
        ema: float = option(0.999, "decay of the average of the weights that is evaluated")
        K: int = option(1, "strong views per unlabelled image")
        p_unlabeled: str = option("", "class prior p~ for distribution alignment, comma-separated; uniform by default")

    def __init__(self, network: keras.Model, num_classes: int, *, options=None, augmenter: Augmenter | None = None,
                 total_images: int = 65536 << 10, seed: int = 0, image_statistics=None, loss_scaling: bool = False,
                 jit: bool = False):
        super().__init__(name=type(self).__name__.lower())
        self.network, self.num_classes, self.augmenter = network, num_classes, augmenter
        self.options = options or self.Options()
        self.total_images, self.seed, self.image_statistics = total_images, seed, image_statistics
        self.network_takes_seed = "seed" in inspect.signature(network.call).parameters

        def state(name, shape, initializer, dtype="float32"):
            return self.add_weight(name=name, shape=shape, initializer=initializer, dtype=dtype, trainable=False,
                                   autocast=False, aggregation="only_first_replica")

        trainable = network.trainable_variables
        self.updates = state("updates", (), "zeros", "int64")
        self.ema_weights = [state(f"ema_{i}", v.shape, "zeros") for i, v in enumerate(trainable)]
        self.slots = [state(f"slot_{i}", v.shape, "zeros") for _ in range(self.optimizer_rule.slots_per_weight)
                      for i, v in enumerate(trainable)]
        for average, v in zip(self.ema_weights, trainable, strict=True):
            average.assign(v)
        if self.uses_alignment:
            uniform = keras.initializers.Constant(1 / num_classes)
            self.predictions = state("predictions", (ALIGNMENT_LENGTH, num_classes), uniform)
            self.class_prior = self._class_prior()
        if loss_scaling:
            self.loss_scale = state("loss_scale", (), keras.initializers.Constant(2.0 ** 15))
            self.good_steps = state("good_steps", (), "zeros", "int64")
        self.loss_scaling = loss_scaling
        self.method_state = {}
        for name, value in self.initial_state().items():
            self.method_state[name] = state(name, value.shape, "zeros")
            self.method_state[name].assign(value)
        self.kernel_indices = [i for i, v in enumerate(trainable) if v.name == "kernel"]
        self.jit, self._compiled = jit, tf.function(self._compute_gradients, jit_compile=True)
        self.built = True

    def _class_prior(self) -> np.ndarray:
        if not self.options.p_unlabeled:
            return np.full(self.num_classes, 1 / self.num_classes, np.float32)
        try:
            prior = np.array([float(part) for part in self.options.p_unlabeled.split(",")], np.float32)
        except ValueError:
            prior = np.zeros(0, np.float32)
        if prior.shape != (self.num_classes,) or (prior < 0).any() or prior.sum() <= 0:
            raise ValueError(f"p_unlabeled is {self.options.p_unlabeled!r}; expected {self.num_classes} non-negative "
                             "numbers separated by commas, one per class.")
        return prior / prior.sum()

    # What a method defines.

    @classmethod
    def presets(cls, labels: int | None) -> dict:
        """Returns flags that the method changes, where the user said nothing, for a number of labels (None: all)."""
        del labels
        return {}

    @property
    def views_per_image(self) -> tuple[int, int]:
        """The numbers of weak and strong views per unlabelled image; views of one kind follow each other."""
        return 1, self.options.K

    def initial_state(self) -> dict[str, np.ndarray]:
        """Returns the method's own float state by name: `Step.state` has it, `Step.new_state` takes its update."""
        return {}

    def unlabeled_loss(self, weak: tf.Tensor, strong: tf.Tensor, views: dict, step: Step):
        """Returns (loss [N], mask [N], monitors) from weak and strong logits [N, K]."""
        raise TypeError(f"{type(self).__name__} defines neither unlabeled_loss nor compute_losses.")

    def compute_losses(self, views: dict, step: Step) -> tuple[tf.Tensor, Scalars]:
        """Returns the loss without weight decay, and scalars to log: labelled CE + wu * masked unlabelled loss."""
        x, weak, strong = self.forward_together(views, step)
        xe = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        loss, mask, monitors = self.unlabeled_loss(weak, strong, views, step)
        xeu = tf.reduce_mean(loss * mask)
        scalars = {"losses/xe": xe, "losses/xeu": xeu, "monitors/mask": tf.reduce_mean(mask), **monitors,
                   **pseudo_label_quality(weak, views, mask)}
        return xe + self.options.wu * xeu, scalars

    def forward_together(self, views: dict, step: Step) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Logits of labelled, weak and strong views from one forward pass, the weak ones repeated for K strong views.

        Batch normalisation sees all views together.
        """
        parts = [views["labeled"], views["weak"], views["strong"]]
        x, weak, strong = tf.split(step.forward(tf.concat(parts, 0)), [len_static(part) for part in parts])
        return x, tf.tile(weak, [len_static(strong) // len_static(weak), 1]), strong

    def labeled_cross_entropy(self, views: dict, step: Step) -> tf.Tensor:
        """Mean cross-entropy of a forward pass over the labelled images alone, which moves the moving statistics."""
        return tf.reduce_mean(losses.cross_entropy(step.forward(views["labeled"]), views["label"]))

    # Distribution alignment.

    def aligned(self, q: tf.Tensor, step: Step, prior: tf.Tensor | None = None) -> tf.Tensor:
        """Returns q weighted by class prior over moving average of predictions, normalised (the paper's Eq. 6).

        The average is that of earlier batches; this batch's mean enters it after the step. Without `prior` it is that
        of `--p_unlabeled`.
        """
        step.mean_prediction = tf.reduce_mean(q, 0)
        p_model = tf.reduce_mean(step.predictions, 0)
        prior = self.class_prior if prior is None else prior
        return losses.align(q, p_data=prior, p_model=p_model / tf.reduce_sum(p_model))

    # One update.

    def read(self) -> State:
        """Reads all that an update depends on and changes, once.

        Whatever uses a value must use this reading of it, from which its new value is computed too. Then data flow
        alone puts every use before the change. A second read would be ordered by a control dependency only, and
        TensorFlow's graph optimiser drops some of those: it has been seen to read what the same step had written.
        """
        return tf.nest.map_structure(tf.convert_to_tensor, self.checkpoint_items())

    def normalize(self, images: tf.Tensor) -> tf.Tensor:
        """Whitens float images if asked to."""
        if self.image_statistics is None:
            return images
        mean, deviation = self.image_statistics
        return (images - mean) / deviation

    def step_seed(self, now: State) -> tf.Tensor:
        """Returns the seed [2] of this update on this replica."""
        seed = tf.stack([tf.constant(self.seed, tf.int64), now["updates"]])
        context = tf.distribute.get_replica_context()
        return fold_in(seed, 0 if context is None else context.replica_id_in_sync_group)

    def make_views(self, batch: dict, now: State | None = None) -> dict:
        """Makes float views of a batch of uint8 images: labeled, weak, strong, and the probe of CTAugment."""
        now = self.read() if now is None else now
        seed, rates = fold_in(self.step_seed(now), 1), now.get("rates")
        labeled = self.augmenter.labeled(batch["labeled"], fold_in(seed, 1))
        views = {"labeled": to_float(labeled), "label": batch["label"]}
        if self.strong_labeled:
            views["labeled"] = self.augmenter.strong(batch["labeled"], fold_in(seed, 4), rates)
        num_weak, num_strong = self.views_per_image if self.uses_unlabeled else (0, 0)
        if num_weak:
            seeds = [fold_in(seed, 2)]
            seeds += [fold_in(seeds[0], k) for k in range(1, num_weak)]
            weak = [self.augmenter.weak(batch["unlabeled"], weak_seed) for weak_seed in seeds]
            views["weak"] = to_float(tf.concat(weak, 0))
            views["unlabeled_label"] = batch["unlabeled_label"]
        if num_strong:
            strong = [self.augmenter.strong(batch["unlabeled"], fold_in(seed, 10 + k), rates)
                      for k in range(num_strong)]
            views["strong"] = tf.concat(strong, 0)
        if self.augmenter.uses_probe and num_strong:
            probe, policy = self.augmenter.probe(labeled, fold_in(seed, 3))
            views |= {"probe": to_float(probe), "probe_ops": policy["ops"], "probe_params": policy["params"]}
        return views

    def train_step(self, batch: dict) -> Scalars:
        """Runs one update on a batch of uint8 images; returns scalars to log, equal on all replicas."""
        now = self.read()
        return self.train_on_views(self.make_views(batch, now), now)

    def train_on_views(self, views: dict, now: State | None = None) -> Scalars:
        """Runs one update on ready float views (`labeled`, `label`, `weak`, `strong`, …)."""
        now = self.read() if now is None else now
        updates = now["updates"]
        lr = self.learning_rate(updates * self.options.batch)
        gradients, scalars, statistics, prediction, state = average_over_replicas(self._gradients(views, now))
        scalars["monitors/lr"] = lr

        weights = list(now["weights"])
        if self.decoupled_weight_decay:
            for i in self.kernel_indices:
                weights[i] *= 1 - self.options.wd * lr
        weights, slots = self.optimizer_rule.update(weights, gradients, now["slots"], lr, updates)
        averages = [a - (1 - self.options.ema) * (a - w) for a, w in zip(now["ema"], weights, strict=True)]
        variables = [*self.network.trainable_variables, *self.slots, *self.ema_weights,
                     *self.network.non_trainable_variables, *(self.method_state[name] for name in state)]
        old = [*now["weights"], *now["slots"], *now["ema"], *now["statistics"],
               *(now[f"state_{name}"] for name in state)]
        new = [*weights, *slots, *averages, *statistics, *state.values()]
        if self.uses_alignment:
            variables.append(self.predictions)
            old.append(now["predictions"])
            new.append(tf.concat([now["predictions"][1:], prediction[None]], 0))
        if self.loss_scaling:
            new, scale = self._scaled_update(gradients, old, new, now)
            variables, new = [*variables, self.loss_scale, self.good_steps], [*new, *scale]
            scalars["monitors/loss_scale"] = scale[0]
        if "probe" in views:
            probabilities = tf.nn.softmax(self._infer(views["probe"], now["ema"], now["statistics"]))
            policy = {"ops": views["probe_ops"], "params": views["probe_params"]}
            self.augmenter.update(policy, probabilities, views["label"], now["rates"])
        assign_all([*variables, self.updates], [*new, updates + 1])
        return scalars

    def trial_loss(self, batch: dict) -> tf.Tensor:
        """Returns the loss of a batch on this replica and changes nothing: shows whether the step can be compiled."""
        now = self.read()
        return self._gradients(self.make_views(batch, now), now)[1]["losses/total"]

    def learning_rate(self, images_seen: tf.Tensor) -> tf.Tensor:
        """lr * cos(7 pi / 16 * images / horizon), or lr for methods without decay."""
        if not self.cosine_decay:
            return tf.constant(self.options.lr)
        progress = tf.cast(images_seen, tf.float32) / self.total_images
        return self.options.lr * tf.cos(progress * (7 * math.pi / 16))

    def _gradients(self, views: dict, now: State):
        tensors = {key: value for key, value in views.items() if not key.startswith("probe")}
        compute = self._compiled if self.jit else self._compute_gradients
        used = {key: value for key, value in now.items() if key not in ("slots", "rates")}
        return compute(tensors, fold_in(self.step_seed(now), 2), used)

    def _compute_gradients(self, views: dict, seed: tf.Tensor, now: State):
        """Forward and backward pass of one replica: gradients, scalars, BN statistics, mean prediction, state."""
        step = Step(self, seed, now)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(step.weights)
            total, scalars = self.compute_losses(views, step)
            decay = losses.weight_decay([step.weights[i] for i in self.kernel_indices])
            if not self.decoupled_weight_decay:
                total += self.options.wd * decay
            scaled = total * now["loss_scale"] if self.loss_scaling else total
        gradients = tape.gradient(scaled, step.weights, unconnected_gradients="zero")
        if self.loss_scaling:
            gradients = [g / now["loss_scale"] for g in gradients]
        scalars |= {"losses/wd": decay, "losses/total": total}
        prediction = step.mean_prediction if self.uses_alignment else tf.zeros([])
        return gradients, scalars, step.new_statistics, prediction, step.new_state

    def _scaled_update(self, gradients, old, new, now):
        """Skips an update whose float16 gradients overflowed; returns the values and the loss scale's new state."""
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        scale, good = now["loss_scale"], now["good_steps"]
        grown = tf.where(good >= 1999, tf.minimum(2 * scale, 2.0 ** 24), scale)
        good_next = tf.where(finite & (good < 1999), good + 1, tf.zeros_like(good))
        scale_next = tf.where(finite, grown, tf.maximum(scale / 2, 1.0))
        return [tf.where(finite, n, o) for n, o in zip(new, old, strict=True)], [scale_next, good_next]

    # Inference.

    def infer(self, images: tf.Tensor, ema: bool = True) -> tf.Tensor:
        """Returns logits of float images from the averaged (or raw) weights and the moving batch-norm statistics."""
        weights = self.ema_weights if ema else self.network.trainable_variables
        return self._infer(images, values_of(weights), values_of(self.network.non_trainable_variables))

    def _infer(self, images: tf.Tensor, weights: list[tf.Tensor], statistics: list[tf.Tensor]) -> tf.Tensor:
        logits, _ = self.network.stateless_call(weights, statistics, self.normalize(images), training=False)
        return tf.cast(logits, tf.float32)

    def call(self, images, training=False):
        """Logits of the evaluated model; `fit` and `predict` of Keras call this."""
        del training
        return self.infer(images)

    def checkpoint_items(self) -> dict:
        """Returns everything that the rest of a training run depends on, as trackable objects."""
        def plain(variables):
            return [getattr(v, "value", v) for v in variables]

        items = {"weights": plain(self.network.trainable_variables), "ema": plain(self.ema_weights),
                 "statistics": plain(self.network.non_trainable_variables), "slots": plain(self.slots),
                 "updates": self.updates.value}
        if self.uses_alignment:
            items["predictions"] = self.predictions.value
        items |= {f"state_{name}": v.value for name, v in self.method_state.items()}
        if self.loss_scaling:
            items |= {"loss_scale": self.loss_scale.value, "good_steps": self.good_steps.value}
        if self.augmenter is not None and self.augmenter.uses_probe:
            items["rates"] = self.augmenter.rates
        return items

    def fingerprint(self) -> str:
        """Returns a hash of everything in the checkpoint: equal if and only if two models are, bit by bit."""
        digest = hashlib.sha256()
        for variable in tf.nest.flatten(self.checkpoint_items()):
            digest.update(variable.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ClassicOptions(SSLModel.Options):
    """Hyperparameters of the methods before FixMatch: as many unlabelled as labelled images, no strong views."""

    uratio: int = option(1, "unlabelled images per labelled one")
    # A class variable takes a hyperparameter away: these methods weight their losses by other names.
    wu: ClassVar[float] = 0.0
    K: ClassVar[int] = 0


@dataclass(frozen=True, kw_only=True)
class ConsistencyOptions(ClassicOptions):
    """Hyperparameters of the methods whose unlabelled loss grows over a first part of the run."""

    warmup_pos: float = option(0.4, "part of the run over which the unlabelled loss's weight grows linearly")


class AdamModel(SSLModel):
    """Base of the methods that train with Adam at a constant rate and decay the kernels apart from the loss."""

    cosine_decay = False
    decoupled_weight_decay = True
    optimizer_rule = optim.Adam()

    @dataclass(frozen=True, kw_only=True)
    class Options(ConsistencyOptions):
        """Hyperparameters of Adam."""

        lr: float = option(0.002, "learning rate of Adam, constant")
        wd: float = option(0.02, "decoupled weight decay: each update takes wd * lr of the kernels away")


def len_static(tensor: tf.Tensor) -> int:
    """The static size of the first dimension."""
    return tensor.shape[0]


def pseudo_label_quality(weak: tf.Tensor, views: dict, mask: tf.Tensor | None = None) -> Scalars:
    """Compares the pseudo-labels argmax(weak) with the held-back labels (-1: unknown), of all and of the used images.

    As shares of images that count and of images that count and are right: their quotient is the accuracy over any
    number of batches, also where a single batch has none. Without labels there is nothing to say. Of several views of
    the images, the first counts.
    """
    if "unlabeled_label" not in views:
        return {}
    labels = views["unlabeled_label"]
    mask = tf.ones(labels.shape) if mask is None else mask[:len_static(labels)]
    known = tf.cast(labels >= 0, tf.float32)
    correct = known * tf.cast(tf.argmax(weak[:len_static(labels)], -1, labels.dtype) == labels, tf.float32)
    return {"monitors/pseudo_known": tf.reduce_mean(known),
            "monitors/pseudo_known_correct": tf.reduce_mean(correct),
            "monitors/pseudo_used": tf.reduce_mean(known * mask),
            "monitors/pseudo_used_correct": tf.reduce_mean(correct * mask)}
