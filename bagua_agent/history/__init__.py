"""What has happened to a job, for people: records, who writes them, and how."""
