"""Refitting a converted model's linear maps to its teacher's states by ridge regression, block by block."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from timm_ssog.conversion.copying import has_same_head
from timm_ssog.conversion.teachers import Teacher, after_mixing, after_mlp, attend, map_chunk
from timm_ssog.vit_ssog import VitSsog

RIDGE = 1e-3
"""Ridge towards the current weights, over the mean diagonal of the inputs' second moments."""


class Regression:
    """Second moments, about the means, of a linear layer's inputs and wanted outputs."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        size, device = layer.in_features, layer.weight.device
        self.count = 0
        self.inputs = torch.zeros(size, dtype=torch.float64, device=device)
        self.misses = torch.zeros(layer.out_features, dtype=torch.float64, device=device)
        self.gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size, layer.out_features, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor, wanted: Tensor) -> None:
        """Add inputs (..., in_features) and wanted outputs (..., out_features)."""
        inputs, wanted = inputs.flatten(0, -2).float(), wanted.flatten(0, -2).float()
        misses = wanted - self.layer(inputs.to(self.layer.weight.dtype)).float()
        self.count += len(inputs)
        self.inputs += inputs.sum(0)
        self.misses += misses.sum(0)
        self.gram += inputs.T @ inputs
        self.cross += inputs.T @ misses

    def solve(self) -> None:
        """Set the layer to the ridge solution, with a free bias."""
        mean, miss = self.inputs / self.count, self.misses / self.count
        gram = self.gram / self.count - torch.outer(mean, mean)
        cross = self.cross / self.count - torch.outer(mean, miss)
        ridge = RIDGE * gram.diagonal().mean() + 1e-12
        change = torch.linalg.solve(gram + ridge * torch.eye(len(mean), dtype=gram.dtype, device=gram.device), cross)
        with torch.no_grad():
            self.layer.weight += change.T.to(self.layer.weight)
            self.layer.bias += (miss - mean @ change).to(self.layer.bias)


@contextlib.contextmanager
def _inputs_of(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Record the inputs of a layer inside the context."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def refit(student: VitSsog, teacher: Teacher, tokens: Tensor) -> None:
    """Refit ``proj`` and ``fc2`` of each block and ``head`` in place, each on the outputs of the layers before it.

    Args:
        student: The converted student, with the teacher's grid.
        teacher: The teacher.
        tokens: Embedded images (batch, tokens, channels). Memory also holds the student's and the teacher's states.
    """
    size = map_chunk(teacher)
    theirs = tokens.clone()
    ours = teacher.patches(tokens).clone()
    for block, other in zip(student.blocks, teacher.blocks, strict=True):
        _refit_block(block, other, teacher, ours, theirs, size)
    if has_same_head(student, teacher):
        regression = Regression(student.head)  # type: ignore[arg-type]
        for state, wanted in zip(ours.split(size), theirs.split(size), strict=True):
            features = student.forward_head(student.norm(state).flatten(1, 2), pre_logits=True)
            regression.add(features, teacher.finish(wanted))
        regression.solve()


def _refit_block(block: Any, other: Any, teacher: Teacher, ours: Tensor, theirs: Tensor, size: int) -> None:
    """Refit one block's two layers, and move both streams, (batch, ...), past it in place."""
    proj, fc2 = Regression(block.mixer.proj), Regression(block.mlp.fc2)
    for state, chunk in zip(ours.split(size), theirs.split(size), strict=True):
        chunk.copy_(after_mixing(other, chunk, attend(other, chunk)))
        with _inputs_of(block.mixer.proj) as seen:
            block.mixer(block.norm1(state))
        proj.add(seen[0], teacher.patches(chunk) - state)
    proj.solve()
    for state, chunk in zip(ours.split(size), theirs.split(size), strict=True):
        state += block.mixer(block.norm1(state))
        chunk.copy_(after_mlp(other, chunk))
        with _inputs_of(block.mlp.fc2) as seen:
            block.mlp(block.norm2(state))
        fc2.add(seen[0], teacher.patches(chunk) - state)
    fc2.solve()
    for state in ours.split(size):
        state += block.mlp(block.norm2(state))
