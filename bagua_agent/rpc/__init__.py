"""The agent's two services: the session with its workers, and probes between agents."""
