"""A report in a browser, and numbers as it writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Report = Callable[[str], Path]
HOSTILE = (
    "</script><script>window.evil = 1</script>",
    "<!--",
    '"><img src=x onerror="window.evil = 1">',
    "猫が",
    "مرحبا",
    "x" * 60,
    "\n",
    "",
    "Ġthe",
    "{name}",
)


def bundle(path: Path, length: int, tokens: list[str], heads: int = 2) -> Path:
    """One group of random Q and K, whose metadata name the tokens."""
    draw = torch.Generator().manual_seed(1)
    tensors = {
        f"layers.0.{name}": torch.randn(1, heads, length, 8, generator=draw) for name in "qk"
    }
    options = {"layers.0": {"scale": 8**-0.5, "labels": tokens}}
    save_file(tensors, path, {"attncli": json.dumps(options)})
    return path


@dataclass
class Opened:
    """A report in a page of its own.

    Attributes:
        page: Playwright's.
        messages: of the console, and errors.
        requests: addresses of what was asked for.
    """

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def hear_console(self, message: Any) -> None:
        """What the page, or the browser about it, said."""
        self.messages.append(message.text)

    def hear_error(self, error: Any) -> None:
        """What its scripts did not catch."""
        self.messages.append(str(error))

    def hear_request(self, request: Any) -> None:
        """What it asked for."""
        self.requests.append(request.url)

    def text(self, selector: str) -> str:
        """What an element says."""
        return str(self.page.locator(selector).inner_text())

    def texts(self, selector: str) -> list[str]:
        """What several say."""
        return [str(text) for text in self.page.locator(selector).all_inner_texts()]

    def press(self, *keys: str) -> None:
        """Keys, one after another."""
        for key in keys:
            self.page.keyboard.press(key)

    def click(self, selector: str) -> None:
        """A click with the mouse."""
        self.page.locator(selector).click()

    def slide(self, selector: str, value: float) -> None:
        """A slider moved to a value."""
        self.page.locator(selector).evaluate(
            "(e, value) => { e.value = value; e.dispatchEvent(new Event('input')); }", value
        )

    def run(self, script: str, argument: Any = None) -> Any:
        """JavaScript in the page."""
        return self.page.evaluate(script, argument)


Open = Callable[..., Opened]


@dataclass(frozen=True)
class Layer:
    """Q and K of a group of MiniLM, float32 (1, 12, 16, 32), and its scale."""

    q: torch.Tensor
    k: torch.Tensor
    scale: float
    tokens: list[str]


RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def fixed(x: float, digits: int = 2) -> str:
    """With so many decimals and a true minus, which zero has none of."""
    text = f"{x:.{digits}f}".replace("-", "−").replace("inf", "∞").replace("nan", "NaN")
    return text if text.strip("−0.") else text.strip("−")


def weight(w: float) -> str:
    """Four decimals, and two digits of what is smaller."""
    if w == 0 or w >= 1e-4:
        return "0" if w == 0 else f"{w:.4f}"
    digits, power = f"{w:.1e}".split("e")
    return f"{digits}·10{str(int(power)).translate(RAISED)}"
