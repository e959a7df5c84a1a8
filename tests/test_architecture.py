"""What may import what, told by the imports of every module, nested ones and those for types too.

Arrows between the packages point one way, no modules import each other in a circle, and imports
stand at the top of their module, but for the few that put off what is heavy.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import attncli

PACKAGE = Path(attncli.__file__).parent

# What each package may import of the others, for its types as well; `attncli` is the version.
ARROWS = {
    "attention": {"columns", "errors", "limits", "ranks"},
    "files": {"errors", "limits", "signals"},
    "analysis": {"attention", "columns", "errors", "files", "limits", "ranks"},
    "report": {"attention", "attncli", "columns", "errors", "files", "signals"},
    "recording": {"analysis", "attention", "columns", "errors", "files", "limits"},
    "results": {"analysis", "attention", "columns", "errors", "files", "limits", "report"},
    "masking": {"analysis", "attention", "columns", "errors", "report"},
    "api": {"analysis", "attention", "columns", "errors", "files", "recording", "results"},
    "cli": {
        "analysis",
        "attention",
        "attncli",
        "columns",
        "errors",
        "files",
        "limits",
        "ranks",
        "recording",
        "report",
        "signals",
        "team",
    },
    "columns": set(),
    "errors": set(),
    "limits": {"errors"},
    "ranks": {"errors", "team"},
    "team": {"errors"},
    "attncli": {"analysis", "api", "attention", "errors", "masking", "recording", "results"},
    "signals": set(),
    "__main__": {"cli", "signals"},
}
# Pictures are counted where they are drawn, since their size is the terminal's. Everything else
# arrives as a result.
COMPUTED_BY_REPORT = {"attncli.attention.masks.audit", "attncli.attention.masks.view"}
LIGHT = (
    "attncli",
    "attncli.cli",
    "attncli.cli.app",
    "attncli.cli.commands",
    "attncli.columns",
    "attncli.errors",
    "attncli.files",
    "attncli.ranks",
    "attncli.signals",
    "attncli.team",
)
HEAVY = {"numpy", "rich", "torch"}
# `mask` and `inspect` promise to do without torch, so does whatever they import.
WITHOUT_TORCH = ("attention.masks", "attention.options", "files", "report.canvas", "report.mask")
WITH_TORCH = {"attncli.files.torch_tensors"}
# Where an import is put off on purpose, and what for.
PUT_OFF = {
    "attncli.__main__": "everything, before which signals get their handler",
    "attncli.cli.commands": "what a command does, of which help has no use",
    "attncli.cli.completion": "NumPy, for which tensors in files alone have use",
    "attncli": "a public name, loaded with its first use",
    "attncli.cli.capture_run": "transformers, an extra",
    "attncli.report.drawing": "matplotlib, which pictures alone need, and not everybody has",
    "attncli.team": "torch.distributed, of which a command in one process has no use",
    "attncli.files.reader": "torch, for which a .pt file alone has use",
}
# Options are spelt there alone: everything else names fields, and each caller hears its own way.
SPELLS_OPTIONS = {"cli", "report"}


@dataclass(frozen=True)
class Import:
    """One import.

    Attributes:
        module: what is imported, or the module that it is imported from.
        names: what of it is named; empty for the module itself.
        line: where.
        nested: whether it runs with a function, not with the module.
        for_types: whether it never runs.
    """

    module: str
    names: tuple[str, ...]
    line: int
    nested: bool
    for_types: bool


def imports_of(source: str, package: str = "attncli") -> list[Import]:
    """Every import of a module, wherever it stands and however it is written."""
    found: list[Import] = []

    def visit(node: ast.AST, nested: bool, for_types: bool) -> None:
        for module, names in _imported(node, package):
            found.append(Import(module, names, getattr(node, "lineno", 0), nested, for_types))
        inside = nested or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = node.body if isinstance(node, ast.If) and _is_for_types(node) else []
        for child in ast.iter_child_nodes(node):
            visit(child, inside, for_types or child in guarded)

    visit(ast.parse(source), nested=False, for_types=False)
    return found


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parent = package.split(".")[: -(node.level - 1) or None] if node.level else []
        module = ".".join([*parent, *([node.module] if node.module else [])])
        names = tuple(alias.name for alias in node.names)
        # A package may be imported by name: from attncli import report.
        whole = [(f"attncli.{name}", ()) for name in names]
        yield from whole if module == "attncli" else [(module, names)]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield ast.unparse(node.args[0]).strip("'"), ()


def _is_for_types(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def package_of(module: str) -> str:
    """The package that a module lies in; names of `attncli` itself are its own."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ARROWS else "attncli"


def forbidden(module: str, source: str) -> list[str]:
    """The imports of a module that no arrow allows, each as "line: module"."""
    package = package_of(module)
    return [
        f"{one.line}: {one.module}"
        for one in imports_of(source, module.rpartition(".")[0])
        if one.module.partition(".")[0] == "attncli"
        and package_of(one.module) not in ARROWS[package] | {package}
    ]


def computed_by_report(source: str) -> list[str]:
    """What a module takes of the mathematics beside classes and constants, which are results."""
    return [
        f"{one.module}.{name}"
        for one in imports_of(source)
        if one.module.startswith("attncli.attention")
        and not one.for_types
        and one.module not in COMPUTED_BY_REPORT
        for name in one.names or ("*",)
        if not name[0].isupper()
    ]


def targets_of(one: Import, modules: Mapping[str, str]) -> set[str]:
    """The modules of the package that an import leads to: a package itself or its submodules."""
    targets = {f"{one.module}.{name}" for name in one.names} & modules.keys()
    return targets or {one.module} & modules.keys()


def arrows_of(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Module → the modules of the package that it imports, be it late or for types alone."""
    return {
        module: {
            target
            for one in imports_of(source, module.rpartition(".")[0])
            for target in targets_of(one, modules)
            if target != module
        }
        for module, source in modules.items()
    }


def circles(arrows: Mapping[str, set[str]]) -> list[set[str]]:
    """The sets of two or more modules each of which reaches all the others (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in arrows[module]:
            if target not in order:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == order[module]:
            circle = set(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            found.extend([circle] if len(circle) > 1 else [])

    for module in arrows:
        if module not in order:
            visit(module)
    return found


def put_off(module: str, source: str) -> list[str]:
    """The imports within functions, each as "line: module"."""
    return [
        f"{one.line}: {one.module}"
        for one in imports_of(source, module.rpartition(".")[0])
        if one.nested
    ]


def loaded_at_once(module: str, modules: Mapping[str, str]) -> set[str]:
    """Top-level names of what is loaded when a module is imported, by it or by what it imports."""
    found, seen, pending = set(), set(), [module]
    while pending:
        here = pending.pop()
        seen.add(here)
        for one in imports_of(modules[here], here.rpartition(".")[0]):
            if one.nested or one.for_types:
                continue
            found.add(one.module.partition(".")[0])
            pending.extend(targets_of(one, modules) - seen)
    return found


def options_spelt(source: str) -> list[str]:
    """The texts of a module, docstrings aside, that hold an option as it is typed: --causal."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    ]
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node not in docstrings
        and re.search("--[a-z]", node.value)
    ]


MODULES = {
    ".".join(("attncli", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}


@pytest.mark.parametrize("module", MODULES)
def test_every_import_follows_an_arrow(module: str) -> None:
    assert forbidden(module, MODULES[module]) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(arrows_of(MODULES)) == []


@pytest.mark.parametrize("module", sorted(MODULES.keys() - PUT_OFF.keys()))
def test_imports_stand_at_the_top(module: str) -> None:
    assert put_off(module, MODULES[module]) == []


@pytest.mark.parametrize(
    "module", [name for name in MODULES if package_of(name) not in SPELLS_OPTIONS]
)
def test_options_are_spelt_where_they_are_typed(module: str) -> None:
    assert options_spelt(MODULES[module]) == []


def test_the_rules_of_a_mask_are_read_by_the_mask_alone() -> None:
    reading = {name for name, source in MODULES.items() if re.search(r"mask\.rules\b", source)}
    assert {name for name in reading if not name.startswith("attncli.attention.masks")} == set()


@pytest.mark.parametrize("module", [name for name in MODULES if package_of(name) == "report"])
def test_report_is_told_results_and_computes_none(module: str) -> None:
    assert computed_by_report(MODULES[module]) == []


@pytest.mark.parametrize("module", LIGHT)
def test_what_every_run_loads_is_light(module: str) -> None:
    assert loaded_at_once(module, MODULES) & HEAVY == set()


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in MODULES
        if name.startswith(tuple("attncli." + n for n in WITHOUT_TORCH)) and name not in WITH_TORCH
    ],
)
def test_masks_and_files_do_without_torch(module: str) -> None:
    assert "torch" not in loaded_at_once(module, MODULES)


def test_every_package_is_known() -> None:
    """A new folder needs arrows of its own."""
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert packages <= set(ARROWS)
    assert len(MODULES) > len(ARROWS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attncli.attention.steps", "import attncli.files.npy"),
        ("attncli.attention.steps", "from attncli.cli.app import app"),
        ("attncli.attention.masks.mask", "def late():\n    from attncli.report.table import table"),
        ("attncli.attention.steps", "if TYPE_CHECKING:\n    from attncli.report import table"),
        ("attncli.attention.steps", "from attncli import report"),
        ("attncli.attention.steps", "from ..files import npy"),
        ("attncli.attention.steps", "importlib.import_module('attncli.files.npy')"),
        ("attncli.report.table", "from attncli.cli.commands import OutputOptions"),
        ("attncli.report.table", "from attncli.api import compute"),
        ("attncli.files.npy", "from attncli.attention.options import Layout"),
        ("attncli.api", "from attncli.report.table import cell"),
        ("attncli.analysis.compute", "from attncli.report.table import cell"),
    ],
)
def test_a_wrong_arrow_would_be_noticed(module: str, source: str) -> None:
    assert len(forbidden(module, source)) == 1
    assert forbidden(module, "import json\nfrom attncli.errors import DataError") == []


def test_a_circle_would_be_noticed() -> None:
    modules = {
        "attncli.a": "from attncli import b",
        "attncli.b": "def late():\n    from attncli.c import name",
        "attncli.c": "if TYPE_CHECKING:\n    from attncli.a import Name",
        "attncli.d": "import attncli.a\nimport attncli.d.e",
        "attncli.d.e": "from . import f",
        "attncli.d.f": "",
    }
    assert circles(arrows_of(modules)) == [{"attncli.a", "attncli.b", "attncli.c"}]
    assert circles(arrows_of(modules | {"attncli.b": ""})) == []


def test_an_import_put_off_would_be_noticed() -> None:
    late = "def late():\n    from attncli.cli.mask_run import run"
    assert put_off("attncli.cli.commands", late) == ["2: attncli.cli.mask_run"]
    assert put_off("attncli.a", "late = lambda: import_module('attncli.b')") == ["1: attncli.b"]
    assert put_off("attncli.a", "class Late:\n    import json") == []


def test_an_option_spelt_would_be_noticed() -> None:
    assert options_spelt('"""Of --causal."""\nx = f"{y}: --causal"') == [": --causal"]
    assert options_spelt("x = 'a -- b --- «causal»'") == []


def test_report_that_computes_would_be_noticed() -> None:
    late = "def late():\n    from attncli.attention.steps import Softmax, softmax"
    assert computed_by_report(late) == ["attncli.attention.steps.softmax"]
    assert computed_by_report("import attncli.attention.steps") == ["attncli.attention.steps.*"]
    for_types = "if TYPE_CHECKING:\n    from attncli.attention.steps import softmax"
    assert computed_by_report(for_types) == []


@pytest.mark.parametrize(
    ("source", "loaded"),
    [
        ("try:\n    import torch.nn\nexcept ImportError:\n    pass", {"torch"}),
        ("class Late:\n    import rich", {"rich"}),
        ("def late():\n    import torch", set()),
        ("if TYPE_CHECKING:\n    import torch", set()),
        ("import attncli.b", {"attncli", "numpy"}),
        ("from attncli import b", {"attncli", "numpy"}),
    ],
)
def test_a_heavy_import_would_be_noticed(source: str, loaded: set[str]) -> None:
    modules = {"attncli.a": source, "attncli.b": "import numpy as np"}
    assert loaded_at_once("attncli.a", modules) == loaded
