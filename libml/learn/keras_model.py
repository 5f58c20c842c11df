"""What users of Keras expect of a model: fit, predict and evaluate with checked input, saving, loading, help."""
from __future__ import annotations

import dataclasses
import inspect
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from libml import augment, networks
from libml.config import describe
from libml.errors import UserError
from libml.lazy import keras, tf
from libml.learn.update import pseudo_label_accuracy
from libml.networks import custom

if TYPE_CHECKING:
    from keras import Model as _KerasModel
else:
    class _KerasModel:
        """Holds the place of keras.Model until the first model is made."""

_OUT_OF_RANGE = "{} is out of range"


def register(cls: type) -> None:
    """Lets Keras find a class when it loads a model."""
    if keras.saving.get_registered_name(cls) == cls.__name__:  # not yet
        keras.saving.register_keras_serializable(networks.PACKAGE)(cls)


def _is_endless(batches: tf.data.Dataset) -> bool:
    length = int(batches.cardinality())
    return length == tf.data.INFINITE_CARDINALITY or length > 10 ** 9  # which nobody means to be one epoch


def _check_count(function: str, name: str, count: object) -> None:
    if count is not None and not (isinstance(count, int | np.integer) and count > 0):
        raise UserError(f"{function} got {name}={count!r}; expected a whole number from 1 up.")


def _check_pairs(batches: tf.data.Dataset) -> None:
    if isinstance(batches.element_spec, tuple) and len(batches.element_spec) > 2:
        raise UserError(f"Batches have {len(batches.element_spec)} parts; expected images and labels: scores take no "
                        "weights.")


def _check_arguments(cls: type[KerasModel], given: dict[str, Any]) -> None:
    """Raises UserError for arguments that would fail, or go wrong, in the middle of training."""
    for name, fits, wanted in (
            ("num_classes", lambda v: isinstance(v, int | np.integer) and v > 1, "a whole number from 2 up"),
            ("total_images", lambda v: isinstance(v, int | float | np.number) and 0 < v < np.inf, "a positive number"),
            ("seed", lambda v: isinstance(v, int | np.integer) and abs(int(v)) < 2 ** 63, "a whole number of 64 bits"),
            ("options", lambda v: v is None or isinstance(v, cls.Options), f"{cls.__name__}.Options(…)"),
            ("image_statistics", lambda v: v is None or len(v) == 2 and np.min(v[1]) > 0,
             "mean and standard deviation of each channel, which must not be 0"),
            ("loss_scaling", lambda v: isinstance(v, bool), "True or False"),
            ("set_sizes", lambda v: len(v) == 2 and min(v) >= 0, "the numbers of labelled and unlabelled images"),
            ("calibration", lambda v: v is None or len(v[0]) == len(v[1]), "images and their classes"),
            ("augmenter", lambda v: isinstance(v, augment.Augmenter | augment.Copies | None), "data.augmenter(…)")):
        try:
            fine = name not in given or fits(given[name])
        except (TypeError, ValueError, IndexError):  # what has no length, or is no number
            fine = False
        if not fine:
            raise UserError(f"{cls.__name__} got {name}={given[name]!r}; expected {wanted}.")


class Optimizer:
    """What Keras's callbacks want to know of an optimizer; the update is part of the method's step."""

    built = False  # else Keras asks for its variables

    def __init__(self, model):
        self._model, self.iterations = model, model.updates

    def build(self, variables):
        pass

    @property
    def learning_rate(self):
        return self._model.rate_after(self._model.updates, self._model.learning_rate)

    @learning_rate.setter
    def learning_rate(self, value):
        raise UserError(f"learning_rate={value}: the rate follows the method's own schedule, from its option lr over "
                        "total_images. Leave callbacks that change it out.")


def _outside(create, **arguments):
    """Creates a variable that the graph being traced does not count as its own: TensorFlow would trace it once more."""
    return create(**arguments | {"experimental_enable_variable_lifting": False})


class KerasModel(_KerasModel):
    """A Keras model whose step is given; what a subclass is constructed with is what a file of it remembers."""

    Options: Any
    network: keras.Model
    augmenter: Any
    num_classes: int
    num_labeled: int
    num_unlabeled: int
    _arguments = ""  # of the constructor, as a docstring has them

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        cls.__doc__, cls.__signature__ = _help(cls), _signature(cls)

    def __new__(cls, *args, **kwargs):
        # Classes of methods exist before Keras does: TensorFlow reads the variables for oneDNN and XLA when it is
        # imported, and the configuration, which needs the classes, decides them.
        if KerasModel.__bases__ != (keras.Model,):
            KerasModel.__bases__ = (keras.Model,)
        register(cls)
        made = super().__new__(cls, *args, **kwargs)
        given: dict[str, Any] = {}
        with suppress(TypeError):  # which __init__ is about to raise
            signature = inspect.signature(cls.__init__)
            bound = signature.bind(made, *args, **kwargs)
            given = dict(zip([*signature.parameters][1:], bound.args[1:], strict=False)) | bound.kwargs
        _check_arguments(cls, given)
        # Within a namespace, where Keras does not look for layers to save.
        object.__setattr__(made, "_hidden", SimpleNamespace(given=given, means={}, checked=False))
        return made

    @property
    def made_of(self) -> dict[str, Any]:
        """The constructor's arguments by name."""
        return self._hidden.given

    def compile(self, *arguments, run_eagerly: bool = False, steps_per_execution: int = 1, **others) -> None:
        """Prepares `fit`, which also does it itself; loss, optimizer and their options belong to the method."""
        refused = [*map(repr, arguments), *(name for name, value in others.items() if value is not None)]
        if refused:
            raise UserError(f"compile got {', '.join(refused)}, but {type(self).__name__} has its own loss, optimizer "
                            "and monitors: set lr, wd and the like as its options, and call compile() without them.")
        super().compile(optimizer=None, run_eagerly=run_eagerly, steps_per_execution=steps_per_execution,
                        jit_compile=False)  # XLA is the method's own `jit`: not for augmentation
        self.optimizer = Optimizer(self)

    def compile_from_config(self, config: dict) -> None:
        self.compile(run_eagerly=config["run_eagerly"], steps_per_execution=config["steps_per_execution"])

    def fit(self, x=None, y=None, *, steps_per_epoch: int | None = None, validation_data=None, **arguments):
        """Trains on a tf.data.Dataset of dicts (labeled, label, unlabeled and, to monitor pseudo-labels,
        unlabeled_label), as `SSLData.dataset` makes them; the history holds means over each epoch.

        `steps_per_epoch` is needed where `x` is endless; `validation_data` are images and labels, or a dataset of such
        batches; epochs, callbacks, verbose … are as Keras has them.
        """
        refused = sorted(arguments.keys() & {"batch_size", "class_weight", "sample_weight", "shuffle",
                                             "validation_split"})
        if refused:
            raise UserError(f"fit got {', '.join(refused)}; expected nothing of the kind: batches and their order are "
                            "the dataset's, the loss is the method's.")
        _check_count("fit", "steps_per_epoch", steps_per_epoch)
        self._check_batches(x, y, steps_per_epoch is None)
        if validation_data is not None:
            validation_data = self._checked_validation(validation_data, arguments.get("validation_steps"))
        self._check_network()
        if not self.compiled:
            self.compile()
        try:
            return super().fit(x.map(self._check_numbers), steps_per_epoch=steps_per_epoch, shuffle=False,
                               validation_data=validation_data, **arguments)
        except tf.errors.InvalidArgumentError as error:
            for name, count in self._counts().items():
                if _OUT_OF_RANGE.format(name) in str(error):
                    raise UserError(f"Batches have {name!r} that this {type(self).__name__} does not know; expected "
                                    f"numbers from 0 to {count - 1}.") from error
            raise

    def _counts(self) -> dict[str, int]:
        return {"label": self.num_classes, "labeled_index": self.num_labeled, "unlabeled_index": self.num_unlabeled}

    def _check_numbers(self, batch: dict) -> dict:
        """Stops the input at a label or a position that is none: GPUs do not, and what follows is wrong or NaN."""
        checks = [tf.debugging.Assert(tf.reduce_all((batch[name] >= 0) & (batch[name] < count)),
                                      [_OUT_OF_RANGE.format(name)])
                  for name, count in self._counts().items() if count and name in batch]
        with tf.control_dependencies(checks):
            return batch | {"label": tf.identity(batch["label"])}

    def _check_batches(self, x, y, whole: bool) -> None:
        name, options = type(self).__name__, self.options
        if self.augmenter is None:
            raise UserError(f"This {name} has no augmenter to make views with: give it augmenter=data.augmenter().")
        if self.distribute_strategy.num_replicas_in_sync > 1:
            raise UserError(f"fit trains on one device; this {name} was made for "
                            f"{self.distribute_strategy.num_replicas_in_sync}. cssl.train uses them all.")
        labels, unlabeled = (tf.int64, tf.int32), options.batch * options.uratio
        stored, shape = [self.augmenter.stored_dtype], self.augmenter.stored_shape
        wanted = {"labeled": (stored, options.batch, *shape), "label": (labels, options.batch)}
        if self.uses_unlabeled:
            wanted["unlabeled"] = stored, unlabeled, *shape
        spec = x.element_spec if isinstance(x, tf.data.Dataset) else None
        if y is not None or not isinstance(spec, dict) or not wanted.keys() <= spec.keys():
            raise UserError(f"fit got {type(x).__name__}{'' if y is None else ' and labels'}; expected a dataset of "
                            f"dicts with {', '.join(wanted)}, as data.dataset(model) gives for "
                            "data = cssl.from_arrays(…) or cssl.load(…).")
        if self.uses_unlabeled and "unlabeled_label" in spec:
            wanted["unlabeled_label"] = labels, unlabeled
        for key, (dtypes, *shape) in wanted.items():
            found = spec[key]
            if not isinstance(found, tf.TensorSpec) or found.shape != shape or found.dtype not in dtypes:
                raise UserError(f"Batches have {key!r} as {found}, but batch={options.batch} and "
                                f"uratio={options.uratio} of this {name} mean {dtypes[0].name} of shape {shape}: batch "
                                "them so, with drop_remainder=True.")
        if int(x.cardinality()) == 0:
            raise UserError("The dataset has no batches.")
        if whole and _is_endless(x):
            raise UserError("These batches never end: say how many make an epoch, with steps_per_epoch.")

    def _checked_validation(self, data, steps: int | None):
        """Returns validation data as Keras takes them, checked before an epoch is trained for nothing."""
        if isinstance(data, tf.data.Dataset):
            if steps is None and _is_endless(data):
                raise UserError("The validation data never end: say how many batches to take, with validation_steps.")
            _check_pairs(data)
            logits, labels = self._predict_dataset(data.take(1))
            self._checked_labels(labels, len(logits))
            return data
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise UserError(f"validation_data is {type(data).__name__}; expected (images, labels), or a dataset of "
                            "such batches.")
        images = self._checked(data[0])
        return images, self._checked_labels(data[1], len(images))

    def _check_network(self) -> None:
        given = self.made_of["network"]
        if len(self.network.trainable_variables) != len(self.ema_weights):
            raise UserError(f"The network {given.name} has other weights to train than when this {type(self).__name__} "
                            "was made: set trainable before, and make a new model.")
        if not self._hidden.checked and not type(given).__module__.startswith("libml."):
            custom.check_values(given, self.num_classes, self.augmenter.image_shape)
        self._hidden.checked = True

    def train_step(self, batch: dict) -> dict:
        """One update of `fit`: the means of its scalars since the epoch began, the total also as `loss`."""
        if not isinstance(batch, dict):
            raise UserError(f"A batch is {type(batch).__name__}; expected a dict, as data.dataset(model) has them.")
        try:
            scalars, means = self.train_on_bytes(batch), self._hidden.means
        except KeyError as error:
            if error.args[0] not in ("labeled_index", "unlabeled_index"):
                raise
            raise UserError(f"Batches have no {error.args[0]!r}, the position of each image, which "
                            f"{type(self).__name__} needs: take them of data.dataset(model).") from error
        with tf.init_scope(), tf.variable_creator_scope(_outside):
            for name in scalars.keys() - means:
                means[name] = keras.metrics.Mean(name, dtype="float64")
        for name, value in scalars.items():
            means[name].update_state(value)
        found = {name: tf.cast(means[name].result(), tf.float32) for name in scalars}
        return {"loss": found["losses/total"], **pseudo_label_accuracy(found)}

    @property
    def metrics(self) -> list:
        """What Keras resets when an epoch begins."""
        return list(self._hidden.means.values())

    @property
    def image_shape(self) -> tuple:
        """Of the images that the model takes: height, width, channels; None for what is not fixed."""
        for owner in (self.augmenter, self.network):
            if getattr(owner, "image_shape", None) is not None:
                return tuple(owner.image_shape)
        with suppress(AttributeError, ValueError, TypeError):
            return tuple(self.network.input_shape[1:])
        return (None, None, None)

    def _checked(self, images) -> np.ndarray:
        shape = self.image_shape
        wanted = "[N, " + ", ".join(str(size or "any") for size in shape) + "]"
        try:
            images = np.asarray(images)
        except ValueError as error:
            raise UserError(f"Images are of several shapes; this model takes {wanted}: resize them.") from error
        if images.ndim != 4 or any(size not in (None, found) for size, found in zip(shape, images.shape[1:],
                                                                                   strict=True)):
            raise UserError(f"Images have shape {list(images.shape)}; this model takes {wanted}: resize them, and "
                            "give a single image as image[None].")
        if not len(images):
            raise UserError(f"There are no images: their shape is {list(images.shape)}.")
        if images.dtype == np.uint8:
            return images
        if not np.issubdtype(images.dtype, np.floating):
            raise UserError(f"Images are {images.dtype}; expected uint8 from 0 to 255 (images.astype('uint8')), or "
                            "floats from -1 to 1.")
        if isinstance(self.augmenter, augment.Copies):  # features
            return images.astype(np.float32)
        low, high = float(images.min()), float(images.max())
        if not (low >= -1.001 and high <= 1.001):  # float16 rounds
            raise UserError(f"Float images have values from {low:g} to {high:g}; expected -1 to 1. For values from 0 "
                            "to 255 give bytes: images.astype('uint8').")
        if low == 0 < high:  # no byte becomes 0
            warnings.warn("Float images have values from 0 up; the model takes -1 to 1. If yours are from 0 to 1, give "
                          "2 * images - 1.", stacklevel=3)
        return images.astype(np.float32)

    def _checked_labels(self, labels, number: int) -> np.ndarray:
        labels = np.asarray(labels)
        if labels.shape != (number,) or not np.issubdtype(labels.dtype, np.integer) or not (
                0 <= labels.min() and labels.max() < self.num_classes):
            raise UserError(f"Labels are {labels.dtype} of shape {list(labels.shape)}; expected a class number from 0 "
                            f"to {self.num_classes - 1} for each of the {number} images.")
        return labels

    def predict(self, x, batch_size: int | None = None, verbose: str | int = "auto", steps: int | None = None,
                **arguments) -> np.ndarray:
        """Returns logits [N, classes] of the averaged model for `x`, uint8 images or floats in [-1, 1]: an array or a
        tf.data.Dataset of batches (of images, or of tuples that begin with them); the rest as Keras has it."""
        _check_count("predict", "batch_size", batch_size)
        _check_count("predict", "steps", steps)
        if isinstance(x, tf.data.Dataset):
            return self._predict_dataset(x, steps)[0]
        return super().predict(self._checked(x), batch_size=batch_size, verbose=verbose, steps=steps, **arguments)

    def _predict_dataset(self, batches: tf.data.Dataset, steps: int | None = None,
                         ) -> tuple[np.ndarray, np.ndarray | None]:
        batches = batches if steps is None else batches.take(steps)
        if _is_endless(batches):
            raise UserError("These batches never end: say how many to take, with steps.")
        logits, labels = [], []
        for element in batches:
            images, *further = element if isinstance(element, tuple) else (element,)
            logits.append(self.predict_on_batch(self._checked(images)))
            labels += further[:1]
        if not logits:
            raise UserError("The dataset has no images.")
        return np.concatenate(logits), np.concatenate(labels) if labels else None

    def evaluate(self, x, y=None, batch_size: int | None = None, verbose: str | int = 0, sample_weight=None,
                 steps: int | None = None, callbacks=None, return_dict: bool = True,
                 _use_cached_eval_dataset: bool = False) -> dict[str, float]:
        """Returns accuracy (in percent), ece, nll, brier and loss (the nll) of the averaged model, by name.

        `x` is as `predict` takes it; class numbers `y` [N] come with it in a dataset of (images, labels). What Keras's
        `fit` gives besides, `callbacks` and `return_dict`, has no effect.
        """
        if sample_weight is not None or y is not None and isinstance(x, tf.data.Dataset):
            raise UserError(f"evaluate got {'labels beside a dataset' if sample_weight is None else 'sample_weight'}; "
                            "expected images and labels, or a dataset of both.")
        if isinstance(x, tf.data.Dataset):
            _check_pairs(x)
            logits, y = self._predict_dataset(x, steps)
        else:
            logits = self.predict(x, batch_size=256 if batch_size is None else batch_size, verbose=verbose, steps=steps)
            y = self._checked_labels(y, len(x))[:len(logits)]  # with `steps`, those of the first batches
        labels = self._checked_labels(y, len(logits))
        from libml.results import metrics

        scores = metrics.scores(tf.nn.softmax(logits).numpy(), labels)
        return {"loss": scores["nll"], **scores}

    def save(self, filepath, *arguments, **named) -> None:
        """Writes all that `cssl.load_model` needs to go on: as Keras has it, to a .keras file."""
        if str(filepath).endswith((".h5", ".hdf5")):
            raise UserError(f"{filepath} would be of the older format, which does not hold all of this model; expected "
                            "a name that ends in .keras.")
        super().save(filepath, *arguments, **named)

    def get_config(self) -> dict:
        given = {name: dataclasses.asdict(value) if name == "options" and value else value
                 for name, value in self.made_of.items()}
        return {"dtype_policy": self.dtype_policy.name, **keras.saving.serialize_keras_object(given)}

    @classmethod
    def from_config(cls, config: dict, custom_objects: dict | None = None):
        ours = {"Augmenter": augment.Augmenter, "Copies": augment.Copies}
        known, config = {**ours, **(custom_objects or {})}, dict(config)
        with networks.dtype_policy(config.pop("dtype_policy")):
            given = keras.saving.deserialize_keras_object(config, custom_objects=known)  # beside those of load_model
            if given.get("options"):
                given["options"] = cls.Options(**given["options"])
            return cls(**given)

    def _unsaved(self) -> dict[str, tf.Variable]:
        """Variables that Keras's files leave out: CTAugment's rates, and where random layers are in their streams."""
        weights = {id(v) for v in self.network.weights}
        seeds = [v for v in self.network.non_trainable_variables if id(v) not in weights]
        found = {f"seed_{i}": v for i, v in enumerate(seeds)}
        if self.augmenter is not None and self.augmenter.learns_rates:
            found["rates"] = self.augmenter.rates
        return found

    def save_own_variables(self, store) -> None:
        """Writes the whole state: training goes on from a file as if there had been none."""
        super().save_own_variables(store)
        for name, variable in self._unsaved().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store) -> None:
        unsaved = self._unsaved()
        missing = unsaved.keys() - set(store.keys())
        if missing:
            raise UserError(f"The file has no {', '.join(sorted(missing))}: it holds another kind of model, which "
                            "cssl.load_model(file) builds where it is a .keras file.")
        for name, variable in unsaved.items():
            variable.assign(store[name])
        super().load_own_variables({key: store[key] for key in store.keys() if key not in unsaved})


def _signature(cls: type[KerasModel]) -> inspect.Signature:
    """Returns the arguments of a method's class, its options by name among them, for help and editors."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:  # a method passes on what it does not name
        if "__init__" in vars(base) and issubclass(base, KerasModel):
            _, *parameters = inspect.signature(base.__init__).parameters.values()
            found = {**{p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}, **found}
    found |= {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                                      annotation=field.type) for name, field in describe(cls.Options).items()}
    return inspect.Signature(sorted(found.values(), key=lambda parameter: parameter.kind))


def _help(cls: type[KerasModel]) -> str:
    """Returns the docstring of a method's class with its arguments and, one line each, its options."""
    own, _, arguments = inspect.cleandoc(cls.__doc__ or "").partition("\n\nArgs:\n")
    cls._arguments = arguments = arguments or cls._arguments
    options = [f"        {name}: {field.metadata.get('help', '')} [{field.default!r}]"
               for name, field in describe(cls.Options).items()]
    return "\n".join([own, "", "Args:", arguments, "    **hyperparameters: by name, in place of `options`:", *options])
