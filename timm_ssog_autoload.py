"""Registers the timm_ssog models with timm when user code imports only timm.

torch calls `install` at the end of ``import torch`` (entry-point group ``torch.backends``). timm cannot be imported
there, because it may be what is importing torch; so `install` only watches for ``timm.models`` and imports the plugin
right after it has executed. For a program that never imports timm, the cost is one list insertion.

It uses the standard library only, and is outside the package, whose import would bring in torch and timm.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "TIMM_SSOG_AUTOLOAD"
OFF = ("0", "false", "off", "no")
WATCHED = "timm.models"


def is_off() -> bool:
    """Whether ``TIMM_SSOG_AUTOLOAD`` is one of `OFF`."""
    return os.environ.get(SWITCH, "").lower() in OFF


def install() -> None:
    """Have ``timm_ssog`` imported as soon as ``timm.models`` is, unless that is switched off."""
    if is_off() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    if WATCHED in sys.modules:
        # Python binds a submodule to its package when its import has finished; until then, it is importing torch now.
        timm = sys.modules.get("timm")
        if hasattr(timm, "models"):
            _import_plugin()
        elif type(timm) is ModuleType:
            timm.__class__ = _ImportingPackage


def _import_plugin() -> None:
    # Rebound, not edited: another thread may be iterating over the list, and would skip a finder.
    sys.meta_path = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    try:
        # A statement, not importlib.import_module, which raises if two threads import timm and timm_ssog crosswise.
        import timm_ssog

        if getattr(timm_ssog, "__file__", None) is None:  # a namespace package, found before an editable install is
            raise ImportError(
                f"{', '.join(timm_ssog.__path__)} is a folder without __init__.py that hides the installed package; "
                f"run from another directory, rename it, or install with `pip install .` instead of `-e .`"
            )
    except Exception as error:
        warnings.warn(
            f"timm_ssog could not register its models with timm, which works without them: importing timm_ssog raised "
            f"{type(error).__name__}: {error}. Run `python -c 'import timm_ssog'` for the full error, or set "
            f"{SWITCH}=0 in the environment to turn this hook off.",
            RuntimeWarning,
            stacklevel=2,
        )


class _Finder:
    """Finds ``timm.models`` as the other finders do, and has the plugin imported after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != WATCHED:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec: Any = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """The real loader of ``timm.models``, then the plugin; steps aside before the module executes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        # Only public names: looking up `_loader` on a half-built copy would recurse forever.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _import_plugin()


class _ImportingPackage(ModuleType):
    """``timm`` while ``timm.models`` is executing: on success, Python binds the submodule to its package."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "models":
            self.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]
            _import_plugin()
