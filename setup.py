"""Packaging: what is installed, and what each dependency is for."""
import sys
from pathlib import Path

from setuptools import find_packages, setup

sys.path.insert(0, str(Path(__file__).parent))  # builds run without it

import cssl  # noqa: E402
from cssl.tools import TOOLS  # noqa: E402

# Every method and every tool is a command: `cssl`, `cssl-fixmatch`, `cssl-mean-teacher`, …, `cssl-data`, …
METHODS = ["cssl" if name == "cssl" else f"cssl-{name.replace('_', '-')}" for name in sorted(cssl.methods().values())]

setup(
    name="cssl",
    version=cssl.__version__,
    description="Credal self-supervised learning and its relatives in TensorFlow 2 / Keras 3",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["cssl", "cssl.*", "libml", "libml.*"]),
    python_requires=">=3.11",
    package_data={"cssl": ["py.typed", "*.pyi"], "cssl.tools": ["*.css", "*.npz", "*.sbatch", "*.sh"],
                  "libml": ["py.typed"], "libml.augment": ["*.json"], "libml.labelling": ["*.html"],
                  "libml.results": ["*.json"]},
    entry_points={"console_scripts": [*(f"{command} = cssl.cli:console" for command in METHODS),
                                      *(f"cssl-{tool} = cssl.tools:console" for tool in TOOLS)]},
    install_requires=[
        "absl-py>=2.0",  # the flags users of FixMatch know
        "importlib_resources",  # tensorflow-datasets needs it and does not declare it
        "keras>=3.10",  # networks and the model class
        "matplotlib>=3.8",  # contact sheets, plots, the report page
        "numpy>=1.26",  # splits, evaluation, calibration
        "pillow>=9.5",  # image files; the definition of every augmentation
        "protobuf>=6.31.1",  # tensorflow-metadata needs it and does not declare it
        "scikit-learn>=1.4",  # the embedded handwritten digits
        "scipy>=1.10",  # quantiles: of the Beta distribution for mixing weights, of Student's t
        "tensorboard>=2.20",  # event files: written by TensorFlow, read where metrics.jsonl is damaged
        "tensorflow>=2.20",  # everything that is computed
        "tensorflow-datasets>=4.9.7",  # CIFAR, SVHN, STL-10, Fashion-MNIST
        "tqdm>=4.60",  # progress bars
        "typing_extensions>=4.6",  # tells type checkers that options are dataclasses
    ],
    extras_require={
        "gpu": ["tensorflow[and-cuda]>=2.20"],  # CUDA's libraries, NCCL, ptxas and libdevice for NVIDIA's cards
        "docs": ["mkdocs>=1.6,<2", "mkdocstrings[python]>=0.27", "pygments>=2.17"],  # the site: mkdocs.yml
        # the suite, its property tests, its lint check, its type check, several cores for it, a browser for the page
        "test": ["pytest>=8", "hypothesis>=6", "ruff>=0.6", "mypy>=1.10", "pytest-xdist>=3.5", "selenium>=4.20"],
    },
)
