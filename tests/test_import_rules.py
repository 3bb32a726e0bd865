"""The floors of the house: who may import what."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSE = ("service", "engine", "kernels", "prefix_cache", "loadtest")
MAY_IMPORT = {
    "service": {"service", "engine"},
    "engine": {"engine", "kernels", "prefix_cache"},
    "kernels": {"kernels"},
    "prefix_cache": {"prefix_cache"},
    "loadtest": {"loadtest"},
}
SEEN_BY_SERVICE = (
    "engine.api",
    "engine.stats",
    "engine.text",
    "engine.transport",
    "engine.types",
    "engine.views",
)
TORCH_ROOMS = ("kernels/reference.py", "kernels/triton/")


def imports(path: Path) -> Iterator[str]:
    """Full dotted names that a file imports; relative imports are not used in this house."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", HOUSE)
def test_a_floor_imports_only_from_below(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imports(path)
        if name.split(".")[0] in HOUSE and name.split(".")[0] not in MAY_IMPORT[package]
    ]
    assert not wrong


@pytest.mark.parametrize("package", HOUSE)
def test_rooms_import_each_other_in_one_direction(package: str) -> None:
    """The files and folders of a package, each of them whole: no two need each other, whatever
    lies between them."""
    needs: dict[str, set[str]] = {}
    for path in sources(package):
        room = path.relative_to(ROOT / package).with_suffix("").parts[0]
        for name in imports(path):
            package_of, _, rest = name.partition(".")
            if package_of == package and rest:
                needs.setdefault(room, set()).add(rest.split(".")[0])
        needs.setdefault(room, set()).discard(room)
    TopologicalSorter(needs).prepare()  # raises CycleError, which names the rooms


def test_service_sees_only_the_face_of_the_engine() -> None:
    def seen(name: str) -> bool:
        return any(name == face or name.startswith(f"{face}.") for face in SEEN_BY_SERVICE)

    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("service")
        for name in imports(path)
        if name.startswith("engine.") and not seen(name)
    ]
    assert not wrong


@pytest.mark.parametrize("package", HOUSE)
def test_torch_lives_in_its_rooms_alone(package: str) -> None:
    wrong = [
        f"{relative} imports {name}"
        for path in sources(package)
        if not (relative := str(path.relative_to(ROOT))).startswith(TORCH_ROOMS)
        for name in imports(path)
        if name.split(".")[0] in ("torch", "triton")
    ]
    assert not wrong


def test_engine_never_imports_starlette() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in ("engine", "kernels", "prefix_cache")
        for path in sources(package)
        for name in imports(path)
        if name.split(".")[0] in ("starlette", "uvicorn", "jinja2", "opentelemetry")
    ]
    assert not wrong


@pytest.mark.parametrize("module", ["service.command", "engine.runtime", "kernels.cpu.backend"])
def test_the_cpu_path_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_our_kernels_are_not_mistaken_for_the_distribution_of_that_name() -> None:
    """transformers uses a PyPI distribution "kernels" from 0.18.2 on; ours must not be taken."""
    code = (
        "import kernels\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "assert not is_kernels_available(), 'transformers takes our kernels for its own'\n"
        "import transformers.integrations.hub_kernels\n"
        "assert tuple(map(int, kernels.__version__.split('.'))) < (0, 18, 2)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
