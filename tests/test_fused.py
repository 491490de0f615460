"""The fused path without a GPU: interpreted, compiled ahead of time, and absent, each in its own process."""

import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import timm_ssog
from timm_ssog.ops import dispatch, fused
from timm_ssog.ops.fused import operators, support, tables, tuning

TESTS = Path(__file__).parent
CONSUMER_SHARED_MEMORY = 101_376

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Triton has releases for Linux only")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "TIMM_SSOG_"))}
    # both processes import test modules of this folder
    path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=TESTS.parent,
        env={**base, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )


@linux_only
def test_interpreted() -> None:
    done = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", "tests/fused_interpreted.py"),
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "no tests ran" not in done.stdout


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every launch in the tables needs on each target."""
    cache = tmp_path_factory.mktemp("triton")
    done = run("tests/fused_compiled.py", TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@linux_only
def test_every_launch_compiles_without_spilling(binaries: list[dict[str, Any]]) -> None:
    rows = len(tables.MIX) + sum(row.item_bytes == 4 for row in tables.MIX) + len(tables.GRADIENT) + 1
    assert len(binaries) == 2 * rows
    for binary in binaries:
        assert binary["stack"] == binary["STL"] == binary["LDL"] == 0, binary
        assert 0 < binary["registers"] <= 255, binary


@linux_only
def test_shared_memory_is_what_the_tables_say_and_a_consumer_card_has(binaries: list[dict[str, Any]]) -> None:
    needs: dict[str, int] = {}
    for binary in binaries:
        key = json.dumps([binary["kernel"], binary["row"]])
        needs[key] = max(needs.get(key, 0), binary["shared"])
    for key, shared in needs.items():
        row = tables.Row(*json.loads(key)[1])
        assert shared <= row.shared_bytes <= CONSUMER_SHARED_MEMORY, (key, shared)
        assert row.shared_bytes < 1.3 * shared, "the table asks for more than the launch needs"


@linux_only
def test_products_run_on_tensor_cores(binaries: list[dict[str, Any]]) -> None:
    for binary in binaries:
        exact = binary["dtype"] == "fp32" and binary["precision"] == "ieee"
        if exact:
            assert binary["HGMMA"] == binary["HMMA"] == 0 < binary["FFMA"], binary
        else:
            assert binary["HGMMA" if binary["target"] == 90 else "HMMA"] > 0, binary


def test_tables_serve_every_problem() -> None:
    for item_bytes in (2, 4):
        for axis in (1, 16, 17, 32, 33, 64, 65, 128, 129, 1000):
            for components in (1, 2, 3, 4, 5, 8, 100):
                for head_dim in (1, 8, 16, 48, 64, 96):
                    problem = (item_bytes, axis, components, head_dim, CONSUMER_SHARED_MEMORY)
                    tile = tables.mix_tile(*problem)
                    # padding never doubles the work, except for one or two components on large grids
                    assert tile.group < 2 * components or axis > 64 or components == 1
                    assert tile.depth >= axis or axis > 128 or item_bytes == 4
                    assert tile.group * tile.chunk >= 16
                    gradient = tables.gradient_tile(*problem)
                    assert (gradient is not None) == (item_bytes == 2 and axis <= 64)
                    assert gradient is None or gradient.extent >= axis
    with pytest.raises(ValueError, match="fits into 1024 bytes"):
        tables.mix_tile(2, 16, 4, 64, 1024)
    assert all(choice.reason for choice in tables.GRADIENT_PATHS)


NO_TRITON = """
    import importlib.abc, sys

    class Block(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "triton":
                raise ModuleNotFoundError("No module named 'triton'", name="triton")

    sys.meta_path.insert(0, Block())
    import timm, torch
    import timm_ssog
    from timm_ssog.__main__ import main

    model = timm.create_model("vit_ssog_tiny", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2)
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    assert "triton" not in sys.modules
    try:
        timm_ssog.separable_mix(torch.zeros(1, 1, 1, 1, 1), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), "fused")
    except ValueError as error:
        print(error)
    sys.exit(main(["info"]))
    """


def test_without_triton_everything_else_works() -> None:
    done = run("-c", textwrap.dedent(NO_TRITON))
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("implementation='fused' cannot run on torch.float32 values on cpu: Triton cannot be")
    assert any(line.startswith("fused kernel") and "not available: Triton cannot be" in line for line in lines)
    assert any(line.startswith("mixing on cpu") and "eager" in line for line in lines)


class Gpu:
    """Lets torch see one GPU; whatever is asked of it answers from here."""

    def __init__(self, patch: pytest.MonkeyPatch, capability: tuple[int, int], shared: int) -> None:
        class Properties:
            shared_memory_per_block_optin = shared

        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
        patch.setattr(support, "INTERPRETED", False)
        fused.forget()


@pytest.fixture
def forget() -> Any:
    """Forgets what was found out about devices, before and after."""
    fused.forget()
    yield
    fused.forget()


CUDA = torch.device("cuda", 0)


@linux_only
@pytest.mark.parametrize(
    ("capability", "shared", "reason"),
    [
        ((9, 0), 232_448, None),
        ((8, 6), CONSUMER_SHARED_MEMORY, None),
        ((12, 0), CONSUMER_SHARED_MEMORY, None),
        ((7, 5), 65_536, "compute capability 8.0, this device has 7.5"),
        ((8, 0), 49_152, "bytes of shared memory, this device has 49152"),
    ],
)
def test_what_a_gpu_must_have(
    forget: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shared: int, reason: str | None
) -> None:
    Gpu(monkeypatch, capability, shared)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = fused.obstacle(CUDA, dtype)
        assert (found is None) if reason is None else reason in str(found)
    assert "float64" in str(fused.obstacle(CUDA, torch.float64))
    name, why = dispatch.select_implementation(CUDA)
    assert name == ("fused" if reason is None else "eager")
    assert reason is None or reason in why


@linux_only
def test_what_turns_a_gpu_off(forget: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, (9, 0), 232_448)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        assert "ROCm" in str(fused.obstacle(CUDA, torch.float32))
    fused.forget()
    for switch in ("0", "off", "False"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIMM_SSOG_FUSED", switch)
            assert f"TIMM_SSOG_FUSED={switch}" in str(fused.obstacle(CUDA, torch.float32))
        fused.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert "no CUDA device" in str(fused.obstacle(CUDA, torch.float32))
    fused.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "timm_ssog.ops.fused.kernels", None)
        assert "Triton cannot be imported" in str(fused.obstacle(CUDA, torch.float32))
    fused.forget()
    assert fused.obstacle(CUDA, torch.float32) is None
    assert "'xpu'" in str(fused.obstacle(torch.device("xpu"), torch.float32))


def test_reason_is_logged_once(forget: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="timm_ssog"):
        for _ in range(2):
            assert fused.logged_obstacle(torch.device("xpu"), torch.float32)
    assert caplog.messages == [
        "separable_mix runs as batched matrix products, not in the fused kernel: there is no kernel for 'xpu' devices."
    ]


@pytest.mark.skipif(support.INTERPRETED, reason="with the interpreter it can run")
def test_fused_on_the_cpu_says_what_is_missing() -> None:
    inputs = torch.zeros(1, 2, 3, 1, 4), torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 3, 3)
    with pytest.raises(ValueError, match=r"implementation='fused' cannot run .* on cpu: .*Use 'auto'"):
        timm_ssog.separable_mix(*inputs, implementation="fused")
    with pytest.raises(ValueError, match="not in float64"):
        timm_ssog.separable_mix(*(tensor.double() for tensor in inputs), implementation="fused")
    with pytest.raises(ValueError, match=r"The fused kernels cannot run: .*separable_mix"):
        operators.fused_mix(*inputs)


def test_a_model_without_storage_says_nothing_about_kernels(caplog: pytest.LogCaptureFixture) -> None:
    values, kernels = torch.empty(1, 3, 5, 2, 4, device="meta"), torch.empty(2, 1, 3, 3, device="meta")
    assert timm_ssog.separable_mix(values, kernels, torch.empty(2, 1, 5, 5, device="meta")).shape == values.shape
    assert not caplog.records


def test_launches_are_kept_without_a_home_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert tuning.cache_path().is_absolute()
