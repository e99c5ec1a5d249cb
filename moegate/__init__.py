"""What can be known and said without a device: the shared words and the shared knowledge."""
