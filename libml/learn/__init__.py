"""Learning: what a method defines, the step that its loss uses, the update, and the functions they are made of.

May import `libml.augment`, `libml.networks` and `libml.config`; knows no dataset by name, no run and no single method.
"""
from typing import TYPE_CHECKING

from libml.lazy import exports

_NAMES = {"model": ("ALIGNMENT_LENGTH", "AdamModel", "Equal", "SSLModel"),
          "options": ("ConsistencyOptions", "PreFixMatchOptions", "SharedOptions", "ThresholdOptions"),
          "step": ("LossOutput", "Step", "UnlabeledLoss")}

if TYPE_CHECKING:
    from libml.learn.model import ALIGNMENT_LENGTH, AdamModel, Equal, SSLModel
    from libml.learn.options import ConsistencyOptions, PreFixMatchOptions, SharedOptions, ThresholdOptions
    from libml.learn.step import LossOutput, Step, UnlabeledLoss
else:  # a module is imported when one of its names is used
    __getattr__, __dir__ = exports(__name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items()
                                              for name in names})
