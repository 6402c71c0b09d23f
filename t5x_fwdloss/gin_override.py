"""Wraps a user's MODEL in `with_loss`, and a trainer_cls in `with_curvature`.

Imported by the files in `configs/losses/` and `configs/training/`, never by library
code. A gin file cannot say "the MODEL bound so far": `MODEL = @with_loss()` with `with_loss.model = %MODEL` refers
to itself, and naming a class (`@models.EncoderDecoderModel()`) would replace a user's
own class. gin's finalize hooks see the completed configuration, whatever the order of
its files. So the files bind the macro WITH_LOSS = @with_loss(), and here the user's
MODEL, of any class, becomes that function's argument and WITH_LOSS the MODEL. The
`config.gin` that T5X writes says so in plain gin. The same with WITH_CURVATURE and the
argument `trainer_cls` of the training script.
"""

from gin import config as gin_config


@gin_config.register_finalize_hook
def model_through_with_loss(config):
    """Bindings that make MODEL the user's own model with its loss exchanged.

    Nothing happens if no file of `configs/losses/` was read, or if MODEL is
    `@with_loss()` already.

    Args:
        config: gin's configuration, `{(scope, selector): {parameter: value}}`.

    Raises:
        ValueError: if no file binds MODEL.
    """
    with_loss = config.get(("WITH_LOSS", "gin.macro"), {}).get("value")
    if with_loss is None:
        return None
    model = config.get(("MODEL", "gin.macro"), {}).get("value")
    if model is None:
        raise ValueError(
            "The files in t5x_fwdloss/configs/losses/ exchange the loss of the macro "
            "MODEL, and no gin file binds it: add the file of your model, for example "
            "--gin_file=t5x/examples/t5/t5_1_1/small.gin."
        )
    if model == with_loss:
        return None
    return {
        "MODEL/gin.macro.value": with_loss,
        f"{with_loss.configurable.selector}.model": model,
    }


@gin_config.register_finalize_hook
def trainer_cls_through_with_curvature(config):
    """Bindings that make `trainer_cls` the user's own trainer with probes.

    Nothing happens if no file of `configs/training/` was read, or if `trainer_cls` is
    `@with_curvature()` already.

    Args:
        config: gin's configuration, `{(scope, selector): {parameter: value}}`.

    Raises:
        ValueError: no file binds `trainer_cls`, or several scripts have one.
    """
    with_curvature = config.get(("WITH_CURVATURE", "gin.macro"), {}).get("value")
    if with_curvature is None:
        return None
    ours = with_curvature.configurable.selector
    found = {
        f"{scope}/{selector}".removeprefix("/"): parameters["trainer_cls"]
        for (scope, selector), parameters in config.items()
        if "trainer_cls" in parameters and selector != ours
    }
    if len(found) != 1:
        bound = " and ".join(found) or "none"
        raise ValueError(
            "The files in t5x_fwdloss/configs/training/ wrap the trainer_cls of one "
            f"training script, and the gin files must bind it: got {bound}; T5X's own "
            "run file is --gin_file=t5x/configs/runs/pretrain.gin."
        )
    ((script, trainer_cls),) = found.items()
    if trainer_cls == with_curvature:
        return None
    return {f"{script}.trainer_cls": with_curvature, f"{ours}.trainer_cls": trainer_cls}
