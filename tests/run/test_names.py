"""What editors and type checkers are told of the package, beside what there is."""
import ast
import inspect
from types import ModuleType

from conftest import ROOT

import cssl

STUB = ast.parse((ROOT / "cssl" / "__init__.pyi").read_text(encoding="utf-8"))
HELPERS = {"Any", "Path", "exports"}  # imported by the package for itself


def test_the_stub_names_what_there_is():
    named = {alias.asname for node in STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names} - {None}
    named |= {node.name for node in STUB.body if isinstance(node, ast.FunctionDef)}
    names = {name: getattr(cssl, name) for name in dir(cssl) if not name.startswith("_")}
    modules = {name for name, value in names.items() if isinstance(value, ModuleType)}
    assert named == set(names) - (modules - {"augment", "losses", "metrics"}) - HELPERS and set(cssl.methods()) < named


def test_the_stub_has_the_arguments_of_the_functions():
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            function = inspect.unwrap(getattr(cssl, node.name))
            arguments = [*node.args.args, *node.args.kwonlyargs, *filter(None, [node.args.kwarg])]
            assert [argument.arg for argument in arguments] == list(inspect.signature(function).parameters), node.name


def test_rooms_of_functions_are_importable_from_the_package():
    from cssl import augment, losses, metrics

    assert losses.credal_loss and augment.Augmenter and metrics.METRICS
