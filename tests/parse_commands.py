"""Reads every command of pages as far as its flags and gin, each in a fork of its own.

    python parse_commands.py README.md docs/page.md

A command is a line of a block of code that begins with `python -m`, a script of ours or
`--gin.`; the last is what a page adds to an analysis. `--gin.NAME=VALUE` within a
sentence must fit one run or another. The working directory has the user's own gin files.
Prints one JSON object: by page, command to its error, "" without one, None where it needs
T5X and there is none.
"""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import tempfile

import gin
import jax

from t5x_fwdloss.command_line import exit_status, gin_sentences

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = "--gin_file=t5x_fwdloss/configs"
STANDALONE = "python -m t5x_fwdloss.standalone."
# The runs that a page may add a setting to, and whether they need T5X.
RUNS = {
    f"{STANDALONE}analyze {CONFIGS}/standalone/analyze.gin {CONFIGS}/standalone/tiny.gin "
    "--gin.CHECKPOINT_PATH=\"'/m'\" --gin.ANALYSIS_OUTPUT_DIR=\"'/a'\"": False,
    f"{STANDALONE}train {CONFIGS}/standalone/train.gin {CONFIGS}/standalone/tiny.gin "
    "--gin.MODEL_DIR=\"'/m'\"": False,
    f"python -m t5x_fwdloss.analyze {CONFIGS}/examples/cmudict_analyze.gin "
    "--gin.CHECKPOINT_PATH=\"'/m'\" --gin.ANALYSIS_OUTPUT_DIR=\"'/a'\"": True,
    f"python -m t5x.main --run_mode=train {CONFIGS}/examples/cmudict_train.gin "
    f"{CONFIGS}/losses/custom_jvp.gin {CONFIGS}/training/curvature.gin "
    f"{CONFIGS}/training/forward_gradient.gin --gin.MODEL_DIR=\"'/m'\"": True,
}
NEEDS_T5X = r"-m (t5x\.|t5x_fwdloss\.analyze\b)"
SHARED = ["seqio", "t5x_fwdloss.tasks", "t5x_fwdloss.standalone.model"]
SHARED_T5X = ["t5x.eval", "t5x.infer", "t5x.train", "t5x.examples.t5.network"]
SHARED_T5X += ["t5x_fwdloss.models"]


def commands(text):
    """The commands of a page, in order, and its settings within sentences."""
    blocks = re.findall(r"(?ms)^```(?:bash|sh)\n(.*?)^```", text)
    outside = re.sub(r"(?ms)^```.*?^```", "", text)
    blocks += re.findall(r"(?m)(?:^ {4}.*\n)+", outside)
    found = []
    for block in blocks:
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            line = line.strip()
            if re.match(r"python -m |--gin\.|([A-Z_]+=\S+ )*(sbatch )?scripts/", line):
                found.append(line)
    # NAME and MACRO stand for any name.
    return found, re.findall(r"`(--gin\.(?!MACRO|NAME)[^`]+)`", outside)


def read(command, settings=()):
    """Runs a command until its configuration is known; then adds each of the settings.

    Returns:
        The settings that do not fit.

    Raises:
        ValueError: the command ends with another status than zero.
    """
    argv = shlex.split(command, comments=True)[1:]
    assert argv[0] == "-m", command
    refused = list(settings)

    def configured(bindings=None, files=()):
        if bindings is not None:  # T5X does not check this itself
            gin_sentences.check_macros(bindings, files)
        refused[:] = [x for x in settings if not fits(x)]
        raise SystemExit(0)

    def parsed(name, configure, function):
        configure()
        configured()

    exit_status.exit_status = parsed
    jax.distributed.initialize = lambda *_, **__: None
    if argv[1].startswith("t5x."):
        from t5x import gin_utils

        parse = gin_utils.parse_gin_flags

        def parse_and_stop(paths, files, bindings, **named):
            parse(paths, files, bindings, **named)
            configured(bindings, files)

        gin_utils.parse_gin_flags = parse_and_stop
    sys.argv = [argv[1], *argv[2:]]
    try:
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code:
            raise ValueError(stop.code) from None
    return refused


def fits(setting):
    """Whether the run that is configured takes a setting, or has the name of one."""
    (argument,) = shlex.split(setting)
    name, equals, value = argument.removeprefix("--gin.").partition("=")
    try:
        gin_sentences.check_bindings([f"{name} = {value}"] if equals else [])
        if "." not in name:
            return name in re.findall(r"%(\w+)", gin.config_str())
        with gin.unlock_config():
            gin.parse_config(f"{name} = {value if equals else None}")
    except Exception:
        return False
    return True


def in_fork(function, *given):
    """The result of a function in a process of its own, or its error."""
    here, there = os.pipe()
    if os.fork() == 0:
        with tempfile.TemporaryFile("w+") as log:
            os.dup2(log.fileno(), 2)
            try:
                said = {"result": function(*given)}
            except BaseException as error:
                log.seek(0)
                said = {
                    "error": f"{type(error).__name__}: {error} {log.read()[-2000:]}"
                }
        os.write(there, json.dumps(said).encode()[:60_000])
        os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as stream:
        said = json.loads(stream.read() or b'{"error": "the process died"}')
    os.wait()
    return said


def launched(command):
    """What a launcher would run, one command per line; an error if it does not."""
    *settings, script = command.replace("sbatch ", "").split("scripts/", 1)
    done = subprocess.run(
        f"{' '.join(settings)} {ROOT}/scripts/{script}",
        shell=True,
        executable="/bin/bash",
        env=os.environ | {"PYTHON": "echo", "DRY_RUN": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    return [f"python {shlex.join(line.split())}" for line in lines if line[:3] == "-m "]


def main():
    """Prints the report."""
    with_t5x = importlib.util.find_spec("t5x") is not None
    for name in SHARED + SHARED_T5X * with_t5x:
        importlib.import_module(name)
    pages = {x: commands(pathlib.Path(x).read_text("utf-8")) for x in sys.argv[1:]}
    settings = sorted({x for _, inline in pages.values() for x in inline})
    refused = set(settings)
    for run, needs_t5x in RUNS.items():
        if with_t5x or not needs_t5x:
            refused &= set(in_fork(read, run, settings)["result"])
    report = {}
    for page, (found, inline) in pages.items():
        report[page] = {x: error_of(x, with_t5x) for x in found}
        wrong = "no run takes it" if with_t5x else None
        report[page] |= {x: wrong if x in refused else "" for x in inline}
    sys.stdout.write(json.dumps(report) + "\n")


def error_of(command, with_t5x):
    """The error of one command."""
    if command.startswith("--gin."):
        command = f"{next(iter(RUNS))} {command}"
    parts = [command]
    if not command.startswith("python"):
        if "pod_dry_run" in command:
            return ""  # a test of its own runs it
        try:
            parts = launched(command)
        except subprocess.CalledProcessError as error:
            return error.stderr
    if not with_t5x and any(re.search(NEEDS_T5X, part) for part in parts):
        return None
    return "; ".join(filter(None, (in_fork(read, x).get("error") for x in parts)))


if __name__ == "__main__":
    main()
