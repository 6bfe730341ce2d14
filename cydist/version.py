"""The version of cydist: the one place where it stands."""

__version__ = "0.9.0"
