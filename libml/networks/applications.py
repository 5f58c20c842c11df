"""Networks of keras.applications, as --arch=keras:NAME: their names, native sizes and presets. Needs no TensorFlow."""
from __future__ import annotations

import difflib
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from libml.data import files
from libml.errors import OptionError

if TYPE_CHECKING:
    from libml.learn.model import SSLModel

PREFIX = "keras:"
# Side of the images with which the ImageNet weights were trained.
NATIVE_SIZES = {
    **dict.fromkeys(("ConvNeXtTiny", "ConvNeXtSmall", "ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtXLarge", "DenseNet121",
                     "DenseNet169", "DenseNet201", "EfficientNetB0", "EfficientNetV2B0", "MobileNet", "MobileNetV2",
                     "MobileNetV3Large", "MobileNetV3Small", "NASNetMobile", "ResNet50", "ResNet101", "ResNet152",
                     "ResNet50V2", "ResNet101V2", "ResNet152V2", "VGG16", "VGG19"), 224),
    **dict.fromkeys(("InceptionV3", "InceptionResNetV2", "Xception"), 299), "NASNetLarge": 331,
    "EfficientNetB1": 240, "EfficientNetB2": 260, "EfficientNetB3": 300, "EfficientNetB4": 380, "EfficientNetB5": 456,
    "EfficientNetB6": 528, "EfficientNetB7": 600, "EfficientNetV2B1": 240, "EfficientNetV2B2": 260,
    "EfficientNetV2B3": 300, "EfficientNetV2S": 384, "EfficientNetV2M": 480, "EfficientNetV2L": 480}
FINE_TUNING_UPDATES = 8192
NARROW_STRIDES = {"Xception"}  # strided 1x1 convolutions with 728 channels, no multiple of 16: oneDNN gets them wrong


def is_application(arch: str) -> bool:
    return arch.startswith(PREFIX)


def parse(arch: str, option: str = "arch") -> tuple[str, dict[str, float]]:
    """Returns the name and the arguments of keras:NAME or keras:NAME,alpha=NUMBER; OptionError if there is none."""
    name, *arguments = arch.removeprefix(PREFIX).split(",")
    if name not in NATIVE_SIZES:
        near = difflib.get_close_matches(name, NATIVE_SIZES, 3, 0.5)
        raise OptionError(f"{option}={arch}: keras.applications has no classifier {name!r}; "
                          f"{'did you mean ' + ' or '.join(near) + '?' if near else 'try EfficientNetV2B0.'}")
    found = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        with suppress(ValueError):
            found[key] = float(text)
        if key != "alpha" or not name.startswith("MobileNet") or not 0 < found.get(key, 0) < 100 or len(arguments) > 1:
            raise OptionError(f"{option}={arch}: {argument!r} is no argument of {name}; expected nothing behind its "
                              "name, or for a MobileNet its width, as in keras:MobileNetV2,alpha=0.5.")
    return name, found


def presets(arch: str, method: type[SSLModel], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that suit such a network, where the user has given nothing else."""
    name, _ = parse(arch)
    image_size = given.get("image_size", NATIVE_SIZES[name])
    found = {"weights": "imagenet", "image_size": image_size, "batch": files.batch_size(image_size)}
    if given.get("weights") == "none":
        return found
    kimg = FINE_TUNING_UPDATES * given.get("batch", found["batch"]) / 1024
    # A tenth of the usual rates: good weights are to be adapted, not to be forgotten.
    return {**found, "lr": 0.003 if method.cosine_decay else 0.0002, "ema": 0.99, "bn_momentum": 0.99,
            "train_kimg": kimg}


def feature_presets(features: str, method: type[SSLModel], pixels: int) -> dict[str, Any]:
    """Returns the options that suit a head on features of images of so many pixels: see docs/features.md."""
    found = {"arch": "linear", "augment": "d.d.rac", "batch": 64, "ema": 0.99, "train_kimg": 96.0,
             "mixed_precision": "auto", "baseline": True}
    if method.cosine_decay:  # SGD; those with Adam keep their own
        found |= {"lr": 0.01, "wd": 0.02}
    if is_application(features):  # networks tell little of images that are much smaller than those they were made for
        native = NATIVE_SIZES[parse(features, "features")[0]]
        found |= {"weights": "imagenet", "image_size": min(native, max(96, 3 * pixels))}
    elif features == "pixels":  # a shifted image is another one to them: views differ by dropped dimensions alone
        found |= {"augment": "x.x.x", "feature_views": "0,1"}
    else:
        found["augment"] = "d.d.x"  # its views are there, or noise
    return found


def default_scales(width: int) -> int:
    """Stages that bring images of this width down to feature maps of 8 pixels, or 5 to 7."""
    return max(1, math.ceil(math.log2(width)) - 2)
