"""The numbers of the paper (Lienen & Hüllermeier, "Credal Self-Supervised Learning", NeurIPS 2021) and their protocol.

paper.json has every table as printed, mean±std over seeds, with the runs behind it: their lengths, and for each row our
method and its settings (EnAET and Meta Pseudo Labels at the length of their authors: 2^20 and 300,000 updates of 128).
Error rates are in percent, calibration errors (ECE, 15 bins) in [0, 1].
"""
import json
import math
from pathlib import Path
from typing import NamedTuple

from libml.config import schedule_length
from libml.results.metrics import shown

_DATA = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
# What the paper and (from "K" on) its program say for FixMatch and its relatives; `nearest_cell` names every deviation.
PROTOCOL = _DATA["protocol"]


class Column(NamedTuple):
    """A column of a table; labels is None for all."""

    dataset: str
    labels: int | None
    metric: str

    @property
    def place(self) -> str:
        return f"{self.dataset}, {self.labels or 'all'} labels"

    @property
    def title(self) -> str:
        return f"{self.place}, {shown(self.metric).column}"


class Cell(NamedTuple):
    """A printed number; std is None where the paper gives none."""

    mean: float
    std: float | None = None
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
        return {**PROTOCOL, **(_DATA["cifar100"] if dataset == "cifar100" else {}),
                **({"confidence": 0.0} if row.method in ("CSSL", "LSMatch") else {}), **length, **row.settings}


class PaperCell(NamedTuple):
    """The cell of the paper that a run reproduces, and the settings in which the run differs from the paper's."""

    table: Table
    row: Row
    cell: Cell
    deviations: dict[str, tuple]  # name -> (ours, the paper's)


# The paper quotes their numbers from elsewhere.
BASELINES = ("MeanTeacher", "MixMatch", "UDA", "ReMixMatch", "EnAET", "AlphaMatch", "CoMatch", "ReRankMatch",
             "MetaPseudoLabels")
RECONSTRUCTIONS = ("ReRankMatch",)  # runnable, but not known to be what the paper quotes: compared with no figure


def _table(name: str, *, seeds: int, columns: list[list], rows: list[list], **given) -> Table:
    of_cells = tuple(Column(*column) for column in columns)
    made = []
    for row_name, method, settings, cells in rows:
        pairs = zip(of_cells, cells.split("|"), strict=True)
        made.append(Row(row_name, method, settings, {column: Cell(*map(float, cell.split("±")))
                                                     for column, cell in pairs if cell.strip() != "-"}))
    return Table(name=name, seeds=tuple(range(1, seeds + 1)), columns=of_cells, rows=tuple(made), **given)


TABLES = {name: _table(name, **table) for name, table in _DATA["tables"].items()}


def close(ours, theirs) -> bool:
    """Whether two settings agree; numbers but for rounding."""
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs


def nearest_cell(config: dict, column: Column, tables: tuple[str, ...] = tuple(TABLES)) -> PaperCell | None:
    """Returns the cell of this method, dataset, label number and metric whose protocol is nearest; None without one.

    `config` is a run's configuration. Settings it does not have are not compared. Of equally near cells the first wins.
    """
    if config.get("features"):  # a head on what another network has learned: no row of the paper
        return None
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
