"""Ramps are even to the eye, run one way in lightness, and hold for eyes that see fewer colours."""

from __future__ import annotations

import numpy as np
import pytest

from attncli.report.palette import (
    Theme,
    colours_of,
    diverging,
    few_colours,
    hexes,
    oklab,
    sequential,
    text_on,
)

# Machado, Oliveira and Fernandes (2009), severity 1, on linear sRGB.
DEFICIENCIES = {
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(rgb: np.ndarray) -> np.ndarray:
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def seen_by(rgb: np.ndarray, deficiency: str) -> np.ndarray:
    found = (linear(rgb) @ np.array(DEFICIENCIES[deficiency]).T).clip(0, 1)
    return np.where(found <= 0.0031308, found * 12.92, 1.055 * found ** (1 / 2.4) - 0.055)


def lightness(rgb: np.ndarray) -> np.ndarray:
    """CIE L*."""
    luminance = linear(rgb) @ [0.2126, 0.7152, 0.0722]
    return np.where(luminance > 216 / 24389, 116 * np.cbrt(luminance) - 16, luminance * 24389 / 27)


def variation(rgb: np.ndarray) -> float:
    """Standard deviation of the steps over their mean, each taken over eight colours.

    Of one colour 8 bits a channel are a sizeable part of a step.
    """
    steps = np.linalg.norm(np.diff(oklab(rgb[::8]), axis=0), axis=1)
    return float(steps.std() / steps.mean())


HALVES = [
    *(sequential(theme) / 255 for theme in Theme),
    *(diverging(theme)[:128][::-1] / 255 for theme in Theme),
    *(diverging(theme)[128:] / 255 for theme in Theme),
]


@pytest.mark.parametrize("ramp", HALVES)
def test_steps_are_even_and_lightness_runs_one_way(ramp: np.ndarray) -> None:
    assert variation(ramp) < 0.04
    steps = np.diff(lightness(ramp))
    assert (steps > 0).all() or (steps < 0).all()
    assert abs(lightness(ramp)[-1] - lightness(ramp)[0]) > 45


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("theme", Theme)
def test_weights_hold_for_eyes_that_see_fewer_colours(theme: Theme, deficiency: str) -> None:
    seen = seen_by(sequential(theme) / 255, deficiency)
    assert variation(seen) < 0.2
    steps = np.diff(lightness(seen))
    assert (steps > -0.05).all() or (steps < 0.05).all()


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("theme", Theme)
def test_signs_are_told_apart_by_eyes_that_see_fewer_colours(theme: Theme, deficiency: str) -> None:
    seen = oklab(seen_by(diverging(theme) / 255, deficiency))
    for strength in (32, 64, 127):
        below, above = seen[127 - strength], seen[128 + strength]
        assert np.linalg.norm(below - above) > 0.08


@pytest.mark.parametrize("theme", Theme)
def test_nothing_has_the_colour_of_the_page(theme: Theme) -> None:
    page = {Theme.LIGHT: 98, Theme.DARK: 9}[theme]
    for colour in (sequential(theme)[0], diverging(theme)[127], diverging(theme)[128]):
        assert abs(lightness(colour / 255) - page) < 2


def test_values_find_their_colours() -> None:
    ramp = sequential(Theme.LIGHT)
    found = colours_of(np.array([-1.0, 0.0, 0.5, 1.0, 2.0, np.nan]), ramp)
    np.testing.assert_array_equal(found, ramp[[0, 0, 128, 255, 255, 0]])
    assert text_on(ramp[[0, 255]]).tolist() == [True, False]
    assert hexes(ramp)[:6] == "fbfaf4"
    assert len(hexes(ramp)) == 6 * 256


def test_ramps_of_256_colours_run_one_way_in_lightness() -> None:
    rising = lightness(few_colours(signed=False) / 255)
    assert (np.diff(rising) >= 0).all()
    signed = lightness(few_colours(signed=True) / 255)
    middle = len(signed) // 2
    assert (np.diff(signed[:middle]) <= 0).all()
    assert (np.diff(signed[middle:]) >= 0).all()
    below, above = few_colours(signed=True)[[100, 155]].astype(int)
    assert below[2] > below[0]
    assert above[0] > above[2]
