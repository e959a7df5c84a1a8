"""How `compute` looks to people: what was computed, each stage, a summary and the cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncli.report.choices import Unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from attncli.attention.problem import Problem
    from attncli.attention.stage_statistics import StageResult
    from attncli.cli.compute import Prepared
    from attncli.cli.options import WorkOptions
    from attncli.report.printer import Printer


def show(
    prepared: list[Prepared],
    gathered: list[list[StageResult]],
    printer: Printer,
    work: WorkOptions,
) -> None:
    """Print every group's stages as tables."""
    together = zip(prepared, gathered, strict=True)
    printer.show(*(p for one, found in together for p in _group_tables(one, found, printer, work)))


def _group_tables(
    one: Prepared, found: list[StageResult], printer: Printer, work: WorkOptions
) -> Iterator[RenderableType]:
    from attncli.report.stage_tables import Axes, View, stage_tables, summary_table

    sizes, labels = one.problem.sizes, one.group.labels
    rows = _names(labels, list(one.selection.rows), sizes.q_len)
    keys = _names(labels, list(range(sizes.k_len)), sizes.k_len)
    shared = dict.fromkeys(one.problem.kv_head(head) for head in one.selection.heads)
    axes = Axes(
        rows,
        keys,
        _tokens(labels, sizes.k_len),
        one.selection.batches,
        one.selection.heads,
        list(shared),
    )
    yield from opening(one, printer)
    yield ""
    for result in found:
        entropies = _entropies(one, result, work.unit)
        view = View(printer, work.digits, entropies)
        yield from stage_tables(result, title(one.problem, result), axes, view)
    yield summary_table(found, View(printer, work.digits))
    yield ""
    yield cost_line(one.problem)
    yield from _left_out(one, found)
    yield ""


def opening(one: Prepared, printer: Printer) -> Iterator[RenderableType]:
    """What stands above the stages: the group, the sizes, and the options in use."""
    from attncli.files.text import shown
    from attncli.report.prose import heading

    if one.group.name:
        yield heading(f"group {shown(one.group.name)}", printer)
    yield problem_line(one.problem, one.group.source)
    used = _options_in_use(one)
    if used:
        yield f"options: {used}"


def _options_in_use(one: Prepared) -> str:
    """Options that differ from their defaults, and where query 0 stands if that matters."""
    from attncli.analysis.attention_arguments import arguments_record

    options = one.shape.options
    record = arguments_record(one.shape, one.problem.mask.offset)
    parts = []
    for name, value in record.items():
        is_default = value in (None, False) or (name == "temperature" and value == 1)
        if is_default or name in ("scale", "query_offset", "mask_true"):
            continue
        told = "" if value is True else f" {_told(value)}"
        parts.append(name.replace("_", " ") + told)
    if options.attn_mask is not None and options.attn_mask.dtype == bool:
        parts.append(f"True = {options.mask_true}")
    if options.needs_positions or options.query_offset is not None:
        parts.append(f"query 0 at position {_told(record['query_offset'])}")
    return " · ".join(parts)


def _told(value: Any) -> str:
    """An option's value; a long list cut short."""
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    more = f",… ({len(value)})" if len(value) > 8 else ""
    return ",".join(f"{part:g}" for part in value[:8]) + more


def _tokens(labels: tuple[str, ...] | None, length: int) -> list[str] | None:
    """Labels that can be printed, where there is one per position."""
    from attncli.files.text import shown

    if labels is None or len(labels) != length:
        return None
    return [shown(label, 40) for label in labels]


def problem_line(problem: Problem, source: str | None) -> str:
    """One line that says what is computed: sizes, options in use, arithmetic."""
    sizes = problem.sizes
    parts = [] if source is None else [source]
    parts.append(f"B={sizes.batch} H={sizes.heads} S_q={sizes.q_len} S_k={sizes.k_len}")
    if problem.kv_heads != sizes.heads:
        parts[-1] += f" H_kv={problem.kv_heads}"
    parts[-1] += f" d_k={problem.dk}" + ("" if problem.dv is None else f" d_v={problem.dv}")
    parts.append(f"scale {problem.scale:.6g}")
    dtype = str(problem.dtype).removeprefix("torch.")
    parts.append(f"computed in {dtype} on {problem.device}")
    return " · ".join(parts)


def title(problem: Problem, result: StageResult) -> str:
    """A stage's name and formula, as they are for this problem."""
    divided = "" if problem.temperature == 1 else f" / {problem.temperature:g}"
    before_mask = "scaled" if problem.softcap is None else "capped"
    has_bias = problem.mask.has_bias
    masked = f"{before_mask} + bias" if has_bias else before_mask
    hides = ", −∞ where the query may not see the key" if result.n_masked else ", nothing hidden"
    formulas = {
        "q": "q = X W_Q",
        "k": "k = X W_K",
        "v": "v = X W_V",
        "scores": "scores = Q Kᵀ",
        "scaled": f"scaled = scores · {problem.scale:.6g}{divided}",
        "capped": f"capped = {problem.softcap or 0:g} · tanh(scaled / {problem.softcap or 0:g})",
        "masked": f"masked = {masked}{hides}",
        "weights": "weights = softmax(masked)" + (" beside a sink" if _has_sinks(problem) else ""),
        "output": "output = weights V",
        "projected": "projected = concat(output) W_O",
    }
    return formulas[str(result.stage)]


def cost_line(problem: Problem) -> str:
    """What this costs, and what n×n would."""
    from attncli.attention.cost import cost_of

    cost = cost_of(problem)
    operations = cost.scores_operations + cost.output_operations
    return (
        f"cost: {operations:.3g} operations (scores 2·S_q·S_k·d_k, output 2·S_q·S_k·d_v), "
        f"{cost.visible_operations:.3g} for visible pairs; "
        f"S_q×S_k matrices of all heads: {_bytes(cost.matrix_bytes)}, "
        f"streamed: {_bytes(cost.streamed_bytes)}"
    )


def _has_sinks(problem: Problem) -> bool:
    return problem.sinks is not None


def _bytes(size: int) -> str:
    from attncli.files.text import size_text

    return size_text(size)


def _names(labels: tuple[str, ...] | None, indices: list[int], length: int) -> list[str]:
    """Labels where there is one per position, otherwise the positions."""
    tokens = _tokens(labels, length)
    if tokens is None:
        return [str(index) for index in indices]
    return [f"{tokens[index]} {index}" for index in indices]


def _entropies(one: Prepared, result: StageResult, unit: Unit) -> tuple[str, Any] | None:
    """Entropy of each row of the weights, for a column beside them."""
    if result.stage != "weights" or result.values is None or result.visible is None:
        return None
    import numpy as np

    from attncli.attention.steps import entropy_of_weights

    nats = entropy_of_weights(result.values, with_sink=_has_sinks(one.problem)).numpy()
    values = (nats / np.log(2) if unit is Unit.BITS else nats).astype(object)
    values[~result.visible.any(-1).numpy()] = None
    return f"entropy ({unit})", values


def _left_out(one: Prepared, found: list[StageResult]) -> Iterator[str]:
    names = [str(result.stage) for result in found if result.values is None]
    if any(0 not in result.shape and result.values is None for result in found):
        yield (
            f"values of {', '.join(names)} not shown: above --max-values "
            f"{one.chosen.max_values}; choose --rows, or --format csv, or --save FILE"
        )
