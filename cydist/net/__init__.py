"""Who may connect: interfaces, secrets, handshakes."""
