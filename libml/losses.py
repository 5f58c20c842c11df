"""Losses, which live in `libml.learn.losses`, under the name that programs written for FixMatch look for."""
from libml.learn.losses import *  # noqa: F403
