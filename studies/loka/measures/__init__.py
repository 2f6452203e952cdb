"""Measures: what the cells of the study compute. Each says in its records all that it found; studies.loka.cells says which of it the tracker shows."""
