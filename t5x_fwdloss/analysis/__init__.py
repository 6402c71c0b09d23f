"""One analysis run: an objective, a list of measurements, a folder of results."""

from t5x_fwdloss.analysis import measurements as measurements
from t5x_fwdloss.analysis.measurements import (
    DirectionalDerivatives as DirectionalDerivatives,
)
from t5x_fwdloss.analysis.measurements import (
    EmpiricalFisherTrace as EmpiricalFisherTrace,
)
from t5x_fwdloss.analysis.measurements import FisherEigenpairs as FisherEigenpairs
from t5x_fwdloss.analysis.measurements import FisherTrace as FisherTrace
from t5x_fwdloss.analysis.measurements import (
    GaussNewtonEigenpairs as GaussNewtonEigenpairs,
)
from t5x_fwdloss.analysis.measurements import (
    GaussNewtonGroupTraces as GaussNewtonGroupTraces,
)
from t5x_fwdloss.analysis.measurements import (
    GaussNewtonSpectralDensity as GaussNewtonSpectralDensity,
)
from t5x_fwdloss.analysis.measurements import GaussNewtonTrace as GaussNewtonTrace
from t5x_fwdloss.analysis.measurements import HessianDiagonal as HessianDiagonal
from t5x_fwdloss.analysis.measurements import HessianEigenpairs as HessianEigenpairs
from t5x_fwdloss.analysis.measurements import HessianGroupTraces as HessianGroupTraces
from t5x_fwdloss.analysis.measurements import (
    HessianSpectralDensity as HessianSpectralDensity,
)
from t5x_fwdloss.analysis.measurements import HessianTrace as HessianTrace
from t5x_fwdloss.analysis.measurements import LossComparison as LossComparison
from t5x_fwdloss.analysis.measurements import SampledFisherTrace as SampledFisherTrace
from t5x_fwdloss.analysis.objective.finite import (
    NonFiniteLossError as NonFiniteLossError,
)
from t5x_fwdloss.analysis.objective.function import Objective as Objective
from t5x_fwdloss.analysis.objective.function import Precision as Precision
from t5x_fwdloss.analysis.objective.preflight import PreflightError as PreflightError
from t5x_fwdloss.analysis.run import HostInfo as HostInfo
from t5x_fwdloss.analysis.run import run_analysis as run_analysis
