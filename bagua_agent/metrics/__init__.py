"""The metrics of jobs and daemons, for Prometheus and OpenTelemetry."""
