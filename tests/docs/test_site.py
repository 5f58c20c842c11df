"""The documents as a site: built strictly, whole, and without anything from another host."""
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ENVIRONMENT, ROOT

LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "embed": "src",
         "object": "data", "video": "src", "audio": "src", "input": "src", "image": "href"}


class Page(HTMLParser):
    """What a page loads and links, and the anchors that it has."""

    def __init__(self, path: Path):
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors = {"", "top"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given.get("id", ""), given.get("name", "")}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif given.get(LOADS.get(tag, ""), ""):
            self.loads.append(given[LOADS[tag]])
        self.loads += in_style(given.get("style", "")) + [part.split()[0] for part in given.get("srcset", "").split(",")
                                                         if part.strip()]


def in_style(text: str) -> list[str]:
    return re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", text)


def test_every_page_is_in_the_navigation():
    named = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]}
    assert sorted(named) == sorted(pages)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "mkdocstrings_handlers.python", "pygments"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
                          cwd=ROOT, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    found = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    assert len(found) > 15
    return found


def test_nothing_comes_from_another_host(site, pages):
    asked = {load for page in pages.values() for load in page.loads}
    asked |= {load for path in [*site.rglob("*.css"), *pages] for load in in_style(path.read_text(encoding="utf-8"))}
    assert any(load.endswith(".css") for load in asked) and any(load.endswith(".png") for load in asked)
    assert not [load for load in asked if urlsplit(load).netloc]


def test_every_link_of_the_site_leads_somewhere(site, pages):
    checked = 0
    for path, page in pages.items():
        for target in page.links + page.loads:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            start = site if parts.path.startswith("/") else path.parent  # 404.html has the former
            there = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            assert there.is_file(), f"{path.name} links {target}"
            if there in pages:
                assert unquote(parts.fragment) in pages[there].anchors, f"{path.name} links {target}"
            checked += 1
    assert checked > 500


def test_the_reference_has_what_it_names(pages):
    (page,) = [page for path, page in pages.items() if path.name == "api.html"]
    named = re.findall(r"^::: ([\w.]+)", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.M)
    assert len(named) > 10
    for name in set(named) - {"libml.learn.losses", "libml.results.metrics"}:  # they are sections
        assert name in page.anchors
    assert {"libml.learn.losses.credal_loss", "libml.run.Run.evaluate"} <= page.anchors
