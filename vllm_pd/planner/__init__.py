"""Who prefills, who decodes, and how many: observations in, plans out (`model`, `plan`), and a loop that acts."""
