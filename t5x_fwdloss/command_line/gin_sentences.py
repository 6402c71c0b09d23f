"""One sentence on a user's mistake in place of gin's error.

gin reports a forgotten macro, import or file as a stack of its own calls. The functions
here know gin's messages and name the remedy; unknown messages are kept.
"""

import difflib
import dis
import re
import tokenize
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import gin
from gin import config_parser

RUN_FILE = "t5x_fwdloss/configs/runs/analyze.gin"

_RAISE = dis.opmap["RAISE_VARARGS"]
_WHERE = re.compile(
    r'In (?:file|bindings string|string) ?"?([^"\n]*)"?,? line (\d+)', re.I
)

# gin's message, and the sentence that replaces it; groups of the message are filled in.
_RULES: Sequence[tuple[str, str]] = (
    (
        r"^(\S+?)/(?:gin\.)?macro\.value set to `%gin\.REQUIRED`",
        "The macro {0} has no value: add --gin.{0}=... (a string needs quotes inside, as "
        "in --gin.{0}=\"'/path'\"), or bind it in a gin file after the run file.",
    ),
    (
        r"^(\S+) set to `%gin\.REQUIRED`",
        "{0} has no value: add --gin.{0}=... or bind it in a gin file.",
    ),
    (
        r"^'(\w+)' was not provided by an import statement",
        "A gin file uses {0!r} and does not import it{where}: add the import to that "
        "file itself (for example 'from t5x.examples.t5 import network'); include does "
        "not pass imports on.",
    ),
    (
        r"^Couldn't resolve selector (\S+); <module '(?:__main__|t5x_fwdloss\.analyze)'",
        "A gin file binds {0!r}, which belongs to another script{where}: for an "
        f"analysis the run file is {RUN_FILE}, in place of the file for train, eval or "
        "infer. Of a file that holds a model and such a run together, give the file of "
        "the model that it includes, and its other lines (LOSS_NORMALIZING_FACTOR, "
        "MIXTURE_OR_TASK_NAME, ...) in a file of your own after the run file.",
    ),
    (
        r"^Couldn't resolve selector (\S+); (<[^>]+>)",
        "A gin file binds {0!r}, and {1} has no such name{where}.",
    ),
    (
        r"^No configurable matching (?:reference )?'@?([^'()]+)(?:\(\))?'",
        "Nothing named {0!r} is known{where}: a binding on the command line reaches only "
        "what some --gin_file imports and mentions.",
    ),
    (
        r"^Unable to open file: (\S+)\. Searched config paths: (\[[^\]]*\])",
        "There is no gin file {0}{where}: looked for in {1}; --gin_search_paths adds "
        "folders, and a folder with an __init__.py in an installed package needs none.",
    ),
    (
        r"^No module named '([^']+)'",
        "A gin file imports {0!r}, which is not installed here or not on PYTHONPATH"
        "{where}.",
    ),
    (
        r"^Configurable '([^']+)' doesn't have a parameter named '([^']+)'",
        "{0} has no argument {1!r}{where}.",
    ),
    (  # T5X's own checks of its configurations
        r"^`?([A-Z]\w*\.\w+)`? must be (.+)",
        "{0} must be {1}",
    ),
    (
        r"^maximum recursion depth exceeded",
        "A binding of the configuration must not refer to itself, directly or through "
        "others: one does.",
    ),
    (
        r"^No bindings specified for '([^'/]+)/gin\.macro'",
        "The macro {0} is used (%{0}) and no gin file binds it: add --gin.{0}=... or "
        "bind it in a gin file.",
    ),
    (
        r"missing \d+ required [\w-]+ arguments?: ([^\n.]+)",
        "A class or function of the configuration lacks values for {0}{where}: {message}",
    ),
)

# Former measurements with the matrix in their names.
_MATRIX_IN_NAME = re.compile(
    r"^(?:No configurable matching|Couldn't resolve selector) .*?((?:\w+\.)*)"
    r"\b(Hessian|GaussNewton|(?:Sampled|Empirical)?Fisher)"
    r"(Eigenpairs|Trace|SpectralDensity|GroupTraces|Diagonal)\b"
)


def check_bindings(bindings: Sequence[str]) -> None:
    """Passes if gin can read every binding of the command line.

    Args:
        bindings: such as "NUM_BATCHES = 3".

    Raises:
        ValueError: it names the first that it cannot, and says how to write values.
    """
    for binding in bindings:
        try:
            list(config_parser.ConfigParser(binding, _Names()))
        except (SyntaxError, ValueError, tokenize.TokenError):
            name, _, value = binding.partition("=")
            raise ValueError(
                f"--gin.{name.strip()} must have a value that gin can read: got "
                f"{value.strip()}; a string needs quotes inside, as in "
                f"--gin.{name.strip()}=\"'text'\", a measurement an @ and (), as in "
                "[@Trace()]."
            ) from None


def check_macros(bindings: Sequence[str], gin_files: Sequence[str] = ()) -> None:
    """Passes if every macro that the command line binds is read by something.

    Args:
        bindings: those of the command line, after gin has read them and all files.
        gin_files: the files that were read.

    Raises:
        ValueError: it names the first that is not, and its replacement or the nearest
            that is.
    """
    read = sorted(set(re.findall(r"%(\w+)", gin.config_str())))
    for binding in bindings:
        name = binding.partition("=")[0].strip()
        if not re.fullmatch(r"\w+", name) or name in read:
            continue
        near = difflib.get_close_matches(name, read, 1)
        names = f"the nearest is {near[0]}" if near else f"only {', '.join(read)}"
        raise ValueError(
            f"--gin.{name} must bind a macro that this run reads: "
            f"{_replacement(name, bindings, gin_files) or f'it reads no {name}; {names}'}."
        )


def check_scopes() -> None:
    """Passes if every measurement of a matrix is in a scope with a binding.

    gin accepts any scope: in a misspelled one, a measurement is of the Hessian.

    Raises:
        ValueError: it names the first that is not, and the nearest that is.
    """
    text = gin.config_str()
    bound = re.findall(r"^([\w/]+)/([\w.]+)\.(\w+) =", text, re.M)
    of_matrices = {name for _, name, setting in bound if setting == "matrix"}
    for scope, name in re.findall(r"@([\w/]+)/([\w.]+)\(", text):
        known = [x for x, other, _ in bound if other == name]
        if name in of_matrices and scope not in known:
            near = difflib.get_close_matches(scope, known, 1) or sorted(set(known))
            raise ValueError(
                f"@{scope}/{name}() must stand in a scope with a setting of its own, "
                f"such as {', '.join(near)}: nothing is bound in {scope}."
            )


def _replacement(macro, bindings, gin_files) -> str:
    """The binding that replaced a macro of the files, and the remedy; '' for none.

    The files are read again without the bindings, which discards gin's configuration.
    """
    gin.clear_config()
    gin.parse_config_files_and_bindings(gin_files, [], finalize_config=False)
    for binding in bindings:
        name = binding.partition("=")[0].strip()
        if "." in name and _is_macro(name, macro):
            return (
                f"--gin.{name} takes the place of %{macro} in the gin files; give "
                f"--gin.{macro} alone"
            )
    try:
        gin.query_parameter(f"{macro}/gin.macro.value")
    except ValueError:
        return ""
    return (
        f"a gin file binds something else where the run file has %{macro}; take that "
        f"binding out and give --gin.{macro} alone"
    )


def _is_macro(parameter, macro) -> bool:
    try:
        return repr(gin.query_parameter(parameter)) == f"%{macro}"
    except ValueError:
        return False


class _Names(config_parser.ParserDelegate):
    """References and macros as text, so that a binding is only parsed."""

    def configurable_reference(self, scoped_configurable_name, evaluate) -> Any:
        return f"@{scoped_configurable_name}{'()' if evaluate else ''}"

    def macro(self, macro_name) -> Any:
        return f"%{macro_name}"


def sentence(error: BaseException) -> str:
    """The error in one sentence: a remedy for a known message of gin, or gin's message.

    An error of this package's own checks is kept.
    """
    if raised_by_package(error):
        return own_words(error)
    unpackaged = _unpackaged_file(error)
    if unpackaged:
        return (
            f"The gin file {unpackaged} lies in a folder without an __init__.py, which "
            "gin cannot search: give its absolute path."
        )
    message = str(error)
    first = message.strip().split("\n")[0].strip()
    renamed = _MATRIX_IN_NAME.search(first)
    if renamed:
        return _new_name(*renamed.groups()) + f"{_location(message)}."
    for pattern, words in _RULES:
        match = re.search(pattern, first)
        if match:
            return words.format(
                *match.groups(), where=_location(message), message=_gist(message)
            )
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    made = re.search(r"\n\s*In call to configurable '([^']+)'", message)
    if made:
        return (
            f"{made[1]} must have settings that it accepts: got {name}{_gist(message)}"
        )
    return f"{name}{_gist(message)} (--verbosity=1 shows where)"


def _new_name(module: str, matrix: str, quantity: str) -> str:
    scope = re.sub("(?<=[a-z])(?=[A-Z])", "_", matrix).lower()
    new = (
        f"{module}{quantity}" if matrix == "Hessian" else f"{scope}/{module}{quantity}"
    )
    return (
        f"{module}{matrix}{quantity} must be written as {new}, the matrix being a setting"
        f" of {quantity}: @{new}() in the list, {new}.name = ... for a setting"
    )


def _unpackaged_file(error: BaseException) -> str:
    """The file that gin looked for in a folder that is not a package; '' for none."""
    if isinstance(error, TypeError):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__") == "gin.resource_reader":
                return str(frame.f_locals.get("config_path", "that is asked for"))
    return ""


def entered(error: BaseException, function: Callable) -> bool:
    """Whether the error was raised inside a call of the function."""
    code = function.__code__
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is code for frame, _ in frames)


def raised_by_package(error: BaseException) -> bool:
    """Whether a `raise` in this package raised the error, as a check of its input.

    An error of Python's own on a line of this package, such as the comparison of a
    number with a string, is a bug.
    """
    tb = error.__traceback__
    if tb is None:
        return False
    while tb.tb_next is not None:
        tb = tb.tb_next
    name = tb.tb_frame.f_globals.get("__name__", "")
    ours = name == "__main__" or name.split(".")[0] == "t5x_fwdloss"
    return ours and tb.tb_frame.f_code.co_code[tb.tb_lasti] == _RAISE


def own_words(error: BaseException) -> str:
    """The message without gin's lines about its calls."""
    return re.split(r"\n\s*In call to configurable", str(error))[0].strip()


def _location(message: str) -> str:
    places = _WHERE.findall(message)
    real = [f"{name.strip()}, line {line}" for name, line in places if name.strip()]
    return f" (in {real[0]})" if real else ""


def _gist(message: str) -> str:
    lines = [line.strip() for line in own_words(ValueError(message)).split("\n")]
    return " ".join(line for line in lines if line)
