"""What a run says of its linearized products, in results.json and on the page."""

import json

import numpy as np
import pytest

from t5x_fwdloss.analysis import Trace
from t5x_fwdloss.curvature.products import folding

from . import runs


def finished(path, **settings):
    measurements = [Trace(num_probes=2, block_size=2)]
    assert runs.run(path, measurements=measurements, **settings) == 0
    return json.loads((path / "results.json").read_text())


def trace(document):
    return document["measurements"][0]["results"]["trace"]["value"]


@pytest.mark.parametrize("in_product", [False, True], ids=["at once", "in the product"])
def test_a_run_whose_folding_fails_goes_on_and_says_so(
    tmp_path, monkeypatch, in_product
):
    expected = finished(tmp_path / "folded")
    assert "folded" not in expected["products"]["hessian"]

    def broken(*args, **kwargs):
        raise KeyError("subfuns")

    if in_product:
        monkeypatch.setattr(folding.Folded, "__call__", broken)
    else:
        monkeypatch.setattr(folding, "fold", broken)
    document = finished(tmp_path / "broken")
    sentence = document["products"]["hessian"]
    assert sentence.startswith("2 of 2 batches linearized")
    assert sentence.endswith(" MiB per device, not folded: KeyError: 'subfuns'")
    page = (tmp_path / "broken" / "report.html").read_text()
    assert "not folded: KeyError" in page
    np.testing.assert_allclose(trace(document), trace(expected), rtol=1e-5)


def test_a_run_without_folding_says_so(tmp_path):
    expected = finished(tmp_path / "folded")
    document = finished(tmp_path / "plain", fold=False)
    assert document["products"]["hessian"].endswith(", not folded: switched off")
    np.testing.assert_allclose(trace(document), trace(expected), rtol=1e-5)
