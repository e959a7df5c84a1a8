"""`mask --fail-on`: what was found that the user asked to fail on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attncli.analysis.values import several
from attncli.errors import CheckFailedError, UsageError

if TYPE_CHECKING:
    from attncli.analysis.attention_arguments import AttentionArguments
    from attncli.attention.masks.audit import MaskAudit
    from attncli.attention.masks.compare import Leak
    from attncli.attention.masks.mask import Mask
    from attncli.cli.mask import MaskOptions


def find_leaks(
    chosen: MaskOptions, read: AttentionArguments, built: Mask, judged: MaskAudit
) -> list[Leak] | None:
    """What a mask file shows although a rule hides it; None where nobody asked.

    The rules are those that the options declare. Where they declare none, the pattern nearest to
    the mask is taken for the rule; a mask that is a known pattern then leaks nothing.

    Raises:
        UsageError: there is no mask file to judge.
    """
    if "leak" not in several(chosen.fail_on):
        return None
    from attncli.attention.masks.build import build_mask
    from attncli.attention.masks.compare import leaks
    from attncli.attention.masks.recognise import undeclared_leaks
    from attncli.attention.options import AttentionOptions

    options = read.options
    if options.attn_mask is None:
        raise UsageError("--fail-on leak", "expected --attn-mask beside it, got none")
    bare = AttentionOptions(
        attn_mask=options.attn_mask,
        mask_true=options.mask_true,
        query_lengths=options.query_lengths,
    )
    found = leaks(build_mask(bare, built.sizes), replace(options, attn_mask=None))
    return found or undeclared_leaks(built, judged.recognition)


def judge(judged: MaskAudit, found: list[Leak] | None, chosen: MaskOptions) -> None:
    """Fail where something was found that the user asked to fail on.

    Raises:
        CheckFailedError: naming what was found and where.
    """
    from attncli.attention.masks.audit import place

    wanted = several(chosen.fail_on)
    for record in judged.records:
        where = place(record.batch, record.head)
        for name, count, first in (
            ("empty-rows", record.empty_rows, record.first_empty_rows),
            ("unused-keys", record.unused_keys, record.first_unused_keys),
        ):
            if name in wanted and count:
                listed = ", ".join(map(str, first)) + (", …" if count > len(first) else "")
                problem = f"expected no {name.replace('-', ' ')}, got {count}: {listed}"
                raise CheckFailedError(f"mask{where}", problem)
    for leak in found or ():
        if leak.cells:
            cell = leak.first[0]
            raise CheckFailedError(
                f"mask{place(cell.batch, cell.head)}",
                f'expected no visible cell that "{leak.rule}" hides, got {leak.cells}, the first '
                f"at query {cell.query}, key {cell.key}",
            )
