"""What only existing scripts import by name; ``smdistributed`` has those names."""
