"""The walk through the stages in words: formula, shapes, why it is there, what it did here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attncli.attention.problem import Problem
from attncli.attention.stages import Stage
from attncli.attention.variance.logits import EXP_LIMITS
from attncli.attention.walkthrough import Walkthrough
from attncli.columns import column
from attncli.report import Unit
from attncli.report.table import decimals, scale_text
from attncli.report.variance import exp_limits

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
    """

    problem: Problem
    model_width: int | None
    projected_width: int | None


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
    problem, width = sizes.problem, sizes.model_width
    batch, heads, shared = problem.sizes.batch, problem.sizes.heads, problem.kv_heads
    q_len, k_len = problem.sizes.q_len, problem.sizes.k_len
    found = []

    def add(step: str, operation: str, shape: tuple[int, int], of: int, purpose: str) -> None:
        whole = (batch, of, *shape) if of else (batch, *shape)
        found.append(StepShape(step, operation, str(shape), str(whole), purpose))

    def projected(name: str) -> str:
        return "given" if width is None else f"X W_{name}"

    if width is not None:
        add("X", "given", (q_len, width), 0, "a vector for each token")
    add("Q", projected("Q"), (q_len, problem.dk), heads, "what each token asks for")
    add("K", projected("K"), (k_len, problem.dk), shared, "what each token answers to")
    if problem.dv is not None:
        add("V", projected("V"), (k_len, problem.dv), shared, "what each token hands over")
    said = {
        Stage.SCORES: "how well each key answers",
        Stage.SCALED: "keep softmax where it has a gradient",
        Stage.CAPPED: "bound the logits",
        Stage.MASKED: "hide the future and padding",
        Stage.WEIGHTS: "shares that sum to 1",
    }
    for stage, purpose in said.items():
        if stage is not Stage.CAPPED or problem.softcap is not None:
            operation = formula(problem, stage).partition(" = ")[2]
            operation += ", −∞ where hidden" if stage is Stage.MASKED else ""
            add(str(stage), operation, (q_len, k_len), heads, purpose)
    if problem.dv is not None:
        add("output", "weights V", (q_len, problem.dv), heads, "a weighted mean of values")
    if problem.dv is not None and sizes.projected_width is not None:
        shape = (q_len, sizes.projected_width)
        add("projected", "concat(output) W_O", shape, 0, "mix the heads")
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
    problem, sizes = facts.problem, facts.problem.sizes
    values = "no V" if problem.dv is None else f"V ({sizes.k_len}×{problem.dv})"
    shapes = f"Q ({sizes.q_len}×{problem.dk}), K ({sizes.k_len}×{problem.dk}), {values}"
    if facts.model_width is None:
        how = "Q, K, V given"
    else:
        how = "Q = X W_Q, K = X W_K, V = X W_V"
        shapes = f"X ({sizes.q_len}×{facts.model_width}) gives {shapes}"
    q_variance, k_variance = map(facts.number, (facts.walk.q_variance, facts.walk.k_variance))
    return Step(
        "projection",
        how,
        f"{shapes}, for each of {sizes.batch} batch and {sizes.heads} heads",
        "A query asks, a key answers to it, a value is what is handed over. Q and K must share "
        "their width d_k; V may have its own.",
        (
            f"variance of the entries: Q {q_variance}, K {k_variance} "
            "(the theory behind the scale assumes 1 and independence)",
        ),
    )


def _scores(facts: Facts) -> Step:
    problem, sizes = facts.problem, facts.problem.sizes
    found = facts.walk.statistics[Stage.SCORES]
    number = facts.number
    return Step(
        "scores",
        formula(problem, Stage.SCORES),
        f"({sizes.q_len}×{problem.dk}) · ({problem.dk}×{sizes.k_len}) = "
        f"({sizes.q_len}×{sizes.k_len}), 2·{sizes.q_len}·{sizes.k_len}·{problem.dk} operations "
        "per head",
        "The dot product says how well a key answers a query. All pairs: this is what grows with "
        "the square of the length.",
        (
            f"variance {number(_variance(found.std))}, standard deviation {number(found.std)}, "
            f"from {number(found.minimum)} to {number(found.maximum)}",
            f"for independent entries of unit variance it would be d_k = {problem.dk}",
        ),
    )


def _scale(facts: Facts) -> Step:
    problem, walk = facts.problem, facts.walk
    before = walk.statistics[Stage.SCORES]
    after = walk.statistics[Stage.SCALED]
    number, usual = facts.number, 1 / math.sqrt(problem.dk)
    is_usual = not isinstance(problem.scale, tuple) and math.isclose(problem.scale, usual)
    known = f", the scale being 1/√{problem.dk}" if is_usual else ""
    findings = [
        f"variance {number(_variance(before.std))} before, {number(_variance(after.std))} after",
        f"mean entropy of softmax without the scale {facts.entropy(walk.unscaled.entropy_bits)} "
        f"{facts.unit}, with it {facts.entropy(walk.scaled.entropy_bits)}",
        f"mean largest weight {number(walk.unscaled.max_weight)} without, "
        f"{number(walk.scaled.max_weight)} with; softmax gradient (Frobenius norm of its "
        f"Jacobian) {number(walk.unscaled.softmax_grad)} without, "
        f"{number(walk.scaled.softmax_grad)} with",
    ]
    if not isinstance(problem.scale, tuple):
        findings.append(
            "the scale after softmax instead would change no share: rows would sum to "
            f"{number(problem.scale)}"
        )
    findings.append(
        f"temperature {problem.temperature:g}: below 1 sharpens, above 1 flattens; √d_k = "
        f"{number(1 / usual)} itself is one, and some models learn theirs"
    )
    return Step(
        "scaled",
        formula(problem, Stage.SCALED) + known,
        f"elementwise on ({problem.sizes.q_len}×{problem.sizes.k_len})",
        "Not to make numbers small: the variance of q·k grows with d_k, and dividing by √d_k "
        "keeps it from growing, so that softmax stays where it has a gradient.",
        tuple(findings),
    )


def _cap(facts: Facts) -> Step:
    before = facts.walk.statistics[Stage.SCALED]
    after = facts.walk.statistics[Stage.CAPPED]
    number = facts.number
    return Step(
        "capped",
        formula(facts.problem, Stage.CAPPED),
        f"elementwise on ({facts.problem.sizes.q_len}×{facts.problem.sizes.k_len})",
        "A soft cap bounds the logits without a corner. It comes before the mask: after it, "
        "masked keys would get weight back.",
        (
            f"range {number(before.minimum)} to {number(before.maximum)} before, "
            f"{number(after.minimum)} to {number(after.maximum)} after",
        ),
    )


def _mask(facts: Facts) -> Step:
    problem, walk = facts.problem, facts.walk
    share = f" ({walk.masked_cells / walk.cells:.1%})" if walk.cells else ""
    findings = [f"{walk.masked_cells} of {walk.cells} cells hidden{share}"]
    if walk.keys.count:
        least, most = int(walk.keys.minimum), int(walk.keys.maximum)
        findings.append(f"a query sees {least} to {most} keys")
    if walk.empty_rows:
        findings.append(
            f"{walk.empty_rows} queries see no key at all: their weights and output are 0, and "
            "they count in no mean"
        )
    if walk.masked_cells and walk.small_mask:
        rows = (" ".join("0" if seen else "−∞" for seen in row) for row in walk.small_mask)
        findings.append(f"M, which is added, row by row: {'; '.join(rows)}")
    if problem.mask.slopes is not None:
        slopes = ", ".join(f"{slope:g}" for slope in problem.mask.slopes[:8])
        findings.append(f"ALiBi subtracts slope · distance; slopes per head: {slopes}")
    hidden = "; hidden cells become −∞" if walk.masked_cells else "; nothing is hidden here"
    return Step(
        "masked",
        formula(problem, Stage.MASKED) + hidden,
        f"({problem.sizes.q_len}×{problem.sizes.k_len}), visibility rules combined by AND",
        "A query must not see the future (decoder) or padding. −∞ before softmax gives a weight "
        "of exactly 0, and the rest still sums to 1.",
        tuple(findings),
    )


def _softmax(facts: Facts) -> Step:
    problem, walk = facts.problem, facts.walk
    findings = [f"largest logit {facts.number(walk.statistics[Stage.MASKED].result.max)}"]
    failed = walk.naive_overflows + walk.naive_underflows
    if failed:
        findings.append(
            f"the naive form exp(x) / Σ exp(x) fails in float32 for {failed} of {walk.rows} rows: "
            f"exp overflows above {FLOAT32_EXP_LIMIT} ({walk.naive_overflows} rows give inf/inf) "
            f"or every exp is 0 ({walk.naive_underflows} rows give 0/0)"
        )
    else:
        findings.append(
            f"the naive form would do here, below {FLOAT32_EXP_LIMIT}; at logits [1000, 1000] it "
            "gives inf/inf = nan where the stable form gives [0.5, 0.5]"
        )
    findings.append(f"exp overflows {exp_limits()}; below the maximum every exp is at most 1")
    if problem.sinks is not None:
        findings.append("a sink logit joins the denominator: rows sum to less than 1")
    return Step(
        "weights",
        "weights = exp(x − max) / Σ exp(x − max), row by row",
        f"({problem.sizes.q_len}×{problem.sizes.k_len}), every row sums to 1",
        "Turns logits into shares. Subtracting the row's maximum m changes nothing in exact "
        "arithmetic, since exp(x − m) = exp(x) / exp(m) and exp(m) cancels, and keeps exp from "
        "overflowing.",
        tuple(findings),
    )


def _entropy(facts: Facts) -> Step:
    walk = facts.walk
    rows = ", ".join(facts.entropy(value) for value in walk.row_entropies_bits)
    more = "" if walk.rows <= len(walk.row_entropies_bits) else ", …"
    with_sink = facts.problem.sinks is not None
    limit = math.log2(walk.keys.maximum + with_sink) if walk.keys.count else None
    outcomes = "visible keys and the sink" if with_sink else "visible keys"
    return Step(
        "entropy",
        "H = Σ −w ln w for each row",
        f"{walk.rows} rows; at most {facts.entropy(limit)} {facts.unit} = log of the {outcomes}",
        "How many keys a query really uses: exp(H) of them. Near 0 the row has collapsed on one "
        "key, and its gradient with it.",
        (
            f"per row, in {facts.unit}: {rows}{more}",
            f"mean {facts.entropy(walk.scaled.entropy_bits)} {facts.unit}",
        ),
    )


def _online(facts: Facts) -> Step:
    lines = [
        f"keys before {step.stop}: maximum {facts.number(step.maximum)}, "
        f"sum {facts.number(step.total)}"
        for step in facts.walk.online
    ]
    last = facts.walk.online[-1] if facts.walk.online else None
    if last is not None and last.total > 0:
        logsumexp = last.maximum + math.log(last.total)
        lines.append(f"logsumexp = maximum + ln sum = {facts.number(logsumexp)}, as in one go")
    return Step(
        "online softmax",
        "on a new maximum m′: sum ← sum · exp(m − m′) + Σ exp(x − m′)",
        "one running maximum and sum per row instead of a row of weights",
        "The same result block by block: how FlashAttention never builds the n×n matrix.",
        tuple(lines),
    )


def _output(facts: Facts) -> Step:
    problem, sizes = facts.problem, facts.problem.sizes
    found = facts.walk.statistics[Stage.OUTPUT]
    number = facts.number
    return Step(
        "output",
        formula(problem, Stage.OUTPUT),
        f"({sizes.q_len}×{sizes.k_len}) · ({sizes.k_len}×{problem.dv}) = "
        f"({sizes.q_len}×{problem.dv}), 2·{sizes.q_len}·{sizes.k_len}·{problem.dv} operations "
        "per head",
        "A soft look-up: each row is a weighted mean of value rows.",
        (
            f"from {number(found.minimum)} to {number(found.maximum)}, standard deviation "
            f"{number(found.std)}",
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
        "Mixes what the heads found and brings it back to the width of the model.",
        (),
    )


def _heads(facts: Facts) -> Step:
    problem, sizes = facts.problem, facts.problem.sizes
    found = facts.walk.head_entropies_bits
    findings = []
    if len(found) > 1:
        low, high = facts.entropy(min(found)), facts.entropy(max(found))
        findings.append(f"mean entropy per head from {low} to {high} {facts.unit}")
    if problem.kv_heads != sizes.heads:
        share = sizes.heads // problem.kv_heads
        findings.append(f"grouped: {share} query heads share each of {problem.kv_heads} key heads")
    if sizes.heads == 1:
        findings.append("one head here: one softmax, one pattern")
    return Step(
        "heads",
        "the same for each of B·H heads on its own",
        f"({sizes.batch}, {sizes.heads}, S, d): batch and heads are leading axes; with "
        f"d_model = {sizes.heads}·{problem.dk} = {sizes.heads * problem.dk} one head would cost "
        "the same",
        "One softmax can only look one way. Several narrow heads look several ways at the cost of "
        "one wide head.",
        tuple(findings),
    )


def _cost(facts: Facts) -> Step:
    cost = facts.walk.cost
    operations = cost.scores_operations + cost.output_operations
    return Step(
        "cost",
        "2·S_q·S_k·d_k for the scores, 2·S_q·S_k·d_v for the output, per head",
        f"{operations:,} operations, {cost.visible_operations:,} for visible pairs alone",
        "Both grow with the square of the length; so do the bytes of the matrices, unless they "
        "are never built.",
        (
            f"S_q×S_k matrices of all heads: {cost.matrix_bytes:,} bytes; streamed: "
            f"{cost.streamed_bytes:,} bytes beside inputs of {cost.input_bytes:,}",
        ),
    )


def _variance(std: float | None) -> float | None:
    return None if std is None else std * std
