"""Parts of a run that a configuration switches on: each declares its settings, state and facts."""
