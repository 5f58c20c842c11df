"""The paper's numbers: all there, spot values, agreement with its source, and the cell a run is compared with."""
import os
import re
from pathlib import Path

import pytest
from helpers import config

from libml.results import paper
from libml.results.paper import TABLES, Cell, Column

SIZES = {"results": (11, 10, 80), "calibration": (4, 8, 32), "efficiency": (5, 4, 20), "ablation": (3, 4, 12),
         "barely": (4, 2, 8), "ups": (3, 8, 24)}  # rows, columns, numbers


def test_all_tables_are_there():
    assert {name: (len(table.rows), len(table.columns), sum(len(row.cells) for row in table.rows))
            for name, table in TABLES.items()} == SIZES


def cell(table, row, *column):
    return next(r for r in TABLES[table].rows if r.name == row).cells.get(Column(*column))


@pytest.mark.parametrize(("place", "expected"), [
    (("results", "CSSL (CTA)", "cifar10", 40, "error"), (6.50, 0.90)),
    (("results", "CSSL (CTA)", "stl10", 1000, "error"), (10.54, 0.71)),
    (("results", "FixMatch (CTA)", "cifar100", 2500, "error"), (28.64, 0.24)),
    (("results", "UDA", "svhn", 40, "error"), (52.63, 20.51)),
    (("results", "EnAET", "svhn", 1000, "error"), (2.92, None)),
    (("calibration", "FixMatch (DA)", "svhn", 40, "ece"), (0.031, 0.020)),
    (("efficiency", "FixMatch (τ = 0.8)", "cifar10", 4000, "error"), (7.08, 0.13)),
    (("ablation", "RandAugment (w/o cutout)", "cifar10", 40, "ece"), (0.131, 0.102)),
    (("barely", "CSSL (α ≥ 0.03)", "svhn", 10, "error"), (16.63, 13.21)),
    (("ups", "UPSMatch", "cifar10", 4000, "ece"), (0.027, 0.003)),
])
def test_spot_values(place, expected):
    assert cell(*place) == Cell(*expected)


def test_empty_cells_are_absent():
    assert cell("results", "Mean Teacher", "cifar10", 40, "error") is None


def test_tables_agree_where_they_repeat_each_other():
    repeated = 0
    for name in ("calibration", "ups"):
        for row in TABLES[name].rows:
            original = next((r for r in TABLES["results"].rows
                             if (r.method, r.settings) == (row.method, row.settings)), None)
            for column, value in row.cells.items() if original else ():
                if column in original.cells:
                    assert original.cells[column] == value
                    repeated += 1
    assert repeated == 16  # FixMatch and CSSL, four columns, two tables


def paper_source() -> str:
    named = os.environ.get("CSSL_PAPER_SOURCE")
    candidates = [Path(named)] if named else sorted((Path(__file__).parents[3] / "shared/seeds").glob("*.txt"))
    for path in candidates:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if "tab:complete_results" in text:
            return text
    pytest.skip("no LaTeX source of the paper; name it with CSSL_PAPER_SOURCE")


@pytest.mark.parametrize("name", TABLES)
def test_every_number_is_the_source_s(name):
    source = paper_source()
    body = source[source.index(rf"\label{{{TABLES[name].label}}}"):]
    body = body[:body.index(r"\end{tabular}")]
    printed = {}
    for line in body.split(r"\\"):
        first, *cells = line.split("&")
        numbers = [re.findall(r"\d+\.\d+", re.sub(r"\\textbf|\\small", "", text)) for text in cells]
        if r"\pm" in line:
            title = re.sub(r"\\(midrule|pnames(\{\})?)|[${}\s]|\^\\ast", lambda m: "CSSL" if "pnames" in m[0] else "",
                           first)
            printed[title] = numbers
    replace = str.maketrans({"τ": r"\tau", "α": r"\alpha", "≥": r"\geq", " ": ""})
    ours = {row.name.translate(replace): [[n for n in row.cells.get(column, ()) if n is not None]
                                          for column in TABLES[name].columns] for row in TABLES[name].rows}
    assert ours == {title: [[float(n) for n in cell] for cell in cells] for title, cells in printed.items()}


CIFAR = Column("cifar10", 40, "error")


@pytest.mark.parametrize(("settings", "table", "row", "deviating"), [
    ({"method": "CSSL", "train_kimg": 65536}, "results", "CSSL (CTA)", set()),
    ({"method": "CSSL", "train_kimg": 32768.0}, "ablation", "CTAugment", set()),
    ({"method": "CSSL", "train_kimg": 32768, "augment": "d.d.rac"}, "ablation", "RandAugment (w/ cutout)", set()),
    ({"method": "FixMatch", "train_kimg": 8192, "schedule_kimg": 65536, "confidence": 0.8}, "efficiency",
     "FixMatch (τ = 0.8)", set()),
    ({"method": "FixMatch", "train_kimg": 8192, "confidence": 0.8}, "efficiency", "FixMatch (τ = 0.8)",
     {"schedule_kimg"}),
    ({"method": "LSMatch", "train_kimg": 65536, "filters": 16}, "calibration", "LSMatch", {"filters"}),
    ({"method": "CSSL", "train_kimg": 30, "ema": 0.98}, "results", "CSSL (CTA)", {"train_kimg", "ema"}),
    ({"method": "CSSL", "train_kimg": 65536, "arch": "cnn13", "confidence": 0.95, "reference": "aligned", "K": 2},
     "results", "CSSL (CTA)", {"arch", "confidence", "reference", "K"}),
])
def test_nearest_cell(settings, table, row, deviating):
    match = paper.nearest_cell(config(**settings), CIFAR)
    assert (match.table.name, match.row.name, set(match.deviations)) == (table, row, deviating)


def test_cifar100_has_its_own_protocol():
    ours = config(dataset="cifar100.1@400-1", train_kimg=65536, filters=128, wd=0.001)
    column = Column("cifar100", 400, "error")
    assert paper.nearest_cell(ours, column).deviations == {}
    assert set(paper.nearest_cell({**ours, "wd": 5e-4, "filters": 32}, column).deviations) == {"wd", "filters"}


def test_a_reconstruction_claims_no_figure():
    assert paper.nearest_cell(config(method="ReRankMatch", train_kimg=65536), CIFAR) is None
    assert paper.nearest_cell(config(method="CoMatch", train_kimg=65536), CIFAR).cell == Cell(6.91, 1.39)
    assert paper.nearest_cell(config(method="AlphaMatch", train_kimg=65536), CIFAR).cell == Cell(8.65, 3.38)


def test_no_cell():
    assert paper.nearest_cell(config(method="VAT"), CIFAR) is None
    assert paper.nearest_cell(config(), Column("digits", 40, "error")) is None
    assert paper.nearest_cell(config(method="UPSMatch"), CIFAR, ("results",)) is None


def test_heads_on_features_are_no_row_of_the_paper():
    settings = {"train_kimg": 65536}
    assert paper.nearest_cell(config(**settings, features=""), CIFAR)
    assert paper.nearest_cell(config(**settings, features="keras:MobileNetV2"), CIFAR) is None
