"""What the numbers of an additive mask do to a logit in each floating-point format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from attncli.attention.masks.mask_input import blocks_of
from attncli.attention.masks.view import views

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attncli.attention.masks.mask import Mask

# Logits of real models lie within this, soft-capped ones by construction.
_LOGIT = 50.0
# exp of anything lower is 0 in float32, in which softmax is computed.
_LOWEST_EXPONENT = -104.0
_MOST_VALUES = 32


class Effect(StrEnum):
    """What adding a number does to a logit within ±50."""

    HIDES = "hides"
    SWALLOWS = "swallows"
    SILENCES = "silences"
    ADDS = "adds"

    @property
    def meaning(self) -> str:
        """The effect in a sentence."""
        return _MEANINGS[self]


_MEANINGS = {
    Effect.HIDES: "is −inf in this format, so the key is invisible and a row of such keys empty",
    Effect.SWALLOWS: "the logit is lost in it, so a row of nothing else comes out uniform",
    Effect.SILENCES: "no weight beside an ordinary key, plain softmax in a row of nothing else",
    Effect.ADDS: "an ordinary bias",
}


class Format(StrEnum):
    """Floating-point formats in which masks are added."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class AddedValue:
    """One number that an additive mask holds.

    Attributes:
        value: the number.
        cells: how often it stands in the mask as given.
        effects: what adding it does, by format.
    """

    value: float
    cells: int
    effects: dict[Format, Effect]


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What becomes of the rows of an additive mask in one format; padded queries are left out.

    Attributes:
        empty: rows without a key that is visible in this format.
        uniform: rows whose best key has the logit swallowed: equal weights on all such keys.
        unlikely: rows whose best key is silenced: a plain softmax over keys meant to be hidden.
    """

    empty: int
    uniform: int
    unlikely: int


@dataclass(frozen=True, slots=True)
class AdditiveAudit:
    """The numbers in an additive mask.

    Attributes:
        values: its distinct numbers in ascending order; None where there are more than 32.
        minimum, maximum: of the finite numbers; None where there are none.
        minus_infinity: number of cells that hold −inf.
        zeros_and_ones: whether it holds nothing but 0 and 1, both: most likely meant as boolean.
        rows: what becomes of the rows, by format; batches and heads that are alike count once.
    """

    values: tuple[AddedValue, ...] | None
    minimum: float | None
    maximum: float | None
    minus_infinity: int
    zeros_and_ones: bool
    rows: dict[Format, RowOutcome]


def audit_additive(mask: Mask) -> AdditiveAudit | None:
    """Say what the numbers of an additive mask do; None for a mask that adds nothing from a file.

    Args:
        mask: on the host.
    """
    if mask.added is None:
        return None
    counts, lowest, highest, hidden = _scan(mask.added)
    values = None
    if counts is not None:
        values = tuple(
            AddedValue(value, cells, {each: effect_of(value, each) for each in Format})
            for value, cells in sorted(counts.items())
        )
    return AdditiveAudit(
        values=values,
        minimum=lowest if lowest < np.inf else None,
        maximum=highest if highest > -np.inf else None,
        minus_infinity=hidden,
        zeros_and_ones=counts is not None and set(counts) == {0.0, 1.0},
        rows=_row_outcomes(mask),
    )


def effect_of(value: float, form: Format) -> Effect:
    """What adding a number does to a logit within ±50, in one format."""
    return _ORDER[int(_effects(np.array([value]), form)[0])]


_ORDER = tuple(Effect)


def _effects(values: NDArray[Any], form: Format) -> NDArray[np.int64]:
    """Int64, as long as `values`: the place of each effect in `Effect`."""
    cast = rounded(values.astype(np.float64), form)
    sums = [rounded(cast + logit, form) for logit in (_LOGIT, -_LOGIT)]
    hides = np.isneginf(cast)
    swallows = (sums[0] == cast) & (sums[1] == cast)
    silences = cast + 2 * _LOGIT < _LOWEST_EXPONENT
    return np.select([hides, swallows, silences], [0, 1, 2], 3)


def rounded(values: NDArray[np.float64], form: Format) -> NDArray[np.float64]:
    """Values rounded to a format, to nearest with ties to even, as float64."""
    with np.errstate(over="ignore"):
        if form is not Format.BFLOAT16:
            return values.astype(form.value).astype(np.float64)
        bits = values.astype(np.float32).view(np.uint32)
    upper = bits + 0x7FFF + ((bits >> 16) & 1)  # carries into the upper half where it must
    return (upper & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def _scan(added: NDArray[Any]) -> tuple[dict[float, int] | None, float, float, int]:
    """Distinct numbers with their counts, finite minimum and maximum, and cells of −inf."""
    counts: dict[float, int] | None = {}
    lowest, highest, hidden = np.inf, -np.inf, 0
    for block in blocks_of(added):
        if counts is not None:
            counts = _tally(block, counts)
        finite = block[block > -np.inf]
        hidden += block.size - finite.size
        lowest = min(lowest, float(finite.min(initial=np.inf)))
        highest = max(highest, float(finite.max(initial=-np.inf)))
    return counts, lowest, highest, hidden


def _tally(block: NDArray[Any], counts: dict[float, int]) -> dict[float, int] | None:
    """Add the numbers of a block to the counts; None once there are too many."""
    rest = block.ravel()
    while rest.size:
        for value in [each for each in counts if rest.size]:
            others = rest[rest != value]
            counts[value] += rest.size - others.size
            rest = others
        fresh = np.unique(rest[:4096])  # new ones; most blocks have none
        if len(counts) + len(fresh) > _MOST_VALUES:
            return None
        counts |= {float(value): 0 for value in fresh}
    return counts


def _row_outcomes(mask: Mask) -> dict[Format, RowOutcome]:
    totals = {form: np.zeros(len(Effect), np.int64) for form in Format}
    for _, _, view in views(mask):
        for rows, block in view.blocks():
            if not view.k_len:
                continue
            added = np.broadcast_to(view.added(rows), block.shape)
            top = np.where(block, added, -np.inf).max(-1)  # (rows,)
            for form in Format:
                totals[form] += np.bincount(_effects(top, form), minlength=len(Effect))
    return {form: RowOutcome(*total[:3].tolist()) for form, total in totals.items()}
