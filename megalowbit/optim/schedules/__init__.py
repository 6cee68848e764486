"""Learning-rate schedules: what share of its rate each step trains with, and what sets the rates."""
