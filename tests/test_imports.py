"""Imports point one way, as docs/architecture.md draws it."""

import ast

import pytest

# What a part of the package may import of the others; every part is named.
ALLOWED = {
    "losses": set(),
    "curvature": set(),
    "progress": set(),
    "tasks": set(),
    "head_capture": set(),
    "argmax_logits": set(),
    "command_line": {"progress"},
    "loss_mixin": {"losses", "head_capture", "argmax_logits"},
    "analysis": {"losses", "curvature", "loss_mixin", "progress"},
    "models": {"losses", "loss_mixin"},
    "gin_override": {"models"},
    "training": {"analysis", "curvature", "losses", "loss_mixin", "models", "t5x_host"},
    "t5x_host": {"analysis", "curvature", "command_line", "progress"},
    "analyze": None,  # anything
    "report": {"analysis", "command_line"},
    "standalone": None,
}
MAY_IMPORT = {
    "gin": {"command_line", "gin_override", "analyze", "standalone"},
    "t5x": {"models", "analyze", "t5x_host", "training"},
}


def imports(path):
    """The dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(repository, part):
    root = repository / "t5x_fwdloss"
    return (
        [root / f"{part}.py"]
        if (root / f"{part}.py").exists()
        else sorted((root / part).rglob("*.py"))
    )


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_what_lies_below_it_only(repository, part):
    found = files(repository, part)
    assert found
    for path in found:
        for name in imports(path):
            library, *inner = name.split(".")
            if library in MAY_IMPORT:
                assert part in MAY_IMPORT[library], f"{path} imports {name}"
            if library == "t5x_fwdloss" and ALLOWED[part] is not None:
                assert inner[0] in ALLOWED[part] | {part}, f"{path} imports {name}"


def test_the_mathematics_of_training_knows_no_host(repository):
    for path in files(repository, "training"):
        if path.name not in ("trainer.py", "forward_trainer.py", "wrapping.py"):
            for name in imports(path):
                assert name.split(".")[0] != "t5x", path
                for host in ("models", "t5x_host"):
                    assert not name.startswith(f"t5x_fwdloss.{host}"), path


def test_every_part_is_in_the_table(repository):
    root = repository / "t5x_fwdloss"
    parts = {path.parent.name for path in root.glob("*/__init__.py")}
    parts |= {path.stem for path in root.glob("*.py")}
    assert parts - {"__init__"} == set(ALLOWED)


def test_no_folder_has_more_than_a_dozen_files(repository):
    root = repository / "t5x_fwdloss"
    for folder in {path.parent for path in root.rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= 12, folder
