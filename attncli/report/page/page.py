"""The page of `attncli report`: one file with its numbers, style and scripts, which loads nothing.

`template.html` and `sections.html` are filled by jinja2, words come from `strings.json`, and what
scripts draw is one block of JSON: numbers a head as lists, maps as base64.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from attncli import __version__
from attncli.attention.streaming.head_record import Label
from attncli.columns import Column
from attncli.files.text import size_text
from attncli.report.page.contents import HERE, Page
from attncli.report.page.data import data_text
from attncli.report.table import scale_text
from attncli.report.words import Words

Record = dict[str, Any]

# Rows of the table; more heads are in the numbers of the scripts alone.
TABLE_ROWS = 2000
# What a head takes beside its maps: its row of the table, and its numbers.
HEAD_BYTES = 640
DEMONSTRATIONS_BYTES = 70_000
# Columns of what is 1 at most.
SHARES = re.compile("weight|mass")
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def page_html(page: Page) -> str:
    """The file."""
    words = Words(page.language, HERE / "strings.json")
    style, script = style_text(), script_text()
    template = _environment().get_template("template.html")
    return template.render(
        t=words.text,
        page=page,
        version=__version__,
        commands=page.commands,
        facts=list(_facts(page, words)),
        sentences=list(_sentences(page, words)),
        warnings=[text for group in page.groups for text in group.warnings],
        table=_table(page, words),
        precision=words.text(f"foot.{page.plan.encoding}"),
        data=Markup(data_text(page, words)),
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def map_budget(most: int, heads: int) -> float:
    """Bytes that the maps of so many heads may take in a file of at most so many."""
    fixed = len(style_text()) + len(script_text()) + DEMONSTRATIONS_BYTES
    return 0.97 * most - fixed - heads * HEAD_BYTES


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


@cache
def style_text() -> str:
    """The style sheet."""
    return (HERE / "page.css").read_text(encoding="utf-8")


@cache
def script_text() -> str:
    """All scripts as one, which leaves no names behind."""
    parts = [path.read_text(encoding="utf-8") for path in sorted((HERE / "js").glob("*.js"))]
    return "(() => {\n" + "\n".join(parts) + "})();\n"


# ── what stands in the page without scripts ──────────────────────────────────────────────────


def _facts(page: Page, words: Words) -> Iterator[str]:
    groups, t = page.groups, words.text
    problems = [group.problem for group in groups]
    yield _sizes(page, words)
    if all(problem.given is None for problem in problems):
        yield f"dₖ = {_one(problem.dk for problem in problems)}"
        yield t("mast.scale", scale=_one(scale_text(problem.scale) for problem in problems))
    else:
        yield t("mast.weights")
    unmasked = {False: t("mast.unmasked"), True: t("mast.zeros")}
    yield _one(group.mask or unmasked[group.hides_zeros] for group in groups)
    dtype = _one(str(problem.dtype).removeprefix("torch.") for problem in problems)
    yield t("mast.dtype", dtype=dtype)
    if any(problem.sizes.batch > 1 for problem in problems):
        batches = _one(problem.sizes.batch for problem in problems)
        yield t("mast.batch", batch=_one(group.batch for group in groups), batches=batches)
    pooled = [group for group in groups if group.maps.pooled]
    if pooled:
        q_len, k_len = pooled[0].lengths
        bins = " × ".join(map(str, pooled[0].maps.mean.shape[1:]))
        yield t("mast.pooled", q=q_len, k=k_len, bins=bins)
    costs = [group.cost for group in groups if group.cost is not None]
    if costs:
        operations = sum(cost.scores_operations + cost.output_operations for cost in costs)
        digits, power = f"{operations:.1e}".split("e")
        yield t(
            "mast.cost",
            operations=f"{digits}·10{str(int(power)).translate(RAISED)}",
            matrices=size_text(sum(cost.matrix_bytes for cost in costs)),
            streamed=size_text(sum(cost.streamed_bytes for cost in costs)),
        )


def _sizes(page: Page, words: Words) -> str:
    """How many layers, heads and tokens."""
    groups = page.groups
    heads, lengths = {len(group.records) for group in groups}, {group.lengths for group in groups}
    sizes = [] if len(groups) == 1 else [(page.kind, len(groups))]
    if len(heads) == len(lengths) == 1:
        ((q_len, k_len),) = lengths
        tokens = [("token", q_len)] if q_len == k_len else [("query", q_len), ("key", k_len)]
        sizes += [("head", heads.pop()), *tokens]
        return " × ".join(words.counted(name, count) for name, count in sizes)
    sizes.append(("head", len(page.records)))
    counted = words.text("mast.comma").join(words.counted(name, count) for name, count in sizes)
    ends = [length for pair in lengths for length in pair]
    return words.text("mast.uneven", counted=counted, low=min(ends), high=max(ends))


def _one(values: Iterable[object]) -> str:
    """What all have in common, or the values side by side, cut short."""
    several = list(dict.fromkeys(map(str, values)))
    return ", ".join(several[:3]) + (", …" if len(several) > 3 else "")


def _sentences(page: Page, words: Words) -> Iterator[str]:
    """The labels counted, and the heads that stand out."""
    t = words.text
    counts = Counter(str(r["label"]) for r in page.records if r["label"] is not None)
    if counts:
        told = ((t(f"label.{label}"), count) for label, count in counts.most_common())
        counted = [t("mast.counted", label=label, count=count) for label, count in told]
        yield t("mast.comma").join(counted)
    heads = [
        (record, f"{name} {t('mast.head', head=record['head'])}".strip())
        for group, name in zip(page.groups, page.names, strict=True)
        for record in group.records
    ]

    def most(key: str, sign: int = 1) -> Iterator[tuple[float, str]]:
        """The largest value and its head; nothing where no head has one."""
        known = [(r[key], name) for r, name in heads if r[key] is not None]
        finite = [(value, name) for value, name in known if math.isfinite(value)]
        if finite:
            yield max(finite, key=lambda each: sign * each[0])

    for share, head in most("sink_mass_mean"):
        sinks = {"share": f"{100 * share:.0f}", "count": page.sink_keys}
        yield t("mast.sink" if page.sink_keys == 1 else "mast.sinks", head=head, **sinks)
    for bits, head in most("entropy_bits_mean", -1):
        yield t("mast.sharp", head=head, bits=f"{bits:.2f}")
    for logit, head in most("max_logit"):
        yield t("mast.hot", head=head, logit=f"{logit:.1f}".replace("-", "−"))


@dataclass(frozen=True, slots=True)
class _Table:
    """The table of all heads: headings and rows of text; whether a column is of numbers."""

    headings: list[tuple[str, str, bool]]
    rows: list[list[Any]]
    left_out: int


def _table(page: Page, words: Words) -> _Table:
    records = page.records
    columns = [column for column in page.columns if _shown(column, records)]
    columns.sort(key=lambda column: not (column.is_key or column.key == "label"))
    headings = [
        (column.key, words.heading(column), column.key not in ("source", "group", "label"))
        for column in columns
    ]
    rows = []
    for record in records[:TABLE_ROWS]:
        label = _label(record, words)
        rows.append([label if c.key == "label" else _cell(c, record[c.key]) for c in columns])
    return _Table(headings, rows, len(records) - len(rows))


def _shown(column: Column, records: Sequence[Record]) -> bool:
    """Whether a column says anything of these heads."""
    if column.heading is None or column.unit not in ("", "bits"):
        return False
    values = {record[column.key] for record in records}
    if column.is_key and column.key != "head":
        return len(values) > 1
    return bool(values - {None, 0}) if column.key.endswith("_rows") else values != {None}


def _cell(column: Column, value: Any) -> str:
    if value is None or isinstance(value, str):
        return "–" if value is None else value
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "−∞" if value < 0 else "∞"
    digits = 4 if SHARES.search(column.key) else 3
    return f"{value:.{digits}f}".replace("-", "−")


def _label(record: Record, words: Words) -> dict[str, Any]:
    """The label with its place among all, which has a colour, and what a mixed head is near."""
    label, near = record["label"], record["nearest_label"]
    if label is None:
        return {"order": "", "text": "–", "near": ""}
    told = words.text("label.near", label=words.text(f"label.{near}")) if near else ""
    order = list(Label).index(Label(label))
    return {"order": order, "text": words.text(f"label.{label}"), "near": told}


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
