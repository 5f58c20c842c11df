"""Hyperparameters of methods: how they are declared, and those that several methods share."""
import dataclasses

from typing_extensions import dataclass_transform

from libml.config import option


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """Those that all methods have; each subclass becomes a frozen dataclass with keyword arguments, too."""

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    batch: int = option(64, "B: labelled images per update", low=1, named=True)
    uratio: int = option(7, "mu: unlabelled images per labelled one", low=1, named=True, needs="unlabelled images")
    lr: float = option(0.03, "eta: initial learning rate; falls as cos(7 pi t / 16), t from 0 to 1 over the run",
                       above=0, named=True)
    wd: float = option(0.0005, "weight decay: factor of 0.5 ||W||^2 over the kernels", low=0, named=True)
    ema: float = option(0.999, "decay of the average of the weights that is evaluated", low=0, high=1)
    p_unlabeled: str = option("", "class prior p~ for distribution alignment, comma-separated, or `labels`: the shares "
                             "of the labelled images, each class counted once more; uniform by default",
                             needs="alignment")


class FixMatchOptions(SharedOptions):
    wu: float = option(1.0, "lambda_u: weight of the unlabelled loss", low=0, named=True, needs="unlabelled images")
    K: int = option(1, "strong views per unlabelled image", low=1, needs="unlabelled images")


class ThresholdOptions(FixMatchOptions):
    """Those of FixMatch's relatives that select images as it does."""

    confidence: float = option(0.95, "tau: threshold on the largest class probability of the weak view", low=0, high=1,
                               named=True)


class PreFixMatchOptions(SharedOptions):
    """Those of the methods before FixMatch: as many unlabelled as labelled images, other loss weights."""

    uratio: int = option(1, "unlabelled images per labelled one", low=1, named=True)


class ConsistencyOptions(PreFixMatchOptions):
    """Those of the methods whose unlabelled loss gains weight over the first part of the run."""

    warmup_pos: float = option(0.4, "part of the run over which the unlabelled loss's weight grows linearly", low=0,
                               high=1)
