"""The tables of the report, numbers with their errors."""

import html
import math
from collections.abc import Sequence
from typing import Any

from t5x_fwdloss.analysis.numbers import Number
from t5x_fwdloss.analysis.report.terminal import DASH, format_error, format_value


def escaped(value: Any) -> str:
    """The value as text, escaped for HTML."""
    return html.escape(str(value))


def table(caption: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table in a box of its own, which scrolls where the table is too wide.

    Args:
        caption: what the table holds, for readers who do not see what stands around it.
        heads: the heads of the columns, from `head`.
        rows: the rows, each from `row`.
    """
    caption = escaped(caption)
    return (
        f"<div class='wide' role='region' tabindex='0' aria-label='{caption}'>"
        f"<table><caption>{caption}</caption><thead><tr>{''.join(heads)}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def head(content: str, css: str = "") -> str:
    """The head of a column; content is HTML."""
    return f"<th scope='col'{_class(css)}>{content}</th>"


def row(name: str, *cells: str, height: int = 1) -> str:
    """A row: its name, which is HTML and the row's head, and its cells.

    Args:
        name: the name.
        cells: the cells, each from `cell`.
        height: how many rows it is the name of: the next ones have cells only.
    """
    span = f" rowspan='{height}'" if height > 1 else ""
    return f"<tr><th scope='row'{span}>{name}</th>{''.join(cells)}</tr>"


def cell(content: str, css: str = "") -> str:
    """A cell; content is HTML."""
    return f"<td{_class(css)}>{content}</td>"


def _class(css: str) -> str:
    return f" class='{css}'" if css else ""


def definitions(rows: dict[str, str]) -> str:
    """A list of names and their values."""
    items = (f"<dt>{escaped(k)}</dt><dd>{escaped(v)}</dd>" for k, v in rows.items())
    return f"<dl>{''.join(items)}</dl>"


def of_numbers(title: str, numbers: dict[str, Number]) -> str:
    """The tables of a result: `row/column` names make a grid, the others a list.

    Args:
        title: the title of the result, for the captions.
        numbers: the numbers by name.
    """
    plain = {name: x for name, x in numbers.items() if "/" not in name}
    grid = {name: x for name, x in numbers.items() if "/" in name}
    listed = _list(f"{title}: numbers", plain) if plain else ""
    return listed + (_grid(f"{title}: numbers by row", grid) if grid else "")


def _list(caption: str, numbers: dict[str, Number]) -> str:
    intervals = any(number.interval is not None for number in numbers.values())
    rows = []
    for name, number in numbers.items():
        interval = [cell(_interval(number), "n")] if intervals else []
        rows.append(
            row(
                spaced(name),
                cell(format_value(number), "n"),
                cell(format_error(number), "e"),
                *interval,
                cell(unit_of(number)),
                cell(_kind(number), "small"),
            )
        )
    interval = [head("Interval", "n")] if intervals else []
    heads = [head("Number"), head("Value", "n"), head("Error", "e"), *interval]
    return table(caption, [*heads, head("Unit"), head("What the error is")], rows)


def number_cells(number: Number) -> list[str]:
    """The cells of a number in a row: its value, error, unit, convergence."""
    state = "" if number.converged else "<b>not converged</b>"
    return [
        cell(format_value(number), "n"),
        cell(format_error(number), "e"),
        cell(unit_of(number)),
        cell(state, "small"),
    ]


def section_id(name: str) -> str:
    """The id of a measurement's section; no figure has one like it."""
    return escaped(f"measurement-{name}")


def title_of(name: str) -> str:
    """A measurement's name as a title, escaped."""
    title = name.replace("_", " ").replace("gauss newton", "Gauss-Newton")
    for word in ("hessian", "fisher"):
        title = title.replace(word, word.capitalize())
    return escaped(title[:1].upper() + title[1:])


def _grid(caption: str, numbers: dict[str, Number]) -> str:
    labels = list(dict.fromkeys(name.rpartition("/")[0] for name in numbers))
    columns = list(dict.fromkeys(name.rpartition("/")[2] for name in numbers))
    heads = [cell("")]
    for column in columns:
        first = next(x for name, x in numbers.items() if name.endswith(f"/{column}"))
        unit = f"<br><span class='small'>{unit_of(first)}</span>"
        heads.append(head(f"{spaced(column)}{unit}", "n"))
    rows = [
        row(escaped(label), *(cell_of(numbers.get(f"{label}/{x}")) for x in columns))
        for label in labels
    ]
    kinds = {
        f"{spaced(name.rpartition('/')[2])}: {escaped(number.error_kind)}": None
        for name, number in numbers.items()
        if number.error is not None
    }
    if not all(number.converged for number in numbers.values()):
        kinds["<b>*</b>: not converged"] = None
    about = f"<p class='small'>{'; '.join(kinds)}.</p>" if kinds else ""
    return table(caption, heads, rows) + about


def cell_of(number: Number | None) -> str:
    """The cell of a number in a grid; empty if there is none."""
    return cell("" if number is None else with_error(number), "n")


def with_error(number: Number) -> str:
    """A number as HTML: its value, its error, and a mark if it is not converged."""
    error = format_error(number)
    error = f" <span class='small'>{error}</span>" if error else ""
    mark = "" if number.converged else " <b title='not converged'>*</b>"
    return f"{format_value(number)}{error}{mark}"


def _interval(number: Number) -> str:
    if number.interval is None:
        return ""
    low, high = (f"{x:.6g}" if math.isfinite(x) else DASH for x in number.interval)
    return f"[{low}, {high}]"


def _kind(number: Number) -> str:
    return escaped(number.error_kind) + (
        "" if number.converged else " <b>not converged</b>"
    )


def unit_of(number: Number) -> str:
    """The unit of a number, escaped; empty for a pure number."""
    return "" if number.unit == "1" else escaped(number.unit)


def spaced(name: str) -> str:
    """The name in words; the part before a slash is a user's name and is kept."""
    before, slash, column = name.rpartition("/")
    return escaped(f"{before}{slash}{column.replace('_', ' ')}")
