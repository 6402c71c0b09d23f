"""The cells of the table: which measurement, of which matrix, how; and the true matrix."""

import zlib

import jax
import numpy as np

from t5x_fwdloss import analysis
from t5x_fwdloss.curvature import probes

from . import dense

SEED = 5
GROUP, DAMPING = "decoder", 0.7
LEARNING_RATE, THRESHOLD = 0.1, 38.0
VARIANTS = {
    "whole": {},
    "group": {"group": f"{GROUP}/.*"},
    "damped": {"damping": DAMPING},
    "preconditioned": {"preconditioned": True},
    "all": {"group": f"{GROUP}/.*", "damping": -DAMPING, "preconditioned": True},
}
CLASSES = {
    ("trace", "hessian"): analysis.HessianTrace,
    ("trace", "gauss_newton"): analysis.GaussNewtonTrace,
    ("trace", "fisher"): analysis.FisherTrace,
    ("trace", "sampled_fisher"): analysis.SampledFisherTrace,
    ("trace", "empirical_fisher"): analysis.EmpiricalFisherTrace,
    ("eigenpairs", "hessian"): analysis.HessianEigenpairs,
    ("eigenpairs", "gauss_newton"): analysis.GaussNewtonEigenpairs,
    ("eigenpairs", "fisher"): analysis.FisherEigenpairs,
    ("density", "hessian"): analysis.HessianSpectralDensity,
    ("density", "gauss_newton"): analysis.GaussNewtonSpectralDensity,
    ("group_traces", "hessian"): analysis.HessianGroupTraces,
    ("group_traces", "gauss_newton"): analysis.GaussNewtonGroupTraces,
    ("diagonal", "hessian"): analysis.HessianDiagonal,
}
NUM_PROBES = {"trace": 5, "group_traces": 5, "diagonal": 5, "density": 3}
NUM_STEPS, SKETCH_SIZE = 12, 3
# Relative positions that no token has leave it a null space; others have either sign.
OF_SIGNS = "decoder/relpos_bias"
TOLERANCE = 3e-4  # of eigenpairs: what float32 leaves even of the small ones


def measurement(quantity, matrix, *labels, **settings):
    """One measurement; its name in the results says which cell it is."""
    name = "-".join((quantity, matrix, *map(str, labels)))
    return CLASSES[quantity, matrix](name=name, **settings)


def matrices_of(quantity) -> list[str]:
    return [matrix for name, matrix in CLASSES if name == quantity]


def traces(matrix):
    count = NUM_PROBES["trace"]
    found = [
        measurement(
            "trace",
            matrix,
            variant,
            size,
            num_probes=count,
            block_size=size,
            confidence=0.9,
            **settings,
        )
        for variant, settings in VARIANTS.items()
        for size in (1, 4)
    ]
    for estimator in ("hutch++", "xtrace"):
        for variant in ("whole", "preconditioned"):
            found.append(
                measurement(
                    "trace",
                    matrix,
                    variant,
                    estimator.replace("+", "p"),
                    estimator=estimator,
                    num_probes=count,
                    sketch_size=SKETCH_SIZE,
                    **VARIANTS[variant],
                )
            )
    return found


def stacked(quantity, matrix):
    """Traces by group, or the diagonal: one and four vectors at once."""
    return [
        measurement(
            quantity, matrix, size, num_probes=NUM_PROBES[quantity], block_size=size
        )
        for size in (1, 4)
    ]


def eigenpairs(matrix):
    return [
        measurement(
            "eigenpairs",
            matrix,
            variant,
            num_largest=2,
            num_smallest=int(matrix == "hessian"),
            tolerance=TOLERANCE,
            save_eigenvectors=variant == "whole",
            **settings,
        )
        for variant, settings in VARIANTS.items()
    ]


def densities(matrix):
    return [
        measurement(
            "density",
            matrix,
            variant,
            num_probes=NUM_PROBES["density"],
            num_steps=NUM_STEPS,
            **settings,
        )
        for variant, settings in VARIANTS.items()
    ]


def signs(matrix):
    """The density of a block with a null space, small enough to find all of it."""
    return CLASSES["density", matrix](
        name=f"signs-{matrix}",
        num_probes=NUM_PROBES["density"],
        num_steps=NUM_STEPS,
        group=f"{OF_SIGNS}/.*",
    )


def all_of(matrix):
    """Every measurement of one matrix that has a class."""
    found = traces(matrix)
    for quantity, make in (("eigenpairs", eigenpairs), ("density", densities)):
        if (quantity, matrix) in CLASSES:
            found += make(matrix)
    if ("density", matrix) in CLASSES:
        found.append(signs(matrix))
    for quantity in ("group_traces", "diagonal"):
        if (quantity, matrix) in CLASSES:
            found += stacked(quantity, matrix)
    return found


def directions():
    """Along everything there is; after the eigenpairs whose vectors it reads."""
    return [
        analysis.DirectionalDerivatives(
            along_preconditioned_gradient=True,
            num_random=1,
            eigenvectors_of="eigenpairs-hessian-whole",
            checkpoints=("/models/other",),
            num_points=5,
        ),
        analysis.DirectionalDerivatives(
            name="leaf_directions",
            along_gradient=False,
            num_random=1,
            random_normalization="leaf",
            num_points=0,
        ),
    ]


def kept_run():
    """Every cell, with all batches linearized."""
    hessian, *others = dense.MATRICES
    found = all_of(hessian) + directions()
    return found + [x for matrix in others for x in all_of(matrix)]


def fresh_run():
    """Every matrix with one and four vectors, differentiated anew in each product."""
    found = []
    for matrix in dense.MATRICES:
        found += traces(matrix)[:2]
    return found + eigenpairs("fisher")[:1] + stacked("diagonal", "hessian")


def preconditioner_root() -> np.ndarray:
    return np.sqrt(dense.flat(dense.diagonal()))


def true_matrix(matrix: np.ndarray, variant: str) -> np.ndarray:
    """The matrix of a variant, on all parameters: zero outside of its group."""
    settings, found = VARIANTS[variant], matrix
    if settings.get("preconditioned"):
        root = preconditioner_root()
        found = root[:, None] * found * root
    found = found + settings.get("damping", 0.0) * np.eye(len(found))
    inside = in_group(variant)
    return np.where(np.outer(inside, inside), found, 0.0)


def in_group(variant: str) -> np.ndarray:
    """Which entries the variant is about."""
    return dense.group(GROUP if "group" in VARIANTS[variant] else "")


def key(purpose: str) -> jax.Array:
    """The key of a purpose: it depends on the run's seed and the purpose only."""
    root = jax.random.key(SEED, impl="threefry2x32")
    return jax.random.fold_in(root, zlib.crc32(purpose.encode()))


def draws(purpose, numbers, kind="rademacher", base=None) -> np.ndarray:
    """The probes of a measurement as columns; the same that it draws."""
    found = key(purpose)
    if base is not None:
        found = probes.probe_key(found, base)
    params = dense.parameters()
    columns = [
        probes.random_like(probes.probe_key(found, i), params, kind) for i in numbers
    ]
    return np.stack([dense.flat(column) for column in columns], axis=1)
