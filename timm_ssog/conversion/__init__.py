"""From a trained attention model to an SSoG model: copied weights, fitted kernels, refitted maps, aligned states."""

from timm_ssog.conversion.converting import warm_start
from timm_ssog.conversion.copying import student_options
from timm_ssog.conversion.picture import kernel_fits
from timm_ssog.conversion.report import HeadReport, WarmStartReport
from timm_ssog.conversion.teachers import read_teacher

__all__ = ["HeadReport", "WarmStartReport", "kernel_fits", "read_teacher", "student_options", "warm_start"]
