"""Static choices of the fused path: the launch of every kernel, and which path computes a kernel gradient.

No figure here has been tuned on a GPU yet. The rows compile for sm_80 and sm_90 without spilling, within the shared
memory of a consumer card (tests/test_fused.py checks that). They were picked by residency (warps that a multiprocessor
can hold) and by how often values are read. Triton 3.6 wants every product to sum over at least 16: group times chunk.
`timm_ssog.ops.fused.tuning` measures alternatives on request.
"""

from typing import NamedTuple

ANY = 1 << 62
"""No bound on a key."""


class Tile(NamedTuple):
    """What one program works on, in the kernels' terms, and how it is compiled."""

    group: int
    rows: int
    chunk: int
    channels: int
    extent: int
    depth: int
    warps: int
    stages: int


class Row(NamedTuple):
    """A launch and the keys that it serves; the first row of a table that fits is used."""

    item_bytes: int
    longest_axis: int
    components: int
    head_dim_multiple: int
    shared_bytes: int  # what it needs, the larger of both targets
    tile: Tile

    def serves(self, item_bytes: int, longest_axis: int, components: int, head_dim: int, shared_memory: int) -> bool:
        """Whether the row is for these keys and fits into the shared memory of a multiprocessor."""
        return (
            item_bytes == self.item_bytes
            and longest_axis <= self.longest_axis
            and components <= self.components
            and head_dim % self.head_dim_multiple == 0
            and self.shared_bytes <= shared_memory
        )


MIX = (
    # 16 bit, one or two components: half the stack, a longer chunk; above 64 cells the padded group of four is used
    Row(2, 16, 2, 1, 13_824, Tile(2, 16, 8, 16, 16, 16, 8, 2)),
    Row(2, 32, 2, 1, 38_912, Tile(2, 32, 8, 16, 32, 32, 8, 2)),
    Row(2, 64, 2, 1, 32_768, Tile(2, 16, 8, 16, 64, 64, 8, 2)),
    # 16 bit, groups of four: a stack of 64 rows, the minimum that a warp group multiplies at once
    Row(2, 16, ANY, 32, 27_136, Tile(4, 16, 4, 32, 16, 16, 8, 2)),
    Row(2, 16, ANY, 1, 28_672, Tile(4, 16, 8, 16, 16, 16, 8, 2)),
    # four warps: three programs per multiprocessor hide one another's latency, two at 64 cells
    Row(2, 32, ANY, 1, 22_528, Tile(4, 16, 4, 16, 32, 32, 4, 2)),
    Row(2, 64, ANY, 1, 36_864, Tile(4, 16, 4, 16, 64, 64, 4, 2)),
    # a sum of 256 x 128 fills the registers of eight warps
    Row(2, 128, ANY, 1, 65_536, Tile(4, 16, 4, 16, 128, 128, 8, 2)),
    Row(2, ANY, ANY, 1, 65_536, Tile(4, 16, 4, 16, 128, 64, 8, 2)),
    # float32, exact or as TF32: no padding of the components, and short unrolled products
    Row(4, 16, ANY, 1, 35_840, Tile(1, 16, 16, 16, 16, 16, 8, 2)),
    Row(4, 32, ANY, 1, 32_768, Tile(1, 16, 16, 16, 32, 16, 8, 1)),
    Row(4, ANY, ANY, 1, 65_536, Tile(1, 16, 16, 16, 64, 16, 8, 3)),
)
"""Launches of `kernels.mix_kernel`."""

GRADIENT = (
    Row(2, 16, ANY, 1, 36_864, Tile(4, 16, 8, 16, 16, 16, 8, 2)),
    Row(2, 32, ANY, 1, 57_344, Tile(4, 16, 8, 16, 32, 32, 8, 2)),
    # one stage: with two, sm_90 would need 131,072 bytes, more than a consumer card has
    Row(2, 64, ANY, 1, 57_344, Tile(4, 16, 8, 16, 64, 64, 8, 1)),
)
"""Launches of `kernels.column_gradient_kernel`."""


class Choice(NamedTuple):
    """Which path computes a kernel gradient, and why."""

    item_bytes: int
    longest_axis: int
    path: str
    reason: str


GRADIENT_PATHS = (
    Choice(2, 16, "kernel", "bound by memory: reads values and gradient once, products write and read the M-fold mix"),
    Choice(2, 32, "kernel", "bound by memory, as above"),
    Choice(2, 64, "kernel", "traffic and arithmetic even out; products would move about five times the bytes"),
    Choice(2, ANY, "products", "bound by arithmetic, where the library's large products come closer to the peak"),
    Choice(4, ANY, "products", "exact float32 has no tensor cores; the library's products are the better FMA kernels"),
)
"""Expected from a roofline (bytes and operations against an H200), not measured: the first line that fits is used."""


def mix_tile(item_bytes: int, longest_axis: int, components: int, head_dim: int, shared_memory: int) -> Tile:
    """The launch of the mix for a problem.

    Raises:
        ValueError: if no launch fits into the shared memory of a multiprocessor.
    """
    tile = _first(MIX, item_bytes, longest_axis, components, head_dim, shared_memory)
    if tile is None:
        raise ValueError(f"No launch of the fused mix fits into {shared_memory} bytes of shared memory.")
    return tile


def gradient_tile(
    item_bytes: int, longest_axis: int, components: int, head_dim: int, shared_memory: int
) -> Tile | None:
    """The launch of the gradient kernel for a problem, or None if batched matrix products compute it."""
    path = next(
        choice.path
        for choice in GRADIENT_PATHS
        if choice.item_bytes == item_bytes and longest_axis <= choice.longest_axis
    )
    if path == "products":
        return None
    return _first(GRADIENT, item_bytes, longest_axis, components, head_dim, shared_memory)


def _first(table: tuple[Row, ...], *keys: int) -> Tile | None:
    return next((row.tile for row in table if row.serves(*keys)), None)
