"""Evaluation and scoring take the same override, and give stock T5X's numbers."""

import concurrent.futures
import json

import numpy as np
import pytest

from t5x_runs.conftest import LOSSES

# The time limit is for the shared runs, on a machine that is busy.
pytestmark = [pytest.mark.t5x, pytest.mark.timeout(900)]
EXAMPLES = "t5x_fwdloss/configs/examples"


@pytest.fixture(scope="module")
def finished(project, checkpoint):
    """Evaluation and scoring of one checkpoint, stock and overridden."""

    def start(mode, name):
        output = {"eval": "EVAL_OUTPUT_DIR", "infer": "INFER_OUTPUT_DIR"}[mode]
        few = {
            "eval": [
                "--gin.Evaluator.num_examples=8",
                "--gin.DatasetConfig.batch_size=8",
            ],
            "infer": ["--gin.infer.num_shards=50"],
        }[mode]
        losses = {
            "stock": [],
            "custom_jvp": [f"--gin_file={LOSSES}/custom_jvp.gin"],
            "chunked": [f"--gin_file={LOSSES}/chunked.gin"],
        }[name]
        return project.run(
            "t5x.main",
            f"--run_mode={mode}",
            f"--gin_file={EXAMPLES}/cmudict_{mode}.gin",
            "--gin_file=my_network.gin",
            *losses,
            f"--gin.CHECKPOINT_PATH='{checkpoint}'",
            f"--gin.{output}='{project.path / mode / name}'",
            *few,
        )

    runs = [("eval", "stock"), ("eval", "custom_jvp")]
    runs += [("infer", name) for name in ("stock", "custom_jvp", "chunked")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda run: start(*run), runs))
    return dict(zip(runs, done, strict=True))


def test_evaluation_with_the_override_is_stock_t5x_s(project, finished):
    def metrics(name):
        done = finished["eval", name]
        assert done.status == 0, done.log[-3000:]
        folder = project.path / "eval" / name / "inference_eval"
        (file,) = folder.glob("cmudict_g2p-metrics.jsonl")
        loss = project.losses(f"eval/{name}", "loss", "training_eval/cmudict_g2p")
        return json.loads(file.read_text().splitlines()[-1]), loss[50]

    (wanted, wanted_loss), (got, got_loss) = metrics("stock"), metrics("custom_jvp")
    assert got == wanted
    assert {"phoneme_error_rate", "exact_match"} <= wanted.keys()
    assert got_loss == pytest.approx(wanted_loss, rel=1e-5)
    config = (project.path / "eval" / "custom_jvp" / "config.gin").read_text()
    assert "MODEL = @fwdloss_models.with_loss()" in config


@pytest.mark.parametrize("name", ["custom_jvp", "chunked"])
def test_scores_with_the_override_are_stock_t5x_s(project, finished, name):
    def scores(name):
        done = finished["infer", name]
        assert done.status == 0, done.log[-3000:]
        (file,) = (project.path / "infer" / name).glob("*-score.jsonl-00000-of-00050")
        return [json.loads(line)["score"] for line in file.read_text().splitlines()]

    wanted, got = scores("stock"), scores(name)
    assert len(wanted) > 50
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert np.std(wanted) > 1
