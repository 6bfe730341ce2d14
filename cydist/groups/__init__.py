"""Process groups: what a backend implements, and how one is found and made. Imports `rendezvous`,
`tuning` and what is below them."""
