"""From checked programs to verified plans. Needs no torch."""
