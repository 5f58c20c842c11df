"""The report page: its content, that it is self-contained, and runs that lack something."""
import base64
import html.parser
import io
import re

import numpy as np
import pytest
from fake_runs import invoke, write_run
from PIL import Image


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
    command("scripts/report.py", folder, "-o", folder / "report.html", "--title=A <b> & c")
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
    assert {name: len(found) for name, found in pictures.items() if name != "training image"} == {
        "metrics on the test set over time": 1, "quality of pseudo-labels over time": 1, "CTAugment rates": 2,
        "reliability diagram and histogram of confidences": 2, "predicted classes over time": 3}
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
    assert f"class&lt;{guess[worst]}&gt; {sure[worst]:.2f}" in caption
    assert f"truth: class&lt;{stored['labels'][worst]}&gt;" in caption
    assert source.count("Confident and right") == 2 and source.count("Least confident") == 2


def test_what_is_missing_is_said(page, tmp_path):
    assert "There is no" in page[0].text  # the unfinished run stored no predictions
    path = write_run(tmp_path, [], method="VAT")
    (path / "args/environment.json").unlink()
    invoke("report", tmp_path, "-o", tmp_path / "empty.html")
    text = Page((tmp_path / "empty.html").read_text(encoding="utf-8")).text
    assert "No finished run yet." in text and "no reports yet" in text and "not recorded" in text
