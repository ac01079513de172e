"""The rules of the code base that a reader relies on: imports go one way, and state stays where it belongs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "helix").rglob("*.py")) + sorted((ROOT / "model_zoo").glob("*.py"))

# Lowest first; a module imports only from its own part and from those above it here.
ORDER = (
    ("helix.errors",),
    ("helix.config_faults",),
    ("helix.config_yaml",),
    ("helix.model_spec",),
    ("helix.config", "helix.layout", "helix.options"),
    ("helix.cost",),
    ("helix.capabilities", "model_zoo"),
    ("helix.planner", "helix.models"),
    ("helix.comm",),
    ("helix.kernels", "helix.weights"),
    ("helix.cache",),
    ("helix.layers",),
    ("helix.engine",),
    ("helix.server",),
    ("helix.bench", "helix.calibrate", "helix.check", "helix.verify"),
    ("helix.cli",),
)

# Who may read or write the environment, beside config: what is set is for a library that reads nothing else.
ENVIRONMENT = {"helix/config.py", "helix/comm/world.py", "helix/engine/join.py", "helix/engine/spawn.py"}

# Who may call deepspeed: the collectives, and the parts of its MoE that the README names.
DEEPSPEED = {"helix/comm/world.py", "helix/layers/moe.py"}


def rank_of(module: str) -> int:
    for rank, names in enumerate(ORDER):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return rank
    raise AssertionError(f"{module} has no place in ORDER; give it one")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_keeps_the_rules(path: Path) -> None:
    name, where = module_name(path), str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text())
    imported = list(imports_of(tree))
    if name not in ("helix", "model_zoo"):
        for module in imported:
            if module.startswith(("helix.", "model_zoo")):
                assert rank_of(module) <= rank_of(name), f"{where} imports {module}, which stands above it"
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)], f"{where} uses `global`"
    if where not in ENVIRONMENT:
        uses = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
        assert not uses, f"{where} reads the environment; config.launch_env does that"
    if where not in DEEPSPEED:
        assert not [module for module in imported if module.split(".")[0] == "deepspeed"], where
    assert "pickle" not in imported, f"{where}: nothing here reads pickle"


def test_integer_modules_import_no_torch() -> None:
    """The planner and `helix models` answer without the seconds that torch takes."""
    for path in FILES:
        name = module_name(path)
        if name != "helix" and rank_of(name) <= rank_of("helix.planner"):
            assert "torch" not in {module.split(".")[0] for module in imports_of(ast.parse(path.read_text()))}, path


def test_functions_and_files_stay_readable() -> None:
    """Tails, not averages: no file beyond 620 lines, no function beyond 100 (kernel bodies 200)."""
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 620, f"{path} is more than one thing"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                is_kernel = any("jit" in ast.dump(one) for one in node.decorator_list)
                assert length <= (200 if is_kernel else 100), f"{path}: {node.name} has {length} lines"
