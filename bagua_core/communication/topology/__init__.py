"""The topology of exchanges, which decides which ranks exchange with which: lanes, routes, hierarchies, peers."""
