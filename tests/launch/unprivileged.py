"""Error messages for a user without root permissions, collected in a forked process."""

import os
from contextlib import suppress

NOBODY = 65534


def said_without_privileges(folder, action):
    """The message of what `action` raises as a user who owns nothing; empty if it raises nothing.

    Args:
        folder: which that user, and so everybody, may come to.
        action: makes no thread, and uses none that there was.
    """
    if os.geteuid() == 0:
        for path in (folder, *folder.parents):
            with suppress(OSError):
                path.chmod(path.stat().st_mode | (0o555 if path == folder else 0o111))
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        message = b"nothing was said"
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            message = b""
            action()
        except BaseException as error:
            message = str(error).encode()
        finally:
            os.write(writer, message)
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as file:
        return file.read().decode()
