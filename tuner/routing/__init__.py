"""Routings to tune under: made up (uniform or skewed, seeded) or recorded from a served model."""
