"""Rules that the reference lacks and the candidates follow: their sizes are read off a few rows.

Of one head that is off, sums over the keys from the left tell what a row would be if it saw any
interval of them. The sizes that fit best are only guesses: like every mistake they are then held
against all cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attncli.attention.check.evidence import Evidence
from attncli.attention.check.mistakes import Alternative, Mistake, positions_to_declare
from attncli.attention.check.variant import Part, Variant
from attncli.attention.check.walk import cells_of
from attncli.attention.masks.positions import FARTHEST
from attncli.attention.options import Target

_ROWS = 12
# Sums of values that are kept: 2²² float64 are 32 MiB.
_MOST_SUMS = 1 << 22
# Sums below this part of the whole are taken for none: differences cannot tell.
_NOTHING = 1e-14
# A document is only one if it explains its last row, or all but this share of its error.
_EXPLAINED = 1e-2
_MOST_DOCUMENTS = 64
# Rows that tell where a document starts: of one alone, keys there may be hidden anyway.
_LAST_ROWS = 8
# Longer lists of documents are told by what they are.
_MOST_IDS = 64
_DILATIONS = range(2, 9)
# Both sides of a window are looked for in turn.
_ROUNDS = 4
_FIRST_KEYS = (*range(1, 9), 16, 32, 64, 128)

Spans = tuple[torch.Tensor, torch.Tensor]  # first keys and stops, each int64 (R, m)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Rows of one head, summed over the keys from the left, all float64.

    Attributes:
        positions: int64 (R,), where the rows stand on the key axis.
        exps: (R, S_k + 1), Σ e^(logit − largest).
        sink: (R,), what a sink adds to that.
        of: what each candidate holds: its target, its cells (R, w), and two sums over the keys:
            Σ e·v of an output (R, S_k + 1, d_v), Σ e² and Σ e·weight of weights, nothing else.
        largest: (R,).
    """

    positions: torch.Tensor
    exps: torch.Tensor
    sink: torch.Tensor
    largest: torch.Tensor
    of: list[tuple[Target, torch.Tensor, list[torch.Tensor]]]

    @property
    def k_len(self) -> int:
        return self.exps.shape[-1] - 1

    def misfit(self, *spans: Spans) -> torch.Tensor:
        """Squared errors (R, m) of rows that see the keys of these disjoint intervals alone."""
        spans = tuple(
            (first.clamp(0, self.k_len), stop.clamp(0, self.k_len)) for first, stop in spans
        )
        bare = _between(self.exps, spans)
        total = bare + self.sink[:, None]
        total = torch.where(total > 0, total, 1.0)
        found = torch.zeros_like(total)
        for target, cells, sums in self.of:
            if target is Target.OUTPUT:
                for row in range(len(cells)):
                    one = tuple(
                        (first[row : row + 1], stop[row : row + 1]) for first, stop in spans
                    )
                    values = _between(sums[0][row : row + 1], one)[0] / total[row][:, None]
                    found[row] += (values - cells[row]).square().sum(-1)
            elif target is Target.WEIGHTS:
                squares, products = (_between(each, spans) for each in sums)
                given = cells.square().sum(-1, keepdim=True)
                found += (squares / total.square() - 2 * products / total + given).clamp(min=0)
            else:
                least = _NOTHING * self.exps[:, -1:]
                logs = torch.maximum(bare, least).log() + self.largest[:, None]
                found += (logs - torch.maximum(cells, least.log() + self.largest[:, None])).square()
        return found.nan_to_num(0.0, torch.inf)


def _between(sums: torch.Tensor, spans: Iterable[Spans]) -> torch.Tensor:
    """What (R, S_k + 1, …) sums grow by from first keys to stops, (R, m, …), over all spans."""
    rows = torch.arange(len(sums), device=sums.device)[:, None]
    grown = (
        torch.where(
            (stop > first).reshape(*stop.shape, *[1] * (sums.ndim - 2)),
            sums[rows, stop] - sums[rows, first],
            0.0,
        )
        for first, stop in spans
    )
    return torch.stack(list(grown)).sum(0)


def _sums(
    variant: Variant,
    evidence: Evidence,
    batch: int | None = None,
    rows: torch.Tensor | None = None,
) -> _Sums:
    """Sums of rows of the head that is off most, by default of the batch too and some rows off."""
    problem = variant.problem
    if batch is None:
        batch = int(evidence.off.sum((1, 2)).argmax())
    head = _worst_head(evidence, batch)
    if rows is None:
        width = max(1, problem.sizes.k_len) * max(1, problem.dv or 1)
        count = max(2, min(_ROWS, _MOST_SUMS // width))
        real = torch.arange(problem.mask.real_queries(batch))
        off = evidence.off[batch, head].nonzero()[:, 0]
        rows = torch.cat([_spread(off, count - count // 4), _spread(real, count // 4)])
        rows = torch.tensor(sorted(set(rows.tolist())))
    rows = rows.to(problem.device)
    part = Part(slice(batch, batch + 1), slice(head, head + 1), rows)
    ((_, expected, cells),) = cells_of(variant, evidence.candidates, [part])
    logits = expected.logits[0, 0].double()  # (R, S_k)
    largest = logits.amax(-1).nan_to_num(0.0, 0.0, 0.0)
    exps = (logits - largest[:, None]).exp()
    sink = torch.zeros_like(largest)
    if problem.sinks is not None:
        sink = (problem.sinks[head].to(largest) - largest).exp()
    found: list[tuple[Target, torch.Tensor, list[torch.Tensor]]] = []
    for candidate, actual in zip(evidence.candidates, cells, strict=True):
        given = actual[0, 0]
        if candidate.target is Target.OUTPUT:
            assert expected.v is not None
            parts = [exps[..., None] * expected.v[0, 0].double()]
        else:
            parts = [exps.square(), exps * given] if candidate.target is Target.WEIGHTS else []
        found.append((candidate.target, given, [_from_left(one) for one in parts]))
    positions = variant.problem.mask.positions(slice(batch, batch + 1), rows)[0]
    return _Sums(positions, _from_left(exps), sink, largest, found)


def _spread(rows: torch.Tensor, count: int) -> torch.Tensor:
    """So many of these rows, first and last among them."""
    if not len(rows):
        return rows
    return rows[torch.linspace(0, len(rows) - 1, min(count, len(rows))).round().long()]


def _worst_head(evidence: Evidence, batch: int) -> int:
    return int(evidence.off[batch].sum(-1).argmax())


def _from_left(cells: torch.Tensor) -> torch.Tensor:
    """Sums over the first 0, 1, … entries of axis 1."""
    return torch.cat([torch.zeros_like(cells[:, :1]), cells.cumsum(1)], 1)


def added_rules(evidence: Evidence) -> list[Mistake]:
    """The mistakes of which the candidates tell the size."""
    if not evidence.base.problem.sizes.k_len or evidence.base.needs_all_heads:
        return []
    found = {
        "window:added": _window,
        "sink-window:added": _sink_window,
        "chunk:added": _chunk,
        "segments:added": _documents,
        "prefix:added": _prefix,
        "padding:added": _padding,
    }

    def placed(of: Any) -> Any:
        """The rule where query 0 is declared, or in both corners."""

        def alternatives(variant: Variant) -> Iterator[Alternative]:
            for declared in positions_to_declare(variant):
                at = variant.with_options(**declared) if declared else variant
                for one in of(at, evidence):
                    changes = {**one.changes, **declared} if one.changes else {}
                    yield Alternative(one.variant, changes, one.detail)

        return alternatives

    return [
        *(Mistake(name, placed(of), paired=False) for name, of in found.items()),
        Mistake("dilation:added", _dilation, paired=False),
    ]


def _steps(sums: _Sums, count: int) -> torch.Tensor:
    """Int64 (1, count): 0, 1, …"""
    return torch.arange(count, device=sums.exps.device)[None]


def _best(misfit: torch.Tensor) -> int:
    """The size whose rows (R, m) err least together."""
    return int(misfit.sum(0).argmin())


def _window(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """A window to the left, to the right, or to both sides."""
    options = variant.options
    sums = _sums(variant, evidence)
    p, widths = sums.positions[:, None], _steps(sums, sums.k_len)
    first, end = p - widths, torch.full_like(p - widths, sums.k_len)
    tried: list[dict[str, Any]] = []
    if options.left_window is None:
        tried.append({"left_window": _best(sums.misfit((first, end)))})
    if options.right_window is None and not options.causal:
        tried.append({"right_window": _best(sums.misfit((end - end, p + widths + 1)))})
    if len(tried) == 2:
        for right in (0, _best(sums.misfit((first, p + widths + 1)))):
            left = 0
            for _ in range(_ROUNDS):
                left = _best(sums.misfit((first, (p + right + 1).expand_as(first))))
                right = _best(sums.misfit(((p - left).expand_as(first), p + widths + 1)))
            tried.append({"left_window": left, "right_window": right})
    farthest = int(sums.positions.max())
    for changes in tried:
        if changes.get("left_window", farthest) >= farthest and not changes.get("right_window"):
            continue  # hides nothing, or is causality
        yield Alternative.by_options(variant, **changes)


def _sink_window(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """First keys that stay visible through a window, which may be unknown as well."""
    options = variant.options
    if options.sink_window is not None:
        return
    windowed = options.left_window is not None
    open_ = variant.with_options(left_window=FARTHEST) if windowed else variant
    sums = _sums(open_, evidence)
    p, widths = sums.positions[:, None], _steps(sums, sums.k_len)
    if options.left_window is not None:
        widths = torch.full_like(widths[:, :1], options.left_window)
    best: tuple[float, int, int] | None = None
    for count in (n for n in _FIRST_KEYS if n < sums.k_len):
        first = (p - widths).clamp(min=count)
        kept = torch.zeros_like(first), torch.full_like(first, count)
        errors = sums.misfit(kept, (first, torch.full_like(first, sums.k_len))).sum(0)
        at = int(errors.argmin())
        if best is None or float(errors[at]) < best[0]:
            best = float(errors[at]), count, int(widths[0, at])
    if best is not None:
        yield Alternative.by_options(variant, left_window=best[2], sink_window=best[1])


def _chunk(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """Chunks of equal length, as Llama 4 has them."""
    if variant.options.has_documents:
        return
    sums = _sums(variant, evidence)
    lengths = _steps(sums, sums.k_len)[:, 1:]
    if not lengths.numel():
        return
    first = sums.positions[:, None] // lengths * lengths
    length = int(lengths[0, _best(sums.misfit((first, first + lengths)))])
    yield _packed(variant, np.arange(sums.k_len) // length, f"chunks of {length} keys")


def _documents(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """Documents one after another, found from the last row of each, the last one first."""
    if variant.options.has_documents:
        return
    found = []
    for batch in range(variant.problem.sizes.batch):
        if not bool(evidence.off[batch].any()):
            found.append([0])
            continue
        starts = _starts(variant, evidence, batch)
        if starts is None:
            return
        found.append(starts)
    k_len = variant.problem.sizes.k_len
    ids = np.stack([np.searchsorted(starts, np.arange(k_len), "right") - 1 for starts in found])
    alike = ids[:1] if (ids == ids[:1]).all() else ids
    lengths = np.unique([n for starts in found for n in np.diff(starts)])
    chunked = len(lengths) == len(alike) == 1 and k_len - found[0][-1] <= lengths[0]
    if not ids.any() or chunked:
        return
    text = ", ".join(map(str, np.diff([*found[0], k_len])))
    yield _packed(variant, alike[0] if len(alike) == 1 else alike, f"documents of {text} keys")


def _starts(variant: Variant, evidence: Evidence, batch: int) -> list[int] | None:
    """The first keys of the documents of a batch, ascending; None where there seem to be none."""
    mask, k_len = variant.problem.mask, variant.problem.sizes.k_len
    off = evidence.off[batch, _worst_head(evidence, batch)].nonzero()[:, 0]
    positions = mask.positions(slice(batch, batch + 1), off.to(variant.problem.device))[0].cpu()
    off, positions = off[positions >= 0], positions[positions >= 0]  # before 0 there is no key
    starts, stop = [0], k_len
    while len(rows := off[positions < stop]):
        sums = _sums(variant, evidence, batch, rows[-_LAST_ROWS:])
        p, firsts = sums.positions[:, None], _steps(sums, min(stop, int(sums.positions[-1]) + 1))
        errors = sums.misfit((firsts.expand(len(p), -1), torch.full_like(p - firsts, stop)))
        inside = p >= firsts  # where the first key of the document is not after the row
        means = torch.where(inside, errors, 0.0).sum(0) / inside.sum(0)
        if not float(means.min()) <= _EXPLAINED * float(errors[:, 0].max()):
            break
        stop = int(means.argmin())
        starts.append(stop)
        if len(starts) > _MOST_DOCUMENTS:
            return None
    return sorted(set(starts)) if stop < k_len else None


def _packed(variant: Variant, ids: Any, detail: str) -> Alternative:
    """The variant with documents; the option spelt out where its list is short."""
    found = variant.with_options(segments=ids)
    short = ids.ndim == 1 and len(ids) <= _MOST_IDS
    return Alternative(found, {"segments": tuple(ids.tolist())} if short else {}, detail)


def _prefix(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """First keys that every query sees in spite of causality."""
    if not variant.options.causal or variant.options.prefix is not None:
        return
    sums = _sums(variant.with_options(causal=False), evidence)
    p, counts = sums.positions[:, None], _steps(sums, sums.k_len + 1)
    stop = torch.maximum(p + 1, counts)
    prefix = _best(sums.misfit((torch.zeros_like(stop), stop)))
    if 0 < prefix < sums.k_len:
        yield Alternative.by_options(variant, prefix=prefix)


def _padding(variant: Variant, evidence: Evidence) -> Iterator[Alternative]:
    """Hidden keys at the end, or at the start, of each batch its own number."""
    options, sizes = variant.options, variant.problem.sizes
    if options.key_lengths is not None or options.key_padding is not None:
        return
    trailing, leading = [], []
    for batch in range(sizes.batch):
        if not bool(evidence.off[batch].any()):
            trailing.append(sizes.k_len)
            leading.append(0)
            continue
        sums = _sums(variant, evidence, batch)
        counts = _steps(sums, sizes.k_len + 1).expand(len(sums.positions), -1)
        none, whole = torch.zeros_like(counts), torch.full_like(counts, sizes.k_len)
        ends = sums.misfit((none, counts)).sum(0).flip(0)  # the most keys first
        trailing.append(sizes.k_len - int(ends.argmin()))
        leading.append(_best(sums.misfit((counts, whole))))
    told: Any = trailing[0] if len(set(trailing)) == 1 else tuple(trailing)
    lengths = variant.with_options(key_lengths=tuple(trailing))
    yield Alternative(lengths, {"key_lengths": told})
    keep = np.arange(sizes.k_len) >= np.array(leading)[:, None]  # (B, S_k)
    text = ", ".join(map(str, dict.fromkeys(leading)))
    yield Alternative(variant.with_options(key_padding=keep), {}, f"the first {text} keys hidden")


def _dilation(variant: Variant) -> Iterator[Alternative]:
    options = variant.options
    windowed = options.left_window is not None or options.right_window is not None
    if windowed and options.dilation is None:
        for step in _DILATIONS:
            yield Alternative.by_options(variant, dilation=step)
