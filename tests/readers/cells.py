"""The cells of the table: which measurement, of which matrix, how; and the true matrix."""

import zlib

import jax
import numpy as np
import pytest

from t5x_fwdloss import analysis
from t5x_fwdloss.curvature.vectors import probes

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
QUANTITIES = {
    "trace": analysis.Trace,
    "eigenpairs": analysis.Eigenpairs,
    "density": analysis.SpectralDensity,
    "group_traces": analysis.GroupTraces,
    "diagonal": analysis.Diagonal,
}
# The matrices of which a quantity is measured in all variants, and by fresh products;
# of the others in few: what differs between matrices is the product, tested in traces.
IN_FULL = {
    "trace": dense.MATRICES,
    "eigenpairs": ("hessian", "gauss_newton", "fisher"),
    "density": ("hessian", "gauss_newton"),
    "group_traces": ("hessian", "gauss_newton"),
    "diagonal": ("hessian",),
}
NUM_PROBES = {"trace": 5, "group_traces": 5, "diagonal": 5, "density": 3}
NUM_STEPS, SKETCH_SIZE = 12, 3
CONFIDENCE = 0.9  # of what is not left at the default
SIZES = (1, 4)  # of stacks of vectors
# Plain, and all settings at once.
FEW_VARIANTS = ("whole", "all")
# Relative positions that no token has leave it a null space; others have either sign.
OF_SIGNS = "decoder/relpos_bias"
# The sampled Fisher matrix has an eigenvalue there that rounding may take for zero.
WITH_SIGNS = ("hessian", "gauss_newton", "fisher", "empirical_fisher")
TOLERANCE = 3e-4  # of eigenpairs: what float32 leaves even of the small ones
# Added to the Hessian, it leaves a small negative eigenvalue below a large spectrum.
SHIFT, TOLERANCE_OF_SHIFTED = 49.0, 0.05
# Of the densities of matrices without negative eigenvalues.
DAMPINGS = (0.03, 2.0)
# Above minus the smallest eigenvalue of the Hessian, for Newton steps.
NEWTON_DAMPING = {"hessian": 75.0, "gauss_newton": 0.7}
NEWTON_VARIANTS = ("whole", "group", "preconditioned")
# Pairs wanted at each end of the block with a null space, which the asked places reach.
ENDS = {"hessian": (6, 2), "gauss_newton": (1, 3)}


def measurement(quantity, matrix, *labels, **settings):
    """One measurement; its name in the results says which cell it is."""
    name = "-".join((quantity, matrix, *map(str, labels)))
    return QUANTITIES[quantity](name=name, matrix=matrix, **settings)


def traces(matrix, variants, sizes):
    count = NUM_PROBES["trace"]
    found = [
        measurement(
            "trace",
            matrix,
            variant,
            size,
            num_probes=count,
            block_size=size,
            confidence=CONFIDENCE,
            **VARIANTS[variant],
        )
        for variant in variants
        for size in sizes
    ]
    for estimator in ("hutch++", "xtrace"):
        for variant in variants:
            for size in sizes if variant == "whole" else (4,):
                found.append(
                    measurement(
                        "trace",
                        matrix,
                        variant,
                        size,
                        estimator.replace("+", "p"),
                        estimator=estimator,
                        num_probes=count,
                        block_size=size,
                        sketch_size=SKETCH_SIZE,
                        **VARIANTS[variant],
                    )
                )
    return found


def stacked(quantity, matrix, variants, sizes):
    """Traces by group, or the diagonal: whole in stacks of these sizes."""
    return [
        measurement(
            quantity,
            matrix,
            variant,
            size,
            num_probes=NUM_PROBES[quantity],
            block_size=size,
            **VARIANTS[variant],
        )
        for variant in variants
        for size in (sizes if variant == "whole" else SIZES[1:])
    ]


def group_traces(matrix, variants, sizes):
    """Traces by layer, and those of one group that is given."""
    given = measurement(
        "group_traces",
        matrix,
        "whole",
        4,
        "given",
        groups={GROUP: f"{GROUP}/.*"},
        confidence=CONFIDENCE,
        num_probes=NUM_PROBES["group_traces"],
        block_size=4,
    )
    found = stacked("group_traces", matrix, variants, sizes)
    return [*found, *[given] * (sizes == SIZES)]


def diagonals(matrix, variants, sizes):
    return stacked("diagonal", matrix, variants, sizes)


def eigenpairs(matrix, variants, _):
    return [
        measurement(
            "eigenpairs",
            matrix,
            variant,
            num_largest=2,
            num_smallest=int(matrix == "hessian"),
            tolerance=TOLERANCE,
            save_eigenvectors=variant == "whole",
            **VARIANTS[variant],
        )
        for variant in variants
    ]


def densities(matrix, variants, _):
    return [
        measurement(
            "density",
            matrix,
            variant,
            num_probes=NUM_PROBES["density"],
            num_steps=NUM_STEPS,
            effective_dimension_at=() if matrix == "hessian" else DAMPINGS,
            **VARIANTS[variant],
        )
        for variant in variants
    ]


def signs(matrix):
    """The density of a block with a null space, small enough to find all of it."""
    return analysis.SpectralDensity(
        name=f"signs-{matrix}",
        matrix=matrix,
        num_probes=NUM_PROBES["density"],
        num_steps=NUM_STEPS,
        group=f"{OF_SIGNS}/.*",
    )


def ends(matrix):
    """The ends of spectra with small eigenvalues, and with one that occurs often."""
    largest, smallest = ENDS[matrix]
    found = [
        analysis.Eigenpairs(
            name=f"null_space-{matrix}",
            matrix=matrix,
            num_largest=largest,
            num_smallest=smallest,
            group=f"{OF_SIGNS}/.*",
        )
    ]
    if matrix == "hessian":
        found.append(
            analysis.Eigenpairs(
                name="shifted",
                num_largest=0,
                num_smallest=1,
                tolerance=TOLERANCE_OF_SHIFTED,
                damping=SHIFT,
            )
        )
    return found


def newton_steps(matrix):
    """Damped Newton steps, by layer or of one group; one of them is not finished."""
    found = [
        analysis.NewtonStep(
            name=f"newton_step-{matrix}-{variant}",
            matrix=matrix,
            tolerance=1e-4,
            max_steps=200,
            **VARIANTS[variant] | {"damping": NEWTON_DAMPING[matrix]},
        )
        for variant in NEWTON_VARIANTS
    ]
    if matrix == "hessian":
        small = {"damping": 1.0, "groups": {}}
        found.append(analysis.NewtonStep(name="newton_step_of_negative", **small))
    return found


def group_densities():
    """By layer, of two matrices; with another width, of two groups inside of one."""
    few = {"num_probes": 3, "num_steps": NUM_STEPS}
    return [
        analysis.GroupDensities(name="group_densities-hessian", **few),
        analysis.GroupDensities(
            name="group_densities-gauss_newton",
            matrix="gauss_newton",
            group="decoder/.*",
            groups={"norms": ".*norm/scale", "attention": ".*attention/.*"},
            width=0.5,
            preconditioned=True,
            **few,
        ),
    ]


MAKE = {
    "trace": traces,
    "eigenpairs": eigenpairs,
    "density": densities,
    "group_traces": group_traces,
    "diagonal": diagonals,
}


def all_of(matrix, *, fresh=False):
    """The measurements of one matrix; those that are not in full are not made fresh."""
    found = []
    for quantity, make in MAKE.items():
        full = matrix in IN_FULL[quantity]
        if full or not fresh:
            variants = VARIANTS if full and not fresh else FEW_VARIANTS
            found += make(matrix, variants, SIZES if full else SIZES[1:])
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
    found = []
    for matrix in dense.MATRICES:
        found += all_of(matrix)
        if matrix in WITH_SIGNS:
            found.append(signs(matrix))
        if matrix in ENDS:
            found += ends(matrix)
        if matrix in NEWTON_DAMPING:
            found += newton_steps(matrix)
        if matrix == "hessian":
            found += directions() + group_densities()
    return found


def fresh_run():
    """Every quantity, plain and with all settings, each product differentiated anew."""
    return [x for matrix in dense.MATRICES for x in all_of(matrix, fresh=True)]


NAMES_OF_DENSITIES = [
    cell.name for cell in kept_run() if cell.name.startswith("density-")
]


def table(quantity, *labels):
    """Parametrizes a test over the cells of a quantity, in each run that has them.

    Args:
        quantity: its name in `QUANTITIES`.
        *labels: those of the cells that are wanted; all where there are none.
    """
    runs = {"kept": kept_run(), "fresh": fresh_run()}
    pairs = [
        (run, cell.name)
        for run, measured in runs.items()
        for cell in measured
        if cell.name.startswith(f"{quantity}-")
        and labels in ((), tuple(parts(cell.name)[2]))
    ]
    return pytest.mark.parametrize(("run", "name"), pairs, indirect=["run"])


def parts(name):
    """Quantity, matrix and the further labels of a cell."""
    quantity, matrix, *labels = name.split("-")
    return quantity, matrix, labels


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
