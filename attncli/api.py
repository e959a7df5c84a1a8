"""The commands for Python: tensors and keywords in, dataclasses out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import torch

from attncli.analysis.attention_arguments import TensorLike, read_keywords, stored_of, whole_numbers
from attncli.analysis.changes import read_changes
from attncli.analysis.compare import Pair, alternatives, compare_heads, pair_of
from attncli.analysis.compute import ask_stages
from attncli.analysis.entropy import ChosenHeads, measure, token_numbers
from attncli.analysis.head_columns import GroupPlace, thresholds_of
from attncli.analysis.variance import experiment_specs, experiments
from attncli.attention.check.candidate import read_candidate
from attncli.attention.check.hypotheses import check as find_mistakes
from attncli.attention.options import (
    DistributionName,
    Layout,
    Precision,
    Target,
    require_candidates,
)
from attncli.attention.problem import Problem, make_problem
from attncli.attention.qkv import problem_of_weights
from attncli.attention.stages import select
from attncli.attention.streaming.stream import Wanted
from attncli.attention.variance.experiment import ScaleRule
from attncli.attention.variance.moments import audit, diagnosis
from attncli.errors import UsageError, choice_of, in_python
from attncli.files.torch_tensors import as_torch
from attncli.recording.capture import Capture
from attncli.recording.recorder import LabelRows, Recorder
from attncli.results import (
    Audited,
    Checked,
    Compared,
    Computed,
    Entropies,
    Experiments,
    computed,
)

# What says how Q and K of an audit are read, beside the options of attention.
READING = {"layout", "k_layout", "heads", "kv_heads", "precision", "device", "allow_nonfinite"}


def compute(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike = None,
    *,
    stages: str | Sequence[str] | None = None,
    rows: int | Sequence[int] | None = None,
    head_index: int | Sequence[int] | None = None,
    batch_index: int | Sequence[int] | None = None,
    layout: Layout | str = Layout.BHSD,
    k_layout: Layout | str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str = "auto",
    allow_nonfinite: bool = False,
    **options: Any,
) -> Computed:
    """Compute attention stage by stage, for everything or for chosen batches, heads and queries.

    >>> result = attncli.compute([[2.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.0], [1.0]], scale=1)
    >>> result.stages["weights"]
    tensor([[[[0.8808, 0.1192]]]], dtype=torch.float64)
    >>> result.stages["output"].item()
    0.11920292202211755
    >>> result.statistics["scaled"].max
    2.0

    Args:
        q: (S_q, d_k), (H, S_q, d_k) or (B, H, S_q, d_k), or as `layout` says: a torch tensor, a
            NumPy array or nested lists, of any real dtype.
        k: like q, with S_k in the place of S_q and H_kv in the place of H; one batch serves all.
        v: like k, with d_v in the place of d_k; None leaves out the stage `output`.
        stages: some of `scores`, `scaled`, `capped`, `masked`, `weights`, `output`; None for all
            that there are. A stage over keys takes batches × heads × rows × S_k numbers.
        rows: queries to compute, negative ones counted from the end; None for all.
        head_index: query heads, likewise.
        batch_index: batches, likewise.
        layout: "bhsd", "bshd" for (B, S, H, d), "sbhd", "bhds", or "bsh" for packed (B, S, H·d)
            and "sbh".
        k_layout: that of k, where it has one of its own.
        heads: H, needed where the layout packs heads, checked elsewhere.
        kv_heads: H_kv, likewise; None means `heads`.
        precision: dtype of the arithmetic: "float32", "float64", or "auto", which is float64
            for float64 input or up to 2²⁶ scores.
        device: "auto", "cpu", "cuda" or "cuda:N".
        allow_nonfinite: whether NaN and inf in Q, K and V are let through, as IEEE says.
        options: any field of `AttentionOptions`: causal=True, attn_mask=mask, key_lengths=[5, 3], …

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        UsageError: options that make no sense, or do not fit the shapes.
        ResourceError: a device that is not there, or more memory than there is.
    """
    problem = as_problem(
        q, k, v, options, layout, k_layout, heads, kv_heads, precision, device, allow_nonfinite
    )
    asked = ask_stages(
        problem,
        [stages] if isinstance(stages, str) else stages,
        option="stages",
        batches=whole_numbers(batch_index),
        heads=whole_numbers(head_index),
        rows=whole_numbers(rows),
    )
    return computed(asked)


@torch.no_grad()
def entropy(
    q: TensorLike = None,
    k: TensorLike = None,
    v: TensorLike = None,
    *,
    weights: TensorLike = None,
    per_row: bool = False,
    per_key: bool = False,
    sink_keys: int = 1,
    labels: LabelRows | None = None,
    label_limits: Mapping[str, float] | None = None,
    head_index: int | Sequence[int] | None = None,
    batch_index: int | Sequence[int] | None = None,
    layout: Layout | str = Layout.BHSD,
    k_layout: Layout | str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str | None = None,
    allow_nonfinite: bool = False,
    **options: Any,
) -> Entropies:
    """Measure every head, or chosen ones, without ever holding S_q × S_k numbers.

    Nothing is recorded for gradients, so that it may be called inside a training loop.

    >>> found = attncli.entropy([[0.0], [0.0]], [[1.0], [2.0]], causal=True)
    >>> found.heads[0].entropy_bits_mean
    0.5
    >>> found.column("max_weight_mean")
    tensor([[0.7500]], dtype=torch.float64)

    Args:
        q, k, layout, k_layout, heads, kv_heads, precision, allow_nonfinite: as for
            `attncli.compute`.
        v: likewise; checked, but it has no influence.
        weights: attention weights in the place of q and k, (S_q, S_k) to (B, H, S_q, S_k), of one
            layer; no options but those of visibility and positions. What needs logits is None, and
            weights of 0 count as hidden where no option says what is.
        per_row: whether to keep the statistics of every row.
        per_key: whether to compute the mass that every key receives; costs a second pass.
        sink_keys: how many of the first keys the sink mass is the weight of.
        labels: a token per key, or such a row for each batch: where some come again, heads may be
            "induction" or "duplicate-token", with these in `scores`.
        label_limits: score from which on a head gets a label, by its name ("previous-token").
        head_index: query heads to compute, negative ones counted from the end; None for all.
        batch_index: batches, likewise.
        device: "auto", "cpu", "cuda" or "cuda:N"; None means where q is.
        options: any field of `AttentionOptions`: causal=True, attn_mask=mask, key_lengths=[5, 3], …

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        UsageError: options that make no sense, or do not fit the shapes.
        ResourceError: a device that is not there.
    """
    thresholds = thresholds_of(label_limits or {}, "label_limits")
    if weights is None:
        if q is None or k is None:
            raise UsageError("q" if q is None else "k", "expected q and k, or weights, got neither")
        problem = as_problem(
            q, k, v, options, layout, k_layout, heads, kv_heads, precision, device, allow_nonfinite
        )
    elif q is not None or k is not None or v is not None:
        raise UsageError("weights", "expected no q, k and v beside them, got some")
    else:
        tensor = as_tensor(weights, "weights")
        problem = problem_of_weights(
            tensor,
            read_keywords(options),
            precision=choice_of(Precision, precision, "precision"),
            device=str(tensor.device) if device is None else device,
            allow_nonfinite=allow_nonfinite,
        )
    selection = select(problem, whole_numbers(batch_index), whole_numbers(head_index))
    wanted = Wanted(top_key=per_row, per_key=per_key, sink_keys=sink_keys)
    found, kept = [], []
    tokens = None
    if labels is not None:
        of_batches = [[*labels]] if all(isinstance(row, str) for row in labels) else labels
        tokens = token_numbers(tuple(tuple(map(str, row)) for row in of_batches), problem)
        if tokens is None:
            got = f"expected one for each of {problem.sizes.k_len} keys, got other labels"
            raise UsageError("labels", got)
    chosen = ChosenHeads(GroupPlace(source="", group=""), problem, selection, tokens)
    for rows, statistics in measure(chosen, wanted, thresholds):
        found.append(statistics)
        if per_row or per_key:
            kept.append(rows)
    return Entropies(
        heads=tuple(found),
        rows=tuple(kept) if per_row or per_key else None,
        batches=selection.batches,
        head_indices=selection.heads,
        problem=problem,
        thresholds=thresholds,
        sink_keys=sink_keys,
        tokens=tokens,
    )


@overload
def variance(
    q: TensorLike,
    k: TensorLike,
    *,
    head_index: int | Sequence[int] | None = None,
    batch_index: int | Sequence[int] | None = None,
    layout: Layout | str = Layout.BHSD,
    k_layout: Layout | str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str = "auto",
    allow_nonfinite: bool = False,
    **options: Any,
) -> Audited: ...


@overload
def variance(
    *,
    dk: int | Sequence[int] = 64,
    samples: int = 100_000,
    keys: int = 8,
    dist: DistributionName | str = DistributionName.NORMAL,
    mean: float | None = None,
    std: float | None = None,
    correlation: float = 0.0,
    df: float | None = None,
    scale_rule: ScaleRule | str | float | Sequence[ScaleRule | str | float] = ScaleRule.SQRT,
    temperatures: float | Sequence[float] = 1.0,
    seed: int = 0,
) -> Experiments: ...


def variance(q: TensorLike = None, k: TensorLike = None, **keywords: Any) -> Any:
    """Measure the variance of q·k: of tensors exactly, in linear time, or of random draws.

    With tensors the result says what the variance of all visible scores of every head is made of.
    Without, it is an experiment: variance against theory, and softmax with and without the scale.

    >>> audited = attncli.variance([[3.0], [1.0]], [[1.0], [0.0]])
    >>> audited.records[0].var
    1.5
    >>> audited.diagnoses[0].split(":")[0]
    'queries share a mean'
    >>> [round(record.scaled_var) for record in attncli.variance(dk=[16, 256], samples=10_000)]
    [1, 1]

    Args:
        q, k, layout, k_layout, heads, kv_heads, precision, device: as for `attncli.compute`.
        allow_nonfinite: whether NaN and inf are let through; what they reach is None.
        head_index, batch_index: with tensors, which heads and batches, as for `attncli.compute`.
        options: any field of `AttentionOptions`: causal=True, scale=0.1, key_lengths=[5, 3], …
            What comes after the scaled scores (soft cap, biases, sinks) changes nothing.
        dk: without tensors, width of queries and keys; several for a sweep.
        samples: number of dot products for each d_k.
        keys: keys of each query.
        dist: "normal", "uniform" on [0, 1), "rademacher", "laplace" or "student-t".
        mean: of an entry of Q and K; None for the distribution's own.
        std: of an entry; likewise.
        correlation: between the entries of a query and its keys, −1 to 1.
        df: degrees of freedom of student-t; None for 10.
        scale_rule: "sqrt", "linear", "none", "log-n" or a number; several side by side.
        temperatures: divide the scaled scores; several side by side.
        seed: of the draws.

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        ResourceError: a device that is not there, or more memory than there is.
        TypeError: keywords of audits without tensors, or of experiments with them.
        UsageError: options that make no sense, or do not fit the shapes.
    """
    if q is None and k is None:
        return Experiments(experiments(experiment_specs(**keywords)))
    if q is None or k is None:
        raise UsageError("q" if q is None else "k", "expected q and k, got one of them")
    given = {name: keywords.pop(name) for name in READING & keywords.keys()}
    batches, heads = (
        whole_numbers(keywords.pop(name, None)) for name in ("batch_index", "head_index")
    )
    problem = as_problem(q, k, None, keywords, **given)
    chosen = select(problem, batches, heads)
    records = tuple(audit(problem, (chosen.batches, chosen.heads)))
    return Audited(records=records, diagnoses=tuple(map(diagnosis, records)), problem=problem)


def check(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike = None,
    *,
    actual_output: TensorLike = None,
    actual_weights: TensorLike = None,
    actual_logsumexp: TensorLike = None,
    rtol: float | None = None,
    atol: float | None = None,
    head_index: int | Sequence[int] | None = None,
    batch_index: int | Sequence[int] | None = None,
    layout: Layout | str = Layout.BHSD,
    k_layout: Layout | str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.FLOAT64,
    device: str = "auto",
    allow_nonfinite: bool = False,
    **options: Any,
) -> Checked:
    """Compare what a program computed with the reference, and name the mistake if it differs.

    >>> q = k = v = [[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    >>> uncaused = attncli.compute(q, k, v).stages["output"]
    >>> result = attncli.check(q, k, v, actual_output=uncaused, causal=True)
    >>> result.passed
    False
    >>> [(mistake.name, mistake.options) for mistake in result.mistakes]
    [('causal:missing', '--no-causal')]

    Args:
        q, k, layout, k_layout, heads, kv_heads, device, allow_nonfinite: as for `attncli.compute`.
        v: likewise; needed to check an output.
        actual_output: (B, H, S_q, d_v), or as `layout` says; leading axes of length 1 may be
            left out, here and below.
        actual_weights: (B, H, S_q, S_k).
        actual_logsumexp: (B, H, S_q), of the visible keys, in nats.
        rtol: relative tolerance; None for that of each candidate's dtype.
        atol: absolute tolerance, likewise.
        head_index: query heads to look at, negative ones counted from the end; None for all. The
            candidates are whole all the same.
        batch_index: batches, likewise.
        precision: dtype of the reference: "float64", "float32", or "auto" for what `compute` uses.
        options: any field of `AttentionOptions`: causal=True, attn_mask=mask, key_lengths=[5, 3], …

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        UsageError: no candidate, or options that make no sense or do not fit the shapes.
        ResourceError: a device that is not there.
    """
    given = {
        Target.OUTPUT: actual_output,
        Target.WEIGHTS: actual_weights,
        Target.LOGSUMEXP: actual_logsumexp,
    }
    actual = {
        target: as_tensor(values, f"actual_{target}")
        for target, values in given.items()
        if values is not None
    }
    require_candidates(actual, rtol, atol)
    problem = as_problem(
        q, k, v, options, layout, k_layout, heads, kv_heads, precision, device, allow_nonfinite
    )
    order = choice_of(Layout, layout, "layout")
    candidates = [read_candidate(name, one.cpu(), problem, order) for name, one in actual.items()]
    chosen = select(problem, whole_numbers(batch_index), whole_numbers(head_index))
    found = find_mistakes(
        problem,
        read_keywords(options),
        candidates,
        rtol=rtol,
        atol=atol,
        chosen=(
            None if batch_index is None else chosen.batches,
            None if head_index is None else chosen.heads,
        ),
    )
    return Checked(comparisons=found.comparisons, hypotheses=found.hypotheses, problem=problem)


@torch.no_grad()
def compare(
    a: Mapping[str, Any],
    b: Mapping[str, Any] | None = None,
    *,
    what_if: str | Sequence[str] | None = None,
    per_row: bool = False,
    head_index: int | Sequence[int] | None = None,
    batch_index: int | Sequence[int] | None = None,
    layout: Layout | str = Layout.BHSD,
    k_layout: Layout | str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str | None = None,
    allow_nonfinite: bool = False,
    **options: Any,
) -> Compared:
    """Say what one attention becomes in another, or under changes, head by head.

    Nothing is recorded for gradients, and S_q × S_k numbers are never held.

    >>> a = {"q": [[2.0], [1.0]], "k": [[1.0], [0.0]], "v": [[1.0], [0.0]]}
    >>> found = attncli.compare(a, what_if=["k-dtype=int8", "causal=true"])
    >>> [head.what_if for head in found.heads]
    ['k-dtype=int8 causal=true']
    >>> attncli.compare(a, a).heads[0].kl_nats_mean
    0.0

    Args:
        a: "q", "k" and where known "v", as `attncli.compute` takes them; any other key is an
            option of this side alone.
        b: the other side, of the same batches, heads, queries and keys; None with `what_if`.
        what_if: OPTION=VALUE as on the command line: those of one option stand side by side,
            different ones combine.
        per_row: whether to keep what every row becomes.
        head_index: query heads to compare, negative ones counted from the end; None for all.
        batch_index: batches, likewise.
        layout, k_layout, heads, kv_heads, precision, allow_nonfinite: as for `attncli.compute`.
        device: "auto", "cpu", "cuda" or "cuda:N"; None means where q is.
        options: any field of `AttentionOptions`, for both sides.

    Raises:
        DataError: shapes that do not fit each other, or NaN and inf that are not allowed.
        UsageError: options that make no sense, or neither or both of `b` and `what_if`.
        ResourceError: a device that is not there.
    """
    if (b is None) == (what_if is None):
        raise UsageError(
            "b", f"expected one of b and what_if, got {'none' if b is None else 'both'}"
        )

    def own(side: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in side.items() if key not in ("q", "k", "v")} | options

    def problem(side: Mapping[str, Any]) -> Problem:
        q, k, v = (side.get(role) for role in ("q", "k", "v"))
        reading = layout, k_layout, heads, kv_heads, precision, device, allow_nonfinite
        return as_problem(q, k, v, own(side), *reading)

    one = problem(a)
    other = one if b is None else problem(b)
    chosen = whole_numbers(batch_index), whole_numbers(head_index)
    pair = pair_of(GroupPlace(source="", group=""), one, other, *chosen, where="b")
    warnings = list(dict.fromkeys((*one.warnings, *other.warnings)))
    pairs: Iterable[Pair] = [pair]
    if what_if is not None:
        changes = read_changes([what_if] if isinstance(what_if, str) else what_if)
        pairs = alternatives(pair, read_keywords(own(a)), changes, warnings.extend)
    found = [(one.statistics, one.rows) for each in pairs for one in compare_heads(each)]
    return Compared(
        heads=tuple(statistics for statistics, _ in found),
        rows=tuple(rows for _, rows in found) if per_row else None,
        warnings=tuple(map(in_python, warnings)),
    )


def capture(
    model: torch.nn.Module,
    path: str | None = None,
    *,
    layers: int | Sequence[int] | None = None,
    labels: LabelRows | None = None,
    trace: bool = False,
) -> Capture:
    """Record Q, K and V of every attention call of a model, with what shaped it there.

        with attncli.capture(model, "qkv.safetensors") as recorded:
            model(**inputs)
        recorded.groups["layers.3"].options  # {'scale': 0.125, 'causal': True}
        recorded["layers.3"].q  # (B, H, S_q, d_k)

    Each call is checked: some rows of the model's own output against attention as it was recorded,
    in float64; `recorded.warnings` names the layers that are off. What is called again is a step,
    `steps.1.layers.3`, as a cached decoder does in `model.generate`.

    Args:
        model: a model of transformers, or any that calls `scaled_dot_product_attention` or
            `nn.MultiheadAttention`; in evaluation mode, not compiled.
        path: the bundle to write, which appears on leaving the context; None to keep the tensors.
        layers: indices of the layers to record, negative ones counted from the last; None for all.
        labels: a token per position, of all steps together, or such a row for each batch.
        trace: whether to follow softmax that the model writes out, too.

    Leaving the context raises:
        DataError: nothing was recorded, with the reason.
    """
    wanted = whole_numbers(layers)
    return Capture(model, path, layers=wanted, labels=labels, trace=trace)


def recorder(path: str | None = None, *, labels: LabelRows | None = None) -> Recorder:
    """Write a bundle group by group, from code of any kind.

        with attncli.recorder("qkv.safetensors") as recorded:
            recorded.add("layers.0", q, k, v, causal=True, output=out)

    Args:
        path: the bundle to write, which appears on leaving the context; None to keep the tensors.
        labels: a token per position for all groups, or such a row for each batch.
    """
    return Recorder(path, labels=labels)


def as_tensor(values: TensorLike, role: str) -> torch.Tensor:
    """A torch tensor of the same values, dtype and device, sharing memory where that works.

    Args:
        values: a torch tensor, a NumPy array of any strides and byte order (bfloat16 and float8
            of `ml_dtypes` included), or nested lists of numbers.
        role: name for messages: "q", "k", "v".

    Raises:
        DataError: complex numbers, objects, strings, or lists of uneven lengths.
    """
    if isinstance(values, torch.Tensor):
        return values.detach()
    return as_torch(stored_of(values, role))


def as_problem(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike,
    options: Mapping[str, Any],
    layout: Layout | str = Layout.BHSD,
    k_layout: Layout | str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str | None = "auto",
    allow_nonfinite: bool = False,
) -> Problem:
    """A checked problem from what a caller gave; arguments and errors as for `make_problem`.

    A `device` of None means where q is.
    """
    queries = as_tensor(q, "q")
    return make_problem(
        queries,
        as_tensor(k, "k"),
        None if v is None else as_tensor(v, "v"),
        read_keywords(options),
        layout=choice_of(Layout, layout, "layout"),
        k_layout=None if k_layout is None else choice_of(Layout, k_layout, "k_layout"),
        heads=heads,
        kv_heads=kv_heads,
        precision=choice_of(Precision, precision, "precision"),
        device=str(queries.device) if device is None else device,
        allow_nonfinite=allow_nonfinite,
    )
