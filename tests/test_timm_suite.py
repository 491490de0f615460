"""timm's own tests on our models, from the source distribution of the installed version."""

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf

import timm_ssog
from timm_ssog.conversion import read_teacher, student_options

MODELS = timm.list_models("vit_ssog*")

# what collects every model of its kind, with no list of modules that ours would have to be on
TESTS = {
    "test_model_forward",
    "test_model_backward",
    "test_model_default_cfgs_non_std",
    "test_model_forward_torchscript",
    "test_model_forward_fx",
    "test_model_backward_fx",
    "test_model_forward_fx_torchscript",
}

# behind such a list, so called one by one
DIRECTLY = """
import timm
import test_models

for name in timm.list_models("vit_ssog*"):
    test_models.test_model_forward_intermediates(name, 1)
    test_models.test_model_forward_intermediates_features(name, 1)
    test_models.test_prune_intermediate_layers_contract(name)
    print("passed", name)
"""

# whatever they create is the model in a folder, with its weights
CONVERTED = """
import inspect
import sys
import timm
import test_models

folder = f"local-dir:{sys.argv[1]}"
test_models.create_model = lambda name, pretrained=False, **options: timm.create_model(folder, True, **options)
for test in sys.argv[2:]:
    function = getattr(test_models, test)
    function("vit_ssog_tiny", *[1] * (len(inspect.signature(function).parameters) - 1))
    print("passed", test)
"""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(timm_ssog.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # TORCH_BACKEND is a module that timm's tests import before they collect
    environment = {**os.environ, "TORCH_BACKEND": "timm_ssog", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1800
    )


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> Path:
    """timm's source distribution, unpacked as far as its tests need it, and kept for the next run."""
    assert request.config.cache is not None
    folder = request.config.cache.mkdir(f"timm-{timm.__version__}")
    archive = folder / f"timm-{timm.__version__}.tar.gz"
    if not archive.exists():
        download = ("-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder))
        result = run(*download, f"timm=={timm.__version__}", cwd=folder)
        if not archive.exists():
            pytest.fail(
                f"The source distribution of timm {timm.__version__}, which holds timm's own tests, is not available "
                f"from the package index: {' '.join(download)} says:\n{result.stdout}{result.stderr}",
                pytrace=False,
            )
    root = folder / archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        wanted = (f"{root.name}/tests/", f"{root.name}/pyproject.toml")
        members = [member for member in tar.getmembers() if member.isfile() and member.name.startswith(wanted)]
        tar.extractall(folder, members, filter="data")
    return root


def test_timms_model_tests_pass(suite: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    options = ("-p", "no:cacheprovider", "-p", "no:timeout", "--tb=short", f"--junitxml={report}")
    result = run("-m", "pytest", "tests/test_models.py", "-k", "vit_ssog", *options, cwd=suite)
    assert result.returncode == 0, result.stdout[-10000:] + result.stderr[-2000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert not [case.attrib["name"] for case in cases if len(case)], "neither failed nor skipped"
    collected = Counter(case.attrib["name"].split("[")[0] for case in cases)
    assert collected == dict.fromkeys(TESTS, len(MODELS))


def test_timms_feature_tests_pass(suite: Path) -> None:
    result = run("-c", DIRECTLY, cwd=suite / "tests")
    assert result.returncode == 0, result.stdout[-10000:] + result.stderr[-2000:]
    passed = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("passed ")]
    assert passed == MODELS
    assert len(MODELS) >= 3


def test_timms_tests_pass_on_a_converted_model(suite: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    teacher = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2)
    student: Any = timm.create_model("vit_ssog_tiny", **student_options(read_teacher(teacher)))
    timm_ssog.warm_start(student, teacher, [torch.randn(8, 3, 32, 32)])
    save_for_hf(student, str(tmp_path), model_args=student_options(read_teacher(teacher)), safe_serialization=True)
    features = ("forward_intermediates", "forward_intermediates_features")
    called = [*TESTS, *(f"test_model_{name}" for name in features), "test_prune_intermediate_layers_contract"]
    tests = sorted(set(called) - {"test_model_default_cfgs_non_std"})
    result = run("-c", CONVERTED, str(tmp_path), *tests, cwd=suite / "tests")
    assert result.returncode == 0, result.stdout[-10000:] + result.stderr[-2000:]
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("passed ")] == tests
