"""The numbers of the paper (Lienen & Hüllermeier, "Credal Self-Supervised Learning", NeurIPS 2021) and their protocol.

Every table as printed, mean±std over seeds, with the runs behind it: which method, which settings, how long. Error
rates are in percent, calibration errors (ECE, 15 bins) in [0, 1].
"""
import math
from typing import NamedTuple

from libml.config import schedule_length
from libml.results.metrics import shown

FULL_KIMG = 1 << 16  # 2^20 updates of 64 images

# What the paper and (from "K" on) its program say for FixMatch and its relatives; `nearest_cell` names every deviation.
PROTOCOL = {"batch": 64, "uratio": 7, "lr": 0.03, "wu": 1, "wd": 5e-4, "filters": 32, "repeat": 4, "arch": "resnet",
            "augment": "d.d.d", "adepth": 2, "ath": 0.8, "adecay": 0.99, "valid": 1, "K": 1, "ema": 0.999,
            "bn_momentum": 0.999, "reference": "raw", "p_unlabeled": "", "whiten": False, "mixed_precision": "off",
            "sync_bn": False, "mc_passes": 8, "dropout": 0.3}
_CIFAR100 = {"wd": 1e-3, "filters": 128}


class Column(NamedTuple):
    """A column of a table; labels is None for all."""

    dataset: str
    labels: int | None
    metric: str

    @property
    def place(self) -> str:
        """Dataset and labels, in words."""
        return f"{self.dataset}, {self.labels or 'all'} labels"

    @property
    def title(self) -> str:
        """Place and metric, in words."""
        return f"{self.place}, {shown(self.metric).column}"


class Cell(NamedTuple):
    """A printed number; std is None where the paper gives none."""

    mean: float
    std: float | None


class Row(NamedTuple):
    """A row: the paper's name, our method and the settings that set it apart."""

    name: str
    method: str
    settings: dict
    cells: dict[Column, Cell]  # without the empty ones


class Table(NamedTuple):
    """A table of the paper and the lengths of its runs."""

    name: str
    label: str  # in the paper's source
    seeds: tuple[int, ...]
    train_kimg: dict[str, int]  # by dataset
    schedule_kimg: int | None  # the cosine's horizon; None: the length of the run
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def expected(self, row: Row, dataset: str) -> dict:
        """Returns the configuration behind a cell, as far as the paper tells it."""
        train_kimg = row.settings.get("train_kimg", self.train_kimg[dataset])
        length = {"train_kimg": train_kimg, "schedule_kimg": self.schedule_kimg or train_kimg}
        if row.method in BASELINES:  # numbers quoted from elsewhere, with settings of their own
            return length
        return {**PROTOCOL, **(_CIFAR100 if dataset == "cifar100" else {}),
                **({"confidence": 0.0} if row.method in _ALL_IMAGES else {}), **length, **row.settings}


class PaperCell(NamedTuple):
    """The cell of the paper that a run reproduces, and the settings in which the run differs from the paper's."""

    table: Table
    row: Row
    cell: Cell
    deviations: dict[str, tuple]  # name -> (ours, the paper's)


_QUOTED: tuple = (("MeanTeacher", {}), ("MixMatch", {}), ("UDA", {}), ("ReMixMatch", {}),
                  ("EnAET", {"train_kimg": 1 << 17}),  # its authors' 2^20 updates of 128 images
                  ("AlphaMatch", {}), ("CoMatch", {}), ("ReRankMatch", {}),
                  ("MetaPseudoLabels", {"train_kimg": 37500}))  # its authors' 300,000 updates of 128
BASELINES = tuple(method for method, _ in _QUOTED)
RECONSTRUCTIONS = ("ReRankMatch",)  # runnable, but not known to be what the paper quotes: compared with no figure
_FIXMATCH = ("FixMatch", {"confidence": 0.95})
_CSSL = ("CSSL", {"alpha_bound": 0.0})
_LSMATCH: tuple = ("LSMatch", {})
_ALL_IMAGES = ("CSSL", "LSMatch")  # no threshold


def _columns(metrics: tuple[str, ...], **labels: tuple[int, ...]) -> tuple[Column, ...]:
    return tuple(Column(dataset, size, metric) for dataset, sizes in labels.items() for size in sizes
                 for metric in metrics)


def _cell(text: str) -> Cell:
    mean, _, std = text.partition("±")
    return Cell(float(mean), float(std) if std else None)


def _table(name: str, label: str, columns: tuple[Column, ...], methods: list[tuple], text: str, *, seeds: int = 5,
           train_kimg: int | dict[str, int] = FULL_KIMG, schedule_kimg: int | None = None) -> Table:
    rows = []
    for line, (method, settings) in zip(text.strip().splitlines(), methods, strict=True):
        row_name, *cells = map(str.strip, line.split("|"))
        rows.append(Row(row_name, method, settings, {column: _cell(cell) for column, cell
                                                     in zip(columns, cells, strict=True) if cell != "-"}))
    if isinstance(train_kimg, int):
        train_kimg = dict.fromkeys((column.dataset for column in columns), train_kimg)
    return Table(name, label, tuple(range(1, seeds + 1)), train_kimg, schedule_kimg, columns, tuple(rows))


_BOTH = _columns(("error", "ece"), cifar10=(40, 4000), svhn=(40, 1000))

TABLES = {table.name: table for table in (
    _table("results", "tab:complete_results",
           _columns(("error",), cifar10=(40, 250, 4000), cifar100=(400, 2500, 10000), svhn=(40, 250, 1000),
                    stl10=(1000,)),
           [*_QUOTED, _FIXMATCH, _CSSL], """
Mean Teacher   | -           | 32.32±2.30 | 9.19±0.19 | -          | 53.91±0.57 | 35.83±0.24 | -           | 3.57±0.11 | 3.42±0.07 | -
MixMatch       | 47.54±11.50 | 11.05±0.86 | 6.42±0.10 | 67.61±1.32 | 39.94±0.37 | 28.31±0.33 | 42.55±14.53 | 3.98±0.23 | 3.50±0.28 | 14.84±1.24
UDA            | 29.05±5.93  | 8.82±1.08  | 4.88±0.18 | 59.28±0.88 | 33.13±0.22 | 24.50±0.25 | 52.63±20.51 | 5.69±2.76 | 2.46±0.24 | 13.43±1.06
ReMixMatch     | 19.10±9.64  | 5.44±0.05  | 4.72±0.13 | 44.28±2.06 | 27.43±0.31 | 23.03±0.56 | 3.34±0.20   | 2.92±0.48 | 2.65±0.08 | 11.58±0.78
EnAET          | -           | 7.6±0.34   | 5.35±0.48 | -          | -          | -          | -           | 3.21±0.21 | 2.92      | -
AlphaMatch     | 8.65±3.38   | 4.97±0.29  | -         | 38.74±0.32 | 25.02±0.27 | -          | 2.97±0.26   | 2.44±0.32 | -         | 9.64±0.75
CoMatch        | 6.91±1.39   | 4.91±0.33  | -         | -          | -          | -          | -           | -         | -         | -
ReRankMatch    | 18.25±9.44  | 6.02±1.31  | 4.40±0.06 | 69.62±1.33 | 31.75±0.33 | 22.32±0.65 | 20.25±4.43  | 2.44±0.07 | 2.19±0.09 | -
Meta PL        | -           | -          | 3.89±0.07 | -          | -          | -          | -           | -         | 1.99±0.07 | -
FixMatch (CTA) | 11.39±3.35  | 5.07±0.33  | 4.31±0.15 | 49.95±3.01 | 28.64±0.24 | 23.18±0.11 | 7.65±7.65   | 2.64±0.64 | 2.28±0.19 | 10.72±0.63
CSSL (CTA)     | 6.50±0.90   | 5.48±0.49  | 4.43±0.10 | 43.43±1.39 | 28.39±1.09 | 23.25±0.28 | 3.67±2.36   | 2.18±0.12 | 1.99±0.13 | 10.54±0.71
"""),  # noqa: E501
    _table("calibration", "tab:bias", _BOTH, [_FIXMATCH, ("FixMatchDA", {"confidence": 0.95}), _LSMATCH, _CSSL], """
FixMatch      | 11.39±3.35 | 0.087±0.051 | 4.31±0.15 | 0.030±0.002 | 7.65±7.65 | 0.040±0.044 | 2.28±0.19 | 0.010±0.002
FixMatch (DA) | 7.73±1.92  | 0.048±0.012 | 4.64±0.10 | 0.027±0.001 | 5.21±2.85 | 0.031±0.020 | 2.04±0.38 | 0.010±0.001
LSMatch       | 8.37±1.63  | 0.038±0.012 | 5.60±1.32 | 0.024±0.007 | 3.82±1.46 | 0.086±0.046 | 2.13±0.11 | 0.018±0.011
CSSL          | 6.50±0.90  | 0.032±0.005 | 4.43±0.10 | 0.023±0.001 | 3.67±2.36 | 0.022±0.029 | 1.99±0.13 | 0.007±0.001
"""),
    _table("efficiency", "tab:efficiency", _columns(("error",), cifar10=(40, 4000), svhn=(40, 1000)),
           [*(("FixMatch", {"confidence": tau}) for tau in (0.0, 0.8, 0.95)), _LSMATCH, _CSSL], """
FixMatch (τ = 0.0)  | 18.50±2.92 | 6.88±0.11 | 13.82±13.57 | 2.73±0.04
FixMatch (τ = 0.8)  | 11.99±2.32 | 7.08±0.13 | 3.52±0.44   | 2.85±0.08
FixMatch (τ = 0.95) | 14.73±3.29 | 8.26±0.09 | 5.85±5.10   | 3.03±0.07
LSMatch             | 11.60±2.68 | 7.24±0.21 | 7.04±3.29   | 2.76±0.05
CSSL                | 10.04±3.32 | 6.78±0.94 | 3.50±0.49   | 2.84±0.06
""", train_kimg={"cifar10": FULL_KIMG // 8, "svhn": FULL_KIMG // 32}, schedule_kimg=FULL_KIMG),
    _table("ablation", "tab:appendix:aug", _columns(("error", "ece"), cifar10=(40, 4000)),
           [("CSSL", {"alpha_bound": 0.0, "augment": augment}) for augment in ("d.d.d", "d.d.ra", "d.d.rac")], """
CTAugment                | 6.92±0.34   | 0.035±0.005 | 5.11±0.64 | 0.028±0.001
RandAugment (w/o cutout) | 28.81±19.11 | 0.131±0.102 | 7.42±0.76 | 0.039±0.001
RandAugment (w/ cutout)  | 6.74±0.18   | 0.031±0.002 | 5.13±0.66 | 0.029±0.000
""", seeds=3, train_kimg=FULL_KIMG // 2),
    _table("barely", "tab:appendix:barelysup", _columns(("error",), cifar10=(10,), svhn=(10,)),
           [_FIXMATCH, _LSMATCH, _CSSL, ("CSSL", {"alpha_bound": 0.03})], """
FixMatch        | 31.74±17.77 | 30.57±23.82
LSMatch         | 42.14±25.33 | 44.29±27.40
CSSL            | 26.90±13.57 | 9.69±4.63
CSSL (α ≥ 0.03) | 26.10±8.02  | 16.63±13.21
""", train_kimg=FULL_KIMG // 2),
    _table("ups", "tab:appendix:ups", _BOTH, [_FIXMATCH, _CSSL, ("UPSMatch", {})], """
FixMatch | 11.39±3.35 | 0.087±0.051 | 4.31±0.15 | 0.030±0.002 | 7.65±7.65 | 0.040±0.044 | 2.28±0.19 | 0.010±0.002
CSSL     | 6.50±0.90  | 0.032±0.005 | 4.43±0.10 | 0.023±0.001 | 3.67±2.36 | 0.022±0.029 | 1.99±0.13 | 0.007±0.001
UPSMatch | 10.48±2.11 | 0.058±0.010 | 4.92±0.39 | 0.027±0.003 | 3.81±1.99 | 0.025±0.027 | 2.71±0.47 | 0.008±0.001
"""),
)}


def close(ours, theirs) -> bool:
    """Whether two settings agree; numbers but for rounding."""
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs


def nearest_cell(config: dict, column: Column, tables: tuple[str, ...] = tuple(TABLES)) -> PaperCell | None:
    """Returns the cell of this method, dataset, label number and metric whose protocol is nearest; None without one.

    `config` is a run's configuration. Settings it does not have are not compared. Of equally near cells the first wins.
    """
    config = {**config, "schedule_kimg": schedule_length(config)}
    found = []
    for table in (TABLES[name] for name in tables):
        for row in table.rows:
            if row.method == config.get("method") and column in row.cells and row.method not in RECONSTRUCTIONS:
                expected = table.expected(row, column.dataset)
                deviations = {key: (config[key], value) for key, value in expected.items()
                              if config.get(key) is not None and not close(config[key], value)}
                if deviations.get("schedule_kimg") == deviations.get("train_kimg"):
                    deviations.pop("schedule_kimg", None)  # says nothing new
                found.append(PaperCell(table, row, row.cells[column], deviations))
    return min(found, key=lambda near: len(near.deviations), default=None)
