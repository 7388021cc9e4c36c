"""Plans for people: why something is where it is, what it took beside what was estimated, how two plans differ."""
