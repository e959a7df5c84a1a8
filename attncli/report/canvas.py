"""How pictures look and are written: one style, maps and curves that name themselves, no display.

Needs matplotlib, of which it takes the objects alone: nothing is kept in memory and no window is
opened. Pictures of the same numbers are the same bytes.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Colormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from attncli.attention.pooling import Edges, Pool
from attncli.files.target import atomic_path
from attncli.files.text import shown
from attncli.report.palette import diverging, sequential, text_on

Values = NDArray[np.float64]
Labels = Sequence[str] | None

INK, MUTED, RULE, HIDDEN = "#1d1b26", "#6a6775", "#e2dfd4", "#e4e2dc"
PLAIN, WARM = "#4a4bb0", "#b8521a"
DPI = 144
POINTS = 72.0
TICK_SIZE = 8.0
TITLE_SIZE = 11.0
NAME_LENGTH = 14
# A text takes so much of a cell at most.
ROOM = 0.85
SMALLEST_TEXT = 5.5
ROUND_STEPS = [size * 10**power for power in range(12) for size in (1, 2, 5)]
# Width of a digit of the text font in units of its size.
DIGIT = 0.64

# The text font has no ideographs: the first of these that is installed lends them.
IDEOGRAPHS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans GB",
    "WenQuanYi Zen Hei",
    "SimHei",
)
STYLE: dict[str, Any] = {
    "font.size": 9,
    "text.parse_math": False,  # a token may hold dollars
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#b5b1a6",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "axes.formatter.use_mathtext": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": TICK_SIZE,
    "ytick.labelsize": TICK_SIZE,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "svg.hashsalt": "attncli",
    "svg.fonttype": "none",
}
# What would differ from one run to the next, or name who drew it.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": "attncli"},
    "pdf": {"CreationDate": None, "Creator": "attncli", "Producer": None},
}


def _ramp(colours: NDArray[np.uint8], name: str) -> Colormap:
    return ListedColormap(colours / 255, name).with_extremes(bad=HIDDEN)


SEQUENTIAL = _ramp(sequential(), "attncli sequential")
DIVERGING = _ramp(diverging(), "attncli diverging")


class Picture(Figure):
    """A figure that a notebook shows, whether or not one of matplotlib's back ends is set up."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self._write(buffer, "png")
        return buffer.getvalue()

    def write(self, target: str) -> None:
        """Write it; the file appears whole or not at all.

        Args:
            target: the file, whose suffix says the format: .png, .svg or .pdf.

        Raises:
            DataError: the place cannot be written.
            ResourceError: the disk is full.
        """
        with atomic_path(Path(target)) as path, path.open("ab") as file:
            self._write(file, Path(target).suffix[1:].lower())

    def _write(self, file: Any, form: str) -> None:
        with styled():
            self.savefig(file, format=form, metadata=METADATA[form], bbox_inches="tight")


@contextmanager
def styled() -> Iterator[None]:
    """The style of the pictures in the place of whatever else is set."""
    with matplotlib.style.context(STYLE | {"font.family": list(families())}, after_reset=True):
        yield


@cache
def families() -> tuple[str, ...]:
    """The fonts that texts are drawn in, each for what the ones before it lack."""
    installed = {font.name for font in fontManager.ttflist}
    return ("DejaVu Sans", *[name for name in IDEOGRAPHS if name in installed][:1])


@cache
def _drawable() -> frozenset[int]:
    """Code points that the fonts have."""
    return frozenset().union(*(get_font(findfont(name)).get_charmap() for name in families()))


def drawable(text: str, limit: int = NAME_LENGTH) -> str:
    """A text as the fonts can draw it: cut, and what they lack as U+1F916."""
    return "".join(
        sign if ord(sign) in _drawable() else f"U+{ord(sign):04X}" for sign in shown(text, limit)
    )


def picture(title: str, width: float, height: float, *, compress: bool = False) -> Picture:
    """An empty picture with what made it above; to be called within `styled`.

    Args:
        title: what made it, and after a dot what is to be known of it.
        width, height: in inches, without the title.
        compress: whether panels of fixed shape move together.
    """
    letters = max(64, int(width * POINTS / (TITLE_SIZE * 0.56)))
    command, _, notes = title.partition(" · ")
    lines = textwrap.wrap(drawable(command, 2 * letters - 20), letters)
    lines += textwrap.wrap(drawable(notes, 400), letters)
    strip = (0.6 + 1.3 * len(lines)) * TITLE_SIZE / POINTS
    layout = ConstrainedLayoutEngine(
        w_pad=0.06, h_pad=0.06, rect=(0, 0, 1, height / (height + strip)), compress=compress
    )
    made = Picture(figsize=(width, height + strip), layout=layout)
    top = 1 - 0.08 / (height + strip)
    made.text(0.008, top, "\n".join(lines), va="top", size=TITLE_SIZE, color=MUTED)
    return made


# ── maps ─────────────────────────────────────────────────────────────────────────────────────


def signed_scale(*parts: Values) -> Normalize:
    """Of values of both signs: symmetric about 0, and no wider than the most of three medians."""
    sizes = [float(np.nanmax(np.abs(part))) for part in parts if np.isfinite(part).any()]
    reach = min(max(sizes), 3 * float(np.median(sizes))) if any(sizes) else 1.0
    return Normalize(-(reach or 1.0), reach or 1.0)


WEIGHT = "weight, log; page: a tenth of even"


def weight_scale(keys: int) -> LogNorm:
    """Of weights: logarithmic, from a tenth of even attention to 1."""
    return LogNorm(0.1 / max(1, keys), 1.0, clip=True)


def draw_map(axes: Axes, values: Values, norm: Normalize) -> AxesImage:
    """Cells of a matrix, the first row on top; NaN is hidden, which no value looks like.

    Of no cells one that is hidden is drawn.
    """
    signed = norm.vmin is not None and norm.vmin == -(norm.vmax or 0.0)
    ramp = DIVERGING if signed else SEQUENTIAL
    cells = np.ma.masked_invalid(values if values.size else np.full((1, 1), np.nan))
    image = axes.imshow(cells, ramp, norm, aspect="auto", interpolation="nearest")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


def name_axis(
    axes: Axes, which: str, names: Sequence[str], inches: float, *, tokens: bool = False
) -> None:
    """Names along an edge of a map, as many as there is room for.

    Args:
        axes: of the map.
        which: "x" or "y".
        names: one for each cell; none to leave the edge bare.
        inches: how long the edge is.
        tokens: whether they are words, which stand aslant along x.
    """
    widest = max(map(len, names), default=1)
    beside = which == "y" or tokens  # each takes the height of a line
    needed = TICK_SIZE * (1.25 if beside else DIGIT * widest + 1)
    step = max(1, math.ceil(needed * len(names) / (inches * POINTS)))
    if not tokens:
        step = next(size for size in ROUND_STEPS if size >= step)
    places = range(0, len(names), step)
    aslant = {"rotation": 55, "ha": "left", "rotation_mode": "anchor"}
    axis = axes.xaxis if which == "x" else axes.yaxis
    texts = [names[place] for place in places]
    axis.set_ticks(places, texts, **(aslant if which == "x" and tokens else {}))  # type: ignore[arg-type]


def room_for(labels: Labels) -> float:
    """Inches that tokens take which stand aslant along x."""
    longest = max((len(drawable(name)) for name in labels or ()), default=0)
    return longest * TICK_SIZE * DIGIT * 0.82 / POINTS


def print_values(
    axes: Axes, image: AxesImage, values: Values, inches: tuple[float, float], digits: int
) -> None:
    """The numbers of a map in its cells, with as many decimals as fit, or none of them.

    Args:
        axes: of the map.
        image: the map.
        values: of its cells; NaN is hidden.
        inches: how wide and high it is.
        digits: decimals at most.
    """
    down, across = (max(1, length) for length in values.shape)
    wide, high = (side * POINTS * ROOM for side in (inches[0] / across, inches[1] / down))
    for decimals in range(digits, min(digits, 2) - 1, -1):
        words = [[f"{value:.{decimals}f}".replace("-", "−") for value in row] for row in values]
        longest = max((len(word) for row in words for word in row if word != "nan"), default=1)
        size = min(8.0, high, wide / (DIGIT * longest))
        if size >= SMALLEST_TEXT:
            break
    else:
        return
    dark = text_on(np.asarray(image.to_rgba(values, bytes=True))[..., :3])
    for row, column in np.argwhere(~np.isnan(values)).tolist():
        ink = INK if dark[row, column] else "white"
        word = words[row][column]
        axes.text(column, row, word, ha="center", va="center", size=size, color=ink)


def draw_scale(
    image: AxesImage,
    beside: Any,
    label: str,
    inches: float,
    *,
    below: bool = False,
    extend: bool = False,
) -> Colorbar:
    """What the colours of a map mean: to its right, or below it.

    Args:
        image: the map.
        beside: the axes that it stands at.
        label: the quantity, with its unit.
        inches: about how long it is.
        below: whether it lies.
        extend: whether there are values beyond its ends, which is drawn as points.
    """
    place: dict[str, Any] = {"location": "bottom", "shrink": 0.9} if below else {"aspect": 24}
    figure = image.get_figure(root=True)
    assert figure is not None  # it has been drawn on one
    ends = "both" if extend else "neither"
    bar = figure.colorbar(image, ax=beside, pad=0.02, extend=ends, **place)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, which="both")
    bar.set_label(label, color=MUTED, size=TICK_SIZE)
    if isinstance(image.norm, LogNorm):
        named = _log_marks(image.norm, inches)
        bar.set_ticks(list(named), labels=list(named.values()))
        bar.ax.minorticks_off()
    else:
        bar.locator = MaxNLocator(5, steps=[1, 2, 5, 10])
        bar.update_ticks()
    return bar


def _log_marks(norm: LogNorm, inches: float) -> dict[float, str]:
    """Marks of a scale of weights: even attention, and the powers of ten that stand clear of it."""
    lowest = float(norm.vmin or 1.0)
    even, decades = 10 * lowest, -math.log10(lowest)
    near = 30 * decades / (inches * POINTS)  # the length of a word, in decades
    powers = [10.0**power for power in range(math.ceil(math.log10(lowest) - 1e-9), 1)]
    clear = [power for power in powers if abs(math.log10(power / even)) > near]
    return {even: "even"} | {power: f"{power:g}" for power in clear}


def from_right(names: Sequence[str], limit: int = 18) -> list[str]:
    """Names cut at their beginning: those of layers differ at the end."""
    return [drawable(n if len(n) <= limit else "…" + n[1 - limit :], limit) for n in names]


def pool_names(edges: Edges, labels: Labels, first: int = 0) -> list[str]:
    """Names of the places along an axis: tokens, or where each begins if several are pooled.

    Args:
        edges: of a `Pool`.
        labels: a token for each position; None for none.
        first: position of the first of them.
    """
    names = []
    for start, stop in itertools.pairwise(edges.tolist()):
        at = start + first
        named = labels is not None and stop - start == 1 and 0 <= at < len(labels)
        names.append(drawable(labels[at]) if labels is not None and named else str(start))
    return names


def pooled_words(pools: Iterable[Pool]) -> str:
    """What a title says where cells are means: of how many, on how many."""
    for pool in pools:
        if pool.pooled:
            sizes = (
                " × ".join(f"{n:,}" for n in shape if n > 1)
                for shape in (pool.shape, pool.sums.shape)
            )
            return " · {} cells as {} means".format(*sizes)
    return ""


def log_axis(axes: Axes) -> None:
    """A logarithmic y axis, whose marks are as plain numbers, even where it spans no decade."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")


# ── curves ───────────────────────────────────────────────────────────────────────────────────


def shade_of(place: int, count: int) -> tuple[float, ...]:
    """The colour of one curve among several, none of them as pale as the page."""
    return tuple(SEQUENTIAL(0.3 + 0.65 * place / max(1, count - 1)))


def name_curves(axes: Axes, ends: Sequence[tuple[float, float, str, Any]], inches: float) -> None:
    """Names of curves at their ends, pushed apart where they would overlap.

    Args:
        axes: with its limits set.
        ends: x and y of the end of each curve, its name, its colour.
        inches: how high the axes are.
    """
    needed = TICK_SIZE * 1.25 / (inches * POINTS)
    heights = [
        float(axes.transLimits.transform(axes.transScale.transform((x, y)))[1]) for x, y, *_ in ends
    ]
    order = sorted(range(len(ends)), key=heights.__getitem__)
    placed: list[float] = []
    for index in order:
        placed.append(max(heights[index], placed[-1] + needed if placed else 0.0))
    ceiling = 1.0
    for at in reversed(range(len(placed))):
        placed[at] = min(placed[at], ceiling)
        ceiling = placed[at] - needed
    for height, index in zip(placed, order, strict=True):
        x, y, name, colour = ends[index]
        axes.annotate(
            name,
            (x, y),
            (6, (height - heights[index]) * inches * POINTS),
            textcoords="offset points",
            va="center",
            color=colour,
            size=TICK_SIZE,
            weight="bold",
            annotation_clip=False,
        )
