"""Damage to folders of files, drawn by hypothesis: what disks, kills and people do."""

import json
import pathlib
import re
import shutil

import hypothesis
from hypothesis import strategies as st

# What takes the place of an entry of a JSON document.
OTHERS = [None, True, -1, 7, 1.5, 10**400, "", "a", "NaN", [], {}, [[]], {"a": {}}]
WRONG = ["truncated", "empty", "binary", "nested", "list"]


def contents(name, content):
    """What a file may hold in place of its content."""
    return {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "binary": bytes(range(256)),
        "nested": b"[" * 100_000,
        "list": b"[1, 2]",
    }[name]


def entries(document, inside=()):
    """The places in a JSON document, each a tuple of keys and numbers."""
    found = []
    if isinstance(document, dict):
        found = list(document.items())
    elif isinstance(document, list):
        found = list(enumerate(document))
    for key, item in found:
        yield (*inside, key)
        yield from entries(item, (*inside, key))


def damage_entry(path, draw):
    """Takes an entry out of a JSON file, or puts one of another type in its place."""
    document = json.loads(path.read_bytes())
    *way, last = draw(st.sampled_from(list(entries(document))))
    parent = document
    for key in way:
        parent = parent[key]
    other = draw(st.sampled_from([*OTHERS, "absent"]))
    if other == "absent":
        del parent[last]
    elif type(other) is type(parent[last]):
        return f"nothing, {path.name}"
    else:
        parent[last] = other
    path.write_text(json.dumps(document))
    return f"{'/'.join(map(str, (*way, last)))} of {path.name}: {other!r}"


def one_of(draw, paths):
    """One of these paths.

    Orbax names files of data at random, and their number depends on its threads: the
    draws do not, so that the same examples come every time.
    """
    groups: dict[str, list[pathlib.Path]] = {}
    for path in paths:
        groups.setdefault(re.sub(r"[0-9a-f]{32}", "DATA", str(path)), []).append(path)
    names = sorted([*groups, *2 * [x for x in groups if x.endswith("DATA")]])
    group = groups[draw(st.sampled_from(names))]
    group.sort(key=lambda x: x.stat().st_size)
    return group[draw(st.integers(0, 3)) % len(group)]


def remove(path):
    """Removes whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def damage_path(path, draw):
    """Damages one file or folder as a whole."""
    kinds = ["deleted", "renamed", "replaced", "loop"]
    kind = draw(st.sampled_from(kinds + (WRONG if path.is_file() else ["emptied"])))
    if kind in WRONG:
        path.write_bytes(contents(kind, path.read_bytes()))
    elif kind == "renamed":
        path.rename(path.with_name(f"{path.name}_old"))
    else:
        was_file = path.is_file()
        remove(path)
        if kind == "loop":
            path.symlink_to(path)
        elif kind == "emptied" or (kind == "replaced" and was_file):
            path.mkdir()
        elif kind == "replaced":
            path.write_bytes(b"a file")
    return f"{path.name} {kind}"


def add(folder, draw):
    """Puts a foreign file or folder somewhere."""
    name = draw(st.sampled_from(["x", "x.json", "vector_9", ".x.part", "_x", "1"]))
    inside = [folder, *(x for x in sorted(folder.rglob("*")) if x.is_dir())]
    place = draw(st.sampled_from(inside)) / name
    if place.exists() or place.is_symlink():
        return f"nothing, {place.name} is there"
    if draw(st.booleans()):
        place.mkdir()
    else:
        place.write_text("[]")
    return f"new {place.relative_to(folder)}"


@st.composite
def of_folder(draw, folder: pathlib.Path, top=False):
    """Damages a folder once; returns what was done.

    Args:
        draw: hypothesis's.
        folder: what is damaged, the folder itself only if `top`.
        top: whether the folder itself may be damaged.
    """
    inside = [x for x in sorted(folder.rglob("*")) if not x.is_symlink()]
    documents = [x for x in inside if x.suffix == ".json" and is_json(x)]
    how = draw(st.sampled_from(["path", "entry", "add"]))
    if how == "add" or not inside:
        return add(folder, draw)
    if how == "entry" and documents:
        return damage_entry(one_of(draw, documents), draw)
    return damage_path(one_of(draw, inside + [folder] * top), draw)


def is_json(path):
    """Whether a file holds JSON that has entries."""
    try:
        return bool(list(entries(json.loads(path.read_bytes()))))
    except (ValueError, RecursionError, OSError):
        return False


def contents_of(folder):
    """Every file below a folder, with its bytes."""
    return {
        str(x.relative_to(folder)): x.read_bytes()
        for x in sorted(folder.rglob("*"))
        if x.is_file() and not x.is_symlink()
    }


def run(law, examples):
    """Tries a law with so many examples, the same ones every time."""
    hypothesis.settings(
        deadline=None,
        derandomize=True,
        max_examples=int(examples),
        database=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )(law)()
