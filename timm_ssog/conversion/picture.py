"""A conversion as a picture: where each head looked in the teacher, and where its kernels look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timm_ssog.analysis import panels
from timm_ssog.conversion.report import WarmStartReport
from timm_ssog.errors import require_positive_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def kernel_fits(report: WarmStartReport, heads: int = 8) -> Figure:
    """Draw the centre token's mean attention in the teacher above the fitted kernel, worst heads first.

    Args:
        report: Report of a conversion.
        heads: Number of heads to draw.

    Returns:
        A matplotlib figure, each panel symmetric about 0 with its own scale: kernels are fitted to mixed values, so
        their scale need not be that of the map.

    Raises:
        ValueError: if ``heads`` is below one.
    """
    require_positive_int("heads", heads)
    order = sorted(range(len(report.heads)), key=lambda index: report.heads[index].values)[:heads]
    figure, axes = panels(2, len(order), size=1.7)
    for column, index in enumerate(order):
        head = report.heads[index]
        for row, image in enumerate((report.mean_maps[index], report.kernels[index])):
            scale = float(image.abs().max()) or 1.0
            axis = axes[row][column]
            axis.imshow(image.numpy(), cmap="RdBu_r", vmin=-scale, vmax=scale)
            height, width = image.shape
            axis.plot(width // 2, height // 2, marker="+", color="black", markersize=6)
            axis.set(xticks=[], yticks=[])
            if column == 0:
                axis.set_ylabel(("teacher", "kernel")[row], fontsize=9)
        axes[0][column].set_title(
            f"block {head.block + 1}, head {head.head + 1}\n{head.values:.0%} of {head.position:.0%}", fontsize=8
        )
    figure.suptitle(
        "Mean attention of the centre token above its fitted kernel: share explained of the share of position",
        fontsize=9,
    )
    return figure
