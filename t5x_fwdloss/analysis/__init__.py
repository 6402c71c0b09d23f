"""One analysis run: an objective, a list of measurements, a folder of results."""

from t5x_fwdloss.analysis.objective import Objective

__all__ = ["Objective"]
