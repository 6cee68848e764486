"""Gradients measured and read by the host, as a step does it."""

from megalowbit.optim.gradients.norm import Measurement


def inspected(measure, gradients, *, count_zeros=False, **options):
    """What a step comes to know: a flag is looked into before it is believed."""
    for is_exact in (False, True):
        measured = measure(gradients, count_zeros=count_zeros, is_exact=is_exact, **options)
        facts, _ = Measurement.of(measured, has_zeros=count_zeros).read()
        if not facts.found_inf:
            break
    return facts
