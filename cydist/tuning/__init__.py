"""Which algorithm runs: the table as shipped, and one machine's file. Imports `stores`, `net` and
leaves."""
