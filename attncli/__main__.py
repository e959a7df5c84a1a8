"""The program: `attncli`, and `python -m attncli`."""

import os
from importlib import import_module

try:
    from attncli.signals import end_cleanly
except KeyboardInterrupt:  # until that is loaded, Python has its own handler, of SIGINT alone
    os.write(2, b"attncli: interrupted\n")
    os._exit(130)


def main() -> None:
    """Entry point of the `attncli` command."""
    # First: whoever interrupts a program that is still being loaded wants no traceback either.
    end_cleanly()
    import_module("attncli.cli.app").main()


if __name__ == "__main__":
    main()
