"""What every wrapper of a T5X trainer checks, before training begins."""

import inspect
from typing import Any

import jax

from t5x_fwdloss import loss_mixin, models

# isort: split
# After `models`, whose error names the missing part of T5X in one sentence.
from t5x import trainer as t5x_trainer

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.objective import forward_mode
from t5x_fwdloss.curvature.products import derivatives
from t5x_fwdloss.training.probes import check_forward_mode

REMEDY = (
    "add --gin_file=t5x_fwdloss/configs/losses/custom_jvp.gin (or chunked.gin, or "
    "autodiff.gin)"
)
_STOCK_LOSS = models.t5x_models.BaseTransformerModel.loss_fn
_OTHERS = {t5x_trainer.Trainer: "a subclass"}


def check_constructor(trainer_cls: Any, base: type, who: str) -> None:
    """Passes if a `trainer_cls` may build a trainer of a class.

    Args:
        trainer_cls: the user's.
        base: T5X's class.
        who: the beginning of the sentence, up to the colon.

    Raises:
        TypeError: it is no function, and no subclass.
    """
    if not callable(trainer_cls) or (
        inspect.isclass(trainer_cls) and not issubclass(trainer_cls, base)
    ):
        raise TypeError(_no_trainer("trainer_cls", trainer_cls, base, who))


def check_trainer(trainer: Any, base: type, who: str) -> None:
    """Passes if what a `trainer_cls` returned is a trainer of a class.

    Args:
        trainer: the object.
        base: T5X's class.
        who: the beginning of the sentence, up to the colon.

    Raises:
        TypeError: it is another object.
    """
    if not isinstance(trainer, base):
        raise TypeError(_no_trainer("what trainer_cls returns", trainer, base, who))


def _no_trainer(what, found, base, who) -> str:
    others = _OTHERS.get(base, "another t5x.trainer.BaseTrainer")
    return (
        f"{who}: {what} must be t5x.trainer.Trainer or {others}: got "
        f"{settings.shown(found)}."
    )


def check_model(model: Any, needs: str) -> None:
    """Rejects what is known to lack forward mode, before anything is compiled.

    Args:
        model: T5X's model.
        needs: the beginning of the sentence.

    Raises:
        ValueError: it names the losses to choose from.
    """
    if isinstance(model, loss_mixin.LossMixin):
        check_forward_mode(model.loss_settings, needs)
    elif inspect.unwrap(type(model).loss_fn) is _STOCK_LOSS:
        raise ValueError(
            f"{needs} got T5X's own loss, of {type(model).__name__}; {REMEDY}."
        )


def check_traced(model: Any, loss: Any, params: Any, *args: Any, needs: str) -> None:
    """Rejects a loss of the user's own that has no forward mode.

    Args:
        model: T5X's model.
        loss: `(params, *args)` to its loss.
        params: the parameters.
        *args: the loss's other arguments.
        needs: the beginning of the sentence.

    Raises:
        ValueError: it names the function that has none.
    """
    if isinstance(model, loss_mixin.LossMixin):
        return  # checked by its settings, without a trace
    shapes = jax.eval_shape(lambda *x: x, params, *args)
    push = derivatives.directional_derivative(loss)
    if forward_mode.is_blocked(jax.make_jaxpr(push)(shapes[0], *shapes)):
        found = forward_mode.custom_vjp_functions(jax.make_jaxpr(loss)(*shapes))
        raise ValueError(
            f"{needs} got that of {type(model).__name__}, in which jax.custom_vjp has "
            f"none: {', '.join(found) or 'a function without a name'}; derive "
            f"{type(model).__name__} from a class in t5x_fwdloss.models instead."
        )
