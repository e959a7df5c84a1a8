"""The body of `attncli mask`: build, audit, save, compare and judge. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from rich.console import RenderableType

from attncli.analysis.attention_arguments import (
    AttentionArguments,
    arguments_record,
    read_arguments,
    read_array,
)
from attncli.analysis.mask import (
    SOFTMAX,
    MaskInputs,
    file_alone,
    find_inputs,
    find_leaks,
    save_mask,
    shown_by_weights,
    sizes_of,
    suspicions,
)
from attncli.analysis.options import AttentionWords
from attncli.analysis.values import several
from attncli.attention.masks.audit import MaskAudit, MaskRecord, audit, place
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.compare import Cell, Leak, compare, differing_cells
from attncli.attention.masks.mask import Mask
from attncli.attention.options import Layout
from attncli.cli.mask import MaskOptions
from attncli.cli.options import OutputOptions
from attncli.cli.output import Record, make_printer, write_result
from attncli.columns import Column, columns_of, record_of
from attncli.errors import AttncliError, CheckFailedError, UsageError
from attncli.files.roles import read_one
from attncli.report.choices import Format
from attncli.report.mask import comparison_tables, mask_tables
from attncli.report.printer import Printer

FAILURES = ("empty-rows", "unused-keys", "leak")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A mask that is built and audited, with all that decided it.

    Attributes:
        options, output: as the user gave them.
        inputs: what the files say.
        arguments: what shapes the mask, the bundle's own mask included.
        mask: the mask.
        judged: its audit.
        leaks: what it shows although a rule hides it; None where nobody asked.
        printer: where results and warnings go.
    """

    options: MaskOptions
    output: OutputOptions
    inputs: MaskInputs
    arguments: AttentionArguments
    mask: Mask
    judged: MaskAudit
    leaks: list[Leak] | None
    printer: Printer

    def write(
        self,
        command: str,
        columns: Sequence[Column],
        records: Iterable[Record],
        params: Record,
        show: Callable[[list[Record]], Iterable[RenderableType]],
    ) -> None:
        """Print records in the format asked for, with what they came from."""
        read = self.arguments
        masks = {
            name: {"source": source, "shape": list(array.shape), "dtype": str(array.dtype)}
            for name, source in read.files.items()
            if (array := getattr(read.options, name)) is not None
        }
        shaped = arguments_record(read, self.mask.offset)
        for name in SOFTMAX:
            del shaped[name]
        slopes = self.mask.slopes
        shaped |= asdict(self.mask.sizes)
        shaped |= {"alibi_slopes": None if slopes is None else slopes.tolist(), "recognised": None}
        write_result(
            self.output.format,
            self.printer,
            command=command,
            columns=columns,
            records=records,
            inputs=self.inputs.described | masks,
            params=shaped | params,
            show=show,
        )

    def judge(self) -> None:
        """Fail where something was found that the user asked to fail on.

        Raises:
            CheckFailedError: naming what was found and where.
        """
        wanted = several(self.options.fail_on)
        for record in self.judged.records:
            where = f"mask{place(record.batch, record.head)}"
            for name, count, first in (
                ("empty-rows", record.empty_rows, record.first_empty_rows),
                ("unused-keys", record.unused_keys, record.first_unused_keys),
            ):
                if name in wanted and count:
                    listed = ", ".join(map(str, first)) + (", …" if count > len(first) else "")
                    problem = f"expected no {name.replace('-', ' ')}, got {count}: {listed}"
                    raise CheckFailedError(where, problem)
        for leak in self.leaks or ():
            if leak.cells:
                cell = leak.first[0]
                raise CheckFailedError(
                    f"mask{place(cell.batch, cell.head)}",
                    f'expected no visible cell that "{leak.rule}" hides, got {leak.cells}, the '
                    f"first at query {cell.query}, key {cell.key}",
                )


def run(options: MaskOptions, words: AttentionWords, output: OutputOptions) -> None:
    """Print what the mask is, or where it differs from another."""
    prepared = prepare(options, words, output)
    if options.against is not None:
        _compare(prepared)
        return
    mask, judged, printer = prepared.mask, prepared.judged, prepared.printer
    lenient = judged.lenient
    params: Record = {
        "recognised": judged.recognition.options,
        "recognised_finite_as_hidden": None if lenient is None else lenient.description,
    }
    if prepared.leaks is not None:
        params["leaks"] = [asdict(leak) for leak in prepared.leaks]
    group = prepared.inputs.group
    labels = None if group is None else group.labels
    prepared.write(
        "mask",
        columns_of(MaskRecord),
        _records(prepared),
        params,
        lambda records: mask_tables(
            mask, judged, prepared.leaks, records, labels, printer, output.digits
        ),
    )
    prepared.judge()


def prepare(options: MaskOptions, words: AttentionWords, output: OutputOptions) -> Prepared:
    """Read, build, audit and save, with every warning.

    Raises:
        AttncliError: options that make no sense, or do not fit the files.
    """
    _refuse_useless(options, words)
    printer = make_printer(output)
    files, group, softmax = options.files or (), options.group or (), options.effect
    held = words.attn_mask is None
    layouts = options.layout, options.k_layout
    if options.weights is None:
        inputs = find_inputs(files, group, *layouts, softmax=softmax, mask=held)
    else:
        inputs = shown_by_weights((*options.weights, *files), group)
    arguments = read_arguments(
        words, inputs.declared, "" if inputs.group is None else inputs.group.place
    )
    if inputs.mask is not None:
        arguments = replace(
            arguments,
            options=replace(arguments.options, attn_mask=inputs.mask),
            files=arguments.files | {"attn_mask": str(inputs.mask_source)},
        )
    printer.warn((*inputs.warnings, *arguments.warnings, *_unused(options, words)))
    said = {}
    for name in ("batch", "heads", "q_len", "k_len"):
        typed, of_files = getattr(options, name), inputs.lengths.get(name)
        if typed is not None and of_files is not None and typed != of_files:
            raise UsageError(f"«{name}»", f"expected {of_files} as in the files, got {typed}")
        said[name] = of_files if typed is None else typed
    scores = None
    if options.scores is not None and not options.files:
        scores = read_one(options.scores, "«scores»")[0].array
    mask = build_mask(arguments.options, sizes_of(arguments.options, said, scores))
    printer.warn(mask.warnings)
    judged, leaks = audit(mask, arguments.options), None
    if "leak" in several(options.fail_on):
        if arguments.options.attn_mask is None:
            raise UsageError("--fail-on leak", "expected --attn-mask beside it, got none")
        leaks = find_leaks(arguments.options, mask, judged)
    printer.warn(suspicions(judged))
    if options.save is not None:
        additive = options.save_as == "additive"
        dtype = (options.save_dtype or "float32") if additive else "bool"
        printer.warn(save_mask(mask, options.save, dtype))
        printer.note(f"wrote {options.save}")
    return Prepared(options, output, inputs, arguments, mask, judged, leaks, printer)


@contextmanager
def errors_named(name: str) -> Iterator[None]:
    """Faults of a file that is read as a mask file is, told of the option that named it."""
    try:
        yield
    except AttncliError as error:
        where = error.where.replace("attn_mask", name)
        raise type(error)(where, error.problem, error.advice) from None


def _compare(prepared: Prepared) -> None:
    """Print where two masks differ, and fail if they do.

    Raises:
        CheckFailedError: the masks differ.
    """
    options, printer = prepared.arguments.options, prepared.printer
    against, sizes, mask = str(prepared.options.against), prepared.mask.sizes, prepared.mask
    if against == "options":
        mask = build_mask(file_alone(options, options.attn_mask), sizes)
        other = build_mask(replace(options, attn_mask=None), sizes)
    else:
        warnings: list[str] = []
        array = read_array(against, "«against»", warnings)
        with errors_named("against"):
            other = build_mask(file_alone(options, array), sizes)
        printer.warn(
            [*warnings, *(text.replace("attn_mask", "against") for text in other.warnings)]
        )
    found = compare(mask, other)
    names = ("cells", "differing", "only_a", "only_b", "bias_differing")
    streamed = prepared.output.format in (Format.CSV, Format.NDJSON)
    prepared.write(
        "mask-compare",
        columns_of(Cell),
        map(record_of, differing_cells(mask, other) if streamed else found.first),
        {"against": against} | {name: getattr(found, name) for name in names},
        lambda records: comparison_tables(found, records, against, printer),
    )
    differing = found.differing + found.bias_differing
    if differing:
        cell = found.first[0]
        raise CheckFailedError(
            "--against",
            f"expected equal masks, got {differing} {'cell' if differing == 1 else 'cells'} that "
            f"differ, the first at query {cell.query}, key {cell.key}",
        )


def _records(prepared: Prepared) -> Iterator[Record]:
    """Counts; in JSON with the booleans of each matrix, or word that they are too many."""
    mask = prepared.mask
    too_many = mask.sizes.q_len * mask.sizes.k_len > prepared.options.max_values
    for counted in prepared.judged.records:
        record = record_of(counted)
        if prepared.output.format is Format.JSON and too_many:
            record |= {"values": None, "values_omitted": True}
        elif prepared.output.format is Format.JSON:
            record["values"] = mask.head(counted.batch or 0, counted.head or 0).cells(slice(None))
        yield record


def _unused(options: MaskOptions, words: AttentionWords) -> Iterator[str]:
    """Options of the softmax, which every command takes and a mask has no use for."""
    for name in ("sinks",) if options.effect else SOFTMAX:
        if getattr(words, name) is not None:
            yield f"«{name}» shapes the softmax, not the mask, and is not used here"


def _refuse_useless(options: MaskOptions, words: AttentionWords) -> None:
    """Refuse options that would do nothing, or that make no sense together."""
    wanted, bare = several(options.fail_on), words.attn_mask is None and options.weights is None
    for name in wanted:
        if name not in FAILURES:
            raise UsageError("--fail-on", f"expected one of {', '.join(FAILURES)}, got {name!r}")
    for option, given, needed, there in (
        ("--as", options.save_as is not None, "--save", options.save is not None),
        ("--dtype", options.save_dtype is not None, "--save", options.save is not None),
        ("--dtype", options.save_dtype is not None, "--as additive", options.save_as == "additive"),
        ("--group", bool(options.group), "a bundle", bool(options.files or options.weights)),
        ("--layout", options.layout is not Layout.BHSD, "files", bool(options.files)),
        ("--k-layout", options.k_layout is not None, "files", bool(options.files)),
        ("--effect", options.effect, "files of Q and K", bool(options.files)),
        ("--fail-on leak", "leak" in wanted, "--attn-mask", not bare or bool(options.files)),
        ("--against options", options.against == "options", "--attn-mask", not bare),
    ):
        if given and not there:
            raise UsageError(option, f"expected {needed} beside it, got none")
    against = options.against is not None
    for option, given, other, there in (
        ("--fail-on", bool(wanted), "--against, which fails by itself", against),
        ("--against", against, "--scores", options.scores is not None),
        ("--against", against, "--effect", options.effect),
        ("--attn-mask", words.attn_mask is not None, "--weights", options.weights is not None),
        ("--scores", options.scores is not None, "--weights", options.weights is not None),
        ("--effect", options.effect, "--weights", options.weights is not None),
        ("--effect", options.effect, "--scores", options.scores is not None),
    ):
        if given and there:
            raise UsageError(option, f"expected nothing of {other} beside it, got it")
