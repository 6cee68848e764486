"""Which recipe breaks under which stress, and what the telemetry showed before."""
