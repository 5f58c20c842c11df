"""For mkdocs.yml: the site has the repository's tree, so that each link leads where it leads in the repository."""
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = ("BENCHMARKS.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "cssl", "docs",
         "libml", "scripts", "tests")
place = tempfile.TemporaryDirectory()


def on_config(config):
    """MkDocs wants a folder of documents beside its configuration: one of links to what the site shows."""
    for name in SHOWN:
        if not (link := Path(place.name, name)).exists():
            link.symlink_to(ROOT / name)
    config["docs_dir"] = place.name
    return config
