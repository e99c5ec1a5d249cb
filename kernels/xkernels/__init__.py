"""What runs on a device (x = cross-device): the live-device module and the operators."""
