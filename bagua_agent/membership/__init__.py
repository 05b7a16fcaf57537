"""The leader's decisions as pure functions: who is in, in which ranks, and when the job is over."""
