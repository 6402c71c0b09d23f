"""How a command ends: refusals of every class in a line, bugs as they are, Ctrl-C."""

import re

import pytest
from analysis import runs, toy

from t5x_fwdloss import losses
from t5x_fwdloss.analysis import DirectionalDerivatives, settings
from t5x_fwdloss.analysis.objective import preflight
from t5x_fwdloss.analysis.objective.finite import NonFiniteLossError, check_finite
from t5x_fwdloss.command_line.exit_status import exit_status


def ended(action, capsys):
    """The status and what was said of a command that does this."""

    def command():
        return action()

    status = exit_status("command", lambda: command, command)
    return status, capsys.readouterr().err


def without_forward_mode():
    objective = runs.objective(impl="custom_vjp")
    needed_by = DirectionalDerivatives().name
    preflight.has_forward_mode(objective, toy.parameters(), needed_by)


def not_finite():
    check_finite("the loss", [("batch 1", {"a/b": float("nan")})])


REFUSALS = {
    "ValueError": (
        lambda: losses.LossSettings("x"),
        "The loss must be one of .*: got 'x'.",
    ),
    "PreflightError": (without_forward_mode, 'set LOSS_IMPL = "custom_jvp" in gin'),
    NonFiniteLossError.__name__: (not_finite, "batch 1 gives nan in a/b"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_every_refusal_of_ours_is_one_line_and_status_1(kind, capsys):
    action, sentence = REFUSALS[kind]
    status, said = ended(action, capsys)
    assert status == 1
    assert re.fullmatch(rf"command: [^\n]*{sentence}[^\n]*\n", said), said


def test_values_of_several_lines_are_said_in_one(capsys):
    status, said = ended(lambda: losses.LossSettings(["a\nb"]), capsys)
    assert status == 1
    assert said.count("\n") == 1


def test_python_s_own_error_on_our_line_is_a_bug_and_raised(capsys):
    with pytest.raises(TypeError, match="not supported between"):
        ended(lambda: settings.at_least(1).holds("a"), capsys)
    assert not capsys.readouterr().err


def test_ctrl_c_says_how_to_resume(capsys):
    def stop():
        raise KeyboardInterrupt

    status, said = ended(stop, capsys)
    assert status == 130
    assert "start the same command again to resume" in said


def test_what_the_command_returns_is_its_status(capsys):
    assert ended(lambda: 3, capsys) == (3, "")
    assert ended(lambda: {"loss": 1.0}, capsys) == (0, "")
