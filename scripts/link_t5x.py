"""Lets this interpreter find T5X, AirIO and JEstimator in the given source folders.

    python scripts/link_t5x.py ../t5x ../airio ../jestimator

They are on no package index, and T5X's ordinary installation leaves modules out, so a
.pth file names the folders, as in an editable installation.
"""

import importlib.util
import pathlib
import site
import sys

NAMES = ("t5x", "airio", "jestimator")


def main(arguments: list[str]) -> int:
    """Exit status of the command line."""
    folders = [pathlib.Path(argument).resolve() for argument in arguments]
    missing = [
        name
        for name in NAMES
        if not any((folder / name).is_dir() for folder in folders)
    ]
    if missing:
        print(
            "The source folders of t5x, airio and jestimator must be given: got "
            f"{' '.join(arguments) or 'none'}, without {', '.join(missing)}.",
            file=sys.stderr,
        )
        return 1
    target = pathlib.Path(site.getsitepackages()[0]) / "t5x_sources.pth"
    target.write_text("".join(f"{folder}\n" for folder in folders))
    site.addsitedir(str(target.parent))
    found = [
        f"{n}: {importlib.util.find_spec(n).submodule_search_locations}" for n in NAMES
    ]
    print("\n".join([f"wrote {target}", *found]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
