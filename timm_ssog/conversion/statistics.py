"""Second moments of every head of a teacher, streamed over images: everything that fitting its kernels needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from timm_ssog.conversion.teachers import Attended, Teacher, after_mixing, after_mlp, attend, map_chunk


@dataclass
class HeadMoments:
    """Sums over images for the heads of one block, over N patch tokens, values V and mixed values O = A V.

    V has no bias and only patch tokens; O is at patch tokens, mixed over all. 3 N^2 + N d + d + 2 floats per head.

    Attributes:
        values: Sum of V V', (heads, N, N).
        cross: Sum of O V', (heads, N, N).
        maps: Sum of the maps between patch tokens, (heads, N, N).
        value_mean: Sum of V, (heads, N, d).
        mixed_mean: Sum of O over images, mean over tokens, (heads, d).
        mixed_power: Sum of the squares of O, (heads,).
        map_power: Sum of the squares of the maps, (heads,).
        images: Images so far.
    """

    values: Tensor
    cross: Tensor
    maps: Tensor
    value_mean: Tensor
    mixed_mean: Tensor
    mixed_power: Tensor
    map_power: Tensor
    images: int = 0

    @staticmethod
    def empty(heads: int, tokens: int, head_dim: int, device: torch.device) -> "HeadMoments":
        """Moments of no image."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(heads, *shape, device=device)

        squares = (zeros(tokens, tokens), zeros(tokens, tokens), zeros(tokens, tokens))
        return HeadMoments(*squares, zeros(tokens, head_dim), zeros(head_dim), zeros(), zeros())

    def add(self, attended: Attended, prefix: int) -> None:
        """Add a batch."""
        values, mixed = attended.values[:, :, prefix:].float(), attended.mixed[:, :, prefix:].float()
        maps = attended.maps[:, :, prefix:, prefix:].float()
        # (heads, N, batch * d): one product for the whole batch
        columns, rows = values.permute(1, 2, 0, 3).flatten(2), mixed.permute(1, 2, 0, 3).flatten(2)
        self.values.baddbmm_(columns, columns.mT)
        self.cross.baddbmm_(rows, columns.mT)
        self.maps += maps.sum(0)
        self.value_mean += values.sum(0)
        self.mixed_mean += mixed.mean(2).sum(0)
        self.mixed_power += mixed.square().sum((0, 2, 3))
        self.map_power += maps.square().sum((0, 2, 3))
        self.images += len(values)

    def means(self) -> "HeadMoments":
        """The same as means over images, in float64."""
        sums = (self.values, self.cross, self.maps, self.value_mean, self.mixed_mean, self.mixed_power, self.map_power)
        return HeadMoments(*(total.double() / self.images for total in sums), images=self.images)


def empty_moments(teacher: Teacher, blocks: list[int]) -> dict[int, HeadMoments]:
    """Moments of no image for these blocks of the teacher."""
    tokens = teacher.grid[0] * teacher.grid[1]
    width = teacher.model.patch_embed.proj.out_channels
    device = teacher.model.patch_embed.proj.weight.device
    return {index: HeadMoments.empty(teacher.heads, tokens, width // teacher.heads, device) for index in blocks}


@torch.no_grad()
def observe(teacher: Teacher, tokens: Tensor, moments: dict[int, HeadMoments]) -> None:
    """Run embedded images (batch, tokens, channels) through the teacher and add them to the moments of its blocks."""
    last = max(moments)
    for chunk in tokens.split(map_chunk(teacher)):
        for index, block in enumerate(teacher.blocks[: last + 1]):
            attended = attend(block, chunk)
            if index in moments:
                moments[index].add(attended, teacher.prefix)
            chunk = after_mlp(block, after_mixing(block, chunk, attended))
