"""What this host offers (discovery), who holds which device (leases), and where a launch runs (isolation, ray)."""
