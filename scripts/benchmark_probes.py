"""What probes of the curvature cost the training of the example, in time.

    python scripts/benchmark_probes.py --output=docs/benchmarks/probes_cpu.json

One run of T5X's own `train` with the gin files of `cmudict_train.gin`, `custom_jvp.gin`
and `curvature.gin`. Spans of CURVATURE_PERIOD steps are trained in turns through the
probed trainer, with one probe in each span, and through T5X's own method of the same
trainer, with none; a span ends when its parameters are there. The first pair warms up.

* `share`: `curvature/share_of_time` in the run's own TensorBoard events.
* `cost`: for each pair, the seconds of the span with a probe less those of the span
  without, over the former.
* `compilation_seconds`: of the probe, once; not contained in the two above.

The exit status is 1 if the median of either is above 5 %. Needs T5X.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import benchmark_record

PERIOD = 100
MOST = 0.05  # of the training time
CONFIGS = "t5x_fwdloss/configs"
FILES = (
    f"{CONFIGS}/examples/cmudict_train.gin",
    f"{CONFIGS}/losses/custom_jvp.gin",
    f"{CONFIGS}/training/curvature.gin",
)


def in_turns(constructor, spans):
    """The constructor of the same trainer, whose every second span has no probe.

    Args:
        constructor: the result of `with_curvature`.
        spans: receives, for each span, whether it is probed and its seconds.
    """
    import jax

    def build(**named):
        trainer = constructor(**named)
        methods = [trainer.train, type(trainer).train.__get__(trainer)]

        def train(batch_iter, num_steps, start_step=None):
            is_probed = len(spans) % 2 == 0
            start = time.monotonic()
            method = methods[not is_probed]
            summary = method(batch_iter, num_steps, start_step=start_step)
            jax.block_until_ready(trainer.train_state.params)
            spans.append((is_probed, time.monotonic() - start))
            print(f"probed {is_probed}: {spans[-1][1]:.2f} s", flush=True)
            return summary

        trainer.train = train
        return trainer

    return build


def run(folder, pairs):
    """Trains, and returns the spans; events are in the folder."""
    import gin
    from t5x import gin_utils, train

    import t5x_fwdloss.training.trainer as ours

    # As t5x.main does: gin files find the training script in the main module.
    sys.modules["__main__"].train = train.train
    gin.register(train.train, "__main__")
    root = pathlib.Path(train.__file__).resolve().parent.parent
    bindings = {
        "MODEL_DIR": str(folder),
        "CURVATURE_PERIOD": PERIOD,
        "TRAIN_STEPS": 2 * pairs * PERIOD,
        "train.stats_period": PERIOD,
        "train.eval_period": 2 * pairs * PERIOD,
        "utils.CheckpointConfig.save": None,
        "train.train_eval_dataset_cfg": None,
    }
    gin_utils.parse_gin_flags(
        [".", str(root)], FILES, [f"{name} = {x!r}" for name, x in bindings.items()]
    )
    spans = []
    constructor = gin.get_configurable(ours.with_curvature)()
    gin.get_configurable(train.train)(trainer_cls=in_turns(constructor, spans))
    return spans


def recorded(folder, tag):
    """The values of a tag in the training's event files, by step."""
    import tensorflow as tf
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "train"))
    read.Reload()
    return {
        x.step: float(tf.make_ndarray(x.tensor_proto))
        for x in read.Tensors(f"curvature/{tag}")
    }


def measure(pairs):
    """All numbers."""
    environment = benchmark_record.environment()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        spans = run(folder, pairs)
        share, seconds = (
            recorded(folder, "share_of_time"),
            recorded(folder, "probe_seconds"),
        )
        (compilation,) = recorded(folder, "compilation_seconds").values()
    probed = [seconds for is_probed, seconds in spans if is_probed]
    plain = [seconds for is_probed, seconds in spans if not is_probed]
    cost = [1 - b / a for a, b in zip(probed, plain, strict=True)]
    return {
        "environment": environment,
        "settings": {"period": PERIOD, "pairs": pairs, "gin_files": FILES},
        "compilation_seconds": compilation,
        "share_of_time": share,
        "probe_seconds": seconds,
        "seconds_with_a_probe": probed,
        "seconds_without": plain,
        "median_share": statistics.median(list(share.values())[1:]),
        "median_cost": statistics.median(cost[1:]),
    }


def main():
    """Parses the command line, measures, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6, help="of spans, at least 2")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    report = measure(options.pairs)
    print(json.dumps(report, indent=1))
    benchmark_record.write(report, options.output)
    sys.exit(
        "\n".join(
            f"{name} must be at most {MOST}: got {report[name]:.4f}"
            for name in ("median_share", "median_cost")
            if report[name] > MOST
        )
        or 0
    )


if __name__ == "__main__":
    main()
