"""What `attncli capture` does: run a model, write a bundle, say what is in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from rich.console import RenderableType

from attncli.analysis.options import integers
from attncli.attention.problem import choose_device
from attncli.cli.commands import CaptureOptions, PrintOptions
from attncli.cli.output import Record, write_result
from attncli.columns import columns_of, record_of
from attncli.errors import CheckFailedError, DataError, UsageError, option_name
from attncli.files.target import require_target
from attncli.files.text import shown
from attncli.recording.capture import Capture
from attncli.recording.recorder import CapturedGroup
from attncli.report import Format
from attncli.report.printer import Printer
from attncli.report.table import record_table
from attncli.signals import undoing

COLUMNS = columns_of(CapturedGroup)
# Lists longer than this are counted in tables.
_LISTED = 4


@contextmanager
def _no_empty_cache() -> Iterator[None]:
    """Take back the folder for compiled models that torch makes in passing, if it stayed empty."""
    folder, pattern = Path(gettempdir()), "torchinductor_*"
    before = set(folder.glob(pattern))

    def remove() -> None:
        for path in set(folder.glob(pattern)) - before:
            with suppress(OSError):
                path.rmdir()

    with undoing(remove):
        try:
            yield
        finally:
            remove()


@_no_empty_cache()
def run(options: CaptureOptions, output: PrintOptions) -> None:
    """Capture, print, and fail if it is asked for and the self-check does.

    Raises:
        CheckFailedError: what was recorded of a layer is not what the model did.
    """
    printer = Printer(color=output.color, quiet=output.quiet)
    require_target(options.output)
    layers = integers("«layers»", options.layers)
    models = _models()
    generates = options.generate is not None
    device = choose_device(options.device)
    # Libraries draw their progress on standard error, whoever reads it.
    seen = not output.quiet and sys.stderr.isatty()
    with nullcontext() if seen else redirect_stderr(StringIO()):
        model = models.load(options.model, dtype=options.dtype, device=device, generates=generates)
    printer.warn(model.warnings)
    runs = _runs(options, model)
    with Capture(model.module, options.output, layers=layers, trace=options.trace) as recorded:
        for one in runs:
            model.run(one, recorded, generate=options.generate)
    printer.warn(recorded.warnings)
    groups = list(recorded.groups.values())
    printer.wrote(options.output)
    half = sorted({group.dtype for group in groups} & {"bfloat16", "float16"})
    if half:
        said = "its own weights carry that rounding, those that attncli computes of it do not"
        printer.note(f"the model ran in {' and '.join(half)}: {said}")
    records = [record_of(group) for group in groups]
    if output.format is Format.CSV:
        records = [r | {"options": json.dumps(r["options"])} for r in records]
    write_result(
        output,
        printer,
        command="capture",
        columns=COLUMNS,
        records=records,
        inputs={"model": {"source": options.model, "class": type(model.module).__name__}},
        params={
            "generate": options.generate,
            "layers": None if layers is None else list(layers),
            "trace": options.trace,
            "device": str(device),
        },
        show=lambda found: _tables(found, printer, output.digits),
    )
    failed = [group.group for group in groups if group.failed]
    if options.strict and failed:
        raise CheckFailedError("«strict»", f"expected no layer to be off, got {', '.join(failed)}")


def _models() -> Any:
    """What needs transformers."""
    try:
        return import_module("attncli.recording.models")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        problem = "expected transformers to be installed, got none"
        raise UsageError("MODEL", problem, "pip install 'attncli[capture]'") from error


def _runs(options: CaptureOptions, model: Any) -> list[Any]:
    if options.ids is not None:
        return [model.ids_run(options.ids)]
    if options.inputs is not None:
        return [model.inputs_run(options.inputs)]
    texts = [*(options.text or []), *map(_read, options.text_file or [])]
    found: list[Any] = model.text_runs(
        texts,
        batch=options.batch,
        max_length=options.max_length,
        generates=options.generate is not None,
    )
    return found


def _read(path: str) -> str:
    """The text of a file, or of standard input.

    Raises:
        DataError: it cannot be read.
    """
    try:
        if Path(path).is_char_device():
            raise DataError(shown(path), "expected a text, got a device")
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(shown(path), f"expected a text, got: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(shown(path), "expected a text in UTF-8, got other bytes") from None


def _tables(records: list[Record], printer: Printer, digits: int) -> list[RenderableType]:
    said = [record | {"options": _words(record["options"])} for record in records]
    return [record_table(COLUMNS, said, printer, digits=digits)]


def _words(options: dict[str, Any]) -> str:
    """Options as they would be typed, long lists counted."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        text = f"[{len(values)}]" if len(values) > _LISTED else ",".join(map(_number, values))
        words += [option_name(name)] if value is True else [option_name(name), text]
    return " ".join(words)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
