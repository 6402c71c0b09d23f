"""The command line of the standalone scripts: T5X's flags, read without T5X.

`--gin_file` (repeatable, later files override earlier ones), `--gin.NAME=VALUE`, and
`--gin_search_paths`. An error gives one sentence and status 1.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf
from absl import app, flags

from t5x_fwdloss import progress
from t5x_fwdloss.command_line import analysis_flags, exit_status, gin_sentences


def rewrite_gin_flags(argv: Sequence[str]) -> list[str]:
    """`--gin.NAME=VALUE` as `--gin_bindings=NAME = VALUE`, which absl can parse.

    Raises:
        ValueError: if there is no value.
    """
    rewritten = []
    for argument in argv:
        if argument.startswith("--gin."):
            name, equals, value = argument.removeprefix("--gin.").partition("=")
            if not equals:
                raise ValueError(f"--gin.NAME needs =VALUE: got {argument!r}.")
            argument = f"--gin_bindings={name} = {value}"
        rewritten.append(argument)
    return rewritten


def run(
    function: Callable[..., Any],
    run_file: str,
    macros: Mapping[str, str],
    *,
    is_analysis: bool = False,
) -> None:
    """Runs a function of the script with the arguments that gin binds to it.

    Args:
        function: takes keyword arguments, among them `config_text`; an integer that
            it returns is the exit status.
        run_file: the gin file that binds its arguments.
        macros: names of the macros that need a value, each with a remedy.
        is_analysis: whether the function takes what `analysis_flags` defines.
    """
    if is_analysis:
        analysis_flags.define()
    flags.DEFINE_multi_string("gin_file", [], "gin file; repeat it for several.")
    flags.DEFINE_multi_string("gin_bindings", [], "one gin binding, NAME = VALUE.")
    flags.DEFINE_list("gin_search_paths", ["."], "folders to look for gin files in.")
    progress.show_lines()

    def main(argv):
        if len(argv) > 1:
            raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}.")
        tf.config.set_visible_devices([], "GPU")  # they are JAX's
        return attempt(function, flags.FLAGS, run_file, macros)

    try:
        argv = rewrite_gin_flags(sys.argv)
    except ValueError as error:
        sys.exit(f"{function.__name__}: {error}")
    app.run(main, argv=argv)


def attempt(
    function: Callable[..., Any], values: Any, run_file: str, macros: Mapping[str, str]
) -> int:
    """Reads gin as the flags say and calls the function; returns the exit status.

    Errors that this package or gin raises on purpose are written to standard error; any
    other exception of the function itself is a bug and is raised.

    Args:
        function: as in `run`.
        values: has `gin_file`, `gin_bindings` and `gin_search_paths`.
        run_file: as in `run`.
        macros: as in `run`.
    """

    def configure():
        configured = parse(function, values, run_file, macros)
        more = analysis_flags.given(values)
        return functools.partial(configured, config_text=gin.config_str(), **more)

    return exit_status.exit_status(function.__name__, configure, function)


def parse(
    function: Callable[..., Any], values: Any, run_file: str, macros: Mapping[str, str]
) -> Callable[..., Any]:
    """Reads the gin files and bindings; returns the function with its bound arguments.

    Raises:
        ValueError: if the run file or the value of a required macro is missing.
    """
    if not values.gin_file:
        raise ValueError(f"No --gin_file was given: the run file is {run_file}.")
    for path in values.gin_search_paths:
        gin.add_config_file_search_path(path)
    gin_sentences.check_bindings(values.gin_bindings)
    gin.parse_config_files_and_bindings(
        values.gin_file, values.gin_bindings, finalize_config=False
    )
    try:
        configured = gin.get_configurable(function)
    except ValueError:
        raise ValueError(
            f"No gin file configures {function.__name__}: add --gin_file={run_file} "
            "before the others."
        ) from None
    gin_sentences.check_macros(values.gin_bindings, values.gin_file)
    gin_sentences.check_scopes()
    unset = [f"{name} ({eg})" for name, eg in macros.items() if _unset(name)]
    if unset:
        raise ValueError(
            f"{run_file} needs values for {', '.join(unset)}. A file that sets one must "
            "come after the run file, which resets it."
        )
    gin.finalize()
    return configured


def _unset(macro: str) -> bool:
    try:
        return repr(gin.query_parameter(f"{macro}/gin.macro.value")) == "%gin.REQUIRED"
    except ValueError:
        return True
