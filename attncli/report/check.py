"""`check` for eyes: verdict, errors, where they sit, and the mistakes that were tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncli.report.grid import GridColumn, grid
from attncli.report.stage_tables import heading, paragraph

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from attncli.attention.check.pair import Pair
    from attncli.attention.compare import Comparison
    from attncli.attention.hypotheses import Check, Hypothesis
    from attncli.attention.problem import Problem
    from attncli.report.printer import Printer

# Mistakes shown that do not explain the candidate, those that come nearest first.
MOST_OTHERS = 8
PLACES = ("batch", "head", "row", "column")


def check_tables(
    found: Check, problem: Problem, printer: Printer, digits: int
) -> Iterator[RenderableType]:
    """The verdict on every candidate, then the mistakes that explain it, then those that do not."""
    for comparison in found.comparisons:
        yield from _verdict(comparison, printer, digits)
    matching = [one for one in found.hypotheses if one.matches]
    for one in matching:
        options = f" if {one.options}" if one.options else ""
        yield heading(f"matches{options}: {one.name}", printer)
        yield f"  largest error then {one.max_abs_error:.3g}"
    if found.hypotheses and not matching:
        yield paragraph(
            "none of the classic mistakes explains it, alone or in pairs; the nearest:", printer
        )
    others = sorted(
        (one for one in found.hypotheses if not one.matches), key=lambda one: one.max_abs_error
    )
    if others:
        yield ""
        yield _hypothesis_table(others[:MOST_OTHERS], printer)
        if len(others) > MOST_OTHERS:
            yield f"… {len(others) - MOST_OTHERS} more were tried: --format json has them all"
    yield ""
    yield from _notes(problem, printer)


def pair_tables(
    found: Pair, names: tuple[str, str], printer: Printer, digits: int
) -> Iterator[RenderableType]:
    """Each candidate against the reference, then against each other."""
    for comparison, name in zip((found.first, found.second), names, strict=True):
        yield heading(name, printer)
        yield from _verdict(comparison, printer, digits)
    closer = "they are equally close" if found.closer is None else names[found.closer - 1]
    yield heading(f"closer to the reference: {closer}", printer)
    yield (
        f"  between them: largest difference {found.max_abs_error:.6g}, rms {found.rms_error:.6g}, "
        f"{found.mismatches} cells part by more than both tolerances"
    )
    if found.first_part is not None:
        yield f"  they part first at {_at(found.first_part)}"
    for finding in found.places.findings:
        yield paragraph(finding, printer, lead="→ ")


def _verdict(found: Comparison, printer: Printer, digits: int) -> Iterator[RenderableType]:
    word = "right" if found.passed else "OFF"
    dtype = str(found.dtype).removeprefix("torch.")
    yield heading(f"{found.target}: {word}", printer)
    yield (
        f"  {found.mismatches} of {found.cells} cells beyond {found.atol:.3g} + "
        f"{found.rtol:.3g}·|expected| (what honest {dtype} may be off)"
    )
    cosine = "–" if found.cosine is None else f"{found.cosine:.9g}"
    yield (
        f"  max abs error {found.max_abs_error:.4g}, max rel {found.max_rel_error:.4g}, "
        f"rms {found.rms_error:.4g}, cosine {cosine}"
    )
    if found.worst_index is not None and found.max_abs_error:
        yield (
            f"  worst at {_at(found.worst_index)}: actual {found.actual:.{digits + 2}g}, "
            f"expected {found.expected:.{digits + 2}g}"
        )
    if found.explanation is not None:
        for part in found.explanation.split("; "):
            yield paragraph(part, printer, lead="→ ")
    yield ""


def _hypothesis_table(found: Sequence[Hypothesis], printer: Printer) -> RenderableType:
    return grid(
        [
            GridColumn("tried, does not match", [one.name for one in found], True, True),
            GridColumn("max abs error", [f"{one.max_abs_error:.4g}" for one in found]),
            GridColumn("reproduce with", [one.options or "–" for one in found], True),
        ],
        printer,
    )


def _notes(problem: Problem, printer: Printer) -> Iterator[RenderableType]:
    sizes = problem.sizes
    yield paragraph(
        f"reference: float64, scale {problem.scale:.6g}, B={sizes.batch} H={sizes.heads} "
        f"S_q={sizes.q_len} S_k={sizes.k_len} d_k={problem.dk}",
        printer,
    )


def _at(index: Sequence[int]) -> str:
    return ", ".join(f"{name} {place}" for name, place in zip(PLACES, index, strict=False))
