"""Peak memory of a forward pass or a training step of one model, in its own process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_speed import FILL, create, free_bytes, precision, score_bytes, training_step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from turns import is_out_of_memory


def measure_apart(task: dict[str, Any]) -> dict[str, int | None] | None:
    """Run `measure` in its own process.

    Args:
        task: Its arguments, and ``threads``.

    Returns:
        What it measured; None if there is not enough memory.

    Raises:
        SystemExit: if it fails for another reason, with what it said.
    """
    if task["model"] == "unfused":
        need = score_bytes(task["size"], task["img_size"], task["batch"], task["training"])
        if need > FILL * free_bytes(torch.device(task["device"])):
            return None
    # with a fixed threshold glibc hands large blocks back as soon as they are free: the peak is that of the step
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    command = [sys.executable, str(Path(__file__).resolve()), json.dumps(task)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == -signal.SIGKILL:  # by the system, which had run out of memory
        return None
    if done.returncode:
        raise SystemExit(f"Measuring the memory of {task} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    *, model: str, size: str, setting: str, img_size: int, batch: int, training: bool, device: str, bf16: bool
) -> dict[str, int | None] | None:
    """Peak memory of one pass or step, after a first one that set everything up.

    Returns:
        In bytes: ``standing``, the tensors that are there before and after; ``peak``, the most tensors at any time,
        these included; ``saved``, what forward keeps for backward (None for inference); and ``process_peak``, the
        resident memory of the whole process, which counts libraries and their workspaces too (None where the system
        cannot tell). None instead of all this if the device has too little memory.
    """
    try:
        network = create(model, size, setting, device).train(training)
        images = torch.randn(batch, 3, img_size, img_size, device=device)
        labels = torch.randint(1000, (batch,), device=device)
        return _measure(network, images, labels, training=training, bf16=bf16)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _measure(
    network: nn.Module, images: Tensor, labels: Tensor, *, training: bool, bf16: bool
) -> dict[str, int | None]:
    on = images.device
    step = training_step(network, bf16)

    def run() -> None:
        if training:
            step(images, labels)
        else:
            with torch.inference_mode(), precision(on, bf16):
                network(images)

    run()
    saved = saved_bytes(network, images, labels, bf16) if training else None
    network.zero_grad()
    if on.type == "cuda":
        standing = torch.cuda.memory_allocated(on)
        torch.cuda.reset_peak_memory_stats(on)
        run()
        return {
            "standing": standing,
            "peak": torch.cuda.max_memory_allocated(on),
            "saved": saved,
            "process_peak": None,
        }

    process_peak = None
    if reset_process_peak():
        run()
        process_peak = process_peak_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    standing = sum(tensor.nbytes for tensor in [*network.parameters(), *network.buffers(), images, labels])
    if training:  # AdamW's two moments, too
        standing += 2 * sum(parameter.nbytes for parameter in network.parameters())
    return {
        "standing": standing,
        "peak": standing + peak_allocated(profiler),
        "saved": saved,
        "process_peak": process_peak,
    }


def saved_bytes(network: nn.Module, images: Tensor, labels: Tensor, bf16: bool = False) -> int:
    """Bytes that the forward pass keeps for the backward pass, each storage once, without parameters and images."""
    known = {tensor.untyped_storage().data_ptr() for tensor in [*network.parameters(), images]}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), precision(images.device, bf16):
        loss = F.cross_entropy(network(images), labels)
    loss.backward()
    return sum(storages.values())


def peak_allocated(profiler: profile) -> int:
    """The most bytes of tensors that were alive at once, of those allocated while the profiler ran.

    The allocator reports to the profiler, so this is exact: neither the system's allocator nor its load matters.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


def reset_process_peak() -> bool:
    """Let the system forget this process's peak of resident memory; whether it can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return process_peak_bytes() > 0
    return False


def process_peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(arguments.pop("threads"))
    print(json.dumps(measure(**arguments)))
