"""Run the suite with the oldest releases that pyproject.toml allows, in their own environment.

    python tests/oldest.py FOLDER [--python PYTHON] [arguments of pytest]

FOLDER gets the environment, several GB of it, and keeps it for the next run; --python is the interpreter to build it
with, by default the oldest that is allowed, if it is on the PATH. The last line says which releases were tested.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib  # type: ignore[reportMissingImports]  (from Python 3.11 on; what it builds may be older)
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


def requirements(project: dict[str, Any], names: list[str]) -> Iterator[Requirement]:
    """The requirements that apply here, those of the project's own extras in place."""
    for requirement in map(Requirement, names):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        if requirement.name != project["name"]:
            yield requirement
        for extra in sorted(requirement.extras) if requirement.name == project["name"] else ():
            yield from requirements(project, project["optional-dependencies"][extra])


def oldest(specifier: SpecifierSet) -> str:
    """The only lower bound of a requirement."""
    bounds = [bound.version for bound in specifier if bound.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(f"Expected one lower bound, got {str(specifier)!r}: give the requirement one.")
    return bounds[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the environment")
    parser.add_argument("--python", help="interpreter to build it with")
    options, pytest_arguments = parser.parse_known_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = f"python{oldest(SpecifierSet(project['requires-python']))}"
    interpreter = options.python or shutil.which(wanted)
    if interpreter is None:
        interpreter = sys.executable
        print(f"{wanted} is not on the PATH, so this is {interpreter}: name one with --python.", flush=True)

    names = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    pins = [f"{requirement.name}=={oldest(requirement.specifier)}" for requirement in requirements(project, names)]
    folder = options.folder.resolve()
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
    constraints = folder / "oldest.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    # timm needs a torchvision, and torch's requirements determine which one fits
    subprocess.run([*install, *(pin for pin in pins if pin.startswith("torch==")), "torchvision"], check=True)
    subprocess.run([*install, "--editable", f"{ROOT}[test]"], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    status = subprocess.run([python, "-m", "pytest", *pytest_arguments], cwd=ROOT).returncode
    version = subprocess.run([python, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    print(f"{'passed' if status == 0 else 'FAILED'} with {version}, {', '.join(pins)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
