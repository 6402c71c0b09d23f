"""The measurements: one dataclass of settings each, to be bound by gin."""

from t5x_fwdloss.analysis.measurements.context import Context as Context
from t5x_fwdloss.analysis.measurements.context import Measurement as Measurement
