"""What users call: checks the arguments, then calls the group."""
