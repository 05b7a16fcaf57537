"""This worker as a member of its job: session with the agent, rendezvous, entering generations."""
