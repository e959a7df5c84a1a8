"""Nothing may ever import this: hostile pickles ask for it."""


def run(*_: object) -> None:
    """Nor call this."""
    raise SystemExit("a file has run code")


raise SystemExit("a file has loaded a module")
