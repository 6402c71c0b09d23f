"""Checks pages: doctests pass, links and files exist, make targets and macros too.

Every Python snippet is a doctest, or the line above it names the test that runs it, as
`<!-- run by tests/test_x.py -->`. `tests/test_commands.py` reads the commands.

python scripts/check_readme.py README.md docs/*.md
"""

import doctest
import functools
import os
import pathlib
import re
import sys
import tempfile

# The snippets import JAX; what it compiles for them is kept, as that of the tests.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(tempfile.gettempdir()) / "t5x_fwdloss-jax-cache"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

ROOT = pathlib.Path(__file__).resolve().parent.parent


def problems(path: pathlib.Path) -> list[str]:
    """One line for each name in the text that the repository lacks."""
    text = path.read_text(encoding="utf-8")
    found = []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in sorted(set(re.findall(r"`?\bmake ([a-z][a-z0-9-]*)\b`?", text))):
        code = re.search(rf"(^|`|\s{{4}})make {target}\b", text, re.M)
        if code and not re.search(rf"^{target}:", makefile, re.M):
            found.append(f"'make {target}' is not a target of the Makefile")
    for link, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        target = path.parent / link if link else path
        if "://" in link:
            continue
        if not target.exists():
            found.append(f"the link {link} leads nowhere")
        elif heading and heading not in _headings(target):
            found.append(f"{link} has no heading {heading}")
    for name in sorted(set(re.findall(r"t5x_fwdloss/configs/([\w/]+\.gin)", text))):
        if not (ROOT / "configs" / name).exists():
            found.append(f"configs/{name} does not exist")
    for name in sorted(set(re.findall(r"\bscripts/[\w.]+\.(?:py|sh)\b", text))):
        if not (ROOT / name).exists():
            found.append(f"{name} does not exist")
    snippets = r"(?ms)(?:^<!-- run by (tests/[\w/]+\.py) -->\n)?^```python\n(.*?)^```"
    for test, snippet in re.findall(snippets, text):
        if test and not (ROOT / test).exists():
            found.append(f"{test} does not exist")
        elif not test and not snippet.startswith(">>> "):
            found.append(f"a snippet is not a doctest: {snippet.splitlines()[0]}")
    sources = _sources()
    for name in sorted(set(re.findall(r"`([A-Z]+_[A-Z_]+)\b", text))):
        if not re.search(rf"\b{name}\b", sources):
            found.append(f"no file of the package, its configs or scripts has {name}")
    return found


def _headings(path: pathlib.Path) -> list[str]:
    """The headings of a page, as links to them are written."""
    found = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
    return [re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in found]


@functools.cache
def _sources() -> str:
    """The text of all files that define macros and environment variables."""
    files = [
        path
        for folder in ("configs", "scripts", "t5x_fwdloss")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".gin", ".sh", ".py")
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def main(arguments: list[str]) -> int:
    """Exit status of the command line."""
    status = 0
    for argument in arguments:
        path = pathlib.Path(argument).resolve()
        for problem in problems(path):
            print(f"{argument}: {problem}", file=sys.stderr)
            status = 1
        results = doctest.testfile(str(path), module_relative=False)
        print(f"{argument}: {results.attempted} doctests, {results.failed} failed")
        status |= bool(results.failed)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
