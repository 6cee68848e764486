"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# On a machine that is busy with other things an example takes longer than hypothesis allows.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")
