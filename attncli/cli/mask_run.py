"""The body of `attncli mask`: build, audit, save, compare and judge. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from attncli.analysis import mask as analysis
from attncli.analysis.attention_arguments import (
    AttentionArguments,
    arguments_record,
    read_arguments,
    read_array,
)
from attncli.analysis.needs import chosen_of, chosen_record, require_booleans, require_mask
from attncli.analysis.options import AttentionWords, several
from attncli.attention.masks.audit import MaskAudit, MaskRecord, audit, place
from attncli.attention.masks.build import build_mask
from attncli.attention.masks.compare import Cell, Leak, compare, difference_maps, differing_cells
from attncli.attention.masks.mask import BLOCK_CELLS, HeadMask, Mask
from attncli.attention.masks.span_audit import audit_spans
from attncli.attention.options import Layout
from attncli.cli.commands import MaskOptions, PlotOptions
from attncli.cli.output import (
    Record,
    end_with,
    leave_out,
    make_printer,
    write_picture,
    write_result,
)
from attncli.cli.terminal import progress
from attncli.columns import Column, columns_of, record_of
from attncli.errors import AttncliError, CheckFailedError, UsageError, options_text
from attncli.files.roles import read_one
from attncli.files.text import place as file_place
from attncli.files.text import shown
from attncli.report import Format
from attncli.report.mask import comparison_tables, kinds_table, mask_opening, mask_tables
from attncli.report.printer import Printer
from attncli.report.table import chosen_words, labels_of_batch

# Cells of a file that take a second.
WORTH_WATCHING = 1 << 24
FAILURES = ("empty-rows", "unused-keys", "leak")


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A mask that is built and audited, with all that decided it, a bundle's own mask included.

    Its leaks are what it shows although a rule hides it; None where nobody asked.
    """

    options: MaskOptions
    words: AttentionWords
    output: PlotOptions
    inputs: analysis.MaskInputs
    arguments: AttentionArguments
    mask: Mask
    judged: MaskAudit
    leaks: list[Leak] | None
    printer: Printer

    def draw(self, make: Callable[[Any, str], Any]) -> None:
        """Draw what `--plot` asks for."""
        given = self.options, self.words, self.output
        write_picture("mask", given, self.printer, make, "mask_plots")

    @property
    def labels(self) -> Any:
        """Tokens of the first group, of all batches or of each; None for none."""
        return self.inputs.groups[0].labels if self.inputs.groups else None

    def opening(self, *more: str) -> Iterator[RenderableType]:
        """What stands above tables: of which groups and files it is, its sizes, and more."""
        options, weights = self.arguments.options, self.options.weights is not None
        parts = [file_place(self.inputs.source)] if self.inputs.groups else []
        for name, file in self.arguments.files.items():
            array = getattr(options, name)
            if array is None or (weights and name == "attn_mask"):
                continue
            told = f"{name.replace('_', ' ')} {file_place(file)}, {array.dtype} {array.shape}"
            marked = name == "attn_mask" and array.dtype.kind != "f"
            parts.append(told + (f", True = {options.mask_true}" if marked else ""))
        more = (*chosen_words(self.mask.chosen), *more)
        return mask_opening(self.inputs.names, parts, self.mask.sizes, *more)

    def write(
        self,
        command: str,
        columns: Sequence[Column],
        records: Iterable[Record],
        params: Record,
        show: Callable[[list[Record]], Iterable[RenderableType]],
        *more: str,
    ) -> None:
        """Print records in the format asked for, with what they came from, and more above them."""
        read, opened = self.arguments, list(self.opening(*more))
        masks = {
            name: {"source": source, "shape": list(array.shape), "dtype": str(array.dtype)}
            for name, source in read.files.items()
            if (array := getattr(read.options, name)) is not None
        }
        write_result(
            self.output,
            self.printer,
            command=command,
            columns=columns,
            records=records,
            inputs=self.inputs.described | masks,
            params=self.params | params,
            show=lambda found: (*opened, *show(found)),
            above=opened,
        )

    @property
    def params(self) -> Record:
        """Every option that shapes a mask, as it was used."""
        shaped = arguments_record(self.arguments, self.mask.offset)
        for name in analysis.SOFTMAX:
            del shaped[name]
        slopes = self.mask.slopes
        shaped |= asdict(self.mask.sizes)
        return shaped | {
            **chosen_record(self.mask.chosen),
            "alibi_slopes": None if slopes is None else slopes.tolist(),
            "recognised": None,
        }

    def judge(self, of: str = "") -> None:
        """Fail where something was found that the user asked to fail on.

        Args:
            of: which groups the mask is of, where there are several masks.

        Raises:
            CheckFailedError: naming what was found and where.
        """
        wanted = several(self.options.fail_on)
        for record in self.judged.records:
            where = f"mask{of}{place(record.batch, record.head)}"
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
                    f"mask{of}{place(cell.batch, cell.head)}",
                    f'expected no visible cell that "{leak.rule}" hides, got {leak.cells}, the '
                    f"first at query {cell.query}, key {cell.key}",
                )


def run(options: MaskOptions, words: AttentionWords, output: PlotOptions) -> None:
    """Print what the mask is, or where it differs from another; of a bundle a line a kind."""
    printer = make_printer(output)
    faults: list[AttncliError] = []
    alone = options.against is not None or options.save is not None
    inputs = read_inputs(options, words, None if alone else faults)
    leave_out(printer, faults)
    if len(inputs) > 1 and not alone:
        _list([_prepared(options, words, output, one, printer) for one in inputs], faults)
        return
    prepared = prepare(options, words, output, inputs, printer)
    if options.against is not None:
        _compare(prepared)
        return
    mask, judged = prepared.mask, prepared.judged
    found = [("", mask, judged, prepared.labels)]
    prepared.draw(lambda plots, title: plots.mask_picture(title, found))
    prepared.write(
        "mask",
        columns_of(MaskRecord),
        _records(prepared),
        _recognised(prepared),
        lambda records: mask_tables(
            mask, judged, prepared.leaks, records, prepared.labels, printer, output.digits
        ),
    )
    end_with(faults)
    prepared.judge()


def read_inputs(
    options: MaskOptions, words: AttentionWords, faults: list[AttncliError] | None = None
) -> list[analysis.MaskInputs]:
    """What the files say, an entry for each kind of mask.

    Args:
        options, words: as they were typed.
        faults: is told of bundles that are left out; None where none may be.

    Raises:
        UsageError: options that would do nothing, or that make no sense together.
    """
    _refuse_useless(options, words)
    if options.weights is not None:
        names = (*options.weights, *(options.files or ()))
        return [analysis.shown_by_weights(names, options.group or ())]
    return analysis.find_inputs(
        options.files or (),
        options.group or (),
        options.layout,
        options.k_layout,
        softmax=options.effect,
        typed=[name for name, value in vars(words).items() if value is not None],
        faults=faults,
    )


def prepare(
    options: MaskOptions,
    words: AttentionWords,
    output: PlotOptions,
    inputs: list[analysis.MaskInputs],
    printer: Printer,
) -> Prepared:
    """Read, build, audit and save one mask, with every warning.

    Raises:
        AttncliError: several masks, or options that make no sense, or do not fit the files.
    """
    if len(inputs) > 1:
        names = [group.name for kind in inputs for group in kind.groups]
        got = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        raise UsageError("«group»", f"expected one group, got {len(names)}: {got}")
    prepared = _prepared(options, words, output, inputs[0], printer)
    if options.save is not None:
        additive = options.save_as == "additive"
        dtype = (options.save_dtype or "float32") if additive else "bool"
        printer.warn(analysis.save_mask(prepared.mask, options.save, dtype))
        printer.wrote(options.save)
    return prepared


def _prepared(
    options: MaskOptions,
    words: AttentionWords,
    output: PlotOptions,
    inputs: analysis.MaskInputs,
    printer: Printer,
) -> Prepared:
    arguments = read_arguments(words, inputs.declared, inputs.place)
    if inputs.mask is not None:
        arguments = replace(
            arguments,
            options=replace(arguments.options, attn_mask=inputs.mask),
            files=arguments.files | {"attn_mask": inputs.place},
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
    sizes = analysis.sizes_of(arguments.options, said, scores)
    chosen = chosen_of(options, sizes)
    mask = analysis.long_mask(arguments.options, sizes)
    if mask is None:
        require_mask(sizes, arguments.options)
        is_long = arguments.options.attn_mask is not None and sizes.cells >= WORTH_WATCHING
        with progress(printer, None if is_long else 0, "reading the mask"):
            mask = replace(build_mask(arguments.options, sizes), chosen=chosen)
            judged = audit(mask, arguments.options)
    else:
        mask = replace(mask, chosen=chosen)
        judged = audit_spans(mask, arguments.options)
    printer.warn(mask.warnings)
    leaks: list[Leak] | None = None
    if "leak" in several(options.fail_on):
        if arguments.options.attn_mask is None:
            raise UsageError("--fail-on leak", "expected --attn-mask beside it, got none")
        leaks = analysis.find_leaks(arguments.options, mask, judged)
    printer.warn(analysis.suspicions(judged, arguments.options, said))
    return Prepared(options, words, output, inputs, arguments, mask, judged, leaks, printer)


def _recognised(prepared: Prepared) -> Record:
    lenient = prepared.judged.lenient
    params: Record = {
        "recognised": prepared.judged.recognition.options,
        "recognised_finite_as_hidden": None if lenient is None else lenient.description,
    }
    if prepared.leaks is not None:
        params["leaks"] = [asdict(leak) for leak in prepared.leaks]
    return params


def _list(kinds: Sequence[Prepared], faults: Sequence[AttncliError]) -> None:
    """Print which groups of a bundle have which mask, however it is declared.

    Args:
        kinds: a mask each.
        faults: of files that were left out.

    Raises:
        CheckFailedError: something was found that the user asked to fail on.
    """
    first, groups = kinds[0], {name: kind for kind in kinds for name in kind.inputs.names}
    kinds = _distinct(kinds)
    drawn = [(", ".join(one.inputs.names), one.mask, one.judged, one.labels) for one in kinds]
    first.draw(lambda plots, title: plots.mask_picture(title, drawn))
    sources = dict.fromkeys(one.inputs.source for one in groups.values())
    found = [{"groups": kind.inputs.names} | record for kind in kinds for record in _records(kind)]
    write_result(
        first.output,
        first.printer,
        command="mask",
        columns=(Column("groups", "groups", is_key=True), *columns_of(MaskRecord)),
        records=found,
        inputs={name: kind.inputs.described for name, kind in groups.items()},
        params={"groups": {name: kind.params | _recognised(kind) for name, kind in groups.items()}},
        show=lambda records: (
            ", ".join(file_place(name) for name in sources),
            *kinds_table([(kind.inputs.names, kind.judged) for kind in kinds], first.printer),
        ),
        above=[", ".join(file_place(name) for name in sources)],
    )
    end_with(faults)
    for kind in kinds:
        kind.judge(f" of {shown(', '.join(kind.inputs.names), 80)}")


def _distinct(kinds: Sequence[Prepared]) -> list[Prepared]:
    """Those that are the same known pattern as one."""
    found: dict[str, Prepared] = {}
    for kind in kinds:
        options = kind.judged.recognition.options
        counts = [replace(record, description="") for record in kind.judged.records]
        key = kind.inputs.place if options is None else f"{counts} {options_text(options)}"
        same = found.get(key, replace(kind, inputs=replace(kind.inputs, groups=())))
        inputs = replace(same.inputs, groups=(*same.inputs.groups, *kind.inputs.groups))
        found[key] = replace(same, inputs=inputs)
    return list(found.values())


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
        bare = build_mask(analysis.file_alone(options, options.attn_mask), sizes)
        mask = replace(bare, chosen=mask.chosen)
        other = build_mask(replace(options, attn_mask=None), sizes)
    else:
        warnings: list[str] = []
        array = read_array(against, "«against»", warnings)
        with errors_named("against"):
            other = build_mask(analysis.file_alone(options, array), sizes)
        printer.warn(
            [*warnings, *(text.replace("attn_mask", "against") for text in other.warnings)]
        )
    found = compare(mask, other)
    prepared.draw(
        lambda plots, title: plots.comparison_picture(
            title,
            list(islice(difference_maps(mask, other, plots.MOST_CELLS), plots.MOST_PANELS)),
            labels_of_batch(prepared.labels, 0),
            against,
        )
    )
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
    cells = mask.sizes.q_len * mask.sizes.k_len
    too_many = cells > prepared.options.max_values
    if prepared.output.format is Format.JSON and not too_many:
        require_booleans(cells * len(prepared.judged.records))
    for counted in prepared.judged.records:
        record = record_of(counted)
        if prepared.output.format is Format.JSON and too_many:
            record |= {"values": None, "values_omitted": True}
        elif prepared.output.format is Format.JSON:
            record["values"] = list(_rows(mask.head(counted.batch or 0, counted.head or 0)))
        yield record


def _rows(view: HeadMask) -> Iterator[NDArray[np.bool_]]:
    """Booleans (S_k,) of each query, made of a few at a time, so that a signal is heard soon."""
    q_len, step = view.mask.sizes.q_len, max(1, BLOCK_CELLS // max(1, view.k_len))
    for start in range(0, q_len, step):
        yield from np.asarray(view.cells(slice(start, min(start + step, q_len))))


def _unused(options: MaskOptions, words: AttentionWords) -> Iterator[str]:
    """Options of the softmax, which every command takes and a mask has no use for."""
    for name in ("sinks",) if options.effect else analysis.SOFTMAX:
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
