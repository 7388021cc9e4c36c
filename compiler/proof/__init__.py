"""What proves a plan before anything starts. `verify` is the way in; the other rooms each prove one kind of thing."""
