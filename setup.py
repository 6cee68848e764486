"""Package metadata and dependencies; constraints.txt has the exact versions of pinned ones."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
# Files beside the package that users need without a checkout. megalowbit/shipped_files.py finds them.
SHIPPED = (
    "configs/**/*.json",
    "launch/pretrain.py",
    "launch/slurm/*.sbatch",
    "launch/slurm/*.sh",
    "tools/study.py",
)


def version() -> str:
    """`megalowbit.__version__`, read without importing the package."""
    text = (HERE / "megalowbit" / "__init__.py").read_text(encoding="utf-8")
    [found] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return found


def shipped_files() -> list[Path]:
    """The files of `SHIPPED`, relative to this folder."""
    return [path.relative_to(HERE) for pattern in SHIPPED for path in sorted(HERE.glob(pattern))]


class BuildWithShippedFiles(build_py):
    """Copies these files to `megalowbit/shipped/`; an editable install finds them where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "megalowbit" / "shipped"
        shutil.rmtree(target, ignore_errors=True)  # build/ may have files of an earlier build
        for path in shipped_files():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(HERE / path, target / path)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        target = Path(self.build_lib) / "megalowbit" / "shipped"
        return [*super().get_outputs(include_bytecode), *(str(target / path) for path in shipped_files())]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *map(str, shipped_files())]  # for a source distribution


setup(
    name="megalowbit",
    version=version(),
    description="Pretrain language models in FP4 with DeepSpeed",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    cmdclass={"build_py": BuildWithShippedFiles},
    packages=find_packages(include=["megalowbit", "megalowbit.*"]),
    package_data={
        "megalowbit": [
            "py.typed",
            "layers/recipe.json",
            "report/drawing/live.js",
            "report/drawing/style.css",
            "quantize/cpu/*.c",
            "quantize/cpu/*.h",
            "optim/kernels/*.c",
        ]
    },
    entry_points={"console_scripts": ["megalowbit=megalowbit.commands.table:start"]},
    python_requires=">=3.10,<3.13",
    install_requires=[
        "torch==2.13.0",
        "deepspeed==0.19.8",  # its internal interfaces are used: see docs/architecture.md
        "transformers>=5.20,<6",
        "datasets>=4.0",
        "tokenizers>=0.22",
        "safetensors>=0.5",
        "pyarrow>=18",
        "numpy>=1.26",
        "pydantic>=2.8,<3",
        "rich>=13",
        "tensorboard>=2.18",
        "setuptools",  # deepspeed and triton import it at run time; Python 3.12 environments lack it
    ],
    extras_require={
        # Triton's interpreter tests the GPU kernels on machines without a GPU. Neither this file nor
        # constraints.txt pins its version, because torch's CUDA builds depend on a specific one.
        "test": [
            "pytest>=9",
            "compressed-tensors==0.20.0; python_version>='3.11'",  # transformers reads packed exports with it
            "peft>=0.21",  # LoRA on converted models
            "accelerate>=1.1",  # transformers' Trainer, which tests train with, needs it
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.14",
            "triton>=3.4; sys_platform=='linux'",
            "matplotlib>=3.9",  # same version as in "plots": tests draw pictures
            "shtab>=1.7",  # as in "completion"
            "wandb>=0.19",  # as in "wandb"
            "pyte>=0.8.2",  # a terminal emulator: what a person sees of the dashboard
        ],
        "docs": ["sphinx>=8.1", "myst-parser>=4", "furo>=2025.9"],  # `make docs`; a test builds the site
        "plots": ["matplotlib>=3.9"],
        "completion": ["shtab>=1.7"],
        "wandb": ["wandb>=0.19"],
        "trackio": ["trackio>=0.43,<0.44"],  # an attribute of its runs is read: sinks/trackio.py
        "bench": ["torchao==0.18.0"],
    },
)
