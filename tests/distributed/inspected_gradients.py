"""Gradients measured and read by the host, as a step does it."""

from megalowbit.optim.gradients.norm import measure_gradients


def inspected(gradients, **options):
    """The facts of a step, whose flag is read on the host."""
    for is_exact in (False, True):
        facts, _ = measure_gradients(gradients, is_exact=is_exact, **options).read()
        if not facts.found_inf:
            break
    return facts
