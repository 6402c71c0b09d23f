"""Wraps a user's MODEL in `with_loss`, and a trainer_cls in what trains or probes.

Imported by the files in `configs/losses/` and `configs/training/`, never by library
code. A gin file cannot say "the MODEL bound so far": `MODEL = @with_loss()` with `with_loss.model = %MODEL` refers
to itself, and naming a class (`@models.EncoderDecoderModel()`) would replace a user's
own class. gin's finalize hooks see the completed configuration, whatever the order of
its files. So the files bind the macro WITH_LOSS = @with_loss(), and here the user's
MODEL, of any class, becomes that function's argument and WITH_LOSS the MODEL. The
`config.gin` that T5X writes says so in plain gin. The same with WITH_CURVATURE and
WITH_FORWARD_GRADIENT and the argument `trainer_cls` of the training script.
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
    with_loss = _macro(config, "WITH_LOSS")
    if with_loss is None:
        return None
    model = _macro(config, "MODEL")
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


# Macros of the files in configs/training/ that wrap a trainer_cls, the innermost first.
WRAPPERS = ("WITH_FORWARD_GRADIENT", "WITH_CURVATURE")
INITIALIZER = "train_state_initializer_cls"


@gin_config.register_finalize_hook
def trainer_cls_through_wrappers(config):
    """Bindings that make `trainer_cls` the user's own trainer, wrapped.

    Nothing happens if no file of `configs/training/` was read. A configuration that T5X
    wrote, in which `trainer_cls` is wrapped already, gets the same bindings.

    Args:
        config: gin's configuration, `{(scope, selector): {parameter: value}}`.

    Raises:
        ValueError: no file binds `trainer_cls`, or several scripts have one.
    """
    wrappers = [found for name in WRAPPERS if (found := _macro(config, name))]
    if not wrappers:
        return None
    ours = [wrapper.configurable.selector for wrapper in wrappers]
    scripts = {
        f"{scope}/{selector}".removeprefix("/"): (scope, selector)
        for (scope, selector), parameters in config.items()
        if "trainer_cls" in parameters and selector not in ours
    }
    if len(scripts) != 1:
        bound = " and ".join(scripts) or "none"
        raise ValueError(
            "The files in t5x_fwdloss/configs/training/ wrap the trainer_cls of one "
            f"training script, and the gin files must bind it: got {bound}; T5X's own "
            "run file is --gin_file=t5x/configs/runs/pretrain.gin."
        )
    ((script, key),) = scripts.items()
    inner = _users_own(config, config[key]["trainer_cls"], ours, "trainer_cls")
    bindings = {}
    for wrapper, selector in zip(wrappers, ours, strict=True):
        bindings[f"{selector}.trainer_cls"] = inner
        inner = wrapper
    bindings[f"{script}.trainer_cls"] = inner
    bindings |= _initializer(config, script, config[key].get(INITIALIZER))
    return bindings | _probe_data(config, config[key].get("train_dataset_cfg"))


def _initializer(config, script, users):
    """Bindings of the train state's constructor, which T5X's script need not bind."""
    wrapper = _macro(config, "WITH_CHOSEN_PARAMETERS")
    if wrapper is None:
        return {}
    selector = wrapper.configurable.selector
    users = _users_own(config, users, [selector], "initializer_cls")
    bindings = {f"{script}.{INITIALIZER}": wrapper}
    return bindings | ({f"{selector}.initializer_cls": users} if users else {})


def _probe_data(config, training):
    """Bindings that read the data of a probe like the training's, where nothing is bound."""
    if _macro(config, "WITH_CURVATURE") is None or not hasattr(
        training, "configurable"
    ):
        return {}
    selector = training.configurable.selector
    scope = training.scoped_selector.rpartition("/")[0]
    bound = config.get(("", selector), {}) | config.get((scope, selector), {})
    own = {"mixture_or_task_name", *config.get(("probe", selector), {})}
    return {
        f"probe/{selector}.{name}": value
        for name, value in bound.items()
        if name not in own
    }


def _macro(config, name):
    return config.get((name, "gin.macro"), {}).get("value")


def _users_own(config, value, ours, parameter):
    """What the innermost of our wrappers around a value wraps; None for its default."""
    while value is not None and getattr(value, "configurable", None):
        selector = value.configurable.selector
        if selector not in ours:
            break
        value = config.get(("", selector), {}).get(parameter)
    return value
