"""What users call: checks arguments, and calls the group. Imports `backends`, `groups` and what is
below them."""
