"""How the ranks of a job find each other. Imports `stores`, `net`, `devices` and leaves."""
