"""What an agent measures of its job, for Prometheus."""
