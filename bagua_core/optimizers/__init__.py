"""Provides the gate at optimizer.step(): closures, and checks of what the script does."""
