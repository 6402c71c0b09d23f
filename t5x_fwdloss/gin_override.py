"""Sends the macro MODEL of a gin configuration through `t5x_fwdloss.models.with_loss`.

Imported by the files in `configs/losses/`, never by library code. A gin file cannot say
"the MODEL bound so far": `MODEL = @with_loss()` with `with_loss.model = %MODEL` refers
to itself, and naming a class (`@models.EncoderDecoderModel()`) would replace a user's
own class. gin's finalize hooks see the completed configuration, whatever the order of
its files. So the files bind the macro WITH_LOSS = @with_loss(), and here the user's
MODEL, of any class, becomes that function's argument and WITH_LOSS the MODEL. The
`config.gin` that T5X writes says so in plain gin.
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
