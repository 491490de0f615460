"""Vision Transformers with separable Gaussian mixing (SSoG), registered with timm on import."""

from importlib import metadata as _metadata

from timm_ssog import analysis
from timm_ssog.analysis import trace_solve
from timm_ssog.certificates import Certificate, certify, local_growth, local_lipschitz
from timm_ssog.conversion import WarmStartReport, warm_start
from timm_ssog.errors import SolveError
from timm_ssog.ode import SolveTrace
from timm_ssog.ops.dispatch import separable_mix
from timm_ssog.ops.gaussian import axis_kernels
from timm_ssog.vit_ssog import LoopedVitSsog, OdeVitSsog, VitSsog

__all__ = [
    "Certificate",
    "LoopedVitSsog",
    "OdeVitSsog",
    "SolveError",
    "SolveTrace",
    "VitSsog",
    "WarmStartReport",
    "__version__",
    "analysis",
    "axis_kernels",
    "certify",
    "local_growth",
    "local_lipschitz",
    "separable_mix",
    "trace_solve",
    "warm_start",
]

try:
    __version__ = _metadata.version("timm-ssog")
except _metadata.PackageNotFoundError:  # a checkout on the path that was never installed
    __version__ = "0+unknown"
