"""Measurements of speed, each beside what the machine or the usual model would allow."""
