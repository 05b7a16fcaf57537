"""The job's state on disk, for the day when every holder is gone."""
