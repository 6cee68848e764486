"""What `cached_file` calls to build a file."""


class Builder:
    """Writes the same bytes at each call, and counts the calls."""

    def __init__(self, content=b"tokens" * 100):
        self.content = content
        self.calls = 0

    def __call__(self, path):
        self.calls += 1
        path.write_bytes(self.content)
