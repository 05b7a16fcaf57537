"""Work of equal cost for every worker in every step, where samples cost differently much."""
