"""Curvature of a function of parameters: products, spectra, traces, directions.

Every vector is a pytree shaped and sharded like the parameters. `matvec` is always a
host callable, vector to vector, that the caller has compiled and that sums over batches
itself; nothing here knows of models, losses, files or gin.
"""

from t5x_fwdloss.curvature.estimators.hutchinson import (
    HutchinsonState as HutchinsonState,
)
from t5x_fwdloss.curvature.estimators.hutchinson import TraceEstimate as TraceEstimate
from t5x_fwdloss.curvature.estimators.hutchinson import (
    hutchinson_trace as hutchinson_trace,
)
from t5x_fwdloss.curvature.estimators.hutchpp import HutchppState as HutchppState
from t5x_fwdloss.curvature.estimators.hutchpp import hutchpp_trace as hutchpp_trace
from t5x_fwdloss.curvature.estimators.probe_sums import ProbeEstimates as ProbeEstimates
from t5x_fwdloss.curvature.estimators.probe_sums import ProbeState as ProbeState
from t5x_fwdloss.curvature.estimators.probe_sums import (
    probe_estimates as probe_estimates,
)
from t5x_fwdloss.curvature.estimators.slq import SlqState as SlqState
from t5x_fwdloss.curvature.estimators.slq import SpectralSamples as SpectralSamples
from t5x_fwdloss.curvature.estimators.slq import slq as slq
from t5x_fwdloss.curvature.estimators.slq import spectral_sum as spectral_sum
from t5x_fwdloss.curvature.estimators.smoothing import Density as Density
from t5x_fwdloss.curvature.estimators.smoothing import density as density
from t5x_fwdloss.curvature.estimators.smoothing import log_magnitudes as log_magnitudes
from t5x_fwdloss.curvature.estimators.smoothing import mass as mass
from t5x_fwdloss.curvature.estimators.smoothing import signs as signs
from t5x_fwdloss.curvature.estimators.smoothing import zero_level as zero_level
from t5x_fwdloss.curvature.estimators.xtrace import XtraceState as XtraceState
from t5x_fwdloss.curvature.estimators.xtrace import xtrace as xtrace
from t5x_fwdloss.curvature.krylov.basis import Basis as Basis
from t5x_fwdloss.curvature.krylov.conjugate_gradients import CgState as CgState
from t5x_fwdloss.curvature.krylov.conjugate_gradients import (
    conjugate_gradients as conjugate_gradients,
)
from t5x_fwdloss.curvature.krylov.eigenpairs import eigenpairs as eigenpairs
from t5x_fwdloss.curvature.krylov.eigenpairs_state import (
    EigenpairsResult as EigenpairsResult,
)
from t5x_fwdloss.curvature.krylov.eigenpairs_state import (
    EigenpairsState as EigenpairsState,
)
from t5x_fwdloss.curvature.krylov.lanczos import LanczosResult as LanczosResult
from t5x_fwdloss.curvature.krylov.lanczos import lanczos as lanczos
from t5x_fwdloss.curvature.krylov.space import Krylov as Krylov
from t5x_fwdloss.curvature.products.derivatives import (
    directional_derivative as directional_derivative,
)
from t5x_fwdloss.curvature.products.derivatives import (
    gauss_newton_product as gauss_newton_product,
)
from t5x_fwdloss.curvature.products.derivatives import gradient as gradient
from t5x_fwdloss.curvature.products.derivatives import (
    hessian_product as hessian_product,
)
from t5x_fwdloss.curvature.products.derivatives import (
    second_directional_derivative as second_directional_derivative,
)
from t5x_fwdloss.curvature.products.linearized import (
    AmortizedProduct as AmortizedProduct,
)
from t5x_fwdloss.curvature.products.linearized import (
    gauss_newton_map as gauss_newton_map,
)
from t5x_fwdloss.curvature.products.linearized import hessian_map as hessian_map
from t5x_fwdloss.curvature.vectors.directions import difference as difference
from t5x_fwdloss.curvature.vectors.directions import (
    filter_normalized as filter_normalized,
)
from t5x_fwdloss.curvature.vectors.directions import leaf_normalized as leaf_normalized
from t5x_fwdloss.curvature.vectors.directions import normalized as normalized
from t5x_fwdloss.curvature.vectors.directions import overlaps as overlaps
from t5x_fwdloss.curvature.vectors.errors import NonFiniteError as NonFiniteError
from t5x_fwdloss.curvature.vectors.groups import group_mask as group_mask
from t5x_fwdloss.curvature.vectors.groups import group_masks as group_masks
from t5x_fwdloss.curvature.vectors.groups import restrict as restrict
from t5x_fwdloss.curvature.vectors.groups import restricted as restricted
from t5x_fwdloss.curvature.vectors.packing import pack as pack
from t5x_fwdloss.curvature.vectors.packing import unpack as unpack
from t5x_fwdloss.curvature.vectors.preconditioning import (
    apply_diagonal as apply_diagonal,
)
from t5x_fwdloss.curvature.vectors.preconditioning import congruent as congruent
from t5x_fwdloss.curvature.vectors.preconditioning import (
    small_gradient_response as small_gradient_response,
)
from t5x_fwdloss.curvature.vectors.probes import probe_key as probe_key
from t5x_fwdloss.curvature.vectors.probes import random_like as random_like
from t5x_fwdloss.curvature.vectors.probes import random_stack as random_stack
from t5x_fwdloss.curvature.vectors.trees import add as add
from t5x_fwdloss.curvature.vectors.trees import as_vector as as_vector
from t5x_fwdloss.curvature.vectors.trees import axpy as axpy
from t5x_fwdloss.curvature.vectors.trees import check_finite as check_finite
from t5x_fwdloss.curvature.vectors.trees import check_like as check_like
from t5x_fwdloss.curvature.vectors.trees import dimension as dimension
from t5x_fwdloss.curvature.vectors.trees import float_part as float_part
from t5x_fwdloss.curvature.vectors.trees import inner as inner
from t5x_fwdloss.curvature.vectors.trees import leaf_path as leaf_path
from t5x_fwdloss.curvature.vectors.trees import leaf_paths as leaf_paths
from t5x_fwdloss.curvature.vectors.trees import left_out as left_out
from t5x_fwdloss.curvature.vectors.trees import norm as norm
from t5x_fwdloss.curvature.vectors.trees import scale as scale
from t5x_fwdloss.curvature.vectors.trees import stack as stack
from t5x_fwdloss.curvature.vectors.trees import unstack as unstack
from t5x_fwdloss.curvature.vectors.trees import zeros_like as zeros_like
