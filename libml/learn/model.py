"""The semi-supervised model: what a method defines, and how others make of it views, losses and predictions."""
from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from libml import augment
from libml.config import make_options, option
from libml.errors import UserError
from libml.lazy import keras, tf
from libml.learn import losses
from libml.learn.keras_model import KerasModel, Optimizer
from libml.learn.options import ConsistencyOptions, FixMatchOptions, SharedOptions
from libml.learn.packing import Packing, by_kind
from libml.learn.step import LossOutput, Step, UnlabeledLoss, check_passes
from libml.learn.update import Adam, Group, Nesterov, PackedState, State, Update
from libml.networks.custom import check_network
from libml.randomness import HOST, fold_in

if TYPE_CHECKING:
    from libml.augment import Augmenter
    from libml.data import SSLData
    from libml.learn.update import Scalars
    from libml.results.predict import Predictions

ALIGNMENT_LENGTH = 128  # batches in the moving average of predictions
# Streams of an update's random numbers: its views', and within that one each kind's. They stay: runs are continued.
VIEW_SEEDS = 1
LABELED, WEAK, PROBE, LABELED_STRONG, STRONG = 1, 2, 3, 4, 10  # strong views: 10, 11, …


@dataclass(frozen=True)
class Equal:
    """Initial value of state that every replica computes alike, from gathered values: it is not averaged."""

    value: np.ndarray


def _check_returned(model: SSLModel, found: object, function: str, wanted: type) -> None:
    if not isinstance(found, wanted):
        raise UserError(f"{function} of {type(model).__name__} returns {type(found).__name__}; expected "
                        f"{wanted.__name__}(…) of libml.learn.")


class SSLModel(KerasModel):
    """A classifier trained on a few labelled and many unlabelled images.

    A method is a subclass: its hyperparameters in `Options`, its loss in `unlabeled_loss` (most methods) or the wider
    `compute_losses`, and what else is special in class attributes and in the functions before those.

    Args:
        network: any built Keras classifier from float images in [-1, 1] to logits.
        num_classes: C.
        options: an instance of the class's `Options`.
        augmenter: makes the views (`SSLData.augmenter`); None when only `train_on_views` is used.
        total_images: horizon of the learning-rate schedule, in labelled images; the rate stays as it is there.
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
    strong_labeled = False  # whether labelled images train on strong views
    strong_labeled_too = False  # whether there are strong views of labelled images as well, views["labeled_strong"]
    weak_again = False  # whether as many unlabelled images as labelled ones have another weak view, views["weak_again"]
    cosine_decay = True  # of the learning rate; else it is constant
    decoupled_weight_decay = False  # kernels shrink by wd * lr each step, instead of L2 in the loss
    needs_float32 = False  # whether half precision would break it
    needs_pixels = False  # whether it does to images what cannot be done to features
    pass_options: tuple[str, ...] = ()  # what its passes ask of the network besides logits, such as mc_dropout
    communicates = False  # whether the loss calls `Step.gather`, `mean` or `exchange`
    presets: Mapping[str, dict] = {}  # other defaults in "any" run, with "40 labels", or on a dataset, by its name

    class Options(FixMatchOptions):
        """Hyperparameters, FixMatch's unless a method declares others."""

    def __init__(self, network: keras.Model, num_classes: int, *, options: SharedOptions | None = None,
                 augmenter: Augmenter | None = None, total_images: float = 65536 << 10, seed: int = 0,
                 image_statistics: tuple[np.ndarray, np.ndarray] | None = None, loss_scaling: bool = False,
                 jit: bool = False, set_sizes: tuple[int, int] = (0, 0),
                 calibration: tuple[np.ndarray, np.ndarray] | None = None, **hyperparameters: float | str):
        super().__init__(name=type(self).__name__.lower())
        check_network(network, num_classes)
        check_passes(self, network, self.pass_options)
        self.num_classes, self.augmenter = num_classes, augmenter
        self.options = make_options(type(self), options, hyperparameters)
        self.total_images, self.seed, self.image_statistics = total_images, seed, image_statistics
        self.network = network = self.with_heads(network)
        self.num_labeled, self.num_unlabeled = set_sizes
        self.jit, self.loss_scaling, self.update = jit, loss_scaling, Update(self)

        def state(name, value, dtype="float32"):
            value = np.asarray(value, dtype)
            return self.add_weight(name=name, shape=value.shape, initializer=lambda *_, **__: tf.constant(value),
                                   dtype=dtype, trainable=False, autocast=False, aggregation="only_first_replica")

        self.updates = state("updates", 0, "int64")
        self.ema_weights = [state(f"ema_{i}", v) for i, v in enumerate(network.trainable_variables)]
        self.slots = [state(f"slot_{i}", np.zeros(shape)) for i, shape in enumerate(self.update.slot_shapes)]
        if self.uses_alignment:
            self.predictions = state("predictions", np.full((ALIGNMENT_LENGTH, num_classes), 1 / num_classes))
            self.class_prior = self._class_prior()
        if loss_scaling:
            self.loss_scale, self.good_steps = state("loss_scale", 2.0 ** 15), state("good_steps", 0, "int64")
        self.calibration_classes = np.zeros(0, np.int64)
        if calibration is not None and len(calibration[1]):  # on every device, in no checkpoint
            images, self.calibration_classes = calibration
            self.calibration_images = state("calibration", images, np.asarray(images).dtype.name)
        initial = self.initial_state()
        self.equal_state = tuple(name for name, value in initial.items() if isinstance(value, Equal))
        values = {name: np.asarray(value.value if isinstance(value, Equal) else value)
                  for name, value in initial.items()}
        self.method_state = {name: state(name, value, value.dtype.name) for name, value in values.items()}
        self.optimizer = Optimizer(self)
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

    def with_heads(self, network: keras.Model) -> keras.Model:
        """Returns the network with what else the method trains."""
        return network

    @property
    def optimizer_rule(self) -> Nesterov | Adam:
        return Nesterov()

    @property
    def views_per_image(self) -> tuple[int, int]:
        """The numbers of weak and strong views per unlabelled image; all first views come before all second ones."""
        return 1, self.options.K

    def initial_state(self) -> dict[str, np.ndarray | Equal]:
        """Returns the method's own state by name, of any dtype: `Step.state` has it, the loss returns its update.

        Floats are averaged over replicas after the step. All else, and `Equal`, every replica must compute alike, from
        what `Step.gather` and `Step.mean` return.
        """
        return {}

    def weight_groups(self) -> dict[str, Group]:
        """Returns groups of weights by name, each weight in one of them; the log's learning rate is the first one's."""
        return {"all": self.group(self.network.trainable_variables)}

    def group(self, variables: Sequence[keras.Variable],
              decays: Callable[[keras.Variable], bool] = lambda v: v.name.endswith("kernel")) -> Group:
        """Returns the group of some of the network's variables, trained as the class says."""
        own, trainable = {id(v) for v in variables}, self.network.trainable_variables
        indices = [i for i, v in enumerate(trainable) if id(v) in own]
        return Group(indices, [i for i in indices if decays(trainable[i])], self.optimizer_rule, self.learning_rate,
                     self.options.wd, self.decoupled_weight_decay)

    def images_after(self, updates: tf.Tensor) -> tf.Tensor:
        """Labelled images seen in that many updates: int64, as there may be more than int32 holds."""
        return tf.cast(updates, tf.int64) * self.options.batch

    def learning_rate(self, images_seen: tf.Tensor) -> tf.Tensor:
        """lr * cos(7 pi / 16 * images / horizon), or lr for methods without decay."""
        if not self.cosine_decay:
            return tf.constant(self.options.lr)
        progress = tf.cast(images_seen, tf.float32) / self.total_images
        return self.options.lr * tf.cos(progress * (7 * math.pi / 16))

    def rate_after(self, updates: tf.Tensor, schedule: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """What a schedule says after that many updates; from `total_images` on the same, as cosines turn negative."""
        return schedule(tf.minimum(self.images_after(updates), int(min(self.total_images, 1 << 62))))

    def ema_decay(self, updates: tf.Tensor) -> float | tf.Tensor:
        return self.options.ema

    def unlabeled_loss(self, weak: tf.Tensor, strong: tf.Tensor, views: dict, step: Step) -> UnlabeledLoss:
        """Returns loss and mask [N] from weak and strong logits [N, C]."""
        raise TypeError(f"{type(self).__name__} defines neither unlabeled_loss nor compute_losses.")

    def compute_losses(self, views: dict, step: Step) -> LossOutput:
        """Returns the loss without weight decay, and scalars to log: labelled CE + wu * masked unlabelled loss."""
        if not self.uses_unlabeled:
            xe = self.labeled_cross_entropy(views, step)
            return LossOutput(xe, {"losses/xe": xe})
        x, weak, strong = self.forward_together(views, step)
        xe = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        found = self.unlabeled_loss(weak, strong, views, step)
        _check_returned(self, found, "unlabeled_loss", UnlabeledLoss)
        if not found.loss.shape == found.mask.shape == strong.shape[:1]:
            raise ValueError(f"The unlabelled loss of {type(self).__name__} has the shape {found.loss.shape}, its mask "
                             f"{found.mask.shape}; expected {strong.shape[:1]} of both, a number for each strong view.")
        xeu = tf.reduce_mean(found.loss * found.mask)
        scalars = {"losses/xe": xe, "losses/xeu": xeu, **found.scalars}
        return LossOutput(xe + self.options.wu * xeu, scalars, found.state, (weak, found.mask), found.mean_prediction)

    def compute_gradients(self, views: dict, step: Step) -> tuple[list[tf.Tensor], LossOutput]:
        """Returns the gradients of all weights on this replica, without weight decay, and the loss."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(step.weights)
            output = self.compute_losses(views, step)
        _check_returned(self, output, "compute_losses", LossOutput)
        return step.gradients(tape, output.loss, step.weights), output

    # What losses and programs use.

    def forward_together(self, views: dict, step: Step, outputs: tuple[str, ...] | None = None) -> tuple:
        """Logits, or tuples of `outputs`, of labelled, weak (repeated for K strong) and strong views, from one pass."""
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

    def aligned(self, q: tf.Tensor, predictions: tf.Tensor | None, prior: tf.Tensor | None = None) -> tf.Tensor:
        """Returns q weighted by class prior over average of `predictions`, normalised (the paper's Eq. 6).

        They are `step.predictions` in a loss, which returns the mean of q as `mean_prediction`: it enters the average
        after this step. Without `prior` the one of `--p_unlabeled` counts.
        """
        if predictions is None:
            raise ValueError(f"{type(self).__name__} calls aligned(): set uses_alignment = True in the class, so that "
                             "it has the moving average of predictions.")
        p_model = tf.reduce_mean(predictions, 0)
        return losses.align(q, p_data=self.class_prior if prior is None else prior,
                            p_model=p_model / tf.reduce_sum(p_model))

    def credal_sets(self, images: tf.Tensor, q: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the sets that the method would now learn from float images [N, H, W, channels], {} if it has none.

        `class` y, `alpha` and the `aligned` prediction describe sets {p : p(y) >= 1 - alpha}; `possibility` [N, C] sets
        of the members of `losses.project_possibility`. `q` are the averaged model's predictions [N, C].
        """
        return {}

    def step_seed(self, updates: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        with tf.device(HOST):
            seed = tf.stack([tf.constant(self.seed, tf.int64), tf.cast(updates, tf.int64)])
        return fold_in(seed, 0 if context is None else context.replica_id_in_sync_group)

    def make_views(self, batch: dict, state: State | PackedState | None = None) -> dict:
        """Makes float views of a batch of uint8 images, by the method's needs, and CTAugment's probe."""
        augmenter, state = self.augmenter, state or self.update.read()
        seed, rates = fold_in(self.step_seed(state.updates), VIEW_SEEDS), state.others.get("rates")
        labeled = augmenter.labeled(batch["labeled"], fold_in(seed, LABELED))
        views = {"labeled": augment.to_float(labeled), "label": batch["label"]}
        if augmenter.spec.labeled_policy:
            views["labeled"] = augmenter.strong(batch["labeled"], fold_in(seed, LABELED), rates, "labeled")
        strong_labeled = "labeled" if self.strong_labeled else "labeled_strong" if self.strong_labeled_too else ""
        if strong_labeled:
            views[strong_labeled] = augmenter.strong(batch["labeled"], fold_in(seed, LABELED_STRONG), rates,
                                                     "labeled_strong")
        num_weak, num_strong = self.views_per_image if self.uses_unlabeled else (0, 0)
        if num_weak:
            first = fold_in(seed, WEAK)
            seeds = [first, *(fold_in(first, k) for k in range(1, num_weak + self.weak_again))]
            weak = [augmenter.weak(batch["unlabeled"], own) for own in seeds[:num_weak]]
            views["weak"] = augment.to_float(tf.concat(weak, 0))
            if self.weak_again:
                again = batch["unlabeled"][:batch["labeled"].shape[0]]
                views["weak_again"] = augment.to_float(augmenter.weak(again, seeds[-1]))
        if (num_weak or num_strong) and "unlabeled_label" in batch:
            views["unlabeled_label"] = batch["unlabeled_label"]
        seeds, strong, probed = [fold_in(seed, STRONG + k) for k in range(num_strong)], [], None
        if augmenter.learns_rates and seeds:
            view, *probed = augmenter.strong_and_probe(batch["unlabeled"], seeds.pop(0), labeled, fold_in(seed, PROBE),
                                                       rates)
            strong.append(view)
        elif augmenter.learns_rates and strong_labeled:
            probed = augmenter.probe(labeled, fold_in(seed, PROBE))
        strong += [augmenter.strong(batch["unlabeled"], strong_seed, rates) for strong_seed in seeds]
        if strong:
            views["strong"] = tf.concat(strong, 0)
        if probed:
            views["probe"] = {"images": augment.to_float(probed[0]), "policy": probed[1]}
        return views | {key: batch[key] for key in ("labeled_index", "unlabeled_index") if key in batch}

    def train_on_bytes(self, batch: dict) -> Scalars:
        """Runs one update on a batch of uint8 images; returns scalars to log, equal on all replicas."""
        with tf.control_dependencies([*filter(tf.is_tensor, batch.values())]):  # they may follow from `updates`
            state = self.update.read()
            return self.train_on_views(self.make_views(batch, state), state)

    def train_on_views(self, views: dict, state: State | None = None) -> Scalars:
        """Runs one update on ready float views (`labeled`, `label`, `weak`, `strong`, …)."""
        update = self.update
        new, scalars = update.next_state(update.pack(state or update.read()), views)
        update.write(update.unpack(new))
        return scalars

    def trial_loss(self, batch: dict) -> tf.Tensor:
        """Returns the loss of a batch on this replica and changes nothing: shows whether the step can be compiled."""
        state = self.update.read()
        _, scalars = self.update.next_state(self.update.pack(state), self.make_views(batch, state))
        return scalars["losses/total"]

    def infer(self, images: tf.Tensor, ema: bool = True,
              values: tuple[list[tf.Tensor], list[tf.Tensor]] | None = None) -> tf.Tensor:
        """Returns logits by the averaged (or raw) weights and the moving statistics, or by other `values` of both."""
        if values is None:
            items = self.checkpoint_items()
            weights, statistics = ([tf.convert_to_tensor(v) for v in items[name]]
                                   for name in ("ema" if ema else "weights", "statistics"))
            values = weights, statistics
        logits, _ = self.run_network(*values, images, training=False)
        return tf.cast(logits, tf.float32)

    def run_network(self, weights: Sequence[tf.Tensor], statistics: Sequence[tf.Tensor], images: tf.Tensor,
                    **options: tf.Tensor | float) -> tuple:
        """Returns what the network makes of float images by given weights and statistics, and the statistics after it.

        As Keras's stateless_call, which would start a kernel for each cast of a weight, and of a gradient, to half
        precision: here those of convolutions are cast together.
        """
        network = self.network
        if self.image_statistics is not None:  # whitening
            mean, deviation = self.image_statistics
            images = (images - mean) / deviation
        trainable, moving = network.trainable_variables, network.non_trainable_variables
        index = {id(v): i for i, v in enumerate(trainable)}
        kinds = {index[id(v)]: layer.compute_dtype for layer in network._flatten_layers()  # nothing public has all
                 if type(layer) is keras.layers.Conv2D and layer.compute_dtype != layer.variable_dtype
                 for v in layer.trainable_variables}
        if not kinds:
            return network.stateless_call(weights, statistics, images, **options)
        pairs = [*zip(trainable, weights, strict=True), *zip(moving, statistics, strict=True)]
        with keras.StatelessScope(pairs) as scope:
            for dtype, positions in by_kind(kinds).items():
                packing = Packing([trainable[i].shape for i in positions], [range(len(positions))])
                (vector,) = packing.pack([tf.convert_to_tensor(weights[i]) for i in positions])
                for i, value in zip(positions, packing.unpack([tf.cast(vector, dtype)]), strict=True):
                    scope.add_update((trainable[i], value))
            found = network.call(images, **options)
        return found, [scope.get_current_value(v) for v in moving]

    def call(self, images, training=False):
        """Logits of the evaluated model, of bytes or of floats in [-1, 1]; `fit` and `predict` of Keras call this."""
        if images.dtype != "uint8" and not images.dtype.is_floating:
            raise UserError(f"Images are {images.dtype.name}; expected uint8, or floats from -1 to 1.")
        return self.infer(augment.to_float(images) if images.dtype == "uint8" else images)

    def predict_files(self, images: str | Path | Iterable[str | Path], data: SSLData, *, credal: bool = False,
                      ) -> Predictions:
        """Classifies image files, as `Run.predict`; `data` names the classes and calibrates conformal sets."""
        from libml.results.predict import Classifier

        return Classifier.of_model(self, self._classes_of(data), lambda: data).predict(images, credal=credal)

    def _classes_of(self, data: SSLData) -> list[str]:
        if (found := getattr(data, "num_classes", 0)) != self.num_classes:
            raise UserError(f"data is {type(data).__name__} of {found} classes, but this {type(self).__name__} has "
                            f"{self.num_classes}: give the data it was trained on.")
        return data.class_names

    def export(self, folder: str | Path, data: SSLData, *, temperature: float | None = None, onnx: bool = False,
               force: bool = False) -> dict:
        """Writes the averaged weights, calibrated on `data`, for programs that have TensorFlow alone: `Run.export`."""
        from libml.results import export

        names, origin = self._classes_of(data), {"method": type(self).__name__, "dataset": data.name}
        return export.export(self, names, lambda: data, Path(folder), temperature=temperature, onnx=onnx,
                             origin=origin, force=force)

    def checkpoint_items(self) -> dict[str, tf.Variable | list[tf.Variable]]:
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


class AdamModel(SSLModel):
    """Base of the methods that train with Adam at a constant rate and decay the kernels apart from the loss."""

    cosine_decay = False
    decoupled_weight_decay = True
    optimizer_rule = Adam()
    views_per_image = (1, 0)

    class Options(ConsistencyOptions):
        lr: float = option(0.002, "learning rate of Adam, constant", above=0, named=True)
        wd: float = option(0.02, "decoupled weight decay: each update takes wd * lr of the kernels away", low=0,
                           named=True)
