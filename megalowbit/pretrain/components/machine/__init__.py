"""Components that measure the machine: speed, memory, differences between ranks."""
