"""A page in the browser that shows a job: what happens, why, and what to do next. Read-only."""
