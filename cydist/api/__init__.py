"""The public functions: they check their arguments, then call the group."""
