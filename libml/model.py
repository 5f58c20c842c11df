"""The semi-supervised model: one training step with its augmentation, loss, optimiser, averages and probe."""
from __future__ import annotations

import hashlib
import inspect
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from libml import augment, losses, monitors, optim
from libml.config import option
from libml.lazy import keras, tf

ALIGNMENT_LENGTH = 128  # batches in the moving average of predictions
TrainState = dict  # what `SSLModel.read_state` returns: tensors, nested like `checkpoint_items`

if TYPE_CHECKING:
    from libml.augment import Augmenter

    Scalars = dict[str, tf.Tensor]
    from keras import Model as _KerasModel
else:
    class _KerasModel:
        """Holds the place of keras.Model until the first model is made."""


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


def _warn_of_onednn(network: keras.Model) -> None:
    """See `RunConfig.trusts_onednn`."""
    from libml import distribute  # needs TensorFlow

    if getattr(network, "trusts_onednn", False):
        return
    channels = {size for v in network.trainable_variables if v.name == "kernel" and len(v.shape) == 4
                for size in v.shape[2:]} - {1, 3}  # grey and coloured images
    if any(size % 16 for size in channels) and distribute.onednn_is_on():
        warnings.warn(f"{type(network).__name__} has convolutions with {min(c for c in channels if c % 16)} channels: "
                      "oneDNN, which TensorFlow uses here, computes some gradients wrong unless channels are multiples "
                      "of 16. Set TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported.", stacklevel=3)


@dataclass(frozen=True)
class Equal:
    """Initial value of state that every replica computes alike, from gathered values: it is not averaged."""

    value: np.ndarray


class Step:
    """What a loss may use within one update: forward passes, seeds, state, the time. Lives while the step is traced.

    Attributes:
        images_seen: labelled images before this update.
        state: the method's own state by name (see `SSLModel.initial_state`).
        new_state: what the state becomes; starts as a copy of `state`, and the loss replaces entries.
    """

    def __init__(self, model: SSLModel, seed: tf.Tensor, state: TrainState):
        self.model = model
        self.images_seen = state["updates"] * model.options.batch
        self.weights, self.ema_weights, self.statistics = state["weights"], state["ema"], state["statistics"]
        self.new_statistics = self.statistics
        self.predictions, self.mean_prediction = state.get("predictions"), None
        self.state = {name: state[f"state_{name}"] for name in model.method_state}
        self.new_state = dict(self.state)
        self.pseudo_labels: tuple[tf.Tensor, tf.Tensor | None] | None = None
        self._seed, self._seeds_given = seed, 0

    def new_seed(self) -> tf.Tensor:
        """Returns a seed [2] that nothing else in this step uses."""
        self._seeds_given += 1
        return fold_in(self._seed, self._seeds_given)

    def forward(self, images: tf.Tensor, *, outputs: tuple[str, ...] | None = None, training: bool = True,
                update_statistics: bool = True, ema: bool = False, **options):
        """Runs the network once.

        Args:
            images: [N, H, W, channels] float views.
            outputs: what to return, as a tuple: "logits", "embedding", or heads by name. None: the class logits alone.
            training: whether batch normalisation uses the statistics of this batch.
            update_statistics: whether this (training) pass moves batch normalisation's averages.
            ema: whether to use the averaged weights instead of the current ones.
            **options: further arguments of the network's call, such as `mc_dropout`.
        """
        weights = self.ema_weights if ema else self.weights
        if self.model.network_takes_seed:
            options["seed"] = self.new_seed()
        if outputs is not None:
            if not self.model.network_takes_outputs:
                raise ValueError(f"outputs={outputs}: {type(self.model.network).__name__} gives class logits only; use "
                                 "a network of libml.models, or one whose call takes `outputs`.")
            options["outputs"] = tuple(outputs)
        found, statistics = self.model.network.stateless_call(
            weights, self.new_statistics if training else self.statistics, self.model.normalize(images),
            training=training, **options)
        if training and update_statistics and not ema:
            self.new_statistics = statistics
        return found

    def ramp(self, images: float) -> tf.Tensor:
        """Rises from 0 to 1 while the given number of labelled images is seen; is 1 if that number is 0."""
        if images <= 0:
            return tf.ones([])
        return tf.clip_by_value(tf.cast(self.images_seen, tf.float32) / images, 0.0, 1.0)

    def record_pseudo_labels(self, scores: tf.Tensor, mask: tf.Tensor | None = None) -> None:
        """Reports the pseudo-labels argmax(scores [N, C]) and which are used (mask [N]; None: all), for the log."""
        self.pseudo_labels = scores, mask

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates a tensor [n, …] over all replicas, in their order; gradients flow back."""
        context = self._communication()
        if context is None:
            return tensor
        whole = [context.num_replicas_in_sync * tensor.shape[0], *tensor.shape[1:]]
        return tf.ensure_shape(context.all_gather(tensor, axis=0), whole)

    def mean(self, tensor: tf.Tensor) -> tf.Tensor:
        """Averages a float tensor over all replicas at once, for statistics that this very step uses."""
        context = self._communication()
        return tensor if context is None else context.all_reduce(tf.distribute.ReduceOp.MEAN, tensor)

    def _communication(self):
        """The context of this replica, or None where it is the only one."""
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return None
        if self.model.jit:  # collectives cannot be part of a function that XLA compiles for one device
            raise ValueError(f"--jit cannot compile {type(self.model).__name__}'s communication between "
                             f"{context.num_replicas_in_sync} replicas; leave it out.")
        return context


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """Hyperparameters that all methods have."""

    batch: int = option(64, "B: labelled images per update", low=1, named=True)
    uratio: int = option(7, "mu: unlabelled images per labelled one", low=1, named=True,
                        needs="unlabelled images")
    lr: float = option(0.03, "eta: initial learning rate; falls as cos(7 pi t / 16), t from 0 to 1 over the run",
                       above=0, named=True)
    wd: float = option(0.0005, "weight decay: factor of 0.5 ||W||^2 over the kernels", low=0, named=True)
    ema: float = option(0.999, "decay of the average of the weights that is evaluated", low=0, high=1)
    p_unlabeled: str = option("", "class prior p~ for distribution alignment, comma-separated, or `labels`: the shares "
                             "of the labelled images, each class counted once more; uniform by default",
                             needs="alignment")


class SSLModel(_KerasModel):
    """A classifier trained on a few labelled and many unlabelled images.

    A method is a subclass: its hyperparameters in `Options`, and `unlabeled_loss` (most methods) or the wider
    `compute_losses`; class attributes, `views_per_image`, `initial_state` and `presets` say what else is special.

    Args:
        network: any built Keras classifier from float images to logits.
        num_classes: C.
        options: an instance of the class's `Options`.
        augmenter: makes the views; None when only `train_on_views` is used.
        total_images: horizon of the learning-rate schedule, in labelled images.
        seed: of everything random in training.
        image_statistics: per-channel mean and standard deviation to whiten with, or None.
        loss_scaling: scales the loss dynamically, for float16.
        jit: compiles forward and backward pass with XLA.
        set_sizes: the numbers of labelled and unlabelled images, for state with an entry per image.
    """

    uses_alignment = False  # whether the loss calls `aligned`
    uses_unlabeled = True
    uses_all_labels = False  # whether the command line turns any dataset into its fully labelled version
    strong_labeled = False  # whether labelled images train on strong views
    cosine_decay = True  # of the learning rate; else it is constant
    decoupled_weight_decay = False  # kernels shrink by wd * lr each step, instead of L2 in the loss
    optimizer_rule: optim.Nesterov | optim.Adam = optim.Nesterov()
    needs_float32 = False  # whether half precision would break it

    @dataclass(frozen=True, kw_only=True)
    class Options(SharedOptions):
        """Hyperparameters of FixMatch and its relatives."""

        wu: float = option(1.0, "lambda_u: weight of the unlabelled loss", low=0, named=True,
                           needs="unlabelled images")
        K: int = option(1, "strong views per unlabelled image", low=1, needs="unlabelled images")

    def __new__(cls, *args, **kwargs):
        # Help and configurations need the classes of all methods, but not Keras, which takes seconds to import: it
        # becomes the base when the first model is made. Subclasses inherit it at the same moment.
        if SSLModel.__bases__ != (keras.Model,):
            SSLModel.__bases__ = (keras.Model,)
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, network: keras.Model, num_classes: int, *, options=None, augmenter: Augmenter | None = None,
                 total_images: float = 65536 << 10, seed: int = 0, image_statistics=None, loss_scaling: bool = False,
                 jit: bool = False, set_sizes: tuple[int, int] = (0, 0)):
        super().__init__(name=type(self).__name__.lower())
        self.network, self.num_classes = network, num_classes
        self.augmenter: Any = augmenter
        self.options: Any = options or self.Options()
        self.total_images, self.seed, self.image_statistics = total_images, seed, image_statistics
        self.num_labeled, self.num_unlabeled = set_sizes
        arguments = inspect.signature(network.call).parameters
        self.network_takes_seed, self.network_takes_outputs = "seed" in arguments, "outputs" in arguments

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
        initial = self.initial_state()
        self.equal_state = tuple(name for name, value in initial.items() if isinstance(value, Equal))
        self.method_state = {}
        for name, value in initial.items():
            value = np.asarray(value.value if isinstance(value, Equal) else value)
            self.method_state[name] = state(name, value.shape, "zeros", value.dtype.name)
            self.method_state[name].assign(value)
        self.kernel_indices = [i for i, v in enumerate(trainable) if v.name.endswith("kernel")]
        self.jit, self._compiled = jit, tf.function(self._compute_gradients, jit_compile=True)
        self.built = True

    def _class_prior(self) -> np.ndarray:
        if not self.options.p_unlabeled:
            return np.full(self.num_classes, 1 / self.num_classes, np.float32)
        try:
            prior = np.array([float(part) for part in self.options.p_unlabeled.split(",")], np.float32)
        except ValueError:
            prior = np.zeros(0, np.float32)
        if prior.shape != (self.num_classes,) or not (prior >= 0).all() or not 0 < prior.sum() < np.inf:
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
        """The numbers of weak and strong views per unlabelled image; all first views come before all second ones."""
        return 1, self.options.K

    def initial_state(self) -> dict[str, np.ndarray | Equal]:
        """Returns the method's own state by name, of any dtype: `Step.state` has it, `Step.new_state` takes its update.

        Floats are averaged over replicas after the step. What is not a float, or `Equal`, is kept as it is: every
        replica must compute the same, from what `Step.gather` and `Step.mean` return.
        """
        return {}

    def unlabeled_loss(self, weak: tf.Tensor, strong: tf.Tensor, views: dict, step: Step):
        """Returns (loss [N], mask [N], monitors) from weak and strong logits [N, C]."""
        raise TypeError(f"{type(self).__name__} defines neither unlabeled_loss nor compute_losses.")

    def compute_losses(self, views: dict, step: Step) -> tuple[tf.Tensor, Scalars]:
        """Returns the loss without weight decay, and scalars to log: labelled CE + wu * masked unlabelled loss."""
        x, weak, strong = self.forward_together(views, step)
        xe = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        loss, mask, scalars = self.unlabeled_loss(weak, strong, views, step)
        xeu = tf.reduce_mean(loss * mask)
        step.record_pseudo_labels(weak, mask)
        return xe + self.options.wu * xeu, {"losses/xe": xe, "losses/xeu": xeu, "monitors/mask": tf.reduce_mean(mask),
                                            **scalars}

    def forward_together(self, views: dict, step: Step, outputs: tuple[str, ...] | None = None) -> tuple:
        """Logits of labelled, weak and strong views from one forward pass, the weak ones repeated for K strong views.

        With `outputs` each of the three is a tuple of them. Batch normalisation sees all views together.
        """
        parts = [views["labeled"], views["weak"], views["strong"]]
        sizes = [part.shape[0] for part in parts]

        def split(tensor):
            x, weak, strong = tf.split(tensor, sizes)
            return x, tf.tile(weak, [sizes[2] // sizes[1]] + [1] * (len(weak.shape) - 1)), strong

        found = step.forward(tf.concat(parts, 0), outputs=outputs)
        return split(found) if outputs is None else tuple(zip(*map(split, found), strict=True))

    def labeled_cross_entropy(self, views: dict, step: Step) -> tf.Tensor:
        """Mean cross-entropy of a forward pass over the labelled images alone, which moves the moving statistics."""
        return tf.reduce_mean(losses.cross_entropy(step.forward(views["labeled"]), views["label"]))

    # Distribution alignment.

    def aligned(self, q: tf.Tensor, step: Step, prior: tf.Tensor | None = None) -> tf.Tensor:
        """Returns q weighted by class prior over moving average of predictions, normalised (the paper's Eq. 6).

        The average is that of earlier batches; this batch's mean enters it after the step. Without `prior` the one of
        `--p_unlabeled` counts.
        """
        if not self.uses_alignment:
            raise ValueError(f"{type(self).__name__} calls aligned(): set uses_alignment = True in the class, so that "
                             "it has the moving average of predictions.")
        step.mean_prediction = tf.reduce_mean(q, 0)
        p_model = tf.reduce_mean(step.predictions, 0)
        prior = self.class_prior if prior is None else prior
        return losses.align(q, p_data=prior, p_model=p_model / tf.reduce_sum(p_model))

    # One update.

    def read_state(self) -> TrainState:
        """Reads all that an update depends on and changes, once.

        Whatever uses a value must use this reading of it, from which its new value is computed too. Then data flow
        alone puts every use before the change. A second read would be ordered by a control dependency only, and
        TensorFlow's graph optimiser drops some of those: it has been seen to read what the same step had written.
        """
        return tf.nest.map_structure(tf.convert_to_tensor, self.checkpoint_items())

    def write_state(self, new: TrainState) -> None:
        """Assigns new values, equal on all replicas, with one synchronisation for all variables together."""
        items = self.checkpoint_items()
        tf.nest.assert_same_structure(items, new)
        variables, values = tf.nest.flatten(items), tf.nest.flatten(new)
        if not tf.distribute.has_strategy():
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            return

        def assign(strategy, *values):
            for variable, value in zip(variables, values, strict=True):
                strategy.extended.update(variable, lambda v, x: v.assign(x), args=(value,), group=False)

        tf.distribute.get_replica_context().merge_call(assign, args=tuple(values))

    def normalize(self, images: tf.Tensor) -> tf.Tensor:
        """Whitens float images if asked to."""
        if self.image_statistics is None:
            return images
        mean, deviation = self.image_statistics
        return (images - mean) / deviation

    def step_seed(self, state: TrainState) -> tf.Tensor:
        """Returns the seed [2] of this update on this replica."""
        seed = tf.stack([tf.constant(self.seed, tf.int64), state["updates"]])
        context = tf.distribute.get_replica_context()
        return fold_in(seed, 0 if context is None else context.replica_id_in_sync_group)

    def make_views(self, batch: dict, state: TrainState | None = None) -> dict:
        """Makes float views of a batch of uint8 images: labeled, weak, strong, and the probe of CTAugment."""
        state = self.read_state() if state is None else state
        seed, rates = fold_in(self.step_seed(state), 1), state.get("rates")
        labeled = self.augmenter.labeled(batch["labeled"], fold_in(seed, 1))
        views = {"labeled": augment.to_float(labeled), "label": batch["label"]}
        if self.strong_labeled:
            views["labeled"] = self.augmenter.strong(batch["labeled"], fold_in(seed, 4), rates)
        num_weak, num_strong = self.views_per_image if self.uses_unlabeled else (0, 0)
        if num_weak:
            seeds = [fold_in(seed, 2)]
            seeds += [fold_in(seeds[0], k) for k in range(1, num_weak)]
            weak = [self.augmenter.weak(batch["unlabeled"], weak_seed) for weak_seed in seeds]
            views["weak"] = augment.to_float(tf.concat(weak, 0))
            views["unlabeled_label"] = batch["unlabeled_label"]
        if num_strong:
            strong = [self.augmenter.strong(batch["unlabeled"], fold_in(seed, 10 + k), rates)
                      for k in range(num_strong)]
            views["strong"] = tf.concat(strong, 0)
        if self.augmenter.learns_rates and num_strong:
            probe, policy = self.augmenter.probe(labeled, fold_in(seed, 3))
            views["probe"] = {"images": augment.to_float(probe), "policy": policy}
        return views | {key: batch[key] for key in ("labeled_index", "unlabeled_index") if key in batch}

    def train_step(self, batch: dict) -> Scalars:
        """Runs one update on a batch of uint8 images; returns scalars to log, equal on all replicas."""
        state = self.read_state()
        return self.train_on_views(self.make_views(batch, state), state)

    def train_on_views(self, views: dict, state: TrainState | None = None) -> Scalars:
        """Runs one update on ready float views (`labeled`, `label`, `weak`, `strong`, …)."""
        state = self.read_state() if state is None else state
        found = self._gradients(views, state)
        equal = {name: found["state"].pop(name) for name in self.equal_state}
        found = average_over_replicas(found)
        lr = self.learning_rate(state["updates"] * self.options.batch)
        scalars = {**found["scalars"], "monitors/lr": lr}

        weights = list(state["weights"])
        if self.decoupled_weight_decay:
            for i in self.kernel_indices:
                weights[i] *= 1 - self.options.wd * lr
        weights, slots = self.optimizer_rule.update(weights, found["gradients"], state["slots"], lr, state["updates"])
        averages = [a - (1 - self.options.ema) * (a - w) for a, w in zip(state["ema"], weights, strict=True)]
        new = {"weights": weights, "slots": slots, "ema": averages, "statistics": found["statistics"],
               **{f"state_{name}": value for name, value in (found["state"] | equal).items()}}
        if self.uses_alignment:
            new["predictions"] = tf.concat([state["predictions"][1:], found["prediction"][None]], 0)
        if self.loss_scaling:
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in found["gradients"]])
            old = {name: state[name] for name in new}
            new = tf.nest.map_structure(lambda n, o: tf.where(finite, n, o), new, old) | self._scale(finite, state)
            scalars["monitors/loss_scale"] = new["loss_scale"]
        # These go on even where float16 gradients overflowed and the update was left out.
        new["updates"] = state["updates"] + 1
        if "rates" in state:
            new["rates"] = self._learned_rates(views, state) if "probe" in views else state["rates"]
        self.write_state(new)
        return scalars

    def trial_loss(self, batch: dict) -> tf.Tensor:
        """Returns the loss of a batch on this replica and changes nothing: shows whether the step can be compiled."""
        state = self.read_state()
        return self._gradients(self.make_views(batch, state), state)["scalars"]["losses/total"]

    def learning_rate(self, images_seen: tf.Tensor) -> tf.Tensor:
        """lr * cos(7 pi / 16 * images / horizon), or lr for methods without decay."""
        if not self.cosine_decay:
            return tf.constant(self.options.lr)
        progress = tf.cast(images_seen, tf.float32) / self.total_images
        return self.options.lr * tf.cos(progress * (7 * math.pi / 16))

    def _gradients(self, views: dict, state: TrainState) -> dict:
        _warn_of_onednn(self.network)
        views = dict(views)
        views.pop("probe", None)
        held_back = views.pop("unlabeled_label", None)
        compute = self._compiled if self.jit else self._compute_gradients
        used = {key: value for key, value in state.items() if key not in ("slots", "rates")}
        return compute(views, fold_in(self.step_seed(state), 2), used, held_back)

    def _compute_gradients(self, views: dict, seed: tf.Tensor, state: TrainState, held_back: tf.Tensor | None = None,
                           ) -> dict:
        """Forward and backward pass of one replica; `held_back` labels of unlabelled images are for monitors only."""
        step = Step(self, seed, state)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(step.weights)
            total, scalars = self.compute_losses(views, step)
            decay = losses.weight_decay([step.weights[i] for i in self.kernel_indices])
            if not self.decoupled_weight_decay:
                total += self.options.wd * decay
            scaled = total * state["loss_scale"] if self.loss_scaling else total
        gradients = tape.gradient(scaled, step.weights, unconnected_gradients="zero")
        if self.loss_scaling:
            gradients = [g / state["loss_scale"] for g in gradients]
        if step.new_state.keys() != step.state.keys():
            raise ValueError(f"{type(self).__name__} left state {sorted(step.new_state)} in step.new_state; "
                             f"initial_state() declares {sorted(step.state)}.")
        scalars = {**scalars, "losses/wd": decay, "losses/total": total}
        if step.pseudo_labels is not None and held_back is not None:
            scores, mask = step.pseudo_labels
            scalars |= monitors.pseudo_label_quality(scores, held_back, mask)
        found = {"gradients": gradients, "scalars": scalars, "statistics": step.new_statistics,
                 "state": step.new_state}
        if self.uses_alignment:
            if step.mean_prediction is None:
                raise ValueError(f"{type(self).__name__} sets uses_alignment, but its loss does not call "
                                 "self.aligned(q, step): call it, or leave uses_alignment out.")
            found["prediction"] = step.mean_prediction
        return found

    def _scale(self, finite: tf.Tensor, state: TrainState) -> dict:
        """The loss scale after this step: half after an overflow, twice after 2000 steps without one."""
        scale, good = state["loss_scale"], state["good_steps"]
        grown = tf.where(good >= 1999, tf.minimum(2 * scale, 2.0 ** 24), scale)
        return {"loss_scale": tf.where(finite, grown, tf.maximum(scale / 2, 1.0)),
                "good_steps": tf.where(finite & (good < 1999), good + 1, tf.zeros_like(good))}

    def _learned_rates(self, views: dict, state: TrainState) -> tf.Tensor:
        probe = views["probe"]
        probabilities = tf.nn.softmax(self._infer(probe["images"], state["ema"], state["statistics"]))
        return self.augmenter.updated_rates(probe["policy"], probabilities, views["label"], state["rates"])

    # Inference.

    def infer(self, images: tf.Tensor, ema: bool = True) -> tf.Tensor:
        """Returns logits of float images from the averaged (or raw) weights and the moving batch-norm statistics."""
        items = self.checkpoint_items()
        variables = items["ema" if ema else "weights"], items["statistics"]
        return self._infer(images, *tf.nest.map_structure(tf.convert_to_tensor, variables))

    def _infer(self, images: tf.Tensor, weights: list[tf.Tensor], statistics: list[tf.Tensor]) -> tf.Tensor:
        logits, _ = self.network.stateless_call(weights, statistics, self.normalize(images), training=False)
        return tf.cast(logits, tf.float32)

    def call(self, images, training=False):
        """Logits of the evaluated model, of bytes or of floats in [-1, 1]; `fit` and `predict` of Keras call this."""
        del training
        return self.infer(augment.to_float(images) if images.dtype == "uint8" else images)

    def checkpoint_items(self) -> dict:
        """Returns everything that the rest of a training run depends on, as trackable objects."""
        def plain(variables):
            return [v.value for v in variables]  # Keras wraps the variable that tf.distribute and checkpoints know

        items = {"weights": plain(self.network.trainable_variables), "ema": plain(self.ema_weights),
                 "statistics": plain(self.network.non_trainable_variables), "slots": plain(self.slots),
                 "updates": self.updates.value}
        if self.uses_alignment:
            items["predictions"] = self.predictions.value
        items |= {f"state_{name}": v.value for name, v in self.method_state.items()}
        if self.loss_scaling:
            items |= {"loss_scale": self.loss_scale.value, "good_steps": self.good_steps.value}
        if self.augmenter is not None and self.augmenter.learns_rates:
            items["rates"] = self.augmenter.rates
        return items

    def fingerprint(self) -> str:
        """Returns a hash of everything in the checkpoint: equal if and only if two models are, bit by bit."""
        digest = hashlib.sha256()
        for variable in tf.nest.flatten(self.checkpoint_items()):
            digest.update(variable.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class PreFixMatchOptions(SharedOptions):
    """Hyperparameters of the methods before FixMatch: as many unlabelled as labelled images, other loss weights."""

    uratio: int = option(1, "unlabelled images per labelled one", low=1, named=True)


@dataclass(frozen=True, kw_only=True)
class ConsistencyOptions(PreFixMatchOptions):
    """Hyperparameters of the methods whose unlabelled loss gains weight over the first part of the run."""

    warmup_pos: float = option(0.4, "part of the run over which the unlabelled loss's weight grows linearly", low=0,
                               high=1)


class AdamModel(SSLModel):
    """Base of the methods that train with Adam at a constant rate and decay the kernels apart from the loss."""

    cosine_decay = False
    decoupled_weight_decay = True
    optimizer_rule = optim.Adam()
    views_per_image = (1, 0)

    @dataclass(frozen=True, kw_only=True)
    class Options(ConsistencyOptions):
        """Hyperparameters of Adam."""

        lr: float = option(0.002, "learning rate of Adam, constant", above=0, named=True)
        wd: float = option(0.02, "decoupled weight decay: each update takes wd * lr of the kernels away", low=0,
                           named=True)
