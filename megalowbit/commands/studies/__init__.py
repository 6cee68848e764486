"""Commands that train several short runs to choose a setting."""
