"""Networks: their layers, by name, from keras.applications, or a user's own; heads, and how much memory they need.

May import `libml.data.files`; knows no dataset, no method and no run.
"""
from typing import TYPE_CHECKING

from libml.lazy import exports

_NAMES = {"layers": ("PACKAGE", "BatchNormalization", "dtype_policy"),
          "nets": ("CNN13", "MLP", "Linear", "Pixels", "ShakeShake", "WideResNet"),
          "heads": ("Decoders", "Heads", "MapVector", "Projection", "TeacherAndStudent"),
          "builder": ("ARCHITECTURES", "build", "count_weights")}

if TYPE_CHECKING:
    from libml.networks.builder import ARCHITECTURES, build, count_weights
    from libml.networks.heads import Decoders, Heads, MapVector, Projection, TeacherAndStudent
    from libml.networks.layers import PACKAGE, BatchNormalization, dtype_policy
    from libml.networks.nets import CNN13, MLP, Linear, Pixels, ShakeShake, WideResNet
else:  # TensorFlow is imported when one of them is used
    __getattr__, __dir__ = exports(__name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items()
                                              for name in names})
