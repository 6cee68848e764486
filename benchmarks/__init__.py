"""Scripts that measure speed and quality; tools/ and tests import the packages `kernels` and `first_hour`."""
