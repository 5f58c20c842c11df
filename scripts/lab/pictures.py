"""The pictures of docs/labelling.md: cssl-label on photographs of CIFAR-10, driven in a headless Chromium.

    python scripts/lab/pictures.py [--weights=FILE] [--out=docs/pictures]

Needs the packages selenium and Chromium with its driver; some minutes.
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

IMAGES, LABELS = 2000, 220
SIZES = {"": (1280, 860), "_phone": (390, 844)}


def photographs(folder: Path) -> list[str]:
    """Writes photographs as files whose names tell their class; returns the names of the classes."""
    data = cssl.load("cifar10.1@40-1", cli.default_data_dir())
    for k in range(IMAGES):
        name = data.class_names[data.labels[k]]
        Image.fromarray(data.images[k]).save(folder / f"{k:04}_{name}.png")
    return list(data.class_names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="", help="file of ImageNet weights of MobileNetV2")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    args = parser.parse_args()
    from selenium import webdriver
    from selenium.webdriver.common.by import By

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync"):
        options.add_argument(flag)
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
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
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
                    wait(lambda k=k: f"{k + 1} labels saved" == text("saved") and "learns" not in text("learning"))
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
                        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
                            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500})
                        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
                            "features": [{"name": "prefers-color-scheme", "value": scheme}]})
                        time.sleep(0.5)
                        png = browser.get_screenshot_as_png()
                        file = args.out / f"{view}{kind}{'_dark' * (scheme == 'dark')}.png"
                        write_atomically(file, lambda target, png=png: target.write(png))
                        print(file)
        finally:
            browser.quit()
            served.terminate()
            served.wait()


if __name__ == "__main__":
    program.exit_on_user_error(main)
