"""A measurement of one's own: a dataclass with a name, and what it measures."""

import dataclasses
import json

import pytest

from t5x_fwdloss.analysis import measurement_list
from t5x_fwdloss.analysis.measurements import Measurement
from t5x_fwdloss.analysis.measurements.context import result
from t5x_fwdloss.analysis.numbers import Number
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.curvature.vectors import trees

from . import runs, toy


@dataclasses.dataclass(frozen=True)
class Norm(Measurement):
    """The norm of the parameters."""

    name: str = "norm"

    def run(self, context):
        return result(self, {"norm": Number(float(trees.norm(context.params)), "θ")})

    def plots(self):
        return (
            Plot("The one norm.", lambda _: figures.panels(1)[0].figure),
            Plot("Nothing to draw.", lambda _: None),
        )


def test_it_needs_no_more_to_be_in_results_and_report(tmp_path):
    assert runs.run(tmp_path, measurements=[Norm()]) == 0
    (entry,) = json.loads((tmp_path / "results.json").read_text())["measurements"]
    assert (entry["name"], entry["kind"], entry["matrix"]) == ("norm", "Norm", None)
    norm = float(trees.norm(toy.parameters()))
    assert entry["results"]["norm"]["value"] == pytest.approx(norm)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figcaption>") == page.count("<figcaption>The one norm.<") == 1


def test_what_does_not_say_all_that_a_run_reads_is_refused():
    @dataclasses.dataclass
    class Half:
        name: str = "half"

        def run(self, context):
            return context

    with pytest.raises(ValueError, match="entry 1 is .*Half"):
        measurement_list.check("MEASUREMENTS", [Norm(), Half()])
