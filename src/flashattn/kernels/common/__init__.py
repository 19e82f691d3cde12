"""Mathematics and indexing shared, unchanged, by more than one kernel."""
