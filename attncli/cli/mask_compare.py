"""`mask --against`: two masks cell by cell."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from attncli.errors import AttncliError, CheckFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncli.analysis.attention_arguments import AttentionArguments
    from attncli.attention.masks.compare import Comparison
    from attncli.attention.masks.mask import Mask
    from attncli.attention.sizes import Sizes
    from attncli.cli.mask import MaskOptions
    from attncli.cli.mask_sizes import Sized
    from attncli.cli.options import WorkOptions
    from attncli.report.printer import Printer


def run_compare(
    chosen: MaskOptions,
    sized: Sized,
    read: AttentionArguments,
    sizes: Sizes,
    work: WorkOptions,
    printer: Printer,
) -> None:
    """Compare, print where the masks differ, and fail if they do.

    Raises:
        CheckFailedError: the masks differ.
    """
    from attncli.attention.masks.compare import compare
    from attncli.cli.emit import emit
    from attncli.cli.mask import described_masks, params_of
    from attncli.report.mask import comparison_tables
    from attncli.report.records import MASK_CELLS

    one, other = _pair(chosen, read, sizes, printer)
    found = compare(one, other)
    records = [asdict(cell) for cell in (*found.first, *found.first_bias)]
    data_params = params_of(one, read) | {"against": chosen.against} | _counts(found)
    emit(
        work.format,
        printer,
        command="mask-compare",
        columns=MASK_CELLS,
        records=records,
        inputs=sized.described | described_masks(read),
        params=data_params,
        show=lambda cells: comparison_tables(found, cells, str(chosen.against), printer),
    )
    differing = found.differing + found.bias_differing
    if differing:
        cell = (*found.first, *found.first_bias)[0]
        raise CheckFailedError(
            "--against",
            f"expected equal masks, got {differing} {'cell' if differing == 1 else 'cells'} that "
            f"differ, the first at query {cell.query}, key {cell.key}",
        )


def _pair(
    chosen: MaskOptions, read: AttentionArguments, sizes: Sizes, printer: Printer
) -> tuple[Mask, Mask]:
    """The two masks: as built and from a file, or from the file and as the options build it."""
    from attncli.analysis.attention_arguments import read_array
    from attncli.attention.masks.build import build_mask
    from attncli.attention.options import AttentionOptions

    options = read.options
    if chosen.against == "options":
        file_alone = AttentionOptions(
            attn_mask=options.attn_mask,
            mask_true=options.mask_true,
            query_lengths=options.query_lengths,
        )
        expected = replace(options, attn_mask=None)
        return build_mask(file_alone, sizes), build_mask(expected, sizes)
    warnings: list[str] = []
    array = read_array(str(chosen.against), "--against", warnings)
    against = AttentionOptions(
        attn_mask=array, mask_true=options.mask_true, query_lengths=options.query_lengths
    )
    with told_of("--against"):
        other = build_mask(against, sizes)
    said = (text.replace("--attn-mask:", "--against:") for text in other.warnings)
    printer.warn([*warnings, *said])
    return build_mask(options, sizes), other


@contextmanager
def told_of(option: str) -> Iterator[None]:
    """Faults of a file that is checked like --attn-mask, told of the option that named it."""
    try:
        yield
    except AttncliError as error:
        where = option if error.where == "«attn_mask»" else error.where
        raise type(error)(where, error.problem, error.advice) from None


def _counts(found: Comparison) -> dict[str, Any]:
    names = ("cells", "differing", "only_a", "only_b", "bias_differing")
    return {name: getattr(found, name) for name in names}
