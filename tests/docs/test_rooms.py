"""The arrows between the rooms of libml: who may import whom, as each room's `__init__` says."""
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

import libml
from cssl import methods

ROOMS = ("augment", "data", "networks", "learn", "devices", "results", "labelling")
FOUNDATION = {"libml", "libml.errors", "libml.lazy", "libml.randomness", "libml.writing"}  # for everybody
TOP = {
    "libml": "", "libml.errors": "", "libml.lazy": "", "libml.randomness": "libml.lazy",
    "libml.writing": "libml.errors", "libml.models": "libml.networks", "libml.losses": "libml.learn",
    "libml.config": "libml.augment.spec libml.data.files libml.data.names libml.networks.applications",
    "libml.run": "libml.config libml.data.files libml.data.names libml.devices.lock",
    "libml.train": "libml.augment libml.data libml.devices libml.learn libml.results libml.config libml.run",
    "libml.features": "libml.augment libml.data libml.networks libml.devices libml.config",
    "libml.experiment": "libml.augment libml.data libml.networks libml.devices libml.learn libml.results libml.config "
                        "libml.features libml.run libml.train"}
# Imports within functions, against the arrows: what they need is slow to start, or imports them in turn.
LATE = {
    ("libml.run", "libml.experiment"), ("libml.run", "libml.features"), ("libml.run", "libml.results"),
    ("libml.results", "libml.experiment"), ("libml.learn", "libml.results")}


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yields what a file imports and when: "at once", "late" (in a function) or "for types"."""
    def walk(node: ast.AST, when: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body:
                yield from walk(child, "for types")
            for child in node.orelse:
                yield from walk(child, when)
        elif isinstance(node, ast.Import):
            yield from ((name.name, when) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: a relative import"
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                part = ROOT.joinpath(*whole.split("."))
                yield whole if part.is_dir() or part.with_suffix(".py").exists() else node.module, when
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child, "late" if isinstance(node, ast.FunctionDef) else when)

    return walk(ast.parse(path.read_text(encoding="utf-8")), "at once")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """`libml.data.names` is in the room `libml.data`; a file at the top is its own."""
    return ".".join(module.split(".")[:2])


def allowed(room: str) -> set[str]:
    """What a file at the top may import, or what a room's `__init__` names."""
    if room in TOP:
        return set(TOP[room].split()) | FOUNDATION
    text = ast.get_docstring(ast.parse((ROOT / room.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")))
    return {room, *re.findall(r"`([\w.]+)`", text)} | FOUNDATION


FILES = sorted((ROOT / "libml").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_import_what_their_room_may(path):
    module = module_of(path)
    room = room_of(module)
    for name, when in imports(path):
        assert name.split(".")[0] != "cssl", f"{module} imports {name}: libml knows no method"
        if name.split(".")[0] != "libml" or when == "for types":
            continue
        if not any(name == may or name.startswith(f"{may}.") and may != "libml" for may in allowed(room)):
            assert when == "late" and (room, room_of(name)) in LATE, f"{module} imports {name}"


def test_every_late_import_is_needed():
    late = {(room_of(module_of(path)), room_of(name)) for path in FILES for name, when in imports(path)
            if when == "late"}
    assert late >= LATE


def test_every_room_is_named():
    """In libml's docstring."""
    assert {room_of(module_of(path)) for path in FILES} == {*TOP, *(f"libml.{room}" for room in ROOMS)}
    named = set(re.findall(r"[a-z]+", libml.__doc__))
    assert {*ROOMS, *(name.removeprefix("libml.") for name in TOP)} - {"libml"} <= named


@pytest.mark.parametrize("name", sorted(methods().values()))
def test_no_method_imports_another(name):
    for found, _ in imports(ROOT / "cssl" / f"{name}.py"):
        assert found.split(".")[0] != "cssl" or found in ("cssl.cli", "cssl"), found


def test_no_test_imports_another():
    """What several need is in helpers.py, models.py or classic.py."""
    for path in (ROOT / "tests").rglob("*.py"):
        assert not [found for found, _ in imports(path) if found.startswith("test_")], path
