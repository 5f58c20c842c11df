"""The labelling page as a person uses it: a real Chromium, the real command, keys and clicks."""
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT
from PIL import Image

from libml.data import sources

webdriver = pytest.importorskip("selenium.webdriver", reason="needs the package selenium")
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs a Chromium and its driver: Debian's packages chromium, chromium-driver")]
WAIT = 120  # seconds: of a busy machine
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_window_size(1280, 900)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Zeros and ones, whose names tell which."""
    folder = tmp_path_factory.mktemp("page") / "my images"
    folder.mkdir()
    digits = sources.digits()
    for k in [k for k, label in enumerate(digits.labels) if label < 2][:120]:
        Image.fromarray(digits.images[k]).save(folder / f"{k:04}_{digits.labels[k]}.png")
    (folder / "<b>odd & named_0.png").write_bytes(next(folder.glob("*_0.png")).read_bytes())
    return folder


def serve(images: Path) -> tuple[subprocess.Popen, str]:
    """The real command, and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "cssl.tools.label", str(images), "--features=pixels", "--nomirror",
         "--classes=0,1", f"--data_dir={images.parent / 'data'}", "--", "--train_kimg=2"], cwd=ROOT, text=True,
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for line in process.stdout:
        if found := re.search(r"Open (http://127\.0\.0\.1:\d+/\S+/)", line):
            return process, found[1]
    raise AssertionError("no address was printed")


@pytest.fixture(scope="module")
def page(images):
    """The command that runs now, and its address: each start takes seconds."""
    running = list(serve(images))
    yield running
    running[0].kill()
    running[0].wait()
    running[0].stdout.close()


def text(browser, name: str) -> str:
    return browser.find_element(By.ID, name).text


def until(browser, condition, what: str):
    return WebDriverWait(browser, WAIT, 0.1, [StaleElementReferenceException]).until(lambda _: condition(), what)


def press(browser, key: str) -> None:
    ActionChains(browser).send_keys(key).perform()


def label(browser, count: int) -> None:
    """Presses the key of the class that the name of the image tells."""
    for _ in range(count):
        until(browser, lambda: browser.find_element(By.ID, "image").is_displayed(), "its picture")
        name = text(browser, "name")
        press(browser, name[-5])
        until(browser, lambda name=name: text(browser, "name") != name, "the next image")


def saved(browser, count: int) -> None:
    until(browser, lambda: text(browser, "saved") == f"{count} labels saved", f"{count} labels saved")


def rows(images: Path) -> list[dict]:
    with (images / "labels.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_it_is_usable_without_a_mouse_and_readable(page, browser):
    """Every control can be reached by Tab, in the order of the page; nothing is wider than a phone; text contrasts."""
    try:
        browser.get(page[1])
        until(browser, lambda: text(browser, "name") or text(browser, "empty"), "an image")
        reached = []
        for _ in range(40):
            press(browser, "\ue004")
            reached.append(browser.execute_script(
                "return document.activeElement.id || document.activeElement.dataset.name"))
        wanted = ["tab-label", "tab-grid", "tab-audit", "help-open", "0", "1", "new-class", "classes-open", "none",
                  "skip", "finish"]
        assert [name for name in dict.fromkeys(reached) if name in wanted] == wanted
        press(browser, "?")
        assert browser.find_element(By.ID, "help").is_displayed()
        press(browser, "\ue00c")
        assert not browser.find_element(By.ID, "help").is_displayed()
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
                    "width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 500})
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [
                    {"name": "prefers-color-scheme", "value": scheme}]})
                assert browser.execute_script("return document.documentElement.scrollWidth") <= width
                assert min(browser.execute_script(CONTRASTS)) >= 4.5  # WCAG 2.1, AA
        severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert not severe
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_from_no_label_to_predictions(images, page, browser):
    process, address = page
    browser.get(address)
    until(browser, lambda: text(browser, "name"), "an image")
    label(browser, 12)
    saved(browser, 12)
    assert [row["label"] == row["file"][-5] for row in rows(images)] == [True] * 12

    last = rows(images)[-1]["file"]
    press(browser, "u")
    until(browser, lambda: text(browser, "name") == last, "the image whose label was taken back")
    saved(browser, 11)
    assert last not in [row["file"] for row in rows(images)]

    browser.refresh()  # in the middle
    until(browser, lambda: text(browser, "name") == last, "the same image")
    label(browser, 4)
    saved(browser, 15)

    process.send_signal(signal.SIGKILL)  # nothing that was saved is lost, and no key meanwhile
    process.wait()
    process.stdout.close()
    kept = rows(images)
    label(browser, 2)
    until(browser, lambda: "2 labels not saved yet" in text(browser, "saved"), "that the server is gone")
    (images / "!_1.png").write_bytes(next(images.glob("*_1.png")).read_bytes())  # all numbers are others now
    page[:] = serve(images)
    process = page[0]
    assert page[1] == address  # the open page goes on by itself
    saved(browser, 17)
    assert rows(images)[:15] == kept and all(row["label"] == row["file"][-5] for row in rows(images))
    until(browser, lambda: "learned from" in text(browser, "learning"), "a model")
    label(browser, 12)
    saved(browser, 29)
    until(browser, lambda: browser.find_element(By.ID, "image").is_displayed(), "its picture")
    browser.find_element(By.CSS_SELECTOR, f"[data-name='{text(browser, 'name')[-5]}']").click()
    assert browser.execute_script("return document.activeElement === document.body")  # space is for the suggestion
    saved(browser, 30)
    assert [row["by"] for row in rows(images)].count("random") == 3

    until(browser, lambda: browser.find_element(By.ID, "image").is_displayed(), "its picture")
    skipped = text(browser, "name")
    press(browser, "s")
    press(browser, "u")
    until(browser, lambda: text(browser, "name") == skipped, "what was skipped")
    assert len(rows(images)) == 30
    until(browser, lambda: browser.find_element(By.ID, "image").is_displayed(), "its picture")
    press(browser, "n")
    until(browser, lambda: "1 none of these" in text(browser, "counts"), "one of none")
    assert rows(images)[-1]["split"] == "excluded" and rows(images)[-1]["label"] == ""

    browser.find_element(By.ID, "tab-grid").click()
    tiles = until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#tiles button"), "a grid")
    tiles[0].click()
    wrong = tiles[0].get_attribute("title")
    before, confirm = len(rows(images)), browser.find_element(By.ID, "confirm")
    shown = int(re.search(r"Confirm (\d+) as 0", confirm.text)[1])
    assert shown == len(tiles) - 1
    confirm.click()
    until(browser, lambda: len(rows(images)) == before + shown, "all but one confirmed")
    assert wrong not in [row["file"] for row in rows(images)]

    browser.find_element(By.ID, "tab-audit").click()
    until(browser, lambda: browser.find_element(By.ID, "audit-start").is_enabled(), "the audit")
    browser.find_element(By.ID, "audit-start").click()
    told = until(browser, lambda: text(browser, "odd"), "findings")
    assert "<b>odd & named_0.png" in told and "cosine 1.0000" in told  # names are text, whatever they hold

    browser.find_element(By.ID, "finish").click()
    until(browser, lambda: "Does it help?" in text(browser, "finished"), "the end")
    output = images.with_name("my images_model")
    with (output / "predictions.csv").open(encoding="utf-8") as file:
        predictions = list(csv.DictReader(file))
    assert len(predictions) == 122 and {row["class"] for row in predictions} <= {"0", "1"}
    # Zeros and ones are far apart even after so few updates: chance would be 50 %.
    assert sum(row["class"] == row["file"][-5] for row in predictions) > 90
    assert {"dataset.csv", "export", "report.html", "commands.sh"} <= set(os.listdir(output))
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT) == 0


# The contrast of every visible text with what lies behind it, by WCAG's formula.
CONTRASTS = """
function light(text) {
  const parts = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255);
  const [r, g, b] = parts.map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(node) {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)$|transparent/.test(color)) return color;
  }
  return "rgb(255, 255, 255)";
}
const found = [];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
  if (!own || !node.offsetParent || node.disabled || node.closest("svg, script, style, dialog")) continue;
  const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
  found.push((a + 0.05) / (b + 0.05));
}
return found;
"""
