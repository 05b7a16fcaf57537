"""Election of the agent that writes generations, writes fenced by it, and probes of the leader."""
