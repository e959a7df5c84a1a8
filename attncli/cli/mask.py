"""`attncli mask`: build, see, audit, recognise and compare masks. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from attncli.analysis.options import AttentionWords
from attncli.analysis.values import several
from attncli.attention.options import Layout
from attncli.cli.command import command
from attncli.cli.options import Many, WorkOptions, make_printer
from attncli.errors import UsageError
from attncli.report.choices import Format
from attncli.report.mask import Results

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncli.analysis.attention_arguments import AttentionArguments
    from attncli.attention.masks.audit import MaskAudit
    from attncli.attention.masks.mask import Mask
    from attncli.cli.mask_sizes import Sized
    from attncli.report.printer import Printer

FAILURES = ("empty-rows", "unused-keys", "leak")


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """Which mask, and what to do with it."""

    files: Annotated[
        Many,
        typer.Argument(
            metavar="FILE", help="Q and K, or a bundle: only their lengths and options count."
        ),
    ] = None
    group: Annotated[Many, Option("--group", metavar="NAME", help="Which group of a bundle.")] = (
        None
    )
    layout: Annotated[Layout, Option(help="Order of the axes of the files.")] = Layout.BHSD
    q_len: Annotated[
        int | None, Option("--q-len", metavar="N", min=0, help="S_q. [default: S_k]")
    ] = None
    k_len: Annotated[
        int | None, Option("--k-len", metavar="N", min=0, help="S_k. [default: S_q, or 8]")
    ] = None
    batch: Annotated[
        int | None, Option("--batch", metavar="B", min=1, help="Batches. [default: as the masks]")
    ] = None
    heads: Annotated[
        int | None, Option("--heads", metavar="H", min=1, help="Heads. [default: as the masks]")
    ] = None
    against: Annotated[
        str | None,
        Option(
            "--against",
            metavar="FILE|options",
            help="Compare with another mask, or --attn-mask with what the options build.",
        ),
    ] = None
    scores: Annotated[
        str | None,
        Option("--scores", metavar="FILE", help="Scaled scores: softmax before and after."),
    ] = None
    effect: Annotated[
        bool,
        Option("--effect", help="The same with Q·K·scale of the files."),
    ] = False
    save: Annotated[
        str | None, Option("--save", metavar="FILE", help="Write the mask, (B, H, S_q, S_k).")
    ] = None
    save_as: Annotated[
        str | None,
        Option("--as", metavar="bool|additive", help="What --save writes. [default: bool]"),
    ] = None
    save_dtype: Annotated[
        str | None,
        Option(
            "--dtype",
            metavar="float16|bfloat16|float32|float64",
            help="Of --save --as additive. [default: float32]",
        ),
    ] = None
    fail_on: Annotated[
        Many,
        Option("--fail-on", metavar="empty-rows|unused-keys|leak", help="Exit 3 if there are any."),
    ] = None
    max_values: Annotated[
        int,
        Option("--max-values", metavar="N", min=0, help="JSON: leave out larger masks' values."),
    ] = 65_536


def register(app: typer.Typer) -> None:
    """Add `mask` to the program."""

    @command(app, "mask")
    def mask(chosen: MaskOptions, shape: AttentionWords, work: WorkOptions) -> None:
        """Build a mask, or say what a given one lets through and what it is.

        The options that shape attention build it; --attn-mask FILE is recognised: causal (which
        corner), windows, prefix, padding, packed documents, or probably inverted.

        --fail-on leak: the mask of --attn-mask shows a cell that --causal, a window, --segments or
        key padding beside it hides. Without any of these, one beyond the pattern nearest to it.

        Additive values count as they stand: only -inf hides. Where -10000 or less was meant to, as
        finfo.min is, the description tells both readings.
        """
        from attncli.analysis.attention_arguments import read_arguments
        from attncli.cli.mask_sizes import find_sizes

        _check_options(chosen, shape)
        printer = make_printer(work)
        sized = find_sizes(chosen, shape)
        read = read_arguments(shape, sized.declared)
        printer.warn((*sized.warnings, *read.warnings, *_unused(chosen, shape)))
        run_mask(chosen, sized, read, work, printer)


def run_mask(
    chosen: MaskOptions, sized: Sized, read: AttentionArguments, work: WorkOptions, printer: Printer
) -> None:
    """Build, audit, save and judge."""
    from attncli.attention.masks.audit import audit
    from attncli.attention.masks.build import build_mask
    from attncli.cli.mask_judge import find_leaks, judge
    from attncli.cli.mask_sizes import sizes_of

    options = read.options
    if sized.mask is not None:
        options = replace(options, attn_mask=sized.mask)
        files = read.files | {"attn_mask": str(sized.mask_source)}
        read = replace(read, options=options, files=files)
    sizes = sizes_of(chosen, options, sized)
    built = build_mask(options, sizes)
    printer.warn(built.warnings)
    judged = audit(built)
    found = find_leaks(chosen, read, built, judged)
    printer.warn(_suspicions(judged))
    if chosen.save is not None:
        _save(built, chosen, printer)
    if chosen.against is not None:
        from attncli.cli.mask_compare import run_compare

        run_compare(chosen, sized, read, sizes, work, printer)
        return
    if chosen.scores is not None or chosen.effect:
        from attncli.cli.mask_effect import run_effect

        run_effect(chosen, built, sized, read, work, printer)
    else:
        _print(Results(built, judged, found), chosen, sized, read, work, printer)
    judge(judged, found, chosen)


def _suspicions(judged: MaskAudit) -> Iterator[str]:
    """What looks like a mistake of whoever made the mask."""
    from attncli.attention.masks.audit import place

    for recognition in (judged.recognition, judged.lenient):
        if recognition is None:
            continue
        for batch, head, part in recognition.parts:
            where = place(batch, head)
            if part.probably_inverted and part.description.startswith("probably inverted"):
                yield f"the mask{where} is {part.description}; were True and False exchanged?"
            hidden = part.pattern is not None and part.pattern.hidden_rows is not None
            if hidden and part.description.startswith("queries"):
                yield (
                    f"the mask{where} hides whole rows, {part.description}; padding hides keys, "
                    "which are columns: is it transposed?"
                )


def _unused(chosen: MaskOptions, shape: AttentionWords) -> Iterator[str]:
    """Options of the softmax, which every command takes and a mask has no use for."""
    names = ("sinks",) if chosen.effect else ("scale", "temperature", "softcap", "sinks")
    for name in names:
        if getattr(shape, name) is not None:
            yield f"--{name} shapes the softmax, not the mask, and is not used here"


def _check_options(chosen: MaskOptions, shape: AttentionWords) -> None:
    """Refuse options that would do nothing, or that make no sense together."""
    for option, value in (("--as", chosen.save_as), ("--dtype", chosen.save_dtype)):
        if value is not None and chosen.save is None:
            raise UsageError(option, f"expected --save beside it, got {option} alone")
    if chosen.save_as not in (None, "bool", "additive"):
        raise UsageError("--as", f"expected bool or additive, got {chosen.save_as!r}")
    if chosen.save_dtype is not None and chosen.save_as != "additive":
        raise UsageError("--dtype", "expected --as additive beside it, got a boolean mask")
    for name in several(chosen.fail_on):
        if name not in FAILURES:
            raise UsageError("--fail-on", f"expected one of {', '.join(FAILURES)}, got {name!r}")
    if chosen.group and not chosen.files:
        raise UsageError("--group", "expected a bundle beside it, got none")
    if chosen.layout is not Layout.BHSD and not chosen.files:
        raise UsageError("--layout", "expected files beside it, got none")
    if chosen.fail_on and chosen.against is not None:
        raise UsageError("--fail-on", "expected no --against beside it, which fails by itself")
    if "leak" in several(chosen.fail_on) and shape.attn_mask is None and not chosen.files:
        raise UsageError("--fail-on leak", "expected --attn-mask beside it, got none")
    if chosen.against == "options" and shape.attn_mask is None:
        raise UsageError("--against options", "expected --attn-mask beside it, got none")
    if chosen.against is not None and (chosen.scores is not None or chosen.effect):
        raise UsageError("--against", "expected no --scores or --effect beside it, got one")
    if chosen.scores is not None and chosen.effect:
        raise UsageError("--effect", "expected one of --scores and --effect, got both")


def _print(
    results: Results,
    chosen: MaskOptions,
    sized: Sized,
    read: AttentionArguments,
    work: WorkOptions,
    printer: Printer,
) -> None:
    from attncli.attention.masks.audit import MaskRecord
    from attncli.cli.emit import emit
    from attncli.columns import columns_of, record_of
    from attncli.report.mask import mask_tables

    built = results.built

    def records() -> Iterator[dict[str, Any]]:
        for record in results.judged.records:
            one = record_of(record)
            for key in ("first_empty_rows", "first_unused_keys"):
                one[key] = list(one[key])
            if work.format is Format.JSON:
                one |= _values(built, record.batch, record.head, chosen.max_values)
            yield one

    emit(
        work.format,
        printer,
        command="mask",
        columns=columns_of(MaskRecord),
        records=records(),
        inputs=sized.described | described_masks(read),
        params=params_of(built, read, results),
        show=lambda found: mask_tables(results, found, sized.labels, printer, work.digits),
    )


def described_masks(read: AttentionArguments) -> dict[str, Any]:
    """Source, shape and dtype of what came from files."""
    return {
        name: {"source": source, "shape": list(array.shape), "dtype": str(array.dtype)}
        for name, source in read.files.items()
        if (array := getattr(read.options, name)) is not None
    }


def params_of(
    built: Mask, read: AttentionArguments, results: Results | None = None
) -> dict[str, Any]:
    """What decided the mask, and the options that would build it."""
    from attncli.analysis.attention_arguments import arguments_record

    record = arguments_record(read, built.offset)
    for name in ("scale", "temperature", "softcap", "sinks"):
        del record[name]
    sizes = asdict(built.sizes)
    record |= sizes | {"alibi_slopes": None if built.slopes is None else built.slopes.tolist()}
    if results is None:
        return record | {"recognised": None}
    recognised, lenient = results.judged.recognition.options, results.judged.lenient
    record["recognised"] = None if recognised is None else _plain(recognised)
    record["recognised_finite_as_hidden"] = None if lenient is None else lenient.description
    if results.leaks is not None:
        record["leaks"] = [asdict(leak) for leak in results.leaks]
    return record


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Recognised options as JSON can hold them."""
    return {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in options.items()
    }


def _values(built: Mask, batch: int | None, head: int | None, max_values: int) -> dict[str, Any]:
    """Booleans of one record's matrix, or word that they are too many."""
    if built.sizes.q_len * built.sizes.k_len > max_values:
        return {"values": None, "values_omitted": True}
    cells = built.visible(
        slice(batch or 0, (batch or 0) + 1),
        slice(head or 0, (head or 0) + 1),
        slice(None),
        slice(None),
    )
    return {"values": cells[0, 0].tolist()}


def _save(built: Mask, chosen: MaskOptions, printer: Printer) -> None:
    """Write the mask block by block, with as many batches and heads as it has."""
    from attncli.cli.mask_save import save_mask

    assert chosen.save is not None
    dtype = "bool" if chosen.save_as != "additive" else chosen.save_dtype or "float32"
    lost = save_mask(built, chosen.save, dtype)
    if lost:
        printer.warn(
            [f"--dtype: {lost} visible cells are -inf in {dtype}, so they are hidden there"]
        )
    if dtype == "bool" and (built.slopes is not None or built.added is not None):
        printer.warn(["--as bool leaves out what the mask adds; --as additive keeps it"])
    printer.note(f"wrote {chosen.save}")
