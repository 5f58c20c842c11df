"""A trained model as files that need TensorFlow alone: SavedModel, `.keras` of plain layers, TFLite, ONNX."""
from __future__ import annotations

import contextlib
import glob
import importlib.util
import io
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from libml import networks
from libml.augment.augmenter import to_float
from libml.data.files import checked_length
from libml.errors import UserError
from libml.learn.model import SSLModel
from libml.networks.builder import Application
from libml.results import calibration, metrics
from libml.results.predict import CLASSES, EXPORT_FILE, SAVED_MODEL, Classifier
from libml.writing import checksum, unfinished, write_text, writing

if TYPE_CHECKING:
    from libml.data import SSLData
    from libml.features import Embedder
    from libml.run import Run

FORMAT = "cssl-export 1"
KERAS, TFLITE, ONNX = "model.keras", "model.tflite", "model.onnx"
_OURS = re.compile("|".join((  # what is in the folder of an export
    r"(export|classes)\.json", r"model\.(keras|tflite|onnx)", "saved_model(/variables|/assets)?",
    r"saved_model/(saved_model|fingerprint)\.pb", r"saved_model/variables/variables\.(index|data-\d+-of-\d+)")))
MAX_DIFFERENCE = 1e-3  # of a probability; what is measured is some 1e-6
_PRECISION = 2.0 ** 22  # Pillow's fixed point


# The network in plain Keras layers.

def _chain(x: keras.KerasTensor, *layers: keras.Layer) -> keras.KerasTensor:
    """What layers make of a Keras tensor, one after the other: ours, and those with weights, by copies in float32."""
    for layer in layers:
        plain = layer
        if isinstance(layer, keras.layers.Conv2D):
            plain = keras.layers.Conv2D(layer.filters, layer.kernel_size, layer.strides, layer.padding, name=layer.name)
        elif isinstance(layer, keras.layers.Dense):
            plain = keras.layers.Dense(layer.units, use_bias=layer.use_bias, name=layer.name)
        elif isinstance(layer, networks.BatchNormalization):
            plain = keras.layers.BatchNormalization(momentum=layer.momentum, epsilon=layer.epsilon, name=layer.name)
        x = plain(x)
        plain.set_weights(layer.get_weights())
    return x


def _residual(block: keras.Layer, x: keras.KerasTensor) -> keras.KerasTensor:
    y = _chain(x, block.norm1, keras.layers.LeakyReLU(0.1))
    if block.activate_shortcut:
        x = y
    y = _chain(y, block.conv1, block.norm2, keras.layers.LeakyReLU(0.1), block.conv2)
    return keras.layers.Add()([y, x if block.shortcut is None else _chain(x, block.shortcut)])


def _shake(block: keras.Layer, x: keras.KerasTensor) -> keras.KerasTensor:
    activated = keras.layers.ReLU()(x)
    branches = [_chain(activated, conv1, norm1, keras.layers.ReLU(), conv2, norm2)
                for conv1, norm1, conv2, norm2 in (block.first, block.second)]
    if block.shortcut is not None:
        paths = [activated]
        if block.stride > 1:
            paths.append(_chain(activated, keras.layers.Cropping2D(((1, 0), (1, 0))),
                                keras.layers.ZeroPadding2D(((0, 1), (0, 1)))))
        joined = [_chain(path, conv) for conv, path in zip(block.shortcut, paths, strict=True)]
        x = _chain(keras.layers.Concatenate()(joined) if len(joined) > 1 else joined[0], block.shortcut_norm)
    return keras.layers.Add()([x, keras.layers.Average()(branches)])


def _features(network: keras.Model, x: keras.KerasTensor) -> keras.KerasTensor:
    """The feature map of a network, its passes at inference drawn with layers that every Keras has."""
    if isinstance(network, networks.WideResNet):
        x = _chain(x, network.stem)
        for block in network.blocks:
            x = _residual(block, x)
        return _chain(x, network.norm, keras.layers.LeakyReLU(0.1))
    if isinstance(network, networks.ShakeShake):
        x = _chain(x, network.stem, network.norm)
        for block in network.blocks:
            x = _shake(block, x)
        return keras.layers.ReLU()(x)
    if isinstance(network, networks.CNN13):
        for i, (conv, norm) in enumerate(zip(network.body[::2], network.body[1::2], strict=True)):
            if i in (3, 6):
                x = keras.layers.MaxPooling2D(2, 2, "same")(x)
            x = _chain(x, conv, keras.layers.LeakyReLU(0.2), norm)
        return x
    if isinstance(network, networks.Linear):
        return _chain(x, network.hidden, keras.layers.LeakyReLU(0.1)) if isinstance(network, networks.MLP) else x
    if isinstance(network, networks.Pixels):
        return _chain(x, keras.layers.AveragePooling2D(network.pool), keras.layers.Resizing(network.side, network.side),
                      keras.layers.Flatten(), network.projection, keras.layers.Reshape((1, 1, network.width)))
    if isinstance(network, Application):
        size = network.body.input_shape[1:3]
        if tuple(x.shape[1:3]) != size:
            x = keras.layers.Resizing(*size)(x)
        return _copied(network.body, network.preprocess(keras.layers.Rescaling(127.5, 127.5)(x)))
    raise UserError(f"There is no form of {type(network).__name__} in plain Keras layers.")


def plain_logits(network: keras.Model, x: keras.KerasTensor) -> keras.KerasTensor:
    """Logits of a Keras tensor by plain layers with the network's weights; networks of Keras layers are copied."""
    if isinstance(network, networks.Heads | networks.Decoders):
        network = network.network
    if isinstance(network, networks.TeacherAndStudent):
        network = network.student
    if isinstance(network, keras.Sequential) or type(network).__name__ == "Functional":
        return _copied(network, x)
    return _chain(_features(network, x), keras.layers.GlobalAveragePooling2D(), network.classifier)


def _copied(network: keras.Model, x: keras.KerasTensor) -> keras.KerasTensor:
    copy = keras.models.clone_model(network)
    copy.set_weights(network.get_weights())
    return copy(x, training=False)


@contextlib.contextmanager
def averaged(model: SSLModel) -> Iterator[None]:
    """Puts the averaged weights into the network, and the current ones back at the end."""
    variables = model.network.trainable_variables
    current = [variable.numpy() for variable in variables]
    for variable, average in zip(variables, model.ema_weights, strict=True):
        variable.assign(average)
    try:
        yield
    finally:
        for variable, value in zip(variables, current, strict=True):
            variable.assign(value)


def plain_model(model: SSLModel, classifier: Classifier, temperature: float = 1.0) -> keras.Model:
    """Returns a model of plain Keras layers from uint8 images to {"logits", "probabilities"}; call it `averaged`."""
    x = images = keras.Input(classifier.image_shape, dtype="uint8", name="images")
    scale, offset = 1 / 127.5, -1.0
    if classifier.embedder is not None:
        x = _features(classifier.embedder.network, keras.layers.Rescaling(scale, offset, name="pixels")(images))
        x, scale, offset = keras.layers.GlobalAveragePooling2D(keepdims=True)(x), 1.0, 0.0
    if model.image_statistics is not None:  # one layer for both: ((x / 127.5 - 1) - mean) / deviation
        mean, deviation = (np.asarray(x, np.float64) for x in model.image_statistics)
        scale, offset = (scale / deviation).tolist(), ((offset - mean) / deviation).tolist()
    x = keras.layers.Rescaling(scale, offset, name="preprocessing")(x)
    logits = plain_logits(model.network, x)
    scaled = keras.layers.Rescaling(1 / temperature, name="temperature")(logits)
    return keras.Model(images, {"logits": logits, "probabilities": keras.layers.Softmax(name="probabilities")(scaled)},
                       name="classifier")


# The SavedModel.

def _resampling_weights(extent: tf.Tensor, size: int) -> tf.Tensor:
    """Pillow's fixed-point weights [size, extent] of its bicubic filter, as whole float64 numbers."""
    scale = tf.cast(extent, tf.float64) / size
    stretch = tf.maximum(scale, 1.0)  # antialiasing where images shrink
    centre = (tf.range(size, dtype=tf.float64) + 0.5)[:, None] * scale
    support = 2.0 * stretch
    pixel = tf.range(extent, dtype=tf.int32)[None]
    low = tf.maximum(tf.cast(centre - support + 0.5, tf.int32), 0)
    high = tf.minimum(tf.cast(centre + support + 0.5, tf.int32), extent)
    x = tf.abs((tf.cast(pixel, tf.float64) - centre + 0.5) / stretch)
    near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    w = tf.where((pixel >= low) & (pixel < high), tf.where(x < 1, near, tf.where(x < 2, far, 0.0)), 0.0)
    w /= tf.reduce_sum(w, 1, keepdims=True)
    return tf.cast(tf.cast(w * _PRECISION + tf.sign(w) * 0.5, tf.int64), tf.float64)  # rounded as a C cast does


def resize_as_pillow(image: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Image.resize((width, height), BICUBIC) of one uint8 image [h, w, 3] of any size, within a graph.

    Products of bytes and 22-bit weights, and their sums, are exact in float64; columns before rows, bytes between.
    """
    def along_rows(x: tf.Tensor, size: int) -> tf.Tensor:
        shape = tf.shape(x)
        total = tf.matmul(_resampling_weights(shape[0], size), tf.reshape(x, [shape[0], -1]))
        rounded = tf.clip_by_value(tf.floor((total + _PRECISION / 2) / _PRECISION), 0.0, 255.0)
        return tf.reshape(rounded, tf.concat([[size], shape[1:]], 0))

    x = along_rows(tf.transpose(tf.cast(image, tf.float64), [1, 0, 2]), width)
    x = along_rows(tf.transpose(x, [1, 0, 2]), height)
    return tf.ensure_shape(tf.cast(x, tf.uint8), [height, width, 3])


def decode(encoded: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Decodes and resizes one JPEG or PNG, as Pillow does but for the orientation that cameras store."""
    image = tf.cond(tf.io.is_jpeg(encoded),
                    lambda: tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE"),
                    lambda: tf.io.decode_image(encoded, channels=3, expand_animations=False))
    return resize_as_pillow(image, height, width)


def write_saved_model(model: SSLModel, classifier: Classifier, temperature: float, folder: Path) -> None:
    """Writes a model, while it is `averaged`, with its preprocessing and class names."""
    module = tf.Module()
    items = {name: item for name, item in model.checkpoint_items().items()
             if name == "predictions" or name.startswith("state_")}
    embedder = classifier.embedder
    variables = [*model.network.variables, *(embedder.network.variables if embedder is not None else [])]
    module.variables_used = [*(variable.value for variable in variables), *items.values()]
    module.class_names = class_names = tf.Variable(classifier.class_names, trainable=False)
    height, width, channels = classifier.image_shape

    def ready(images):
        return to_float(images) if embedder is None else embedder(to_float(images))

    @tf.function(input_signature=[tf.TensorSpec([None, height, width, channels], tf.uint8, name="images")])
    def from_images(images):
        logits = model.infer(ready(images), ema=False)
        return {"logits": logits, "probabilities": tf.nn.softmax(logits / temperature),
                "classes": tf.gather(class_names, tf.argmax(logits, -1))}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="bytes")])
    def from_bytes(encoded):
        spec = tf.TensorSpec([height, width, channels], tf.uint8)
        return from_images(tf.map_fn(lambda one: decode(one, height, width), encoded, fn_output_signature=spec))

    @tf.function(input_signature=from_images.input_signature)
    def credal(images):
        return model.credal_sets(ready(images), tf.nn.softmax(from_images(images)["logits"]))

    signatures = {"serving_default": from_images, "images": from_images, "bytes": from_bytes}
    if classifier.credal is not None:
        signatures["credal"] = credal
    tf.saved_model.save(module, str(folder), signatures=signatures)


# Calibration.

def calibrate(classifier: Classifier, data: SSLData, temperature: float | None) -> dict:
    """Fits the temperature on the held-out validation images, unless one is given.

    Returns it, all metrics before and after scaling by it, and what conformal sets need, as export.json has them.
    """
    images, labels = data.held_out()
    logits, _ = classifier(images)
    if temperature is None:
        temperature, note = calibration.choose_temperature(logits, labels)
    else:
        note = f"temperature {temperature:g}, as asked for"
    parts = {"valid": (logits, labels)} if len(labels) else {}
    parts["test"] = classifier(data.test_images)[0], data.test_labels
    scores = {part: {when: metrics.scores(calibration.probabilities(z, t), y)
                     for when, t in (("before", 1.0), ("after", temperature))} for part, (z, y) in parts.items()}
    p = calibration.probabilities(logits, temperature)
    return {"temperature": temperature, "calibration": note, "scores": scores,
            "conformity_scores": calibration.conformity_scores(p, labels).tolist()}


# The folder.

def check_target(folder: Path, force: bool) -> None:
    """Raises UserError unless an export may be put there: where nothing is, or an older export with `force`."""
    if not checked_length(folder).exists() or folder.is_dir() and not any(folder.iterdir()):
        return
    inside, facts = folder.rglob("*") if folder.is_dir() else [folder], folder / EXPORT_FILE
    strange = next((path for path in inside if not _OURS.fullmatch(path.relative_to(folder).as_posix())), None)
    if not strange and not (facts.is_file() and f'"{FORMAT}"' in facts.read_text(encoding="utf-8", errors="replace")):
        strange = next(folder.iterdir())
    if strange:
        raise UserError(f"{folder} exists and is no export (it holds {strange.name}): nothing is overwritten. Name a "
                        "new folder.")
    if not force:
        raise UserError(f"{folder} holds an export already. --force replaces it; or name a new folder.")


def write_tflite(plain: keras.Model, file: Path) -> None:
    """Converts to TFLite, in float32; what Keras exports may need operations that its interpreter lacks."""
    with contextlib.redirect_stdout(io.StringIO()):  # Keras prints a page about what it does on the way
        file.write_bytes(tf.lite.TFLiteConverter.from_keras_model(plain).convert())


def probabilities_of(file: Path, images: np.ndarray) -> np.ndarray:
    """Returns what a model of an export, in any of its forms, predicts for uint8 images."""
    if file.name == SAVED_MODEL:
        loaded = tf.saved_model.load(str(file))  # which must live: a signature does not hold its variables
        outputs = loaded.signatures["images"](images=tf.constant(images))
    elif file.name == KERAS:
        outputs = keras.models.load_model(file)(images)
    elif file.name == ONNX:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(file))
        return session.run(["probabilities"], {"images": images})[0]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is to move to a package of its own
            interpreter = tf.lite.Interpreter(
                model_path=str(file),
                experimental_op_resolver_type=tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
        interpreter.resize_tensor_input(interpreter.get_input_details()[0]["index"], images.shape)
        outputs = interpreter.get_signature_runner()(images=images)
    return np.asarray(outputs["probabilities"])


def export_run(run: Run, folder: Path, *, force: bool, **options) -> dict:
    """Writes an export of a run; see `Run.export`."""
    from libml.experiment import restore

    check_target(folder, force)
    config = run.config
    # Weights are float32 in every precision.
    model = restore(run, config.replace(mixed_precision="off")) if config.scale.mixed_precision != "off" else run.model
    origin = {"method": config.method.__name__, "dataset": config.data.dataset, "run": str(run.path.resolve()),
              "checkpoint": run.checkpoint}
    return export(model, run.facts.class_names, run.calibration_data, folder, origin=origin, force=force,
                  embedder=run.embedder, **options)


def export(model: SSLModel, class_names: Sequence[str], data: Callable[[], SSLData], folder: Path, *, origin: dict,
           temperature: float | None = None, onnx: bool = False, force: bool = False,
           embedder: Embedder | None = None) -> dict:
    """Writes an export of the averaged weights of a model in float32; see `Run.export`.

    Where `data` raises UserError, nothing is calibrated. `origin` is what export.json says of where the model is from.
    """
    folder = Path(os.path.realpath(checked_length(folder)))
    if re.search(r"\\|\[.*\]", str(folder)):
        raise UserError(f"{folder} has a backslash or brackets in its name, which TensorFlow reads as a pattern. Name "
                        "another folder.")
    with writing(folder):
        for aside in folder.parent.glob(glob.escape(f".{folder.name}-old-") + f"*/{glob.escape(folder.name)}"):
            if not folder.exists():  # an export with `force` was killed between two renames
                aside.rename(folder)
                aside.parent.rmdir()
    check_target(folder, force)
    if onnx and importlib.util.find_spec("tf2onnx") is None:
        raise UserError("ONNX needs the package tf2onnx, which is not installed: pip install tf2onnx onnx.")
    if temperature is not None and not (isinstance(temperature, int | float | np.number)
                                        and calibration.LOWEST <= temperature <= calibration.HIGHEST):
        raise UserError(f"temperature={temperature!r}: expected {calibration.LOWEST} to {calibration.HIGHEST}.")
    temperature = temperature if temperature is None else float(temperature)  # JSON knows none of NumPy's
    with contextlib.ExitStack() as stack:
        with writing(folder):
            place = stack.enter_context(unfinished(folder))
        classifier = Classifier.of_model(model, class_names, data, embedder)
        try:
            calibrated = calibrate(classifier, data(), temperature)
        except UserError as error:
            calibrated = {"temperature": temperature or 1.0, "scores": {}, "conformity_scores": [],
                          "calibration": f"temperature {temperature or 1:g}, not calibrated: {error}"}
        try:
            with writing(folder):
                described = _write(model, classifier, place, origin, calibrated, onnx)
                _move(place, folder, force)
        except tf.errors.OpError as error:  # what TensorFlow makes of a full disk
            raise UserError(f"Cannot write {folder} ({str(error.message).splitlines()[0][:200]}). Name a writable "
                            "place with free space.") from error
    return described


def _write(model: SSLModel, classifier: Classifier, place: Path, origin: dict, calibrated: dict, onnx: bool) -> dict:
    """Writes all files, and compares each with the model."""
    temperature = calibrated["temperature"]
    sample = np.random.default_rng(0).integers(0, 256, (16, *classifier.image_shape), np.uint8)
    expected = calibration.probabilities(classifier(sample)[0], temperature)
    differences = {}
    with averaged(model):
        plain = plain_model(model, classifier, temperature)
        plain(sample)  # Keras exports what has been called
        forms: dict[str, Callable[[Path], object]] = {
            SAVED_MODEL: partial(write_saved_model, model, classifier, temperature), KERAS: plain.save,
            TFLITE: partial(write_tflite, plain)}
        if onnx:
            forms[ONNX] = partial(plain.export, format="onnx", verbose=False)
        for name, write in forms.items():
            write(place / name)
            if name == ONNX and importlib.util.find_spec("onnxruntime") is None:
                continue
            differences[name] = float(np.abs(probabilities_of(place / name, sample) - expected).max())
            if not differences[name] <= MAX_DIFFERENCE:
                raise UserError(f"{name} differs from the run by {differences[name]:.2g} in a probability; expected at "
                                f"most {MAX_DIFFERENCE:g}. Nothing was written: please report this.")
    from libml.experiment import environment_facts

    environment = environment_facts()
    described = {
        "format": FORMAT, "class_names": classifier.class_names, "image_shape": list(classifier.image_shape), **origin,
        "updates": int(model.updates.numpy()), **calibrated, "largest_difference_of_a_probability": differences,
        **{key: environment[key] for key in ("commit", "tensorflow", "keras")}}
    write_text(place / CLASSES, json.dumps(classifier.class_names, indent=1) + "\n")
    described["checksum"] = checksum(described)
    write_text(place / EXPORT_FILE, json.dumps(described, indent=1) + "\n")
    return described


def _move(place: Path, folder: Path, force: bool) -> None:
    """Puts a whole folder in its place, where others may have put something in the meantime: nothing of theirs is lost.
    """
    try:
        place.rename(folder)  # onto nothing, or onto an empty folder; the system refuses all else
        return
    except OSError:
        check_target(folder, force)
        if not force:
            raise
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-")) / folder.name
    folder.rename(aside)
    try:
        check_target(aside, force)  # what was moved, which nobody else can change by its name any more
        place.rename(folder)
    except (OSError, UserError) as error:
        if folder.exists():
            raise UserError(f"{folder} was written by somebody else in the meantime; what was there before is in "
                            f"{aside}.") from error
        aside.rename(folder)
        raise
    else:
        aside.rename(place)  # to be deleted
    finally:
        with contextlib.suppress(OSError):  # unless it is full
            aside.parent.rmdir()
