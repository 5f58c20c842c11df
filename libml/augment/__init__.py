"""Weak views, CTAugment and RandAugment, in the graph and bit for bit what Pillow makes."""

from libml.augment.augmenter import Augmenter, to_float, to_uint8
from libml.augment.ops import OPS, RAND_OPS, Op, apply, pillow_apply
from libml.augment.policy import Policy, pillow_policy, run_policy
from libml.augment.spec import AugmentSpec, RandAugment, parse_augment

__all__ = ["OPS", "RAND_OPS", "AugmentSpec", "Augmenter", "Op", "Policy", "RandAugment", "apply", "parse_augment",
           "pillow_apply", "pillow_policy", "run_policy", "to_float", "to_uint8"]
