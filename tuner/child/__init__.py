"""The disposable child: the only process that touches a device, and the only one that a bad config can take down."""
