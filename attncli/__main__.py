"""The program: `attncli`, and `python -m attncli`."""

from importlib import import_module

from attncli.signals import end_cleanly


def main() -> None:
    """Entry point of the `attncli` command."""
    # First: whoever interrupts a program that is still being loaded wants no traceback either.
    end_cleanly()
    import_module("attncli.cli.app").main()


if __name__ == "__main__":
    main()
