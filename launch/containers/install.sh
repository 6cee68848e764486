#!/bin/bash
# Installs the megalowbit wheel beside this file into a container image, and keeps the torch of its base.
# Dockerfile and megalowbit.def run it. MEGALOWBIT_ALLOW_TORCH is the torch.__version__ that the base has.
set -euo pipefail
cd "$(dirname "$0")"

torch_version() { python -c 'import torch; print(torch.__version__)'; }
check_torch() { # when
    local found
    found=$(torch_version)
    if [[ $found != "$MEGALOWBIT_ALLOW_TORCH" ]]; then
        echo "torch is $found $1, not $MEGALOWBIT_ALLOW_TORCH: write the version of the base into MEGALOWBIT_ALLOW_TORCH" >&2
        exit 1
    fi
}

check_torch 'in the base'
# The base may limit packages with PIP_CONSTRAINT, for its own torch among others. The first command installs
# nothing but the wheel; for its requirements, both lists of constraints are merged.
base=${PIP_CONSTRAINT:-/dev/null}
unset PIP_CONSTRAINT
pip install --no-cache-dir --no-deps megalowbit-*.whl
python requirements.py "$base" constraints.txt requirements.txt merged.txt
pip install --no-cache-dir --constraint merged.txt --requirement requirements.txt
check_torch 'after the installation'
megalowbit --version
ln -sfn "$(python -c 'from megalowbit.shipped_files import pretrain_script as path; print(path())')" pretrain.py
