"""The size budget of the code, and that every public name exists and is documented."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import sightlens

SOURCES = sorted(Path(sightlens.__file__).parent.rglob("*.py"))
LONG = {"from_pretrained"}  # its arguments are HF's
FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 40, 5


def functions(tree: ast.AST):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def code_lines(function: ast.FunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return function.end_lineno - body[0].lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_files_and_functions_stay_small(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES
    for function in functions(ast.parse(text)):
        assert code_lines(function) <= FUNCTION_LINES, function.name
        own = [a for a in [*function.args.posonlyargs, *function.args.args] if a.arg not in ("self", "cls")]
        every = [*own, *function.args.kwonlyargs]
        command = any("app.command" in ast.unparse(decorator) for decorator in function.decorator_list)  # options, not parameters
        assert len(every) <= PARAMETERS or command or function.name in LONG, f"{function.name} has {len(every)} parameters"


def test_no_module_is_a_drawer():
    drawers = {"utils", "helpers", "common", "misc", "tools"}
    assert not [path for path in SOURCES if path.stem in drawers or drawers & set(path.parts)]


@pytest.mark.parametrize("name", sightlens.__all__)
def test_public_names_are_documented(name):
    value = getattr(sightlens, name)
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        assert inspect.getdoc(value)


def test_public_names_are_few_and_sorted():
    assert len(sightlens.__all__) <= 36
    assert sightlens.__all__ == sorted(sightlens.__all__, key=lambda name: (name.islower(), not name.isupper(), name))
