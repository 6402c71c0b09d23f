"""Executes a notebook and stores its outputs in it: what it prints, and its figures.

    python scripts/run_notebook.py examples/study.ipynb

The cells run in this process, one after the other, in an empty folder that is removed
afterwards; the name of that folder is left out of the outputs. It needs no Jupyter. A
cell that fails ends it, with nothing stored.
"""

import base64
import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

import matplotlib


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its code cells.

    Args:
        notebook: the content of an .ipynb file; it is changed.

    Returns:
        The names that its cells have defined.
    """
    matplotlib.use("agg")
    from matplotlib import pyplot

    names: dict[str, Any] = {"__name__": "__main__"}
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            code = [x for x in notebook["cells"] if x["cell_type"] == "code"]
            for number, cell in enumerate(code, 1):
                printed = io.StringIO()
                source = compile("".join(cell["source"]), f"<cell {number}>", "exec")
                with contextlib.redirect_stdout(printed):
                    exec(source, names)
                text = printed.getvalue().replace(os.path.realpath(folder), ".")
                cell["execution_count"] = number
                cell["outputs"] = [_stream(text)] if text else []
                for figure in map(pyplot.figure, pyplot.get_fignums()):
                    cell["outputs"].append(_image(figure))
                pyplot.close("all")
        finally:
            os.chdir(here)
    return names


def _stream(text: str) -> dict[str, Any]:
    return {
        "name": "stdout",
        "output_type": "stream",
        "text": text.splitlines(keepends=True),
    }


def _image(figure: Any) -> dict[str, Any]:
    content = io.BytesIO()
    # Without the version of matplotlib, so that the same figure is the same file.
    figure.savefig(content, format="png", dpi=72, metadata={"Software": None})
    return {
        "data": {
            "image/png": base64.b64encode(content.getvalue()).decode(),
            "text/plain": ["<Figure>"],
        },
        "metadata": {},
        "output_type": "display_data",
    }


def main(arguments: list[str]) -> int:
    """Executes the notebooks of the command line, in place."""
    for argument in arguments:
        path = pathlib.Path(argument)
        notebook = json.loads(path.read_text(encoding="utf-8"))
        execute(notebook)
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        path.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
