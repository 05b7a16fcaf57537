"""Lets Bagua and torch's default process group live in one process, to compare steps where nobody joins or leaves.

Import it first. For a script that trains this is an error, since nobody would renew torch's group after a change.
"""

from bagua_core.elastic.script_collectives import default_group

default_group.is_made = lambda: False
