"""The way out for commands whose answer is a list of records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncli.report.choices import Format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import RenderableType

    from attncli.analysis.inputs import Group
    from attncli.columns import Column
    from attncli.report.printer import Printer

Record = dict[str, Any]


def emit(
    form: Format,
    printer: Printer,
    *,
    command: str,
    columns: Sequence[Column],
    records: Iterable[Record],
    inputs: dict[str, Any],
    params: dict[str, Any],
    show: Callable[[list[Record]], Iterable[RenderableType]],
    wrap: Callable[[list[Record]], Any] = list,
) -> None:
    """Print records in the format asked for.

    Args:
        form: what to print.
        printer: where to.
        command: the subcommand, which names the schema.
        columns: the keys of every record, in order.
        records: NDJSON and CSV write them as they come; the others gather them first.
        inputs: what `inputs` of the JSON document says.
        params: what `params` says.
        show: draws the gathered records as tables.
        wrap: makes `data` of the JSON document of the gathered records.
    """
    from attncli.report import document

    if form is Format.NDJSON:
        printer.write(document.ndjson(records))
    elif form is Format.CSV:
        printer.write(document.csv_lines([column.key for column in columns], records))
    elif form is Format.JSON:
        data = wrap(list(records))
        printer.write(
            document.document(
                command, inputs=inputs, params=params, warnings=printer.warned, data=data
            )
        )
    else:
        printer.show(*show(list(records)))


def labels_of(groups: Sequence[Group]) -> list[str]:
    """A name for each group: its own, after its file's where there are several files."""
    if len({group.source_name for group in groups}) == 1:
        return [group.name for group in groups]
    return [
        f"{group.source}::{group.name}" if group.name else str(group.source) for group in groups
    ]


def described(groups: Sequence[Group]) -> dict[str, Any]:
    """`inputs` of a document: by role for one group, by group and role for several."""
    if len(groups) == 1:
        return groups[0].described
    return dict(zip(labels_of(groups), (group.described for group in groups), strict=True))


def merged(groups: Sequence[Group], params: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`params` of a document: what all groups share, and under "groups" where they differ."""
    first = params[0]
    differing = [key for key in first if any(other[key] != first[key] for other in params)]
    shared = {key: value for key, value in first.items() if key not in differing}
    if not differing:
        return shared
    own = [{key: one[key] for key in differing} for one in params]
    return shared | {"groups": dict(zip(labels_of(groups), own, strict=True))}
