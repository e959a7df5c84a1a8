"""The colour of a number: weights from none to all, signed numbers from below 0 to above."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.color import Color
from rich.style import Style

from attncli.report import ColourScale
from attncli.report.palette import (
    Colours,
    Theme,
    colours_of,
    diverging,
    few_colours,
    sequential,
    text_on,
)

Numbers = NDArray[np.float64]

# Of the most terminals. What stands on it has a colour of its own and can be read on others too.
RAMP, SIGNED_RAMP = sequential(Theme.DARK), diverging(Theme.DARK)
FEW_RAMP, FEW_SIGNED_RAMP = few_colours(signed=False), few_colours(signed=True)
# Hidden by the mask, or no number: a grey that is on neither ramp.
HIDDEN = (72, 72, 76)
DARK_TEXT, LIGHT_TEXT = Color.from_rgb(22, 20, 29), Color.from_rgb(245, 243, 238)
# Weights below this share of even attention are as none on a log scale.
FLOOR = 0.1
# Multiples of even attention from 2⁻⁵ to 2⁵.
OCTAVES = 5.0
# What is left of a colour in columns that are left out of the scale.
FADED = 0.28


@dataclass(frozen=True, slots=True)
class Shading:
    """How numbers become places on a ramp, from 0 to 1.

    Attributes:
        scale: None for signed numbers, 0 in the middle.
        even: what one of all keys would get of a weight of 1.
        top: the largest number in size that is to be told apart.
        skip_first: so many columns at the beginning are left out of the scale, and fade.
        few: whether there are 256 colours to choose from.
    """

    scale: ColourScale | None
    even: float
    top: float
    skip_first: int = 0
    few: bool = False

    @classmethod
    def of(
        cls,
        values: Numbers,
        scale: ColourScale | None,
        keys: int,
        skip_first: int = 0,
        *,
        few: bool = False,
    ) -> Shading:
        """The shading that suits these numbers (…, columns).

        Args:
            values: what is to be told apart; NaN where there is nothing.
            scale: of weights; None for signed numbers.
            keys: how many a query could see.
            skip_first: columns at the beginning.
            few: whether there are 256 colours to choose from.
        """
        rest = np.abs(values[..., skip_first:])
        rest = rest[np.isfinite(rest)]
        top = float(rest.max(initial=0.0)) or 1.0
        return cls(scale, 1 / max(1, keys), top, skip_first, few)

    @property
    def floor(self) -> float:
        """The weight that a log scale begins with."""
        return FLOOR * self.even

    @property
    def ramp(self) -> Colours:
        """The colours of 0 to 1."""
        if self._signed:
            return FEW_SIGNED_RAMP if self.few else SIGNED_RAMP
        return FEW_RAMP if self.few else RAMP

    @property
    def _signed(self) -> bool:
        return self.scale in (None, ColourScale.EVEN)

    def places(self, values: Numbers, keys_seen: Numbers | None = None) -> Numbers:
        """Where numbers (R, C) stand on the ramp, 0 to 1; NaN for what is no number.

        Args:
            values: weights, or signed numbers.
            keys_seen: (R,), how many keys a query sees; None for all keys.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            match self.scale:
                case None:
                    found = 0.5 + values / self.top / 2
                case ColourScale.LINEAR:
                    found = values / self.top
                case ColourScale.SQRT:
                    found = np.sqrt(values / self.top)
                case ColourScale.LOG:
                    found = 1 - np.log(values) / math.log(self.floor)
                case ColourScale.EVEN:
                    seen = np.array([1 / self.even]) if keys_seen is None else keys_seen
                    found = 0.5 + np.log2(values * seen[:, None]) / OCTAVES / 2
        clipped: Numbers = np.clip(found, 0, 1)
        return clipped

    def value_at(self, place: float) -> float:
        """The number that stands there; of `even` the multiple of even attention."""
        match self.scale:
            case None:
                return (2 * place - 1) * self.top
            case ColourScale.LINEAR:
                return place * self.top
            case ColourScale.SQRT:
                return place**2 * self.top
            case ColourScale.LOG:
                return float(self.floor ** (1 - place))
            case ColourScale.EVEN:
                return float(2 ** ((2 * place - 1) * OCTAVES))

    def colours(
        self, values: Numbers, hidden: NDArray[np.bool_], keys_seen: Numbers | None = None
    ) -> Colours:
        """The colours of numbers (R, C), sRGB (R, C, 3)."""
        places = self.places(values, keys_seen)
        found = colours_of(places, self.ramp)
        page = self.ramp[len(self.ramp) // 2 if self._signed else 0]
        faded = found[:, : self.skip_first] * FADED + page * (1 - FADED)
        found[:, : self.skip_first] = np.rint(faded).astype(np.uint8)
        found[hidden | np.isnan(places)] = HIDDEN
        return found


def shade(share: float, *, few: bool = False) -> Style:
    """The style of a number that stands so far between the smallest, 0, and the largest, 1."""
    return style_on(colours_of(np.array(share), FEW_RAMP if few else RAMP))


def style_on(colour: Colours) -> Style:
    """The style of text on one colour (3,)."""
    return Style(color=DARK_TEXT if text_on(colour) else LIGHT_TEXT, bgcolor=rich_colour(colour))


def rich_colour(colour: Colours) -> Color:
    """One colour (3,) for rich."""
    return Color.from_rgb(*colour.tolist())
