"""`rlflowc explain --format html`: one file with everything there is to say of a plan, for a browser or for paper."""
