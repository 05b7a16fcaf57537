"""Which ranks exchange with which: lanes, routes, hierarchies, peers."""
