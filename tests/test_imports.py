"""The layering, read from the sources: quantization <- modeling <- hf_sparse, no ring, only public names from outside;
and what an import may do.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"hf_sparse.quantization": "quantization", "hf_sparse.modeling": "modeling", "hf_sparse": "hf_sparse"}
LAYERS = list(FOLDERS)  # each may import itself and those before it


def layer_of(module: str) -> int:
    """Of a module's dotted name: its place in LAYERS."""
    return next(i for i, package in enumerate(LAYERS) if module == package or module.startswith(f"{package}."))


def sources() -> dict[str, Path]:
    """Every module of the three packages, by the dotted name it is installed under."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`, which never run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from running_nodes(node)


def imports_of(module: str, text: str, is_package: bool, modules: set[str]) -> set[str]:
    """The modules of ours that `module` imports, wherever in its text."""
    imported: set[str] = set()
    for node in running_nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            # `from package import module` imports the module; `from module import name` the module that has it.
            imported |= {name if name in modules else base for name in names}
    return {name for name in imported if name in modules}


def graph() -> dict[str, set[str]]:
    found = sources()
    return {
        module: imports_of(module, path.read_text(), path.name == "__init__.py", set(found))
        for module, path in found.items()
    }


def find_ring(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, in order; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for target in sorted(edges[module]):
            if ring := visit(target, [*path, module]):
                return ring
        done.add(module)
        return []

    return next((ring for module in sorted(edges) if (ring := visit(module, []))), [])


def test_no_import_runs_up() -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target in sorted(targets)
        if layer_of(target) > layer_of(module)
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_ring() -> None:
    assert find_ring(graph()) == []


def test_the_reader_sees_every_way_to_import() -> None:
    modules = {"hf_sparse", "hf_sparse.a", "hf_sparse.b", "hf_sparse.modeling", "hf_sparse.modeling.c"}
    text = "from .b import x\nimport hf_sparse.modeling.c\ndef f():\n    from . import a\nfrom .modeling import y\n"
    expected = {"hf_sparse.b", "hf_sparse.modeling.c", "hf_sparse.a", "hf_sparse.modeling"}
    assert imports_of("hf_sparse.z", text, False, modules) == expected
    assert imports_of("hf_sparse", text, True, modules) == expected
    assert imports_of("hf_sparse.modeling.c", "from ..a import x\nfrom .. import b", False, modules) == {
        "hf_sparse.a",
        "hf_sparse.b",
    }
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x\n"
    assert imports_of("hf_sparse.z", guarded, False, modules) == set()
    assert find_ring({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert find_ring({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("folder", ["scripts", "tests"])
def test_outsiders_import_public_names_only(folder: str) -> None:
    private = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                head, *rest = name.split(".")
                if head == "hf_sparse" and any(part.startswith("_") and not part.endswith("__") for part in rest):
                    private.append(f"{path.relative_to(ROOT)}: {name}")
    assert private == []


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["modeling", "quantization"])
def test_the_bare_name_of_a_package_is_refused(package: str) -> None:
    result = run(f"import {package}", ROOT)
    assert result.returncode != 0
    assert f"ImportError: this package is hf_sparse.{package}" in result.stderr


def test_imports_are_lazy_and_silent(tmp_path: Path) -> None:
    result = run("import hf_sparse, sys; assert 'torch' not in sys.modules", tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    heavy = "{'transformers', 'hf_sparse.modeling', 'accelerate', 'pulp'}"
    result = run(f"import hf_sparse.quantization, sys; assert not {heavy} & set(sys.modules)", tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_what_is_exported_is_there() -> None:
    every = "all(hasattr(hf_sparse, name) and name in dir(hf_sparse) for name in hf_sparse.__all__)"
    result = run(f"import hf_sparse; assert {every}", ROOT / "tests")
    assert result.returncode == 0, result.stderr
    result = run("import hf_sparse; hf_sparse.nonsense", ROOT / "tests")
    assert "AttributeError: module 'hf_sparse' has no attribute 'nonsense'" in result.stderr
