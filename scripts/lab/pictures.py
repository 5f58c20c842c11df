"""The pictures of the documents, on photographs of CIFAR-10 and features of MobileNetV2.

    python scripts/lab/pictures.py readme [--weights=FILE]       # credal sets that shrink, and the README's table
    python scripts/lab/pictures.py report [--weights=FILE]       # the page of cssl-report about such a run
    python scripts/lab/pictures.py labelling [--weights=FILE]    # cssl-label at work

They go to docs/pictures. The first two train a run of half a minute once the features are there; the table is of the
runs in docs/evidence/runs.jsonl. The last two need the package selenium and Chromium with its driver.
"""
from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402

import cssl  # noqa: E402
from cssl import cli, program  # noqa: E402
from libml.writing import write_atomically  # noqa: E402

SHOWN = 8  # of the first test photographs, whichever these are
IMAGES, LABELS = 2000, 220
SIZES = {"": (1280, 860), "_phone": (390, 844)}


def photographs(folder: Path) -> list[str]:
    """Writes photographs as files whose names tell their class; returns the names of the classes."""
    data = cssl.load("cifar10.1@40-1", cli.default_data_dir())
    for k in range(IMAGES):
        name = data.class_names[data.labels[k]]
        Image.fromarray(data.images[k]).save(folder / f"{k:04}_{name}.png")
    return list(data.class_names)


def open_browser():
    """Starts a Chromium without a window."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def photograph(browser, file: Path, width: int, height: int, scheme: str = "light") -> None:
    """Writes what the browser shows in a window of this size."""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": scheme}]})
    time.sleep(0.5)
    png = browser.get_screenshot_as_png()
    write_atomically(file, lambda target: target.write(png))
    print(file)


def train(args: argparse.Namespace, place: str):
    """Trains CSSL on 40 labels of CIFAR-10."""
    cli.start_tensorflow()
    return cssl.train(cssl.RunConfig.of(
        cssl.CSSL, dataset="cifar10.1@40-1", features="keras:MobileNetV2", weights=args.weights or "imagenet",
        keep_ckpt=64, baseline=False, train_dir=place))


def report(args: argparse.Namespace) -> None:
    """Photographs the top of the page about a run."""
    with tempfile.TemporaryDirectory() as place:
        train(args, place)
        page = Path(place, "report.html")
        subprocess.run([sys.executable, "-m", "cssl.tools.report", place, "-o", page], cwd=ROOT, check=True)
        browser = open_browser()
        try:
            browser.get(page.as_uri())
            photograph(browser, args.out / "report.png", 1280, 1500)
        finally:
            browser.quit()


def credal_sets(args: argparse.Namespace) -> None:
    """Draws the credal sets of the first test photographs at three points of a run: p(class) is at least what is dark;
    the rest may be any class's."""
    from libml.results import plots

    with tempfile.TemporaryDirectory() as place:
        run = train(args, place)
        from libml.results.predict import Classifier

        checkpoints = [run.checkpoints()[at] for at in (0, 7, -1)]
        figure = plots.Figure(figsize=(1.35 * SHOWN, 2.7), layout="constrained")
        axes = figure.subplots(2, SHOWN, height_ratios=(1.6, 1))
        names, pictures = run.data.class_names, run.data.shown(range(SHOWN), test=True)
        for i in range(SHOWN):
            axes[0, i].imshow(pictures[i], interpolation="nearest")
            axes[0, i].set_title(names[run.data.test_labels[i]], fontsize=9)
            axes[0, i].axis("off")
            axes[1, i].set(xlim=(0, 1), ylim=(2.5, -0.5), xticks=[], yticks=[])
            axes[1, i].spines[:].set_visible(False)
        for k, checkpoint in enumerate(checkpoints):
            opened = cssl.open(checkpoint, data=run.data)
            classifier = Classifier.of_model(opened.model, names, lambda: run.data)
            sets = classifier.in_batches(classifier.credal, run.data.test_images[:SHOWN])
            updates = int(opened.model.updates.numpy())
            axes[1, 0].text(-0.06, k, f"{updates:,} updates", ha="right", va="center", fontsize=8)
            for i, (y, alpha) in enumerate(zip(sets["class"], sets["alpha"], strict=True)):
                right = y == run.data.test_labels[i]
                axes[1, i].barh(k, 1, height=0.82, color="#dfe4ea")
                axes[1, i].barh(k, 1 - alpha, height=0.82, color="#7fb3e6" if right else "#f0b27a")
                axes[1, i].text(0.03, k, f"{names[y]} ≥ {int(100 * (1 - alpha)) / 100:.2f}", va="center", fontsize=7)
    plots.save(figure, args.out / "credal_sets", ("png",))
    print(args.out / "credal_sets.png")
    subprocess.run([sys.executable, ROOT / "scripts" / "lab" / "evidence.py", "--recorded", "--report", "--write",
                    "--parts=features_all", "--", "--weights=weights/MobileNetV2.weights.h5"], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)  # as its runs were recorded


def labelling(args: argparse.Namespace) -> None:
    """Labels photographs through the page, and photographs it."""
    from selenium.webdriver.common.by import By

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "photographs"
        folder.mkdir()
        classes = photographs(folder)
        weights = [f"--weights={args.weights}"] * bool(args.weights)
        served = subprocess.Popen([sys.executable, "-u", "-m", "cssl.tools.label", str(folder), *weights,
                                   f"--classes={','.join(classes)}", f"--data_dir={place}/data"], cwd=ROOT, text=True,
                                  stdout=subprocess.PIPE)
        assert served.stdout
        address = next(found[1] for line in served.stdout if (found := re.search(r"Open (http://\S+)", line)))
        browser = open_browser()
        try:
            browser.get(address)

            def text(name: str) -> str:
                return browser.find_element(By.ID, name).text

            def wait(condition) -> None:
                deadline = time.monotonic() + 300
                while not condition():
                    assert time.monotonic() < deadline, text("learning")
                    time.sleep(0.2)

            wait(lambda: "starts with five" in text("learning"))
            for k in range(LABELS):
                shown = text("name")
                browser.execute_script("label(arguments[0])", shown.partition("_")[2].removesuffix(".png"))
                wait(lambda shown=shown: text("name") != shown)
                if k % 5 == 4 and k < 30 or k % 20 == 19:  # a person takes longer than the model
                    wait(lambda: "saving" not in text("saved"))
                    time.sleep(1)
                    wait(lambda: "learns" not in text("learning"))
            if not text("guess").strip():
                browser.execute_script("skip()")
            time.sleep(2)
            for view in ("label", "grid"):
                browser.execute_script(f"choose('{view}')")
                time.sleep(2)
                for kind, (width, height) in SIZES.items():
                    for scheme in ("light", "dark"):
                        name = f"{view}{kind}{'_dark' * (scheme == 'dark')}.png"
                        photograph(browser, args.out / name, width, height, scheme)
        finally:
            browser.quit()
            served.terminate()
            served.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("readme", "report", "labelling"))
    parser.add_argument("--weights", default="", help="file of ImageNet weights of MobileNetV2")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    args = parser.parse_args()
    {"readme": credal_sets, "report": report, "labelling": labelling}[args.what](args)


if __name__ == "__main__":
    program.exit_on_user_error(main)
