"""Parts for existing scripts alone: of ``smdistributed``, and of transformers before 4.27."""
