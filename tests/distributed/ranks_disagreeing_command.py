"""The command line of pretraining with another seed on each rank; see test_run_checks.py."""

import os
import sys

from megalowbit.pretrain.command_line import main

seed = f"megalowbit.run.seed={os.environ['RANK']}"
sys.exit(main(["--ds-config", sys.argv[1], "--run-dir", "run", "--set", seed]))
