"""Datasets: their names and splits, where images come from, the sets that are trained on, and batches of them.

May import `libml.augment`; knows no method, no network and no run.
"""
from typing import TYPE_CHECKING

from libml.lazy import exports

_NAMES = {"sets": ("DataFacts", "SSLData", "from_arrays", "from_csv", "from_folder", "hold_out", "load"),
          "batching": ("batches", "check_batch", "stream_indices")}

if TYPE_CHECKING:
    from libml.data.batching import batches, check_batch, stream_indices
    from libml.data.sets import DataFacts, SSLData, from_arrays, from_csv, from_folder, hold_out, load
else:  # TensorFlow is imported when one of them is used
    __getattr__, __dir__ = exports(__name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items()
                                              for name in names})
