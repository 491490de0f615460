"""Tables in Markdown, and their cells."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Draw a table.

    Args:
        header: The names of the columns.
        rows: The cells of each row, one for every column.

    Returns:
        The table, without a line break at its end.

    Raises:
        ValueError: if a row has another number of cells than the header.
    """
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"Expected {len(header)} cells for the columns {', '.join(header)}, got {line}.")
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|---" * len(header) + "|", *body])


def number(value: float | None, form: str) -> str:
    """A formatted number, or a dash for None."""
    return "-" if value is None else f"{value:{form}}"
