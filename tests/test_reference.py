"""The reference pages say what the program reads and prints today."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from attncli import __all__
from attncli.attention.options import OPTION_NAMES
from attncli.cli.commands import COMMANDS
from attncli.cli.documents import DOCUMENTS

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".github" / "make_reference.py"


def _made() -> dict[Path, str]:
    spec = spec_from_file_location("make_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    pages: dict[Path, str] = module.pages()
    return pages


MADE = _made()


@pytest.mark.parametrize("page", MADE, ids=lambda page: page.name)
def test_a_page_is_as_it_would_be_made_now(page: Path) -> None:
    there = page.read_text(encoding="utf-8") if page.is_file() else ""
    assert there == MADE[page], "out of date: python .github/make_reference.py"


def test_nothing_is_left_out() -> None:
    commands, records, python = MADE.values()
    for name in COMMANDS:
        assert f"\n## {name}\n" in commands
    for name in OPTION_NAMES:
        assert f"| `--{name.replace('_', '-')}`" in commands
    for name, document in DOCUMENTS.items():
        for record, kind in document.records.items():
            part = records.partition(f"\n### {name}: {record}\n")[2].partition("\n#")[0]
            assert [one.key for one in kind.found if f"| `{one.key}` |" not in part] == []
    for name in set(__all__) - {"__version__"}:
        assert f"\n### attncli.{name}\n" in python
