"""Parts for existing scripts alone; ``smdistributed`` has their names."""
