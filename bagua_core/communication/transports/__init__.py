"""The transports: communicators over Gloo, in one process, and staged through host memory; the choice among
transports."""
