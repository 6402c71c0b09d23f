"""What the type checker is told of T5X: every module that is used, and nothing false."""

import ast
import importlib
import inspect

import pytest


def stubs(repository):
    return sorted((repository / "typings" / "t5x").glob("*.pyi"))


def declared(stub):
    """Dotted name of each class and function of a stub to its definition."""
    found = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef):
                found[f"{node.name}.{inner.name}"] = inner
    return {name: node for name, node in found.items() if name != "__getattr__"}


def parameter_names(node):
    if isinstance(node, ast.FunctionDef):
        args = node.args
        return [x.arg for x in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return [x.target.id for x in node.body if isinstance(x, ast.AnnAssign)]


def test_every_module_of_t5x_that_is_imported_is_declared(repository):
    used = set()
    for path in (repository / "t5x_fwdloss").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "t5x":
                used |= {alias.name for alias in node.names}
    assert used
    assert used <= {stub.stem for stub in stubs(repository)}


@pytest.mark.t5x
def test_what_is_declared_of_t5x_is_there_with_these_parameters(repository):
    num_compared = 0
    for stub in stubs(repository):
        if stub.stem == "__init__":
            continue
        module = importlib.import_module(f"t5x.{stub.stem}")
        for name, node in declared(stub).items():
            real = inspect.getattr_static(module, name.split(".")[0])
            for part in name.split(".")[1:]:
                real = getattr(real, part)
            is_data = isinstance(node, ast.ClassDef) and node.decorator_list
            if callable(real) and (isinstance(node, ast.FunctionDef) or is_data):
                there = list(inspect.signature(real).parameters)
                names = parameter_names(node)
                in_order = iter(there)
                unbound = names[1:] if names[:1] == ["self"] else names
                assert all(n in in_order for n in unbound), (name, names, there)
                num_compared += 1
    assert num_compared > 15
