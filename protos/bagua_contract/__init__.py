"""The contract between agent and core: messages, records, and the environment of a worker."""
