"""Networks under the name that FixMatch's users know: see `libml.networks`."""
from libml.networks import ARCHITECTURES as ARCHITECTURES
from libml.networks import build as build
from libml.networks import count_weights as count_weights
