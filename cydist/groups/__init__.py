"""Process groups: what a backend implements, and how groups are found and made."""
