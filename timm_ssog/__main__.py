"""``python -m timm_ssog``: run a script with the models registered, or report on the installation."""

import builtins
import difflib
import importlib.machinery
import io
import os
import platform
import sys
import types
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import timm
import torch

from timm_ssog.ops.dispatch import select_implementation
from timm_ssog.ops.fused import support


def main(arguments: Sequence[str]) -> int:
    """Run a subcommand or a script.

    Args:
        arguments: What follows ``python -m timm_ssog``.

    Returns:
        The exit status; a script may exit with its own.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in COMMANDS:
        run, _ = COMMANDS[name]
        return run(rest)
    if Path(name).is_file():
        run_script(name, rest)
        return 0
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else "Check the path, or see python -m timm_ssog --help."
    return _fail(
        f"expected a subcommand ({', '.join(COMMANDS)}) or the path of a Python script, got {name!r}, which is neither "
        f"(looked in {os.getcwd()}). {hint}"
    )


def info(arguments: Sequence[str]) -> int:
    """Print versions, models, the mixing path on each device, and the state of the discovery hook."""
    if arguments:
        return _fail(f"info takes no arguments, got {' '.join(arguments)!r}. Run python -m timm_ssog info.")
    # The builds of triton for ROCm, XPU and Windows are distributions with other names.
    triton = metadata.packages_distributions().get("triton", ["triton"])[0]
    lines = [
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("timm", timm.__version__),
        ("timm-ssog", _version("timm-ssog")),
        ("torchdiffeq", _version("torchdiffeq")),
        ("triton", _version(triton)),
        ("models", ", ".join(timm.list_models("vit_ssog*"))),
    ]
    for device in _devices():
        implementation, reason = select_implementation(device)
        lines.append((f"mixing on {device.type}", f"{implementation}: {reason}"))
    lines.append(("fused kernel", _fused_kernel()))
    lines.append(("discovery hook", _discovery()))
    for name, value in lines:
        print(f"{name:<16}{value}")
    return 0


def export(arguments: Sequence[str]) -> int:
    """Turn an output folder of train.py into one to publish; see `timm_ssog.hub`."""
    from timm_ssog.hub.commands import export_command  # here, because neither a script nor `info` needs the Hub

    return export_command(arguments)


def push(arguments: Sequence[str]) -> int:
    """Push an exported folder to the Hub; see `timm_ssog.hub`."""
    from timm_ssog.hub.commands import push_command

    return push_command(arguments)


def warm_start(arguments: Sequence[str]) -> int:
    """Turn a trained ViT into a folder with a converted model; see `timm_ssog.hub`."""
    from timm_ssog.hub.commands import warm_start_command

    return warm_start_command(arguments)


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a Python script as ``python SCRIPT`` would, but with the models registered.

    Processes that it spawns import the script by its path, as they would under ``python SCRIPT``. There, the discovery
    hook or an ``import timm_ssog`` in the script registers the models.
    """
    path = os.path.abspath(script)
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    _warn_of_other_timm()
    # Not runpy.run_path: it removes __main__ when the script's last line has run, while its threads and exit handlers
    # may still pickle by that name; and it makes __file__ and argv[0] the same string.
    module = types.ModuleType("__main__")
    vars(module).update(
        __file__=path, __builtins__=builtins, __loader__=importlib.machinery.SourceFileLoader("__main__", path)
    )
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))


def _warn_of_other_timm() -> None:
    # The launcher imported timm before sys.path was the script's: a script in a clone of timm would miss that timm.
    spec = importlib.machinery.PathFinder.find_spec("timm")
    wanted, loaded = (spec and spec.origin) or "", timm.__file__ or ""
    if wanted and os.path.realpath(wanted) != os.path.realpath(loaded):
        print(
            f"timm_ssog: the script would import timm from {os.path.dirname(wanted)}, but gets timm {timm.__version__} "
            f"from {os.path.dirname(loaded)}. Run in the script's folder, or put that on PYTHONPATH.",
            file=sys.stderr,
        )


def _usage() -> str:
    commands = "\n".join(f"  {name:<22}{summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: python -m timm_ssog SCRIPT [args ...]\n"
        "       python -m timm_ssog COMMAND [args ...]\n\n"
        f"  {'SCRIPT [args ...]':<22}run a Python script (like timm's train.py) with the vit_ssog models registered\n"
        f"{commands}"
    )


def _fail(message: str) -> int:
    print(f"timm_ssog: {message}", file=sys.stderr)
    return 2


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[torch.device]:
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "xpu": torch.xpu.is_available(),
    }
    return [torch.device(name) for name, there in available.items() if there]


def _fused_kernel() -> str:
    """Whether ``"auto"`` can take the Triton kernels on this machine, or what is missing."""
    missing = support.device_obstacle(torch.device("cuda"), torch.float32)
    return f"not available: {missing}" if missing else "available on cuda"


def _discovery() -> str:
    if (value := os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")) != "1":
        return f"off: TORCH_DEVICE_BACKEND_AUTOLOAD={value}; scripts must import timm_ssog"
    # torch is imported by now and has called every entry point it found; nothing else imports the hook's module
    hook: Any = sys.modules.get("timm_ssog_autoload")
    if hook is None:
        return "missing: no entry point found; install the package with pip"
    if hook.is_off():
        return f"off: {hook.SWITCH}={os.environ[hook.SWITCH]}; scripts must import timm_ssog"
    return "active: timm finds the models without an import in the script"


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "info": (info, "print versions, models, the mixing path on each device and the discovery hook"),
    "export": (export, "turn an output folder of train.py into a folder to publish: RUN_DIR OUT_DIR"),
    "push": (push, "push an exported folder to the Hugging Face Hub: OUT_DIR owner/name"),
    "warm-start": (warm_start, "turn a trained ViT into a vit_ssog model: TEACHER OUT_DIR --data-dir DIR"),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
