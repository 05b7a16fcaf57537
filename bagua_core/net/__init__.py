"""Bagua-Net: NCCL's network plugin over several TCP connections. `plugin/` holds its C++ sources."""
