"""The floors of DESIGN.md, section 6, read from the import statements, and what an import costs."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import timm_ssog

PACKAGE = Path(timm_ssog.__file__).parent
HOOK = PACKAGE.parent / "timm_ssog_autoload.py"

FLOORS = {
    "timm_ssog.errors": -1,  # on floor 0, but every module may say what is wrong
    "timm_ssog.files": -1,
    "timm_ssog.ops": 0,
    "timm_ssog.ops.capture": -0.5,
    "timm_ssog.ops.gaussian": 0,
    "timm_ssog.ops.naive": 0,
    "timm_ssog.ops.eager": 0,
    "timm_ssog.ops.fused.kernels": 0,
    "timm_ssog.ops.fused.tables": 0,
    # within floor 0, a stair: which launches there are, where they run, how one is picked, the operators
    "timm_ssog.ops.fused.support": 0.1,
    "timm_ssog.ops.fused.tuning": 0.2,
    "timm_ssog.ops.fused.operators": 0.3,
    "timm_ssog.ops.fused": 0.4,
    "timm_ssog.ops.steered": 0.5,
    "timm_ssog.arguments": 0,
    "timm_ssog.runge_kutta": 0,
    "timm_ssog.digest": 0,
    "timm_ssog.flow": 1,
    "timm_ssog.ops.dispatch": 1,
    # within the solves, a stair: settings and records, checks, the adjoint, solves
    "timm_ssog.ode.solver": 1,
    "timm_ssog.ode.grid": 1,
    "timm_ssog.ode.trace": 1,
    "timm_ssog.ode.problem": 1.1,
    "timm_ssog.ode.adjoint": 1.2,
    "timm_ssog.ode.shared_clock": 1.3,
    "timm_ssog.ode.per_sample": 1.3,
    "timm_ssog.ode": 1.4,
    "timm_ssog.layers": 2,
    "timm_ssog.steering": 2.1,
    "timm_ssog.hybrid": 2.2,
    "timm_ssog.solving": 2.5,
    "timm_ssog.sublayers": 2.5,
    "timm_ssog.checkpoints": 2.6,
    "timm_ssog.vit_ssog": 3,
    "timm_ssog.certificates": 4,
    "timm_ssog.analysis": 4.1,
    # conversion stands beside them, in stairs: teachers, what is read off them, what is done with it, all together
    "timm_ssog.conversion.teachers": 4.0,
    "timm_ssog.conversion.report": 4.0,
    "timm_ssog.conversion.copying": 4.1,
    "timm_ssog.conversion.statistics": 4.1,
    "timm_ssog.conversion.kernel_fit": 4.2,
    "timm_ssog.conversion.refitting": 4.2,
    "timm_ssog.conversion.aligning": 4.2,
    "timm_ssog.conversion.picture": 4.2,
    "timm_ssog.conversion.converting": 4.3,
    "timm_ssog.conversion": 4.4,
    "timm_ssog": 5,
    "timm_ssog.hub.run": 6.0,  # the hub is floor 6, in stairs
    "timm_ssog.hub.measure": 6.0,
    "timm_ssog.hub.card": 6.0,
    "timm_ssog.hub.options": 6.0,
    "timm_ssog.hub.folder": 6.0,
    "timm_ssog.hub.exporting": 6.1,
    "timm_ssog.hub.warm_starting": 6.1,
    "timm_ssog.hub.pushing": 6.1,
    "timm_ssog.hub": 6.2,
    "timm_ssog.hub.commands": 6.2,
    "timm_ssog.__main__": 7,
}

SOLE_IMPORTERS = {
    "triton": ("timm_ssog.ops.fused.kernels",),
    "torchdiffeq": ("timm_ssog.ode.shared_clock", "timm_ssog.ode.adjoint"),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: write imports in full"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else str(node.module) for name in submodules)


def test_every_module_has_a_floor() -> None:
    assert set(MODULES) <= set(FLOORS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downward_only(module: str) -> None:
    ours = {name for name in imports(MODULES[module]) if name.split(".")[0] == "timm_ssog"}
    upward = {name for name in ours if FLOORS[name] >= FLOORS[module]}
    assert not upward, f"{module} is on floor {FLOORS[module]}"


def test_implementations_of_the_operator_never_import_each_other() -> None:
    sides = ("timm_ssog.ops.naive", "timm_ssog.ops.eager", "timm_ssog.ops.fused")
    for module in MODULES:
        own = tuple(side for side in sides if module.startswith(side))
        others = {name for name in imports(MODULES[module]) if name.startswith(sides) and not name.startswith(own)}
        assert not own or not others, module


@pytest.mark.parametrize("module", MODULES)
def test_optional_dependencies_have_one_importer(module: str) -> None:
    for name in imports(MODULES[module]):
        assert module in SOLE_IMPORTERS.get(name.split(".")[0], (module,)), name


@pytest.mark.parametrize("module", [module for module in MODULES if FLOORS.get(module, 0) <= FLOORS["timm_ssog"]])
def test_plugin_imports_parts_of_timm_only(module: str) -> None:
    # the hook imports the plugin while timm itself is still being imported
    for name in imports(MODULES[module]):
        if name.split(".")[0] == "timm":
            assert name.split(".")[1:2] in (["models"], ["layers"], ["data"]), name


def test_hook_imports_the_standard_library_only() -> None:
    names = {name.split(".")[0] for name in imports(HOOK)}
    assert names - {"timm_ssog"} <= sys.stdlib_module_names
    # the plugin itself, and not before the hook is called
    statements = ast.parse(HOOK.read_text()).body
    at_import = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    assert "timm_ssog" not in at_import


IMPORT = """
import sys
import timm.data, timm.layers, timm.models
before = set(sys.modules)
import timm_ssog
print(*sorted(name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names))
"""


def test_import_loads_nothing_beyond_timms() -> None:
    # only users of other packages pay for them: torchdiffeq, Triton, matplotlib, the Hub
    environment = {**os.environ, "TIMM_SSOG_AUTOLOAD": "0"}
    path = [str(PACKAGE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, "-c", IMPORT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    loaded = set(result.stdout.split())
    assert "timm_ssog.vit_ssog" in loaded
    assert {name.split(".")[0] for name in loaded} == {"timm_ssog"}
    above = {name for name in loaded if FLOORS[name] > FLOORS["timm_ssog"]}
    assert not above
