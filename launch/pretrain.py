#!/usr/bin/env python
"""Start pretraining: `deepspeed launch/pretrain.py --ds-config configs/gpt2_tiny_fp4.json`.

Also works with torchrun, srun and plain python. The code is in `megalowbit.pretrain.command_line`.
"""

import sys

from megalowbit.pretrain.command_line import program

if __name__ == "__main__":
    sys.exit(program())
