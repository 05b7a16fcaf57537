"""Units that run one job on one node: systemd services or plain processes."""
