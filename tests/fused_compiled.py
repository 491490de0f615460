"""Compiles every launch of the fused kernels for two GPUs and prints what it needs; test_fused.py reads that.

In its own process, because Triton decides at decoration whether it compiles or interprets. Needs no GPU. One JSON
object per line: the launch, its key in the table, the target, and what Triton's bundled tools report about the binary.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from timm_ssog.ops.fused import kernels, tables

TARGETS = (80, 90)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

POINTERS = {"values", "rows", "columns", "output", "grad"}
# of the launcher's arguments, these may be any number; the rest is a multiple of 16 for head_dim = 64
UNALIGNED = {"batch", "height", "width", "heads", "components", "splits"}


def launches() -> Iterator[tuple[str, tables.Row, str, str]]:
    """Kernel, row, dtype and precision of every launch in the tables."""
    for row in tables.MIX:
        if row.item_bytes == 2:
            yield "mix_kernel", row, "bf16", "ieee"
        else:
            yield "mix_kernel", row, "fp32", "ieee"
            yield "mix_kernel", row, "fp32", "tf32"
    for row in tables.GRADIENT:
        yield "column_gradient_kernel", row, "bf16", "ieee"
    # one launch serves both 16-bit types, whose instructions differ only in the type
    yield "mix_kernel", next(row for row in tables.MIX if row.longest_axis == 32 and row.components > 4), "fp16", "ieee"


def compile_launch(kernel: str, row: tables.Row, dtype: str, precision: str, target: int) -> dict[str, Any]:
    function = getattr(kernels, kernel)
    tile = row.tile
    constants = {
        "GROUP": tile.group,
        "ROWS": tile.rows,
        "CHUNK": tile.chunk,
        "CHANNELS": tile.channels,
        "EXTENT": tile.extent,
        "DEPTH": tile.depth,
        "WHOLE": row.longest_axis <= tile.depth,
        "WIDE": False,
        "PRECISION": precision,
        "UPCAST": False,
    }
    names = [parameter.name for parameter in function.params]
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = "*fp32" if name == "partial" else f"*{dtype}" if name in POINTERS else "i32"
        if name not in UNALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(function, signature, constexprs, attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    with contextlib.redirect_stdout(io.StringIO()):  # where a failure would dump the whole program
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources = run_tool("cuobjdump", "--dump-resource-usage", file.name)
        instructions = run_tool("nvdisasm", "-c", file.name)
    return {
        "kernel": kernel,
        "row": row,
        "dtype": dtype,
        "precision": precision,
        "target": target,
        "registers": int(re.search(r"REG:(\d+)", resources)[1]),  # type: ignore[index]
        "stack": int(re.search(r"STACK:(\d+)", resources)[1]),  # type: ignore[index]
        "shared": compiled.metadata.shared,
        **{name: len(re.findall(rf"\b{name}\b", instructions)) for name in ("HGMMA", "HMMA", "FFMA", "STL", "LDL")},
    }


def run_tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for launch in launches():
        for target in TARGETS:
            print(json.dumps(compile_launch(*launch, target)))
            sys.stdout.flush()
