"""cydist inside other libraries' interfaces."""
