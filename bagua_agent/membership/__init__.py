"""The leader's decisions as pure functions: members, ranks, and the end of the job."""
