"""The options that several commands share beside inputs and what shapes attention."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from attncli.analysis.options import AttentionWords
from attncli.attention.options import OPTION_NAMES, Precision, option
from attncli.report import Color, Format, Unit


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How to output, and what to print where."""

    panel: ClassVar[str] = "Output"

    format: Format = option(Format.TABLE, "What to print.", names=("--format", "-f"))
    output: str = option("-", "Where to print it.", "FILE|-", names=("--output", "-o"))
    digits: int = option(4, "Decimals in tables.", "N", minimum=0, maximum=17)
    unit: Unit = option(Unit.BITS, "Unit of entropy in tables.")
    precision: Precision = option(Precision.AUTO, "auto: float64 up to 2²⁶ scores.")
    device: str = option("auto", "Where torch computes.", "auto|cpu|cuda[:N]")
    color: Color = option(Color.AUTO, "Colour in tables.")
    quiet: bool = option(False, "No warnings and no progress.", names=("--quiet", "-q"))


def defaults_of(options: Any) -> dict[str, Any]:
    """The default of every option of a group."""
    if isinstance(options, AttentionWords):
        return dict.fromkeys(OPTION_NAMES)
    return {entry.name: entry.default for entry in fields(options)}
