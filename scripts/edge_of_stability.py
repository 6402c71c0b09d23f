"""Gradient descent at the edge of stability, seen by the probes of training.

    python scripts/edge_of_stability.py          # writes the two files below
    python scripts/edge_of_stability.py --draw   # draws docs/edge_of_stability.svg again
                                                 # from docs/benchmarks/edge_of_stability.json

Plain gradient descent on the loss of one fixed batch, a tiny T5 on words of cmudict_g2p,
at two learning rates. Every few steps the largest eigenvalue of the Hessian is found,
from the last eigenvector on, and the probe of training measures the same step. Cohen et
al. (2021) found that the largest eigenvalue rises to 2 over the learning rate and stays
there. Steps at the edge jump from one side of a valley to the other, whose sides are
more curved than its floor, so the eigenvalue is found at the mean of two successive
steps, too. The exit status is 1 if the run does not show this.
"""

import argparse
import json
import pathlib
import re
import sys

import benchmark_record
import jax
import numpy as np
import optax

from t5x_fwdloss import curvature, tasks
from t5x_fwdloss.analysis.report import figures, style
from t5x_fwdloss.standalone import data
from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import T5Config, Transformer
from t5x_fwdloss.training import along_update

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
RECORD = DOCS / "benchmarks" / "edge_of_stability.json"
RATES = (0.1, 0.05)
STEPS, PERIOD = 1600, 20
BATCH, LENGTHS = 32, {"inputs": 12, "targets": 24}
SIZES = {
    "vocab_size": 384,
    "emb_dim": 32,
    "num_heads": 2,
    "head_dim": 16,
    "mlp_dim": 64,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}
# Smoothing bounds the logits, so that the loss stays curved while it is learned.
LABEL_SMOOTHING = 0.5
SETTINGS = {"sizes": SIZES, "batch": BATCH, "label_smoothing": LABEL_SMOOTHING}
LARGEST, AT_MEAN = "largest_eigenvalue", "largest_eigenvalue_at_mean"
CRITICAL = "critical_sharpness"
# In units of 2 over the learning rate: the most at the start, the edge's two sides.
MOST_AT_START, EDGE = 0.5, (0.85, 1.15)


def problem():
    """The loss of the parameters and the batch that all steps see, and both."""
    model = StandaloneModel(
        Transformer(T5Config(dtype="float32", dropout_rate=0.0, **SIZES)),
        label_smoothing=LABEL_SMOOTHING,
        loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
        loss_impl="custom_jvp",
    )
    dataset = data.DatasetConfig(tasks.TASK_NAME, LENGTHS, BATCH)
    (batch,) = data.fixed_batches(dataset, "train", 1)
    params = jax.jit(model.get_initial_params)(jax.random.key(0), batch)
    return lambda params, batch: model.loss_fn(params, batch, None)[0], params, batch


def descent(loss, batch, rate):
    """The functions that take one step of the parameters, and `PERIOD` of them."""
    optimizer = optax.sgd(rate)

    def step(params):
        gradient = jax.grad(loss)(params, batch)
        updates, _ = optimizer.update(gradient, optimizer.init(params))
        return optax.apply_updates(params, updates)

    steps = lambda params: jax.lax.fori_loop(0, PERIOD, lambda _, p: step(p), params)
    return jax.jit(step), jax.jit(steps)


def measured(loss, params, batch, rate):
    """Trains; the numbers of every `PERIOD`-th step, by name."""
    step, steps = descent(loss, batch, rate)
    product = jax.jit(curvature.hessian_product(loss))
    probe = jax.jit(along_update.along_update(loss))
    mean = jax.jit(lambda *both: jax.tree.map(lambda a, b: (a + b) / 2, *both))
    vector = curvature.random_like(0, params)

    def largest(at):
        return curvature.eigenpairs(
            lambda v: product(at, v, batch),
            vector,
            num_smallest=0,
            tolerance=0.01,
            max_steps=60,
        )

    rows = []
    for done in range(0, STEPS + 1, PERIOD):
        found, new = largest(params), step(params)
        vector = found.eigenvectors[0]
        numbers = along_update.scalars(jax.device_get(probe(params, new, batch)), rate)
        rows.append(
            {
                "step": done,
                "loss": numbers["loss"],
                LARGEST: float(found.eigenvalues[0]),
                AT_MEAN: float(largest(mean(params, new)).eigenvalues[0]),
                CRITICAL: numbers.get(CRITICAL),  # None if the search did not find it
            }
        )
        params = steps(params)
    return {name: [row[name] for row in rows] for name in rows[0]}


def missed(run):
    """What a run must show and does not, in sentences."""
    edge, last = 2 / run["learning_rate"], len(run["step"]) * 2 // 3
    found = {}
    for name in (LARGEST, AT_MEAN, CRITICAL):
        scaled = np.array(run[name], float) / edge  # None becomes NaN
        found[name] = {"start": scaled[0], "end": np.nanmedian(scaled[last:])}
        print(f"learning rate {run['learning_rate']}: {name} {found[name]}")
    sentences = [
        f"{name} of the last third must be {EDGE[0]} to {EDGE[1]} times 2 over the "
        f"learning rate {run['learning_rate']}: got {found[name]['end']:.3f}"
        for name in (AT_MEAN, CRITICAL)
        if not EDGE[0] <= found[name]["end"] <= EDGE[1]
    ]
    if not found[LARGEST]["start"] <= MOST_AT_START:
        sentences.append(
            f"{LARGEST} must start at {MOST_AT_START} times 2 over the learning rate "
            f"{run['learning_rate']} or below: got {found[LARGEST]['start']:.3f}"
        )
    if not run["loss"][-1] < run["loss"][last]:
        sentences.append(f"the loss must fall in the last third: got {run['loss']}")
    return sentences


def drawn(runs):
    """The figure: the losses, and for each learning rate the sharpness."""
    losses, *others = figures.panels(1 + len(runs))
    losses.set_ylabel("loss")
    for number, (run, axis) in enumerate(zip(runs, others, strict=True)):
        rate, steps = run["learning_rate"], run["step"]
        color = figures.SERIES[3 + number]
        losses.plot(steps, run["loss"], color=color, label=f"learning rate {rate}")
        thin = {"color": figures.SERIES[0], "linewidth": 0.8, "alpha": 0.5}
        axis.plot(steps, run[LARGEST], **thin, label="largest eigenvalue")
        label = "the same at the mean of two steps"
        axis.plot(steps, run[AT_MEAN], color=figures.SERIES[0], label=label)
        critical = np.array(run[CRITICAL], float)
        label = "critical sharpness"
        axis.plot(steps, critical, ".", color=figures.SERIES[1], ms=4, label=label)
        edge = {"color": figures.INK, "linestyle": "--", "linewidth": 1}
        axis.axhline(2 / rate, **edge, label="2 / learning rate")
        axis.set_ylim(0, 2.5 * 2 / rate)
        axis.set_title(f"learning rate {rate}: 2/{rate} = {2 / rate:g}")
        axis.set_ylabel("sharpness")
    for axis in (losses, *others):
        axis.set_xlabel("step")
    losses.legend(loc="best")
    figure = losses.get_figure(root=True)
    handles, labels = others[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def draw(figure_of, runs, path):
    """Writes the figure of the runs as SVG in the report's colors, light or dark."""
    with figures.settings():
        svg = figures.to_svg(figure_of(runs), "edge")
    colors = style.STYLE.partition("* {")[0]
    look = f"<style>{colors} svg {{ background: var(--card); }}</style>"
    text = re.sub(r"(<svg[^>]*>)", rf"\1{look}", svg, count=1)
    path.write_text(text + "\n", encoding="utf-8")


def main():
    """Parses the command line, measures, writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.draw:
        report = {"environment": benchmark_record.environment(), "settings": SETTINGS}
        loss, params, batch = problem()
        report["runs"] = [
            {"learning_rate": rate, **measured(loss, params, batch, rate)}
            for rate in RATES
        ]
        benchmark_record.write(report, RECORD)
    runs = json.loads(RECORD.read_text())["runs"]
    draw(drawn, runs, DOCS / "edge_of_stability.svg")
    sys.exit("\n".join(x for run in runs for x in missed(run)) or 0)


if __name__ == "__main__":
    main()
