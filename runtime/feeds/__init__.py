"""`rlflowc eval`: one iteration of a program on given numbers, through the executor, with no model and no MPI."""
