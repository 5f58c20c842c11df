"""The report page: its content, that it is self-contained, and runs that lack something."""
import base64
import html.parser
import io
import re

import numpy as np
import pytest
from helpers import invoke, write_run
from PIL import Image

from cssl.tools import report


class Page(html.parser.HTMLParser):
    """Collects the text, the pictures and the nesting of a page."""

    VOID = {"img", "meta", "br"}

    def __init__(self, source: str):
        super().__init__()
        self.words, self.pictures, self.open, self.addresses = [], {}, [], []
        self.feed(source)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.addresses += [value for key, value in attributes.items() if key in ("src", "href")]
        if tag == "img":
            self.pictures.setdefault(attributes["alt"], []).append(attributes["src"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def picture(address):
    return Image.open(io.BytesIO(base64.b64decode(address.split(",", 1)[1])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        write_run(folder, [80.0, 93.0, 93.0 + seed], dataset=f"cifar10.{seed}@40-1", train_kimg=3, stats=True)
    write_run(folder, [50.0], method="FixMatch", dataset="svhn.1@40-1", train_kimg=3)
    return folder


@pytest.fixture(scope="module")
def page(command, folder):
    command("cssl-report", folder, "-o", folder / "report.html", "--title=A <b> & c")
    source = (folder / "report.html").read_text(encoding="utf-8")
    return Page(source), source


def test_well_formed_and_self_contained(page):
    parsed, source = page
    assert parsed.open == []
    assert parsed.addresses and all(address.startswith("data:image/png;base64,") for address in parsed.addresses)
    assert not re.search(r"https?://|@import|url\(|<script|<link", source)


def test_results_beside_the_paper(page):
    text = page[0].text
    assert "A <b> & c" in text
    assert "7.00 ± 0.00 (2)" in text  # the medians of both runs are 93
    assert "6.50 ± 0.90 +0.50 yes results: CSSL (CTA) train_kimg 3 instead of 65536" in text
    assert "0.100 ± 0.000" in text and "calibration: CSSL" in text


def test_runs_are_described(page):
    text = page[0].text
    assert "Runs: 3, finished: 2" in text
    assert "unfinished (1 of 3 kimg), left out" in text
    for part in ("0123abcd", "2.21.0", "python -m cssl --dataset=cifar10.1@40-1 <&>", "uratio = 7", "FixMatch on svhn"):
        assert part in text


def test_pictures(page):
    pictures = page[0].pictures
    assert {name: len(found) for name, found in pictures.items() if name not in ("training image", "test image")} == {
        "Learning curves": 1, "Pseudo-labels over time": 1, "CTAugment rates": 2, "Calibration on the test set": 2,
        "Predicted classes": 3, "Accuracy of each class": 2, "Credal sets over time": 2}
    for found in pictures.values():
        assert min(picture(found[0]).size) >= 8


def test_sample_pseudo_labels(page, folder):
    _, source = page
    run = next(folder.glob("cifar10*.1@40-1/*"))
    stored = np.load(run / "stats/pseudo_labels.npz")
    guess, sure = stored["probabilities"].argmax(1), stored["probabilities"].max(1)
    wrong = (stored["labels"] >= 0) & (guess != stored["labels"])
    worst = int(np.flatnonzero(wrong)[np.argmax(sure[wrong])])
    first = source[source.index("Confident and wrong"):]
    address = re.search(r'src="([^"]+)"', first)[1]
    np.testing.assert_array_equal(np.asarray(picture(address)), stored["images"][worst])
    caption = first[:first.index("</figcaption>")]
    assert f"class&lt;{guess[worst]}&gt;&nbsp;{sure[worst]:.2f}, class&lt;" in caption
    assert f"truth: class&lt;{stored['labels'][worst]}&gt;" in caption
    assert source.count("Confident and right") == source.count("Least confident") == 4  # and test images


def cards_of(source, title):
    """The image and caption of every card under a title, up to the next."""
    part = re.split("<h[45]>", source[source.index(title):])[0]
    found = re.findall(r'<img alt="[a-z ]+" src="([^"]+)"><figcaption>(.*?)</figcaption>', part)
    return [(np.asarray(picture(address)), caption) for address, caption in found]


def test_credal_sets(page, folder):
    run = next(folder.glob("cifar10*.1@40-1/*"))
    stored = np.load(run / "stats/pseudo_labels.npz")
    least_sure = np.argsort(-stored["probabilities"].max(1), kind="stable")[::-1][:12]
    for index, (image, caption) in zip(least_sure, cards_of(page[1], "Least confident"), strict=True):
        np.testing.assert_array_equal(image, stored["images"][index])
        alpha, best = stored["alpha"][index], stored["aligned"][index].argmax()
        bound = np.floor(100 * (1 - alpha)) / 100  # which holds
        assert f"α = {alpha:.2f}<br>p(class&lt;{stored['class'][index]}&gt;) ≥&nbsp;{bound:.2f}<br>" in caption
        assert f"aligned: class&lt;{best}&gt;&nbsp;{stored['aligned'][index, best]:.2f}, " in caption
        assert f'width: {100 * alpha:.1f}%' in caption
    assert f"{np.mean(stored['alpha'] < 0.05):.1%} have α below 0.05" in page[0].text


def test_test_images(page, folder):
    run = next(folder.glob("cifar10*.1@40-1/*"))
    samples, stored = np.load(run / "stats/test_samples.npz"), np.load(run / "stats/predictions.npz")
    p, labels = stored["probabilities"][100:150], stored["labels"][100:150]
    wrong = np.flatnonzero(p.argmax(1) != labels)
    first = {"Least confident": p.max(1).argmin(), "Confident and wrong": wrong[p[wrong].max(1).argmax()]}
    shown = page[1][page[1].index("<h4>Test images</h4>"):]
    for title, index in first.items():
        image, caption = cards_of(shown, title)[0]
        np.testing.assert_array_equal(image, samples["images"][index])
        assert caption.startswith(f"class&lt;{p[index].argmax()}&gt;&nbsp;{p[index].max():.2f}, class&lt;")
        assert f"truth: class&lt;{labels[index]}&gt;" in caption


def test_small_screens_and_dark_ones(page):
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page[1]
    style = page[1][page[1].index("<style>"):page[1].index("</style>")]
    assert "color-scheme: light dark" in style and "@media (max-width: 600px)" in style
    colours = re.findall(r"[ -]color: ([^;]+);", style.split("body {", 1)[1])
    assert colours and all(colour.startswith("var(--") for colour in colours)  # every text follows the scheme
    assert "img.figure { max-width: 100%; background: #ffffff;" in style  # figures are drawn for white
    assert "Side by side" not in page[0].text  # three runs


@pytest.mark.slow
def test_two_runs_side_by_side(tmp_path, no_layout):
    paths = [write_run(tmp_path, [80.0, 90.0 + number], method=method, train_kimg=2, stats=True)
             for number, method in enumerate(("CSSL", "FixMatch"))]
    labels, right = np.arange(200) % 10, [np.arange(200) % 4 > 0, np.arange(200) % 3 > 0]
    for path, hits in zip(paths, right, strict=True):
        guess = np.where(hits, labels, (labels + 1) % 10)
        np.savez(path / "stats/predictions.npz", probabilities=0.9 * np.eye(10)[guess] + 0.01, labels=labels, step=2048)
    invoke("report", *paths, "-o", tmp_path / "two.html")
    source = (tmp_path / "two.html").read_text(encoding="utf-8")
    parsed = Page(source)
    pair = source.split('<div class="pair">')[1].split('<details class="run" open>')
    assert parsed.open == [] and len(pair) == 3
    assert "α = " in pair[1] and "α = " not in pair[2]  # FixMatch has no credal sets
    names = "A: CSSL on cifar10.1@40-1 B: FixMatch on cifar10.1@40-1"
    assert f"{names} alpha_bound 0.0 – confidence 0.0 0.95 method CSSL FixMatch" in parsed.text
    assert "accuracy % 85.00 85.50 +0.50 ECE 0.100 0.100 +0.000" in parsed.text
    both = [int(np.sum(a & b)) for a in (right[0], ~right[0]) for b in (right[1], ~right[1])]
    assert f"B right B wrong A right {both[0]} {both[1]} A wrong {both[2]} {both[3]}" in parsed.text
    assert len(parsed.pictures["Both calibrations"]) == len(
        parsed.pictures["Accuracy of each class, both runs"]) == 1

    invoke("report", paths[0], "-o", tmp_path / "small.html", "--no-images")
    small = Page((tmp_path / "small.html").read_text(encoding="utf-8"))
    assert not {"training image", "test image"} & set(small.pictures) and "Credal sets over time" in small.pictures


def test_runs_from_before_credal_sets_were_stored(tmp_path):
    path = write_run(tmp_path, [80.0, 90.0], method="LSMatch", train_kimg=2, stats=True)
    (path / "stats/test_samples.npz").unlink()
    with np.load(path / "stats/pseudo_labels.npz") as stored:
        old = {key: stored[key] for key in ("images", "probabilities", "labels", "class_names")}
    np.savez(path / "stats/pseudo_labels.npz", **old)
    invoke("report", path, "-o", tmp_path / "old.html")
    text = Page((tmp_path / "old.html").read_text(encoding="utf-8")).text
    assert "test_samples: training writes it at a report" in text and "Least confident" in text
    assert "credal set" not in text


def test_what_is_missing_is_said(page, tmp_path):
    assert "There is no" in page[0].text  # the unfinished run stored no predictions
    path = write_run(tmp_path, [], method="VAT")
    (path / "args/environment.json").unlink()
    invoke("report", tmp_path, "-o", tmp_path / "empty.html")
    text = Page((tmp_path / "empty.html").read_text(encoding="utf-8")).text
    assert "No finished run yet." in text and "no reports yet" in text and "not recorded" in text


def change(path, name, **arrays):
    """Replaces arrays of stats/<name>.npz by functions of them."""
    with np.load(path / f"stats/{name}.npz") as stored:
        found = dict(stored)
    np.savez(path / f"stats/{name}.npz", **found | {key: make(found[key]) for key, make in arrays.items()})


DAMAGES = {  # none is found by reading the file
    "labels that no class has": lambda run: change(run, "pseudo_labels", labels=lambda x: x + 50),
    "too few images": lambda run: change(run, "pseudo_labels", images=lambda x: x[:5]),
    "images of floats": lambda run: change(run, "pseudo_labels", images=lambda x: x / 255),
    "no distributions": lambda run: change(run, "predictions", probabilities=lambda x: x[:, 0]),
    "negative labels": lambda run: change(run, "predictions", labels=lambda x: -1 - x),
    "indices without images": lambda run: change(run, "test_samples", index=lambda x: x + 10 ** 6),
    "rates of another shape": lambda run: np.save(run / "stats/rates.npy", np.ones(3)),
    "rates of nothing": lambda run: (run / "stats/rates.json").write_text('{"ops": 3}'),
    "half a file": lambda run: (run / "stats/predictions.npz").write_bytes(b"PK\x03\x04" + bytes(500)),
    "reports of other things": lambda run: (run / "metrics.jsonl").write_text(
        '{"step": 3072, "accuracy": 93, "class_distribution": "x", "credal": 5}')}


@pytest.mark.slow
def test_a_damaged_run_does_not_spoil_the_page(tmp_path, program, no_layout):
    """Its damage is named where it is described, and the last run is shown as if it were alone."""
    runs = [write_run(tmp_path, [80.0, 90.0, 93.0], dataset=f"cifar10.{seed}@40-1", train_kimg=3, stats=True)
            for seed in range(10, len(DAMAGES) + 11)]
    for run, damage in zip(runs, DAMAGES.values(), strict=False):
        damage(run)

    def sections(*places):
        program(report.main, *places, "-o", tmp_path / "page.html")
        source = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert Page(source).open == []
        return re.split('<details class="run"(?: open)?>', source)[1:]

    found = sections(*runs)
    assert ["is damaged" in section for section in found] == [True] * len(DAMAGES) + [False]
    assert found[-1] == sections(runs[-1])[0]
    assert len(sections(*runs[:2])) == 2  # which are compared


def test_names_that_are_no_text(tmp_path, program):
    """Of classes, folders and settings: bytes that are no UTF-8, escapes, markup."""
    run = write_run(tmp_path, [80.0, 93.0], dataset="<script>alert(1)</script>.1@40-1", train_kimg=2, stats=True)
    names = ["<script>x</script>", "a|b", "two\nlines", "\x1b[31mred", "caf\udce9", '"quoted"', "&amp;", "", "猫", "z"]
    change(run, "pseudo_labels", class_names=lambda _: np.array(names))
    odd = tmp_path / "runs \udcff\n<b>"
    run.parent.rename(odd)
    program(report.main, odd, "-o", tmp_path / "page.html")
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert Page(source).open == [] and "<script" not in source and "<b>" not in source
    assert "caf\\udce9" in source and "runs \\udcff" in source and "not shown" not in source.lower()
