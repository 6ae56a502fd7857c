"""CB2O on R^d: the optimiser, its adversaries and its theory.

García Trillos et al., arXiv 2412.02535, Sections 1 and 2.

Example:
    >>> circle = problem("circle")
    >>> result = minimize(circle.lower, circle.upper, circle.dim, maxiter=500)
    >>> [round(abs(coordinate), 6) for coordinate in result.x.tolist()]
    [1.0, 0.0]
"""

from fedcb2o.particles._adaptive import Adaptive
from fedcb2o.particles._minimize import minimize
from fedcb2o.particles._paper import Paper
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.particles.dynamics import Objective
from fedcb2o.particles.functions import from_numpy, from_point
from fedcb2o.particles.objectives import Problem, problem, problems
from fedcb2o.particles.result import Result, State
from fedcb2o.particles.scipy_method import cb2o
from fedcb2o.particles.search import Search
from fedcb2o.particles.theory import CaptureWarning

__all__ = [
    "Adaptive",
    "Adversary",
    "CaptureWarning",
    "Objective",
    "Paper",
    "Problem",
    "Result",
    "Search",
    "State",
    "cb2o",
    "from_numpy",
    "from_point",
    "minimize",
    "problem",
    "problems",
]
