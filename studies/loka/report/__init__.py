"""Report: what claims find in the rows (findings), and the tables, figures and matrices that show them (exhibits)."""
