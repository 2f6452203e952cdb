"""Report: what claims find in the rows (findings), and the tables and figures that show them (exhibits)."""
