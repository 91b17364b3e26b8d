"""The simulator: proof by seeded accident that the engine keeps its promises."""
