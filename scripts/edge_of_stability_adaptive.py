"""Adam and Adafactor at the edge of stability of the preconditioned Hessian.

    python scripts/edge_of_stability_adaptive.py          # writes the two files below
    python scripts/edge_of_stability_adaptive.py --draw   # draws docs/learning_rates.svg
                                  # again, from docs/benchmarks/edge_of_stability_adaptive.json

The problem of `edge_of_stability.py`, trained by Adam and by Adafactor with T5's settings,
each at two learning rates. Every few steps the largest eigenvalue of the Hessian,
preconditioned by the optimizer's own state, is found, and that of the plain one. Cohen et
al. (2022) found that the first rises to the optimizer's threshold and is held there, by
instabilities that enlarge the second moments. The exit status is 1 if a run does not show
this, or if the plain Hessian shows it, too.
"""

import argparse
import json
import sys

import benchmark_record
import edge_of_stability as plain
import jax
import numpy as np
import optax

from t5x_fwdloss import curvature
from t5x_fwdloss.analysis import optimizer as optimizers
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.curvature.vectors import preconditioning

RECORD = plain.DOCS / "benchmarks" / "edge_of_stability_adaptive.json"
FIGURE = plain.DOCS / "learning_rates.svg"
CASES = {
    "Adam": (optax.adam, (1e-3, 3e-3)),
    "Adafactor": (optax.adafactor, (0.01, 0.03)),
}
STEPS, PERIOD = 1600, 20
LARGEST, PLAIN = "largest_preconditioned_eigenvalue", "largest_eigenvalue"
# The upper quartile of the last two thirds of the steps, in units of the threshold; and the
# most of the plain Hessian, in units of 2 over the learning rate.
EDGE, MOST_OF_PLAIN = (0.7, 2.0), 0.5


def measured(loss, params, batch, make, rate, product):
    """Trains; the numbers of every `PERIOD`-th step, by name."""
    made = make(rate)

    def step(_, carry):
        params, state = carry
        gradient = jax.grad(loss)(params, batch)
        updates, state = made.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    steps = jax.jit(lambda carry: jax.lax.fori_loop(0, PERIOD, step, carry))
    value = jax.jit(loss)
    state = made.init(params)
    vectors = dict.fromkeys((LARGEST, PLAIN), curvature.random_like(0, params))
    rows = []
    for done in range(PERIOD, STEPS + 1, PERIOD):
        params, state = steps((params, state))
        found = optimizers.of_update(made.update, state, params, learning_rate=rate)
        hessian = lambda v, at=params: product(at, v, batch)
        root = preconditioning.root(found.diagonal)
        row = {"step": done, "loss": float(value(params, batch))}
        for name, matvec in (
            (LARGEST, curvature.congruent(hessian, root)),
            (PLAIN, hessian),
        ):
            pairs = curvature.eigenpairs(
                matvec,
                vectors[name],
                num_largest=1,
                num_smallest=0,
                tolerance=0.01,
                max_steps=60,
            )
            vectors[name] = pairs.eigenvectors[0]
            row[name] = float(pairs.eigenvalues[0])
        rows.append(row)
    of_steps = {name: [row[name] for row in rows] for name in rows[0]}
    return {"threshold": found.threshold / rate} | of_steps


def in_thresholds(run, name=LARGEST):
    """Eigenvalues of a run in units of the threshold; of the plain Hessian, of 2/rate."""
    unit = run["threshold"] if name == LARGEST else 2 / run["learning_rate"]
    return np.array(run[name]) / unit


def upper_quartile(run, name=LARGEST):
    """The upper quartile over the last two thirds of the steps."""
    found = in_thresholds(run, name)
    return float(np.quantile(found[len(found) // 3 :], 0.75))


def missed(run):
    """What a run must show and does not, in a sentence; an empty string if it does."""
    found, plain_one = upper_quartile(run), upper_quartile(run, PLAIN)
    if EDGE[0] <= found <= EDGE[1] and plain_one <= MOST_OF_PLAIN:
        return ""
    return (
        f"{run['optimizer']}, learning rate {run['learning_rate']}: the upper quartile of "
        f"{LARGEST} must be {EDGE[0]} to {EDGE[1]} times the threshold, and that of "
        f"{PLAIN} at most {MOST_OF_PLAIN} times 2 over the learning rate: got {found:.3f} "
        f"and {plain_one:.3f}"
    )


def drawn(runs):
    """The figure: the losses, and for each optimizer the eigenvalues."""
    losses, *others = figures.panels(1 + len(CASES))
    losses.set_ylabel("loss")
    losses.set_yscale("log")
    for axis, optimizer in zip(others, CASES, strict=True):
        for run in (x for x in runs if x["optimizer"] == optimizer):
            line = {
                "color": figures.SERIES[runs.index(run)],
                "linewidth": 1,
                "label": f"{optimizer}, learning rate {run['learning_rate']}",
            }
            losses.plot(run["step"], run["loss"], **line)
            axis.plot(run["step"], in_thresholds(run), **line)
        edge = {"color": figures.INK, "linestyle": "--", "linewidth": 1}
        axis.axhline(1, **edge)
        axis.set_yscale("log")
        axis.set_ylim(0.02, 50)
        axis.set_title(optimizer)
        axis.set_ylabel("largest eigenvalue / threshold")
        axis.legend(loc="lower right")
    for axis in (losses, *others):
        axis.set_xlabel("step")
    return losses.get_figure(root=True)


def main():
    """Parses the command line, measures, writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.draw:
        report = {
            "environment": benchmark_record.environment(),
            "settings": plain.SETTINGS | {"steps": STEPS, "period": PERIOD},
        }
        loss, params, batch = plain.problem()
        product = jax.jit(curvature.hessian_product(loss))
        report["runs"] = [
            {"optimizer": name, "learning_rate": rate}
            | measured(loss, params, batch, make, rate, product)
            for name, (make, rates) in CASES.items()
            for rate in rates
        ]
        benchmark_record.write(report, RECORD)
    runs = json.loads(RECORD.read_text())["runs"]
    plain.draw(drawn, runs, FIGURE)
    sys.exit("\n".join(filter(None, map(missed, runs))) or 0)


if __name__ == "__main__":
    main()
