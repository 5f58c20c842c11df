"""Weak views, CTAugment and RandAugment, in the graph and bit for bit what Pillow makes."""
from libml.augment.ops import OPS, RAND_OPS, apply, pillow_apply

__all__ = ["OPS", "RAND_OPS", "apply", "pillow_apply"]
