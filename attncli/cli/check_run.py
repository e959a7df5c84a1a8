"""What `attncli check` does: candidates from files, the verdict, the command that verifies it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import RenderableType

from attncli import ranks
from attncli.analysis.attention_arguments import NONE
from attncli.analysis.inputs import describe, read_tensor
from attncli.analysis.needs import chosen_of, chosen_record
from attncli.analysis.options import AttentionWords, FileOptions
from attncli.analysis.problems import GroupProblem, load_problem
from attncli.attention.check.candidate import Candidate, read_candidate
from attncli.attention.check.compare import Comparison, compare_pair
from attncli.attention.check.hypotheses import Check, Hypothesis, check
from attncli.attention.options import Precision, Target
from attncli.attention.problem import Problem
from attncli.attention.sizes import Chosen
from attncli.cli.commands import CheckOptions, PlotOptions
from attncli.cli.opening import opening
from attncli.cli.output import (
    Record,
    command_words,
    make_printer,
    write_picture,
    write_result,
)
from attncli.cli.terminal import progress
from attncli.columns import columns_of, record_of
from attncli.errors import CheckFailedError
from attncli.report.check import check_tables, pair_tables
from attncli.report.printer import Printer

# Cells that take seconds.
WORTH_WATCHING = 1 << 25
# Hides, caps and adds nothing that float64 would show.
_NO_SOFTCAP, _NO_SINK = 1e9, -1e4


def run(
    inputs: FileOptions, words: AttentionWords, options: CheckOptions, output: PlotOptions
) -> None:
    """Print the verdict, and fail if a candidate is off."""
    given = {target: getattr(options, f"actual_{target}") for target in Target}
    specs = {target: spec for target, spec in given.items() if spec is not None}
    # The reference is float64 whatever the size, unless float32 is asked for.
    auto = output.precision is Precision.AUTO
    precision = Precision.FLOAT64 if auto else output.precision
    made = load_problem(inputs, words, precision, output.device)
    printer = make_printer(output)
    printer.warn(made.warnings)
    chosen = chosen_of(options, made.problem.sizes)
    described = dict(made.group.described)
    session = _Session(inputs, words, options, output, made, chosen, printer, described)
    candidates = [session.read(target, f"actual_{target}", one) for target, one in specs.items()]
    if options.pair is None:
        session.check(candidates)
    else:
        ((target, spec),) = specs.items()
        second = session.read(target, "pair", options.pair)
        session.compare(candidates[0], second, (spec, options.pair))


@dataclass(frozen=True, slots=True)
class _Session:
    """What was asked, of which problem, and how to answer."""

    inputs: FileOptions
    words: AttentionWords
    options: CheckOptions
    output: PlotOptions
    made: GroupProblem
    chosen: Chosen
    printer: Printer
    described: dict[str, Any]

    def read(self, target: Target, name: str, spec: str) -> Candidate:
        """A candidate for a target from the file of an option."""
        tensor, said = read_tensor(spec, f"«{name}»", self.inputs.dtype, str(target))
        self.printer.warn(said)
        self.described[name] = describe(spec, tensor)
        return read_candidate(target, tensor.cpu(), self.made.problem, self.inputs.layout)

    def check(self, candidates: Sequence[Candidate]) -> None:
        """Compare candidates with the reference, and name what is wrong with them."""
        sizes = self.made.problem.sizes
        batches, heads = self.chosen
        rows = sizes.q_len * (sizes.batch if batches is None else len(batches))
        rows *= sizes.heads if heads is None else len(heads)
        shown = rows if rows * sizes.k_len >= WORTH_WATCHING else 0
        with progress(self.printer, shown, "comparing") as tell:
            found = self.tried(candidates, tell)
        if not ranks.is_first():  # its part of the comparison is done
            return
        hypotheses = [_hypothesis_record(one, self.verifying(one)) for one in found.hypotheses]
        tables = check_tables(found, self.verifying, self.printer, self.output.digits)
        self.draw(found.comparisons, _explaining(found))
        self._emit(found.comparisons, tables, {"hypotheses": hypotheses})
        _judge(found.comparisons, _explaining(found))

    def compare(self, first: Candidate, second: Candidate, names: tuple[str, str]) -> None:
        """Compare two candidates with the reference and with each other."""
        pair = compare_pair(
            self.made.problem,
            self.made.arguments.options,
            first,
            second,
            rtol=self.options.rtol,
            atol=self.options.atol,
            chosen=self.chosen,
        )
        if not ranks.is_first():
            return
        alone = {f"actual_{first.target}": names[1], "pair": None}
        commands = [partial(self.verifying, alone=each) for each in ({"pair": None}, alone)]
        with ranks.alone():
            checks = [
                Check((one,), ()) if one.passed else self.tried([candidate])
                for one, candidate in ((pair.first, first), (pair.second, second))
            ]
        found = [one for each in checks for one in each.comparisons]
        hypotheses = [
            _hypothesis_record(one, command(one)) | {"candidate": number}
            for number, (each, command) in enumerate(zip(checks, commands, strict=True), 1)
            for one in each.hypotheses
        ]
        tables = pair_tables(pair, checks, names, commands, self.printer, self.output.digits)
        self._emit(found, tables, {"hypotheses": hypotheses, "pair": _listed(pair)})
        self.draw(found, ())
        for option, each in zip((None, "--pair"), checks, strict=True):
            _judge(each.comparisons, _explaining(each), option)

    def tried(
        self, candidates: Sequence[Candidate], tell: Callable[[int], None] | None = None
    ) -> Check:
        """The candidates against the reference and, where they are off, against mistakes."""
        return check(
            self.made.problem,
            self.made.arguments.options,
            candidates,
            rtol=self.options.rtol,
            atol=self.options.atol,
            chosen=self.chosen,
            tell=tell,
        )

    def draw(self, comparisons: Sequence[Comparison], explaining: Sequence[str]) -> None:
        """Draw where candidates are off, if that is asked for."""
        given = self.inputs, self.words, self.options, self.output
        said = " or by ".join(explaining)
        write_picture(
            "check",
            given,
            self.printer,
            lambda plots, title: plots.check_picture(title, comparisons, said),
            "check_plots",
        )

    def verifying(
        self, found: Hypothesis, alone: Mapping[str, Any] | None = None
    ) -> list[str] | None:
        """The words of the command that verifies a mistake; None where no option makes it.

        Args:
            found: the mistake.
            alone: options that make one candidate of a pair the only one; None for no pair.
        """
        problem, changes = self.made.problem, dict(found.changes)
        if found.name == "qk:exchanged" and problem.kv_heads == problem.sizes.heads:
            changes = _with_q_and_k_exchanged(self.inputs)
        if not changes:
            return None
        given = (self.inputs, self.words, self.options, self.output)
        changes |= alone or {}
        return _command_words(given, changes, self.made.group.declared, problem)

    def _emit(
        self,
        comparisons: Sequence[Comparison],
        tables: Iterable[RenderableType],
        more: Mapping[str, Any],
    ) -> None:
        opened = list(opening(self.made, chosen=self.chosen))
        write_result(
            self.output,
            self.printer,
            command="check",
            columns=columns_of(Comparison),
            records=[_listed(one) for one in comparisons],
            inputs=self.described,
            params=self.made.params | chosen_record(self.chosen),
            show=lambda _: (*opened, "", *tables),
            above=opened,
            wrap=lambda records: {"records": records, **more},
        )


def _explaining(found: Check) -> list[str]:
    """The mistakes that explain every candidate, as they are told."""
    return [one.told for one in found.hypotheses if one.matches]


def _hypothesis_record(found: Hypothesis, command: list[str] | None) -> Record:
    return {
        "name": found.name,
        "options": found.options or None,
        "detail": found.detail or None,
        "heads": None if found.heads is None else list(found.heads),
        "max_abs_error": found.max_abs_error,
        "matches": found.matches,
        "explained": found.explained,
        "command": None if command is None else shlex.join(command),
    }


def _judge(
    comparisons: Iterable[Comparison], mistakes: Sequence[str] = (), option: str | None = None
) -> None:
    """Fail if a candidate is off.

    Raises:
        CheckFailedError: naming the first that is, and the mistakes that explain it.
    """
    advice = f"explained by {' or by '.join(mistakes)}" if mistakes else ""
    for found in comparisons:
        if not found.passed:
            raise CheckFailedError(option or f"--actual-{found.target}", _failure(found), advice)


def _failure(found: Comparison) -> str:
    if found.mismatches:
        cells = f"{found.mismatches} of {found.cells} cells"
        return f"expected the reference, got {cells} further from it than allowed"
    if found.heads_off:
        heads = f"{found.heads_off} head{'s' * (found.heads_off > 1)}"
        return f"expected errors such as rounding explains, got {heads} with more"
    return f"expected the axes of the reference, got those of {found.reading}"


def _command_words(
    given: Sequence[Any], changes: Mapping[str, Any], declared: Iterable[str], problem: Problem
) -> list[str]:
    """`attncli check …` that asks the same again with the options of a mistake.

    Args:
        given: the groups of options that the user gave.
        changes: field of the options → its new value, None for leaving it out.
        declared: options that come from the bundle, which leaving out does not undo.
        problem: to know what undoes them.
    """
    changes = dict(changes)
    for name in declared:
        if name in changes and changes[name] is None:
            changes[name] = _undone(name, problem)
            if name == "prefix" and "causal" in changes:  # that all is seen undoes both
                del changes["causal"]
                changes[name] = problem.sizes.k_len
    if "attn_mask" in changes:
        changes |= {"mask_true": None, "hide_below": None}
    return command_words("check", given, changes)


def _undone(name: str, problem: Problem) -> Any:
    """A value of an option that comes to the same as not to have it."""
    sizes = problem.sizes
    offset = problem.mask.offset
    away = 0 if offset is None else max(abs(int(position)) for position in offset)
    return {
        "attn_mask": NONE,
        "key_padding": NONE,
        "softcap": _NO_SOFTCAP,
        "sinks": (_NO_SINK,) * sizes.heads,
        "key_lengths": sizes.k_len,
        "prefix": 0,
        "sink_window": 0,
        "dilation": 1,
        "segments": (0,) * sizes.k_len,
        "query_segments": (0,) * sizes.q_len,
        "position_ids": tuple(range(sizes.k_len)),
        "cu_seqlens_q": (0, sizes.q_len),
        "cu_seqlens_k": (0, sizes.k_len),
        "alibi_slopes": (0.0,) * sizes.heads,
        "left_window": sizes.q_len + sizes.k_len + away,
        "right_window": sizes.q_len + sizes.k_len + away,
    }[name]


def _with_q_and_k_exchanged(files: FileOptions) -> dict[str, Any]:
    """The fields of the file options with Q and K exchanged; empty where that takes new files."""
    if files.q is not None and files.k is not None:
        return {"q": files.k, "k": files.q}
    positional = files.files or []
    if len(positional) in (2, 3) and files.q is None and files.k is None:
        return {"files": [positional[1], positional[0], *positional[2:]]}
    return {}


def _listed(result: Any) -> dict[str, Any]:
    """The record of a result, in which indices are lists."""
    record = record_of(result)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in record.items()}
