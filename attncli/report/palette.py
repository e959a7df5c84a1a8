"""The colours of pictures: even ramps for light and dark pages, for weights and for signed values.

A ramp is given by a few stops in OKLCH (lightness, chroma, hue) and spaced anew, so that equal
steps of a value are equal steps to the eye; 0 is the colour of the page. Lightness runs one way
along each, so that it holds in grey and for eyes that see fewer colours.

Source: B. Ottosson, "A perceptual color space for image processing" (2020), for OKLab.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray

Colours = NDArray[np.uint8]
Stop = tuple[float, float, float, float]  # place on the ramp, lightness, chroma, hue in degrees

COUNT = 256  # colours of a ramp
# Two halves of a ramp of signed values meet there. Less than 0 is blue, more orange.
EVEN = (COUNT - 1) / 2


class Theme(StrEnum):
    """What a picture stands on."""

    LIGHT = "light"
    DARK = "dark"


_SEQUENTIAL: dict[Theme, Sequence[Stop]] = {
    Theme.LIGHT: (
        (0.00, 0.985, 0.008, 100),
        (0.25, 0.860, 0.075, 190),
        (0.55, 0.620, 0.115, 235),
        (0.80, 0.420, 0.130, 275),
        (1.00, 0.240, 0.090, 300),
    ),
    Theme.DARK: (
        (0.00, 0.215, 0.020, 285),
        (0.25, 0.380, 0.130, 285),
        (0.55, 0.580, 0.130, 235),
        (0.80, 0.780, 0.120, 175),
        (1.00, 0.970, 0.060, 105),
    ),
}
# From the page outwards: first what is below 0, then what is above.
_DIVERGING: dict[Theme, tuple[Sequence[Stop], Sequence[Stop]]] = {
    Theme.LIGHT: (
        ((0.0, 0.985, 0.004, 240), (0.5, 0.76, 0.10, 245), (1.0, 0.38, 0.13, 265)),
        ((0.0, 0.985, 0.006, 75), (0.5, 0.79, 0.12, 58), (1.0, 0.44, 0.15, 36)),
    ),
    Theme.DARK: (
        ((0.0, 0.215, 0.012, 280), (0.5, 0.52, 0.13, 252), (1.0, 0.88, 0.08, 225)),
        ((0.0, 0.215, 0.012, 40), (0.5, 0.56, 0.14, 42), (1.0, 0.91, 0.11, 82)),
    ),
}
# Numbers of colours that terminals of 256 have, 16 + 36r + 6g + b. Of those nearest to a ramp some
# are grey, and violet among blue; these run one way in lightness and in hue.
_FEW = (16, 17, 18, 19, 25, 31, 37, 43, 79, 115, 151, 187, 230)
_FEW_SIGNED = (159, 117, 75, 33, 26, 25, 18, 17, 16, 52, 88, 94, 130, 166, 172, 215, 222)
_TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


@cache
def sequential(theme: Theme = Theme.LIGHT) -> Colours:
    """Colours of 0 to 1 for weights, sRGB (256, 3)."""
    return _ramp(_SEQUENTIAL[theme], COUNT)


@cache
def diverging(theme: Theme = Theme.LIGHT) -> Colours:
    """Colours of −1 to 1 for signed values, sRGB (256, 3); the page's stands between the halves."""
    below, above = (_ramp(stops, COUNT // 2) for stops in _DIVERGING[theme])
    return np.concatenate([below[::-1], above])


def colours_of(values: NDArray[np.floating], ramp: Colours) -> Colours:
    """The colours of values from 0 to 1 on a ramp, (…, 3); what is beyond is clipped, NaN is 0."""
    places = np.rint(np.clip(np.nan_to_num(values), 0, 1) * (len(ramp) - 1))
    found: Colours = ramp[places.astype(np.intp)]
    return found


def text_on(colours: Colours) -> NDArray[np.bool_]:
    """Whether text on these colours (…, 3) is to be dark; otherwise light."""
    dark: NDArray[np.bool_] = colours @ np.array([0.2126, 0.7152, 0.0722]) > 135
    return dark


@cache
def few_colours(*, signed: bool) -> Colours:
    """The dark ramp, signed or not, for terminals of 256 colours, sRGB (256, 3)."""
    numbers = np.array(_FEW_SIGNED if signed else _FEW) - 16
    levels = np.array([0, 95, 135, 175, 215, 255], np.uint8)
    colours = levels[np.stack([numbers // 36, numbers // 6 % 6, numbers % 6], -1)]
    repeated: Colours = colours[np.arange(COUNT) * len(colours) // COUNT]
    return repeated


def hexes(ramp: Colours) -> str:
    """A ramp as one word of six hexadecimal digits a colour."""
    return ramp.tobytes().hex()


def _ramp(stops: Sequence[Stop], count: int) -> Colours:
    """Colours through the stops, evenly spaced by their distance in OKLab."""
    places, lightness, chroma, hue = np.array(stops, np.float64).T
    fine = np.linspace(0, 1, 2001)
    parts = [np.interp(fine, places, part) for part in (lightness, chroma, np.radians(hue))]
    lab = np.stack([parts[0], parts[1] * np.cos(parts[2]), parts[1] * np.sin(parts[2])], -1)
    rgb = _srgb(lab)
    steps = np.linalg.norm(np.diff(oklab(rgb), axis=0), axis=1)
    way = np.concatenate([[0.0], np.cumsum(steps)])
    even = np.interp(np.linspace(0, way[-1], count), way, fine)
    spaced = np.stack([np.interp(even, fine, channel) for channel in rgb.T], -1)
    found: Colours = np.rint(spaced * 255).astype(np.uint8)
    return found


def oklab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where sRGB colours from 0 to 1, (…, 3), stand in OKLab."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    found: NDArray[np.float64] = np.cbrt(linear @ _TO_CONES.T) @ _TO_LAB.T
    return found


def _srgb(lab: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sRGB colours at places in OKLab, clipped to what a screen shows."""
    linear = (lab @ np.linalg.inv(_TO_LAB).T) ** 3 @ np.linalg.inv(_TO_CONES).T
    linear = linear.clip(0, 1)
    curved = 1.055 * linear ** (1 / 2.4) - 0.055
    return np.where(linear <= 0.0031308, linear * 12.92, curved)
