"""The order of device work: which stream produced a buffer, which consumes it, and host waits."""
