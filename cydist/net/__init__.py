"""Who may talk to whom: interfaces, secrets, handshakes. Imports leaves alone."""
