"""Augmentation: weak views, CTAugment, RandAugment and AutoAugment, in the graph and bit for bit what Pillow makes.

Imports no other room; knows no dataset, no network, no method and no run.
"""
from libml.lazy import exports

_NAMES = {"augmenter": ("Augmenter", "to_float", "to_uint8"),
          "copies": ("Copies",),
          "ops": ("AUTO_OPS", "OPS", "RAND_OPS", "Policy", "apply", "pillow_policy", "run_policy"),
          "spec": ("AugmentSpec", "AutoAugment", "RandAugment", "parse_augment", "parse_policy")}
__getattr__, __dir__ = exports(__name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items()
                                          for name in names})
