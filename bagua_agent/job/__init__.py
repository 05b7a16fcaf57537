"""One node's part in one job: assembling it, its loop, its end."""
