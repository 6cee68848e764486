"""Without a watchdog a lost rank is also reported on one line; other errors are not."""

import re


def test_a_failed_collective_outside_the_watchdog_is_a_one_line_error(launch_ranks):
    seen, _ = launch_ranks("ranks_lost.py", is_compared=False).wait(timeout=90)
    assert seen["defect"] == ["RuntimeError", "odd"]
    assert seen["mistake"] == ["UserError", "mend it"]
    kind, line = seen["lost"]
    assert kind == "TransientError"
    assert re.match(
        r"rank 0 has lost another rank in all_reduce \(.*\), at the start or end of the run: ", line
    )
