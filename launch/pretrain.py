#!/usr/bin/env python
"""Start pretraining: `deepspeed launch/pretrain.py --ds-config configs/gpt2_tiny_fp4.json`.

Also under torchrun, srun and plain python; everything is in `megalowbit.pretrain.command_line`.
"""

import sys

from megalowbit.pretrain.command_line import program

if __name__ == "__main__":
    sys.exit(program())
