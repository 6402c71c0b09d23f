"""The negative and the zero part of a spectrum that has a null space."""

import numpy as np
import pytest

from . import cells, dense


@pytest.mark.parametrize("matrix", cells.WITH_SIGNS)
def test_the_signs_of_a_spectrum_with_a_null_space(kept, truth, matrix):
    inside = dense.group(cells.OF_SIGNS)
    values, vectors = np.linalg.eigh(truth.matrices[matrix][np.ix_(inside, inside)])
    values = values / np.abs(values).max()
    negative, zero = values < -5e-5, np.abs(values) < 5e-7
    # No eigenvalue is near to what counts as zero, of which rounding is unsure.
    assert (negative | zero | (values > 5e-5)).all()
    assert zero.mean() > 0.7
    assert negative.mean() == (5 / 32 if matrix == "hessian" else 0)
    z = cells.draws(f"signs-{matrix}/probes", range(cells.NUM_PROBES["density"]))
    weights = (vectors.T @ z[inside]) ** 2 / inside.sum()
    entry = kept[f"signs-{matrix}"]
    for name, chosen in (("negative", negative), ("zero", zero)):
        parts, number = weights[chosen].sum(axis=0), entry.number(f"{name}_fraction")
        assert number["value"] == pytest.approx(parts.mean(), abs=1e-3)
        error = parts.std(ddof=1) / np.sqrt(len(parts))
        assert number["error"] == pytest.approx(error, abs=1e-3)
        assert number["unit"] == "1"
