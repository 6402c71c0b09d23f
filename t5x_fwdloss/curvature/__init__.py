"""Curvature of a function of parameters: products, spectra, traces, directions.

Every vector is a pytree shaped and sharded like the parameters. `matvec` is always a
host callable, vector to vector, that the caller has compiled and that sums over batches
itself; nothing here knows of models, losses, files or gin.
"""

from t5x_fwdloss.curvature.basis import Basis as Basis
from t5x_fwdloss.curvature.eigenpairs import EigenpairsResult as EigenpairsResult
from t5x_fwdloss.curvature.eigenpairs import EigenpairsState as EigenpairsState
from t5x_fwdloss.curvature.eigenpairs import eigenpairs as eigenpairs
from t5x_fwdloss.curvature.errors import NonFiniteError as NonFiniteError
from t5x_fwdloss.curvature.hutchinson import TraceEstimate as TraceEstimate
from t5x_fwdloss.curvature.hutchinson import hutchinson_trace as hutchinson_trace
from t5x_fwdloss.curvature.krylov import Krylov as Krylov
from t5x_fwdloss.curvature.lanczos import LanczosResult as LanczosResult
from t5x_fwdloss.curvature.lanczos import lanczos as lanczos
from t5x_fwdloss.curvature.probes import probe_key as probe_key
from t5x_fwdloss.curvature.probes import random_like as random_like
from t5x_fwdloss.curvature.probes import random_stack as random_stack
from t5x_fwdloss.curvature.products import (
    directional_derivative as directional_derivative,
)
from t5x_fwdloss.curvature.products import gauss_newton_product as gauss_newton_product
from t5x_fwdloss.curvature.products import gradient as gradient
from t5x_fwdloss.curvature.products import hessian_product as hessian_product
from t5x_fwdloss.curvature.products import jacobian_product as jacobian_product
from t5x_fwdloss.curvature.products import (
    jacobian_transpose_product as jacobian_transpose_product,
)
from t5x_fwdloss.curvature.trees import add as add
from t5x_fwdloss.curvature.trees import as_vector as as_vector
from t5x_fwdloss.curvature.trees import axpy as axpy
from t5x_fwdloss.curvature.trees import check_finite as check_finite
from t5x_fwdloss.curvature.trees import check_like as check_like
from t5x_fwdloss.curvature.trees import combine as combine
from t5x_fwdloss.curvature.trees import dimension as dimension
from t5x_fwdloss.curvature.trees import float_part as float_part
from t5x_fwdloss.curvature.trees import inner as inner
from t5x_fwdloss.curvature.trees import leaf_path as leaf_path
from t5x_fwdloss.curvature.trees import leaf_paths as leaf_paths
from t5x_fwdloss.curvature.trees import left_out as left_out
from t5x_fwdloss.curvature.trees import norm as norm
from t5x_fwdloss.curvature.trees import scale as scale
from t5x_fwdloss.curvature.trees import stack as stack
from t5x_fwdloss.curvature.trees import unstack as unstack
from t5x_fwdloss.curvature.trees import zeros_like as zeros_like
