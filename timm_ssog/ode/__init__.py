"""Solves of dx/dt = velocity(x): adaptive per batch or per sample, and by the adjoint equation.

The state is a tensor (batch, ...) in float32 or float64; time is measured in units of depth. Every solve returns the
states at the requested times and a `SolveTrace`. Everything runs eagerly: in a compiled model, each solve is one graph
break.
"""

from timm_ssog.ode.adjoint import solve_fixed_adjoint
from timm_ssog.ode.grid import TimeGrid
from timm_ssog.ode.per_sample import solve_per_sample
from timm_ssog.ode.shared_clock import solve_adaptive
from timm_ssog.ode.solver import ADAPTIVE_SOLVERS, PER_SAMPLE_SOLVERS, SOLVER_OPTIONS, Solver
from timm_ssog.ode.trace import SolveTrace, join_traces

__all__ = [
    "ADAPTIVE_SOLVERS",
    "PER_SAMPLE_SOLVERS",
    "SOLVER_OPTIONS",
    "SolveTrace",
    "Solver",
    "TimeGrid",
    "join_traces",
    "solve_adaptive",
    "solve_fixed_adjoint",
    "solve_per_sample",
]
