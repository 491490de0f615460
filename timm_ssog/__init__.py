"""Vision Transformers with separable Gaussian mixing (SSoG), registered with timm on import."""

from timm_ssog.ops.dispatch import separable_mix
from timm_ssog.ops.gaussian import axis_kernels
from timm_ssog.vit_ssog import VitSsog

__all__ = ["VitSsog", "axis_kernels", "separable_mix"]
