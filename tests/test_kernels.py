"""Axis kernels against the definition of DESIGN.md section 1, written again in plain float64 Python."""

import math

import numpy as np
import pytest
import torch

import timm_ssog
from timm_ssog.layers import SeparableMixer


def exponents(offset: float, width: float, length: int, stretch: float) -> np.ndarray:
    table = np.zeros((length, length))
    for i in range(length):
        for j in range(length):
            table[i, j] = -(((j - i) / stretch - offset) ** 2) / (2 * width**2)
    return table


def softmax(table: np.ndarray) -> np.ndarray:
    # far outside the grid every weight underflows, but their ratios do not
    weights = np.exp(table - table.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def components() -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets inside the grid, at its edge and far outside, each narrow to wide; all of them exact in float32."""
    offsets, widths = [0.0, 0.375, -3.0, 6.5, 200.0, -1000.0], [0.25, 0.75, 5.0, 300.0]
    offset, width = torch.tensor([(o, w) for o in offsets for w in widths], dtype=torch.float64).unbind(1)
    return offset, width


@pytest.mark.parametrize("reference_length", [None, 3, 14, 32.5])
@pytest.mark.parametrize("length", [1, 2, 7, 14, 64])
def test_axis_kernels_are_the_definition(length: int, reference_length: float | None) -> None:
    offset, width = components()
    stretch = 1.0 if reference_length is None else length / reference_length
    tables = [exponents(float(o), float(w), length, stretch) for o, w in zip(offset, width, strict=True)]
    expected = np.stack([softmax(table) for table in tables])

    kernels = timm_ssog.axis_kernels(offset, width, length, reference_length)
    assert kernels.dtype == torch.float64
    # weights carry the rounding error of their exponents, and those that matter are close to the row's largest
    largest = np.array([-table.max(axis=1).min() for table in tables])[:, None, None]
    error = np.abs(kernels.numpy() - expected)
    assert (error <= 8 * np.finfo(np.float64).eps * (1 + largest)).all()

    kernels = timm_ssog.axis_kernels(offset.float(), width.float(), length, reference_length)
    assert kernels.dtype == torch.float32
    error = np.abs(kernels.double().numpy() - expected)
    assert (error <= 8 * np.finfo(np.float32).eps * (1 + largest)).all()


@pytest.mark.parametrize("length", [1, 2, 7, 14, 64])
def test_rows_are_weights(length: int) -> None:
    kernels = timm_ssog.axis_kernels(*[parameter.float() for parameter in components()], length, 14)
    assert kernels.shape == (24, length, length)
    assert (kernels >= 0).all()
    torch.testing.assert_close(kernels.sum(-1), torch.ones(24, length))


def test_a_component_looks_where_its_offset_says() -> None:
    rows = timm_ssog.axis_kernels(torch.tensor([2.0, -3.0]), torch.tensor([0.3, 0.3]), 8)
    # from cell 4: two cells on, three cells back; and no further than the border
    assert rows[:, 4].argmax(-1).tolist() == [6, 1]
    assert rows[0].argmax(-1).tolist() == [2, 3, 4, 5, 6, 7, 7, 7]
    stretched = timm_ssog.axis_kernels(torch.tensor([2.0]), torch.tensor([0.3]), 16, 8)
    assert stretched[0, 4].argmax() == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_give_float32_kernels(dtype: torch.dtype) -> None:
    offset, width = torch.randn(3, dtype=dtype), torch.rand(3, dtype=dtype) + 0.5
    kernels = timm_ssog.axis_kernels(offset, width, 14, 10)
    assert kernels.dtype == torch.float32
    assert torch.equal(kernels, timm_ssog.axis_kernels(offset.float(), width.float(), 14, 10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("amplitude", ["signed", "convex"])
def test_low_precision_mixers_compute_kernels_in_float32(amplitude: str, dtype: torch.dtype) -> None:
    mixer = SeparableMixer(8, 2, (7, 9), amplitude=amplitude)
    torch.nn.init.normal_(mixer.width)
    torch.nn.init.normal_(mixer.amplitude)
    low = mixer.to(dtype).kernels(14, 9)
    for kernels, expected in zip(low, mixer.float().kernels(14, 9), strict=True):
        assert kernels.dtype == torch.float32
        assert torch.equal(kernels, expected)


@pytest.mark.parametrize("amplitude", ["signed", "convex"])
def test_autocast_leaves_kernels_in_float32(amplitude: str) -> None:
    mixer = SeparableMixer(8, 2, (7, 9), amplitude=amplitude)
    plain = mixer.kernels(7, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = mixer.kernels(7, 9)
    for kernels, expected in zip(cast, plain, strict=True):
        assert kernels.dtype == torch.float32
        assert torch.equal(kernels, expected)


@pytest.mark.parametrize("grid", [(7, 9), (14, 18), (5, 5)])
@pytest.mark.parametrize("kernel_coords", ["relative", "cells"])
@pytest.mark.parametrize("amplitude", ["signed", "convex"])
def test_mixer_kernels_are_axis_kernels_with_amplitudes(
    amplitude: str, kernel_coords: str, grid: tuple[int, int]
) -> None:
    mixer = SeparableMixer(8, 2, (7, 9), 3, amplitude=amplitude, kernel_coords=kernel_coords).double()
    torch.nn.init.normal_(mixer.width)
    torch.nn.init.normal_(mixer.amplitude)
    rows, columns = mixer.kernels(*grid)
    for head in range(2):
        raw = mixer.amplitude[head].tolist()
        weights = np.exp(raw) / np.exp(raw).sum() if amplitude == "convex" else raw
        for m in range(3):
            expected = []
            for axis in (0, 1):
                stretch = grid[axis] / (7, 9)[axis] if kernel_coords == "relative" else 1.0
                sigma = math.log1p(math.exp(mixer.width[head, m, axis].item())) + 0.25
                expected.append(softmax(exponents(mixer.offset[head, m, axis].item(), sigma, grid[axis], stretch)))
            np.testing.assert_allclose(rows[head, m].detach(), weights[m] * expected[0], rtol=0, atol=1e-12)
            np.testing.assert_allclose(columns[head, m].detach(), expected[1], rtol=0, atol=1e-12)


def test_relative_and_cells_agree_on_the_reference_grid_only() -> None:
    relative = SeparableMixer(8, 2, (7, 9), kernel_coords="relative")
    cells = SeparableMixer(8, 2, (7, 9), kernel_coords="cells")
    cells.load_state_dict(relative.state_dict())
    for ours, theirs in zip(relative.kernels(7, 9), cells.kernels(7, 9), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(relative.kernels(14, 18), cells.kernels(14, 18), strict=True):
        assert not torch.allclose(ours, theirs, atol=1e-2)


@pytest.mark.parametrize("stretch", [None, 3.0])
def test_axis_kernels_differentiate(stretch: float | None) -> None:
    offset = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    width = (torch.rand(2, 3, dtype=torch.float64) + 0.25).requires_grad_()

    def kernels(offset: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
        return timm_ssog.axis_kernels(offset, width, 6, stretch)

    assert torch.autograd.gradcheck(kernels, (offset, width), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(kernels, (offset, width))


def test_constant_image_stays_constant_through_a_convex_mixer() -> None:
    mixer = SeparableMixer(8, 2, (7, 9), amplitude="convex")
    torch.nn.init.normal_(mixer.amplitude, std=2)
    torch.nn.init.normal_(mixer.offset, std=5)
    values = torch.randn(2, 1, 1, 2, 4).expand(2, 7, 9, 2, 4)
    torch.testing.assert_close(timm_ssog.separable_mix(values, *mixer.kernels(7, 9)), values)


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"must have the same shape, got \(2, 3\) and \(3,\)"):
        timm_ssog.axis_kernels(torch.zeros(2, 3), torch.ones(3), 4)
    for length, reference_length in [(0, 4), (-1, 4), (4, 0), (4, -2.0), (4, float("nan"))]:
        with pytest.raises(ValueError, match=rf"length={length} and reference_length={reference_length}"):
            timm_ssog.axis_kernels(torch.zeros(2), torch.ones(2), length, reference_length)
