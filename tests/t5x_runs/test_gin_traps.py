"""gin's traps for a plugin of T5X, each in a process of its own: kept bindings, errors.

The user's files here are in T5X's own style. `build_model.py` parses them with T5X's
parser and prints the settings of the model that T5X would train.
"""

import json
import re

import pytest

from t5x_runs.conftest import LOSSES

pytestmark = [pytest.mark.t5x, pytest.mark.timeout(900)]

HEAD = "from __gin__ import dynamic_registration\n"
# A stock model file and a user's own values for everything that a subclass would lose.
USER = (
    HEAD
    + """
include 't5x/configs/runs/pretrain.gin'
include 't5x_fwdloss/configs/models/t5_1_1_tiny_bytes.gin'
from t5x import decoding
from t5x import models
Z_LOSS = 0.001
LABEL_SMOOTHING = 0.1
LOSS_NORMALIZING_FACTOR = 'NUM_REAL_TARGET_TOKENS'
DROPOUT_RATE = 0.0
models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample
"""
)
KEPT = {
    "z_loss": 0.001,
    "label_smoothing": 0.1,
    "loss_normalizing_factor": "NUM_REAL_TARGET_TOKENS",
    "decode_fn": "temperature_sample",
    "optimizer": "Adafactor",
    "vocabulary": "ByteVocabulary",
    "network": "t5x.examples.t5.network.Transformer",
    "feature_converter": "EncDecFeatureConverter",
}
BEAMS = "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4\n"
MINIMUM = [
    "--gin.MIXTURE_OR_TASK_NAME='cmudict_g2p'",
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
    "--gin.TRAIN_STEPS=1",
    "--gin.MODEL_DIR='/unused'",
]
JVP = f"{LOSSES}/custom_jvp.gin"


@pytest.fixture(scope="module")
def build(project):
    """Writes gin texts, builds their MODEL, gives its settings, or the log of a failure."""

    def run(texts, *more):
        arguments = []
        for number, text in enumerate(texts):
            name = text
            if not text.endswith(".gin"):
                name = f"user_{number}.gin"
                project.write(name, text)
            arguments.append(f"--gin_file={name}")
        done = project.run("build_model", *arguments, *MINIMUM, *more)
        found = re.search(r"^SETTINGS (.*)$", done.log, re.M)
        return json.loads(found[1]) if found and done.status == 0 else done.log

    return run


@pytest.mark.parametrize("order", ["after", "before"])
def test_every_binding_of_a_stock_configuration_is_kept(build, order):
    texts = [USER, JVP] if order == "after" else [JVP, USER]
    found = build(texts)
    assert "LossMixin" in found["bases"]
    assert "EncoderDecoderModel" in found["bases"]
    assert found["loss_impl"] == "custom_jvp"
    assert found == found | KEPT


def test_a_stock_configuration_alone_stays_stock(build):
    found = build([USER], "--gin.LOSS_IMPL='custom_jvp'")
    assert "LossMixin" not in found["bases"]
    assert found == found | KEPT


@pytest.mark.parametrize("where", ["in the user's file", "after the losses file"])
def test_method_bindings_of_the_user_s_class_are_kept(build, where):
    imports = f"{HEAD}from t5x import models\n"
    texts = [USER + BEAMS, JVP] if "user" in where else [USER, JVP, imports + BEAMS]
    found = build(texts)
    assert found["num_decodes"] == 4
    assert found["loss_impl"] == "custom_jvp"
    assert found == found | KEPT


@pytest.mark.parametrize("name", ["custom_vjp", "autodiff", "custom_jvp"])
def test_each_losses_file_and_the_flag_choose_the_loss(build, name):
    assert build([USER, f"{LOSSES}/{name}.gin"])["loss_impl"] == name
    flag = f"--gin.LOSS_IMPL='{name}'"
    assert build([USER, f"{LOSSES}/chunked.gin"], flag)["loss_impl"] == name


def test_the_chunked_file_and_its_flag_set_the_chunk_length(build):
    chunked = f"{LOSSES}/chunked.gin"
    assert build([USER, chunked])["loss_chunk_length"] == 32
    assert build([USER, chunked], "--gin.LOSS_CHUNK_LENGTH=8")["loss_chunk_length"] == 8


DECODER_ONLY = (
    HEAD
    + """
include 't5x/configs/runs/pretrain.gin'
import seqio
from t5x import adafactor
from t5x import models
from t5x.examples.decoder_only import network
MODEL = @models.DecoderOnlyModel()
models.DecoderOnlyModel:
  module = @network.DecoderWrapper()
  vocabulary = @seqio.ByteVocabulary()
  optimizer_def = @adafactor.Adafactor()
  z_loss = 0.001
  inputs_bidirectional_attention = True
network.DecoderWrapper.config = @network.TransformerConfig()
network.TransformerConfig:
  vocab_size = 384
  num_layers = 1
"""
)


def test_the_same_file_serves_decoder_only_models(build):
    found = build([DECODER_ONLY, JVP])
    assert {"LossMixin", "DecoderOnlyModel"} <= set(found["bases"])
    assert found["z_loss"] == 0.001
    assert found["loss_impl"] == "custom_jvp"


SUBCLASS = (
    USER
    + """
import my_models
MODEL = @my_models.Mine()
my_models.Mine:
  module = @network_again.Transformer()
  input_vocabulary = %VOCABULARY
  output_vocabulary = %VOCABULARY
  optimizer_def = %OPTIMIZER
  z_loss = 0.5
from t5x.examples.t5 import network as network_again
"""
)


def test_a_user_s_own_class_is_wrapped_and_not_replaced_by_t5x_s(build, project):
    project.write(
        "my_models.py",
        "from t5x import models\nclass Mine(models.EncoderDecoderModel): pass\n",
    )
    # gin reads a file from top to bottom: imports first.
    lines = SUBCLASS.strip().split("\n")
    text = "\n".join([lines[0], lines[-1], *lines[1:-1]])
    found = build([text, JVP])
    assert {"LossMixin", "Mine"} <= set(found["bases"])
    assert found["z_loss"] == 0.5


def test_a_model_with_its_own_loss_is_refused_with_a_sentence(build, project):
    project.write(
        "my_losses.py",
        "from t5x import models\nclass Mine(models.EncoderDecoderModel):\n"
        "  def loss_fn(self, params, batch, dropout_rng): pass\n",
    )
    text = USER + (
        "import my_losses\nfrom t5x.examples.t5 import network\n"
        "MODEL = @my_losses.Mine()\nmy_losses.Mine:\n"
        "  module = @network.Transformer()\n  input_vocabulary = %VOCABULARY\n"
        "  output_vocabulary = %VOCABULARY\n  optimizer_def = %OPTIMIZER\n"
    )
    log = build([text, JVP])
    assert (
        "must not drop another: Mine has its own loss_fn (my_losses.Mine.loss_fn" in log
    )


def test_a_forgotten_model_is_a_sentence_in_t5x_s_scripts_too(build):
    log = build([JVP])
    assert "exchange the loss of the macro MODEL, and no gin file binds it" in log


def test_an_unknown_loss_is_a_sentence_in_t5x_s_scripts_too(build):
    log = build([USER, JVP], "--gin.LOSS_IMPL='custom_jpv'")
    assert "must be one of custom_vjp, autodiff, custom_jvp: got 'custom_jpv'" in log


def test_include_passes_no_imports_on(build):
    text = f"{HEAD}include '{JVP}'\nfwdloss_models.with_loss.loss_impl = 'autodiff'\n"
    assert "'fwdloss_models' was not provided by an import" in build([USER, text])
    mended = text.replace(
        "include", "from t5x_fwdloss import models as fwdloss_models\ninclude"
    )
    assert build([USER, mended])["loss_impl"] == "autodiff"


CLASS = "t5x_fwdloss/configs/models/fwdloss_encoder_decoder.gin"
NETWORK = (
    f"{HEAD}from t5x.examples.t5 import network\nNETWORK = @network.Transformer()\n"
)


def test_the_file_of_the_class_binds_again_what_a_subclass_loses(build):
    found = build([USER, CLASS, NETWORK], "--gin.NUM_DECODES=4")
    assert "FwdLossEncoderDecoderModel" in found["bases"]
    assert found["num_decodes"] == 4
    assert found == found | KEPT | {"decode_fn": "beam_search"}


def test_bindings_of_t5x_s_class_do_not_reach_ours_without_that_file(build):
    text = USER + (
        "from t5x.examples.t5 import network\n"
        "from t5x_fwdloss import models as fwdloss_models\n"
        "MODEL = @fwdloss_models.FwdLossEncoderDecoderModel()\n"
        "fwdloss_models.FwdLossEncoderDecoderModel:\n"
        "  module = @network.Transformer()\n  input_vocabulary = %VOCABULARY\n"
        "  output_vocabulary = %VOCABULARY\n  optimizer_def = %OPTIMIZER\n"
    )
    found = build([text + BEAMS])
    assert (found["z_loss"], found["loss_normalizing_factor"]) == (0.0, None)
    assert found["num_decodes"] == 1
    # The losses file takes this class too, with its new choice.
    assert build([text, JVP])["loss_impl"] == "custom_jvp"


def test_a_second_alias_of_a_class_does_no_harm_to_its_constructor(build):
    text = f"{HEAD}from t5x import models as t5x_models\n"
    text += "t5x_models.EncoderDecoderModel.z_loss = 0.25\n"
    found = build([USER, JVP, text])
    assert found["z_loss"] == 0.25
    assert found["loss_impl"] == "custom_jvp"


def test_a_method_binding_under_a_second_alias_loses_the_bindings_in_t5x_too(build):
    text = f"{HEAD}from t5x import models as t5x_models\nt5x_{BEAMS}"
    for texts in ([USER, text], [USER, JVP, text]):
        log = build(texts)
        assert isinstance(log, str)
        assert "EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4" in log


def test_bindings_of_score_batch_are_not_dropped_silently(build):
    text = USER + "models.EncoderDecoderModel.score_batch.return_intermediates = True\n"
    log = build([text, JVP])
    assert "would lose the gin bindings of EncoderDecoderModel.score_batch" in log


def test_a_run_file_after_the_user_s_own_resets_its_macros(build):
    late = f"{HEAD}include 't5x/configs/runs/finetune.gin'\n"
    assert build([USER, late, JVP], "--gin.INITIAL_CHECKPOINT_PATH='x'")
    log = build([USER, late, JVP])
    assert "INITIAL_CHECKPOINT_PATH" in log
    assert "set to `%gin.REQUIRED` but not subsequently overridden" in log
