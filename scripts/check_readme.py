"""Checks pages: doctests pass, links and files exist, make targets and macros too.

python scripts/check_readme.py README.md docs/*.md
"""

import doctest
import pathlib
import re
import sys

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
    for link in re.findall(r"\]\(([^)#\s]+)\)", text):
        if "://" not in link and not (path.parent / link).exists():
            found.append(f"the link {link} leads nowhere")
    for name in sorted(set(re.findall(r"t5x_fwdloss/configs/([\w/]+\.gin)", text))):
        if not (ROOT / "configs" / name).exists():
            found.append(f"configs/{name} does not exist")
    for name in sorted(set(re.findall(r"\bscripts/[\w.]+\.(?:py|sh)\b", text))):
        if not (ROOT / name).exists():
            found.append(f"{name} does not exist")
    return found


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
