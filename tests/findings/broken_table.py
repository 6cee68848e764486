"""Run broken and healthy runs, diagnose them, and print a table of what was expected and what was named.

    PYTHONPATH=.:tests:tests/launch python tests/findings/broken_table.py OUT [--seed 4321] [--only HELD_OUT]
    PYTHONPATH=.:tests:tests/launch python tests/findings/broken_table.py OUT --again

`--again` diagnoses the folders in OUT that there are, without running them.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "launch")]

import broken_runs  # noqa: E402

GROUPS = ("TUNED", "HELD_OUT", "HEALTHY", "HEALTHY_HELD_OUT")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--only", nargs="*", default=GROUPS)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    for group in options.only:
        right, cases = 0, getattr(broken_runs, group)
        for name, case in cases.items():
            folder = options.out / group / name
            if not options.again:
                broken_runs.start(case, folder, seed=options.seed)
            command = [sys.executable, "-m", "megalowbit", "diagnose", folder / "run", "--json"]
            done = subprocess.run(command, capture_output=True, text=True)
            found = json.loads(done.stdout) if done.stdout else {"first": None, "state": done.stderr}
            is_right = broken_runs.named_right(case, found)
            right += is_right
            first = found["first"]
            named = found["state"] if first is None else f"{first['name']} ({first['step']})"
            print(
                f"| {group} | {name} | {case.expected} | {named} | {'yes' if is_right else 'no'} |",
                flush=True,
            )
        print(f"{group}: {right} of {len(cases)}", flush=True)


if __name__ == "__main__":
    main()
