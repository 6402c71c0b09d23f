"""One analysis run: an objective, a list of measurements, a folder of results."""

from t5x_fwdloss.analysis import measurements as measurements
from t5x_fwdloss.analysis.finite import NonFiniteLossError as NonFiniteLossError
from t5x_fwdloss.analysis.measurements import (
    DirectionalDerivatives as DirectionalDerivatives,
)
from t5x_fwdloss.analysis.measurements import HessianEigenpairs as HessianEigenpairs
from t5x_fwdloss.analysis.measurements import HessianTrace as HessianTrace
from t5x_fwdloss.analysis.objective import Objective as Objective
from t5x_fwdloss.analysis.preflight import PreflightError as PreflightError
from t5x_fwdloss.analysis.run import HostInfo as HostInfo
from t5x_fwdloss.analysis.run import run_analysis as run_analysis
