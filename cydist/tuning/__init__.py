"""The choice of algorithms: the shipped table, and one machine's file. Imports `stores`, `net` and
leaves."""
