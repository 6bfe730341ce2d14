"""The backends that come with cydist. None is imported before it is asked for."""
