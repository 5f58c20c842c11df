"""Figures: what they are drawn from, both formats, and runs that lack something."""
import os
import shutil

import numpy as np
import pytest
from helpers import invoke, write_run
from matplotlib.figure import Figure

from libml.errors import UserError
from libml.results import metrics, plots
from libml.run import Run, find_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method, accuracy in (("CSSL", 93.0), ("FixMatch", 88.0)):
        for seed in (1, 2):
            write_run(folder, [accuracy - 10, accuracy + seed], method=method, dataset=f"cifar10.{seed}@40-1",
                      train_kimg=2, stats=method == "CSSL")
    return folder


def drawn(axis):
    """The lines of a panel by label, as (kimg, values)."""
    return {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axis.get_lines()}


def test_over_seeds():
    series = [(np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0])), (np.array([2, 3]), np.array([4.0, 3.0]))]
    steps, mean, std = plots.over_seeds(series)
    assert steps.tolist() == [1, 2, 3]
    assert mean.tolist() == [1, 3, 3]
    assert std.tolist() == pytest.approx([0, 2 ** 0.5, 0])


def test_curves_show_the_mean_over_seeds(folder):
    write = plots.curves(find_runs([folder]), ("error",))
    axis, = write.axes
    assert drawn(axis) == {"CSSL (2)": ([1, 2], [17, 5.5]), "FixMatch (2)": ([1, 2], [22, 10.5])}
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == 17  # one std either side: 0 at 1 kimg, 0.71 at 2 kimg
    assert band.min() == pytest.approx(5.5 - 0.5 ** 0.5)


def test_pseudo_labels_leave_out_what_no_run_reports(folder):
    figure = plots.curves(find_runs([folder]), ("monitors/mask", "monitors/nothing", "monitors/alpha"))
    assert [axis.get_ylabel() for axis in figure.axes] == ["mask rate", "mean alpha"]
    with pytest.raises(UserError, match="monitors/nothing: nothing to draw"):
        plots.curves(find_runs([folder]), ("monitors/nothing",))


def test_reliability_bars_are_the_accuracies(folder):
    run = next(run for run in find_runs([folder]) if run.method == "CSSL")
    stored = np.load(run.path / "stats/predictions.npz")
    diagram = metrics.reliability(stored["probabilities"], stored["labels"])
    top, bottom = plots.reliability([run]).axes
    used = diagram.count > 0
    assert [bar.get_height() for bar in top.patches] == pytest.approx(diagram.accuracy[used].tolist())
    assert [bar.get_height() for bar in bottom.patches] == pytest.approx((diagram.count / 200).tolist())
    assert f"ECE {metrics.expected_calibration_error(stored['probabilities'], stored['labels']):.3f}" in \
        [text.get_text() for text in top.texts]


def test_class_distribution(folder):
    run = next(run for run in find_runs([folder]) if run.method == "CSSL")
    shown = plots.class_distribution([run]).axes[0].collections[0].get_array()  # a row per class
    np.testing.assert_allclose(np.reshape(shown, (10, -1)).T, [report["class_distribution"] for report in run.reports])


def test_class_accuracy(folder):
    runs = [run for run in find_runs([folder]) if run.method == "CSSL"]
    stored = [np.load(run.path / "stats/predictions.npz") for run in runs]
    axis, = plots.class_accuracy(runs).axes
    expected = [100 * np.mean(arrays["probabilities"][arrays["labels"] == c].argmax(1) == c)
                for arrays in stored for c in range(10)]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx(expected)
    counts = np.bincount(stored[0]["labels"], minlength=10)
    assert [label.get_text() for label in axis.get_yticklabels()] == [f"class<{c}> ({counts[c]})" for c in range(10)]
    single, = plots.class_accuracy(runs[:1]).axes
    assert [text.get_text() for text in single.texts] == [f"{share:.1f}" for share in expected[:10]]


def test_credal_sets_over_time(folder):
    runs = find_runs([folder])
    axis, = plots.credal_sets(next(run for run in runs if run.method == "CSSL")).axes
    assert drawn(axis)["median"] == ([1, 2], [0.5, 0.25])  # the deciles of report n are 0, 0.1 / n … 1 / n
    heights = [band.get_paths()[0].vertices[:, 1] for band in axis.collections]
    assert [(low.min(), low.max()) for low in heights] == [(0, 1), (pytest.approx(0.05), pytest.approx(0.9)),
                                                           (pytest.approx(0.15), pytest.approx(0.7))]


def test_names_in_figures():
    figure = plots.plot_images([np.zeros((1, 8, 8, 3), np.uint8)] * 3, ["Zoë", "$5$", "two\nlines"])
    labels = figure.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["Zoë", "$5$", r"two\nlines"]
    assert not any(label.get_parse_math() for label in labels)  # a dollar sign is no formula


def test_augmentation_rates(folder):
    run = next(run for run in find_runs([folder]) if run.method == "CSSL")
    axis = plots.augmentation_rates(run).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["blur", "rescale", "rescale [2]"]
    shown = axis.images[0].get_array()
    np.testing.assert_allclose(shown[0], np.load(run.path / "stats/rates.npy")[0, 0])
    assert np.ma.count(np.ma.masked_invalid(shown[2])) == 6
    (run.path / "stats/rates.json").rename(run.path / "stats/hidden.json")
    try:
        assert plots.augmentation_rates(run) is None
    finally:
        (run.path / "stats/hidden.json").rename(run.path / "stats/rates.json")


@pytest.mark.parametrize("kind", ["curves", "pseudo", "reliability", "classes"])
def test_files(folder, tmp_path, kind):
    done = invoke("plot", kind, folder / "*/CSSL_*", "-o", tmp_path / f"new/{kind}.svg")
    png, svg = (tmp_path / f"new/{kind}.{ending}" for ending in ("png", "svg"))
    assert done.stdout.split() == [str(png), str(svg)]
    assert png.read_bytes()[:4] == b"\x89PNG" and "</svg>" in svg.read_text()
    assert not done.stderr


def test_a_figure_that_cannot_be_written_leaves_the_older_one(folder, tmp_path, monkeypatch):
    older = b"\x89PNG Software\0cssl"
    (tmp_path / "x.png").write_bytes(older)

    def full(self, file, **options):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(UserError, match="Cannot write .*x.png .No space left"):
        invoke("plot", "curves", folder, "-o", tmp_path / "x")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x.png": older}


def test_from_the_command_line(command, folder, tmp_path):
    done = command("cssl-plot", "reliability", folder / "*/FixMatch_*", "-o", tmp_path / "x", code=2)
    assert "There is no" in done.stderr


def test_damaged_and_missing(tmp_path):
    path = write_run(tmp_path, [50], stats=True)
    whole = (path / "stats/predictions.npz").read_bytes()
    for damaged in (b"", b"no archive", whole[:len(whole) // 2]):
        (path / "stats/predictions.npz").write_bytes(damaged)
        with pytest.raises(UserError, match="predictions.npz is damaged"):
            plots.reliability([Run(path).read()])
    (path / "stats/rates.npy").write_bytes(b"")
    with pytest.raises(UserError, match="rates.npy is damaged"):
        plots.augmentation_rates(Run(path).read())
    with pytest.raises(UserError, match="predictions.npz is damaged"):
        invoke("plot", "reliability", path, "-o", tmp_path / "x")
    assert "unfinished (1 of 4 kimg)" in invoke("plot", "curves", path, "-o", tmp_path / "x").stderr
    with pytest.raises(UserError, match="None of the runs has a report"):
        invoke("plot", "classes", write_run(tmp_path / "empty", []), "-o", tmp_path / "x")


def changed(path, **arrays):
    np.savez(path, **{name: array for name, array in {**np.load(path), **arrays}.items() if array is not None})


def reported(path, text):
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("".join(f"{line[:-1]}, {text}}}\n" for line in lines))


DAMAGES = {
    "predictions": {
        "empty": lambda file: file.write_bytes(b""), "cut": lambda file: os.truncate(file, 500),
        "a folder": lambda file: (file.unlink(), file.mkdir()),
        "no labels": lambda file: changed(file, labels=None),
        "one axis": lambda file: changed(file, probabilities=np.ones(200)),
        "words": lambda file: changed(file, probabilities=np.full((200, 10), "x")),
        "NaN": lambda file: changed(file, probabilities=np.full((200, 10), np.nan)),
        "sevens": lambda file: changed(file, probabilities=np.full((200, 10), 7.0)),
        "no images": lambda file: changed(file, probabilities=np.zeros((0, 10)), labels=np.zeros(0, int)),
        "fewer labels": lambda file: changed(file, labels=np.zeros(100, int)),
        "other labels": lambda file: changed(file, labels=np.full(200, 99))},
    "pseudo_labels": {
        "empty": lambda file: file.write_bytes(b""), "shorter": lambda file: changed(file, alpha=np.ones(3)),
        "words": lambda file: changed(file, alpha=np.full(40, "x")),
        "NaN": lambda file: changed(file, alpha=np.full(40, np.nan)),
        "sevens": lambda file: changed(file, alpha=np.full(40, 7.0))},
    "class_distribution": {text: lambda run, text=text: reported(run, f'"class_distribution": {text}')
                           for text in ('"x"', "3", "[[1, 2]]", '["a", "b"]')}}


def with_damaged(folder, part):
    """Writes a run, and a copy for each damage; returns it and these."""
    whole = write_run(folder, [50, 60], stats=True, train_kimg=2)
    for damage in DAMAGES[part].values():
        shutil.copytree(whole, other := whole.with_name(f"CSSL_{len(list(whole.parent.iterdir()))}"))
        damage(other if part == "class_distribution" else other / f"stats/{part}.npz")
        yield other


@pytest.mark.parametrize(("kind", "part"), [("reliability", "predictions"), ("classes", "class_distribution")])
def test_damage_of_one_run_leaves_the_others_figures(tmp_path, kind, part):
    damaged = list(with_damaged(tmp_path / "runs", part))
    done = invoke("plot", kind, tmp_path / "runs", "-o", tmp_path / "x")
    assert len(done.stdout.split()) == 2
    assert {line.split(": ")[1] for line in done.stderr.splitlines()} == set(map(str, damaged))


@pytest.mark.slow
def test_damage_of_one_run_leaves_the_others_table_and_report(tmp_path, no_layout):
    damaged = [run for part in ("predictions", "pseudo_labels") for run in with_damaged(tmp_path / part, part)]
    for file in ("metrics.jsonl", "args/args.json", "args/environment.json", "stats/rates.json"):
        (damaged.pop() / file).write_text("[" * 200_000)
    done = invoke("table", tmp_path)
    assert "45.00 (1)" in done.stdout and "args.json is unreadable" in done.stdout
    invoke("report", tmp_path, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count('<details class="run"') == page.count("<h4>Calibration on the test set</h4>") + 1 == 18
    assert page.count("damaged") > 12


def panels_of(figure):
    """The share of the figure's width and height that its panels take."""
    figure.canvas.draw()
    boxes = [axis.get_position() for axis in figure.axes]
    return (max(box.x1 for box in boxes) - min(box.x0 for box in boxes),
            max(box.y1 for box in boxes) - min(box.y0 for box in boxes))


@pytest.mark.parametrize("count", [2, 12])
def test_long_labels_leave_room_for_the_panels(tmp_path, count):
    for number in range(count):
        write_run(tmp_path, [50, 60], train_kimg=2, **{f"some_setting_{i}": 0.125 * number + i for i in range(10)})
    figure = plots.curves(find_runs([tmp_path]), ("error", "ece"))
    assert min(panels_of(figure)) >= 0.5
    legend, = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y1 <= min(
        axis.get_tightbbox().y0 for axis in figure.axes) + 1  # all of it is visible, and hides nothing
    assert len(legend.get_texts()) == count
    assert all("some_setting_9=" in text.get_text() for text in legend.get_texts())


def test_image_grid():
    rows = [np.full((n, 4, 6, 3), 10 * n, np.uint8) for n in (3, 1)]
    axis, = plots.plot_images(rows, ["a", "b"]).axes
    sheet = axis.images[0].get_array()
    assert sheet.shape == (2 * 6, 3 * 8, 3)
    assert (sheet[:4, 16:22] == 30).all() and (sheet[6:10, :6] == 10).all() and (sheet[6:, 8:] == 255).all()
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
