"""Connections and their authentication: interfaces, secrets, handshakes."""
