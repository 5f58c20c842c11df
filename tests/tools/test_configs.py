"""Flag files of the paper's settings: each command in their heads is the run behind the numbers beside it."""
import re
import shlex

import pytest
from conftest import ROOT

import cssl
from cssl import cli
from libml.errors import UserError
from libml.results import paper
from libml.results.paper import TABLES, Cell, Column

FILES = sorted((ROOT / "scripts/configs").glob("*.flags"), key=lambda path: path.name)
COMMAND = re.compile(r"# (?P<command>python .*?) +# error (?P<error>[\d.]+) \+- (?P<error_std>[\d.]+)"
                     r"(?:, ECE (?P<ece>[\d.]+) \+- (?P<ece_std>[\d.]+))?")


def commands(path):
    """Yields what the head of a file says: method, argv and the cells by metric."""
    for line in path.read_text(encoding="ascii").splitlines():
        if not line.startswith("# python"):
            continue
        match = COMMAND.fullmatch(line)
        assert match, f"{path.name}: cannot read {line!r}"
        _, program, *words = shlex.split(match["command"])
        module = words.pop(0).removeprefix("cssl.") if program == "-m" else program.removesuffix(".py")
        cells = {metric: Cell(float(match[metric]), float(match[f"{metric}_std"]))
                 for metric in ("error", "ece") if match[metric]}
        yield cssl.method(module), words, cells


def deviations(config, table, row):
    """Returns the settings in which a run is not the paper's: name -> (ours, the paper's)."""
    ours = {**config.values(), "valid": config.dataset.valid, "schedule_kimg": config.total_images / 1024}
    expected = table.expected(row, config.dataset.dataset)
    assert set(row.settings) <= set(ours)
    # Hyperparameters of other methods are in PROTOCOL too.
    return {name: (ours[name], value) for name, value in expected.items() if name in ours and ours[name] != value}


def reproduced(config):
    """Returns the cells a run reproduces without any deviation: (table, row, column) -> cell."""
    place = (config.dataset.dataset, config.dataset.labels)
    return {(table.name, row.name, column): cell for table in TABLES.values() for row in table.rows
            if row.method == config.method.__name__ for column, cell in row.cells.items()
            if (column.dataset, column.labels) == place and not deviations(config, table, row)}


@pytest.fixture(autouse=True)
def root(monkeypatch):
    monkeypatch.chdir(ROOT)  # the commands are given from there


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_command_is_the_run_behind_its_numbers(path):
    found = list(commands(path))
    assert found
    for method, argv, quoted in found:
        assert argv[0] == f"--flagfile=scripts/configs/{path.name}"
        config = cli.configuration(method, ["cssl.py", *argv])
        cells = reproduced(config)
        assert cells, f"{method.__name__} {argv} reproduces no cell"
        # One number for each metric, whichever tables print it, and none left out.
        by_metric = {}
        for (*_, column), cell in cells.items():
            by_metric.setdefault(column.metric, set()).add(cell)
        assert by_metric == {metric: {cell} for metric, cell in quoted.items()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_head_and_flags_agree(path):
    text = path.read_text(encoding="ascii")  # absl reads flag files in the encoding of the locale
    for method, argv, _ in commands(path):
        config = cli.configuration(method, ["cssl.py", *argv])
        name, training = config.dataset, config.training
        assert name.seed == 1
        assert path.stem.endswith(f"{name.dataset}_{name.labels}")
        assert 2 ** int(re.search(r"2\^(\d+) updates", text)[1]) == config.updates
        # Where reproduce puts its runs of this length, so that neither repeats the other's.
        assert config.data.train_dir == f"experiments/kimg{training.train_kimg:g}"
        seeds = {len(TABLES[table].seeds) for table, *_ in reproduced(config)}
        assert seeds == {int(re.search(r"splits 1 to (\d)", text)[1])}
        other = f"{name.dataset}.2@{name.labels}-1"
        assert f"--dataset={other} after the file" in text
        assert str(cli.configuration(method, ["cssl.py", *argv, f"--dataset={other}"]).dataset) == other


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_networks_are_the_paper_s(path):
    method, argv, _ = next(commands(path))
    network = cli.configuration(method, ["cssl.py", *argv]).network
    width = 8 if "cifar100" in path.stem else 2
    stages = 5 if "stl10" in path.stem else 3  # by the original program's rule for 96 pixels
    assert (network.filters, network.repeat, network.scales) == (16 * width, 4, stages)  # Wide ResNet-28-<width>
    assert f"WRN-28-{width}" in path.read_text(encoding="ascii").splitlines()[0]


def test_every_cell_has_a_command():
    found = set()
    for path in FILES:
        for method, argv, _ in commands(path):
            found |= set(reproduced(cli.configuration(method, ["cssl.py", *argv])))
    wanted = {(table.name, row.name, column) for table in TABLES.values() for row in table.rows
              if row.method and row.method not in paper.RECONSTRUCTIONS
              and "train_kimg" not in row.settings  # lengths of their own: `reproduce` has them
              for column in row.cells}
    assert wanted - found == set()
    assert {(table, column) for table, _, column in found} == {(table.name, column) for table in TABLES.values()
                                                               for column in table.columns}


def test_a_deviation_is_seen():
    config = cli.configuration(cssl.method("cssl"), ["cssl.py", "--flagfile=scripts/configs/cifar10_40.flags"])
    table, row = TABLES["results"], TABLES["results"].rows[-1]
    assert deviations(config, table, row) == {}
    assert deviations(config.replace(filters=16), table, row) == {"filters": (16, 32)}
    assert deviations(config.replace(train_kimg=32.0), table, row) == {"train_kimg": (32.0, 65536),
                                                                       "schedule_kimg": (32.0, 65536)}
    assert Column("cifar10", 40, "error") in row.cells


@pytest.mark.parametrize(("content", "message"), [
    (b"--filtres=32\n", "filtres"), (b"--filters=x\n", "filters"), (b"filters\n", "filters"), (None, "own.flags")])
def test_bad_flag_files_are_one_clear_line(tmp_path, content, message):
    path = tmp_path / "own.flags"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        cli.configuration(cssl.method("cssl"), ["cssl.py", f"--flagfile={path}"])
    assert "\n" not in str(error.value)
