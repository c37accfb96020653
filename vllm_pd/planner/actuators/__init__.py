"""Ways to carry out what a planner decides. `choose` opens them by the names that the settings give them."""
