"""What a run is: options, each declared once, and the configuration that is made of them. Needs no TensorFlow."""
from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from libml.augment.spec import parse_augment
from libml.data import files
from libml.data.names import GRAMMAR, DatasetName, parse_name
from libml.errors import OptionError, UserError
from libml.networks import applications

if TYPE_CHECKING:
    from libml.data import SSLData
    from libml.learn.model import SSLModel
    from libml.learn.options import SharedOptions

Value = TypeVar("Value", bool, int, float, str)
Values: TypeAlias = "dict[str, Any]"  # by the names of options
HOUSEKEEPING: Values = dict(named=False, fixed=False, row=False)  # of options that change no result
OWN = "own"  # features that a program brings along
HEADS = ("linear", "mlp")  # networks that are trained on features
MAX_KIMG = 1e12
MAX_NAME = 250  # characters of a folder's name


def option(default: Value, help: str, *, low: float | None = None, high: float | None = None,
           above: float | None = None, choices: tuple = (), also: str = "", named: bool | None = None,
           fixed: bool = True, row: bool = True, local: bool = False, needs: str = "", flag: bool = True) -> Value:
    """Declares one option of a dataclass of options, of its default's type, with a line of help.

    Args:
        low: the smallest value.
        high: the largest value.
        above: a bound that is no value itself.
        choices: all values of an option that is a word.
        also: the form of further values, which begin like it up to the colon.
        named: whether the run folder's name has it: always, never, or (None) where it is not the default.
        fixed: whether a run can only be continued with the same value.
        row: whether runs that differ in it stand in different rows of a table.
        local: whether the processes of one run may have different values.
        needs: what a method must use for it to have an effect: "unlabelled images", "alignment" or
            "CTAugment"; "" for an effect with every method.
        flag: whether the command line has it.
    """
    return dataclasses.field(default=default, metadata={
        "help": help, "low": low, "high": high, "above": above, "choices": choices, "also": also, "named": named,
        "fixed": fixed, "row": row, "local": local, "needs": needs, "flag": flag})


def describe(options: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(options)}


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What to train on and where files go."""

    dataset: str = option("cifar10.1@4000-5000", GRAMMAR.removeprefix("expected "), named=False, row=False)
    data_dir: str = option("", "folder of the TFDS datasets; $ML_DATA, or what TFDS uses, by default", local=True,
                           **HOUSEKEEPING)
    train_dir: str = option("./experiments", "folder for runs", local=True, **HOUSEKEEPING)
    rerun: str = option("", "name of a repetition: a folder between --train_dir and the run's", **HOUSEKEEPING)
    image_size: int = option(32, "side to which your images (folders, CSV files) are resized; with keras:NAME, "
                             "that of any image", low=8, high=4096)
    mirror: bool = option(True, "mirrors images, where the dataset allows it; --nomirror for letters, digits, road "
                          "signs")
    whiten: bool = option(False, "normalises images by the training images' mean and deviation per channel")
    features: str = option("", "trains a head on features of the images: keras:NAME (by a network of "
                           "keras.applications), pixels, or a file of embeddings, FILE.npz")
    feature_views: str = option("2,4", "weak and strong views per image of which --features are made")
    eval_ckpt: str = option("", "evaluates this run or checkpoint instead of training", **HOUSEKEEPING)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    arch: str = option("resnet", "network; keras:NAME is one of keras.applications, linear and mlp are for --features",
                       choices=("resnet", "cnn13", "shake", "mcdropresnet", "linear", "mlp"), also="keras:NAME",
                       named=True)
    weights: str = option("none", "weights that keras:NAME starts from: imagenet, none, or a file (.weights.h5, "
                          ".keras)")
    filters: int = option(32, "filters of the first stage: 32 is WRN-28-2, 128 WRN-28-8", low=1, named=True)
    repeat: int = option(4, "residual blocks per stage", low=1, named=True)
    scales: int = option(0, "stages, each at half the resolution; 0: ceil(log2(width)) - 2", low=0, named=True)
    head_dropout: float = option(0.5, "share of a feature's dimensions that linear and mlp drop in training", low=0,
                                 high=0.95)
    bn_momentum: float = option(0.999, "momentum of batch normalisation's moving statistics", low=0, high=1)
    own_network: str = option("", "name and digest of a network that a program brings along", named=False, flag=False)


@dataclass(frozen=True, kw_only=True)
class AugmentOptions:
    augment: str = option("d.d.d", "views, labelled.weak.strong (d.d.d: CTAugment; d.d.rac: RandAugment and cutout). "
                          "Labelled, weak: d default, m mirror, x none; strong: d, x, ra, rac, rac2 to rac9, "
                          "r<N>_<M>_<C>, aa, aac. Four parts: labelled.labelled_strong.weak.strong", named=False)
    adepth: int = option(2, "CTAugment: operations per image", low=1, high=100, named=False, needs="CTAugment")
    ath: float = option(0.80, "CTAugment: bins whose relative rate is lower are not drawn", low=0, high=1, named=False,
                        needs="CTAugment")
    adecay: float = option(0.99, "CTAugment: decay of the rates", low=0, high=1, named=False, needs="CTAugment")
    own_strong: str = option("", "name of a strong augmentation that a program brings along", named=False, flag=False)
    cutout: str = option("yes", "CTAugment: cutout after the policy, no cutout, or only cutout",
                         choices=("yes", "no", "only"), needs="CTAugment")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How long to train and when to report; kimg = 1024 labelled images."""

    train_kimg: float = option(65536.0, "length in kimg: 1,024 labelled images; 65536 kimg are 2^20 updates of 64",
                               above=0, high=MAX_KIMG, named=False, fixed=False)
    schedule_kimg: float = option(0.0, "length of the learning rate's cosine in kimg; 0: that of the run", low=0,
                                  high=MAX_KIMG)
    report_kimg: float = option(64.0, "kimg between reports: evaluation and log", above=0, high=MAX_KIMG, named=False,
                                row=False)
    save_kimg: float = option(64.0, "kimg between checkpoints, on the grid of the reports", above=0, high=MAX_KIMG,
                              **HOUSEKEEPING)
    keep_ckpt: int = option(50, "how many checkpoints to keep", low=1, **HOUSEKEEPING)
    baseline: bool = option(False, "compares, at the end, with logistic regression on the labels alone (on the same "
                            "features, or on pixels)", **HOUSEKEEPING)
    seed: int = option(0, "of weights, batches and augmentation; the split's is in the dataset's name",
                       low=0, high=2 ** 62, row=False)
    own_method: str = option("", "digest of the class of a method that a program brings along", named=False, flag=False)


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    strategy: str = option("auto", "one device, all of this machine, or several machines; auto: what TF_CONFIG, SLURM "
                           "and the visible GPUs say",
                           choices=("auto", "one", "mirrored", "multiworker"), **HOUSEKEEPING)
    num_devices: int = option(0, "devices per process; 0: all visible GPUs, or one CPU; without GPUs: logical CPUs",
                              low=0, high=1024, **HOUSEKEEPING)
    communication: str = option("auto", "how replicas exchange gradients: by NCCL, or by TensorFlow's ring; auto: NCCL "
                                "where all have GPUs",
                                choices=("auto", "nccl", "ring"), **HOUSEKEEPING)
    mixed_precision: str = option("off", "computes in half precision, keeps weights, statistics and losses in float32; "
                                  "auto: bfloat16 where the processor is fast at it", choices=("off", "float16",
                                                                                               "bfloat16", "auto"))
    jit: bool = option(False, "compiles forward and backward pass with XLA")
    views: str = option("auto", "augmentation compiled by XLA or by single kernels; auto: XLA on GPUs where a trial "
                        "succeeds, and on CPUs in long runs",
                        choices=("auto", "xla", "kernels"), **HOUSEKEEPING)
    sync_bn: bool = option(False, "normalises batches over all replicas' images, not over each replica's")
    recompute: bool = option(False, "computes residual blocks again in the backward pass: less memory, more time",
                             **HOUSEKEEPING)
    tf32: bool = option(True, "TensorFloat-32 for float32 products, as TensorFlow has it on GPUs since Ampere",
                        **HOUSEKEEPING)
    deterministic: bool = option(False, "only operations that repeat bit by bit, on GPUs too (slower there)",
                                 **HOUSEKEEPING)


GROUPS: dict[str, type] = {"data": DataOptions, "network": NetworkOptions, "augmentation": AugmentOptions,
                           "training": TrainOptions, "scale": ScaleOptions}
COMMON = {name: field for group in GROUPS.values() for name, field in describe(group).items()}


def sets_row_apart(name: str) -> bool:
    """Whether runs that differ in an option stand in different rows; those of a method do."""
    return name != "method" and (name not in COMMON or COMMON[name].metadata["row"])


def schedule_length(values: dict) -> float | None:
    """Returns the length in kimg of a run's cosine: that of the run unless it has one of its own."""
    return values.get("schedule_kimg") or values.get("train_kimg")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _short(path: Path) -> str:
    """A name for a path that may be long: two files of one name stay apart."""
    path = path.resolve()
    return f"{path.name}-{_digest(str(path))}"


def _checked(name: str, value: Any, field: Any) -> Any:
    """Returns a value in the option's type; OptionError if it is of another one or out of range."""
    kind, facts = type(field.default), field.metadata
    low, high, above = facts["low"], facts["high"], facts["above"]
    value = value.item() if isinstance(value, np.generic) else value
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2 ** 53 else math.inf
    if kind is not type(value):
        raise OptionError(f"{name}={value!r}: expected {'text' if kind is str else kind.__name__}.")
    if kind is str and value.encode(errors="ignore").decode() != value:  # surrogates, as Python shows other bytes
        raise OptionError(f"{name}={value!a}: expected text in UTF-8.")
    further = facts["also"] and value.startswith(facts["also"].split(":")[0] + ":")
    if facts["choices"] and value not in facts["choices"] and not further:
        raise OptionError(f"{name}={value}: expected {', '.join(filter(None, [*facts['choices'], facts['also']]))}.")
    if kind is float and not -math.inf < value < math.inf:
        raise OptionError(f"{name}={value}: expected a finite number.")
    if above is not None and value <= above or low is not None and value < low or high is not None and value > high:
        if high is not None:
            wanted = f"a number from {low} to {high}" if above is None else f"more than {above:g}, at most {high:g}"
        elif above == 0 or low == 1:
            wanted = "a positive number"
        else:
            wanted = f"{low:g} or more" if above is None else f"more than {above:g}"
        raise OptionError(f"{name}={value}: expected {wanted}.")
    return value


def _all_checked(method: type[SSLModel], fields: dict[str, dataclasses.Field], values: Values) -> Values:
    """Returns values in their options' types."""
    for name, value in values.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            raise OptionError(f"{name}={value!r}: {method.__name__} has no such option"
                              f"{f'; did you mean {near[0]}?' if near else '.'}")
    return {name: _checked(name, value, fields[name]) for name, value in values.items()}


def parse_views(text: str) -> tuple[int, int]:
    """Returns the numbers of weak and strong views that feature_views says."""
    match = re.fullmatch(r"([0-9]{1,2}),([0-9]{1,2})", str(text))
    if not match:
        raise OptionError(f"feature_views={text}: expected the numbers of weak and strong views, such as 2,4.")
    return int(match[1]), int(match[2])


def make_options(method: type[SSLModel], options: SharedOptions | None, given: Values) -> Any:
    """Returns the options of a model, given as an instance of the method's `Options` or by name, and then checked."""
    if options is not None and given:
        raise UserError(f"Got options and also {', '.join(given)}: put them all into options, or leave that out.")
    return options or method.Options(**_all_checked(method, describe(method.Options), given))


def _presets(method: type[SSLModel], dataset: DatasetName, listing: files.Listing | None, given: Values) -> Values:
    """Returns what suits method, images, network and dataset where the user says nothing; what comes later wins."""
    arch, by_method = given.get("arch", ""), method.presets
    presets = {**by_method.get("any", {}), **by_method.get(f"{dataset.labels} labels", {})}
    network = applications.presets(arch, method, given) if applications.is_application(arch) else {}
    if listing:
        presets |= files.presets(listing, given.get("image_size", network.get("image_size")))
    presets |= network
    features = given.get("features", "")
    if features:
        pixels = listing.pixels if listing else given.get("image_size", dataset.entry.width)
        presets |= applications.feature_presets(features, method, pixels) | by_method.get("features", {})
    if "train_kimg" in presets:  # 64 reports, of which the last 20 make the result
        part = (presets | given)["train_kimg"] / 64
        presets |= {"report_kimg": part, "save_kimg": part, "keep_ckpt": 5, "warmup_kimg": part}
    by_dataset = {**dataset.entry.presets, **by_method.get(dataset.dataset, {})}
    if method.needs_float32:
        presets.pop("mixed_precision", None)
    if method.decoupled_weight_decay:  # another scale than that of the L2 penalty
        by_dataset.pop("wd", None)
    presets |= {} if features else by_dataset
    return {name: value for name, value in presets.items() if name in RunConfig.fields(method) and name not in given}


@dataclass(frozen=True)
class RunConfig:
    """A run: the method, its hyperparameters and the options that all methods have.

        RunConfig.of(CSSL, dataset="digits.1@40-1", batch=32).network.filters
    """

    method: type[SSLModel]
    options: SharedOptions  # the method's own, an instance of `method.Options`
    data: DataOptions
    network: NetworkOptions
    augmentation: AugmentOptions
    training: TrainOptions
    scale: ScaleOptions
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)  # options that the user has set
    presets: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)  # options that a preset has set
    # The files of a dataset that is a path alone, whose presets they decide: listed once, here, for `load` too.
    listing: files.Listing | None = dataclasses.field(default=None, compare=False, repr=False)

    @classmethod
    def groups(cls, method: type[SSLModel]) -> dict[str, type]:
        """Returns the option classes by the title of their group, the method's own first."""
        return {f"{method.__name__} (symbols of the paper)": method.Options, **GROUPS}

    @classmethod
    def fields(cls, method: type[SSLModel]) -> dict[str, dataclasses.Field]:
        return {name: field for group in cls.groups(method).values() for name, field in describe(group).items()}

    @classmethod
    def of(cls, method: type[SSLModel], *, train_steps: int | None = None, listing: files.Listing | None = None,
           **given: Any) -> RunConfig:
        """Makes a configuration of a method: of options by name, else presets, else defaults; all checked.

        `train_steps` is the length in updates, instead of `train_kimg`; `listing` as the field, where it is known.
        """
        if not (isinstance(method, type) and hasattr(method, "Options")):
            raise UserError(f"RunConfig.of got {str(method)[:80]}; expected the class of a method, such as cssl.CSSL.")
        fields = cls.fields(method)
        defaults: Values = {name: field.default for name, field in fields.items()}
        given = _all_checked(method, fields, given)
        if train_steps is not None and "train_kimg" in given:
            raise UserError("--train_steps and --train_kimg both say how long to train; give one of them.")
        if train_steps is not None and (type(train_steps) is not int or not 0 < train_steps < 2 ** 53):
            raise OptionError(f"train_steps={train_steps}: expected a positive number.")
        values = defaults | given
        name = parse_name(values["dataset"])
        if method.uses_all_labels:
            name = dataclasses.replace(name, labels=None)
        if name.is_whole and listing is None:
            listing = files.listing(files.expand("dataset", name.path), name.is_csv)
        presets = _presets(method, name, listing, given)
        if train_steps is not None:
            given["train_kimg"] = train_steps * (values | presets)["batch"] / 1024
            presets = _presets(method, name, listing, given)
        values = defaults | presets | given | ({"dataset": str(name)} if method.uses_all_labels else {})
        width = values["image_size"] if name.path or name.is_arrays else name.entry.width
        values["scales"] = values["scales"] or applications.default_scales(width)
        return cls._build(method, values, given, presets, listing)

    @classmethod
    def _build(cls, method: type[SSLModel], values: Values, given: Collection[str], presets: Collection[str] = (),
               listing: files.Listing | None = None) -> RunConfig:
        values = _all_checked(method, cls.fields(method), values)
        options, data, network, augmentation, training, scale = (
            kind(**{name: values[name] for name in describe(kind) if name in values})
            for kind in cls.groups(method).values())
        return cls(method, options, data, network, augmentation, training, scale, frozenset(given), frozenset(presets),
                   listing)

    def __post_init__(self) -> None:
        """Checks what one option alone does not tell."""
        training, precision = self.training, self.scale.mixed_precision
        if 0 < training.schedule_kimg < training.train_kimg:
            raise OptionError(f"schedule_kimg={training.schedule_kimg} is shorter than --train_kimg="
                              f"{training.train_kimg}: the cosine would end, and turn negative, before the run does.")
        self._check_features()
        if self.method.needs_float32 and precision != "off":
            raise OptionError(f"mixed_precision={precision}: {self.method.__name__} needs changes of a pixel that half "
                              "precision rounds away; leave it off.")
        parse_augment(self.augmentation.augment).check_policies(self.dataset.entry.auto_augment)
        if applications.is_application(self.network.arch):
            applications.parse(self.network.arch)
            if self.data.whiten:
                raise OptionError(f"whiten=True: {self.network.arch} brings its own normalisation; leave it out.")
        elif self.network.weights != "none" and not applications.is_application(self.data.features):
            raise OptionError(f"weights={self.network.weights}: {self.network.arch} starts from random weights; "
                              "expected none, or a network such as --arch=keras:EfficientNetV2B0.")
        rerun = Path(self.data.rerun)
        if not self.data.train_dir or rerun.is_absolute() or ".." in rerun.parts:
            raise UserError(f"--train_dir={self.data.train_dir} --rerun={self.data.rerun}: expected a folder, and the "
                            "name of a folder within it.")
        files.checked_length(self.folder())

    def _check_features(self) -> None:
        features, arch, augment = self.data.features, self.network.arch, self.augmentation.augment
        if not features:
            if arch in HEADS or self.dataset.dataset == "arrays":
                raise OptionError(f"arch={arch}, dataset={self.data.dataset}: expected --features, which says of what.")
            return
        if applications.is_application(features):
            applications.parse(features, "features")
        elif features not in ("pixels", OWN) and not features.endswith(".npz"):
            raise OptionError(f"features={features}: expected keras:NAME, such as keras:MobileNetV2, pixels, or a file "
                              "of embeddings, FILE.npz.")
        if arch not in HEADS:
            raise OptionError(f"arch={arch}: features are trained on by {' or '.join(HEADS)}; leave it out.")
        if self.method.needs_pixels:
            raise OptionError(f"features={features}: {self.method.__name__} transforms images, which features are not. "
                              "Leave it out, or take another method.")
        if parse_augment(augment).uses_ctaugment:
            raise OptionError(f"augment={augment}: CTAugment asks the network that is trained, and features are made "
                              "before; take RandAugment, as in d.d.rac, or leave it out.")
        if self.data.whiten:
            raise OptionError("whiten=True: features are always normalised; leave it out.")
        parse_views(self.data.feature_views)

    @property
    def feature_views(self) -> tuple[int, int]:
        return parse_views(self.data.feature_views)

    @property
    def trusts_onednn(self) -> bool:
        """Whether oneDNN computes this network right; TensorFlow has to be started without it otherwise.

        Of strided 1x1 convolutions between channels that are not multiples of 16, its filter gradients are wrong at
        random on CPUs with AVX2 (by up to 60 %, in one call of some hundreds) and may crash with AVX-512. Of
        keras.applications only Xception has such convolutions.
        """
        features, arch = self.data.features, self.network.arch
        arch = features if applications.is_application(features) else arch
        if self.network.own_network:  # of which models warn
            return True
        if applications.is_application(arch):
            return applications.parse(arch)[0] not in applications.NARROW_STRIDES
        return self.network.filters % 16 == 0

    @property
    def dataset(self) -> DatasetName:
        return parse_name(self.data.dataset)

    def values(self) -> Values:
        groups = (self.options, self.data, self.network, self.augmentation, self.training, self.scale)
        return {name: getattr(group, name) for group in groups for name in describe(type(group))}

    @property
    def updates(self) -> int:
        return math.ceil(self.training.train_kimg * 1024 / self.options.batch)

    @property
    def report_updates(self) -> int:
        return max(1, round(self.training.report_kimg * 1024 / self.options.batch))

    @property
    def save_updates(self) -> int:
        """Updates between checkpoints, a multiple of those between reports."""
        grid = self.report_updates
        return max(1, round(self.training.save_kimg * 1024 / self.options.batch / grid)) * grid

    @property
    def total_images(self) -> float:
        """The horizon of the learning rate's schedule in labelled images."""
        return (self.training.schedule_kimg or self.training.train_kimg) * 1024

    def replace(self, **changes: Any) -> RunConfig:
        listing = None if "dataset" in changes else self.listing
        return self._build(self.method, self.values() | changes, self.given | set(changes),
                           self.presets - set(changes), listing)

    def with_data(self, data: SSLData) -> RunConfig:
        values, name = self.values(), parse_name(data.name)
        given = {name: values[name] for name in self.given} | {"dataset": data.name}
        if not name.is_whole:
            given["train_kimg"] = self.training.train_kimg
        if data.copies is not None:
            source = data.embedding.network if data.embedding else OWN
            if given.setdefault("features", source) != source and not given["features"].endswith(".npz"):
                raise UserError(f"features={given['features']}: the data bring features of their own ({source}). Leave "
                                "it out.")
        elif name.path or name.is_arrays and not any(
                map(applications.is_application, (self.network.arch, self.data.features))):
            given["image_size"] = data.image_shape[1]
        if self.method.uses_all_labels and len(data.labeled) < int((data.labels >= 0).sum()) - data.num_valid:
            raise UserError(f"{self.method.__name__} uses all labels, but {data.name} has {len(data.labeled)} of them: "
                            "make the data with num_labels=None.")
        return self.of(self.method, listing=data.listing, **given)

    def to_json(self) -> str:
        return json.dumps({"method": self.method.__name__, **self.values()}, indent=1)

    @classmethod
    def from_json(cls, method: type[SSLModel], stored: Values) -> RunConfig:
        """Makes the configuration of args.json, of another version too, which had other options."""
        values = {name: value for name, value in stored.items() if name in cls.fields(method)}
        return cls._build(method, values, values)

    def differences(self, stored: Values) -> dict[str, tuple]:
        """Returns what a stored configuration computes differently: name -> (stored, this)."""
        fields, values = self.fields(self.method), self.values()
        stored = {name: field.default for name, field in fields.items()} | stored
        stored["schedule_kimg"], values["schedule_kimg"] = schedule_length(stored), schedule_length(values)
        values["method"] = self.method.__name__
        fixed = {name for name in {*stored, *values} if name not in fields or fields[name].metadata["fixed"]}
        return {name: (stored.get(name), values.get(name)) for name in sorted(fixed)
                if not self.agree(name, stored.get(name), values.get(name))}

    @staticmethod
    def agree(option: str, one: Any, other: Any) -> bool:
        """Whether two values of an option are the same; of own code, only one may have a digest, which is behind a ~.
        """
        if one == other or not option.startswith("own_"):
            return one == other
        (name, _, code), (other_name, _, other_code) = one.partition("~"), other.partition("~")
        return name == other_name and not (code and other_code)

    def folder(self) -> Path:
        """Returns the folder of the run, laid out as the original's: data, strong views, then method and options."""
        name, spec, augmentation = self.dataset, parse_augment(self.augmentation.augment), self.augmentation
        dataset = name.dataset
        if name.path:
            dataset = f"{dataset.split(':')[0]}-{_short(files.expand('dataset', name.path))}"
        labels, valid = ("all" if name.labels is None else name.labels), "auto" if name.is_whole else name.valid
        strong = f"Augment_{augmentation.own_strong.partition('~')[0] or spec.strong}"
        if spec.uses_ctaugment and not augmentation.own_strong:
            strong = f"CTAugment_depth{augmentation.adepth}_th{augmentation.ath:.2f}_decay{augmentation.adecay:.3f}"
        values, unnamed, network = self.values(), set[str](), []
        values["arch"] = values["arch"].replace(":", "-")
        if values["features"].endswith(".npz"):
            values["features"] = _short(files.expand("features", values["features"]))
        values["features"] = values["features"].replace(":", "-")
        if values["weights"] not in ("none", "imagenet"):
            values["weights"] = _short(files.expand("weights", values["weights"]))
        if self.network.own_network:  # another network of the same name is to be noticed, so without its digest
            unnamed, network = set(describe(NetworkOptions)), [f"network_{self.network.own_network.rpartition('-')[0]}"]
        settings = sorted(f"{option}{values[option]}" for option, field in self.fields(self.method).items()
                          if option not in unnamed and (
                              field.metadata["named"] or field.metadata["named"] is None and field.metadata["fixed"]
                              and values[option] != field.default))
        last = "_".join([self.method.__name__, *network, *settings])
        if len(last) > MAX_NAME:  # the digest of the whole keeps apart what differs behind the cut
            last = f"{last[:MAX_NAME - 9]}-{_digest(last)}"
        parts = f"{dataset}.{augmentation.augment}.{name.seed}@{labels}-{valid}", strong, last
        return files.expand("train_dir", self.data.train_dir).joinpath(
            self.data.rerun, *(part.replace(os.sep, "_") for part in parts))
