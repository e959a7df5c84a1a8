"""The page of `attncli report`: one file with its numbers, style and scripts, which loads nothing.

`template.html` and `sections.html` are filled by jinja2, words come from `strings.json`, and what
scripts draw is one block of JSON: numbers a head as lists, maps as base64.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from attncli import __version__
from attncli.attention.maps import HIDDEN, Encoding, HeadMaps, Plan
from attncli.attention.problem import Cost, Problem
from attncli.attention.qkv import EXAMPLE_K, EXAMPLE_Q, EXAMPLE_V
from attncli.attention.streaming.heads import Label
from attncli.columns import Column
from attncli.files.text import size_text
from attncli.report import Language, PageTheme
from attncli.report.palette import Theme, diverging, hexes, sequential
from attncli.report.table import scale_text

Record = dict[str, Any]

SCHEMA = 1
HERE = Path(__file__).parent
# Of the records of heads what the pictures use; the table has the rest.
DRAWN = (
    "entropy_bits_mean",
    "entropy_normalized_mean",
    "effective_keys_mean",
    "max_weight_mean",
    "max_logit",
    "sink_mass_mean",
    "distance_mean",
)
CURVES = (
    "dk",
    "var",
    "var_ci95_low",
    "var_ci95_high",
    "var_theory",
    "scaled_var",
    "entropy_bits_unscaled",
    "entropy_bits_scaled",
    "softmax_grad_unscaled",
    "softmax_grad_scaled",
)
TABLE_ROWS = 2000
# Tokens of a bin that are named, and characters of each.
TOKENS, TOKEN_LENGTH = 12, 60
# What a head takes beside its maps: its row of the table, and its numbers.
HEAD_BYTES = 640
DEMONSTRATIONS_BYTES = 70_000
# Of the seeds 0 … 399 the one whose draw has a variance nearest to d_k throughout, so that a
# slider over d_k shows what is typical; it is off by a factor of 2.04 at most.
WALK_SEED, WALK_KEYS, WALK_WIDTH = 226, 8, 1024
SHARES = re.compile("weight|mass")


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Some heads of one batch, as the page shows them.

    Attributes:
        name: the group's in its bundle; "" for none.
        source: its file.
        batch: which batch they are of.
        problem: what they are heads of.
        records: one a head.
        maps: of all of them.
        detailed: indices of those whose maps are kept; None for all.
        tokens: one per key; None for none.
        mask: the options that hide keys, in words; "" for none.
        cost: of the whole problem; None of weights.
        compute, entropy: the commands that are about the group; None where there is none.
        warnings: what the reader should know.
    """

    name: str
    source: str
    batch: int
    problem: Problem
    records: Sequence[Record]
    maps: HeadMaps
    detailed: Sequence[int] | None
    tokens: Sequence[str] | None
    mask: str
    cost: Cost | None
    compute: str | None
    entropy: str | None
    warnings: Sequence[str]

    @property
    def lengths(self) -> tuple[int, int]:
        """Real queries, and keys."""
        return int(self.maps.bins.queries[-1]), int(self.maps.bins.keys[-1])


@dataclass(frozen=True, slots=True)
class Commands:
    """What prints the same as a section does."""

    overview: str
    numbers: str
    report: str
    scaling: str
    steps: str = "attncli compute"
    steps_causal: str = "attncli compute --causal"
    softmax: str = "attncli compute --explain"


@dataclass(frozen=True, slots=True)
class Page:
    """All that a page shows.

    Attributes:
        title: its heading.
        groups: in order.
        plan: how their maps are kept.
        columns: of the records.
        start: which head is shown first, counted through all groups.
        curves: records of the experiment over d_k.
        thresholds: of the labels, by their names.
        sink_keys: how many of the first keys count as sinks.
        commands: for readers who want to see it in a terminal.
        language, theme: of the page.
    """

    title: str
    groups: Sequence[PageGroup]
    plan: Plan
    columns: Sequence[Column]
    start: int
    curves: Sequence[Record]
    thresholds: Mapping[str, float]
    sink_keys: int
    commands: Commands
    language: Language = Language.EN
    theme: PageTheme = PageTheme.AUTO

    @property
    def records(self) -> list[Record]:
        """All heads."""
        return [record for group in self.groups for record in group.records]


def page_html(page: Page) -> str:
    """The file."""
    words = Words(page.language)
    style, script = style_text(), script_text()
    return (
        _environment()
        .get_template("template.html")
        .render(
            t=words.text,
            page=page,
            version=__version__,
            commands=page.commands,
            facts=list(_facts(page, words)),
            sentences=list(_sentences(page, words)),
            warnings=[text for group in page.groups for text in group.warnings],
            table=_table(page, words),
            precision=words.text(f"foot.{page.plan.encoding}"),
            data=Markup(_json(_data(page, words))),
            style=Markup(style),
            script=Markup(script),
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
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


@dataclass(frozen=True)
class Words:
    """The page's texts in one language."""

    language: Language

    @cached_property
    def table(self) -> dict[str, str]:
        """Every text by its key."""
        both = json.loads((HERE / "strings.json").read_text(encoding="utf-8"))
        return {key: texts[str(self.language)] for key, texts in both.items()}

    def text(self, key: str, **values: Any) -> str:
        """A text with its {placeholders} filled in."""
        return self.table[key].format(**values) if values else self.table[key]

    def counted(self, name: str, count: int) -> str:
        """So many of something."""
        form = f"count.{name}" if count == 1 else f"count.{name}.many"
        return self.text(form, count=count)

    def heading(self, column: Column) -> str:
        """The name of a column with its unit."""
        name = self.table.get(f"column.{column.key}", column.heading or column.key)
        return f"{name} ({self.text('column.bits')})" if column.unit == "bits" else name


# ── what stands in the page without scripts ──────────────────────────────────────────────────


def _facts(page: Page, words: Words) -> Iterator[str]:
    groups, t = page.groups, words.text
    heads, lengths = {len(g.records) for g in groups}, {g.lengths for g in groups}
    sizes = [] if len(groups) == 1 else [(_kind(page), len(groups))]
    if len(heads) == len(lengths) == 1:
        ((q_len, k_len),) = lengths
        tokens = [("token", q_len)] if q_len == k_len else [("query", q_len), ("key", k_len)]
        sizes += [("head", heads.pop()), *tokens]
        yield " × ".join(words.counted(name, count) for name, count in sizes)
    else:
        counted = (words.counted(name, n) for name, n in (*sizes, ("head", len(page.records))))
        ends = sorted({length for pair in lengths for length in pair})
        yield t("mast.uneven", counted=", ".join(counted), low=ends[0], high=ends[-1])
    problems = [group.problem for group in groups]
    if all(problem.given is None for problem in problems):
        yield f"dₖ = {_one(problem.dk for problem in problems)}"
        yield t("mast.scale", scale=_one(scale_text(problem.scale) for problem in problems))
    else:
        yield t("mast.weights")
    unmasked = {False: t("mast.unmasked"), True: t("mast.zeros")}
    yield _one(group.mask or unmasked[_hides_zeros(group)] for group in groups)
    dtype = _one(str(problem.dtype).removeprefix("torch.") for problem in problems)
    yield t("mast.dtype", dtype=dtype)
    if any(problem.sizes.batch > 1 for problem in problems):
        batches = _one(problem.sizes.batch for problem in problems)
        yield t("mast.batch", batch=_one(group.batch for group in groups), batches=batches)
    for group in groups:
        if group.maps.pooled:
            bins = [len(edges) - 1 for edges in (group.maps.bins.queries, group.maps.bins.keys)]
            q_len, k_len = group.lengths
            yield t("mast.pooled", q=q_len, k=k_len, bins=f"{bins[0]} × {bins[1]}")
            break
    costs = [group.cost for group in groups if group.cost is not None]
    if costs:
        operations = sum(cost.scores_operations + cost.output_operations for cost in costs)
        matrices = size_text(sum(cost.matrix_bytes for cost in costs))
        streamed = size_text(sum(cost.streamed_bytes for cost in costs))
        power = len(str(operations)) - 1
        told = f"{operations / 10**power:.1f}·10{str(power).translate(_RAISED)}"
        yield t("mast.cost", operations=told, matrices=matrices, streamed=streamed)


def _hides_zeros(group: PageGroup) -> bool:
    return group.problem.given is not None and group.problem.given.zeros_hidden


def _kind(page: Page) -> str:
    """What the groups are, as texts count them."""
    if len({group.name for group in page.groups}) == 1:
        return "batch" if len({group.source for group in page.groups}) == 1 else "file"
    return "layer" if _short(page, 0).isdigit() else "group"


def _one(values: Any) -> str:
    """What all have in common, or the values side by side, cut short."""
    several = list(dict.fromkeys(map(str, values)))
    return ", ".join(several[:3]) + (", …" if len(several) > 3 else "")


_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _sentences(page: Page, words: Words) -> Iterator[str]:
    """The labels counted, and the heads that stand out."""
    t = words.text
    names = {}
    for group, name in zip(page.groups, _names(page), strict=True):
        for record in group.records:
            head = t("mast.head", head=record["head"])
            names[id(record)] = f"{name} {head}" if name else head
    counts = Counter(str(r["label"]) for r in page.records if r["label"] is not None)
    if counts:
        told = ((t(f"label.{label}"), count) for label, count in counts.most_common())
        counted = [t("mast.counted", label=label, count=count) for label, count in told]
        yield t("mast.comma").join(counted)

    def most(key: str, sign: int = 1) -> Record | None:
        known = [r for r in page.records if r[key] is not None and math.isfinite(r[key])]
        return max(known, key=lambda record: sign * record[key], default=None)

    sink, sharp, hot = most("sink_mass_mean"), most("entropy_bits_mean", -1), most("max_logit")
    if sink is not None:
        share, form = (
            f"{100 * sink['sink_mass_mean']:.0f}",
            "sink" if page.sink_keys == 1 else "sinks",
        )
        yield t(f"mast.{form}", head=names[id(sink)], share=share, count=page.sink_keys)
    if sharp is not None:
        bits = f"{sharp['entropy_bits_mean']:.2f}"
        yield t("mast.sharp", head=names[id(sharp)], bits=bits)
    if hot is not None:
        logit = f"{hot['max_logit']:.1f}".replace("-", "−")
        yield t("mast.hot", head=names[id(hot)], logit=logit)


def _names(page: Page) -> list[str]:
    """What tells the groups apart."""
    several_files = len({group.source for group in page.groups}) > 1
    several_batches = len({group.batch for group in page.groups}) > 1
    names = []
    for group in page.groups:
        words = [group.source] if several_files or not group.name else []
        words += [group.name] if group.name else []
        words += [f"[{group.batch}]"] if several_batches else []
        names.append(" ".join(words) if len(page.groups) > 1 or group.name else "")
    return names


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


# ── what scripts read ────────────────────────────────────────────────────────────────────────


def _data(page: Page, words: Words) -> dict[str, Any]:
    tokens: list[list[list[str]]] = []
    groups = [_group(page, number, name, tokens) for number, name in enumerate(_names(page))]
    told = {"js", "label", "column"}
    named = {column.key: column for column in page.columns}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "lang": str(page.language),
        "strings": {k: text for k, text in words.table.items() if k.partition(".")[0] in told},
        "labels": [str(label) for label in Label],
        "columns": {
            key: [words.heading(named[key]), named[key].unit]
            for key in DRAWN
            if named[key].heading is not None
        },
        "heads": _heads(page),
        "start": page.start,
        "thresholds": dict(page.thresholds),
        "sink_keys": page.sink_keys,
        "groups": groups,
        "tokens": tokens,
        "ramps": {
            "light": hexes(sequential(Theme.LIGHT)),
            "dark": hexes(sequential(Theme.DARK)),
            "diverging_light": hexes(diverging(Theme.LIGHT)),
            "diverging_dark": hexes(diverging(Theme.DARK)),
        },
        "example": {"q": EXAMPLE_Q, "k": EXAMPLE_K, "v": EXAMPLE_V, "dk": len(EXAMPLE_Q[0])},
        "walk": _floats(walk()),
        "curves": {key: [_number(record[key]) for record in page.curves] for key in CURVES},
        "commands": asdict(page.commands),
    }


def _heads(page: Page) -> dict[str, list[Any]]:
    """Numbers of all heads, column by column."""
    order = {str(label): number for number, label in enumerate(Label)}
    records = page.records
    columns: dict[str, list[Any]] = {
        "group": [number for number, group in enumerate(page.groups) for _ in group.records],
        "head": [record["head"] for record in records],
        "label": [order.get(str(record["label"])) for record in records],
        "label_score": [_number(record["label_score"]) for record in records],
        "nearest": [order.get(str(record["nearest_label"])) for record in records],
        "nearest_score": [
            None if record["nearest_label"] is None else _number(1 - record["label_score"])
            for record in records
        ],
    }
    return columns | {key: [_number(record[key]) for record in records] for key in DRAWN}


def _group(page: Page, number: int, name: str, tokens: list[list[list[str]]]) -> dict[str, Any]:
    group = page.groups[number]
    problem, maps, plan = group.problem, group.maps, page.plan
    first = sum(len(other.records) for other in page.groups[:number])
    offset = problem.mask.offset
    shift = None if offset is None else int(offset[group.batch if len(offset) > 1 else 0])
    scale = problem.scale if problem.given is None else None
    q_len, k_len = group.lengths
    alike = bool((maps.keys == maps.keys[0]).all())
    found: dict[str, Any] = {
        "name": name or group.name or group.source,
        "short": _short(page, number),
        "source": group.source,
        "batch": group.batch,
        "batches": problem.sizes.batch,
        "first": first,
        "heads": len(group.records),
        "kv_heads": problem.kv_heads,
        "q_len": q_len,
        "k_len": k_len,
        "dk": problem.dk if problem.given is None else None,
        "dv": problem.dv,
        "scale": list(scale) if isinstance(scale, tuple) else scale,
        "mask": group.mask,
        "edges": {"q": maps.bins.queries.tolist(), "k": maps.bins.keys.tolist()},
        "offset": shift,
        "tokens": {
            "q": _tokens(group.tokens, maps.bins.queries, shift, tokens),
            "k": _tokens(group.tokens, maps.bins.keys, 0, tokens),
        },
        "maps": _maps(group, plan),
        "keys": _floats(maps.keys[:1] if alike else maps.keys),
        "rows": _floats(maps.entropy[_kept(group)]),
        "mass": _floats(maps.mass[_kept(group)]),
        "pooled": maps.pooled,
        "commands": {"compute": group.compute, "entropy": group.entropy},
    }
    if plan.thumbnail_bins is not None:
        bins, mean = maps.coarse(plan.thumbnail_bins)
        edges = {"q": bins.queries.tolist(), "k": bins.keys.tolist()}
        encoding = Encoding.U2SQRT
        found["thumbs"] = {"edges": edges, "encoding": encoding, "mean": _packed(mean, encoding)}
    elif maps.corner is not None:
        found["corner"] = _floats(maps.corner)
    return found


def _kept(group: PageGroup) -> Any:
    """An index of the heads of which maps are kept."""
    return slice(None) if group.detailed is None else list(group.detailed)


def _maps(group: PageGroup, plan: Plan) -> dict[str, Any]:
    planes = {"mean": group.maps.mean[_kept(group)]}
    if plan.with_largest and group.maps.pooled:
        planes["max"] = group.maps.largest[_kept(group)]
    packed = {name: _packed(plane, plan.encoding) for name, plane in planes.items()}
    heads = None if group.detailed is None else list(group.detailed)
    return {"encoding": str(plan.encoding), "heads": heads} | packed


def _short(page: Page, number: int) -> str:
    """The number of a layer, where that alone tells the groups apart; else the whole name."""
    names = _names(page)
    digits = [re.findall(r"\d+", name) for name in names]
    frames = {re.sub(r"\d+", "#", name) for name in names}
    if all(len(one) == 1 for one in digits) and len(frames) == 1:
        return str(digits[number][0])
    return names[number]


def _tokens(
    tokens: Sequence[str] | None,
    edges: NDArray[np.int64],
    shift: int | None,
    known: list[list[list[str]]],
) -> int | None:
    """Where in `known` the first tokens of each bin stand; None for none."""
    if tokens is None or shift is None or shift < 0 or int(edges[-1]) + shift > len(tokens):
        return None
    bins = [
        [text[:TOKEN_LENGTH] for text in tokens[a + shift : min(b, a + TOKENS) + shift]]
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    if bins not in known:
        known.append(bins)
    return known.index(bins)


@cache
def walk() -> NDArray[np.float32]:
    """Products of one query with eight keys over their first 1 … 1024 components, (8, 1024)."""
    return _walk_of(WALK_SEED).astype(np.float32)


def _walk_of(seed: int) -> NDArray[np.float64]:
    draw = np.random.default_rng(seed).standard_normal((WALK_KEYS + 1, WALK_WIDTH))
    return np.cumsum(draw[:1] * draw[1:], axis=1)


def _packed(weights: NDArray[np.float32], encoding: str) -> str:
    """Weights as base64; `HIDDEN` and NaN have words of their own where there are 16 bits."""
    if encoding == Encoding.F4:
        return _floats(weights)
    with np.errstate(invalid="ignore"):
        words = np.rint(np.sqrt(weights.clip(0, 1)) * 65533)
    words = np.where(np.isnan(weights), 65534, np.where(weights == HIDDEN, 65535, words))
    return base64.b64encode(words.astype("<u2").tobytes()).decode()


def _floats(values: NDArray[Any]) -> str:
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()


def _number(value: Any) -> Any:
    """A number with six significant digits; None for what is none."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _json(data: Any) -> str:
    """JSON that no parser of HTML takes for a tag."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
