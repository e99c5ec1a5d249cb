"""The tuner: which config makes a kernel fast, found, checked and written down for the lookup that will serve it."""
