"""What holds for all tests."""

import signal

# Whoever starts the tests in a shell's background has them ignore SIGINT, and all that they start would do so too.
signal.signal(signal.SIGINT, signal.default_int_handler)
