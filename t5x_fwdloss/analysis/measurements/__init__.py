"""What can be measured: one dataclass of settings each, to be bound by gin."""

from t5x_fwdloss.analysis.measurements.comparison import (
    LossComparison as LossComparison,
)
from t5x_fwdloss.analysis.measurements.context import Context as Context
from t5x_fwdloss.analysis.measurements.context import Measurement as Measurement
from t5x_fwdloss.analysis.measurements.density import (
    GaussNewtonSpectralDensity as GaussNewtonSpectralDensity,
)
from t5x_fwdloss.analysis.measurements.density import (
    HessianSpectralDensity as HessianSpectralDensity,
)
from t5x_fwdloss.analysis.measurements.diagonal import (
    HessianDiagonal as HessianDiagonal,
)
from t5x_fwdloss.analysis.measurements.directions import (
    DirectionalDerivatives as DirectionalDerivatives,
)
from t5x_fwdloss.analysis.measurements.eigenpairs import (
    FisherEigenpairs as FisherEigenpairs,
)
from t5x_fwdloss.analysis.measurements.eigenpairs import (
    GaussNewtonEigenpairs as GaussNewtonEigenpairs,
)
from t5x_fwdloss.analysis.measurements.eigenpairs import (
    HessianEigenpairs as HessianEigenpairs,
)
from t5x_fwdloss.analysis.measurements.groups import (
    GaussNewtonGroupTraces as GaussNewtonGroupTraces,
)
from t5x_fwdloss.analysis.measurements.groups import (
    HessianGroupTraces as HessianGroupTraces,
)
from t5x_fwdloss.analysis.measurements.trace import (
    EmpiricalFisherTrace as EmpiricalFisherTrace,
)
from t5x_fwdloss.analysis.measurements.trace import FisherTrace as FisherTrace
from t5x_fwdloss.analysis.measurements.trace import GaussNewtonTrace as GaussNewtonTrace
from t5x_fwdloss.analysis.measurements.trace import HessianTrace as HessianTrace
from t5x_fwdloss.analysis.measurements.trace import (
    SampledFisherTrace as SampledFisherTrace,
)
