"""The walk through the stages in words: formula, shapes, why it is there, what it did here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attncli.attention.options import Stage
from attncli.attention.problem import Problem
from attncli.attention.variance.logits import EXP_LIMITS
from attncli.attention.walkthrough import Walkthrough
from attncli.columns import column
from attncli.report import Unit
from attncli.report.table import decimals, scale_text
from attncli.report.words import Words

FLOAT32_EXP_LIMIT = f"{EXP_LIMITS['float32']:.2f}"


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of the walk."""

    name: str = column(None, description="of the stage, in the words used everywhere")
    formula: str = column(None, description="what is computed")
    shape: str = column(None, description="the same with this problem's numbers put in")
    purpose: str = column(None, description="why the stage is there")
    findings: tuple[str, ...] = column(
        None, description="what it did to these numbers, a sentence each"
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """What the sentences are made of."""

    walk: Walkthrough  # what each stage did
    model_width: int | None  # width d of X where Q, K and V are projected from it; None elsewhere
    projected_width: int | None  # columns of W_O; None without one
    unit: Unit  # of entropies
    digits: int  # decimals
    words: Words  # of the walk, as `walk_words` reads them

    def text(self, key: str, **values: object) -> str:
        """A text of the walk with its placeholders filled in."""
        return self.words.text(key, **values)

    @property
    def unit_name(self) -> str:
        """The unit of entropies in the language of the walk."""
        return self.text(f"unit.{self.unit}")

    @property
    def shape(self) -> dict[str, int]:
        """S_q and S_k, as texts name them."""
        return {"q": self.problem.sizes.q_len, "k": self.problem.sizes.k_len}

    @property
    def problem(self) -> Problem:
        """What was computed."""
        return self.walk.problem

    def number(self, value: float | None) -> str:
        """A number with the decimals asked for."""
        return decimals(value, self.digits)

    def entropy(self, bits: float | None) -> str:
        """An entropy in the unit asked for, without its name."""
        factor = 1.0 if self.unit is Unit.BITS else math.log(2)
        return self.number(None if bits is None else bits * factor)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the shapes of all steps follow from.

    Attributes:
        problem: Q, K and V.
        model_width: width d of X where Q, K and V are projected from it; None elsewhere.
        projected_width: columns of W_O; None without one.
        words: of the walk.
    """

    problem: Problem
    model_width: int | None
    projected_width: int | None
    words: Words


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step in short."""

    step: str = column("step", is_key=True, description="name of the stage")
    operation: str = column("operation", description="its formula")
    one_head: str = column("one head", description="its shape without batch and heads")
    all_heads: str = column("batch × heads", description="its shape with them")
    purpose: str = column("purpose", description="why the stage is there")


def step_shapes(sizes: Sizes) -> list[StepShape]:
    """Every step of this problem from the input on, with the shape of what it gives."""
    problem, width, t = sizes.problem, sizes.model_width, sizes.words.text
    batch, heads, shared = problem.sizes.batch, problem.sizes.heads, problem.kv_heads
    q_len, k_len = problem.sizes.q_len, problem.sizes.k_len
    found = []

    def add(step: str, operation: str, shape: tuple[int, int], of: int) -> None:
        whole = (batch, of, *shape) if of else (batch, *shape)
        purpose = t(f"short.{step.lower()}")
        found.append(StepShape(step, operation, str(shape), str(whole), purpose))

    def projected(name: str) -> str:
        return t("short.given") if width is None else f"X W_{name}"

    if width is not None:
        add("X", t("short.given"), (q_len, width), 0)
    add("Q", projected("Q"), (q_len, problem.dk), heads)
    add("K", projected("K"), (k_len, problem.dk), shared)
    if problem.dv is not None:
        add("V", projected("V"), (k_len, problem.dv), shared)
    for stage in (Stage.SCORES, Stage.SCALED, Stage.CAPPED, Stage.MASKED, Stage.WEIGHTS):
        if stage is not Stage.CAPPED or problem.softcap is not None:
            operation = formula(problem, stage).partition(" = ")[2]
            operation += t("short.hidden") if stage is Stage.MASKED else ""
            add(str(stage), operation, (q_len, k_len), heads)
    if problem.dv is not None:
        add("output", "weights V", (q_len, problem.dv), heads)
    if problem.dv is not None and sizes.projected_width is not None:
        add("projected", "concat(output) W_O", (q_len, sizes.projected_width), 0)
    return found


def formula(problem: Problem, stage: Stage) -> str:
    """What a stage computes, with the numbers of this problem."""
    divided = "" if problem.temperature == 1 else f" / {problem.temperature:g}"
    before_mask = "scaled" if problem.softcap is None else "capped"
    cap, scale = problem.softcap or 0, scale_text(problem.scale)
    if isinstance(problem.scale, tuple):
        scale = f"({scale} by head)"
    return {
        Stage.Q: "q = X W_Q",
        Stage.K: "k = X W_K",
        Stage.V: "v = X W_V",
        Stage.SCORES: "scores = Q Kᵀ",
        Stage.SCALED: f"scaled = scores · {scale}{divided}",
        Stage.CAPPED: f"capped = {cap:g} · tanh(scaled / {cap:g})",
        Stage.MASKED: f"masked = {before_mask}" + (" + bias" if problem.mask.has_bias else ""),
        Stage.WEIGHTS: "weights = softmax(masked)"
        + ("" if problem.sinks is None else " beside a sink"),
        Stage.OUTPUT: "output = weights V",
        Stage.PROJECTED: "projected = concat(output) W_O",
    }[stage]


def explain_steps(facts: Facts) -> list[Step]:
    """Every stage that this problem has, in the order of computation."""
    steps = [_inputs(facts), _scores(facts), _scale(facts)]
    if facts.problem.softcap is not None:
        steps.append(_cap(facts))
    steps += [_mask(facts), _softmax(facts), _entropy(facts), _online(facts)]
    if facts.problem.v is not None:
        steps.append(_output(facts))
    if facts.projected_width is not None:
        steps.append(_projected(facts))
    return [*steps, _heads(facts), _cost(facts)]


def _inputs(facts: Facts) -> Step:
    problem, sizes, t = facts.problem, facts.problem.sizes, facts.text
    values = t("projection.novalues") if problem.dv is None else f"V ({sizes.k_len}×{problem.dv})"
    shapes = f"Q ({sizes.q_len}×{problem.dk}), K ({sizes.k_len}×{problem.dk}), {values}"
    how = t("projection.given")
    if facts.model_width is not None:
        how = "Q = X W_Q, K = X W_K, V = X W_V"
        shapes = t("projection.from_x", q=sizes.q_len, width=facts.model_width, shapes=shapes)
    q_variance, k_variance = map(facts.number, (facts.walk.q_variance, facts.walk.k_variance))
    return Step(
        "projection",
        how,
        t("projection.shape", shapes=shapes, batch=sizes.batch, heads=sizes.heads)
        if sizes.batch * sizes.heads > 1
        else shapes,
        t("projection.purpose"),
        (t("projection.variance", q=q_variance, k=k_variance),),
    )


def _product_shape(facts: Facts, inner: int, columns: int, width: int) -> str:
    """Shapes of a matrix product of each head, and its operations: 2·S_q·S_k·width."""
    rows, k_len = facts.problem.sizes.q_len, facts.problem.sizes.k_len
    product = f"({rows}×{inner}) · ({inner}×{columns}) = ({rows}×{columns})"
    return facts.text("product.shape", product=product, a=rows, b=k_len, c=width)


def _scores(facts: Facts) -> Step:
    problem, t = facts.problem, facts.text
    found = facts.walk.statistics[Stage.SCORES]
    return Step(
        "scores",
        formula(problem, Stage.SCORES),
        _product_shape(facts, problem.dk, problem.sizes.k_len, problem.dk),
        t("scores.purpose"),
        (
            t(
                "scores.spread",
                var=facts.number(_variance(found.std)),
                std=facts.number(found.std),
                low=facts.number(found.minimum),
                high=facts.number(found.maximum),
            ),
            t("scores.theory", dk=problem.dk),
        ),
    )


def _scale(facts: Facts) -> Step:
    problem, walk, t = facts.problem, facts.walk, facts.text
    number, usual = facts.number, 1 / math.sqrt(problem.dk)
    is_usual = not isinstance(problem.scale, tuple) and math.isclose(problem.scale, usual)
    before, after = (walk.statistics[stage] for stage in (Stage.SCORES, Stage.SCALED))
    findings = [
        t(
            "scaled.variance",
            before=number(_variance(before.std)),
            after=number(_variance(after.std)),
        ),
        t(
            "scaled.entropy",
            without=facts.entropy(walk.unscaled.entropy_bits),
            with_it=facts.entropy(walk.scaled.entropy_bits),
            unit=facts.unit_name,
        ),
        t(
            "scaled.gradient",
            weight_without=number(walk.unscaled.max_weight),
            weight_with=number(walk.scaled.max_weight),
            grad_without=number(walk.unscaled.softmax_grad),
            grad_with=number(walk.scaled.softmax_grad),
        ),
    ]
    if not isinstance(problem.scale, tuple):
        findings.append(t("scaled.after", scale=number(problem.scale)))
    temperature = f"{problem.temperature:g}"
    findings.append(t("scaled.temperature", temperature=temperature, root=number(1 / usual)))
    return Step(
        "scaled",
        formula(problem, Stage.SCALED) + (t("scaled.usual", dk=problem.dk) if is_usual else ""),
        t("elementwise.shape", **facts.shape),
        t("scaled.purpose"),
        tuple(findings),
    )


def _cap(facts: Facts) -> Step:
    before, after = (facts.walk.statistics[stage] for stage in (Stage.SCALED, Stage.CAPPED))
    return Step(
        "capped",
        formula(facts.problem, Stage.CAPPED),
        facts.text("elementwise.shape", **facts.shape),
        facts.text("capped.purpose"),
        (
            facts.text(
                "capped.range",
                before_low=facts.number(before.minimum),
                before_high=facts.number(before.maximum),
                after_low=facts.number(after.minimum),
                after_high=facts.number(after.maximum),
            ),
        ),
    )


def _mask(facts: Facts) -> Step:
    problem, walk, t = facts.problem, facts.walk, facts.text
    share = f" ({walk.masked_cells / walk.cells:.1%})" if walk.cells else ""
    findings = [t("masked.cells", masked=walk.masked_cells, cells=walk.cells, share=share)]
    if walk.keys.count:
        keys = {"least": int(walk.keys.minimum), "most": int(walk.keys.maximum)}
        findings.append(t("masked.keys", **keys))
    if walk.empty_rows:
        findings.append(t("masked.empty", count=walk.empty_rows))
    if walk.masked_cells and walk.small_mask:
        rows = (" ".join("0" if seen else "−∞" for seen in row) for row in walk.small_mask)
        findings.append(t("masked.m", rows="; ".join(rows)))
    if problem.mask.slopes is not None:
        slopes = ", ".join(f"{slope:g}" for slope in problem.mask.slopes[:8])
        findings.append(t("masked.alibi", slopes=slopes))
    hidden = t("masked.hidden" if walk.masked_cells else "masked.nothing")
    return Step(
        "masked",
        formula(problem, Stage.MASKED) + hidden,
        t("masked.shape", **facts.shape),
        t("masked.purpose"),
        tuple(findings),
    )


def _softmax(facts: Facts) -> Step:
    walk, t = facts.walk, facts.text
    findings = [t("weights.largest", logit=facts.number(walk.statistics[Stage.MASKED].result.max))]
    failed = walk.naive_overflows + walk.naive_underflows
    if failed:
        findings.append(
            t(
                "weights.fails",
                failed=failed,
                rows=walk.rows,
                limit=FLOAT32_EXP_LIMIT,
                over=walk.naive_overflows,
                under=walk.naive_underflows,
            )
        )
    else:
        findings.append(t("weights.does", limit=FLOAT32_EXP_LIMIT))
    limits = (
        t("weights.limit", limit=f"{limit:.2f}", dtype=name) for name, limit in EXP_LIMITS.items()
    )
    findings.append(t("weights.limits", limits=t("list.comma").join(limits)))
    if facts.problem.sinks is not None:
        findings.append(t("weights.sinks"))
    return Step(
        "weights",
        t("weights.formula"),
        t("weights.shape", **facts.shape),
        t("weights.purpose"),
        tuple(findings),
    )


def _entropy(facts: Facts) -> Step:
    walk, t = facts.walk, facts.text
    rows = ", ".join(facts.entropy(value) for value in walk.row_entropies_bits)
    more = "" if walk.rows <= len(walk.row_entropies_bits) else ", …"
    with_sink = facts.problem.sinks is not None
    limit = math.log2(walk.keys.maximum + with_sink) if walk.keys.count else None
    unit = {"unit": facts.unit_name}
    return Step(
        "entropy",
        t("entropy.formula"),
        t(
            "entropy.shape",
            rows=walk.rows,
            limit=facts.entropy(limit),
            outcomes=t("entropy.with_sink" if with_sink else "entropy.keys"),
            **unit,
        ),
        t("entropy.purpose"),
        (
            t("entropy.rows", rows=rows + more, **unit),
            t("entropy.mean", mean=facts.entropy(walk.scaled.entropy_bits), **unit),
        ),
    )


def _online(facts: Facts) -> Step:
    steps, t, number = facts.walk.online, facts.text, facts.number
    lines = [
        t("online.step", stop=one.stop, maximum=number(one.maximum), total=number(one.total))
        for one in steps
    ]
    if steps and steps[-1].total > 0:
        logsumexp = steps[-1].maximum + math.log(steps[-1].total)
        lines.append(t("online.logsumexp", logsumexp=number(logsumexp)))
    return Step(
        "online softmax",
        t("online.formula"),
        t("online.shape"),
        t("online.purpose"),
        tuple(lines),
    )


def _output(facts: Facts) -> Step:
    problem, width = facts.problem, facts.problem.dv or 0
    found = facts.walk.statistics[Stage.OUTPUT]
    return Step(
        "output",
        formula(problem, Stage.OUTPUT),
        _product_shape(facts, problem.sizes.k_len, width, width),
        facts.text("output.purpose"),
        (
            facts.text(
                "output.range",
                low=facts.number(found.minimum),
                high=facts.number(found.maximum),
                std=facts.number(found.std),
            ),
        ),
    )


def _projected(facts: Facts) -> Step:
    problem, sizes = facts.problem, facts.problem.sizes
    width = sizes.heads * (problem.dv or 0)
    return Step(
        "projected",
        formula(problem, Stage.PROJECTED),
        f"({sizes.q_len}×{width}) · ({width}×{facts.projected_width}) = "
        f"({sizes.q_len}×{facts.projected_width})",
        facts.text("projected.purpose"),
        (),
    )


def _heads(facts: Facts) -> Step:
    problem, sizes, t = facts.problem, facts.problem.sizes, facts.text
    found, heads = facts.walk.head_entropies_bits, sizes.heads
    findings = []
    if len(found) > 1:
        low, high = facts.entropy(min(found)), facts.entropy(max(found))
        findings.append(t("heads.range", low=low, high=high, unit=facts.unit_name))
    if problem.kv_heads != heads:
        share = heads // problem.kv_heads
        findings.append(t("heads.grouped", share=share, kv=problem.kv_heads))
    if heads == 1:
        findings.append(t("heads.one"))
    width = heads * problem.dk
    return Step(
        "heads",
        t("heads.formula"),
        t("heads.shape", batch=sizes.batch, heads=heads, dk=problem.dk, width=width),
        t("heads.purpose"),
        tuple(findings),
    )


def _cost(facts: Facts) -> Step:
    cost, t = facts.walk.cost, facts.text
    operations = cost.scores_operations + cost.output_operations
    return Step(
        "cost",
        t("cost.formula"),
        t("cost.shape", operations=operations, visible=cost.visible_operations),
        t("cost.purpose"),
        (
            t(
                "cost.bytes",
                matrix=cost.matrix_bytes,
                streamed=cost.streamed_bytes,
                inputs=cost.input_bytes,
            ),
        ),
    )


def _variance(std: float | None) -> float | None:
    return None if std is None else std * std
