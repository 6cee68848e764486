"""Telemetry records: overflow counters per layer and role, facts of a step, sinks, console and summary."""
