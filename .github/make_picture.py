"""Draw README's picture: the real output of a command, in colour, as SVG.

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
COMMAND = ["compute", "--causal", "--stage", "scaled,masked,weights,output"]
WIDTH = 88


def main() -> None:
    """Run the command and write what it printed next to this script."""
    environment = os.environ | {"COLORTERM": "truecolor"}
    program = [sys.executable, "-m", "attncli", *COMMAND, "--color", "always"]
    printed = subprocess.run(
        program, env=environment, capture_output=True, text=True, check=True
    ).stdout
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]$[/bold] attncli {' '.join(COMMAND)}", highlight=False)
    console.print(Text.from_ansi(printed.rstrip()))
    console.save_svg(str(HERE / "compute.svg"), title="attncli", unique_id="attncli")


if __name__ == "__main__":
    main()
