"""Serving what was tuned: engines, a load client and a small engine of our own."""
