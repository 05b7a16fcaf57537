"""Files and ports that torchrun's users rely on: error file, file timers, health check."""
