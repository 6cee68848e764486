"""Detects runs that cannot continue, names the faulty rank and ends every process in time. No DeepSpeed."""
