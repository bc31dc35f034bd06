"""The parts of a transformer, on any ``Backend``."""
