"""Results show themselves in notebooks: a short word, tables, pictures and a page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attncli
from attncli.report.canvas import Picture

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 1, 4, 12, 8))
LONG = RNG.standard_normal((2, 1, 80, 3, 4))


def results() -> dict[str, Any]:
    """One of each kind."""
    wrong = attncli.compute(Q, K, V).stages["output"]
    return {
        "compute": attncli.compute(Q[:, :1, :4], K[:, :1, :4], V[:, :1, :4], causal=True),
        "entropy": attncli.entropy(Q, K, causal=True, sink_keys=2),
        "variance": attncli.variance(Q, K),
        "experiment": attncli.variance(dk=[4, 16], samples=200),
        "check": attncli.check(Q, K, V, actual_output=wrong, causal=True),
        "mask": attncli.mask(9, causal=True, left_window=2),
    }


RESULTS = results()


class Reader(HTMLParser):
    """The tags of a page, their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_notebook_shows(name: str) -> None:
    result = RESULTS[name]
    assert len(repr(result)) < 200
    assert repr(result).startswith(type(result).__name__ + "(")
    shown = Reader(result._repr_html_())
    assert {tag for tag, _ in shown.tags} <= {"pre", "span"}
    assert {key for _, attributes in shown.tags for key in attributes} <= {"style"}
    # Text is in the notebook's own colour, in one between light and dark, or on one of its own.
    frame = shown.tags[0][1]["style"] or ""
    assert "color:inherit" in frame
    for _, attributes in shown.tags[1:]:
        style = attributes["style"] or ""
        # 0087d7 is 2e86de among 256 colours: rich keeps a style as it was rendered first.
        if (
            re.search(r"(?<!-)color: #(?!7f7f7f|2e86de|0087d7)", style)
            and "font-weight" not in style
        ):
            assert "background-color" in style


def test_it_shows_the_numbers() -> None:
    found = RESULTS["entropy"]
    text = Reader(found._repr_html_()).text
    for head in found.heads:
        assert f"{head.entropy_bits_mean:.4f}" in text
    cells = RESULTS["compute"].stages["weights"][0, 0]
    text = Reader(RESULTS["compute"]._repr_html_()).text
    for value in cells[np.tri(4, dtype=bool)].tolist():
        assert f"{value:.4f}" in text
    assert "OFF, explained by causal:missing" in Reader(RESULTS["check"]._repr_html_()).text


def test_long_results_are_cut_and_say_so() -> None:
    text = Reader(attncli.entropy(*LONG)._repr_html_()).text
    assert "… 32 more heads" in text
    assert text.count("\n") < 80
    text = Reader(attncli.compute(Q, K)._repr_html_()).text
    assert "stages of more than 1024 values are not listed" not in text
    text = Reader(attncli.compute(*LONG[:, :, :, :3].repeat(7, 2))._repr_html_()).text
    assert "stages of more than 1024 values are not listed" in text


@pytest.mark.parametrize("name", RESULTS)
def test_pictures_are_figures_that_show_themselves(name: str, tmp_path: Path) -> None:
    figure = RESULTS[name].plot()
    assert isinstance(figure, Picture)
    assert any(axes.images or axes.lines for axes in figure.axes)
    if name == "mask":
        again = RESULTS[name].plot(str(tmp_path / "x.png"))
        assert (tmp_path / "x.png").read_bytes() == figure._repr_png_() == again._repr_png_()


def test_a_picture_of_heads_has_their_numbers() -> None:
    found = RESULTS["entropy"]
    grid = found.plot().axes[0].images[0].get_array()
    np.testing.assert_allclose(grid, found.column("entropy_bits_mean"), rtol=1e-12)
    kept = attncli.entropy(Q, K, causal=True, sink_keys=2, per_key=True)
    for axes, other in zip(found.plot().axes, kept.plot().axes, strict=True):
        assert axes.get_title(loc="left") == other.get_title(loc="left")
        for image, same in zip(axes.images, other.images, strict=True):
            np.testing.assert_allclose(image.get_array(), same.get_array(), rtol=1e-9)
    titles = [axes.get_title(loc="left") for axes in kept.plot().axes]
    assert "Mean weight on the first 2 keys (0 to 1)" in titles


def test_a_page_about_the_heads(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    RESULTS["entropy"].report(str(path), labels=[f"<i id=x>{n}" for n in range(12)], title="A & B")
    page = Reader(path.read_text("utf-8"))
    assert "A & B" in page.text
    assert ("i", {"id": "x"}) not in page.tags
    entropies = [f"{head.entropy_bits_mean:.6g}" for head in RESULTS["entropy"].heads]
    assert all(number in page.text for number in entropies)
    with pytest.raises(attncli.DataError, match="labels: expected 12, one a key, got 1"):
        RESULTS["entropy"].report(str(path), labels=["a"])


def test_a_path_that_says_no_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(attncli.UsageError, match=r"plot: expected a name that ends in \.png"):
        RESULTS["mask"].plot(str(tmp_path / "x.jpg"))
