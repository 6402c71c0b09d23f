"""Parses every gin file of the installed `t5x_fwdloss.configs`, each in its own fork.

    python parse_gin.py

Prints one JSON object: where the package lies, the files, and the error, or "", of each
that was parsed: where T5X cannot be imported, of those that need none. The working directory does not matter,
which is what is tested.
"""

import importlib
import importlib.resources
import importlib.util
import json
import os
import re
import sys

import gin

SCRIPTS = {
    "train": ["t5x.train", "t5x_fwdloss.standalone.train"],
    "eval": ["t5x.eval"],
    "infer": ["t5x.infer"],
    "analysis": ["t5x_fwdloss.analyze", "t5x_fwdloss.standalone.analyze"],
    "analyze": ["t5x_fwdloss.analyze", "t5x_fwdloss.standalone.analyze"],
}
STANDALONE = ["t5x_fwdloss.standalone.train", "t5x_fwdloss.tasks"]
T5X = ["t5x.train", "t5x.eval", "t5x.infer", "t5x.examples.t5.network"]
T5X += ["t5x_fwdloss.analyze"]
NEEDS_T5X = r"^(?:from|import|include) '?t5x[ ./]|fwdloss_\w*(?:models|trainer)"
PACKAGE = "t5x_fwdloss/configs/"


def text_of(name, root):
    """A file's text, with the text of the files of ours that it includes."""
    text = (root / name).read_text()
    for included in re.findall(rf"^include '{PACKAGE}(\S+)'", text, re.M):
        text += text_of(included, root)
    return text


def parse(name, text):
    """The error of one file, or the empty string; never twice in one process."""
    alias = re.search(r"^import __main__ as (\w+)_script", text, re.M)
    if alias:
        modules = SCRIPTS[alias[1]]
        module = modules[-1 if name.startswith("standalone") else 0]
        sys.modules["__main__"] = importlib.import_module(module)
    try:
        gin.parse_config_files_and_bindings([PACKAGE + name], [], finalize_config=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def in_fork(name, text):
    """`parse` in a process of its own."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, parse(name, text).encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        error = stream.read().decode()
    os.wait()
    return error


def main():
    """Prints the report."""
    with_t5x = importlib.util.find_spec("t5x") is not None
    root = importlib.resources.files("t5x_fwdloss.configs")
    names = sorted(str(p.relative_to(root)) for p in root.rglob("*.gin"))
    # Imported once, for all forks.
    for module in (STANDALONE + T5X) if with_t5x else STANDALONE:
        importlib.import_module(module)
    errors = {}
    for name in names:
        text = text_of(name, root)
        if with_t5x or not re.search(NEEDS_T5X, text, re.M):
            errors[name] = in_fork(name, text)
    report = {"root": str(root), "names": names, "errors": errors}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
