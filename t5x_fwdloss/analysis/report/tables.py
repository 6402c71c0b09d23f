"""The tables of the report, numbers with their errors."""

import html
from typing import Any

from t5x_fwdloss.analysis.numbers import Number
from t5x_fwdloss.analysis.report.terminal import format_error, format_value


def escaped(value: Any) -> str:
    """The value as text, escaped for HTML."""
    return html.escape(str(value))


def table(head: str, rows: list[str]) -> str:
    """A table of prepared rows."""
    return (
        f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>"
        f"{''.join(rows)}</tbody></table></div>"
    )


def definitions(rows: dict[str, str]) -> str:
    """A list of names and their values."""
    items = (f"<dt>{escaped(k)}</dt><dd>{escaped(v)}</dd>" for k, v in rows.items())
    return f"<dl>{''.join(items)}</dl>"


def of_numbers(numbers: dict[str, Number]) -> str:
    """The tables of a result: `row/column` names make a grid, the others a list."""
    plain = {name: x for name, x in numbers.items() if "/" not in name}
    grid = {name: x for name, x in numbers.items() if "/" in name}
    return (_list(plain) if plain else "") + (_grid(grid) if grid else "")


def _list(numbers: dict[str, Number]) -> str:
    intervals = any(number.interval is not None for number in numbers.values())
    rows = []
    for name, number in numbers.items():
        interval = ""
        if number.interval is not None:
            interval = f"[{number.interval[0]:.6g}, {number.interval[1]:.6g}]"
        cell = f"<td class='n'>{interval}</td>" if intervals else ""
        rows.append(
            f"<tr><td>{_spaced(name)}</td><td class='n'>{format_value(number)}</td>"
            f"<td class='e'>{format_error(number)}</td>{cell}"
            f"<td>{_unit(number)}</td><td class='small'>{_kind(number)}</td></tr>"
        )
    interval = "<th class='n'>Interval" if intervals else ""
    return table(
        f"<th>Number<th class='n'>Value<th class='e'>Error{interval}<th>Unit"
        "<th>What the error is",
        rows,
    )


def number_cells(name: str, number: Number) -> str:
    """The cells of a number in a row: its name, value, error, unit, convergence."""
    state = "" if number.converged else "<b>not converged</b>"
    return (
        f"<td>{_spaced(name)}</td><td class='n'>{format_value(number)}</td>"
        f"<td class='e'>{format_error(number)}</td><td>{_unit(number)}</td>"
        f"<td class='small'>{state}</td>"
    )


def section_id(name: str) -> str:
    """The id of a measurement's section; no figure has one like it."""
    return escaped(f"measurement-{name}")


def title_of(name: str) -> str:
    """A measurement's name as a title, escaped."""
    title = name.replace("_", " ").replace("gauss newton", "Gauss-Newton")
    for word in ("hessian", "fisher"):
        title = title.replace(word, word.capitalize())
    return escaped(title[:1].upper() + title[1:])


def _grid(numbers: dict[str, Number]) -> str:
    labels = list(dict.fromkeys(name.rpartition("/")[0] for name in numbers))
    columns = list(dict.fromkeys(name.rpartition("/")[2] for name in numbers))
    heads = []
    for column in columns:
        first = next(x for name, x in numbers.items() if name.endswith(f"/{column}"))
        unit = f"<br><span class='small'>{_unit(first)}</span>"
        heads.append(f"<th class='n'>{_spaced(column)}{unit}")
    rows = []
    for label in labels:
        cells = [numbers.get(f"{label}/{column}") for column in columns]
        rows.append(f"<tr><td>{escaped(label)}</td>{''.join(map(cell_of, cells))}</tr>")
    kinds = {
        f"{_spaced(name.rpartition('/')[2])}: {escaped(number.error_kind)}": None
        for name, number in numbers.items()
        if number.error is not None
    }
    if not all(number.converged for number in numbers.values()):
        kinds["<b>*</b>: not converged"] = None
    about = f"<p class='small'>{'; '.join(kinds)}.</p>" if kinds else ""
    return table(f"<th>{''.join(heads)}", rows) + about


def cell_of(number: Number | None) -> str:
    """The cell of a number in a grid: its value, its error, a star if unconverged."""
    if number is None:
        return "<td class='n'></td>"
    error = format_error(number)
    error = f" <span class='small'>{error}</span>" if error else ""
    mark = "" if number.converged else " <b title='not converged'>*</b>"
    return f"<td class='n'>{format_value(number)}{error}{mark}</td>"


def _kind(number: Number) -> str:
    return escaped(number.error_kind) + (
        "" if number.converged else " <b>not converged</b>"
    )


def _unit(number: Number) -> str:
    return "" if number.unit == "1" else escaped(number.unit)


def _spaced(name: str) -> str:
    """The name in words; the part before a slash is a user's name and is kept."""
    row, slash, column = name.rpartition("/")
    return escaped(f"{row}{slash}{column.replace('_', ' ')}")
