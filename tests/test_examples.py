"""The example notebook runs from its first cell to its last, and is stored executed."""

import base64
import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def stored(repository):
    return json.loads((repository / "examples" / "study.ipynb").read_text())


def test_the_stored_notebook_has_the_form_of_one_and_its_outputs(stored):
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in stored["cells"]}) == len(stored["cells"])
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [x for cell in code for x in cell["outputs"]]
    assert {x["output_type"] for x in outputs} == {"stream", "display_data"}
    images = [x["data"]["image/png"] for x in outputs if "data" in x]
    assert len(images) == 3
    assert all(base64.b64decode(x).startswith(b"\x89PNG") for x in images)
    assert len(json.dumps(stored)) < 300_000
    text = json.dumps(stored)
    assert not [x for x in ("/tmp/", "/home/", "/root/") if x in text]


# The figures of the reports, which take a second each, are left out; XLA compiles fast.
RUN = """
import sys
from t5x_fwdloss.analysis.report import figures
figures.to_svg = lambda *_: "<svg/>"
sys.path.insert(0, sys.argv[1])
import run_notebook
sys.exit(run_notebook.main(sys.argv[2:]))
"""
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def test_its_cells_run_at_a_small_size(stored, repository, tmp_path):
    for cell in stored["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"execution_count": None, "outputs": []}
    path = tmp_path / "study.ipynb"
    path.write_text(json.dumps(stored))
    done = subprocess.run(
        [sys.executable, "-c", RUN, repository / "scripts", path],
        env=os.environ | {"STUDY_SMALL": "1", "XLA_FLAGS": FAST},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stdout
    outputs = [
        x
        for cell in json.loads(path.read_text())["cells"]
        for x in cell.get("outputs", ())
    ]
    assert sum(x["output_type"] == "display_data" for x in outputs) == 3
    lines = "".join("".join(x.get("text", "")) for x in outputs).splitlines()
    table = {
        x[:22].strip(): x[22:].split() for x in lines if x.startswith(("step", "large"))
    }
    assert table["step"] == ["2", "4"]
    assert all(float(x) > 0 for x in table["largest eigenvalue"])
    assert "Report: ./landscape/report.html" in lines
