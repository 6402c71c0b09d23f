"""gin's messages, as gin writes them, and the sentences in their place."""

import re

import gin
import pytest

from t5x_fwdloss.command_line import gin_sentences


@pytest.fixture(autouse=True)
def clean_gin():
    yield
    with gin.unlock_config():
        gin.clear_config()


def error_of(text, tmp_path=None):
    """What gin raises for a file of this text."""
    file = tmp_path / "mine.gin"
    file.write_text(text)
    with pytest.raises(Exception) as raised:  # noqa: PT011  whatever gin raises
        gin.parse_config_files_and_bindings([str(file)], [])
    return raised.value


HEAD = "from __gin__ import dynamic_registration\n"
CASES = {
    "a required macro": (
        "SIZE = %gin.REQUIRED\n",
        r"The macro SIZE has no value: add --gin\.SIZE=\.\.\.",
    ),
    "an unbound macro": (
        "SIZE = %OTHER\n",
        r"The macro OTHER is used \(%OTHER\) and no gin file binds it",
    ),
    "a forgotten import": (
        f"{HEAD}network.Config.size = 1\n",
        r"uses 'network' and does not import it \(in \S+mine\.gin, line 2\)",
    ),
    "a module that is not installed": (
        f"{HEAD}import nowhere_to_be_found\n",
        r"imports 'nowhere_to_be_found', which is not installed .*mine\.gin, line 2",
    ),
    "a name that the module lacks": (
        f"{HEAD}import optax\noptax.adamm.b1 = 1\n",
        r"binds 'optax\.adamm', and <module 'optax' from '\S+'> has no such name \(in",
    ),
    "an argument that the function lacks": (
        f"{HEAD}import optax\noptax.adam.beta = 1\n",
        r"optax\.adam has no argument 'beta' \(in \S+mine\.gin, line 3\)",
    ),
    "a measurement with the matrix in its name": (
        f"{HEAD}from t5x_fwdloss import analysis\nX = [@analysis.GaussNewtonTrace()]\n",
        r"^analysis\.GaussNewtonTrace must be written as gauss_newton/analysis\.Trace, .*: "
        r"@gauss_newton/analysis\.Trace\(\) in the list, .*mine\.gin, line 3\)\.$",
    ),
    "a file that is not there": (
        "include 'nowhere.gin'\n",
        r"There is no gin file nowhere\.gin",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gin_s_message_becomes_a_sentence_that_names_the_remedy(case, tmp_path):
    text, message = CASES[case]
    found = gin_sentences.sentence(error_of(text, tmp_path))
    assert "\n" not in found
    assert re.search(message, found), found


def test_a_file_in_a_folder_that_is_no_package_needs_its_absolute_path(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "models_of_mine").mkdir()
    (tmp_path / "models_of_mine" / "base.gin").write_text("SIZE = 1\n")
    error = error_of("include 'models_of_mine/base.gin'\n", tmp_path)
    found = gin_sentences.sentence(error)
    assert re.fullmatch(
        r"The gin file models_of_mine/base\.gin lies in a folder without .*: give its "
        r"absolute path\.",
        found,
    ), found
    absolute = f"include '{tmp_path}/models_of_mine/base.gin'\n"
    (tmp_path / "mine.gin").write_text(absolute)
    gin.parse_config_file(str(tmp_path / "mine.gin"))


def test_another_type_error_is_not_taken_for_it():
    assert "TypeError: 5" in gin_sentences.sentence(TypeError(5))


def test_what_is_not_known_keeps_gin_s_words_and_says_how_to_see_more(tmp_path):
    found = gin_sentences.sentence(error_of("SIZE = [1, 2\n", tmp_path))
    assert found.startswith(("SyntaxError: ", "TokenError: "))
    assert found.endswith("(--verbosity=1 shows where)")


def test_an_error_inside_a_function_is_told_from_one_on_the_way_to_it():
    def function(value):
        return 1 / value

    with pytest.raises(ZeroDivisionError) as inside:
        function(0)
    with pytest.raises(TypeError) as before:
        function()
    assert gin_sentences.entered(inside.value, function)
    assert not gin_sentences.entered(before.value, function)


def test_lines_that_gin_adds_about_its_calls_are_left_out():
    error = ValueError("It must be so.\n  In call to configurable 'analyze' (<f>)")
    assert gin_sentences.own_words(error) == "It must be so."


MINE = f"""{HEAD}
import optax
RATE = 1.0
optax.adam.b1 = %RATE
optax.adam.b2 = %DECAY
DECAY = 0.9
"""
REPLACED = {
    "on the command line": (
        "",
        ["optax.adam.b1 = 0.5"],
        "--gin.optax.adam.b1 takes the place of %RATE in the gin files; give --gin.RATE "
        "alone.",
    ),
    "in a later file": (
        f"{HEAD}import optax\noptax.adam.b1 = 0.5\n",
        [],
        "a gin file binds something else where the run file has %RATE; take that binding "
        "out and give --gin.RATE alone.",
    ),
}


@pytest.mark.parametrize("where", REPLACED)
def test_a_macro_that_another_binding_replaces_is_told_which(where, tmp_path):
    later, more, words = REPLACED[where]
    files = [str(tmp_path / name) for name in ("mine.gin", "later.gin")]
    for file, text in zip(files, (MINE, later), strict=True):
        (tmp_path / file).write_text(text)
    bindings = ["RATE = 2.0", "DECAY = 0.5", *more]
    gin.parse_config_files_and_bindings(files, bindings, finalize_config=False)
    with pytest.raises(ValueError, match="--gin.RATE must bind a macro") as raised:
        gin_sentences.check_macros(bindings, files)
    assert str(raised.value).endswith(f"that this run reads: {words}")
