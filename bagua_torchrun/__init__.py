"""A rendezvous backend of torchrun on etcd's v3 API: `torchrun --rdzv-backend bagua-etcd`.

torch keeps its state machine of a rendezvous; this package keeps that machine's state and the agents' store in etcd. It
uses the agent's etcd client and nothing else of Bagua. torch finds it by the entry point group `torchrun.handlers`.
"""
