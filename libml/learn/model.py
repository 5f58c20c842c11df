"""The semi-supervised model: one training step with its augmentation, loss, optimiser, averages and probe."""
from __future__ import annotations

import hashlib
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from libml import augment
from libml.config import make_options, option
from libml.lazy import keras, tf
from libml.learn import losses, monitors, optim
from libml.learn.keras_model import KerasModel, Optimizer, check_passes
from libml.learn.packing import Packing
from libml.networks.custom import check_network

ALIGNMENT_LENGTH = 128  # batches in the moving average of predictions
TrainState = dict  # what `SSLModel.read_state` returns: tensors, nested like `checkpoint_items`

if TYPE_CHECKING:
    from libml.augment import Augmenter

    Scalars = dict[str, tf.Tensor]


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
    from libml.devices import distribute  # needs TensorFlow

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


@dataclass(frozen=True, kw_only=True)
class Group:
    """Weights that are trained alike.

    Attributes:
        indices: positions among the network's weights.
        rule: makes new weights of gradients.
        learning_rate: from labelled images seen to the rate.
        decayed: positions of the weights that decay.
        wd: factor of 0.5 ||W||^2 in the loss; if decoupled, each update takes wd * rate of the weights away instead.
        decoupled: which of the two.
    """

    indices: Sequence[int]
    rule: optim.Nesterov | optim.Adam
    learning_rate: Callable[[tf.Tensor], tf.Tensor]
    decayed: Sequence[int]
    wd: float
    decoupled: bool


class Step:
    """What a loss may use within one update: forward passes, seeds, state, the time. Lives while the step is traced.

    Attributes:
        images_seen: labelled images before this update.
        state: the method's own state by name (see `SSLModel.initial_state`).
        new_state: what the state becomes; starts as a copy of `state`, and the loss replaces entries.
    """

    def __init__(self, model: SSLModel, seed: tf.Tensor, state: TrainState):
        self.model = model
        self.updates, self.slots = state["updates"], state["slots"]
        self.loss_scale = state.get("loss_scale")
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
                update_statistics: bool = True, ema: bool = False, weights: Sequence | None = None, **options):
        """Runs the network once.

        Args:
            images: [N, H, W, channels] float views.
            outputs: what to return, as a tuple: "logits", "embedding", or heads by name. None: the class logits alone.
            training: whether batch normalisation uses the statistics of this batch.
            update_statistics: whether this (training) pass moves batch normalisation's averages.
            ema: whether to use the averaged weights instead of the current ones.
            weights: to be used instead of the current ones.
            **options: further arguments of the network's call, such as `mc_dropout`.
        """
        weights = self.ema_weights if ema else weights or self.weights
        check_passes(self.model, self.model.network, options)
        if self.model.network_takes_seed:
            options["seed"] = self.new_seed()
        if outputs is not None:
            if not self.model.network_takes_outputs:
                raise ValueError(f"outputs={outputs}: {type(self.model.network).__name__} gives class logits only; use "
                                 "a network of libml.networks, or one whose call takes `outputs`.")
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

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, weights: Sequence) -> list[tf.Tensor]:
        """Returns the gradients of a loss on this replica, scaled on the way where half precision needs it."""
        found = tape.gradient(loss, weights, output_gradients=self.loss_scale, unconnected_gradients="zero")
        return found if self.loss_scale is None else [gradient / self.loss_scale for gradient in found]

    def updated_weights(self, group: str, gradients: Sequence) -> list[tf.Tensor]:
        """Returns all weights as they will be once a group has taken its step along its gradients and decayed."""
        model, weights = self.model, list(self.weights)
        state = {"weights": model.packing.pack(weights), "slots": model.pack_slots(self.slots), "updates": self.updates}
        by_position = dict(zip(model.groups[group].indices, gradients, strict=True))
        vectors = model.vectors[group]
        new, *_ = model.updated_group(group, state, [model.packing.vector(by_position, i) for i in vectors])
        for number, vector in zip(vectors, new, strict=True):
            for i, weight in model.packing.tensors(vector, number).items():
                weights[i] = weight
        return weights

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

    def mean(self, tensor: Any) -> Any:
        """Averages a float tensor, or a list of them, over all replicas at once, for what this very step uses."""
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


class SSLModel(KerasModel):
    """A classifier trained on a few labelled and many unlabelled images.

    A method is a subclass: its hyperparameters in `Options`, and `unlabeled_loss` (most methods) or the wider
    `compute_losses`; class attributes, `views_per_image`, `initial_state`, `weight_groups` and `presets` say what else
    is special.

    Args:
        network: any built Keras classifier from float images in [-1, 1] to logits.
        num_classes: C.
        options: an instance of the class's `Options`.
        augmenter: makes the views (`SSLData.augmenter`); None when only `train_on_views` is used.
        total_images: horizon of the learning-rate schedule, in labelled images.
        seed: of everything random in training.
        image_statistics: per-channel mean and standard deviation to whiten with, or None.
        loss_scaling: scales the loss dynamically, for float16.
        jit: compiles forward and backward pass with XLA.
        set_sizes: the numbers of labelled and unlabelled images, for state with an entry per image.
        calibration: bytes [K, H, W, channels] and classes [K] of labelled images that are not trained on.
    """

    uses_alignment = False  # whether the loss calls `aligned`
    uses_unlabeled = True
    uses_all_labels = False  # whether the command line turns any dataset into its fully labelled version
    strong_labeled: Any = False  # whether labelled images train on strong views
    strong_labeled_too = False  # whether there are strong views of labelled images as well, views["labeled_strong"]
    cosine_decay = True  # of the learning rate; else it is constant
    decoupled_weight_decay = False  # kernels shrink by wd * lr each step, instead of L2 in the loss
    needs_float32 = False  # whether half precision would break it
    pass_options: tuple[str, ...] = ()  # what its passes ask of the network besides logits, such as mc_dropout
    communicates = False  # whether the loss calls `Step.gather` or `Step.mean`

    @dataclass(frozen=True, kw_only=True)
    class Options(SharedOptions):
        """Hyperparameters of FixMatch and its relatives."""

        wu: float = option(1.0, "lambda_u: weight of the unlabelled loss", low=0, named=True,
                           needs="unlabelled images")
        K: int = option(1, "strong views per unlabelled image", low=1, needs="unlabelled images")

    def __init__(self, network: keras.Model, num_classes: int, *, options=None, augmenter: Augmenter | None = None,
                 total_images: float = 65536 << 10, seed: int = 0, image_statistics=None, loss_scaling: bool = False,
                 jit: bool = False, set_sizes: tuple[int, int] = (0, 0),
                 calibration: tuple[np.ndarray, np.ndarray] | None = None, **hyperparameters):
        super().__init__(name=type(self).__name__.lower())
        check_network(network, num_classes)
        check_passes(self, network, self.pass_options)
        self.num_classes, self.augmenter = num_classes, augmenter
        self.options: Any = make_options(type(self), options, hyperparameters)
        self.total_images, self.seed, self.image_statistics = total_images, seed, image_statistics
        self.network = network = self.with_heads(network)
        self.num_labeled, self.num_unlabeled = set_sizes
        arguments = inspect.signature(network.call).parameters
        self.network_takes_seed, self.network_takes_outputs = "seed" in arguments, "outputs" in arguments

        def state(name, shape, initializer, dtype="float32"):
            return self.add_weight(name=name, shape=shape, initializer=initializer, dtype=dtype, trainable=False,
                                   autocast=False, aggregation="only_first_replica")

        trainable = network.trainable_variables
        self.updates = state("updates", (), "zeros", "int64")
        self.ema_weights = [state(f"ema_{i}", v.shape, "zeros") for i, v in enumerate(trainable)]
        self.groups = self.weight_groups()
        self.slots: list = []
        self._slot_ranges: dict[str, tuple[int, int]] = {}
        for name, group in self.groups.items():
            first = len(self.slots)
            self.slots += [state(f"slot_{i}", trainable[i].shape, "zeros") for _ in range(group.rule.slots_per_weight)
                           for i in group.indices]
            self._slot_ranges[name] = first, len(self.slots)
        if sorted(i for group in self.groups.values() for i in group.indices) != list(range(len(trainable))):
            raise ValueError(f"{type(self).__name__}.weight_groups() must have each of the network's weights once.")
        self._plan_vectors()
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
        self.calibration_classes = np.zeros(0, np.int64)
        if calibration is not None and len(calibration[1]):  # on every device, in no checkpoint
            images, self.calibration_classes = calibration
            self.calibration_images = state("calibration", images.shape, "zeros", "uint8")
            self.calibration_images.assign(images)
        initial = self.initial_state()
        self.equal_state = tuple(name for name, value in initial.items() if isinstance(value, Equal))
        self.method_state = {}
        for name, value in initial.items():
            value = np.asarray(value.value if isinstance(value, Equal) else value)
            self.method_state[name] = state(name, value.shape, "zeros", value.dtype.name)
            self.method_state[name].assign(value)
        self.jit, self._compiled = jit, tf.function(self._compute_gradients, jit_compile=True, autograph=False)
        self.optimizer = Optimizer(self)
        self.built = True

    def _plan_vectors(self) -> None:
        """Packs what an update treats alike: the weights of each group that decay, and the others; statistics."""
        trainable, statistics = self.network.trainable_variables, self.network.non_trainable_variables
        vectors: dict[tuple, list[int]] = {}
        for name, group in self.groups.items():
            for i in group.indices:
                vectors.setdefault((name, i in group.decayed, trainable[i].dtype), []).append(i)
        self.packing = Packing([v.shape for v in trainable], list(vectors.values()))
        self.vectors = {name: [i for i, key in enumerate(vectors) if key[0] == name] for name in self.groups}
        self.decayed_vectors = {name: [i for i, key in enumerate(vectors) if key[:2] == (name, True)]
                                for name in self.groups}
        self._slot_vectors: dict[str, slice] = {}
        end = 0
        for name, group in self.groups.items():
            first, end = end, end + len(self.vectors[name]) * group.rule.slots_per_weight
            self._slot_vectors[name] = slice(first, end)
        by_dtype: dict[str, list[int]] = {}
        for i, v in enumerate(statistics):
            by_dtype.setdefault(v.dtype, []).append(i)
        self._statistics = Packing([v.shape for v in statistics], list(by_dtype.values()))

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

    def with_heads(self, network: keras.Model) -> keras.Model:
        """Returns the network with what else the method trains."""
        return network

    @classmethod
    def presets(cls, labels: int | None) -> dict:
        """Returns flags that the method changes, where the user said nothing, for a number of labels (None: all)."""
        del labels
        return {}

    @classmethod
    def dataset_presets(cls, dataset: str) -> dict:
        """Returns flags that the method changes, where the user said nothing, for a dataset."""
        del dataset
        return {}

    @property
    def optimizer_rule(self) -> optim.Nesterov | optim.Adam:
        """From gradients to new weights."""
        return optim.Nesterov()

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

    def weight_groups(self) -> dict[str, Group]:
        """Returns groups of weights by name, each weight in one of them; the log's learning rate is the first one's."""
        return {"all": self.group(self.network.trainable_variables)}

    def group(self, variables: Sequence, *, decays: Callable[[Any], bool] = lambda v: v.name.endswith("kernel"),
              **changes) -> Group:
        """Returns the group of some of the network's variables, trained as the class says but for `changes`."""
        own = {id(v) for v in variables}
        indices = [i for i, v in enumerate(self.network.trainable_variables) if id(v) in own]
        decayed = [i for i in indices if decays(self.network.trainable_variables[i])]
        return Group(**{**dict(indices=indices, decayed=decayed, rule=self.optimizer_rule,
                               learning_rate=self.learning_rate, wd=self.options.wd,
                               decoupled=self.decoupled_weight_decay), **changes})

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
        return self._align(q, step.predictions, prior)

    def _align(self, q: tf.Tensor, predictions: tf.Tensor, prior: tf.Tensor | None = None) -> tf.Tensor:
        p_model = tf.reduce_mean(predictions, 0)
        prior = self.class_prior if prior is None else prior
        return losses.align(q, p_data=prior, p_model=p_model / tf.reduce_sum(p_model))

    # Credal sets.

    def credal_set(self, q: tf.Tensor, a: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
        """Returns class y [N] and size alpha [N] of the sets {p : p(y) >= 1 - alpha} of predictions q and aligned a.

        Both are [N, C]. None for methods that have no such sets.
        """
        del q, a
        return None

    def credal_sets(self, images: tf.Tensor, q: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns class, alpha and aligned prediction for predictions q [N, C]; {} for methods without credal sets."""
        a = q = tf.convert_to_tensor(q)
        if self.uses_alignment:
            a = self._align(q, self.predictions.value)
        found = self.credal_set(q, a)
        return {} if found is None else {"class": found[0], "alpha": found[1], "aligned": a}

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

    def pack(self, state: TrainState) -> TrainState:
        """Returns a state with a few vectors in place of many weights, averages, slots and statistics."""
        return state | {"weights": self.packing.pack(state["weights"]), "ema": self.packing.pack(state["ema"]),
                        "slots": self.pack_slots(state["slots"]),
                        "statistics": self._statistics.pack(state["statistics"])}

    def pack_slots(self, slots: Sequence) -> list[tf.Tensor]:
        """Returns the vectors of slots: group by group, and within it slot by slot, as those of the weights."""
        packed = []
        for name, group in self.groups.items():
            first, last = self._slot_ranges[name]
            for start in range(first, last, len(group.indices)):
                by_position = dict(zip(group.indices, slots[start:], strict=False))
                packed += [self.packing.vector(by_position, number) for number in self.vectors[name]]
        return packed

    def unpack(self, state: TrainState) -> TrainState:
        """Returns the state that was packed."""
        slots, vectors = [], iter(state["slots"])
        for name, group in self.groups.items():
            for _ in range(group.rule.slots_per_weight):
                found: dict[int, tf.Tensor] = {}
                for number in self.vectors[name]:
                    found |= self.packing.tensors(next(vectors), number)
                slots += [found[i] for i in group.indices]
        return state | {"weights": self.packing.unpack(state["weights"]), "ema": self.packing.unpack(state["ema"]),
                        "slots": slots, "statistics": self._statistics.unpack(state["statistics"])}

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
        """Makes float views of a batch of uint8 images: labeled, weak, strong, and the probe of CTAugment.

        labeled_strong too, for methods with `strong_labeled_too`.
        """
        state = self.read_state() if state is None else state
        seed, rates = fold_in(self.step_seed(state), 1), state.get("rates")
        labeled = self.augmenter.labeled(batch["labeled"], fold_in(seed, 1))
        views = {"labeled": augment.to_float(labeled), "label": batch["label"]}
        if self.augmenter.spec.labeled_policy:
            views["labeled"] = self.augmenter.strong(batch["labeled"], fold_in(seed, 1), rates, "labeled")
        strong_labeled = "labeled" if self.strong_labeled else "labeled_strong" if self.strong_labeled_too else ""
        if strong_labeled:
            views[strong_labeled] = self.augmenter.strong(batch["labeled"], fold_in(seed, 4), rates, "labeled_strong")
        num_weak, num_strong = self.views_per_image if self.uses_unlabeled else (0, 0)
        if num_weak:
            seeds = [fold_in(seed, 2)]
            seeds += [fold_in(seeds[0], k) for k in range(1, num_weak)]
            weak = [self.augmenter.weak(batch["unlabeled"], weak_seed) for weak_seed in seeds]
            views["weak"] = augment.to_float(tf.concat(weak, 0))
        if num_weak or num_strong:
            views["unlabeled_label"] = batch["unlabeled_label"]
        learns, strong, probed = self.augmenter.learns_rates, [], None
        seeds = [fold_in(seed, 10 + k) for k in range(num_strong)]
        if learns and seeds:
            view, *probed = self.augmenter.strong_and_probe(batch["unlabeled"], seeds.pop(0), labeled, fold_in(seed, 3),
                                                            rates)
            strong.append(view)
        elif learns and strong_labeled:
            probed = self.augmenter.probe(labeled, fold_in(seed, 3))
        strong += [self.augmenter.strong(batch["unlabeled"], strong_seed, rates) for strong_seed in seeds]
        if strong:
            views["strong"] = tf.concat(strong, 0)
        if probed:
            views["probe"] = {"images": augment.to_float(probed[0]), "policy": probed[1]}
        return views | {key: batch[key] for key in ("labeled_index", "unlabeled_index") if key in batch}

    def train_step(self, batch: dict) -> Scalars:
        """Runs one update on a batch of uint8 images; returns scalars to log, equal on all replicas."""
        state = self.read_state()
        return self.epoch_means(self.train_on_views(self.make_views(batch, state), state))

    def train_on_views(self, views: dict, state: TrainState | None = None) -> Scalars:
        """Runs one update on ready float views (`labeled`, `label`, `weak`, `strong`, …)."""
        new, scalars = self._updated(views, self.pack(self.read_state() if state is None else state))
        self.write_state(self.unpack(new))
        return scalars

    def next_state(self, state: TrainState, batch: dict) -> tuple[TrainState, Scalars]:
        """Makes of a packed state, and a batch of uint8 images, the next one; reads and writes no variable.

        A loop that carries the state spares each update the reading and writing.
        """
        return self._updated(self.make_views(batch, state), state)

    def _updated(self, views: dict, packed: TrainState) -> tuple[TrainState, Scalars]:
        state = self.unpack(packed)
        found = self._gradients(views, state)
        equal = {name: found["state"].pop(name) for name in self.equal_state}
        found["gradients"] = self.packing.pack(found["gradients"])
        found["statistics"] = self._statistics.pack(found["statistics"])
        found = average_over_replicas(found)
        scalars, weights, slots = dict(found["scalars"]), list(packed["weights"]), []
        scalars["losses/wd"] = tf.zeros([])
        for number, (name, group) in enumerate(self.groups.items()):
            own = self.vectors[name]
            new_weights, new_slots, lr = self.updated_group(name, packed, [found["gradients"][i] for i in own])
            for i, weight in zip(own, new_weights, strict=True):
                weights[i] = weight
            slots += new_slots
            decay = losses.weight_decay([packed["weights"][i] for i in self.decayed_vectors[name]])
            scalars["losses/wd"] += decay
            scalars["losses/total"] += 0.0 if group.decoupled else group.wd * decay
            scalars[f"monitors/lr_{name}" if number else "monitors/lr"] = lr
        decay = self.ema_decay(packed["updates"])
        averages = [a - (1 - decay) * (a - w) for a, w in zip(packed["ema"], weights, strict=True)]
        new = {"weights": weights, "slots": slots, "ema": averages, "statistics": found["statistics"],
               **{f"state_{name}": value for name, value in (found["state"] | equal).items()}}
        if self.uses_alignment:
            new["predictions"] = tf.concat([packed["predictions"][1:], found["prediction"][None]], 0)
        if self.loss_scaling:
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in found["gradients"]])
            old = {name: packed[name] for name in new}
            new = tf.nest.map_structure(lambda n, o: tf.where(finite, n, o), new, old) | self._scale(finite, packed)
            scalars["monitors/loss_scale"] = new["loss_scale"]
        # These go on even where float16 gradients overflowed and the update was left out.
        new["updates"] = packed["updates"] + 1
        if "rates" in packed:
            new["rates"] = self._learned_rates(views, state) if "probe" in views else packed["rates"]
        return tf.nest.map_structure(lambda n, o: tf.ensure_shape(n, o.shape), new, packed), scalars

    def updated_group(self, name: str, state: TrainState, gradients: Sequence):
        """Returns the vectors of a group's new weights and of its slots, and its learning rate.

        `state` is packed, `gradients` are the vectors of the group's, without weight decay.
        """
        group, own, decayed = self.groups[name], self.vectors[name], self.decayed_vectors[name]
        lr, gradients = group.learning_rate(state["updates"] * self.options.batch), list(gradients)
        weights = [state["weights"][i] for i in own]
        for k, i in enumerate(own):
            if i in decayed and group.decoupled:
                weights[k] *= 1 - group.wd * lr
            elif i in decayed:
                gradients[k] += group.wd * weights[k]
        new, new_slots = group.rule.update(weights, gradients, state["slots"][self._slot_vectors[name]], lr,
                                           state["updates"])
        return new, new_slots, lr

    def ema_decay(self, updates: tf.Tensor) -> float | tf.Tensor:
        """The decay of the average of the weights."""
        del updates
        return self.options.ema

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
        used = {key: value for key, value in state.items() if key != "rates"}
        return compute(views, fold_in(self.step_seed(state), 2), used, held_back)

    def _compute_gradients(self, views: dict, seed: tf.Tensor, state: TrainState, held_back: tf.Tensor | None = None,
                           ) -> dict:
        """Forward and backward pass of one replica; `held_back` labels of unlabelled images are for monitors only."""
        step = Step(self, seed, state)
        gradients, scalars = self.compute_gradients(views, step)
        if step.new_state.keys() != step.state.keys():
            raise ValueError(f"{type(self).__name__} left state {sorted(step.new_state)} in step.new_state; "
                             f"initial_state() declares {sorted(step.state)}.")
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

    def compute_gradients(self, views: dict, step: Step) -> tuple[list[tf.Tensor], Scalars]:
        """Returns the gradients of all weights on this replica, and scalars to log with losses/total among them.

        They are averaged over replicas and weight decay is added to both afterwards. A method whose loss needs weights
        that this very update makes has its own way to them.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(step.weights)
            total, scalars = self.compute_losses(views, step)
        return step.gradients(tape, total, step.weights), {**scalars, "losses/total": total}

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

    def _infer_bytes(self, images: tf.Tensor, weights: list[tf.Tensor], statistics: list[tf.Tensor],
                     chunk: int = 256) -> tf.Tensor:
        """The same of many uint8 images, some at a time."""
        size = images.shape[0]
        chunk = min(chunk, size)
        chunks = tf.gather(images, np.resize(np.arange(size), (-(-size // chunk), chunk)))  # the last one filled up
        logits = tf.map_fn(lambda part: self._infer(augment.to_float(part), weights, statistics), chunks,
                           fn_output_signature=tf.float32)
        return tf.reshape(logits, [-1, self.num_classes])[:size]

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
    views_per_image: Any = (1, 0)

    @dataclass(frozen=True, kw_only=True)
    class Options(ConsistencyOptions):
        """Hyperparameters of Adam."""

        lr: float = option(0.002, "learning rate of Adam, constant", above=0, named=True)
        wd: float = option(0.02, "decoupled weight decay: each update takes wd * lr of the kernels away", low=0,
                           named=True)
