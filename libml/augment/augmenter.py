"""The Augmenter: labelled, weak and strong views and probes of one `--augment` setting, and CTAugment's rates."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from libml.augment import autoaugment, ctaugment, kernels
from libml.augment.ops import AUTO_OPS, CHUNKED, OPS, PARTITIONED, RAND_OPS, SELECTED, Policy, pillow_policy, run_policy
from libml.augment.spec import LEVELS, AugmentSpec, AutoAugment, RandAugment, parse_augment, parse_policy
from libml.errors import UserError, check_function
from libml.randomness import by_philox, fold_in

_LABELED, _WEAK, _STRONG, _PROBE = range(4)  # streams of random numbers under one seed

Samples = dict[str, tf.Tensor]  # all that is random in a view, one row per image


def to_float(images: tf.Tensor) -> tf.Tensor:
    """uint8 to float32 in [-1, 1]; in graphs TensorFlow multiplies by 1 / 127.5, which may change the last bit.
    Features, which are floats, keep their values."""
    x = tf.cast(images, tf.float32)
    return x / 127.5 - 1.0 if images.dtype == "uint8" else x


def to_uint8(x: tf.Tensor) -> tf.Tensor:
    """float32 in [-1, 1] to uint8, rounded and clipped."""
    return tf.cast(tf.clip_by_value(tf.round(127.5 * (1.0 + x)), 0.0, 255.0), tf.uint8)


# What to_float means, for strong views: a table is the same everywhere, whatever optimisers make of a division.
_LEVELS = np.arange(256, dtype=np.uint8).astype(np.float32) / np.float32(127.5) - np.float32(1)
# RandAugment turns floats to bytes by truncation: some values, that rounding had made a little smaller, lose one.
_TRUNCATED = ((_LEVELS * np.float32(0.5) + np.float32(0.5)) * np.float32(255)).astype(np.uint8)


def _cta_view(images: tf.Tensor, samples: Samples, weak: tf.Tensor | None, policy: Policy | None, shift: int,
              cutout: bool, form: str) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Strong views of images and, if there is a `policy` for them, the probes of `weak` views, in one batch."""
    x, n = kernels.mirror_and_shift(images, samples["flip"], samples["offset"], shift), images.shape[0]
    if policy is not None:
        x = tf.concat([x, weak], 0)
        samples = samples | {key: tf.concat([samples[key], policy[key]], 0) for key in policy}
    if "ops" in samples:
        x = run_policy(OPS, x, samples, form)
    x, probe = (x, None) if policy is None else (x[:n], x[n:])
    if cutout:
        x = kernels.cutout(x, tf.ones([n]), samples["centre"])
    return tf.gather(_LEVELS, tf.cast(x, tf.int32)), probe


def _rand_view(images: tf.Tensor, samples: Samples, shift: int, cutout: int, auto: bool, form: str) -> tf.Tensor:
    x = kernels.mirror_and_shift(images, samples["flip"], samples["offset"], shift)
    x = tf.gather(_TRUNCATED, tf.cast(x, tf.int32))
    x = tf.concat([x, tf.fill([*x.shape[:3], 1], tf.constant(255, tf.uint8))], -1)
    x = run_policy(AUTO_OPS if auto else RAND_OPS, x, samples, form)
    hidden = x[..., 3:] == 0
    if cutout:
        height, width = x.shape[1:3]
        side = tf.fill([x.shape[0]], cutout * min(height, width) // 100)
        hidden |= kernels.box(samples["centre"], side, height, width)
    return tf.where(hidden, 0.0, tf.gather(_LEVELS, tf.cast(x[..., :3], tf.int32)))


_probe_view = partial(run_policy, OPS)

# One compiled function for all Augmenters of a process: the shapes and plain numbers decide what is compiled anew.
_compiled = {f: tf.function(f, jit_compile=True, autograph=False)
             for f in (kernels.mirror_and_shift, _cta_view, _rand_view, _probe_view)}


class Augmenter(tf.Module):
    """Views of image batches; all randomness comes from the seeds, all state is `rates` (CTAugment only).

    `mirror` and `shift` are the dataset's default weak augmentation, `policies` the name of AutoAugment's for it. With
    `jit_compile` XLA compiles the views, which takes seconds for each shape; without it ordinary kernels, some of
    which only CPUs have, make the same pixels. CTAugment's strong views are a policy with `cutout` ("yes"), without it
    ("no"), or cutout alone ("only"). `own_strong`, a function in the graph of uint8 images [N, H, W, 3] and a seed [2]
    to uint8 or floats in [-1, 1], makes the strong views instead.
    """

    def __init__(self, spec: AugmentSpec | str, *, image_shape: tuple[int, int, int], mirror: bool, shift: int,
                 depth: int = 2, threshold: float = 0.80, decay: float = 0.99, cutout: str = "yes", policies: str = "",
                 jit_compile: bool = True, own_strong: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None):
        super().__init__(name="augmenter")
        self.spec = parse_augment(spec) if isinstance(spec, str) else spec
        self.spec.check_policies(policies)
        if len(image_shape) != 3 or image_shape[2] != 3:
            raise ValueError(f"image_shape={image_shape}: expected (height, width, 3)")
        if not 0 <= shift < min(image_shape[:2]):
            raise ValueError(f"shift={shift}: reflect-padding needs 0 <= shift < {min(image_shape[:2])}")
        if not (isinstance(depth, int) and depth > 0) or cutout not in ("yes", "no", "only"):
            raise UserError(f"depth={depth!r}, cutout={cutout!r}: expected a number of operations from 1 up, and yes, "
                            "no or only.")
        self.image_shape, self.depth, self.threshold, self.decay = tuple(image_shape), depth, threshold, decay
        self.stored_shape, self.stored_dtype = self.image_shape, tf.uint8  # of what views are made of
        self.cutout, self.policies, self.jit_compile = cutout, policies, jit_compile
        self.on_gpu = bool(tf.config.list_physical_devices("GPU"))  # which compiled form is faster
        self._weak_kinds = {"d": (mirror, shift), "m": (True, 0), "x": (False, 0)}  # mirror, shift
        self.mirror, self.shift, self.own_strong = mirror, shift, own_strong
        if own_strong is not None:
            self._try_own_strong()
        self.learns_rates = self.spec.uses_ctaugment and cutout != "only" and own_strong is None
        if self.learns_rates:
            self.rates = tf.Variable(tf.ones(ctaugment.RATES_SHAPE), trainable=False, name="rates",
                                     aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def get_config(self) -> dict:
        """What it was made with, for a file; of an own strong augmentation the name, under which it is found again."""
        plain = ("mirror", "shift", "depth", "threshold", "decay", "cutout", "policies", "jit_compile")
        return {"spec": str(self.spec), "image_shape": list(self.image_shape),
                "own_strong": keras.saving.serialize_keras_object(self.own_strong),
                **{name: getattr(self, name) for name in plain}}

    @classmethod
    def from_config(cls, config: dict) -> Augmenter:
        return cls(**config | {"own_strong": keras.saving.deserialize_keras_object(config["own_strong"])})

    def _try_own_strong(self) -> None:
        check_function(self.own_strong, "The strong augmentation", "images", "seed")
        noise = tf.constant(np.random.RandomState(0).randint(0, 256, (8, *self.image_shape)), tf.uint8)
        # Traced twice: what Python or NumPy draw is drawn once, for all the steps of a run.
        made, again = (tf.function(self._own_strong, autograph=False)(noise, tf.constant([0, 0], tf.int64)).numpy()
                       for _ in range(2))
        if made.dtype != np.uint8 and not (-1.001 <= made.min() < 0 and made.max() <= 1.001):  # rounding
            raise UserError(f"The strong augmentation returns floats from {made.min():g} to {made.max():g} for noise; "
                            "expected -1 to 1 (2 * x - 1, if yours are from 0 to 1), or uint8.")
        if not np.allclose(made, again, atol=1 if made.dtype == np.uint8 else 0.01):
            raise UserError("The strong augmentation makes two views of one image with one seed; expected all its "
                            "randomness to come from the seed, as with tf.random.stateless_uniform(shape, seed).")

    def _own_strong(self, images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        assert self.own_strong is not None
        made = self.own_strong(images, seed)
        if not isinstance(made, tf.Tensor | np.ndarray):
            raise UserError(f"The strong augmentation returns {type(made).__name__}; expected images.")
        made = tf.convert_to_tensor(made)
        if made.shape != images.shape or not (made.dtype.is_floating or made.dtype == tf.uint8):
            raise UserError(f"The strong augmentation turns images of shape {images.shape} into {made.dtype.name} of "
                            f"shape {made.shape}; expected the same shape, uint8 or floats.")
        return made

    @property
    def _form(self) -> str:
        return PARTITIONED if not self.jit_compile else SELECTED if self.on_gpu else CHUNKED

    def _compiled(self, function: Callable) -> Callable:
        return _compiled[function] if self.jit_compile else function

    def weak_samples(self, uniform: tf.Tensor, kind: str = "") -> Samples:
        """The choices of weak views that numbers in [0, 1) [N, 3] make."""
        mirror, shift = self._weak_kinds[kind or self.spec.weak]
        return {"flip": uniform[:, 0] < (0.5 if mirror else 0.0),
                "offset": tf.cast(uniform[:, 1:3] * (2 * shift + 1), tf.int32)}

    def labeled(self, images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Weak view of labelled images, uint8 [N, H, W, 3] to uint8; the default one where they have a policy."""
        return self.weak(images, seed, self.spec.under("labeled")[0], _LABELED)

    def weak(self, images: tf.Tensor, seed: tf.Tensor, kind: str = "", stream: int = _WEAK) -> tf.Tensor:
        """Weak view of unlabelled images, uint8 to uint8, or one of another kind."""
        images, kind = tf.convert_to_tensor(images), kind or self.spec.weak
        if kind == "x":
            return images
        samples = self.weak_samples(uniform_numbers(seed, stream, images.shape[0], 3), kind)
        return self.weak_view(images, samples, kind)

    def weak_view(self, images: tf.Tensor, samples: Samples, kind: str = "") -> tf.Tensor:
        """The weak view that `samples` describe."""
        shift = self._weak_kinds[kind or self.spec.weak][1]
        return self._compiled(kernels.mirror_and_shift)(images, **samples, shift=shift)

    def sample_strong(self, n: int, seed: tf.Tensor, rates: tf.Tensor | None = None, part: str = "strong") -> Samples:
        """All random choices of `strong` for n images; a step that also learns gives its reading of the `rates`."""
        return self.strong_samples(lambda numbers: uniform_numbers(seed, _STRONG, n, numbers), rates, part)

    def strong_samples(self, uniform: Callable[[int], tf.Tensor], rates: tf.Tensor | None = None, part: str = "strong",
                       ) -> Samples:
        """The choices that numbers in [0, 1) make: `uniform` gives so many for each image."""
        weak, strong = self.spec.under(part)
        settings, draw = parse_policy(strong), None
        if isinstance(settings, AutoAugment):
            numbers, draw = autoaugment.NUMBERS, partial(autoaugment.sample, self.policies)
        elif isinstance(settings, RandAugment):
            numbers, draw = settings.depth * _RAND_NUMBERS, partial(_sample_rand, settings)
        elif strong == "d" and self.learns_rates:
            rates = self.rates if rates is None else rates
            numbers = self.depth * ctaugment.TRAINING
            draw = partial(ctaugment.sample_training, rates, threshold=self.threshold, decay=self.decay)
        else:  # views without a policy draw as many: a number's place decides its value, and seeds are for ever
            numbers = self.depth * ctaugment.TRAINING * (strong == "x")
        drawn = uniform(5 + numbers)
        samples = self.weak_samples(drawn, weak) | {"centre": drawn[:, 3:5]}
        return samples | draw(drawn[:, 5:]) if draw else samples

    def strong(self, images: tf.Tensor, seed: tf.Tensor, rates: tf.Tensor | None = None, part: str = "strong",
               ) -> tf.Tensor:
        """Strong view, uint8 to float32 in [-1, 1]: a weak view of its own, the policy of a `part`, and cutout."""
        if self.own_strong is not None and part != "labeled":
            made = self._own_strong(images, seed)
            return tf.cast(made, tf.float32) if made.dtype.is_floating else tf.gather(_LEVELS, tf.cast(made, tf.int32))
        return self.strong_view(images, self.sample_strong(images.shape[0], seed, rates, part), part)

    def strong_view(self, images: tf.Tensor, samples: Samples, part: str = "strong") -> tf.Tensor:
        """The strong view that `samples` describe."""
        weak, strong = self.spec.under(part)
        settings, shift = parse_policy(strong), self._weak_kinds[weak][1]
        if settings:
            auto = isinstance(settings, AutoAugment)
            return self._compiled(_rand_view)(images, samples, shift, settings.cutout, auto, self._form)
        cutout = strong == "d" and self.cutout != "no"
        return self._compiled(_cta_view)(images, samples, None, None, shift, cutout, self._form)[0]

    def strong_reference(self, images: np.ndarray, samples: Samples, part: str = "strong") -> np.ndarray:
        """`strong_view` on the host by NumPy and Pillow, image by image."""
        weak, strong = self.spec.under(part)
        settings, shift = parse_policy(strong), self._weak_kinds[weak][1]
        samples, (height, width) = {key: np.asarray(value) for key, value in samples.items()}, images.shape[1:3]
        padded = [np.pad(image[:, ::-1] if flip else image, ((shift, shift), (shift, shift), (0, 0)), mode="reflect")
                  for image, flip in zip(images, samples["flip"], strict=True)]
        x = np.stack([p[y : y + height, x : x + width] for p, (y, x) in zip(padded, samples["offset"], strict=True)])
        half, hidden = 0, np.float32(0)
        if settings:
            x = np.insert(_TRUNCATED[x], 3, 255, axis=3)
            x = pillow_policy(AUTO_OPS if isinstance(settings, AutoAugment) else RAND_OPS, x, samples)
            view = np.where(x[..., 3:] == 0, np.float32(0), _LEVELS[x[..., :3]])
            half = settings.cutout * min(height, width) // 100 // 2
        else:
            view = _LEVELS[pillow_policy(OPS, x, samples) if "ops" in samples else x]
            if strong == "d" and self.cutout != "no":
                half, hidden = (1 + int(min(height, width) * 0.499)) // 2, _LEVELS[127]
        for image, (u, v) in zip(view, samples["centre"].astype(float), strict=True):
            row, column = int(v * height), int(u * width)
            image[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = hidden
        return view

    def probe(self, weak: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, Policy]:
        """A random policy for each weak view, applied, uint8 to uint8, and itself, for `lessons`."""
        policy = self._sample_probe(weak.shape[0], seed)
        return self._compiled(_probe_view)(weak, policy, self._form), policy

    def _sample_probe(self, n: int, seed: tf.Tensor) -> Policy:
        uniform = uniform_numbers(seed, _PROBE, n, self.depth * ctaugment.PROBE)
        return ctaugment.sample_probe(tf.reshape(uniform, [-1, self.depth, ctaugment.PROBE]))

    def strong_and_probe(self, images: tf.Tensor, seed: tf.Tensor, weak: tf.Tensor, probe_seed: tf.Tensor,
                         rates: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor, Policy]:
        """`strong` of images and `probe` of weak views; together where both are CTAugment's: half the kernels."""
        kind, strong = self.spec.under("strong")
        if strong != "d":
            return (self.strong(images, seed, rates), *self.probe(weak, probe_seed))
        policy = self._sample_probe(weak.shape[0], probe_seed)
        samples = self.sample_strong(images.shape[0], seed, rates)
        made = self._compiled(_cta_view)(images, samples, weak, policy, self._weak_kinds[kind][1],
                                         self.cutout != "no", self._form)
        return (*made, policy)

    def lessons(self, policy: Policy, probabilities: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """What predictions [N, classes] on probed images of classes `labels` [N] teach: rows [N, …]."""
        onehot = tf.one_hot(labels, probabilities.shape[-1], dtype=tf.float32)
        proximity = 1.0 - 0.5 * tf.reduce_sum(tf.abs(tf.cast(probabilities, tf.float32) - onehot), -1, keepdims=True)
        return tf.concat([ctaugment.hits(policy), proximity], -1)

    def updated_rates(self, lessons: tf.Tensor, rates: tf.Tensor) -> tf.Tensor:
        return ctaugment.updated_rates(rates, lessons[:, :-1], lessons[:, -1], self.decay)


_RAND_NUMBERS = 4  # uniform numbers per operation: which, whether at all, magnitude, sign


def _sample_rand(settings: RandAugment, uniform: tf.Tensor) -> Policy:
    """Policies from uniform numbers [N, depth * _RAND_NUMBERS]; an operation that is not applied becomes Identity."""
    uniform = tf.reshape(uniform, [-1, settings.depth, _RAND_NUMBERS])
    ops = tf.cast(uniform[..., 0] * len(RAND_OPS), tf.int32)
    ops = tf.where(uniform[..., 1] < settings.probability, ops, list(RAND_OPS).index("Identity"))
    above = kernels.truncated(uniform[..., 2], settings.highest - settings.lowest + 1)
    magnitude = settings.lowest + 0.5 + tf.cast(above, tf.float32)
    return {"ops": ops, "params": tf.stack([magnitude / LEVELS, uniform[..., 3]], -1)}


def uniform_numbers(seed: tf.Tensor, stream: int, n: int, numbers: int) -> tf.Tensor:
    """Independent numbers in [0, 1) for each seed and stream: one call for all that a view needs."""
    return by_philox(partial(tf.raw_ops.StatelessRandomUniformV2, shape=[n, numbers]), fold_in(seed, stream))
