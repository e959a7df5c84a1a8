"""Arrows between the rooms point one way, told by the imports of every module, nested ones too."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

import attncli

PACKAGE = Path(attncli.__file__).parent

# What each room may import of the others, for its types as well; `attncli` is the version.
ARROWS = {
    "attention": {"columns", "errors"},
    "files": {"errors"},
    "report": {"attention", "attncli", "columns", "errors", "files"},
    "api": {"attention", "columns", "errors", "files"},
    "cli": {"attention", "attncli", "columns", "errors", "files", "report"},
    "columns": set(),
    "errors": set(),
    "attncli": {"api", "attention", "errors"},
    "__main__": {"cli"},
}
# Pictures are counted where they are drawn, since their size is the terminal's. Everything else
# arrives as a result.
COMPUTED_BY_REPORT = {"attncli.attention.masks.audit", "attncli.attention.masks.view"}
LIGHT = ("attncli", "attncli.columns", "attncli.errors", "attncli.files", "attncli.report.choices")
HEAVY = {"numpy", "rich", "torch"}
# `mask` and `inspect` promise to do without torch, so does whatever they import.
WITHOUT_TORCH = ("attention.masks", "api.mask", "attention.options", "files")


@dataclass(frozen=True)
class Import:
    """One import.

    Attributes:
        module: what is imported, or the module that it is imported from.
        line: where.
        nested: whether it runs with a function, not with the module.
        for_types: whether it never runs.
    """

    module: str
    line: int
    nested: bool
    for_types: bool


def imports_of(source: str, package: str = "attncli") -> list[Import]:
    """Every import of a module, wherever it stands."""
    found: list[Import] = []

    def visit(node: ast.AST, nested: bool, for_types: bool) -> None:
        for name in _modules(node, package):
            found.append(Import(name, getattr(node, "lineno", 0), nested, for_types))
        inside = nested or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = node.body if isinstance(node, ast.If) and _is_for_types(node) else []
        for child in ast.iter_child_nodes(node):
            visit(child, inside, for_types or child in guarded)

    visit(ast.parse(source), nested=False, for_types=False)
    return found


def _modules(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parent = package.split(".")[: -(node.level - 1) or None] if node.level else []
        module = ".".join([*parent, *([node.module] if node.module else [])])
        # A room may be imported by name: from attncli import report.
        return [f"{module}.{a.name}" if module == "attncli" else module for a in node.names]
    return []


def _is_for_types(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def room_of(module: str) -> str:
    """The room that a module of the package lies in; names of the package itself are its own."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ARROWS else "attncli"


def forbidden(module: str, source: str) -> list[str]:
    """The imports of a module that no arrow allows, each as "line: module"."""
    room = room_of(module)
    return [
        f"{one.line}: {one.module}"
        for one in imports_of(source, module.rpartition(".")[0])
        if one.module.partition(".")[0] == "attncli"
        and room_of(one.module) not in ARROWS[room] | {room}
    ]


def computed_by_report(source: str) -> list[str]:
    """The modules of mathematics that a module really loads, not only for its types."""
    return [
        one.module
        for one in imports_of(source)
        if one.module.startswith("attncli.attention")
        and not one.for_types
        and one.module not in COMPUTED_BY_REPORT
    ]


def loaded_at_once(source: str) -> set[str]:
    """Top-level names of what a module loads when it is imported."""
    return {
        one.module.partition(".")[0]
        for one in imports_of(source)
        if not one.nested and not one.for_types
    }


MODULES = {
    ".".join(("attncli", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}


@pytest.mark.parametrize("module", MODULES)
def test_every_import_follows_an_arrow(module: str) -> None:
    assert forbidden(module, MODULES[module]) == []


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) == "report"])
def test_report_is_told_results_and_computes_none(module: str) -> None:
    assert computed_by_report(MODULES[module]) == []


@pytest.mark.parametrize(
    "module", [name for name in MODULES if room_of(name) == "cli" or name in LIGHT]
)
def test_the_hallway_and_the_doors_load_nothing_heavy_at_once(module: str) -> None:
    assert loaded_at_once(MODULES[module]) & HEAVY == set()


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in MODULES
        if name.startswith(tuple("attncli." + n for n in WITHOUT_TORCH))
        and name != "attncli.files.torch_tensors"
    ],
)
def test_masks_and_files_do_without_torch(module: str) -> None:
    assert "torch" not in loaded_at_once(MODULES[module])


def test_every_room_is_known() -> None:
    """A new folder needs arrows of its own."""
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms <= set(ARROWS)
    assert len(MODULES) > len(ARROWS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attncli.attention.steps", "import attncli.files.npy"),
        ("attncli.attention.steps", "from attncli.cli.app import app"),
        ("attncli.attention.masks.mask", "def late():\n    from attncli.report.grid import grid"),
        ("attncli.attention.steps", "if TYPE_CHECKING:\n    from attncli.report import grid"),
        ("attncli.attention.steps", "from attncli import report"),
        ("attncli.attention.steps", "from ..files import npy"),
        ("attncli.report.grid", "from attncli.cli.options import Many"),
        ("attncli.report.grid", "from attncli.api.compute import compute"),
        ("attncli.files.npy", "from attncli.attention.options import Layout"),
        ("attncli.api.compute", "from attncli.report.numbers import decimals"),
    ],
)
def test_a_wrong_arrow_would_be_noticed(module: str, source: str) -> None:
    assert len(forbidden(module, source)) == 1
    assert forbidden(module, "import json\nfrom attncli.errors import DataError") == []


def test_report_that_computes_would_be_noticed() -> None:
    late = "def late():\n    from attncli.attention.steps import softmax"
    assert computed_by_report(late) == ["attncli.attention.steps"]
    for_types = "if TYPE_CHECKING:\n    from attncli.attention.steps import Softmax"
    assert computed_by_report(for_types) == []


def test_a_heavy_import_would_be_noticed() -> None:
    assert loaded_at_once("try:\n    import torch.nn\nexcept ImportError:\n    pass") == {"torch"}
    assert loaded_at_once("class Late:\n    import rich") == {"rich"}
    assert loaded_at_once("def late():\n    import torch") == set()
    assert loaded_at_once("if TYPE_CHECKING:\n    import torch") == set()
