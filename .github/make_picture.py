"""Draw the pictures of README and docs: the real output of commands, in colour, as SVG.

python .github/make_picture.py
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
# Name of the picture → its width in columns, and the command.
PICTURES = {
    "compute": (88, "compute --causal --stage scaled,masked,weights,output"),
    "heatmap": (
        112,
        "compute sample_inputs/minilm.safetensors --group layers.3 --head-index 1 --digits 2 "
        "--heatmap",
    ),
}


def draw(name: str, width: int, command: str) -> None:
    """Run a command and write what it printed next to this script."""
    environment = os.environ | {"COLORTERM": "truecolor"}
    program = [sys.executable, "-m", "attncli", *command.split(), "--color", "always"]
    ran = subprocess.run(
        program, env=environment, capture_output=True, text=True, check=True, cwd=HERE.parent
    )
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]$[/bold] attncli {command}", highlight=False)
    console.print(Text.from_ansi(ran.stdout.rstrip()))
    console.save_svg(str(HERE / f"{name}.svg"), title="attncli", unique_id="attncli")


if __name__ == "__main__":
    for name, (width, command) in PICTURES.items():
        draw(name, width, command)
