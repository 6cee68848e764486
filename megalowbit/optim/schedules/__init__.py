"""Learning-rate schedules: the factor of each step, and the scheduler that writes learning rates."""
