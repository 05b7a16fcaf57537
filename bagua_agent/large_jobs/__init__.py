"""What keeps a change of membership cheap for every member when there are thousands? Whole jobs stay as they are."""
