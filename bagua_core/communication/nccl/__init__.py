"""The communicator over NCCL, through CuPy."""
