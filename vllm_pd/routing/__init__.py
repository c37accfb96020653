"""The pure core of routing: overlap, prediction, choice. No I/O, no clock; the router and the simulator share it."""
