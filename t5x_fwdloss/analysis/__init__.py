"""One analysis run: an objective, a list of measurements, a folder of results."""

from t5x_fwdloss.analysis.measurements.along.directions import (
    DirectionalDerivatives as DirectionalDerivatives,
)
from t5x_fwdloss.analysis.measurements.along.landscape import Landscape as Landscape
from t5x_fwdloss.analysis.measurements.comparison import (
    LossComparison as LossComparison,
)
from t5x_fwdloss.analysis.measurements.context import SAVE_SECONDS as SAVE_SECONDS
from t5x_fwdloss.analysis.measurements.noise_scale import (
    GradientNoiseScale as GradientNoiseScale,
)
from t5x_fwdloss.analysis.measurements.of_matrix.density import (
    SpectralDensity as SpectralDensity,
)
from t5x_fwdloss.analysis.measurements.of_matrix.diagonal import Diagonal as Diagonal
from t5x_fwdloss.analysis.measurements.of_matrix.eigenpairs import (
    Eigenpairs as Eigenpairs,
)
from t5x_fwdloss.analysis.measurements.of_matrix.group_densities import (
    GroupDensities as GroupDensities,
)
from t5x_fwdloss.analysis.measurements.of_matrix.groups import (
    GroupTraces as GroupTraces,
)
from t5x_fwdloss.analysis.measurements.of_matrix.newton_step import (
    NewtonStep as NewtonStep,
)
from t5x_fwdloss.analysis.measurements.of_matrix.trace import Trace as Trace
from t5x_fwdloss.analysis.objective.finite import (
    NonFiniteLossError as NonFiniteLossError,
)
from t5x_fwdloss.analysis.objective.function import Objective as Objective
from t5x_fwdloss.analysis.objective.preflight import PreflightError as PreflightError
from t5x_fwdloss.analysis.objective.sum_over_batches import Precision as Precision
from t5x_fwdloss.analysis.report.comparison.records import records as records
from t5x_fwdloss.analysis.run import HostInfo as HostInfo
from t5x_fwdloss.analysis.run import run_analysis as run_analysis
from t5x_fwdloss.analysis.sweep.one_or_all import run_one_or_all as run_one_or_all
from t5x_fwdloss.analysis.sweep.sweep import run_sweep as run_sweep
